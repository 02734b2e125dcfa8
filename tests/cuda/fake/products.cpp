// Matrix products of the fake card, enqueued like kernels: out = x W^T + b in bf16 with float32 sums.
//
// Like a library on a card, it sums in another order at another number of rows: 64 rows have an order of their own. So who
// relies on rows not depending on their company without running everything at one number of rows gets other bits.
#include "memory.h"

using bf16 = uint16_t;
using Lanes = float __attribute__((vector_size(64)));  // 16

struct Matrix {
  const bf16* data;
  int64_t stride;
};

static float to_float(bf16 h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static bf16 to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (bf16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
static int padded(int k) { return (k + 15) / 16 * 16; }
static void expand(float* to, const bf16* from, int k) {
  for (int i = 0; i < k; ++i) to[i] = to_float(from[i]);
}

// The sum over k in `pieces` pieces of whole lanes, added one after another.
__attribute__((target_clones("avx2", "default"))) static float dot(const float* a, const float* b, int k, int pieces) {
  int vectors = k / 16;
  float total = 0;
  for (int piece = 0; piece < pieces; ++piece) {
    Lanes sum = {};
    for (int i = vectors * piece / pieces; i < vectors * (piece + 1) / pieces; ++i) {
      Lanes x, y;
      memcpy(&x, a + 16 * i, 64);
      memcpy(&y, b + 16 * i, 64);
      sum += x * y;
    }
    float part = 0;
    for (int lane = 0; lane < 16; ++lane) part += sum[lane];
    total += part;
  }
  return total;
}

static void product(void* out, int64_t out_stride, bool out_f32, Matrix x, Matrix w, const bf16* bias, int m, int n, int k) {
  int width = padded(k), pieces = m == 64 ? 6 : 1 + m % 5;
  std::vector<float> rows((size_t)m * width), weight(width);
  for (int i = 0; i < m; ++i) expand(&rows[(size_t)i * width], x.data + i * x.stride, k);
  for (int j = 0; j < n; ++j) {
    expand(weight.data(), w.data + j * w.stride, k);
    for (int i = 0; i < m; ++i) {
      float sum = dot(&rows[(size_t)i * width], weight.data(), width, pieces);
      if (bias) sum += to_float(bias[j]);
      if (out_f32)
        ((float*)out)[i * out_stride + j] = sum;
      else
        ((bf16*)out)[i * out_stride + j] = to_bf16(sum);
    }
  }
}

// Strides in elements. 0, or the driver's error.
API int fakecuda_linear(void* stream, void* out, int64_t out_stride, int out_f32, const bf16* x, int64_t x_stride, const bf16* w,
                        int64_t w_stride, const bf16* bias, int m, int n, int k) {
  LOCKED;
  auto on_card = [](const void* at, int64_t elements, size_t size) { return inside(device, (uintptr_t)at, elements * size); };
  if (!on_card(out, (m - 1) * out_stride + n, out_f32 ? 4 : 2) || !on_card(x, (m - 1) * x_stride + k, 2) ||
      !on_card(w, (n - 1) * w_stride + k, 2) || (bias && !on_card(bias, n, 2)))
    return INVALID_VALUE;
  count(counted::products);
  Op op{[=] { product(out, out_stride, out_f32, {x, x_stride}, {w, w_stride}, bias, m, n, k); }};
  op.is_kernel = true;
  return submit(stream_of(stream), std::move(op));
}
