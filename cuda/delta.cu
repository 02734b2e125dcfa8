// Gated delta nets: layers with a recurrent state instead of cells. Here is what surrounds the rule, which is delta_rule.cu.
// Twin: gpu_worker/model/delta.py. Slots, rings and folds are those of gpu_worker/device/state_cache.py.
//
// A layer is five launches, in this order, for R rows of S sequences (rows of a sequence are contiguous):
//   delta_inputs  grid (R, units / 8) x 256: convolution, SiLU, normalised q and k, g, beta
//   delta_rule    grid (value_dim / 32, value_heads, S) x 128: the rule; the state and the log of d
//   delta_log     grid (S, any) x 256: what the step's rows leave in the other rings
//   delta_gate    grid (R, value_heads / 8) x 256: norm and gate of the rule's rows
// and a step begins with delta_check and ends with delta_finish, grid S x 1. units = 2 key_heads + value_heads * value_dim /
// key_dim + value_heads / 32; each quotient rounded up. 62 registers at most in delta_inputs, 56 in delta_log, 86 in delta_gate.
// Rows at position -1 and sequences of no rows are padding: skipped.
//
// mixed   bf16 [R][mixed_stride]: channels of the convolution (q, k, v), then wherever z_at, a_at, b_at say. The stride and
//         z_at are multiples of 4.
// states  float32 [slots][stride]; the *_at are places in a slot, the layer's offset included, multiples of 4 but for
//         log_g_at and folded_at.
// q, k    float32 [R][key_heads][key_dim]; key_dim 32, 64, 128
// v, out  float32 [R][value_heads][value_dim]; value_dim a multiple of 32
// g, beta float32 [R][value_heads]
// Value head j is served by key head j / (value_heads / key_heads).
#include "values.cuh"

__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// What the rule takes in ----------------------------------------------------------------------------------------------
// A warp is a unit of a row: a key head's query, its key, key_dim channels of the values, or 32 value heads' g and beta; in
// this order. Inputs before the step's first row are those in the ring `conv` of the slot, read only. conv float32
// [taps][channels]. Floor: bytes; R * (2 taps + 4) bytes a channel, most of the former from the caches.
template <int K>
__device__ __forceinline__ void inputs_body(float* __restrict__ q, float* __restrict__ k, float* __restrict__ v,
                                            float* __restrict__ g, float* __restrict__ beta, const float* __restrict__ states,
                                            i64 stride, i64 conv_at, int conv_entries, const bf16* __restrict__ mixed,
                                            int mixed_stride, int a_at, int b_at, const float* __restrict__ conv,
                                            const float* __restrict__ dt_bias, const float* __restrict__ decay,
                                            const int* __restrict__ positions, const int* __restrict__ seq_of,
                                            const int* __restrict__ row_begin, const int* __restrict__ slots, int key_heads,
                                            int value_heads, int value_dim, int taps) {
  constexpr int N = K / 32;  // channels of a lane
  const int row = blockIdx.x, lane = threadIdx.x & 31, unit = blockIdx.y * 8 + (threadIdx.x >> 5);
  const int position = positions[row];
  if (position < 0) return;
  const int keys = key_heads * K, values = value_heads * value_dim, channels = 2 * keys + values;
  const bf16* in = mixed + (i64)row * mixed_stride;
  const int gates = 2 * key_heads + (values + K - 1) / K;  // the first unit of them
  if (unit >= gates) {
    const int head = (unit - gates) * 32 + lane;
    if (head < value_heads) {
      const i64 at = (i64)row * value_heads + head;
      g[at] = decay[head] * softplus(to_float(in[a_at + head]) + dt_bias[head]);
      beta[at] = sigmoid(to_float(in[b_at + head]));
    }
    return;
  }
  const int c = unit * K + lane * N;
  if (c >= channels) return;  // in the last unit of the values, which exchange nothing
  const int sequence = seq_of[row], back_here = row - row_begin[sequence];  // rows of the sequence before this one
  const float* ring = states + slots[sequence] * stride + conv_at;
  float x[N] = {};
  for (int tap = position < taps - 1 ? taps - 1 - position : 0; tap < taps; ++tap) {  // nothing lies before position 0
    const int back = taps - 1 - tap;
    float value[N], weight[N];
    load_values<N>(weight, conv + (i64)tap * channels + c);
    if (back <= back_here) load_values<N>(value, in - (i64)back * mixed_stride + c);
    else load_values<N>(value, ring + (i64)((position - back) % conv_entries) * channels + c);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = fmaf(value[i], weight[i], x[i]);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = silu(x[i]);
  if (c >= 2 * keys) {
    store_values<N>(v + (i64)row * values + c - 2 * keys, x);
    return;
  }
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < N; ++i) squares = fmaf(x[i], x[i], squares);
  float scale = 1.f / sqrtf(warp_sum(squares) + 1e-6f);
  if (c < keys) scale *= 1.f / sqrtf((float)K);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] *= scale;
  if (c < keys) store_values<N>(q + (i64)row * keys + c, x);
  else store_values<N>(k + (i64)row * keys + c - keys, x);
}

