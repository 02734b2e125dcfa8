// The step of a Llama, Qwen2 or Qwen3 on the CPU: rows in, hidden rows out, cells written.
//
// The residual stream is float32. What enters a product is rounded to bfloat16 unless the model is float32. Every result
// is a function of a row's own sequence: see matmul.h and attention.h.
#pragma once
#include <vector>
#include "attention.h"
#include "products.h"

struct Shape {
  int layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, is_f32;
  float eps;
};

struct Layer {
  Matrix q, k, v, o, gate, up, down;
  const float *attn_norm, *mlp_norm, *q_norm, *k_norm;  // q_norm and k_norm may be null
};

// One step, as the caller describes it.
struct Step {
  int rows, out_count, table_width, only_count;
  const int64_t* tokens;
  const int32_t *positions, *seq_of, *tables;
  const int64_t* out_rows;
  const int32_t* only;  // layers to run; null: all
  uint8_t* pool;
  int block_size, pool_layers;
  float* hidden;  // [out_count][hidden]
};

// Queries of one key-value head that attend together: `rows` rows from number `first` of the list; segment -1: all.
struct AttentionTask {
  int first, rows, head, segment;
};

struct PerThread {
  std::vector<float> gathered;  // queries of an attention task, in the cells' type
  std::vector<int> visible;
  Unpacked unpacked;
  Prepared prepared;
  AttentionScratch attention;
  std::vector<float> running;
  std::vector<State> running_state;
};

constexpr int SHARED_QUERIES = 48;    // query vectors of one sequence that share a pass over the cells
constexpr int PRIVATE_VALUES = 8192;  // below this many, each thread prepares all rows for itself and saves a phase

class Model {
 public:
  Model(const Shape& shape, int threads) : s_(shape), layers_(shape.layers), team_(threads), local_(team_.size()) {}

  Layer& layer(int i) { return layers_[i]; }
  Matrix embed{}, head{};
  const float* final_norm = nullptr;
  const float *cos = nullptr, *sin = nullptr;  // [positions][head_dim / 2]
  int positions = 0;

  // False, and nothing done, if a number of the step points outside the embedding, the positions or the block table.
  bool forward(const Step& step) {
    for (int i = 0; i < step.rows; i++) {
      if ((uint64_t)step.tokens[i] >= (uint64_t)s_.vocab || (uint32_t)step.positions[i] >= (uint32_t)positions) return false;
      if (step.positions[i] / step.block_size >= step.table_width) return false;
    }
    reserve(step);
    team_.run([&](int thread) { run(step, thread); });
    return true;
  }

  void logits(const float* hidden, int rows, float* out) {
    Rows in;
    in.f = hidden;
    if (head.format == BF16 || head.format == Q4) {
      head_rows_.resize(rows, s_.hidden, false);
      for (int r = 0; r < rows; r++) head_rows_.round(r, s_.hidden, hidden + (size_t)r * s_.hidden);
      in = head_rows_.rows();
    }
    team_.run([&](int thread) {
      multiply(team_, thread, local_[thread].unpacked, {&head}, in, rows, [&](int, int row, int column, int columns, const float* values) {
        memcpy(out + (size_t)row * s_.vocab + column, values, sizeof(float) * columns);
      });
    });
  }

 private:
  int qkv_width() const { return (s_.heads + 2 * s_.kv_heads) * s_.head_dim; }
  int group() const { return s_.heads / s_.kv_heads; }

  void reserve(const Step& step) {
    const size_t rows = step.rows;
    x_.resize(rows * s_.hidden);
    last_x_.resize((size_t)step.out_count * s_.hidden);
    qkv_.resize(rows * qkv_width());
    attended_.resize(rows * s_.heads * s_.head_dim);
    queries_.resize(rows * s_.heads * s_.head_dim * (s_.is_f32 ? 2 : 1));
    shared_.resize(step.rows, std::max(s_.hidden, s_.heads * s_.head_dim), s_.is_f32);
    gated_.resize(step.rows, s_.intermediate, s_.is_f32);
    all_.clear();
    for (int i = 0; i < step.rows; i++) all_.push_back(i);
    wanted_.assign(step.out_rows, step.out_rows + step.out_count);
    plan_attention(step, all_, tasks_, offsets_);
    plan_attention(step, wanted_, last_tasks_, last_offsets_);
    parts_.resize((size_t)std::max(parts_needed(offsets_), parts_needed(last_offsets_)) * s_.heads * s_.head_dim);
    states_.resize((size_t)std::max(parts_needed(offsets_), parts_needed(last_offsets_)) * s_.heads);
  }

