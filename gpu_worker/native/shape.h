// What the caller hands over, as plain structs: the shape of a model, its weights, one step, and where a step's memory lies.
#pragma once
#include "matmul.h"

struct Shape {
  int layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, is_f32;
  int rotary_dim;  // leading dimensions of a head that are rotated
  int key_heads, value_heads, key_dim, value_dim, kernel;  // of recurrent layers; 0 without them
  int mtp_intermediate;  // of the drafting head's layer; 0 without a head
  float eps;

  int width() const { return heads * head_dim; }
  int kv_width() const { return kv_heads * head_dim; }
  int key_width() const { return key_heads * key_dim; }
  int value_width() const { return value_heads * value_dim; }
  int conv_width() const { return 2 * key_width() + value_width(); }
};

// One layer of the trunk, or the head's. Matrices without rows and null pointers are parts that it does not have.
struct Layer {
  Matrix q, k, v, q_gate, o;                     // attention
  Matrix in_qkv, in_z, in_a, in_b, out;          // recurrent
  Matrix gate, up, down;
  const float *attn_norm, *mlp_norm;
  const float *q_norm, *k_norm;                  // [head_dim]
  const float *conv;                             // [kernel][conv_width]
  const float *dt_bias, *decay, *state_norm;     // [value_heads], [value_heads], [value_dim]
  int cells;  // which layer of the blocks is its own; -1: none, it is recurrent
  int state;  // which layer of the state slots
};

// The head that drafts from (embedding of a token, hidden row of the position before it).
struct HeadWeights {
  Matrix fc;     // [hidden][2 hidden]: columns of the embedding, then of the hidden row
  Matrix draft;  // rows of the output head for the tokens that are drafted
  const float *embed_norm, *hidden_norm, *norm;
  Layer layer;
};

// State slots: parts of a slot begin that many float32 values behind its start. See device/state_cache.py.
struct States {
  float* base;
  size_t stride, state, log_k, log_d, log_g, conv, folded;
  int slots, log_entries, conv_entries;
};

struct Blocks {
  uint8_t* base;
  size_t block_bytes, hidden_at;  // the hidden row lies that many bytes behind a block's start
  int count, block_size, layers;  // layers of cells in a block
};

// One step, as the caller describes it. A draft is a step of one row for each sequence through the head's layer alone.
struct Step {
  int rows, sequences, out_count, table_width, only_count;
  const int64_t* tokens;
  const int32_t *positions, *seq_of, *tables, *known, *slots;
  const int64_t* out_rows;
  const int32_t* only;  // layers to run; null: all
  const float* given;   // a draft's hidden rows [rows][hidden]
  float* hidden;        // [out_count][hidden]
  Blocks blocks;
  States states;

  const int32_t* table(int row) const { return tables + (size_t)seq_of[row] * table_width; }
};
