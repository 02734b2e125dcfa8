// A few neighbouring values of a lane as one load or store, bf16 widened to float. Addresses are aligned to what is moved, 16
// bytes at most.
#pragma once
#include "common.cuh"

template <int N>
__device__ __forceinline__ void load_values(float* x, const bf16* from) {
  if constexpr (N == 4) {
    const uint2 u = *reinterpret_cast<const uint2*>(from);
    x[0] = __uint_as_float(u.x << 16), x[1] = __uint_as_float(u.x & 0xffff0000u);
    x[2] = __uint_as_float(u.y << 16), x[3] = __uint_as_float(u.y & 0xffff0000u);
  } else if constexpr (N == 2) {
    const unsigned u = *reinterpret_cast<const unsigned*>(from);
    x[0] = __uint_as_float(u << 16), x[1] = __uint_as_float(u & 0xffff0000u);
  } else {
    x[0] = to_float(from[0]);
  }
}
template <int N>
__device__ __forceinline__ void load_values(float* x, const float* from) {
  if constexpr (N >= 4) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 u = *reinterpret_cast<const float4*>(from + i);
      x[i] = u.x, x[i + 1] = u.y, x[i + 2] = u.z, x[i + 3] = u.w;
    }
  } else if constexpr (N == 2) {
    const float2 u = *reinterpret_cast<const float2*>(from);
    x[0] = u.x, x[1] = u.y;
  } else {
    x[0] = from[0];
  }
}
template <int N>
__device__ __forceinline__ void store_values(float* to, const float* x) {
  if constexpr (N == 4) *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  else if constexpr (N == 2) *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
  else to[0] = x[0];
}
