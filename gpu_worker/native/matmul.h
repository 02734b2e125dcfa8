// Products y = x W^T, row-invariant by construction: each element of y is one fixed sequence of operations over K, whatever
// the number of rows and however they are tiled.
//
// W is packed in panels of 16 output columns:
//   F32   [N/16][K][16] float
//   BF16  [N/16][K/2][16][2] bfloat16
//   Q8    [N/16][K/32]{ int8 q[32][16]; half d[16] }                      W = q d
//   Q4    [N/16][K/32]{ uint32 q[4][16]; half d[16]; half m[16] }         W = q d + m
// A Q4 word of column c holds 8 nibbles: pair p of word j is k = 8 j + 2 p (nibble p) and k + 1 (nibble p + 4).
// A Q4 group is summed over its integers first (exact in bfloat16), then scaled: sum += d * sum(q x) + m * sum(x).
#pragma once
#include <algorithm>
#include "vec.h"

enum Format { F32 = 0, BF16 = 1, Q8 = 2, Q4 = 3 };
constexpr int GROUP = 32;
constexpr size_t AHEAD = 1280;  // bytes of a panel that are asked for early: one pass over the weights is all that a few rows do
constexpr size_t Q4_BYTES = 4 * 64 + 64, Q8_BYTES = GROUP * 16 + 32;  // of one group of one panel

struct Matrix {
  int format;
  int n;  // output columns
  int k;
  const uint8_t* data;
  const float* bias;  // [n] or null

  int panels() const { return (n + LANES - 1) / LANES; }
  size_t panel_bytes() const {
    switch (format) {
      case F32: return (size_t)k * 64;
      case BF16: return (size_t)k * 32;
      case Q8: return (size_t)(k / GROUP) * Q8_BYTES;
      default: return (size_t)(k / GROUP) * Q4_BYTES;
    }
  }
  const uint8_t* panel(int i) const { return data + (size_t)i * panel_bytes(); }
};

// The panels of a tile, and how they are asked for early: what would lie behind a panel's end is the same place in the panel of
// the next tile, `jump` bytes further on. (Panels are short: without that a quarter of them would come late.)
struct Panels {
  const uint8_t* at[TILE_VECS];
  size_t bytes, jump;

  __attribute__((always_inline)) size_t ahead(size_t offset) const { return offset + AHEAD + (offset + AHEAD < bytes ? 0 : jump); }
};

// Rows that enter a product, in the forms that the formats read.
struct Rows {
  const float* f = nullptr;     // [rows][k], for F32 and Q8
  const bf16* b = nullptr;      // [rows][k], for BF16 and Q4
  const float* sums = nullptr;  // [rows][k / 32] of the bfloat16 values, for Q4
};

// A panel group ready for many rows: Q4 unpacked to bfloat16 pairs and float scales.
struct Unpacked {
  std::vector<bf16> pairs;    // [vecs][k / 2][16][2]
  std::vector<float> scales;  // [vecs][k / 32][2][16]: d, m
  const uint8_t* of = nullptr;
};

// Tiles: R rows by C panels; out[R][C][16].
template <int R, int C>
PK_INLINE void store_tile(const V (&sum)[R][C], float* out) {
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + (r * C + c) * LANES, sum[r][c]);
}

template <int R, int C>
PK_INLINE void clear(V (&sum)[R][C]) {
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sum[r][c] = zero();
}

template <int R, int C>
PK_INLINE void tile_f32(const Panels& w, int k, const float* x, float* out) {
  V sum[R][C];
  clear(sum);
  for (int i = 0; i < k; i++) {
    V weight[C];
    for (int c = 0; c < C; c++) weight[c] = load((const float*)w.at[c] + (size_t)i * LANES);
    for (int r = 0; r < R; r++) {
      V value = set1(x[(size_t)r * k + i]);
      for (int c = 0; c < C; c++) sum[r][c] = fma(weight[c], value, sum[r][c]);
    }
  }
  store_tile(sum, out);
}

template <int R, int C>
PK_INLINE void tile_bf16(const Panels& w, int k, const bf16* x, float* out) {
  V sum[R][C];
  clear(sum);
  for (int i = 0; i < k / 2; i++) {
    Pairs weight[C];
    for (int c = 0; c < C; c++) weight[c] = load_pairs(w.at[c] + (size_t)i * 64);
    for (int r = 0; r < R; r++) {
      uint32_t value = load_pair(x + (size_t)r * k + 2 * i);
      for (int c = 0; c < C; c++) sum[r][c] = dot(sum[r][c], weight[c], value);
    }
  }
  store_tile(sum, out);
}

