// The gated delta rule: layers with a recurrent state instead of cells. Twin: gpu_worker/model/delta.py. The rule of slots,
// logs and folds, and the layout of a slot, are those of gpu_worker/device/state_cache.py.
//
// With b = 16 * (q / 16), S the state after the tokens below b, and G(i) the sum of g over b..i, row q of a value head is
//   d_q   = beta_q (v_q - e^G(q) S^T k_q - sum over b <= j < q of e^(G(q) - G(j)) (k_j . k_q) d_j)
//   out_q = e^G(q) S^T q_q + sum over b <= j <= q of e^(G(q) - G(j)) (k_j . q_q) d_j
//   fold    S = e^G(b+15) S + sum over j of e^(G(b+15) - G(j)) k_j d_j^T
// so a decode step reads a state and writes none but at every 16th token. All arithmetic is float32.
//
// A layer is five launches, in this order, for R rows of S sequences (rows of a sequence are contiguous):
//   delta_inputs  grid (R, units / 8) x 256: convolution, SiLU, normalised q and k, g, beta
//   delta_rule    grid (value_dim / 32, value_heads, S) x 128: the rule; the state and the log of d
//   delta_log     grid (S, any) x 256: what the step's rows leave in the other rings
//   delta_gate    grid (R, value_heads / 8) x 256: norm and gate of the rule's rows
// and a step begins with delta_check and ends with delta_finish, grid S x 1.
// Rows at position -1 and sequences of no rows are padding: skipped.
//
// mixed   bf16 [R][mixed_stride]: channels of the convolution (q, k, v), then wherever z_at, a_at, b_at say. The stride and
//         z_at are multiples of 4.
// states  float32 [slots][stride]; the *_at are places in a slot, the layer's offset included, multiples of 4.
// q, k    float32 [R][key_heads][key_dim]; key_dim 32, 64, 128
// v, out  float32 [R][value_heads][value_dim]; value_dim a multiple of 32
// g, beta float32 [R][value_heads]
// Value head j is served by key head j / (value_heads / key_heads).
#include "common.cuh"

// N contiguous values of a lane, N = 1, 2, 4, aligned to their size.
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

// The rule ------------------------------------------------------------------------------------------------------------
// A block has 32 columns (values) of the state of one value head of one sequence in registers, K / 4 values a thread: thread
// = (group of K / 16 rows, 4 columns). It goes through the sequence's rows in tiles of 16 positions; the tile before them
// comes first where a fold is due, and of the first tile what was fed before is in the log. The state is written once at
// most, log_d for the last `log_entries` rows. 36 KiB of shared memory, 128 registers at most.
// Floor: bytes when decoding, S * value_heads * key_dim * value_dim * 4 and the log, about a tenth of that; operations in a
// prompt, a tile of 16 rows of one block K * 2,048 multiply-adds.
template <int K>
struct __align__(16) Tile {
  static constexpr int PITCH = K + 4;  // so that rows of one column of 16 bytes lie in different banks
  float k[FOLD][PITCH], q[FOLD][PITCH];
  float d[FOLD][32];             // of a row of this step: v, until the row is worked off
  float kk[FOLD][FOLD], kq[FOLD][FOLD];  // [row][entry]: products, decay included
  float2 part[4][FOLD][32];      // of each warp: S^T k and S^T q
  float total[FOLD], since[FOLD], left[FOLD], beta[FOLD];  // G, e^G, e^(G(15) - G), beta
};

struct Slot {
  float* base;
  i64 state_at, log_k_at, log_d_at, log_g_at;
  int entries;
};

