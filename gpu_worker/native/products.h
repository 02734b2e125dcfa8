// The products of a step, shared out among the threads of a team. Which thread computes what changes no bit of the result.
#pragma once
#include <initializer_list>
#include <vector>
#include "matmul.h"
#include "team.h"

constexpr int ROWS_PER_JOB = 96;      // of a product: their inputs and a panel group stay in the second-level cache

// Rows as they enter a product, in memory of their own: float32, or bfloat16 with the sums of their groups.
struct Prepared {
  std::vector<float> f, sums;
  std::vector<bf16> b;
  int k = 0;
  bool is_f32 = false;

  void resize(int rows, int width, bool as_f32) {
    k = width;
    is_f32 = as_f32;
    if (is_f32) f.resize((size_t)rows * k);
    else b.resize((size_t)rows * k);
    sums.resize((size_t)rows * (k / GROUP + 1));
  }

  Rows rows() const { return Rows{f.data(), b.data(), sums.data()}; }

  // One row of `width` values (the rows lie that far apart), rounded.
  void round(int row, int width, const float* values) {
    for (int i = 0; i < width; i += LANES) store_bf16(&b[(size_t)row * width + i], load(values + i));
    sum_groups(row, 0, width / GROUP, width);
  }

  // The sums of a row's groups first .. last, from the rounded values.
  void sum_groups(int row, int first, int last) { sum_groups(row, first, last, k); }
  void sum_groups(int row, int first, int last, int width) {
    for (int g = first; g < last; g++) {
      const bf16* p = &b[(size_t)row * width + g * GROUP];
      sums[(size_t)row * (width / GROUP) + g] = reduce_add(add(load_bf16(p), load_bf16(p + LANES)));
    }
  }
};

// y = x W^T + b for up to four matrices with the same rows: emit(which, row, first column, columns <= 16, values).
template <class Emit>
void multiply(Team& team, int thread, Unpacked& scratch, std::initializer_list<const Matrix*> matrices, const Rows& in, int rows, const Emit& emit) {
  int panels = 0;
  for (const Matrix* m : matrices) panels += m->panels();
  const int blocks = (rows + ROWS_PER_JOB - 1) / ROWS_PER_JOB;
  int vecs = TILE_VECS;
  while (vecs > 1 && panels * blocks < vecs * 16 * team.size()) vecs /= 2;
  int groups = 0;
  for (const Matrix* m : matrices) groups += (m->panels() + vecs - 1) / vecs;
  scratch.of = nullptr;
  team.share(thread, groups * blocks, [&](int job) {
    int at = job / blocks, which = 0;
    const Matrix* m = nullptr;
    for (const Matrix* each : matrices) {
      m = each;
      const int own = (each->panels() + vecs - 1) / vecs;
      if (at < own) break;
      at -= own;
      which++;
    }
    const int first = job % blocks * ROWS_PER_JOB, last = std::min(rows, first + ROWS_PER_JOB);
    const int panel = at * vecs, here = std::min(vecs, m->panels() - panel);
    Panels w{{}, m->panel_bytes(), m->panel_bytes() * (here - 1)};
    for (int c = 0; c < here; c++) w.at[c] = m->panel(panel + c);
    product(*m, w, here, in, first, last, scratch, [&](int row, int count, float* out) {
      for (int r = 0; r < count; r++)
        for (int c = 0; c < here; c++) {
          float* values = out + (r * here + c) * LANES;
          const int column = (panel + c) * LANES, columns = std::min(LANES, m->n - column);
          if (m->bias)
            for (int i = 0; i < columns; i++) values[i] += m->bias[column + i];
          emit(which, row + r, column, columns, values);
        }
    });
  });
}

// One row, 16 columns of it.
inline void gate_row(const Matrix& gate, const Matrix& up, int row, int column, const float* g, const float* u, Prepared& out) {
  V a = load(g), b = load(u);
  if (gate.bias) a = add(a, load(gate.bias + column));
  if (up.bias) b = add(b, load(up.bias + column));
  V y = mul(silu(a), b);
  const size_t at = (size_t)row * out.k + column;
  if (out.is_f32) store(&out.f[at], y);
  else store_bf16(&out.b[at], y);
}

// out = silu(x G^T) * (x U^T), 32 columns a job (one group of the next product).
inline void multiply_gated(Team& team, int thread, Unpacked& scratch, const Matrix& gate, const Matrix& up, const Rows& in, int rows,
                           Prepared& out) {
  const int blocks = (rows + ROWS_PER_JOB - 1) / ROWS_PER_JOB, jobs = (gate.panels() + 1) / 2;
  const bool together = gate.format == up.format && TILE_VECS >= 4;
  scratch.of = nullptr;
  team.share(thread, jobs * blocks, [&](int job) {
    const int first = job % blocks * ROWS_PER_JOB, last = std::min(rows, first + ROWS_PER_JOB);
    const int panel = job / blocks * 2, here = std::min(2, gate.panels() - panel);
    Panels gates{{}, gate.panel_bytes(), gate.panel_bytes() * (here - 1)}, ups{{}, up.panel_bytes(), up.panel_bytes() * (here - 1)};
    for (int c = 0; c < here; c++) {
      gates.at[c] = gate.panel(panel + c);
      ups.at[c] = up.panel(panel + c);
    }
    auto emit = [&](int row, int count, const float* g, const float* u, int stride) {
      for (int r = 0; r < count; r++) {
        for (int c = 0; c < here; c++) gate_row(gate, up, row + r, (panel + c) * LANES, g + (r * stride + c) * LANES, u + (r * stride + c) * LANES, out);
        if (!out.is_f32 && here == 2) out.sum_groups(row + r, panel / 2, panel / 2 + 1);
      }
    };
    if (together) {
      for (int c = 0; c < here; c++) gates.at[here + c] = ups.at[c];
      product(gate, gates, 2 * here, in, first, last, scratch, [&](int row, int count, float* tile) { emit(row, count, tile, tile + here * LANES, 2 * here); });
      return;
    }
    std::vector<float> kept((size_t)(last - first) * here * LANES);
    product(gate, gates, here, in, first, last, scratch, [&](int row, int count, float* tile) {
      memcpy(&kept[(size_t)(row - first) * here * LANES], tile, sizeof(float) * count * here * LANES);
    });
    product(up, ups, here, in, first, last, scratch, [&](int row, int count, float* tile) {
      emit(row, count, &kept[(size_t)(row - first) * here * LANES], tile, here);
    });
  });
}