  static int parts_needed(const std::vector<int>& offsets) { return offsets.back(); }
  static int segments(int position) { return position / SEGMENT + 1; }

  // Tasks for the rows in `list`. A row that is alone gets a task a segment; offsets[i] is where its parts begin, and
  // offsets[i] == offsets[i + 1] says that row i is finished by its task.
  void plan_attention(const Step& step, const std::vector<int>& list, std::vector<AttentionTask>& tasks, std::vector<int>& offsets) {
    tasks.clear();
    offsets.assign(1, 0);
    const int most = std::max(1, SHARED_QUERIES / group());
    for (int i = 0; i < (int)list.size();) {
      int n = 1;
      while (n < most && i + n < (int)list.size() && step.seq_of[list[i + n]] == step.seq_of[list[i]]) n++;
      const int parts = n == 1 ? segments(step.positions[list[i]]) : 1;
      for (int h = 0; h < s_.kv_heads; h++)
        for (int p = 0; p < parts; p++) tasks.push_back({i, n, h, parts == 1 ? -1 : p});
      for (int j = 0; j < n; j++) offsets.push_back(offsets.back() + (parts == 1 ? 0 : parts));
      i += n;
    }
  }

  void run(const Step& step, int thread) {
    team_.share(thread, step.rows, [&](int row) { unpack_row(embed, (int)step.tokens[row], &x_[(size_t)row * s_.hidden]); });
    const int count = step.only ? step.only_count : s_.layers;
    for (int i = 0; i < count; i++) run_layer(step, thread, step.only ? step.only[i] : i, i + 1 == count);
    if (!count) team_.share(thread, step.out_count, [&](int row) { take_wanted(row); });
    team_.share(thread, step.out_count, [&](int row) {
      norm(&last_x_[(size_t)row * s_.hidden], final_norm, s_.hidden, step.hidden + (size_t)row * s_.hidden);
    });
  }

  // In the last layer only the rows that go on to the head are computed behind the cells.
  void run_layer(const Step& step, int thread, int index, bool last) {
    const Layer& w = layers_[index];
    float* x = last ? last_x_.data() : x_.data();
    const std::vector<int>& list = last ? wanted_ : all_;
    const std::vector<int>& offsets = last ? last_offsets_ : offsets_;
    const int width = s_.heads * s_.head_dim, rows = (int)list.size();

    Rows in = prepare(thread, step.rows, s_.hidden, [&](int row, float* out) { norm(&x_[(size_t)row * s_.hidden], w.attn_norm, s_.hidden, out); });
    const int starts[3] = {0, width, width + s_.kv_heads * s_.head_dim};
    multiply(team_, thread, local_[thread].unpacked, {&w.q, &w.k, &w.v}, in, step.rows, [&](int part, int row, int column, int columns, const float* values) {
      memcpy(&qkv_[(size_t)row * qkv_width() + starts[part] + column], values, sizeof(float) * columns);
    });
    if (s_.is_f32) attend<float>(step, thread, index, last);
    else attend<bf16>(step, thread, index, last);
    if (!rows) return;
    in = prepare(thread, rows, width, [&](int row, float* out) { finish_attention(row, offsets, out); });
    auto add_to_x = [&](int, int row, int column, int columns, const float* values) {
      float* to = x + (size_t)row * s_.hidden + column;
      if (columns == LANES) return store(to, add(load(to), load(values)));
      for (int i = 0; i < columns; i++) to[i] += values[i];
    };
    multiply(team_, thread, local_[thread].unpacked, {&w.o}, in, rows, add_to_x);
    in = prepare(thread, rows, s_.hidden, [&](int row, float* out) { norm(x + (size_t)row * s_.hidden, w.mlp_norm, s_.hidden, out); });
    multiply_gated(team_, thread, local_[thread].unpacked, w.gate, w.up, in, rows, gated_);
    multiply(team_, thread, local_[thread].unpacked, {&w.down}, gated_.rows(), rows, add_to_x);
  }