// Reads `from` the log where a position lies before the step (start), else from the step's rows; zeros beyond `last`.
template <int K>
__device__ __forceinline__ void load_tile(Tile<K>& t, const Slot& slot, const float* q, const float* k, const float* v, const float* g,
                                          const float* beta, int tile, int first_row, int start, int last, int key_heads,
                                          int value_heads, int value_dim, int key_head, int head, int column) {
  constexpr int WORDS = K / 4;
#pragma unroll
  for (int i = threadIdx.x; i < FOLD * WORDS; i += 128) {
    const int row = i / WORDS, c = i % WORDS * 4, position = tile + row;
    const bool logged = position < start, mine = !logged && position <= last;
    const i64 entry = logged ? position % slot.entries : first_row + position - start;
    const i64 at = (entry * key_heads + key_head) * K + c;
    copy16_async(&t.k[row][c], logged ? slot.base + slot.log_k_at + at : k + (mine ? at : 0), logged || mine);
    copy16_async(&t.q[row][c], q + (mine ? at : 0), mine);
  }
  {
    const int row = threadIdx.x / 8, c = threadIdx.x % 8 * 4, position = tile + row;
    const bool logged = position < start, mine = !logged && position <= last;
    const i64 entry = logged ? position % slot.entries : first_row + position - start;
    const i64 at = (entry * value_heads + head) * value_dim + column + c;
    copy16_async(&t.d[row][c], logged ? slot.base + slot.log_d_at + at : v + (mine ? at : 0), logged || mine);
  }
  copies_commit();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x, position = tile + lane;
    const bool logged = position < start, mine = !logged && position <= last;
    float own = 0.f, strength = 0.f, total = 0.f;
    if (lane < FOLD) {
      if (logged) own = slot.base[slot.log_g_at + (i64)(position % slot.entries) * value_heads + head];
      if (mine) {
        const i64 at = (i64)(first_row + position - start) * value_heads + head;
        own = g[at], strength = beta[at];
      }
    }
#pragma unroll
    for (int j = 0; j < FOLD; ++j) {
      const float other = __shfl_sync(FULL, own, j);
      if (j <= lane) total += other;
    }
    const float all = __shfl_sync(FULL, total, FOLD - 1);
    if (lane < FOLD) t.total[lane] = total, t.since[lane] = expf(total), t.left[lane] = expf(all - total), t.beta[lane] = strength;
  }
  copies_wait<0>();
  __syncthreads();
}

// kk and kq of rows mine..stop-1. A warp has four rows; a lane two entries of eight, then of the other eight, and every eighth 16
// bytes of the keys, so that an entry read serves eight products.
template <int K>
__device__ __forceinline__ void products(Tile<K>& t, int mine, int stop) {
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 4, slice = lane & 7;
  if (row >= stop || row + 4 <= mine) return;
  // After the sum over the slices a lane has one product: of the query or the key, of the second or the first entry.
  const bool query = slice & 4, second = slice & 2;
#pragma unroll 1
  for (int half = 0; half <= row; half += 8) {
    const int entry = half + (lane >> 3) * 2;
    float sum[4][2][2] = {};
#pragma unroll
    for (int c = slice * 4; c < K; c += 32) {
      float e[2][4];
      load_values<4>(e[0], &t.k[entry][c]);
      load_values<4>(e[1], &t.k[entry + 1][c]);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (row + r < mine || row + r >= stop) continue;
        float a[4], b[4];
        load_values<4>(a, &t.k[row + r][c]);
        load_values<4>(b, &t.q[row + r][c]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            sum[r][0][j] = fmaf(a[i], e[j][i], sum[r][0][j]);
            sum[r][1][j] = fmaf(b[i], e[j][i], sum[r][1][j]);
          }
      }
    }
    const int j = entry + (second ? 1 : 0);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (row + r < mine || row + r >= stop) continue;
      float two[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float keep = query ? sum[r][1][i] : sum[r][0][i], give = query ? sum[r][0][i] : sum[r][1][i];
        two[i] = keep + __shfl_xor_sync(FULL, give, 4);
      }
      const float keep = second ? two[1] : two[0], give = second ? two[0] : two[1];
      float product = keep + __shfl_xor_sync(FULL, give, 2);
      product += __shfl_xor_sync(FULL, product, 1);
      if (j <= row + r && !(lane & 1)) (query ? t.kq : t.kk)[row + r][j] = expf(t.total[row + r] - t.total[j]) * product;
    }
  }
}

