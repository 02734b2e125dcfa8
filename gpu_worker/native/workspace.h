// What all stages of a step share: the shape, the team, buffers, and rows on their way into a product.
#pragma once
#include <vector>
#include "attention.h"
#include "products.h"
#include "rowops.h"
#include "shape.h"

struct PerThread {
  Unpacked unpacked;
  Prepared prepared;
  AttentionScratch attention;
  std::vector<float> values;  // one row before it is rounded
};

constexpr int PRIVATE_VALUES = 8192;  // below this many, each thread prepares all rows for itself and saves a phase

struct Workspace {
  const Shape s;
  Team team;
  std::vector<PerThread> local;
  const float *cos = nullptr, *sin = nullptr;  // [positions][rotary_dim / 2]
  int positions = 0;
  std::vector<float> x;         // [rows][hidden]: the residual stream
  std::vector<float> wide;      // [rows][wide_width]: results of a layer's first products
  std::vector<float> attended;  // [rows][...]: what goes into a layer's second product
  Prepared shared, gated;

  Workspace(const Shape& shape, int threads) : s(shape), team(threads), local(team.size()) {}

  int wide_width() const {
    const int attention = 2 * s.width() + 2 * s.kv_width(), recurrent = s.conv_width() + s.value_width() + 2 * s.value_heads;
    return std::max(attention, recurrent);
  }
  int attended_width() const { return std::max(s.width(), s.value_width()); }
  float* wide_row(int row) { return &wide[(size_t)row * wide_width()]; }
  float* attended_row(int row) { return &attended[(size_t)row * attended_width()]; }
  float* x_row(int row) { return &x[(size_t)row * s.hidden]; }
  const float* cos_at(int position) const { return cos + (size_t)position * (s.rotary_dim / 2); }
  const float* sin_at(int position) const { return sin + (size_t)position * (s.rotary_dim / 2); }

  void reserve(int rows, int intermediate) {
    x.resize((size_t)rows * s.hidden);
    wide.resize((size_t)rows * wide_width());
    attended.resize((size_t)rows * attended_width());
    shared.resize(rows, std::max((s.mtp_intermediate ? 2 : 1) * s.hidden, attended_width()), s.is_f32);
    gated.resize(rows, intermediate, s.is_f32);
  }

  // Rows ready for a product: make(row, out[k]) gives each in float32. Few of them are made by every thread for itself.
  template <class Make>
  Rows prepare(int thread, int rows, int k, const Make& make) {
    const bool own = rows * k <= PRIVATE_VALUES;
    if (own && team.late(thread)) return Rows();
    Prepared& to = own ? local[thread].prepared : shared;
    if (own) to.resize(rows, k, s.is_f32);
    auto one = [&](int row) {
      if (s.is_f32) return make(row, &to.f[(size_t)row * k]);
      std::vector<float>& values = local[thread].values;
      values.resize(std::max(values.size(), (size_t)k));
      make(row, values.data());
      to.round(row, k, values.data());
    };
    if (!own) team.share(thread, rows, one);
    else
      for (int row = 0; row < rows; row++) one(row);
    return to.rows();
  }

  // Products with the same rows, next to each other in `wide`: the first from column `at` on.
  void multiply_wide(int thread, std::initializer_list<const Matrix*> matrices, const Rows& in, int rows, int at) {
    int starts[4];
    for (int i = 0; i < (int)matrices.size(); i++) {
      starts[i] = at;
      at += matrices.begin()[i]->n;
    }
    multiply(team, thread, local[thread].unpacked, matrices, in, rows, [&](int part, int row, int column, int columns, const float* values) {
      memcpy(wide_row(row) + starts[part] + column, values, sizeof(float) * columns);
    });
  }

  // to[row] += x W^T, or = if not `adding`; to [rows][n].
  void multiply_into(int thread, const Matrix& m, const Rows& in, int rows, float* to, bool adding) {
    multiply(team, thread, local[thread].unpacked, {&m}, in, rows, [&](int, int row, int column, int columns, const float* values) {
      float* out = to + (size_t)row * m.n + column;
      if (!adding) {
        memcpy(out, values, sizeof(float) * columns);
        return;
      }
      if (columns == LANES) return store(out, add(load(out), load(values)));
      for (int i = 0; i < columns; i++) out[i] += values[i];
    });
  }
};
