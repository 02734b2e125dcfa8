// CUDA C++ for a C++ compiler: what a kernel's source needs to run on the CPU, in tests. See kshim_fibers.h for how.
//
//   g++ -x c++ -DKSHIM -Icuda -Itests/kernels -std=c++17 -shared -fPIC cuda/norm.cu
//
// Not here: clusters, TMA, wgmma, cooperative grids, textures; kernels do not use them. Never visible here: speed, bank
// conflicts, the hardware's memory model (this is sequentially consistent), the rounding of fast-math functions.
#pragma once
#include "kshim_fibers.h"
#include "kshim_launch.h"

// language -----------------------------------------------------------------------------------------------------------
#define __global__
#define __device__ inline
#define __host__
#define __constant__ static
#define __forceinline__
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// In a section of its own, so that it can be poisoned. Declare it in the kernel itself: in a template or an inline function
// g++ may report a section conflict.
#define __shared__ static __attribute__((section("kshim_shared")))
#define DYN_SHARED(type, name) type* name = (type*)kshim::g.dynamic
#define threadIdx (kshim::g.current->tid)
#define blockIdx (kshim::g.block_index)
#define blockDim (kshim::g.block_dim)
#define gridDim (kshim::g.grid_dim)
#define warpSize 32

#define KSHIM_VECTOR(T, N, A)                                                        \
  struct __attribute__((aligned(A))) N##2 { T x, y; };                               \
  struct __attribute__((aligned(2 * A > 16 ? 16 : 2 * A))) N##4 { T x, y, z, w; };   \
  inline N##2 make_##N##2(T x, T y) { return {x, y}; }                               \
  inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
KSHIM_VECTOR(float, float, 8)
KSHIM_VECTOR(int, int, 8)
KSHIM_VECTOR(unsigned, uint, 8)
KSHIM_VECTOR(unsigned short, ushort, 4)
struct __attribute__((aligned(16))) ulonglong2 { unsigned long long x, y; };
struct __attribute__((aligned(16))) longlong2 { long long x, y; };
struct __attribute__((aligned(16))) double2 { double x, y; };

// barriers and warps -------------------------------------------------------------------------------------------------
inline void __syncthreads() { kshim::barrier(false); }
inline int __syncthreads_count(int p) { return kshim::barrier(p); }
inline int __syncthreads_or(int p) { return kshim::barrier(p) != 0; }
inline int __syncthreads_and(int p) { return kshim::barrier(!p) == 0; }
inline void __syncwarp(unsigned m = 0xffffffffu) { kshim::collective(kshim::OP_SYNC, m, 0, 0); }
inline unsigned __ballot_sync(unsigned m, int p) { return (unsigned)kshim::collective(kshim::OP_BALLOT, m, p != 0, 0); }
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, p) == m; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
namespace kshim {
template <class T>
inline T shuffle(unsigned mask, T v, int source) {
  static_assert(sizeof(T) <= 8, "a shuffle of more than 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &v, sizeof v);
  bits = collective(OP_SHUFFLE, mask, bits, source);
  memcpy(&v, &bits, sizeof v);
  return v;
}
inline int lane() { return (int)g.current->lane; }
inline unsigned reduce(unsigned mask, unsigned v, int kind) { return (unsigned)collective(OP_REDUCE, mask, v, kind); }
}  // namespace kshim
template <class T> inline T __shfl_sync(unsigned m, T v, int from, int w = 32) {
  return kshim::shuffle(m, v, (kshim::lane() & ~(w - 1)) | (from & (w - 1)));
}
template <class T> inline T __shfl_xor_sync(unsigned m, T v, int x, int w = 32) {
  int l = kshim::lane(), s = l ^ x;
  return kshim::shuffle(m, v, s >= (l & ~(w - 1)) + w ? l : s);
}
template <class T> inline T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32) {
  int l = kshim::lane(), s = l + (int)d;
  return kshim::shuffle(m, v, s >= (l & ~(w - 1)) + w ? l : s);
}
template <class T> inline T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32) {
  int l = kshim::lane(), s = l - (int)d;
  return kshim::shuffle(m, v, s < (l & ~(w - 1)) ? l : s);
}
inline unsigned __reduce_add_sync(unsigned m, unsigned v) { return kshim::reduce(m, v, kshim::ADD); }
inline unsigned __reduce_min_sync(unsigned m, unsigned v) { return kshim::reduce(m, v, kshim::MIN); }
inline unsigned __reduce_max_sync(unsigned m, unsigned v) { return kshim::reduce(m, v, kshim::MAX); }
inline unsigned __reduce_and_sync(unsigned m, unsigned v) { return kshim::reduce(m, v, kshim::AND); }
inline unsigned __reduce_or_sync(unsigned m, unsigned v) { return kshim::reduce(m, v, kshim::OR); }
inline unsigned __reduce_xor_sync(unsigned m, unsigned v) { return kshim::reduce(m, v, kshim::XOR); }

