// The gated delta rule. Twin: gpu_worker/model/delta.py; layouts and the launches around it: delta.cu; the rule of slots, logs
// and folds: gpu_worker/device/state_cache.py.
//
// With b = 16 * (q / 16), S the state after the tokens below b, and G(i) the sum of g over b..i, row q of a value head is
//   d_q   = beta_q (v_q - e^G(q) S^T k_q - sum over b <= j < q of e^(G(q) - G(j)) (k_j . k_q) d_j)
//   out_q = e^G(q) S^T q_q + sum over b <= j <= q of e^(G(q) - G(j)) (k_j . q_q) d_j
//   fold    S = e^G(b+15) S + sum over j of e^(G(b+15) - G(j)) k_j d_j^T
// so a decode step reads a state and writes none but at every 16th token. All arithmetic is float32.
//
// Grid (value_dim / 32, value_heads, S) x 128. A block has 32 columns (values) of one value head's state of one sequence in
// registers, key_dim / 4 values a thread: thread = (one of 16 groups of rows, one of 8 groups of 4 columns). It goes through
// the sequence's rows in tiles of 16 positions; the tile before them comes first where a fold is due, and what was fed before
// is in the log. The state is written once at most, log_d for the last `log_entries` rows; `folded` and the other logs are not.
// 37 KiB of shared memory (key_dim 128), 128 registers.
//
// Floor: bytes when decoding, S * value_heads * key_dim * value_dim * 4 and about a tenth of that for the log; operations in a
// prompt, about key_dim * 1,900 multiply-adds a block and tile. Not measured on a card.
#include "values.cuh"

template <int K>
struct __align__(16) Tile {
  static constexpr int PITCH = K + 4;  // so that rows of one column of 16 bytes lie in different banks
  float k[FOLD][PITCH], q[FOLD][PITCH];
  float d[FOLD][32];                                       // of a row of this step: v, until the row is worked off
  float kk[FOLD][FOLD], kq[FOLD][FOLD];                    // [row][entry]: (k_j . k_q) and (k_j . q_q), times e^(G(q) - G(j))
  float2 part[4][FOLD][32];                                // each warp's share of S^T k and of S^T q
  float total[FOLD], since[FOLD], left[FOLD], beta[FOLD];  // G, e^G, e^(G(15) - G), beta
};

struct Log {
  float *k, *d, *g;
  int entries;  // 16 at least
};

// Entry of the log of position tile + row, row < 16, where `at` is the entry of `tile`.
__device__ __forceinline__ int entry_of(const Log& log, int at, int row) {
  return at + row < log.entries ? at + row : at + row - log.entries;
}

// Rows before `mine` come from the log, those before `stop` from the step's rows (row 0 of the tile would be `first_row` of
// them), the others are zero. `at` is the log's entry of the tile.
template <int K>
__device__ __forceinline__ void load_tile(Tile<K>& t, const Log& log, int at, const float* q, const float* k, const float* v,
                                          const float* g, const float* beta, int first_row, int mine, int stop, int key_heads,
                                          int value_heads, int value_dim, int key_head, int head, int column) {
  const int thread = threadIdx.x;
#pragma unroll
  for (int i = thread * 4; i < FOLD * K; i += 128 * 4) {
    const int row = i / K, c = i % K;
    const bool logged = row < mine, fed = !logged && row < stop;
    const i64 from = ((logged ? entry_of(log, at, row) : fed ? first_row + row : 0) * (i64)key_heads + key_head) * K + c;
    copy16_async(&t.k[row][c], (logged ? log.k : k) + from, logged || fed);
    copy16_async(&t.q[row][c], q + from, fed);
  }
  {
    const int row = thread / 8, c = thread % 8 * 4;
    const bool logged = row < mine, fed = !logged && row < stop;
    const i64 from = ((logged ? entry_of(log, at, row) : fed ? first_row + row : 0) * (i64)value_heads + head) * value_dim;
    copy16_async(&t.d[row][c], (logged ? log.d : v) + from + column + c, logged || fed);
  }
  copies_commit();
  if (thread < 32) {
    float own = 0.f, strength = 0.f, total = 0.f;
    if (thread < FOLD) {
      if (thread < mine) {
        own = log.g[(i64)entry_of(log, at, thread) * value_heads + head];
      } else if (thread < stop) {
        const i64 from = (i64)(first_row + thread) * value_heads + head;
        own = g[from], strength = beta[from];
      }
    }
#pragma unroll
    for (int j = 0; j < FOLD; ++j) {
      const float other = __shfl_sync(FULL, own, j);
      if (j <= thread) total += other;
    }
    const float all = __shfl_sync(FULL, total, FOLD - 1);
    if (thread < FOLD) {
      t.total[thread] = total, t.beta[thread] = strength;
      t.since[thread] = expf(total), t.left[thread] = expf(all - total);
    }
  }
  copies_wait<0>();
  __syncthreads();
}

// kk and kq of rows mine..stop-1. A warp has four rows; a lane two entries of eight, then of the other eight, and every eighth
// 16 bytes of the keys, so that an entry read serves eight products.
template <int K>
__device__ __forceinline__ void products(Tile<K>& t, int mine, int stop) {
  const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 4, slice = lane & 7;
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
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, at = thread / 8 * ROWS;
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
    float rest = fmaf(-t.since[i], told, d[i]), kk[FOLD];
    load_values<FOLD>(kk, t.kk[i]);  // of which the first i are there
#pragma unroll
    for (int j = 0; j < i; ++j) rest = fmaf(-kk[j], d[j], rest);
    t.d[i][lane] = d[i] = t.beta[i] * rest;
  }
}

// out of rows row..row+3, of which the real ones count: a lane has a column.
template <int K>
__device__ __forceinline__ void outputs(const Tile<K>& t, int row, float* sum) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int i = row + r;
    const float told = t.part[0][i][lane].y + t.part[1][i][lane].y + t.part[2][i][lane].y + t.part[3][i][lane].y;
    sum[r] = t.since[i] * told;
  }
  for (int j = 0; j <= row; j += 4) {
    float d[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) d[n] = t.d[j + n][lane];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float kq[4];
      load_values<4>(kq, &t.kq[row + r][j]);
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (j + n <= row + r) sum[r] = fmaf(kq[n], d[n], sum[r]);
    }
  }
}

template <int K>
__device__ __forceinline__ void fold(const Tile<K>& t, float (&s)[K / 16][4]) {
  constexpr int ROWS = K / 16;
  const int thread = threadIdx.x, at = thread / 8 * ROWS, column = thread % 8 * 4;
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
  const int thread = threadIdx.x;  // signed: with unsigned places nvcc 13.0 stores the state in pieces of 4 bytes
  const int first_row = row_begin[sequence], start = positions[first_row], last = start + count - 1;
  float* slot = states + slots[sequence] * stride;
  const Log log{slot + log_k_at, slot + log_d_at, slot + log_g_at, log_entries};
  const int base = start / FOLD * FOLD, kept = start ? reinterpret_cast<const int*>(slot)[folded_at] : 0;
  const bool due = kept + FOLD == base;  // drafts were accepted up to here
  const int newest = max(base, min(known[sequence], last) / FOLD * FOLD);  // the state that stays in the slot
  float* state = slot + state_at + ((i64)head * K + thread / 8 * ROWS) * value_dim + column + thread % 8 * 4;
  float s[ROWS][4] = {};
  if (start)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) load_values<4>(s[r], state + (i64)r * value_dim);
  for (int tile = due ? base - FOLD : base;; tile += FOLD) {
    const int at = tile % log_entries, mine = max(start - tile, 0), stop = min(last + 1 - tile, FOLD);
    load_tile<K>(t, log, at, q, k, v, g, beta, first_row + tile - start, mine, stop, key_heads, value_heads, value_dim,
                 head / (value_heads / key_heads), head, column);
    if (tile == newest && (!start || tile > kept))
#pragma unroll
      for (int r = 0; r < ROWS; ++r) store_values<4>(state + (i64)r * value_dim, s[r]);
    if (mine < FOLD) {
      products<K>(t, mine, stop);
      through_state<K>(t, s, mine, stop);
      __syncthreads();
      if (thread < 32) solve<K>(t, mine, stop);
      __syncthreads();
      const int lane = thread & 31, row = thread / 32 * 4;  // four rows a warp, a column a lane
      float sum[4];
      if (row < stop && row + 4 > mine) outputs<K>(t, row, sum);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = row + r;
        if (i < mine || i >= stop) continue;
        const i64 value = (i64)head * value_dim + column + lane, width = (i64)value_heads * value_dim;
        out[(first_row + tile + i - start) * width + value] = sum[r];
        if (tile + i > last - log_entries) log.d[entry_of(log, at, i) * width + value] = t.d[i][lane];
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
