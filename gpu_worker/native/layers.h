// One layer of a step, of either kind: rows of the residual stream in, rows of the residual stream out, cells or states written.
#pragma once
#include "attend.h"
#include "delta.h"

class Layers {
 public:
  Layers(const Shape& shape, int threads) : work(shape, threads), attention(work), delta(work) {}

  Workspace work;
  Attention attention;
  Delta delta;
  std::vector<float> wanted_x;  // [out_count][hidden]: residual stream of the rows that go on to the output head

  // `narrow`: only those rows are computed behind the last layer's cells.
  void reserve(const Step& step, int intermediate, bool narrow) {
    work.reserve(step.rows, intermediate);
    attention.reserve(step, narrow);
    wanted_x.resize(narrow ? (size_t)step.out_count * work.s.hidden : 0);
  }

  // `narrow`: the results go to `wanted_x`. `from`: the first cell that attention reads.
  void run(const Step& step, int thread, const Layer& layer, bool narrow, int from) {
    const Shape& s = work.s;
    const AttentionPlan& plan = narrow ? attention.wanted : attention.all;
    const int rows = (int)plan.list.size(), more = narrow ? rows : 0;
    float* x = narrow ? wanted_x.data() : work.x.data();
    auto take = [&](int i) { take_wanted(i); };
    Rows in = work.prepare(thread, step.rows, s.hidden, [&](int row, float* out) { rms_norm(work.x_row(row), layer.attn_norm, s.hidden, s.eps, out); });
    const bool recurrent = layer.cells < 0;
    if (recurrent) {
      work.multiply_wide(thread, {&layer.in_qkv, &layer.in_z, &layer.in_a, &layer.in_b}, in, step.rows, 0);
      delta.run(step, thread, layer, more, take);
    } else {
      if (layer.q_gate.n) work.multiply_wide(thread, {&layer.q, &layer.k, &layer.v, &layer.q_gate}, in, step.rows, 0);
      else work.multiply_wide(thread, {&layer.q, &layer.k, &layer.v}, in, step.rows, 0);
      attention.run(step, thread, layer, plan, from, more, take);
    }
    if (!rows) return;
    const int width = recurrent ? s.value_width() : s.width();
    in = work.prepare(thread, rows, width, [&](int i, float* out) {
      if (recurrent) memcpy(out, work.attended_row(plan.list[i]), sizeof(float) * width);
      else attention.finish(layer, plan, i, out);
    });
    work.multiply_into(thread, recurrent ? layer.out : layer.o, in, rows, x, true);
    in = work.prepare(thread, rows, s.hidden, [&](int i, float* out) { rms_norm(x + (size_t)i * s.hidden, layer.mlp_norm, s.hidden, s.eps, out); });
    multiply_gated(work.team, thread, work.local[thread].unpacked, layer.gate, layer.up, in, rows, work.gated);
    work.multiply_into(thread, layer.down, work.gated.rows(), rows, x, true);
  }

  void take_wanted(int i) { memcpy(&wanted_x[(size_t)i * work.s.hidden], work.x_row(attention.wanted.list[i]), sizeof(float) * work.s.hidden); }
};
