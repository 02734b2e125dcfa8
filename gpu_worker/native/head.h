// The head that drafts: one attention layer over cells of its own. The cell of position p is made of the hidden row of p - 1
// and the token of p; that of position 0 stands for nothing and is never read.
#pragma once
#include "layers.h"

class DraftHead {
 public:
  HeadWeights weights{};

  void set(const HeadWeights& w) {
    weights = w;
    hidden_ = w.fc.n;
    zeros_.assign(hidden_, 0.f);
  }

  // Keys and values of all rows of a step; `final` [rows][hidden] are their own hidden rows, of which the next rows need them.
  void fill(const Step& step, int thread, Layers& layers, const Matrix& embed, const float* final) {
    Workspace& work = layers.work;
    enter(step, thread, work, embed, [&](int row) { return before(step, row, final); });
    Rows in = work.prepare(thread, step.rows, hidden_, [&](int row, float* out) {
      rms_norm(work.x_row(row), weights.layer.attn_norm, hidden_, work.s.eps, out);
    });
    work.multiply_wide(thread, {&weights.layer.k, &weights.layer.v}, in, step.rows, layers.attention.keys_at());
    work.team.share(thread, step.rows, [&](int row) { layers.attention.write_cell(step, weights.layer, row); });
  }

  // One draft for each row: through the whole layer, to the rows that draft and enter the next draft.
  void draft(const Step& step, int thread, Layers& layers, const Matrix& embed) {
    Workspace& work = layers.work;
    enter(step, thread, work, embed, [&](int row) { return step.given + (size_t)row * hidden_; });
    layers.run(step, thread, weights.layer, false, 1);
    work.team.share(thread, step.rows, [&](int row) {
      rms_norm(work.x_row(row), weights.norm, hidden_, work.s.eps, step.hidden + (size_t)row * hidden_);
    });
  }

  // The hidden row of the last fed position of every block that the step touched, to its place in the block.
  void keep(const Step& step, const float* final) const {
    const Blocks& b = step.blocks;
    for (int row = 0; row < step.rows; row++) {
      const int position = step.positions[row], next = row + 1;
      if (next < step.rows && step.seq_of[next] == step.seq_of[row] && (position + 1) % b.block_size) continue;
      memcpy(row_of_block(step, row, position), final + (size_t)row * hidden_, sizeof(float) * hidden_);
    }
  }

 private:
  // x = fc [norm(embedding of the row's token); norm(hidden(row))]
  template <class Hidden>
  void enter(const Step& step, int thread, Workspace& work, const Matrix& embed, const Hidden& hidden) {
    Rows in = work.prepare(thread, step.rows, 2 * hidden_, [&](int row, float* out) {
      unpack_row(embed, (int)step.tokens[row], out);
      rms_norm(out, weights.embed_norm, hidden_, work.s.eps, out);
      rms_norm(hidden(row), weights.hidden_norm, hidden_, work.s.eps, out + hidden_);
    });
    work.multiply_into(thread, weights.fc, in, step.rows, work.x.data(), false);
  }

  // The hidden row of the position before the row's own.
  const float* before(const Step& step, int row, const float* final) const {
    if (row && step.seq_of[row - 1] == step.seq_of[row]) return final + (size_t)(row - 1) * hidden_;
    if (!step.positions[row]) return zeros_.data();
    return row_of_block(step, row, step.positions[row] - 1);
  }

  float* row_of_block(const Step& step, int row, int position) const {
    const Blocks& b = step.blocks;
    return (float*)(b.base + (size_t)step.table(row)[position / b.block_size] * b.block_bytes + b.hidden_at);
  }

  int hidden_ = 0;
  std::vector<float> zeros_;
};
