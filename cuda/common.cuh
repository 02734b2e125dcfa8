// What every kernel file includes: bf16 without CUDA's headers, reductions of a warp, asynchronous copies, tensor-core products.
//
// One text for three compilers: nvcc, NVRTC (no header but this one) and, with KSHIM defined, a C++ compiler that runs the
// kernels on the CPU in tests (tests/kernels/kshim.h). Inline PTX has an emulation there, so it stands only in this file.
//
// Rules that make a row's result independent of its company: every reduction goes in an order that positions in the
// sequence decide; sums that could be contracted in two ways are written as fmaf.
#pragma once
#ifdef KSHIM
#include "kshim.h"
#else
#ifndef INFINITY  // nvcc brings one along, NVRTC does not
#define INFINITY __int_as_float(0x7f800000)
#endif
#define KERNEL_EXPORT(kernel)
#define DYN_SHARED(type, name)                                 \
  extern __shared__ __align__(128) unsigned char dyn_shared_[]; \
  type* name = reinterpret_cast<type*>(dyn_shared_)
#endif

typedef unsigned short bf16;  // its bits
typedef long long i64;
typedef unsigned long long u64;

constexpr int BLOCK_CELLS = 16;  // cells of a block of the pool
constexpr int FOLD = 16;         // tokens between two recurrent states, see gpu_worker/device/state_cache.py
constexpr unsigned FULL = 0xffffffffu;

// bf16 ---------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float to_float(bf16 h) { return __uint_as_float((unsigned)h << 16); }

// Two floats, rounded to nearest even; `low` in the lower half.
__device__ __forceinline__ unsigned pack2(float low, float high) {
#ifdef KSHIM
  return (unsigned)kshim_bf16(low) | (unsigned)kshim_bf16(high) << 16;
#else
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#endif
}
__device__ __forceinline__ bf16 to_bf16(float f) { return (bf16)(pack2(f, 0.f) & 0xffffu); }

// Eight bf16 are one 16-byte load.
__device__ __forceinline__ void unpack8(const uint4& u, float* f) {
  const unsigned w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    f[2 * i] = __uint_as_float(w[i] << 16);
    f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ uint4 pack8(const float* f) {
  return make_uint4(pack2(f[0], f[1]), pack2(f[2], f[3]), pack2(f[4], f[5]), pack2(f[6], f[7]));
}

// warps --------------------------------------------------------------------------------------------------------------
// Every lane gets the same bits: the tree is symmetric.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, o));
  return v;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// hashes --------------------------------------------------------------------------------------------------------------
constexpr u64 GOLDEN = 0x9E3779B97F4A7C15ull;

__device__ __forceinline__ u64 mix64(u64 x) {  // the finaliser of SplitMix64
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

// cp.async: 16 bytes from global to shared memory; zeros where not `valid` (nothing is read then) -----------------------
__device__ __forceinline__ void copy16_async(void* shared, const void* global, bool valid) {
#ifdef KSHIM
  kshim_cp_async(shared, global, 16, valid ? 16 : 0);
#else
  unsigned s = (unsigned)__cvta_generic_to_shared(shared);
  int n = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(s), "l"(global), "r"(n) : "memory");
#endif
}
__device__ __forceinline__ void copies_commit() {
#ifdef KSHIM
  kshim_cp_async_commit();
#else
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}
// Until at most N of this thread's committed groups are under way.
template <int N>
__device__ __forceinline__ void copies_wait() {
#ifdef KSHIM
  kshim_cp_async_wait(N);
#else
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
#endif
}

// tensor cores -------------------------------------------------------------------------------------------------------
// c[16x8] += a[16x16] b[16x8], m16n8k16 of the PTX manual: with group = lane / 4 and t = lane % 4, a[r] holds row group +
// (r & 1) * 8, columns 2t + (r >> 1) * 8 and the next; b[r] holds column group, rows 2t + r * 8 and the next; c[r] is row
// group + (r >> 1) * 8, column 2t + (r & 1).
__device__ __forceinline__ void mma_16816(float* c, const unsigned* a, const unsigned* b) {
#ifdef KSHIM
  kshim_mma_16816_bf16(c, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// ldmatrix.x4: four 8x8 matrices of bf16 in shared memory; lane l gives the address of row l % 8 (16 bytes, 16-byte
// aligned) of matrix l / 8. r[i] is then matrix i: row lane / 4, columns 2 (lane % 4) and the next; with `trans` of its
// transpose.
__device__ __forceinline__ void load_matrices(unsigned* r, const void* row) {
#ifdef KSHIM
  kshim_ldmatrix_x4(r, row, false);
#else
  unsigned s = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s)
               : "memory");
#endif
}
__device__ __forceinline__ void load_matrices_trans(unsigned* r, const void* row) {
#ifdef KSHIM
  kshim_ldmatrix_x4(r, row, true);
#else
  unsigned s = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s)
               : "memory");
#endif
}

// the pool -----------------------------------------------------------------------------------------------------------
// Where one head's keys (part 0) or values (part 1) of a block begin: [BLOCK_CELLS][head_dim] bf16. The pool is
// [block][layer][k|v][kv_head][cell][head_dim], a block `block_bytes` long.
__device__ __forceinline__ i64 head_cells(int block, i64 block_bytes, int layer, int part, int head, int kv_heads, int head_dim) {
  return (i64)block * block_bytes + (((i64)layer * 2 + part) * kv_heads + head) * BLOCK_CELLS * head_dim * 2;
}
