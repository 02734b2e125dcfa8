// Checksums of the parts of an image (blocks of the pool, parts of a state slot). Twin: gpu_worker/device/card_checksum.py.
//
// checksum: sums[part] += the sum mod 2^64 over the part's 8-byte words, i = 0, 1, ..., of mix64(word ^ mix64(seed + i * golden)).
// A sum has no order, so it does not matter how the words are shared out. The seed's place in the inner hash makes the same
// bytes of another owner, position or part another sum, and words that change places too. Bytes behind the last whole word
// are a word filled up with zeros.
//
//   base     address that the offsets count from
//   offsets  i64 [parts]  bytes, 16-byte aligned with the base
//   nbytes   int [parts]
//   seeds    u64 [parts]
//   sums     u64 [parts]  zero before
//
// Launch: grid (parts, k) x 256, k blocks share a part; no shared memory but 64 bytes. 45 registers, 56 on sm_100.
// Floor: the bytes of the parts, read once; beside them about 30 integer operations a word.
#include "common.cuh"

__device__ __forceinline__ u64 word_hash(u64 word, u64 seed, i64 index) { return mix64(word ^ mix64(seed + (u64)index * GOLDEN)); }

extern "C" __global__ void __launch_bounds__(256, 2)
    checksum(u64* sums, const unsigned char* base, const i64* offsets, const int* nbytes, const u64* seeds, int parts) {
  __shared__ u64 of_warp[8];
  const int part = blockIdx.x;
  if (part >= parts) return;
  const unsigned char* bytes = base + offsets[part];
  const int size = nbytes[part], pairs = size / 16;
  const u64 seed = seeds[part];
  const ulonglong2* words = reinterpret_cast<const ulonglong2*>(bytes);
  u64 sum = 0;
#pragma unroll 4
  for (int i = blockIdx.y * 256 + threadIdx.x; i < pairs; i += gridDim.y * 256) {
    const ulonglong2 two = words[i];
    sum += word_hash(two.x, seed, 2 * (i64)i) + word_hash(two.y, seed, 2 * (i64)i + 1);
  }
  if (blockIdx.y == 0 && threadIdx.x == 0)
    for (int at = pairs * 16; at < size; at += 8) {  // what is left: at most 15 bytes
      u64 word = 0;
      for (int i = 0; i < 8 && at + i < size; ++i) word |= (u64)bytes[at + i] << 8 * i;
      sum += word_hash(word, seed, at / 8);
    }
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(FULL, sum, o);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; ++w) sum += of_warp[w];
    atomicAdd(&sums[part], sum);
  }
}
KERNEL_EXPORT(checksum)
