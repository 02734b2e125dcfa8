// Sixteen float32 lanes, and sixteen pairs of bfloat16: AVX-512 where the processor has it, plain loops elsewhere.
// No operation here depends on how many rows are computed together, so a row's bits depend on that row only. The library
// is compiled with -ffp-contract=off: a fused multiply-add happens where `fma` is written and nowhere else.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PK_AVX512 1
#include <immintrin.h>
#elif defined(__F16C__)
#include <immintrin.h>
#endif

#define PK_INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;  // the upper half of a float32
constexpr int LANES = 16;

PK_INLINE float bf16_to_float(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

PK_INLINE bf16 float_to_bf16(float f) {  // to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)(bits >> 16 | 64);  // stays NaN
  return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

PK_INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023, bits;
  if (exponent == 0) {
    float f = std::ldexp((float)fraction, -24);
    return sign ? -f : f;
  }
  bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
  float f;
  memcpy(&f, &bits, 4);
  return f;
#endif
}

PK_INLINE uint32_t load_pair(const bf16* p) {
  uint32_t pair;
  memcpy(&pair, p, 4);
  return pair;
}

#ifdef PK_AVX512
// ---------------------------------------------------------------------------------------------------------- AVX-512
typedef __m512 V;
typedef __m512i Pairs;  // lane i: two bfloat16 of column i, the even k in the lower half

PK_INLINE V zero() { return _mm512_setzero_ps(); }
PK_INLINE V set1(float x) { return _mm512_set1_ps(x); }
PK_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
PK_INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v); }
PK_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
PK_INLINE V sub(V a, V b) { return _mm512_sub_ps(a, b); }
PK_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
PK_INLINE V div(V a, V b) { return _mm512_div_ps(a, b); }
PK_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
PK_INLINE V vmax(V a, V b) { return _mm512_max_ps(a, b); }
PK_INLINE V vmin(V a, V b) { return _mm512_min_ps(a, b); }
PK_INLINE float reduce_add(V v) { return _mm512_reduce_add_ps(v); }
PK_INLINE float reduce_max(V v) { return _mm512_reduce_max_ps(v); }
PK_INLINE V keep_first(V v, int n, float other) {  // lanes n and up become `other`
  return n >= 16 ? v : _mm512_mask_blend_ps((__mmask16)((1u << n) - 1), _mm512_set1_ps(other), v);
}
PK_INLINE V keep_from(V v, int n, float other) {  // lanes below n become `other`
  return _mm512_mask_blend_ps((__mmask16)((1u << n) - 1), v, _mm512_set1_ps(other));
}
PK_INLINE V load_bf16(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
PK_INLINE V load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
PK_INLINE V load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
PK_INLINE void store_bf16(bf16* p, V v) {
  __m512i bits = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(64 << 16));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
PK_INLINE V power_of_two(V n) {  // n integral, in -126..127
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
PK_INLINE V round_even(V v) { return _mm512_roundscale_ps(v, 8); }

PK_INLINE Pairs load_pairs(const void* p) { return _mm512_loadu_si512(p); }
PK_INLINE void store_pairs(void* p, Pairs v) { _mm512_storeu_si512(p, v); }
PK_INLINE V dot(V sum, Pairs w, uint32_t x) {  // sum + w.even * x.lower + w.odd * x.upper
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
  __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000)));
  sum = fma(even, set1(bf16_to_float((bf16)x)), sum);
  return fma(odd, set1(bf16_to_float((bf16)(x >> 16))), sum);