  // Rotary positions and cells, then attention; `last`: only for the rows that are wanted, whose x is taken along.
  template <class T>
  void attend(const Step& step, int thread, int layer, bool last) {
    const size_t head_cells = (size_t)step.block_size * s_.head_dim;
    const Pool pool{step.pool, step.block_size, head_cells * s_.kv_heads * 2 * step.pool_layers, head_cells * s_.kv_heads * 2,
                    head_cells * s_.kv_heads, head_cells};
    T* queries = (T*)queries_.data();
    team_.share(thread, step.rows, [&](int row) { write_row<T>(step, pool, layer, row, queries + (size_t)row * s_.heads * s_.head_dim); });
    const std::vector<AttentionTask>& tasks = last ? last_tasks_ : tasks_;
    const std::vector<int>& list = last ? wanted_ : all_;
    const int moved = last ? (int)wanted_.size() : 0;
    team_.share(thread, (int)tasks.size() + moved, [&](int job) {
      if (job < (int)tasks.size()) return attend_task<T>(step, pool, layer, tasks[job], list, last ? last_offsets_ : offsets_, queries, local_[thread]);
      take_wanted(job - (int)tasks.size());
    });
  }

  void take_wanted(int row) { memcpy(&last_x_[(size_t)row * s_.hidden], &x_[(size_t)wanted_[row] * s_.hidden], sizeof(float) * s_.hidden); }

  template <class T>
  void write_row(const Step& step, const Pool& pool, int layer, int row, T* queries) {
    const int dim = s_.head_dim, position = step.positions[row];
    const int32_t* table = step.tables + (size_t)step.seq_of[row] * step.table_width;
    float* in = &qkv_[(size_t)row * qkv_width()];
    const Layer& w = layers_[layer];
    T* cell = (T*)pool.base + (size_t)table[position / pool.block_size] * pool.block_stride + layer * pool.layer_stride +
              (size_t)(position % pool.block_size) * dim;
    for (int h = 0; h < s_.heads; h++) {
      if (w.q_norm) norm(in + h * dim, w.q_norm, dim, in + h * dim);
      rotate(in + h * dim, position, queries + h * dim);
    }
    float *keys = in + s_.heads * dim, *values = keys + s_.kv_heads * dim;
    for (int h = 0; h < s_.kv_heads; h++) {
      if (w.k_norm) norm(keys + h * dim, w.k_norm, dim, keys + h * dim);
      rotate(keys + h * dim, position, cell + h * pool.head_stride);
      copy(values + h * dim, dim, cell + h * pool.head_stride + pool.part_stride);
    }
  }

  template <class T>
  void attend_task(const Step& step, const Pool& pool, int layer, const AttentionTask& task, const std::vector<int>& list,
                   const std::vector<int>& offsets, const T* queries, PerThread& my) {
    const int dim = s_.head_dim, g = group(), count = task.rows * g;
    my.gathered.resize((size_t)count * dim);
    my.visible.resize(task.rows);
    T* gathered = (T*)my.gathered.data();
    int* visible = my.visible.data();
    for (int r = 0; r < task.rows; r++) {
      const int row = list[task.first + r];
      visible[r] = step.positions[row] + 1;
      memcpy(&gathered[(size_t)r * g * dim], queries + ((size_t)row * s_.heads + task.head * g) * dim, sizeof(T) * g * dim);
    }
    const int32_t* table = step.tables + (size_t)step.seq_of[list[task.first]] * step.table_width;
    const size_t head = layer * pool.layer_stride + task.head * pool.head_stride;
    AttentionScratch& scratch = my.attention;
    const int segment = std::max(task.segment, 0), end = task.segment < 0 ? segments(visible[task.rows - 1] - 1) : segment + 1;
    for (int i = segment; i < end; i++) {
      attend_segment(pool, head, table, i, gathered, visible, task.rows, g, dim, scratch);
      if (task.segment >= 0) return keep_part(offsets[task.first] + i, task.head, scratch);
      if (i == 0) {
        my.running.assign(scratch.part.begin(), scratch.part.begin() + (size_t)count * dim);
        my.running_state.assign(scratch.state.begin(), scratch.state.begin() + count);
        continue;
      }
      for (int q = 0; q < count; q++)
        if (visible[q / g] > i * SEGMENT) merge(my.running_state[q], &my.running[(size_t)q * dim], scratch.state[q], &scratch.part[(size_t)q * dim], dim);
    }
    for (int q = 0; q < count; q++)
      divide(&my.running[(size_t)q * dim], my.running_state[q].sum, &attended_[((size_t)(task.first + q / g) * s_.heads + task.head * g + q % g) * dim]);
  }

