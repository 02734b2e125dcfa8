// The step of a Llama, Qwen2 or Qwen3 on the CPU: rows in, hidden rows out, cells written. One call runs all layers on a
// team of threads. Plain C interface for ctypes; the caller owns all memory that it passes in.
//
// The residual stream is float32. What enters a product is rounded to bfloat16 unless the model is float32. Every result
// is a function of a row's own sequence: see matmul.h and attention.h.
#include <memory>
#include <vector>
#include "attention.h"
#include "matmul.h"
#include "team.h"

namespace {

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

// Rows as they enter a product, in memory of their own.
struct Prepared {
  std::vector<float> f, sums;
  std::vector<bf16> b;
  int k = 0;

  void resize(int rows, int width, bool is_f32) {
    k = width;
    if (is_f32) f.resize((size_t)rows * k);
    else b.resize((size_t)rows * k);
    sums.resize((size_t)rows * (k / GROUP + 1));
  }
  Rows rows() const { return Rows{f.data(), b.data(), sums.data()}; }

  // The sums of a row's groups, from the rounded values.
  void sum_groups(int row, int first, int last) {
    for (int g = first; g < last; g++) {
      const bf16* p = b.data() + (size_t)row * k + g * GROUP;
      sums[(size_t)row * (k / GROUP) + g] = reduce_add(add(load_bf16(p), load_bf16(p + LANES)));
    }
  }
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
constexpr int ROWS_PER_JOB = 96;      // of a product: their inputs and a panel group stay in the second-level cache
constexpr int PRIVATE_VALUES = 8192;  // below this many, each thread prepares all rows for itself and saves a barrier

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
      for (int r = 0; r < rows; r++) {
        for (int i = 0; i < s_.hidden; i += LANES) store_bf16(&head_rows_.b[(size_t)r * s_.hidden + i], load(hidden + (size_t)r * s_.hidden + i));
        head_rows_.sum_groups(r, 0, s_.hidden / GROUP);
      }
      in = head_rows_.rows();
    }
    team_.run([&](int thread) {
      multiply(thread, {&head}, in, rows, [&](int, int row, int column, int columns, const float* values) {
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
    multiply(thread, {&w.q, &w.k, &w.v}, in, step.rows, [&](int part, int row, int column, int columns, const float* values) {
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
    multiply(thread, {&w.o}, in, rows, add_to_x);
    in = prepare(thread, rows, s_.hidden, [&](int row, float* out) { norm(x + (size_t)row * s_.hidden, w.mlp_norm, s_.hidden, out); });
    multiply_gated(thread, w.gate, w.up, in, rows);
    multiply(thread, {&w.down}, gated_.rows(), rows, add_to_x);
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
    Prepared& to = own ? local_[thread].prepared : shared_;
    if (own) to.resize(rows, k, s_.is_f32);
    auto one = [&](int row) {
      if (s_.is_f32) return make(row, &to.f[(size_t)row * k]);
      std::vector<float>& values = local_[thread].running;
      values.resize(std::max(values.size(), (size_t)k));
      make(row, values.data());
      round_row(to, row, k, values.data());
    };
    if (!own) team_.share(thread, rows, one);
    else
      for (int row = 0; row < rows; row++) one(row);
    return to.rows();
  }

  static void round_row(Prepared& to, int row, int k, const float* values) {
    for (int i = 0; i < k; i += LANES) store_bf16(&to.b[(size_t)row * k + i], load(values + i));
    for (int g = 0; g < k / GROUP; g++) {
      const bf16* p = &to.b[(size_t)row * k + g * GROUP];
      to.sums[(size_t)row * (k / GROUP) + g] = reduce_add(add(load_bf16(p), load_bf16(p + LANES)));
    }
  }

  // y = x W^T + b for up to three matrices with the same rows: emit(which, row, first column, columns <= 16, values).
  template <class Emit>
  void multiply(int thread, std::initializer_list<const Matrix*> matrices, const Rows& in, int rows, const Emit& emit) {
    int panels = 0;
    for (const Matrix* m : matrices) panels += m->panels();
    const int blocks = (rows + ROWS_PER_JOB - 1) / ROWS_PER_JOB;
    int vecs = TILE_VECS;
    while (vecs > 1 && panels * blocks < vecs * 16 * team_.size()) vecs /= 2;
    int groups = 0;
    for (const Matrix* m : matrices) groups += (m->panels() + vecs - 1) / vecs;
    Unpacked& scratch = local_[thread].unpacked;
    scratch.of = nullptr;
    team_.share(thread, groups * blocks, [&](int job) {
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
      const uint8_t* w[TILE_VECS];
      for (int c = 0; c < here; c++) w[c] = m->panel(panel + c);
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

  // gated_ = silu(x G^T) * (x U^T), 32 columns a job (one group of the next product).
  void multiply_gated(int thread, const Matrix& gate, const Matrix& up, const Rows& in, int rows) {
    const int blocks = (rows + ROWS_PER_JOB - 1) / ROWS_PER_JOB, jobs = (gate.panels() + 1) / 2;
    const bool together = gate.format == up.format && TILE_VECS >= 4;
    Unpacked& scratch = local_[thread].unpacked;
    scratch.of = nullptr;
    team_.share(thread, jobs * blocks, [&](int job) {
      const int first = job % blocks * ROWS_PER_JOB, last = std::min(rows, first + ROWS_PER_JOB);
      const int panel = job / blocks * 2, here = std::min(2, gate.panels() - panel);
      const uint8_t* w[4];
      for (int c = 0; c < here; c++) {
        w[c] = gate.panel(panel + c);
        w[here + c] = up.panel(panel + c);
      }
      auto emit = [&](int row, int count, const float* g, const float* u, int stride) {
        for (int r = 0; r < count; r++) {
          for (int c = 0; c < here; c++) gate_row(gate, up, row + r, (panel + c) * LANES, g + (r * stride + c) * LANES, u + (r * stride + c) * LANES);
          if (!s_.is_f32 && here == 2) gated_.sum_groups(row + r, panel / 2, panel / 2 + 1);
        }
      };
      if (together) {
        product(gate, w, 2 * here, in, first, last, scratch, [&](int row, int count, float* out) { emit(row, count, out, out + here * LANES, 2 * here); });
        return;
      }
      std::vector<float> gates((size_t)(last - first) * here * LANES);
      product(gate, w, here, in, first, last, scratch, [&](int row, int count, float* out) {
        memcpy(&gates[(size_t)(row - first) * here * LANES], out, sizeof(float) * count * here * LANES);
      });
      product(up, w + here, here, in, first, last, scratch, [&](int row, int count, float* out) {
        emit(row, count, &gates[(size_t)(row - first) * here * LANES], out, here);
      });
    });
  }

  void gate_row(const Matrix& gate, const Matrix& up, int row, int column, const float* g, const float* u) {
    V a = load(g), b = load(u);
    if (gate.bias) a = add(a, load(gate.bias + column));
    if (up.bias) b = add(b, load(up.bias + column));
    V y = mul(div(a, add(set1(1.f), vexp(sub(zero(), a)))), b);
    const size_t at = (size_t)row * s_.intermediate + column;
    if (s_.is_f32) store(&gated_.f[at], y);
    else store_bf16(&gated_.b[at], y);
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

}  // namespace

extern "C" {

int pk_abi() { return 4; }

// Instruction sets that the compiler was allowed to use, as /proc/cpuinfo names them.
const char* pk_features() {
  return ""
#ifdef __AVX2__
         " avx2"
#endif
#ifdef __FMA__
         " fma"
#endif
#ifdef __F16C__
         " f16c"
#endif
#ifdef PK_AVX512
         " avx512f avx512bw avx512vl avx512dq"
#endif
#ifdef __AVX512BF16__
         " avx512_bf16"
#endif
#ifdef __AVX512VNNI__
         " avx512_vnni"
#endif
      ;
}

Model* pk_model(const Shape* shape, int threads) { return new Model(*shape, threads); }

void pk_set_rope(Model* model, const float* cos, const float* sin, int positions) {
  model->cos = cos;
  model->sin = sin;
  model->positions = positions;
}

void pk_free(Model* model) { delete model; }

void pk_set_layer(Model* model, int index, const Layer* layer) { model->layer(index) = *layer; }

void pk_set_ends(Model* model, const Matrix* embed, const Matrix* head, const float* norm) {
  model->embed = *embed;
  model->head = *head;
  model->final_norm = norm;
}

int pk_forward(Model* model, const Step* step) { return model->forward(*step); }

void pk_logits(Model* model, const float* hidden, int rows, float* out) { model->logits(hidden, rows, out); }

size_t pk_packed_bytes(int format, int n, int k) {
  Matrix m{format, n, k, nullptr, nullptr};
  return m.panels() * m.panel_bytes();
}

// Rows first .. first + rows of a dense matrix: values [rows][k], float32 or bfloat16 bits.
void pk_pack_dense(int format, int k, const void* values, int first, int rows, uint8_t* out) {
  Matrix m{format, first + rows, k, out, nullptr};
  for (int r = 0; r < rows; r++) {
    const int row = first + r, lane = row % LANES;
    uint8_t* panel = const_cast<uint8_t*>(m.panel(row / LANES));
    if (format == F32)
      for (int i = 0; i < k; i++) ((float*)panel)[(size_t)i * LANES + lane] = ((const float*)values)[(size_t)r * k + i];
    else
      for (int i = 0; i < k; i++) ((bf16*)panel)[((size_t)(i / 2) * LANES + lane) * 2 + i % 2] = ((const bf16*)values)[(size_t)r * k + i];
  }
}

// Rows first .. first + rows of a quantised matrix: quants [rows][k] (int8, or uint8 0..15), half scale and, for Q4, minimum
// [rows][k / 32].
void pk_pack_quants(int format, int k, const uint8_t* quants, const uint16_t* scale, const uint16_t* minimum, int first, int rows,
                    uint8_t* out) {
  Matrix m{format, first + rows, k, out, nullptr};
  for (int r = 0; r < rows; r++)
    for (int g = 0; g < k / GROUP; g++) {
      const int row = first + r;
      const int lane = row % LANES;
      const uint8_t* q = quants + (size_t)r * k + g * GROUP;
      uint8_t* group = const_cast<uint8_t*>(m.panel(row / LANES)) + g * (format == Q8 ? Q8_BYTES : Q4_BYTES);
      const size_t at = (size_t)r * (k / GROUP) + g;
      if (format == Q8) {
        for (int i = 0; i < GROUP; i++) group[i * LANES + lane] = q[i];
        ((uint16_t*)(group + GROUP * LANES))[lane] = scale[at];
        continue;
      }
      for (int j = 0; j < 4; j++) {
        uint32_t word = 0;
        for (int i = 0; i < 8; i++) word |= (uint32_t)q[j * 8 + i] << (4 * (i / 2 + i % 2 * 4));
        ((uint32_t*)group)[j * LANES + lane] = word;
      }
      ((uint16_t*)(group + 256))[lane] = scale[at];
      ((uint16_t*)(group + 256))[LANES + lane] = minimum[at];
    }
}
}