#endif
}
PK_INLINE Pairs nibble_table() {  // 0..15 as bfloat16, twice: the index's fifth bit belongs to the next nibble
  alignas(64) bf16 table[32];
  for (int i = 0; i < 32; i++) table[i] = float_to_bf16((float)(i & 15));
  return _mm512_load_si512(table);
}
template <int P>
PK_INLINE Pairs nibbles(Pairs packed, Pairs table) {  // nibble P of each 16-bit half, as bfloat16
  return _mm512_permutexvar_epi16(P ? _mm512_srli_epi16(packed, 4 * P) : packed, table);
}
PK_INLINE void transpose16(const uint32_t* const* rows, uint32_t* out) {  // out[16][16]: out[j][i] = rows[i][j]
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i]);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int j = 0; j < 4; j++) {  // a[4 i + j]: rows 4 i .. 4 i + 3 of columns j, 4 + j, 8 + j, 12 + j
    b[j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
    b[4 + j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    b[8 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    b[12 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; j++) {
    _mm512_storeu_si512(out + 16 * j, _mm512_shuffle_i32x4(b[j], b[8 + j], 0x88));
    _mm512_storeu_si512(out + 16 * (8 + j), _mm512_shuffle_i32x4(b[j], b[8 + j], 0xdd));
    _mm512_storeu_si512(out + 16 * (4 + j), _mm512_shuffle_i32x4(b[4 + j], b[12 + j], 0x88));
    _mm512_storeu_si512(out + 16 * (12 + j), _mm512_shuffle_i32x4(b[4 + j], b[12 + j], 0xdd));
  }
}
PK_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
constexpr int TILE_ROWS = 6, TILE_VECS = 4;  // 24 of 32 registers are sums

#else
// ------------------------------------------------------------------------------------- loops that the compiler vectorises
struct V {
  float f[16];
};
struct Pairs {
  uint32_t u[16];
};
#define PK_LANES for (int i = 0; i < 16; i++)
PK_INLINE float scalar_fma(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
PK_INLINE V set1(float x) { V v; PK_LANES v.f[i] = x; return v; }
PK_INLINE V zero() { return set1(0); }
PK_INLINE V load(const float* p) { V v; memcpy(&v, p, 64); return v; }
PK_INLINE void store(float* p, V v) { memcpy(p, &v, 64); }
PK_INLINE V add(V a, V b) { PK_LANES a.f[i] += b.f[i]; return a; }
PK_INLINE V sub(V a, V b) { PK_LANES a.f[i] -= b.f[i]; return a; }
PK_INLINE V mul(V a, V b) { PK_LANES a.f[i] *= b.f[i]; return a; }
PK_INLINE V div(V a, V b) { PK_LANES a.f[i] /= b.f[i]; return a; }
PK_INLINE V fma(V a, V b, V c) { PK_LANES c.f[i] = scalar_fma(a.f[i], b.f[i], c.f[i]); return c; }
PK_INLINE V vmax(V a, V b) { PK_LANES a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i]; return a; }
PK_INLINE V vmin(V a, V b) { PK_LANES a.f[i] = a.f[i] < b.f[i] ? a.f[i] : b.f[i]; return a; }
PK_INLINE float reduce_add(V v) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) v.f[i] += v.f[i + n];
  return v.f[0];
}
PK_INLINE float reduce_max(V v) {
  for (int i = 1; i < 16; i++) v.f[0] = v.f[0] > v.f[i] ? v.f[0] : v.f[i];
  return v.f[0];
}
PK_INLINE V keep_first(V v, int n, float other) { PK_LANES v.f[i] = i < n ? v.f[i] : other; return v; }
PK_INLINE V keep_from(V v, int n, float other) { PK_LANES v.f[i] = i < n ? other : v.f[i]; return v; }
PK_INLINE V load_bf16(const bf16* p) { V v; PK_LANES v.f[i] = bf16_to_float(p[i]); return v; }
PK_INLINE V load_int8(const int8_t* p) { V v; PK_LANES v.f[i] = (float)p[i]; return v; }
PK_INLINE V load_half(const uint16_t* p) { V v; PK_LANES v.f[i] = half_to_float(p[i]); return v; }
PK_INLINE void store_bf16(bf16* p, V v) { PK_LANES p[i] = float_to_bf16(v.f[i]); }
PK_INLINE V power_of_two(V n) {
  PK_LANES {
    int32_t bits = ((int32_t)n.f[i] + 127) << 23;
    memcpy(&n.f[i], &bits, 4);
  }
  return n;
}
PK_INLINE V round_even(V v) {  // |v| < 2^22
  PK_LANES v.f[i] = (v.f[i] + 12582912.f) - 12582912.f;
  return v;
}
PK_INLINE Pairs load_pairs(const void* p) { Pairs v; memcpy(&v, p, 64); return v; }
PK_INLINE void store_pairs(void* p, Pairs v) { memcpy(p, &v, 64); }
PK_INLINE V dot(V sum, Pairs w, uint32_t x) {
  float even = bf16_to_float((bf16)x), odd = bf16_to_float((bf16)(x >> 16));
  PK_LANES sum.f[i] = scalar_fma(bf16_to_float((bf16)w.u[i]), even, sum.f[i]);
  PK_LANES sum.f[i] = scalar_fma(bf16_to_float((bf16)(w.u[i] >> 16)), odd, sum.f[i]);
  return sum;
}
PK_INLINE Pairs nibble_table() { return Pairs(); }
template <int P>
PK_INLINE Pairs nibbles(Pairs packed, Pairs) {
  PK_LANES {
    float even = (float)(packed.u[i] >> (4 * P) & 15), odd = (float)(packed.u[i] >> (16 + 4 * P) & 15);
    uint32_t a, b;  // small integers are exact in bfloat16
    memcpy(&a, &even, 4);
    memcpy(&b, &odd, 4);
    packed.u[i] = a >> 16 | (b & 0xffff0000);
  }
  return packed;
}
PK_INLINE void transpose16(const uint32_t* const* rows, uint32_t* out) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) out[16 * j + i] = rows[i][j];
}
PK_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
constexpr int TILE_ROWS = 3, TILE_VECS = 2;
#endif

// e^x, relative error about 1e-7; x below -87 counts as -87. Coefficients of Cephes' expf.
PK_INLINE V vexp(V x) {
  x = vmax(vmin(x, set1(88.f)), set1(-87.f));
  V n = round_even(mul(x, set1(1.44269504f)));
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = fma(set1(1.9875691500e-4f), r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  return mul(add(fma(p, mul(r, r), r), set1(1.f)), power_of_two(n));
}

PK_INLINE float scalar_exp(float x) {  // the same polynomial, so that scalars and lanes agree
  float out[LANES];
  store(out, vexp(set1(x)));
  return out[0];
}

PK_INLINE V sigmoid(V x) { return div(set1(1.f), add(set1(1.f), vexp(sub(zero(), x)))); }
PK_INLINE V silu(V x) { return div(x, add(set1(1.f), vexp(sub(zero(), x)))); }
