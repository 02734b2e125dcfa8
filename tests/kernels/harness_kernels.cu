// Small kernels that test the harness itself: what it computes, and the mistakes it must name.
#include "common.cuh"

// c [16, 8] = a [16, 16] b [8, 16]^T through shared memory, cp.async, ldmatrix and mma; one warp. The stages can be left out.
extern "C" __global__ void __launch_bounds__(32) product(float* c, const bf16* a, const bf16* b, int wait, int sync) {
  __shared__ __align__(16) bf16 s[24 * 16];
  const int lane = threadIdx.x;
  for (int i = lane; i < 48; i += 32) copy16_async(s + i * 8, i < 32 ? a + i * 8 : b + (i - 32) * 8, true);
  copies_commit();
  if (wait) copies_wait<0>();
  if (sync) __syncwarp();
  unsigned fa[4], fb[4];
  load_matrices(fa, s + ((lane & 7) + (lane >> 3 & 1) * 8) * 16 + (lane >> 4) * 8);
  load_matrices(fb, s + (16 + (lane & 7)) * 16 + (lane >> 3 & 1) * 8);
  float acc[4] = {0.f, 0.f, 0.f, 0.f};
  mma_16816(acc, fa, fb);
  for (int r = 0; r < 4; ++r) c[((lane >> 2) + (r >> 1) * 8) * 8 + 2 * (lane & 3) + (r & 1)] = acc[r];
}
KERNEL_EXPORT(product)

// t [8, 8] = the transpose of m [8, 8], by ldmatrix; one warp.
extern "C" __global__ void __launch_bounds__(32) transpose(bf16* t, const bf16* m) {
  __shared__ __align__(16) bf16 s[32 * 8];
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) s[lane * 8 + i] = m[(lane & 7) * 8 + i];
  __syncwarp();
  unsigned r[4];
  load_matrices_trans(r, s + lane * 8);
  ((unsigned*)t)[lane] = r[lane >> 3 & 3];
}
KERNEL_EXPORT(transpose)

// y[i] = x[(i + 1) % n] through shared memory, 64 threads, n <= 64 floats of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(64) rotate(float* y, const float* x, int n, int sync) {
  DYN_SHARED(float, s);
  const int i = threadIdx.x;
  if (i < n) s[i] = x[i];
  if (sync) __syncthreads();
  if (i < n) y[i] = s[(i + 1) % n];
}
KERNEL_EXPORT(rotate)

// mistake 1: some threads miss a barrier others wait at; 2: a lane left out of a full shuffle; 3: a trap; 4: a wild shuffle;
// 5: copies nobody waits for
extern "C" __global__ void __launch_bounds__(64) mistake(float* x, int which) {
  __shared__ float s[64];
  const int i = threadIdx.x;
  s[i] = 0.f;
  if (which == 1 && i < 32) {
    __syncthreads();
    __shfl_sync(FULL, 1, i < 16 ? 0 : 1);
  }
  if (which == 1 && i >= 32) __shfl_sync(i < 48 ? FULL : 0xffff0000u, 1, 31);
  if (which == 2 && i != 5) x[i] = warp_sum(1.f);
  if (which == 3 && i == 40) __trap();
  if (which == 4 && i < 16) x[i] = __shfl_sync(0xffffu, 1.f, 20);
  if (which == 5) copy16_async(s + i / 4 * 4, x, true), copies_commit();
}
KERNEL_EXPORT(mistake)

// Sum of x by the last block that is done, in order of the blocks; also atomics and votes. `done` is zero before and after.
extern "C" __global__ void __launch_bounds__(32)
    sum(float* total, u64* count, float* part, unsigned* done, const float* x, i64 n) {
  float s = 0.f;
  for (i64 i = blockIdx.x * 32 + threadIdx.x; i < n; i += gridDim.x * 32) s += x[i];
  s = warp_sum(s);
  atomicAdd(count, (u64)__popc(__ballot_sync(FULL, threadIdx.x < 20)) * (threadIdx.x == 0));
  int last = 0;
  if (threadIdx.x == 0) {
    part[blockIdx.x] = s;
    __threadfence();
    last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
  }
  if (!__any_sync(FULL, last)) return;
  if (threadIdx.x == 0) {
    float t = 0.f;
    for (unsigned b = 0; b < gridDim.x; ++b) t += part[b];
    *total = t;
  }
}
KERNEL_EXPORT(sum)