#define INPUTS(K)                                                                                                               \
  extern "C" __global__ void __launch_bounds__(256, 2) delta_inputs_k##K(                                                       \
      float* q, float* k, float* v, float* g, float* beta, const float* states, i64 stride, i64 conv_at, int conv_entries,      \
      const bf16* mixed, int mixed_stride, int a_at, int b_at, const float* conv, const float* dt_bias, const float* decay,     \
      const int* positions, const int* seq_of, const int* row_begin, const int* slots, int key_heads, int value_heads,          \
      int value_dim, int taps) {                                                                                                \
    inputs_body<K>(q, k, v, g, beta, states, stride, conv_at, conv_entries, mixed, mixed_stride, a_at, b_at, conv, dt_bias,     \
                   decay, positions, seq_of, row_begin, slots, key_heads, value_heads, value_dim, taps);                        \
  }                                                                                                                             \
  KERNEL_EXPORT(delta_inputs_k##K)
INPUTS(32)
INPUTS(64)
INPUTS(128)

// What a step's rows leave behind -------------------------------------------------------------------------------------
// Inputs of the convolution, keys and decays go to their rings; of many rows the last that fit. After delta_rule of the same
// layer, which still reads what they overwrite. Floor: bytes; 6 a channel of the convolution and row, 8 a channel of the keys.
extern "C" __global__ void __launch_bounds__(256, 2)
    delta_log(float* states, i64 stride, i64 conv_at, i64 log_k_at, i64 log_g_at, int conv_entries, int log_entries,
              const bf16* mixed, int mixed_stride, const float* k, const float* g, const int* row_begin, const int* row_count,
              const int* positions, const int* slots, int key_heads, int value_heads, int key_dim, int conv_width) {
  const int sequence = blockIdx.x, count = row_count[sequence];
  if (!count) return;
  const int first_row = row_begin[sequence], start = positions[first_row], keys = key_heads * key_dim;
  const int thread = blockIdx.y * 256 + threadIdx.x, threads = gridDim.y * 256;
  float* slot = states + slots[sequence] * stride;
  for (int i = max(count - conv_entries, 0); i < count; ++i) {
    const bf16* from = mixed + (i64)(first_row + i) * mixed_stride;
    float* to = slot + conv_at + (i64)((start + i) % conv_entries) * conv_width;
    for (int c = thread * 4; c < conv_width; c += threads * 4) {
      float x[4];
      load_values<4>(x, from + c);
      store_values<4>(to + c, x);
    }
  }
  for (int i = max(count - log_entries, 0); i < count; ++i) {
    const i64 row = first_row + i, entry = (start + i) % log_entries;
    for (int c = thread * 4; c < keys; c += threads * 4) {
      float x[4];
      load_values<4>(x, k + row * keys + c);
      store_values<4>(slot + log_k_at + entry * keys + c, x);
    }
    for (int head = thread; head < value_heads; head += threads)
      slot[log_g_at + entry * value_heads + head] = g[row * value_heads + head];
  }
}
KERNEL_EXPORT(delta_log)

// y bf16 [R][value_heads][value_dim] = rms(o) * norm * silu(z): a warp has a head of a row. norm float32 [value_dim].
// Floor: bytes; 8 a value.
extern "C" __global__ void __launch_bounds__(256, 2)
    delta_gate(bf16* y, const float* o, const bf16* mixed, int mixed_stride, int z_at, const float* norm, const int* positions,
               int value_heads, int value_dim, float eps) {
  const int row = blockIdx.x, lane = threadIdx.x & 31, head = blockIdx.y * 8 + (threadIdx.x >> 5);
  if (head >= value_heads || positions[row] < 0) return;
  const i64 at = ((i64)row * value_heads + head) * value_dim;
  const bf16* z = mixed + (i64)row * mixed_stride + z_at + head * value_dim;
  float squares = 0.f;
  for (int c = lane * 4; c < value_dim; c += 128) {
    float x[4];
    load_values<4>(x, o + at + c);
#pragma unroll
    for (int i = 0; i < 4; ++i) squares = fmaf(x[i], x[i], squares);
  }
  const float scale = 1.f / sqrtf(warp_sum(squares) / value_dim + eps);
  for (int c = lane * 4; c < value_dim; c += 128) {
    float x[4], weight[4], gate[4];
    load_values<4>(x, o + at + c);
    load_values<4>(weight, norm + c);
    load_values<4>(gate, z + c);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = x[i] * scale * weight[i] * silu(gate[i]);
    *reinterpret_cast<uint2*>(y + at + c) = make_uint2(pack2(x[0], x[1]), pack2(x[2], x[3]));
  }
}
KERNEL_EXPORT(delta_gate)

// The step's begin and end --------------------------------------------------------------------------------------------
// Whether the slot's state is one that the rows can go on from, else *status = 1. Grid S x 1.
__device__ __forceinline__ bool goes_on(int start, int folded) {
  const int due = start ? start / FOLD * FOLD - folded : 0;
  return due == 0 || due == FOLD;
}

extern "C" __global__ void __launch_bounds__(1)
    delta_check(float* states, i64 stride, i64 folded_at, const int* row_begin, const int* row_count, const int* positions,
                const int* known, const int* slots, int* status) {
  const int sequence = blockIdx.x;
  if (!row_count[sequence]) return;
  const int folded = reinterpret_cast<const int*>(states + slots[sequence] * stride)[folded_at];
  if (!goes_on(positions[row_begin[sequence]], folded)) *status = 1;
}
KERNEL_EXPORT(delta_check)

// When all layers are through: how many tokens the states have taken in now. A slot that delta_check refuses stays. Grid S x 1.
extern "C" __global__ void __launch_bounds__(1)
    delta_finish(float* states, i64 stride, i64 folded_at, const int* row_begin, const int* row_count, const int* positions,
                 const int* known, const int* slots, int* status) {
  const int sequence = blockIdx.x, count = row_count[sequence];
  if (!count) return;
  const int start = positions[row_begin[sequence]];
  int* folded = reinterpret_cast<int*>(states + slots[sequence] * stride) + folded_at;
  if (goes_on(start, *folded)) *folded = max(start, min(known[sequence], start + count - 1)) / FOLD * FOLD;
  else *status = 1;
}
KERNEL_EXPORT(delta_finish)