  void keep_part(int part, int head, const AttentionScratch& scratch) {
    const size_t at = (size_t)part * s_.heads + head * group();
    memcpy(&parts_[at * s_.head_dim], scratch.part.data(), sizeof(float) * group() * s_.head_dim);
    memcpy(&states_[at], scratch.state.data(), sizeof(State) * group());
  }

  // Row `row` of the list after attention, all heads: [heads * head_dim].
  void finish_attention(int row, const std::vector<int>& offsets, float* out) {
    const int dim = s_.head_dim, width = s_.heads * dim, first = offsets[row], last = offsets[row + 1];
    if (first == last) {
      memcpy(out, &attended_[(size_t)row * width], sizeof(float) * width);
      return;
    }
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
  }

  void divide(const float* values, float by, float* out) {
    const V d = set1(by);
    for (int i = 0; i < s_.head_dim; i += LANES) store(out + i, div(load(values + i), d));
  }

  // x / sqrt(mean(x^2) + eps) * weight; out may be x.
  void norm(const float* x, const float* weight, int n, float* out) {
    V squares = zero();
    for (int i = 0; i < n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    const V scale = set1(1.f / std::sqrt(reduce_add(squares) / (float)n + s_.eps));
    for (int i = 0; i < n; i += LANES) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
  }

  template <class T>
  void rotate(const float* x, int position, T* out) {
    const int half = s_.head_dim / 2;
    const float *c = cos + (size_t)position * half, *s = sin + (size_t)position * half;
    alignas(64) float turned[256];
    for (int i = 0; i < half; i++) {
      turned[i] = x[i] * c[i] - x[half + i] * s[i];
      turned[half + i] = x[half + i] * c[i] + x[i] * s[i];
    }
    copy(turned, s_.head_dim, out);
  }

  static void copy(const float* x, int n, float* out) { memcpy(out, x, sizeof(float) * n); }
  static void copy(const float* x, int n, bf16* out) {
    for (int i = 0; i < n; i += LANES) store_bf16(out + i, load(x + i));
  }

  // Rows ready for a product: make(row, out[k]) gives each in float32. Few of them are made by every thread for itself.
  template <class Make>
  Rows prepare(int thread, int rows, int k, const Make& make) {
    const bool own = rows * k <= PRIVATE_VALUES;
    if (own && team_.late(thread)) return Rows();
    Prepared& to = own ? local_[thread].prepared : shared_;
    if (own) to.resize(rows, k, s_.is_f32);
    auto one = [&](int row) {
      if (s_.is_f32) return make(row, &to.f[(size_t)row * k]);
      std::vector<float>& values = local_[thread].running;
      values.resize(std::max(values.size(), (size_t)k));
      make(row, values.data());
      to.round(row, k, values.data());
    };
    if (!own) team_.share(thread, rows, one);
    else
      for (int row = 0; row < rows; row++) one(row);
    return to.rows();
  }

  const Shape s_;
  std::vector<Layer> layers_;
  Team team_;
  std::vector<PerThread> local_;
  std::vector<float> x_, last_x_, qkv_, attended_, parts_;
  std::vector<State> states_;
  std::vector<bf16> queries_;  // twice as many for float32
  Prepared shared_, gated_, head_rows_;
  std::vector<int> all_, wanted_, offsets_, last_offsets_;
  std::vector<AttentionTask> tasks_, last_tasks_;
};