// atomics: real ones, so that TSan knows them ------------------------------------------------------------------------
template <class T, class F> inline T kshim_update(T* p, F f) {
  T before, after;
  __atomic_load(p, &before, __ATOMIC_RELAXED);
  do after = f(before);
  while (!__atomic_compare_exchange(p, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}
template <class T> using kshim_same = std::common_type_t<T>;  // so that a literal of another type converts, as in CUDA
template <class T> inline T atomicAdd(T* p, kshim_same<T> v) { return kshim_update(p, [=](T o) { return T(o + v); }); }
template <class T> inline T atomicSub(T* p, kshim_same<T> v) { return kshim_update(p, [=](T o) { return T(o - v); }); }
template <class T> inline T atomicMax(T* p, kshim_same<T> v) { return kshim_update(p, [=](T o) { return o > v ? o : v; }); }
template <class T> inline T atomicMin(T* p, kshim_same<T> v) { return kshim_update(p, [=](T o) { return o < v ? o : v; }); }
template <class T> inline T atomicAnd(T* p, kshim_same<T> v) { return kshim_update(p, [=](T o) { return T(o & v); }); }
template <class T> inline T atomicOr(T* p, kshim_same<T> v) { return kshim_update(p, [=](T o) { return T(o | v); }); }
template <class T> inline T atomicXor(T* p, kshim_same<T> v) { return kshim_update(p, [=](T o) { return T(o ^ v); }); }
template <class T> inline T atomicExch(T* p, kshim_same<T> v) { return kshim_update(p, [=](T) { return v; }); }
template <class T> inline T atomicCAS(T* p, kshim_same<T> c, kshim_same<T> v) {
  return kshim_update(p, [=](T o) { return o == c ? v : o; });
}
inline unsigned atomicInc(unsigned* p, unsigned m) { return kshim_update(p, [=](unsigned o) { return o >= m ? 0u : o + 1; }); }
inline unsigned atomicDec(unsigned* p, unsigned m) {
  return kshim_update(p, [=](unsigned o) { return !o || o > m ? m : o - 1; });
}

// arithmetic; compile with -ffp-contract=off, else fmaf is not the only fused product --------------------------------
namespace kshim {
template <class To, class From> inline To bits_as(From v) {
  static_assert(sizeof(To) == sizeof(From), "");
  To r;
  memcpy(&r, &v, sizeof r);
  return r;
}
}  // namespace kshim
inline unsigned short kshim_bf16(float f) {  // cvt.rn.bf16.f32
  uint32_t u = kshim::bits_as<uint32_t>(f);
  return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (unsigned short)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
using std::max;
using std::min;
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1.f / a; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __int_as_float(int i) { return kshim::bits_as<float>(i); }
inline int __float_as_int(float f) { return kshim::bits_as<int>(f); }
inline unsigned __float_as_uint(float f) { return kshim::bits_as<unsigned>(f); }
inline float __uint_as_float(unsigned i) { return kshim::bits_as<float>(i); }
inline double __longlong_as_double(long long i) { return kshim::bits_as<double>(i); }
inline long long __double_as_longlong(double d) { return kshim::bits_as<long long>(d); }
inline double __ull2double_rn(unsigned long long v) { return (double)v; }
inline double __ll2double_rn(long long v) { return (double)v; }
inline float __double2float_rn(double v) { return (float)v; }
inline int __float2int_rn(float v) { return (int)rintf(v); }
inline float __int2float_rn(int v) { return (float)v; }
inline float __uint2float_rn(unsigned v) { return (float)v; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline void __trap() { kshim::stop("__trap() by thread %u", kshim::g.current->linear); }

// asynchronous copies, products, matrices: cuda/common.cuh calls these where the device runs PTX ----------------------
// The hardware may write at any time between issue and wait: forward copies late, reverse early, random either. Until a
// late copy lands its target is NaN, so that who still reads the old bytes is found as well.
inline void kshim_cp_async(void* dst, const void* src, unsigned bytes, unsigned valid) {
  auto* f = kshim::g.current;
  if (f->copy_count == kshim::MAX_COPIES) return kshim::fail("thread %u has too many cp.async copies in flight", f->linear);
  if (((uintptr_t)dst | (valid ? (uintptr_t)src : 0)) % bytes)
    return kshim::fail("thread %u: a cp.async that is not aligned", f->linear);
  const bool early = kshim::g.order == kshim::REVERSE || (kshim::g.order == kshim::RANDOM && (kshim::random_bits() & 1));
  memset(dst, early ? 0 : 0xff, bytes);
  if (early && valid) memcpy(dst, src, valid);
  f->copies[f->copy_count++] = {dst, src, early ? 0 : bytes, bytes - valid};
}
inline void kshim_cp_async_commit() {
  auto* f = kshim::g.current;
  if (f->group_count == kshim::MAX_GROUPS) return kshim::fail("thread %u has too many cp.async groups in flight", f->linear);
  f->group_end[f->group_count++] = f->copy_count;
}
inline void kshim_cp_async_wait(unsigned keep) {
  auto* f = kshim::g.current;
  if (f->group_count <= keep) return;
  const unsigned groups = f->group_count - keep, n = f->group_end[groups - 1];
  for (unsigned i = 0; i < n; ++i) {
    const kshim::Copy& c = f->copies[i];
    if (!c.bytes) continue;
    memset(c.dst, 0, c.bytes);
    if (c.bytes > c.zeros) memcpy(c.dst, c.src, c.bytes - c.zeros);
  }
  for (unsigned i = n; i < f->copy_count; ++i) f->copies[i - n] = f->copies[i];
  for (unsigned i = groups; i < f->group_count; ++i) f->group_end[i - groups] = f->group_end[i] - n;
  f->copy_count -= n;
  f->group_count -= groups;
}
inline void kshim_mma_16816_bf16(float* c, const unsigned* a, const unsigned* b) {
  kshim::Mma m{a, b, c};
  kshim::collective(kshim::OP_MMA, 0xffffffffu, 0, 0, &m);
}
// The lane reads its row itself, so that the sanitizers see who reads what.
inline void kshim_ldmatrix_x4(unsigned* r, const void* row, bool transposed) {
  if ((uintptr_t)row % 16) return kshim::stop("thread %u: a row of ldmatrix that is not aligned", kshim::g.current->linear);
  kshim::LdMatrix m;
  memcpy(m.row, row, 16);
  m.r = r;
  m.transposed = transposed;
  kshim::collective(kshim::OP_LDMATRIX, 0xffffffffu, 0, 0, &m);
}
