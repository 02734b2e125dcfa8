// Causal attention of a few query vectors over the cells of one key-value head, block by block.
//
// A sequence's cells are cut at absolute positions into segments of 256 cells; a segment is reduced in tiles of 64 from its
// start, segments are merged in order. So a row's result is a function of its position and its cells, whether segments run
// on one thread after another or on several, and whichever rows share the tile.
#pragma once
#include <vector>
#include "vec.h"

constexpr int SEGMENT = 256, TILE_CELLS = 64, QUERIES = 12;
constexpr float NEVER = -3e38f;  // below every score; finite, so that differences stay numbers

struct Pool {
  uint8_t* base;
  int block_size;  // cells, a multiple of 16
  size_t block_stride, layer_stride, part_stride, head_stride;  // in elements
};

// State of one query vector: running maximum, sum of weights, weighted sum of values [head_dim].
struct State {
  float highest, sum;
};

struct AttentionScratch {
  std::vector<uint32_t> keys;   // [64 / 16][head_dim / per word][16]
  std::vector<float> values;    // [64][head_dim]
  std::vector<float> scores;    // [queries][64]
  std::vector<float> part;      // [queries][head_dim]
  std::vector<float> lane_sums; // [queries][16]
  std::vector<State> state;     // [queries]
};

PK_INLINE V load_value(const bf16* p) { return load_bf16(p); }
PK_INLINE V load_value(const float* p) { return load(p); }
PK_INLINE int words(const bf16*, int dim) { return dim / 2; }
PK_INLINE int words(const float*, int dim) { return dim; }
PK_INLINE V dot_word(V sum, const uint32_t* keys, const bf16* query) { return dot(sum, load_pairs(keys), load_pair(query)); }
PK_INLINE V dot_word(V sum, const uint32_t* keys, const float* query) { return fma(load((const float*)keys), set1(*query), sum); }
PK_INLINE int step(const bf16*) { return 2; }
PK_INLINE int step(const float*) { return 1; }

// 16 cells' keys, [cell][words] -> [word][cell]. Cells from `cells` on repeat the last one: they are masked later.
template <class T>
void transpose_keys(const T* keys, int dim, int cells, uint32_t* out) {
  const int count = words(keys, dim);
  const uint32_t* rows[16];
  for (int i = 0; i < 16; i++) rows[i] = (const uint32_t*)(keys + (size_t)(i < cells ? i : cells - 1) * dim);
  int w = 0;
  for (; w + 16 <= count; w += 16) {
    transpose16(rows, out + w * 16);
    for (int i = 0; i < 16; i++) rows[i] += 16;
  }
  for (int j = 0; w + j < count; j++)
    for (int i = 0; i < 16; i++) out[(w + j) * 16 + i] = rows[i][j];
}

template <int N, class T>
PK_INLINE void score(const uint32_t* keys, const T* queries, int dim, V scale, float* scores) {
  V sum[N];
  for (int q = 0; q < N; q++) sum[q] = zero();
  for (int w = 0; w < words(queries, dim); w++)
    for (int q = 0; q < N; q++) sum[q] = dot_word(sum[q], keys + w * 16, queries + (size_t)q * dim + w * step(queries));
  for (int q = 0; q < N; q++) store(scores + q * TILE_CELLS, mul(sum[q], scale));
}

template <class T>
void scores_of(const uint32_t* keys, const T* queries, int count, int dim, V scale, float* scores) {
  int q = 0;
  for (; q + 6 <= count; q += 6) score<6>(keys, queries + (size_t)q * dim, dim, scale, scores + q * TILE_CELLS);
  for (; q + 3 <= count; q += 3) score<3>(keys, queries + (size_t)q * dim, dim, scale, scores + q * TILE_CELLS);
  for (; q < count; q++) score<1>(keys, queries + (size_t)q * dim, dim, scale, scores + q * TILE_CELLS);
}

// out[q][0 .. 16 D) += sum over cells of weight[q][cell] * values[cell][...]
template <int N, int D, class T>
PK_INLINE void weigh(const float* weights, const T* values, int dim, int cells, float* out) {
  V sum[N][D];
  for (int q = 0; q < N; q++)
    for (int d = 0; d < D; d++) sum[q][d] = load(out + (size_t)q * dim + d * LANES);
  for (int i = 0; i < cells; i++) {
    V value[D];
    for (int d = 0; d < D; d++) value[d] = load_value(values + (size_t)i * dim + d * LANES);
    for (int q = 0; q < N; q++) {
      V weight = set1(weights[q * TILE_CELLS + i]);
      for (int d = 0; d < D; d++) sum[q][d] = fma(weight, value[d], sum[q][d]);
    }
  }
  for (int q = 0; q < N; q++)
    for (int d = 0; d < D; d++) store(out + (size_t)q * dim + d * LANES, sum[q][d]);
}

template <int N, class T>
void weigh_all(const float* weights, const T* values, int dim, int cells, float* out) {
  int d = 0;
  for (; d + 64 <= dim; d += 64) weigh<N, 4>(weights, values + d, dim, cells, out + d);
  for (; d < dim; d += LANES) weigh<N, 1>(weights, values + d, dim, cells, out + d);
}

template <class T>
void values_of(const float* weights, const T* values, int count, int dim, int cells, float* out) {
  int q = 0;
  for (; q + 6 <= count; q += 6) weigh_all<6>(weights + q * TILE_CELLS, values, dim, cells, out + (size_t)q * dim);
  for (; q + 3 <= count; q += 3) weigh_all<3>(weights + q * TILE_CELLS, values, dim, cells, out + (size_t)q * dim);
  for (; q < count; q++) weigh_all<1>(weights + q * TILE_CELLS, values, dim, cells, out + (size_t)q * dim);
}