// S^T k and S^T q of rows mine..stop-1: the share of this warp's rows of S.
template <int K>
__device__ __forceinline__ void through_state(Tile<K>& t, const float (&s)[K / 16][4], int mine, int stop) {
  constexpr int ROWS = K / 16;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, at = (threadIdx.x >> 3) * ROWS;
  const bool high = lane & 16, odd = lane & 8;
  const int column = (lane & 7) * 4 + (high ? 2 : 0) + (odd ? 1 : 0);
#pragma unroll 2
  for (int row = mine; row < stop; ++row) {
    float x[2][ROWS], sum[2][4] = {}, whole[2];
    load_values<ROWS>(x[0], &t.k[row][at]);
    load_values<ROWS>(x[1], &t.q[row][at]);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[0][c] = fmaf(s[r][c], x[0][r], sum[0][c]);
        sum[1][c] = fmaf(s[r][c], x[1][r], sum[1][c]);
      }
#pragma unroll
    for (int n = 0; n < 2; ++n) {  // over the warp's four groups of rows; each lane is left with one column
      float two[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float keep = high ? sum[n][c + 2] : sum[n][c], give = high ? sum[n][c] : sum[n][c + 2];
        two[c] = keep + __shfl_xor_sync(FULL, give, 16);
      }
      const float keep = odd ? two[1] : two[0], give = odd ? two[0] : two[1];
      whole[n] = keep + __shfl_xor_sync(FULL, give, 8);
    }
    t.part[warp][row][column] = make_float2(whole[0], whole[1]);
  }
}

// d of rows mine..stop-1, one after another: a lane has a column. One warp.
template <int K>
__device__ __forceinline__ void solve(Tile<K>& t, int mine, int stop) {
  const int lane = threadIdx.x & 31;
  float d[FOLD];
#pragma unroll
  for (int i = 0; i < FOLD; ++i) {
    d[i] = t.d[i][lane];
    if (i < mine || i >= stop) continue;
    const float told = t.part[0][i][lane].x + t.part[1][i][lane].x + t.part[2][i][lane].x + t.part[3][i][lane].x;
    float rest = fmaf(-t.since[i], told, d[i]);
#pragma unroll
    for (int j = 0; j < i; ++j) rest = fmaf(-t.kk[i][j], d[j], rest);
    t.d[i][lane] = d[i] = t.beta[i] * rest;
  }
}

template <int K>
__device__ __forceinline__ void fold(const Tile<K>& t, float (&s)[K / 16][4]) {
  constexpr int ROWS = K / 16;
  const int at = (threadIdx.x >> 3) * ROWS, column = (threadIdx.x & 7) * 4;
  const float decay = t.since[FOLD - 1];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) s[r][c] *= decay;
#pragma unroll 4
  for (int j = 0; j < FOLD; ++j) {
    float x[ROWS], d[4];
    load_values<ROWS>(x, &t.k[j][at]);
    load_values<4>(d, &t.d[j][column]);
#pragma unroll
    for (int c = 0; c < 4; ++c) d[c] *= t.left[j];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[r][c] = fmaf(x[r], d[c], s[r][c]);
  }
}

