// A model's step on the CPU: tokens in, hidden rows out, cells and states written; and the drafts of its head.
//
// The residual stream is float32. What enters a product is rounded to bfloat16 unless the model is float32. Every result
// is a function of a row's own sequence: see matmul.h, attention.h and delta.h.
#pragma once
#include <algorithm>
#include "head.h"

class Model {
 public:
  Model(const Shape& shape, int threads) : s_(shape), weights_(shape.layers), layers_(shape, threads), work_(layers_.work) {}

  Layer& layer(int i) { return weights_[i]; }
  Matrix embed{}, output{};
  const float* final_norm = nullptr;
  DraftHead head;

  void set_rope(const float* cos, const float* sin, int positions) {
    work_.cos = cos;
    work_.sin = sin;
    work_.positions = positions;
  }

  // 0, and nothing done, if a number of the step points outside the embedding, the positions, a block table, the blocks or
  // the state slots; -1 likewise if a state is not one that its rows can go on from.
  int forward(const Step& step) {
    if (!possible(step) || !have_slots(step)) return 0;
    const bool narrow = !drafts();
    layers_.reserve(step, s_.intermediate, narrow);
    if (!layers_.delta.reserve(step)) return -1;
    if (!narrow) final_.resize((size_t)step.rows * s_.hidden);
    work_.team.run([&](int thread) { run(step, thread, narrow); });
    layers_.delta.finish(step);
    if (narrow) return 1;
    head.keep(step, final_.data());
    for (int i = 0; i < step.out_count; i++)
      memcpy(step.hidden + (size_t)i * s_.hidden, &final_[(size_t)step.out_rows[i] * s_.hidden], sizeof(float) * s_.hidden);
    return 1;
  }

  // One row for each sequence, at positions from 1 on: step.given to step.hidden, through the head.
  bool draft(const Step& step) {
    if (!drafts() || !possible(step)) return false;
    for (int i = 0; i < step.rows; i++)
      if (step.positions[i] < 1) return false;
    layers_.reserve(step, s_.mtp_intermediate, false);
    work_.team.run([&](int thread) { head.draft(step, thread, layers_, embed); });
    return true;
  }

  // `draft` in a chain, each row's best draft fed to its next pass: counts[i] drafts for row i, to out[i * most]. `ids`: the
  // token of each column of the drafting matrix; null: they are tokens.
  bool draft_greedy(Step step, const int32_t* counts, const int64_t* ids, int most, int64_t* out) {
    const Matrix& m = head.weights.draft;
    const size_t hidden = s_.hidden;
    std::vector<int> row(step.rows);
    std::vector<int64_t> tokens(step.tokens, step.tokens + step.rows);
    std::vector<int32_t> positions(step.positions, step.positions + step.rows), seq_of(step.seq_of, step.seq_of + step.rows);
    std::vector<float> given(step.given, step.given + step.rows * hidden), found(step.rows * hidden), scores((size_t)step.rows * m.n);
    for (int i = 0; i < step.rows; i++) row[i] = i;
    step.tokens = tokens.data();
    step.positions = positions.data();
    step.seq_of = seq_of.data();
    step.given = given.data();
    step.hidden = found.data();
    for (int depth = 0; step.rows; depth++) {
      if (!draft(step)) return false;
      logits(m, found.data(), step.rows, scores.data());
      int left = 0;  // rows that draft on move to the front
      for (int i = 0; i < step.rows; i++) {
        const float* line = &scores[(size_t)i * m.n];
        const int64_t best = std::max_element(line, line + m.n) - line, token = ids ? ids[best] : best;
        out[(size_t)row[i] * most + depth] = token;
        if (depth + 1 >= counts[row[i]]) continue;
        row[left] = row[i];
        tokens[left] = token;
        positions[left] = positions[i] + 1;
        seq_of[left] = seq_of[i];
        memcpy(&given[left++ * hidden], &found[i * hidden], sizeof(float) * hidden);
      }
      step.rows = left;
    }
    return true;
  }

  // Rows of hidden values to the columns of a head: out [rows][m.n].
  void logits(const Matrix& m, const float* hidden, int rows, float* out) {
    Rows in;
    in.f = hidden;
    if (m.format == BF16 || m.format == Q4) {
      head_rows_.resize(rows, s_.hidden, false);
      for (int r = 0; r < rows; r++) head_rows_.round(r, s_.hidden, hidden + (size_t)r * s_.hidden);
      in = head_rows_.rows();
    }
    work_.team.run([&](int thread) { work_.multiply_into(thread, m, in, rows, out, false); });
  }

 private:
  bool drafts() const { return s_.mtp_intermediate > 0; }

  bool possible(const Step& step) const {
    const Blocks& b = step.blocks;
    for (int i = 0; i < step.rows; i++) {
      if ((uint64_t)step.tokens[i] >= (uint64_t)s_.vocab || (uint32_t)step.positions[i] >= (uint32_t)work_.positions) return false;
      const int at = step.positions[i] / b.block_size;
      if ((uint32_t)step.seq_of[i] >= (uint32_t)step.sequences || at >= step.table_width) return false;
      if ((uint32_t)step.table(i)[at] >= (uint32_t)b.count) return false;
    }
    return true;
  }

  bool have_slots(const Step& step) const {
    for (int i = 0; s_.value_heads && i < step.sequences; i++)
      if (!step.states.base || (uint32_t)step.slots[i] >= (uint32_t)step.states.slots) return false;
    return true;
  }

  void run(const Step& step, int thread, bool narrow) {
    work_.team.share(thread, step.rows, [&](int row) { unpack_row(embed, (int)step.tokens[row], work_.x_row(row)); });
    const int count = step.only ? step.only_count : s_.layers;
    for (int i = 0; i < count; i++) layers_.run(step, thread, weights_[step.only ? step.only[i] : i], narrow && i + 1 == count, 0);
    if (!narrow) {
      work_.team.share(thread, step.rows, [&](int row) { end(work_.x_row(row), &final_[(size_t)row * s_.hidden]); });
      head.fill(step, thread, layers_, embed, final_.data());
      return;
    }
    if (!count) work_.team.share(thread, step.out_count, [&](int i) { layers_.take_wanted(i); });
    work_.team.share(thread, step.out_count, [&](int i) { end(&layers_.wanted_x[(size_t)i * s_.hidden], step.hidden + (size_t)i * s_.hidden); });
  }

  void end(const float* x, float* out) const { rms_norm(x, final_norm, s_.hidden, s_.eps, out); }

  const Shape s_;
  std::vector<Layer> weights_;
  Layers layers_;
  Workspace& work_;
  std::vector<float> final_;  // [rows][hidden]: hidden rows of all rows, where the head needs them
  Prepared head_rows_;
};
