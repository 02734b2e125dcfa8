// Gated delta net: layers with a recurrent state instead of cells. A row reads the state at its multiple of 16 and the log
// since, so its result is a function of its position and its sequence only. The rule of slots and folds and the names are
// those of device/state_cache.py.
//
// With b = 16 * (q / 16) and G(i) the sum of g over b..i, row q of a value head:
//   d_q   = beta_q (v_q - e^G(q) S^T k_q - sum over b <= j < q of e^(G(q) - G(j)) (k_j . k_q) d_j)
//   out_q = e^G(q) S^T q_q + sum over b <= j <= q of e^(G(q) - G(j)) (k_j . q_q) d_j
//   fold    S = e^G(15) S + sum over j of e^(G(15) - G(j)) k_j d_j^T
#pragma once
#include "workspace.h"

constexpr int FOLD = 16;

// y[n][N columns] = x S for N vectors x [key_dim]; S [key_dim][value_dim], 16 C columns of it.
template <int N, int C>
PK_INLINE void through_state_tile(const float* state, int key_dim, int value_dim, const float* x, float* y) {
  V sum[N][C];
  for (int n = 0; n < N; n++)
    for (int c = 0; c < C; c++) sum[n][c] = zero();
  for (int i = 0; i < key_dim; i++) {
    V s[C];
    for (int c = 0; c < C; c++) s[c] = load(state + (size_t)i * value_dim + c * LANES);
    for (int n = 0; n < N; n++) {
      const V value = set1(x[(size_t)n * key_dim + i]);
      for (int c = 0; c < C; c++) sum[n][c] = fma(s[c], value, sum[n][c]);
    }
  }
  for (int n = 0; n < N; n++)
    for (int c = 0; c < C; c++) store(y + (size_t)n * value_dim + c * LANES, sum[n][c]);
}

template <int C>
void through_state_columns(const float* state, int key_dim, int value_dim, const float* x, int count, float* y) {
  for (; count >= 4; count -= 4, x += 4 * key_dim, y += 4 * value_dim) through_state_tile<4, C>(state, key_dim, value_dim, x, y);
  for (; count >= 2; count -= 2, x += 2 * key_dim, y += 2 * value_dim) through_state_tile<2, C>(state, key_dim, value_dim, x, y);
}

// y [count][value_dim] = S^T x for an even number of vectors x [count][key_dim].
inline void through_state(const float* state, int key_dim, int value_dim, const float* x, int count, float* y) {
  int v = 0;
  for (; v + 4 * LANES <= value_dim; v += 4 * LANES) through_state_columns<4>(state + v, key_dim, value_dim, x, count, y + v);
  for (; v < value_dim; v += LANES) through_state_columns<1>(state + v, key_dim, value_dim, x, count, y + v);
}

// to = decay * from + sum over j of x[j]^T d[j] for 16 entries: x [16][key_dim], each scaled already.
inline void fold_state(const float* from, float decay, const float* x, const float* const* d, int key_dim, int value_dim, float* to) {
  const V by = set1(decay);
  for (int i = 0; i < key_dim; i += 4)
    for (int v = 0; v < value_dim; v += LANES) {
      V sum[4];
      for (int n = 0; n < 4; n++) sum[n] = mul(load(from + (size_t)(i + n) * value_dim + v), by);
      for (int j = 0; j < FOLD; j++) {
        const V entry = load(d[j] + v);
        for (int n = 0; n < 4; n++) sum[n] = fma(set1(x[j * key_dim + i + n]), entry, sum[n]);
      }
      for (int n = 0; n < 4; n++) store(to + (size_t)(i + n) * value_dim + v, sum[n]);
    }
}

class Delta {
 public:
  explicit Delta(Workspace& work) : w_(work), s_(work.s), scratch_(work.team.size()) {}

  // False if a slot's state is not one that its rows can go on from.
  bool reserve(const Step& step) {
    sequences_.clear();
    if (!s_.value_heads) return true;
    for (int row = 0; row < step.rows; row++) {
      const int number = step.seq_of[row];
      if (row && number == step.seq_of[row - 1]) {
        sequences_.back().count++;
        continue;
      }
      const int start = step.positions[row];
      const int done = start ? folded(step, number) : 0, due = FOLD * (start / FOLD) - done;
      if (due != 0 && due != FOLD) return false;
      sequences_.push_back({row, 1, start, step.known[number], done, number});
    }
    return true;
  }

  // The rows' outputs, normed and gated, [value_width] each in `attended`; logs, states and inputs of all rows. also(i) is
  // run for each of `more` rows beside it.
  template <class Also>
  void run(const Step& step, int thread, const Layer& layer, int more, const Also& also) {
    const int jobs = (int)sequences_.size() * s_.key_heads;
    w_.team.share(thread, jobs + more, [&](int job) {
      if (job < jobs) run_head(step, layer, sequences_[job / s_.key_heads], job % s_.key_heads, scratch_[thread]);
      else also(job - jobs);
    });
  }