template <int K>
__device__ __forceinline__ void rule_body(Tile<K>& t, float* __restrict__ out, const float* __restrict__ q,
                                          const float* __restrict__ k, const float* __restrict__ v, const float* __restrict__ g,
                                          const float* __restrict__ beta, float* states, i64 stride, i64 state_at, i64 log_k_at,
                                          i64 log_d_at, i64 log_g_at, i64 folded_at, int log_entries,
                                          const int* __restrict__ row_begin, const int* __restrict__ row_count,
                                          const int* __restrict__ positions, const int* __restrict__ known,
                                          const int* __restrict__ slots, int key_heads, int value_heads, int value_dim) {
  constexpr int ROWS = K / 16;
  const int sequence = blockIdx.z, head = blockIdx.y, column = blockIdx.x * 32, count = row_count[sequence];
  if (!count) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first_row = row_begin[sequence], start = positions[first_row], last = start + count - 1;
  const Slot slot{states + slots[sequence] * stride, state_at, log_k_at, log_d_at, log_g_at, log_entries};
  const int base = start / FOLD * FOLD, kept = reinterpret_cast<const int*>(slot.base)[folded_at];
  const bool due = start && kept + FOLD == base;  // drafts were accepted up to here
  const int newest = max(base, min(known[sequence], last) / FOLD * FOLD);  // the state that stays in the slot
  float* state = slot.base + state_at + ((i64)head * K + (threadIdx.x >> 3) * ROWS) * value_dim + column + (threadIdx.x & 7) * 4;
  float s[ROWS][4] = {};
  if (start)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) load_values<4>(s[r], state + (i64)r * value_dim);
  for (int tile = due ? base - FOLD : base;; tile += FOLD) {
    load_tile<K>(t, slot, q, k, v, g, beta, tile, first_row, start, last, key_heads, value_heads, value_dim,
                 head / (value_heads / key_heads), head, column);
    if (tile == newest && (!start || tile > kept))
#pragma unroll
      for (int r = 0; r < ROWS; ++r) store_values<4>(state + (i64)r * value_dim, s[r]);
    const int mine = max(start - tile, 0), stop = min(last + 1 - tile, FOLD);
    if (mine < FOLD) {
      products<K>(t, mine, stop);
      through_state<K>(t, s, mine, stop);
      __syncthreads();
      if (warp == 0) solve<K>(t, mine, stop);
      __syncthreads();
      float sum[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = warp * 4 + r;
        sum[r] = t.since[i] * (t.part[0][i][lane].y + t.part[1][i][lane].y + t.part[2][i][lane].y + t.part[3][i][lane].y);
      }
      for (int j = 0; j < min(warp * 4 + 4, stop); ++j) {
        const float d = t.d[j][lane];
#pragma unroll
        for (int r = 0; r < 4; ++r)
          if (j <= warp * 4 + r) sum[r] = fmaf(t.kq[warp * 4 + r][j], d, sum[r]);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = warp * 4 + r, position = tile + i;
        if (i < mine || i >= stop) continue;
        const i64 at = (i64)head * value_dim + column + lane, width = (i64)value_heads * value_dim;
        out[(i64)(first_row + position - start) * width + at] = sum[r];
        if (position > last - log_entries) slot.base[log_d_at + position % log_entries * width + at] = t.d[i][lane];
      }
    }
    if (tile + FOLD > last) break;
    fold<K>(t, s);
    __syncthreads();
  }
}

#define RULE(K)                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(128, 4) delta_rule_k##K(                                                         \
      float* out, const float* q, const float* k, const float* v, const float* g, const float* beta, float* states, i64 stride, \
      i64 state_at, i64 log_k_at, i64 log_d_at, i64 log_g_at, i64 folded_at, int log_entries, const int* row_begin,             \
      const int* row_count, const int* positions, const int* known, const int* slots, int key_heads, int value_heads,           \
      int value_dim) {                                                                                                          \
    __shared__ Tile<K> tile;                                                                                                    \
    rule_body<K>(tile, out, q, k, v, g, beta, states, stride, state_at, log_k_at, log_d_at, log_g_at, folded_at, log_entries,   \
                 row_begin, row_count, positions, known, slots, key_heads, value_heads, value_dim);                             \
  }                                                                                                                             \
  KERNEL_EXPORT(delta_rule_k##K)
RULE(32)
RULE(64)
RULE(128)

// What a step's rows leave behind -------------------------------------------------------------------------------------
// Inputs of the convolution, keys and decays go to their rings; of many rows the last that fit. After delta_rule of the same
// layer, which still reads what they overwrite. Floor: bytes; 6 a channel of the convolution and row, 8 a channel of the keys.
extern "C" __global__ void __launch_bounds__(256, 2)
    delta_log(float* states, i64 stride, i64 conv_at, i64 log_k_at, i64 log_g_at, int conv_entries, int log_entries, const bf16* mixed,
              int mixed_stride, const float* k, const float* g, const int* row_begin, const int* row_count, const int* positions,
              const int* slots, int key_heads, int value_heads, int key_dim, int conv_width) {
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
