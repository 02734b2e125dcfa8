// The attention of one layer in a step: cells written, query rows shared out over the cells, parts of long sequences merged.
#pragma once
#include "workspace.h"

// Queries of one key-value head that attend together: `rows` rows from number `first` of the list; segment -1: all.
struct AttentionTask {
  int first, rows, head, segment;
};

// The rows that attend, and how: offsets[i] is where row i's parts begin; offsets[i] == offsets[i + 1] says that the row is
// finished by its task.
struct AttentionPlan {
  std::vector<int> list, offsets;
  std::vector<AttentionTask> tasks;
};

constexpr int SHARED_QUERIES = 48;  // query vectors of one sequence that share a pass over the cells
constexpr int SPLIT_ROWS = 8;       // up to that many rows of one sequence go over its segments in parallel

class Attention {
 public:
  explicit Attention(Workspace& work) : w_(work), s_(work.s), scratch_(work.team.size()) {}

  AttentionPlan all, wanted;  // all rows of the step; those that go on to the output head

  void reserve(const Step& step, bool narrow) {
    queries_.resize((size_t)step.rows * s_.width() * (s_.is_f32 ? 2 : 1));
    all.list.clear();
    for (int i = 0; i < step.rows; i++) all.list.push_back(i);
    plan(step, all);
    wanted.list.assign(step.out_rows, step.out_rows + (narrow ? step.out_count : 0));
    plan(step, wanted);
    const size_t parts = std::max(all.offsets.back(), wanted.offsets.back());
    parts_.resize(parts * s_.width());
    states_.resize(parts * s_.heads);
  }

  // Columns of `wide`: queries, keys, values, gates of the queries.
  int keys_at() const { return s_.width(); }
  int gates_at() const { return s_.width() + 2 * s_.kv_width(); }

  // Cells of all rows, then attention for those of the plan: as `finish` gives it. `from` is the first cell that is read;
  // also(i) is run for each of `more` rows beside it.
  template <class Also>
  void run(const Step& step, int thread, const Layer& layer, const AttentionPlan& plan, int from, int more, const Also& also) {
    if (s_.is_f32) run_as<float>(step, thread, layer, plan, from, more, also);
    else run_as<bf16>(step, thread, layer, plan, from, more, also);
  }

  // Keys and values of `wide` into the row's cell.
  void write_cell(const Step& step, const Layer& layer, int row) {
    if (s_.is_f32) write_cell_as<float>(step, layer, row);
    else write_cell_as<bf16>(step, layer, row);
  }

  // Row `i` of the plan after attention, all heads: [heads * head_dim].
  void finish(const Layer& layer, const AttentionPlan& plan, int i, float* out) {
    const int dim = s_.head_dim, width = s_.width(), first = plan.offsets[i], last = plan.offsets[i + 1];
    if (first == last) memcpy(out, w_.attended_row(i), sizeof(float) * width);
    else
      for (int h = 0; h < s_.heads; h++) {
        size_t at = (size_t)first * s_.heads + h;
        State state = states_[at];
        float* sum = out + h * dim;
        memcpy(sum, &parts_[at * dim], sizeof(float) * dim);
        for (int part = first + 1; part < last; part++) {
          at += s_.heads;
          merge(state, sum, states_[at], &parts_[at * dim], dim);
        }
        divide(sum, state.sum, sum);
      }
    if (!layer.q_gate.n) return;
    const float* gates = w_.wide_row(plan.list[i]) + gates_at();
    for (int j = 0; j < width; j += LANES) store(out + j, mul(load(out + j), sigmoid(load(gates + j))));
  }

 private:
  struct Scratch {
    std::vector<float> gathered;  // queries of a task, in the cells' type
    std::vector<int> visible;
    std::vector<float> running;
    std::vector<State> running_state;
  };

  int group() const { return s_.heads / s_.kv_heads; }
  static int segments(int position) { return position / SEGMENT + 1; }

  void plan(const Step& step, AttentionPlan& plan) {
    const std::vector<int>& list = plan.list;
    plan.tasks.clear();
    plan.offsets.assign(1, 0);
    const int most = std::max(1, SHARED_QUERIES / group());
    for (int i = 0; i < (int)list.size();) {
      int n = 1;
      while (n < most && i + n < (int)list.size() && step.seq_of[list[i + n]] == step.seq_of[list[i]]) n++;
      const int parts = n <= SPLIT_ROWS ? segments(step.positions[list[i + n - 1]]) : 1;
      for (int h = 0; h < s_.kv_heads; h++)
        for (int p = 0; p < parts; p++) plan.tasks.push_back({i, n, h, parts == 1 ? -1 : p});
      for (int j = 0; j < n; j++) plan.offsets.push_back(plan.offsets.back() + (parts == 1 ? 0 : segments(step.positions[list[i + j]])));
      i += n;
    }
  }

  template <class T>
  Pool pool(const Step& step) const {
    const Blocks& b = step.blocks;
    const size_t head = (size_t)b.block_size * s_.head_dim, part = head * s_.kv_heads;
    return Pool{b.base, b.block_size, b.block_bytes / sizeof(T), part * 2, part, head};
  }