// Blocks lie scattered, so the processor cannot guess the next one: ask for it while this one is worked on.
template <class T>
PK_INLINE void prefetch_cells(const T* cells, int dim) {
  const char* p = (const char*)cells;
  for (size_t i = 0; i < sizeof(T) * dim * LANES; i += 64) prefetch(p + i);
}

// Scores of one tile become weights; maxima, sums and weighted sums move on to the new maximum.
inline void soften(AttentionScratch& s, const int* visible, int count, int group, int at, int chunks, int dim, int from) {
  for (int q = 0; q < count; q++) {
    float* row = s.scores.data() + q * TILE_CELLS;
    const int seen = visible[q / group] - at;  // cells of this tile that the row sees
    if (seen <= 0) {
      for (int c = 0; c < chunks; c++) store(row + c * LANES, zero());
      continue;
    }
    V high = set1(NEVER);
    for (int c = 0; c < chunks; c++) {
      V v = load(row + c * LANES);
      if (seen < (c + 1) * LANES) store(row + c * LANES, v = keep_first(v, std::max(seen - c * LANES, 0), NEVER));
      if (at + c == 0 && from) store(row, v = keep_from(v, from, NEVER));
      high = vmax(high, v);
    }
    const float before = s.state[q].highest, now = std::max(before, reduce_max(high));
    const V shift = set1(now);
    V sum = load(s.lane_sums.data() + q * LANES);
    if (now != before) {
      const V factor = vexp(set1(before - now));
      sum = mul(sum, factor);
      for (int d = 0; d < dim; d += LANES) {
        float* p = s.part.data() + (size_t)q * dim + d;
        store(p, mul(load(p), factor));
      }
    }
    for (int c = 0; c < chunks; c++) {
      V weight = vexp(sub(load(row + c * LANES), shift));
      if (seen < (c + 1) * LANES) weight = keep_first(weight, std::max(seen - c * LANES, 0), 0.f);
      if (at + c == 0 && from) weight = keep_from(weight, from, 0.f);
      store(row + c * LANES, weight);
      sum = add(sum, weight);
    }
    store(s.lane_sums.data() + q * LANES, sum);
    s.state[q].highest = now;
  }
}

// One segment for `rows` rows with `group` query vectors each, queries [rows * group][dim] in the cells' type. `visible` is
// the number of cells that each row sees, ascending, those below `from` (0..15) left out. Result in s.state and s.part.
template <class T>
void attend_segment(const Pool& pool, size_t layer_and_head, const int* table, int segment, const T* queries, const int* visible,
                    int rows, int group, int dim, int from, AttentionScratch& s) {
  const int count = rows * group, begin = segment * SEGMENT, end = std::min(begin + SEGMENT, visible[rows - 1]);
  const V scale = set1(1.f / std::sqrt((float)dim));
  s.keys.resize((size_t)dim * TILE_CELLS);
  s.scores.resize((size_t)count * TILE_CELLS);
  s.part.assign((size_t)count * dim, 0.f);
  s.lane_sums.assign((size_t)count * LANES, 0.f);
  s.state.assign(count, State{NEVER, 0.f});
  if (count > QUERIES) s.values.resize((size_t)dim * TILE_CELLS);
  auto keys_at = [&](int cell) {
    return (const T*)pool.base + (size_t)table[cell / pool.block_size] * pool.block_stride + layer_and_head +
           (size_t)(cell % pool.block_size) * dim;
  };
  for (int at = begin; at < end; at += TILE_CELLS) {
    const int cells = std::min(TILE_CELLS, end - at), chunks = (cells + LANES - 1) / LANES;
    const T* values[TILE_CELLS / LANES];
    if (at == begin) prefetch_cells(keys_at(at) + pool.part_stride, dim);
    for (int c = 0; c < chunks; c++) {
      const int cell = at + c * LANES;
      const T* keys = keys_at(cell);
      values[c] = keys + pool.part_stride;
      if (cell + TILE_CELLS < end) prefetch_cells(keys_at(cell + TILE_CELLS), dim);
      if (at == begin && c + 1 < chunks) {
        prefetch_cells(keys_at(cell + LANES), dim);
        prefetch_cells(keys_at(cell + LANES) + pool.part_stride, dim);
      }
      transpose_keys(keys, dim, std::min(LANES, cells - c * LANES), s.keys.data());
      scores_of(s.keys.data(), queries, count, dim, scale, s.scores.data() + c * LANES);
    }
    soften(s, visible, count, group, at, chunks, dim, from);
    for (int c = 0; c < chunks; c++) {
      const int here = std::min(LANES, cells - c * LANES);
      const float* weights = s.scores.data() + c * LANES;
      if (at + c * LANES + TILE_CELLS < end) prefetch_cells(keys_at(at + c * LANES + TILE_CELLS) + pool.part_stride, dim);
      if (count <= QUERIES) {
        values_of(weights, values[c], count, dim, here, s.part.data());
        continue;
      }
      float* copy = s.values.data();  // many queries read it: convert once
      for (int i = 0; i < here * dim; i += LANES) store(copy + i, load_value(values[c] + i));
      values_of(weights, (const float*)copy, count, dim, here, s.part.data());
    }
  }
  for (int q = 0; q < count; q++) s.state[q].sum = reduce_add(load(s.lane_sums.data() + q * LANES));
}

// into = into and the next segment's part.
inline void merge(State& state, float* into, const State& next, const float* part, int dim) {
  const float now = std::max(state.highest, next.highest);
  const float a = scalar_exp(state.highest - now), b = scalar_exp(next.highest - now);
  state.sum = state.sum * a + next.sum * b;
  state.highest = now;
  for (int d = 0; d < dim; d += LANES) store(into + d, fma(load(part + d), set1(b), mul(load(into + d), set1(a))));
}