  // When all layers have run: how far the states are folded now.
  void finish(const Step& step) {
    for (const Sequence& q : sequences_) {
      const int before = std::max(q.folded, FOLD * (q.start / FOLD)), last = q.start + q.count - 1;
      folded(step, q.number) = std::max(before, FOLD * (std::min(q.known, last) / FOLD));
    }
  }

 private:
  struct Sequence {
    int first, count, start, known, folded, number;  // first row, rows, position of the first, see Batch, tokens in S, index
  };
  struct Scratch {
    std::vector<float> x;       // [2][16][key_dim]: keys of a tile's rows, their queries
    std::vector<float> values;  // [value heads of the key head][16][value_dim]
    std::vector<float> through; // [2][16][value_dim]
    std::vector<float> scaled;  // [16][key_dim]
    std::vector<float> states;  // [value heads of the key head][key_dim][value_dim]: folded for drafts only
    float keys_keys[FOLD][FOLD], keys_queries[FOLD][FOLD];  // [row of the tile][entry since b]
  };

  // One sequence's slot, as one layer and one key head sees it.
  struct Slot {
    const Shape& s;
    const States& at;
    float* base;
    int layer, key_head;

    float* state(int head) const { return base + at.state + ((size_t)layer * s.value_heads + head) * s.key_dim * s.value_dim; }
    size_t entry(int position) const { return (size_t)layer * at.log_entries + position % at.log_entries; }
    float* key(int position) const { return base + at.log_k + (entry(position) * s.key_heads + key_head) * s.key_dim; }
    float* addend(int position, int head) const { return base + at.log_d + (entry(position) * s.value_heads + head) * s.value_dim; }
    float& decay(int position, int head) const { return base[at.log_g + entry(position) * s.value_heads + head]; }
    float* input(int position) const {
      return base + at.conv + ((size_t)layer * at.conv_entries + position % at.conv_entries) * s.conv_width();
    }
  };

  int heads() const { return s_.value_heads / s_.key_heads; }  // value heads of a key head

  int32_t& folded(const Step& step, int sequence) const {
    return *(int32_t*)(step.states.base + step.slots[sequence] * step.states.stride + step.states.folded);
  }

  // All rows of one sequence, for one key head and its value heads: tiles that end at multiples of 16.
  void run_head(const Step& step, const Layer& layer, const Sequence& q, int key_head, Scratch& my) {
    const Slot slot{s_, step.states, step.states.base + step.slots[q.number] * step.states.stride, layer.state, key_head};
    const size_t state_values = (size_t)s_.key_dim * s_.value_dim;
    my.x.resize((size_t)2 * FOLD * s_.key_dim);
    my.values.resize((size_t)heads() * FOLD * s_.value_dim);
    my.through.resize((size_t)2 * FOLD * s_.value_dim);
    my.scaled.resize((size_t)FOLD * s_.key_dim);
    my.states.resize(heads() * state_values);
    const int first_head = key_head * heads(), last = q.start + q.count - 1;
    if (q.start == 0) memset(slot.state(first_head), 0, sizeof(float) * heads() * state_values);
    if (q.folded < FOLD * (q.start / FOLD)) fold(slot, q.folded, slot.state(first_head), my);
    const float* states = slot.state(first_head);
    for (int at = q.start, end; at <= last; at = end) {
      end = std::min(last + 1, FOLD * (at / FOLD + 1));
      if (at % FOLD == 0 && at > q.start) {
        float* to = at <= q.known ? slot.state(first_head) : my.states.data();
        fold(slot, at - FOLD, to, my);
        states = to;
      }
      run_tile(layer, q, slot, at, end, states, my);
    }
    for (int at = std::max(q.start, last + 1 - step.states.conv_entries); at <= last; at++) {
      const float* in = w_.wide_row(q.first + at - q.start);
      each_channel(key_head, [&](int from, int count, int) { memcpy(slot.input(at) + from, in + from, sizeof(float) * count); });
    }
  }

  // The channels of the convolution that one key head needs: part 0 is q, 1 k, 2 v.
  template <class Body>
  void each_channel(int key_head, const Body& body) const {
    body(key_head * s_.key_dim, s_.key_dim, 0);
    body(s_.key_width() + key_head * s_.key_dim, s_.key_dim, 1);
    body(2 * s_.key_width() + key_head * heads() * s_.value_dim, heads() * s_.value_dim, 2);
  }

  // The states of the key head's value heads take in the tokens at position .. position + 15.
  void fold(const Slot& slot, int position, float* to, Scratch& my) {
    for (int h = 0; h < heads(); h++) {
      const int head = slot.key_head * heads() + h;
      float sums[FOLD], total = 0;
      const float* d[FOLD];
      for (int j = 0; j < FOLD; j++) {
        sums[j] = total += slot.decay(position + j, head);
        d[j] = slot.addend(position + j, head);
      }
      for (int j = 0; j < FOLD; j++) {
        const V by = set1(scalar_exp(total - sums[j]));
        for (int i = 0; i < s_.key_dim; i += LANES) store(&my.scaled[j * s_.key_dim + i], mul(load(slot.key(position + j) + i), by));
      }
      const size_t at = (size_t)h * s_.key_dim * s_.value_dim;
      fold_state(slot.state(head), scalar_exp(total), my.scaled.data(), d, s_.key_dim, s_.value_dim, to + at);
    }
  }