template <int R, int C>
PK_INLINE void tile_q8(const Panels& w, int k, const float* x, float* out) {
  V sum[R][C];
  clear(sum);
  for (int g = 0; g < k / GROUP; g++) {
    V part[R][C];
    clear(part);
    const size_t ahead = w.ahead(g * Q8_BYTES);
    for (int i = 0; i < GROUP; i++) {
      V weight[C];
      for (int c = 0; c < C; c++) weight[c] = load_int8((const int8_t*)w.at[c] + g * Q8_BYTES + i * LANES);
      for (int c = 0; c < C && i % 4 == 0; c++) prefetch(w.at[c] + ahead + i * LANES);
      for (int r = 0; r < R; r++) {
        V value = set1(x[(size_t)r * k + g * GROUP + i]);
        for (int c = 0; c < C; c++) part[r][c] = fma(weight[c], value, part[r][c]);
      }
    }
    for (int c = 0; c < C; c++) {
      V d = load_half((const uint16_t*)(w.at[c] + g * Q8_BYTES + GROUP * LANES));
      for (int r = 0; r < R; r++) sum[r][c] = fma(part[r][c], d, sum[r][c]);
    }
  }
  store_tile(sum, out);
}

// The four pairs of word j, for every row of the tile.
template <int P, int R, int C>
PK_INLINE void q4_pair(V (&part)[R][C], const Pairs (&packed)[C], Pairs table, const bf16* x, int k, int at) {
  Pairs weight[C];
  for (int c = 0; c < C; c++) weight[c] = nibbles<P>(packed[c], table);
  for (int r = 0; r < R; r++) {
    uint32_t value = load_pair(x + (size_t)r * k + at + 2 * P);
    for (int c = 0; c < C; c++) part[r][c] = dot(part[r][c], weight[c], value);
  }
}

template <int R, int C>
PK_INLINE void tile_q4(const Panels& w, int k, const bf16* x, const float* sums, float* out) {
  const Pairs table = nibble_table();
  const int groups = k / GROUP;
  V sum[R][C];
  clear(sum);
  for (int g = 0; g < groups; g++) {
    V part[R][C];
    clear(part);
    const size_t ahead = w.ahead(g * Q4_BYTES);
    for (int j = 0; j < 4; j++) {
      Pairs packed[C];
      for (int c = 0; c < C; c++) packed[c] = load_pairs(w.at[c] + g * Q4_BYTES + j * 64);
      for (int c = 0; c < C; c++) prefetch(w.at[c] + ahead + j * 64);
      int at = g * GROUP + j * 8;
      q4_pair<0>(part, packed, table, x, k, at);
      q4_pair<1>(part, packed, table, x, k, at);
      q4_pair<2>(part, packed, table, x, k, at);
      q4_pair<3>(part, packed, table, x, k, at);
    }
    for (int c = 0; c < C; c++) {
      const uint16_t* scales = (const uint16_t*)(w.at[c] + g * Q4_BYTES + 256);
      V d = load_half(scales), m = load_half(scales + LANES);
      prefetch(w.at[c] + ahead + 256);
      for (int r = 0; r < R; r++) sum[r][c] = fma(set1(sums[(size_t)r * groups + g]), m, fma(part[r][c], d, sum[r][c]));
    }
  }
  store_tile(sum, out);
}

// As tile_q4, from unpacked panels.
template <int R, int C>
PK_INLINE void tile_q4_unpacked(const Unpacked& u, int k, const bf16* x, const float* sums, float* out) {
  const int groups = k / GROUP;
  V sum[R][C];
  clear(sum);
  for (int g = 0; g < groups; g++) {
    V part[R][C];
    clear(part);
    const bf16* pairs = u.pairs.data() + (size_t)g * GROUP * LANES;
    for (int i = 0; i < GROUP / 2; i++) {
      Pairs weight[C];
      for (int c = 0; c < C; c++) weight[c] = load_pairs(pairs + ((size_t)c * k + 2 * i) * LANES);
      for (int r = 0; r < R; r++) {
        uint32_t value = load_pair(x + (size_t)r * k + g * GROUP + 2 * i);
        for (int c = 0; c < C; c++) part[r][c] = dot(part[r][c], weight[c], value);
      }
    }
    for (int c = 0; c < C; c++) {
      const float* scales = u.scales.data() + ((size_t)c * groups + g) * 2 * LANES;
      V d = load(scales), m = load(scales + LANES);
      for (int r = 0; r < R; r++) sum[r][c] = fma(set1(sums[(size_t)r * groups + g]), m, fma(part[r][c], d, sum[r][c]));
    }
  }
  store_tile(sum, out);
}

inline void unpack_q4(Unpacked& u, const Panels& w, int vecs, int k) {
  const Pairs table = nibble_table();
  const int groups = k / GROUP;
  u.pairs.resize((size_t)TILE_VECS * k * LANES);
  u.scales.resize((size_t)TILE_VECS * groups * 2 * LANES);
  for (int c = 0; c < vecs; c++)
    for (int g = 0; g < groups; g++) {
      const uint8_t* in = w.at[c] + g * Q4_BYTES;
      bf16* pairs = u.pairs.data() + ((size_t)c * k + g * GROUP) * LANES;
      for (int j = 0; j < 4; j++, pairs += 8 * LANES) {
        Pairs packed = load_pairs(in + j * 64);
        store_pairs(pairs, nibbles<0>(packed, table));
        store_pairs(pairs + 2 * LANES, nibbles<1>(packed, table));
        store_pairs(pairs + 4 * LANES, nibbles<2>(packed, table));
        store_pairs(pairs + 6 * LANES, nibbles<3>(packed, table));
      }
      float* scales = u.scales.data() + ((size_t)c * groups + g) * 2 * LANES;
      store(scales, load_half((const uint16_t*)(in + 256)));
      store(scales + LANES, load_half((const uint16_t*)(in + 256 + 32)));
    }
}