  template <class T, class Also>
  void run_as(const Step& step, int thread, const Layer& layer, const AttentionPlan& plan, int from, int more, const Also& also) {
    T* queries = (T*)queries_.data();
    w_.team.share(thread, step.rows, [&](int row) {
      write_cell_as<T>(step, layer, row);
      const float *c = w_.cos_at(step.positions[row]), *s = w_.sin_at(step.positions[row]);
      float* in = w_.wide_row(row);
      T* out = queries + (size_t)row * s_.width();
      for (int at = 0; at < s_.width(); at += s_.head_dim) {
        if (layer.q_norm) rms_norm(in + at, layer.q_norm, s_.head_dim, s_.eps, in + at);
        rotate(in + at, s_.head_dim, s_.rotary_dim, c, s, out + at);
      }
    });
    const int tasks = (int)plan.tasks.size();
    w_.team.share(thread, tasks + more, [&](int job) {
      if (job < tasks) attend_task<T>(step, layer.cells, plan, plan.tasks[job], from, queries, thread);
      else also(job - tasks);
    });
  }

  template <class T>
  void write_cell_as(const Step& step, const Layer& layer, int row) {
    const Pool at = pool<T>(step);
    const int dim = s_.head_dim, position = step.positions[row];
    float *keys = w_.wide_row(row) + keys_at(), *values = keys + s_.kv_width();
    T* cell = (T*)at.base + (size_t)step.table(row)[position / at.block_size] * at.block_stride + layer.cells * at.layer_stride +
              (size_t)(position % at.block_size) * dim;
    for (int h = 0; h < s_.kv_heads; h++) {
      if (layer.k_norm) rms_norm(keys + h * dim, layer.k_norm, dim, s_.eps, keys + h * dim);
      rotate(keys + h * dim, dim, s_.rotary_dim, w_.cos_at(position), w_.sin_at(position), cell + h * at.head_stride);
      copy_row(values + h * dim, dim, cell + h * at.head_stride + at.part_stride);
    }
  }

  template <class T>
  void attend_task(const Step& step, int cells, const AttentionPlan& plan, const AttentionTask& task, int from, const T* queries,
                   int thread) {
    const Pool at = pool<T>(step);
    const int dim = s_.head_dim, g = group(), count = task.rows * g;
    Scratch& my = scratch_[thread];
    my.gathered.resize((size_t)count * dim);
    my.visible.resize(task.rows);
    T* gathered = (T*)my.gathered.data();
    int* visible = my.visible.data();
    for (int r = 0; r < task.rows; r++) {
      const int row = plan.list[task.first + r];
      visible[r] = step.positions[row] + 1;
      memcpy(&gathered[(size_t)r * g * dim], queries + ((size_t)row * s_.heads + task.head * g) * dim, sizeof(T) * g * dim);
    }
    const int32_t* table = step.table(plan.list[task.first]);
    const size_t head = cells * at.layer_stride + task.head * at.head_stride;
    AttentionScratch& scratch = w_.local[thread].attention;
    const int segment = std::max(task.segment, 0), end = task.segment < 0 ? segments(visible[task.rows - 1] - 1) : segment + 1;
    for (int i = segment; i < end; i++) {
      attend_segment(at, head, table, i, gathered, visible, task.rows, g, dim, from, scratch);
      if (task.segment >= 0) {
        for (int r = 0; r < task.rows; r++)
          if (visible[r] > i * SEGMENT) keep_part(plan.offsets[task.first + r] + i, task.head, r, scratch);
        return;
      }
      if (i == 0) {
        my.running.assign(scratch.part.begin(), scratch.part.begin() + (size_t)count * dim);
        my.running_state.assign(scratch.state.begin(), scratch.state.begin() + count);
        continue;
      }
      for (int q = 0; q < count; q++)
        if (visible[q / g] > i * SEGMENT) merge(my.running_state[q], &my.running[(size_t)q * dim], scratch.state[q], &scratch.part[(size_t)q * dim], dim);
    }
    for (int q = 0; q < count; q++)
      divide(&my.running[(size_t)q * dim], my.running_state[q].sum, w_.attended_row(task.first + q / g) + (task.head * g + q % g) * dim);
  }

  // The part of the task's row `r`, one key-value head of it.
  void keep_part(int part, int head, int r, const AttentionScratch& scratch) {
    const int g = group();
    const size_t at = (size_t)part * s_.heads + head * g;
    memcpy(&parts_[at * s_.head_dim], scratch.part.data() + (size_t)r * g * s_.head_dim, sizeof(float) * g * s_.head_dim);
    memcpy(&states_[at], scratch.state.data() + r * g, sizeof(State) * g);
  }

  void divide(const float* values, float by, float* out) const {
    const V d = set1(by);
    for (int i = 0; i < s_.head_dim; i += LANES) store(out + i, div(load(values + i), d));
  }

  Workspace& w_;
  const Shape& s_;
  std::vector<Scratch> scratch_;
  std::vector<float> parts_;
  std::vector<State> states_;
  std::vector<bf16> queries_;  // twice as many for float32
};