  // Rows at positions at .. end - 1, between two multiples of 16; `states` has taken in what lies before them.
  void run_tile(const Layer& layer, const Sequence& q, const Slot& slot, int at, int end, const float* states, Scratch& my) {
    const int base = FOLD * (at / FOLD), rows = end - at, dim = s_.key_dim;
    for (int r = 0; r < rows; r++) convolve(layer, q, slot, at + r, r, rows, my);
    for (int r = 0; r < rows; r++)
      for (int j = base; j <= at + r; j++) {
        my.keys_keys[r][j - base] = dot_rows(slot.key(j), &my.x[(size_t)r * dim], dim);
        my.keys_queries[r][j - base] = dot_rows(slot.key(j), &my.x[(size_t)(rows + r) * dim], dim);
      }
    for (int h = 0; h < heads(); h++) run_value_head(layer, q, slot, at, end, h, states + (size_t)h * dim * s_.value_dim, my);
  }

  // Queries, keys and values of row `r` of a tile of `rows`; the key goes to the log too.
  void convolve(const Layer& layer, const Sequence& q, const Slot& slot, int position, int r, int rows, Scratch& my) {
    const int dim = s_.key_dim;
    float* to[3] = {&my.x[(size_t)(rows + r) * dim], &my.x[(size_t)r * dim], &my.values[(size_t)r * heads() * s_.value_dim]};
    each_channel(slot.key_head, [&](int from, int count, int part) {
      for (int i = 0; i < count; i += LANES) {
        V sum = zero();
        for (int tap = std::max(0, s_.kernel - 1 - position); tap < s_.kernel; tap++) {
          const int before = position - s_.kernel + 1 + tap;
          const float* in = before >= q.start ? w_.wide_row(q.first + before - q.start) : slot.input(before);
          sum = fma(load(in + from + i), load(layer.conv + (size_t)tap * s_.conv_width() + from + i), sum);
        }
        store(to[part] + i, silu(sum));
      }
    });
    unit_norm(to[0], dim, 1.f / std::sqrt((float)dim), to[0]);
    unit_norm(to[1], dim, 1.f, to[1]);
    memcpy(slot.key(position), to[1], sizeof(float) * dim);
  }

  void run_value_head(const Layer& layer, const Sequence& q, const Slot& slot, int at, int end, int h, const float* state, Scratch& my) {
    const int base = FOLD * (at / FOLD), rows = end - at, dim = s_.value_dim, head = slot.key_head * heads() + h;
    float* through = my.through.data();
    through_state(state, s_.key_dim, dim, my.x.data(), 2 * rows, through);
    alignas(64) float sums[FOLD] = {}, factors[FOLD];  // G, and e^(G(q) - G(j))
    float total = 0;
    for (int j = base; j < at; j++) sums[j - base] = total += slot.decay(j, head);
    for (int r = 0; r < rows; r++) {
      const int position = at + r, mine = position - base;
      const float* gates = w_.wide_row(q.first + position - q.start) + s_.conv_width() + s_.value_width();  // a, then b
      slot.decay(position, head) = layer.decay[head] * softplus(gates[head] + layer.dt_bias[head]);
      sums[mine] = total += slot.decay(position, head);
      const float beta = scalar_sigmoid(gates[s_.value_heads + head]), from_state = scalar_exp(total);
      store(factors, vexp(sub(set1(total), load(sums))));
      const float *u = through + (size_t)r * dim, *w = through + (size_t)(rows + r) * dim;
      const float* v = &my.values[((size_t)r * heads() + h) * dim];
      float *d = slot.addend(position, head), *out = w_.attended_row(q.first + position - q.start) + head * dim;
      for (int i = 0; i < dim; i += LANES) {
        V add_in = fma(set1(-from_state), load(u + i), load(v + i)), result = mul(set1(from_state), load(w + i));
        for (int j = 0; j < mine; j++) {
          const V entry = load(slot.addend(base + j, head) + i);
          add_in = fma(set1(-factors[j] * my.keys_keys[r][j]), entry, add_in);
          result = fma(set1(factors[j] * my.keys_queries[r][j]), entry, result);
        }
        add_in = mul(add_in, set1(beta));
        store(d + i, add_in);
        store(out + i, fma(set1(factors[mine] * my.keys_queries[r][mine]), add_in, result));
      }
      const float* z = w_.wide_row(q.first + position - q.start) + s_.conv_width() + head * dim;
      rms_norm(out, layer.state_norm, dim, s_.eps, out);
      for (int i = 0; i < dim; i += LANES) store(out + i, mul(load(out + i), silu(load(z + i))));
    }
  }

  Workspace& w_;
  const Shape& s_;
  std::vector<Scratch> scratch_;
  std::vector<Sequence> sequences_;
};