// R rows from `row` on of C panels; `u` non-null: Q4 from the unpacked panels.
template <int R, int C>
__attribute__((noinline)) void tile(const Matrix& m, const Panels& w, const Unpacked* u, const Rows& x, int row, float* out) {
  const size_t at = (size_t)row * m.k;
  switch (m.format) {
    case F32: return tile_f32<R, C>(w, m.k, x.f + at, out);
    case BF16: return tile_bf16<R, C>(w, m.k, x.b + at, out);
    case Q8: return tile_q8<R, C>(w, m.k, x.f + at, out);
  }
  const float* sums = x.sums + (size_t)row * (m.k / GROUP);
  if (u) return tile_q4_unpacked<R, C>(*u, m.k, x.b + at, sums, out);
  tile_q4<R, C>(w, m.k, x.b + at, sums, out);
}

template <int C>
void tile_rows(const Matrix& m, const Panels& w, const Unpacked* u, const Rows& x, int row, int rows, float* out) {
  switch (rows) {
    case 1: return tile<1, C>(m, w, u, x, row, out);
    case 2: return tile<2, C>(m, w, u, x, row, out);
    case 3: return tile<3, C>(m, w, u, x, row, out);
#ifdef PK_AVX512
    case 4: return tile<4, C>(m, w, u, x, row, out);
    case 5: return tile<5, C>(m, w, u, x, row, out);
    case 6: return tile<6, C>(m, w, u, x, row, out);
#endif
  }
}

inline void any_tile(const Matrix& m, const Panels& w, int vecs, const Unpacked* u, const Rows& x, int row, int rows, float* out) {
  switch (vecs) {
    case 1: return tile_rows<1>(m, w, u, x, row, rows, out);
    case 2: return tile_rows<2>(m, w, u, x, row, rows, out);
#ifdef PK_AVX512
    case 3: return tile_rows<3>(m, w, u, x, row, rows, out);
    case 4: return tile_rows<4>(m, w, u, x, row, rows, out);
#endif
  }
}

// Rows of the next tile when `left` are left: as even as the largest tile allows.
inline int tile_height(int left) {
  int tiles = (left + TILE_ROWS - 1) / TILE_ROWS;
  return (left + tiles - 1) / tiles;
}

// Rows first..last of one group of panels, tile by tile: emit(row, rows, out[rows][vecs][16]).
template <class Emit>
void product(const Matrix& m, const Panels& w, int vecs, const Rows& x, int first, int last, Unpacked& scratch, const Emit& emit) {
  const Unpacked* u = nullptr;
  if (m.format == Q4 && last - first > 4 * TILE_ROWS) {
    if (scratch.of != w.at[0]) unpack_q4(scratch, w, vecs, m.k);  // the next block of rows often wants the same panels
    scratch.of = w.at[0];
    u = &scratch;
  }
  alignas(64) float out[TILE_ROWS * TILE_VECS * LANES];
  for (int row = first; row < last;) {
    int rows = tile_height(last - row);
    any_tile(m, w, vecs, u, x, row, rows, out);
    emit(row, rows, out);
    row += rows;
  }
}

// One row of W as floats (an embedding), K values.
inline void unpack_row(const Matrix& m, int row, float* out) {
  const uint8_t* panel = m.panel(row / LANES);
  const int lane = row % LANES;
  for (int i = 0; i < m.k; i++) {
    const int g = i / GROUP, in_group = i % GROUP;
    switch (m.format) {
      case F32: out[i] = ((const float*)panel)[(size_t)i * LANES + lane]; break;
      case BF16: out[i] = bf16_to_float(((const bf16*)panel)[((size_t)(i / 2) * LANES + lane) * 2 + i % 2]); break;
      case Q8: {
        const uint8_t* group = panel + g * Q8_BYTES;
        out[i] = (float)((const int8_t*)group)[in_group * LANES + lane] * half_to_float(((const uint16_t*)(group + GROUP * LANES))[lane]);
        break;
      }
      default: {
        const uint8_t* group = panel + g * Q4_BYTES;
        const uint16_t* scales = (const uint16_t*)(group + 256);
        uint32_t word = ((const uint32_t*)group)[in_group / 8 * LANES + lane];
        int nibble = in_group % 8 / 2 + in_group % 2 * 4;
        out[i] = (float)(word >> (4 * nibble) & 15) * half_to_float(scales[lane]) + half_to_float(scales[LANES + lane]);
      }
    }
  }
}
