// Operations on one row of float32 values: norms, rotation, rounding into cells.
#pragma once
#include "vec.h"

// x / sqrt(mean(x^2) + eps) * weight; out may be x.
inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  V squares = zero();
  for (int i = 0; i < n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  const V scale = set1(1.f / std::sqrt(reduce_add(squares) / (float)n + eps));
  for (int i = 0; i < n; i += LANES) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// x / sqrt(sum(x^2) + 1e-6) * by; out may be x.
inline void unit_norm(const float* x, int n, float by, float* out) {
  V squares = zero();
  for (int i = 0; i < n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  const V scale = set1(by / std::sqrt(reduce_add(squares) + 1e-6f));
  for (int i = 0; i < n; i += LANES) store(out + i, mul(load(x + i), scale));
}

inline float dot_rows(const float* a, const float* b, int n) {
  V sum = zero();
  for (int i = 0; i < n; i += LANES) sum = fma(load(a + i), load(b + i), sum);
  return reduce_add(sum);
}

inline void copy_row(const float* x, int n, float* out) { memcpy(out, x, sizeof(float) * n); }
inline void copy_row(const float* x, int n, bf16* out) {
  for (int i = 0; i < n; i += LANES) store_bf16(out + i, load(x + i));
}

// Rotates the halves of the first `rotary` of `dim` values by the angles of one position: c and s [rotary / 2].
template <class T>
void rotate(const float* x, int dim, int rotary, const float* c, const float* s, T* out) {
  const int half = rotary / 2;
  alignas(64) float turned[256];
  for (int i = 0; i < half; i++) {
    turned[i] = x[i] * c[i] - x[half + i] * s[i];
    turned[half + i] = x[half + i] * c[i] + x[i] * s[i];
  }
  if (rotary < dim) memcpy(turned + rotary, x + rotary, sizeof(float) * (dim - rotary));
  copy_row(turned, dim, out);
}

inline float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }
inline float scalar_sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }
