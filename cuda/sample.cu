// Drawing tokens from logits, and judging drafts by the draws. Twin: gpu_worker/model/sampler.py, draw and draft.
//
// struct DrawParams, one record a sequence of the step: penalties.cuh and gpu_worker/device/draw_params.py.
//
// Kernels:
//
//   draw(int* drawn, const float* logits, int columns, const DrawParams* params, const int* tokens, const int* positions,
//        const int* row_begin, const int* row_count, const int* drafts, const int* draw_rows, const int* draw_seq)
//     grid N x 1024 threads. Draw n is from logits[n] (float32 [N][columns]) of row r = draw_rows[n] of sequence
//     s = draw_seq[n] (either < 0: padding, drawn[n] is left alone), for position positions[r] + 1. Drafts of s before it in
//     the step count as tokens for penalties. drawn[n]: token, -1 the logits are not finite, -2 no token is left.
//
//   draw_draft(int* tokens, const float* logits, int columns, const int* ids, const int* column_of, int vocab,
//              const DrawParams* params, const int* positions, const int* row_begin, int depth)
//     grid S x 1024. Sequence s drafts from logits[s] for position positions[s] + 1 (positions[s] < 0: it does not), behind
//     `depth` drafts of this step. Column c stands for token ids[c], and column_of[token] int32 [vocab] is its column or -1;
//     both null: column c is token c. Result, -1 if there is none, to tokens[row_begin[s] + 1 + depth].
//     Run it for depth 0, 1, ... in turn.
//
//   accept(int* accepted, const int* drawn, const int* tokens, const int* row_begin, const int* row_count, const int* drafts,
//          const int* first_draw, int sequences)
//     one thread a sequence. accepted[s]: how many of its drafts, in order, equal the draws in their places; a draft behind
//     which the draw failed does not count, so drawn[first_draw ... first_draw + accepted] are tokens, or accepted is 0 and
//     drawn[first_draw] says why there is none. -1 where it draws nothing (first_draw[s] < 0).
//
// A row of logits is read from L2 once for its maximum, once more for the noise if the temperature is not 0, and about five
// to twelve times for each of top-k and top-p: their cut is found by bisection, over keys in shared memory as soon as few
// enough are undecided. The key of a column is its distance below the best logit, (best - logit) / temperature, as the bits
// of a float32: ascending keys are falling probabilities. All sums are of integers (counts, or weights in units of 2^-44),
// so neither order nor the number of threads decides anything.
//
// Launch: no dynamic shared memory, 16.5 KiB static. 56 registers, of 64 that a block of 1024 threads can have.
// Floor: one read of the logits, 4 bytes a column, at the L2 rate of one SM, since a row has one block. Not measured on a card.
#include "penalties.cuh"

constexpr int THREADS = 1024;
constexpr int IN_FLIGHT = 4;  // loads of one thread at a time
constexpr int LISTED = 4096;  // keys that fit into shared memory
constexpr int NOT_FINITE = -1, NONE_LEFT = -2;
constexpr unsigned INFINITE = 0x7f800000u;    // the key of what is banned
constexpr unsigned WEIGHTLESS = 0x42000000u;  // 32: behind it a weight is less than a unit
constexpr float FAR = 8.f;                    // see `noisiest`
constexpr double TO_NOISE = 1. / 4503599627370496.;  // 2^-52

struct Shared {
  u64 scores[32];
  u64 masses[3];  // of sums, see sum_between
  int counts[3];
  int columns[32];
  int listed;
  int last;
  unsigned found;
  u64 least_hash;
  unsigned keys[LISTED];
};

// One draw, as far as all threads know it.
struct Draw {
  const float* logits;
  int columns;
  float best;  // the greatest logit
  float temperature;
  int turn;  // sums so far

  __device__ __forceinline__ unsigned key(float logit) const { return __float_as_uint(fabsf((logit - best) / temperature)); }
};

// What the filters leave: keys below `edge`, and of those equal to it the first `ties` in order of columns.
struct Kept {
  unsigned edge;
  int ties;
  int equal;  // how many have the key `edge`, where ties > 0
};

// f(column, value) for this thread's share of a row.
template <class F>
__device__ __forceinline__ void each_column(const float* logits, int columns, F f) {
  for (int first = threadIdx.x; first < columns; first += IN_FLIGHT * THREADS) {
    float v[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) v[i] = first + i * THREADS < columns ? logits[first + i * THREADS] : 0.f;
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i)
      if (first + i * THREADS < columns) f(first + i * THREADS, v[i]);
  }
}

// maxima -------------------------------------------------------------------------------------------------------------
// Grows with the float; NaN is the greatest, and both zeros are the same.
__device__ __forceinline__ u64 ordered(float v) {
  const unsigned bits = __float_as_uint(v + 0.f);
  if ((bits & 0x7fffffffu) > INFINITE) return 0xffffffffu;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ u64 ordered(double v) {  // no NaN
  const u64 bits = (u64)__double_as_longlong(v + 0.);
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

struct Best {
  u64 score = 0;
  int column = 0x7fffffff;

  __device__ __forceinline__ void take(u64 s, int c) {
    if (s > score || (s == score && c < column)) {
      score = s;
      column = c;
    }
  }
  __device__ __forceinline__ void of_warp() {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      const u64 s = __shfl_xor_sync(FULL, score, o);
      const int c = __shfl_xor_sync(FULL, column, o);
      take(s, c);
    }
  }
};

// The greatest of all threads' scores and its column, the lowest where several are equal; every thread gets it.
__device__ __forceinline__ Best of_block(Best b, Shared* s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  b.of_warp();
  __syncthreads();  // the places may still be read from the last time
  if (lane == 0) {
    s->scores[warp] = b.score;
    s->columns[warp] = b.column;
  }
  __syncthreads();
  b.score = s->scores[lane];
  b.column = s->columns[lane];
  b.of_warp();
  return b;
}

__device__ __forceinline__ int best_column(const float* logits, int columns, Shared* s) {
  Best b;
  each_column(logits, columns, [&](int column, float v) { b.take(ordered(v), column); });
  return of_block(b, s).column;
}

__device__ __forceinline__ bool finite(float v) { return fabsf(v) < INFINITY; }

// filters ------------------------------------------------------------------------------------------------------------
struct Sum {
  u64 mass;
  int count;
};

// exp(-distance) in units of 2^-44: all columns together stay below 2^64, up to a million of them.
__device__ __forceinline__ u64 weight(unsigned key) { return (u64)(expf(-__uint_as_float(key)) * 17592186044416.f); }

// Mass and number of the keys from `low` to below `end`. Three places take turns, so that one barrier is enough: the next
// one is cleared before it, and that one was last read two sums ago.
__device__ __forceinline__ Sum sum_between(Draw& draw, bool listed, unsigned low, unsigned end, bool by_mass, Shared* s) {
  Sum own{0, 0};
  const auto add = [&](unsigned key) {
    if (key < low || key >= end) return;
    ++own.count;
    if (by_mass) own.mass += weight(key);
  };
  if (listed)
    for (int i = threadIdx.x; i < s->listed; i += THREADS) add(s->keys[i]);
  else
    each_column(draw.logits, draw.columns, [&](int, float v) { add(draw.key(v)); });
#pragma unroll
  for (int o = 16; o; o >>= 1) own.mass += __shfl_xor_sync(FULL, own.mass, o);
  own.count = (int)__reduce_add_sync(FULL, (unsigned)own.count);
  const int place = draw.turn % 3;
  draw.turn++;
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&s->masses[place], own.mass);
    atomicAdd(&s->counts[place], own.count);
  }
  if (threadIdx.x == 0) {
    s->masses[draw.turn % 3] = 0;
    s->counts[draw.turn % 3] = 0;
  }
  __syncthreads();
  return {s->masses[place], s->counts[place]};
}

// Where to halve the keys: first what is likely from the rest, then the distances down to a sixteenth, then their bits.
__device__ __forceinline__ unsigned middle(unsigned low, unsigned high) {
  if (low < WEIGHTLESS && WEIGHTLESS < high) return WEIGHTLESS;
  const float near = __uint_as_float(low), far = __uint_as_float(high);
  if (high <= WEIGHTLESS && far - near > 0.0625f) return __float_as_uint(0.5f * (near + far));
  return low + (high - low) / 2;
}

// The least key up to which the columns' number, or mass, reaches `goal`; `kept` is cut there. `high`: it is no greater;
// `count` keys at most are up to there.
__device__ __forceinline__ Kept cut(Draw& draw, unsigned high, int count, u64 goal, bool by_mass, Shared* s) {
  unsigned low = 0;
  u64 below = 0;
  bool listed = false;
  while (low < high) {
    const unsigned mid = middle(low, high);
    const Sum half = sum_between(draw, listed, low, mid + 1, by_mass, s);
    const u64 reached = below + (by_mass ? half.mass : (u64)half.count);
    if (reached >= goal) {
      high = mid;
      count = half.count;
    } else {
      low = mid + 1;
      below = reached;
      count -= half.count;
    }
    if (!listed && count <= LISTED) {
      if (threadIdx.x == 0) s->listed = 0;
      __syncthreads();
      each_column(draw.logits, draw.columns, [&](int, float v) {
        const unsigned key = draw.key(v);
        if (key >= low && key <= high) s->keys[atomicAdd(&s->listed, 1)] = key;
      });
      __syncthreads();
      listed = true;
    }
  }
  const Sum equal = sum_between(draw, listed, low, low + 1, by_mass, s);
  const u64 one = by_mass ? weight(low) : 1, wanted = one ? (goal - below + one - 1) / one : 1;
  return {low, wanted < (u64)equal.count ? (int)wanted : equal.count, equal.count};
}

__device__ __forceinline__ Kept filtered(Draw& draw, const DrawParams& p, Shared* s) {
  Kept kept{INFINITE, 0, 0};
  if (p.least > -INFINITY) kept.edge = __float_as_uint(fabsf(p.least)) + 1;
  if (p.top_k > 0 && p.top_k < draw.columns) {
    const int count = sum_between(draw, false, 0, kept.edge, false, s).count;
    if (p.top_k < count) kept = cut(draw, kept.edge - 1, count, p.top_k, false, s);
  }
  if (p.top_p < 1.) {
    const Sum below = sum_between(draw, false, 0, kept.edge, true, s);
    const u64 one = kept.ties ? weight(kept.edge) : 0;
    const u64 goal = (u64)ceil(p.top_p * (double)(below.mass + kept.ties * one));
    if (below.mass >= goal) {
      kept = cut(draw, min(kept.edge - 1, WEIGHTLESS), below.count, goal, true, s);
    } else if (one) {
      const u64 wanted = (goal - below.mass + one - 1) / one;
      if (wanted < (u64)kept.ties) kept.ties = (int)wanted;
    }
  }
  return kept;
}

// The column of the last key that is kept of those that equal the edge.
__device__ __forceinline__ int last_column(const Draw& draw, const Kept& kept, Shared* s) {
  if (kept.ties == kept.equal) return kept.ties ? draw.columns : -1;
  int before = 0;
  for (int first = 0; first < draw.columns; first += THREADS) {
    const int column = first + threadIdx.x;
    const bool hit = column < draw.columns && draw.key(draw.logits[column]) == kept.edge;
    const unsigned of_warp = __ballot_sync(FULL, hit);
    if (threadIdx.x % 32 == 0) s->columns[threadIdx.x / 32] = __popc(of_warp);
    const int found = __syncthreads_count(hit);
    if (before + found >= kept.ties) {
      int rank = before + 1 + __popc(of_warp & ((1u << threadIdx.x % 32) - 1));
      for (unsigned w = 0; w < threadIdx.x / 32; ++w) rank += s->columns[w];
      if (hit && rank == kept.ties) s->last = column;
      break;
    }
    before += found;
  }
  __syncthreads();
  return s->last;
}

// noise --------------------------------------------------------------------------------------------------------------
// Gumbel noise grows with the hash, 52 bits of it.
__device__ __forceinline__ u64 hash_of(u64 stream, int id) { return mix64(stream + (u64)id * GOLDEN) >> 12; }
__device__ __forceinline__ double noise(u64 hash) { return -log(-log(((double)hash + 0.5) * TO_NOISE)); }

// argmax of logit / temperature + noise. Only a column that is not FAR below the best, or whose hash is so great that its
// noise may win by as much, costs logarithms; the others cannot win.
template <class Id>
__device__ __forceinline__ int noisiest(const Draw& draw, const Kept& kept, int best, u64 stream, Id id, Shared* s) {
  const int last = last_column(draw, kept, s);
  if (threadIdx.x == 0) {
    const double needed = noise(hash_of(stream, id(best))) + FAR - 1e-6;
    const double least = exp(-exp(-needed)) / TO_NOISE - 2.;
    s->least_hash = least > 0. ? (u64)least : 0;
  }
  __syncthreads();
  const u64 least_hash = s->least_hash;
  Best b;
  each_column(draw.logits, draw.columns, [&](int column, float v) {
    const unsigned key = draw.key(v);
    if (key > kept.edge || (key == kept.edge && column > last) || key >= INFINITE) return;
    const u64 hash = hash_of(stream, id(column));
    const float distance = __uint_as_float(key);
    if (distance < FAR || hash >= least_hash) b.take(ordered(noise(hash) - (double)distance), column);
  });
  return of_block(b, s).column;
}

// one draw -----------------------------------------------------------------------------------------------------------
// The drawn column, NOT_FINITE or NONE_LEFT, the same in every thread. `row`: which of its sequence's scratch rows is its own.
template <class Id, class Column>
__device__ __forceinline__ int draw_from(const float* raw, int columns, const DrawParams& p, int row, const int* drafts,
                                         int position, Id id, Column column, Shared* s) {
  int best = best_column(raw, columns, s);
  if (!finite(raw[best])) return NOT_FINITE;
  const float* logits = raw;
  if (p.changed) {
    float* changed = p.changed + (i64)row * columns;
    each_column(raw, columns, [&](int c, float v) { changed[c] = v; });
    change(changed, p, drafts, row, column, &s->found);
    best = best_column(changed, columns, s);
    if (!finite(changed[best])) return NONE_LEFT;
    logits = changed;
  }
  if (!(p.temperature > 0.f)) return best;
  if (threadIdx.x < 3) {
    s->masses[threadIdx.x] = 0;
    s->counts[threadIdx.x] = 0;
  }
  __syncthreads();
  Draw draw{logits, columns, logits[best], p.temperature, 0};
  const Kept kept = filtered(draw, p, s);
  return noisiest(draw, kept, best, mix64(p.key + (u64)position * GOLDEN), id, s);
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    draw(int* drawn, const float* logits, int columns, const DrawParams* params, const int* tokens, const int* positions,
         const int* row_begin, const int* row_count, const int* drafts, const int* draw_rows, const int* draw_seq) {
  __shared__ Shared shared;
  const int n = blockIdx.x, row = draw_rows[n], seq = draw_seq[n];
  if (row < 0 || seq < 0) return;
  const int first_draft = row_begin[seq] + row_count[seq] - drafts[seq];
  const auto id = [](int column) { return column; };
  const auto column = [=](int token) { return token < columns ? token : -1; };
  const int found = draw_from(logits + (i64)n * columns, columns, params[seq], row - (first_draft - 1), tokens + first_draft,
                              positions[row] + 1, id, column, &shared);
  if (threadIdx.x == 0) drawn[n] = found;
}
KERNEL_EXPORT(draw)

extern "C" __global__ void __launch_bounds__(1024, 1)
    draw_draft(int* tokens, const float* logits, int columns, const int* ids, const int* column_of, int vocab,
               const DrawParams* params, const int* positions, const int* row_begin, int depth) {
  __shared__ Shared shared;
  const int seq = blockIdx.x, before = positions[seq];
  if (before < 0) return;
  int* drafts = tokens + row_begin[seq] + 1;
  const auto id = [=](int column) { return ids ? ids[column] : column; };
  const auto column = [=](int token) {
    if (token < 0 || token >= vocab) return -1;
    return column_of ? column_of[token] : token;
  };
  const int found = draw_from(logits + (i64)seq * columns, columns, params[seq], depth, drafts, before + 1, id, column, &shared);
  if (threadIdx.x == 0) drafts[depth] = found < 0 ? -1 : id(found);
}
KERNEL_EXPORT(draw_draft)

extern "C" __global__ void __launch_bounds__(128, 2)
    accept(int* accepted, const int* drawn, const int* tokens, const int* row_begin, const int* row_count, const int* drafts,
           const int* first_draw, int sequences) {
  const int s = blockIdx.x * 128 + threadIdx.x;
  if (s >= sequences) return;
  if (first_draw[s] < 0) {
    accepted[s] = -1;
    return;
  }
  const int count = drafts[s];
  const int* draws = drawn + first_draw[s];
  const int* given = tokens + row_begin[s] + row_count[s] - count;
  int agree = 0;
  while (agree < count && draws[agree] >= 0 && draws[agree] == given[agree]) ++agree;
  accepted[s] = agree && draws[agree] < 0 ? agree - 1 : agree;
}
KERNEL_EXPORT(accept)
