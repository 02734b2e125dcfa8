// Rows of the residual stream: the embedding, RMS norm, and what the drafting head pairs and keeps.
//
// A block of 256 threads a row; a thread has every 256th vector of 8 values. `hidden` is any multiple of 8; up to 8192 a row
// stays in registers between its two passes, beyond it is read again. The sum of squares goes thread by thread, then a tree in
// the warp, then over the warps: an order that only `hidden` decides. Padding (a negative token, row or position) is skipped.
//
// x [R, hidden] float32 is the residual stream; y, hidden rows and tables of tokens are bf16. `pool` is blocks of `block_bytes`;
// the float32 hidden row of a block's newest cell lies `hidden_at` bytes behind the block's begin. A sequence's blocks are
// tables[seats[sequence]][position / 16].
//
// Registers (sm_90): rms_norm 80, pair 52, pair_draft 48, the others 32 or fewer. Floor, in bytes a row: embed 6 hidden;
// rms_norm 6 hidden, with `add` 12; pair 10 hidden, keep_hidden 6.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int KEPT = 4;  // vectors a thread keeps in registers

__device__ __forceinline__ void load8(const float* p, float* v) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void load8(const bf16* p, float* v) { unpack8(*reinterpret_cast<const uint4*>(p), v); }
__device__ __forceinline__ void store8(float* p, const float* v) {
  reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
__device__ __forceinline__ void store8(bf16* p, const float* v) { *reinterpret_cast<uint4*>(p) = pack8(v); }

__device__ __forceinline__ float squares(const float* v, float sum) {
#pragma unroll
  for (int k = 0; k < 8; ++k) sum = fmaf(v[k], v[k], sum);
  return sum;
}

// The block's sum, the same bits for every thread. `shared` holds a float a warp and may be used again after the next barrier.
__device__ __forceinline__ float block_sum(float v, float* shared) {
  v = warp_sum(v);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  return warp_sum((threadIdx.x & 31) < THREADS / 32 ? shared[threadIdx.x & 31] : 0.f);
}

__device__ __forceinline__ float scale_of(float sum, int hidden, float eps) { return rsqrtf(sum / (float)hidden + eps); }

__device__ __forceinline__ void scaled(float* v, float scale, const float* weight) {
  float w[8];
  load8(weight, w);
#pragma unroll
  for (int k = 0; k < 8; ++k) v[k] = v[k] * scale * w[k];
}

// y = bf16(rms(row) * weight); zeros where there is no row. Ends with a barrier behind the last use of `shared`.
template <class T>
__device__ __forceinline__ void norm_row(bf16* y, const T* row, const float* weight, int hidden, float eps, float* shared) {
  float v[8], sum = 0.f;
  if (row)
    for (int c = threadIdx.x * 8; c < hidden; c += THREADS * 8) {
      load8(row + c, v);
      sum = squares(v, sum);
    }
  const float scale = scale_of(block_sum(sum, shared), hidden, eps);
  for (int c = threadIdx.x * 8; c < hidden; c += THREADS * 8) {
    if (row) load8(row + c, v);
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = row ? v[k] : 0.f;
    scaled(v, scale, weight + c);
    store8(y + c, v);
  }
  __syncthreads();
}

// Where in the pool the hidden row lies that the block of a sequence's cell at `position` keeps.
__device__ __forceinline__ i64 kept_row(i64 block_bytes, i64 hidden_at, const int* tables, int table_stride, int seat,
                                        int position) {
  const int block = tables[(i64)seat * table_stride + position / BLOCK_CELLS];
  return (i64)block * block_bytes + hidden_at;
}

__device__ __forceinline__ void keep_row(float* to, const bf16* from, int hidden) {
  for (int c = threadIdx.x * 8; c < hidden; c += THREADS * 8) {
    float v[8];
    load8(from + c, v);
    store8(to + c, v);
  }
}

// x[r] = table[tokens[r]], of token 0 where a draft has failed (-1): its cell is multiplied by 0 and so must be finite; grid R.
extern "C" __global__ void __launch_bounds__(256, 4) embed(float* x, const int* tokens, const bf16* table, int hidden) {
  keep_row(x + (i64)blockIdx.x * hidden, table + (i64)max(tokens[blockIdx.x], 0) * hidden, hidden);
}
KERNEL_EXPORT(embed)

// With r = rows[i], or i where `rows` is null: v = x[r] + add[r] (add may be null), y[i] = bf16(rms(v) * weight), y32[i] the
// same in float32; either may be null. v goes back to x[r] where there is `add` and no `rows`. Grid: rows.
extern "C" __global__ void __launch_bounds__(256, 2) rms_norm(bf16* y, float* y32, float* x, const bf16* add, const float* weight,
                                                              const int* rows, int hidden, float eps) {
  __shared__ float shared[THREADS / 32];
  const int r = rows ? rows[blockIdx.x] : (int)blockIdx.x;
  if (r < 0) return;
  float* in = x + (i64)r * hidden;
  const bf16* more = add ? add + (i64)r * hidden : nullptr;
  const i64 out = (i64)blockIdx.x * hidden;
  const bool back = more && !rows;
  float kept[KEPT][8], sum = 0.f;
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int c = (threadIdx.x + i * THREADS) * 8;
    if (c >= hidden) continue;
    load8(in + c, kept[i]);
    if (more) {
      float a[8];
      load8(more + c, a);
#pragma unroll
      for (int k = 0; k < 8; ++k) kept[i][k] += a[k];
      if (back) store8(in + c, kept[i]);
    }
    sum = squares(kept[i], sum);
  }
  // of a row that is longer than the registers: summed here, read again below
  for (int c = (threadIdx.x + KEPT * THREADS) * 8; c < hidden; c += THREADS * 8) {
    float v[8], a[8];
    load8(in + c, v);
    if (more) {
      load8(more + c, a);
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] += a[k];
      if (back) store8(in + c, v);
    }
    sum = squares(v, sum);
  }
  const float scale = scale_of(block_sum(sum, shared), hidden, eps);
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int c = (threadIdx.x + i * THREADS) * 8;
    if (c >= hidden) continue;
    scaled(kept[i], scale, weight + c);
    if (y) store8(y + out + c, kept[i]);
    if (y32) store8(y32 + out + c, kept[i]);
  }
  for (int c = (threadIdx.x + KEPT * THREADS) * 8; c < hidden; c += THREADS * 8) {
    float v[8], a[8];
    load8(in + c, v);
    if (more && !back) {
      load8(more + c, a);
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] += a[k];
    }
    scaled(v, scale, weight + c);
    if (y) store8(y + out + c, v);
    if (y32) store8(y32 + out + c, v);
  }
}
KERNEL_EXPORT(rms_norm)

// What enters the drafting head's layer for row r: y[r] [2 hidden] = the token's embedding | the hidden row of the position
// before, each normalised. That row is hidden_rows[r - 1], or where the sequence's rows begin the one its block keeps; zeros at
// position 0. Grid R.
extern "C" __global__ void __launch_bounds__(256, 4)
    pair(bf16* y, const int* tokens, const int* positions, const int* seq_of, const int* row_begin, const int* seats,
         const int* tables, int table_stride, const unsigned char* pool, i64 block_bytes, i64 hidden_at, const bf16* embed,
         const bf16* hidden_rows, const float* embed_norm, const float* hidden_norm, int hidden, float eps) {
  __shared__ float shared[THREADS / 32];
  const int r = blockIdx.x, position = positions[r];
  if (position < 0) return;
  const int sequence = seq_of[r], token = max(tokens[r], 0);
  bf16* out = y + (i64)r * 2 * hidden;
  norm_row(out, embed + (i64)token * hidden, embed_norm, hidden, eps, shared);
  if (r > row_begin[sequence]) {
    norm_row(out + hidden, hidden_rows + (i64)(r - 1) * hidden, hidden_norm, hidden, eps, shared);
    return;
  }
  const float* before = nullptr;
  if (position > 0)
    before = reinterpret_cast<const float*>(
        pool + kept_row(block_bytes, hidden_at, tables, table_stride, seats[sequence], position - 1));
  norm_row(out + hidden, before, hidden_norm, hidden, eps, shared);
}
KERNEL_EXPORT(pair)

// The same for draft pass `depth` of sequence i, at positions[i] (negative: it drafts no more). Its token is the one behind
// `depth` others in its rows; the row before is the block's in pass 0, later what the pass before gave, before[i] float32.
// Grid S.
extern "C" __global__ void __launch_bounds__(256, 4)
    pair_draft(bf16* y, const int* tokens, const int* row_begin, const int* positions, const int* seats, const int* tables,
               int table_stride, const unsigned char* pool, i64 block_bytes, i64 hidden_at, const bf16* embed,
               const float* before, const float* embed_norm, const float* hidden_norm, int hidden, int depth, float eps) {
  __shared__ float shared[THREADS / 32];
  const int i = blockIdx.x, position = positions[i];
  if (position < 0) return;
  const int token = max(tokens[row_begin[i] + depth], 0);  // a draw that failed: what follows is not kept
  bf16* out = y + (i64)i * 2 * hidden;
  norm_row(out, embed + (i64)token * hidden, embed_norm, hidden, eps, shared);
  const float* row = nullptr;
  if (depth > 0)
    row = before + (i64)i * hidden;
  else if (position > 0)
    row = reinterpret_cast<const float*>(
        pool + kept_row(block_bytes, hidden_at, tables, table_stride, seats[i], position - 1));
  norm_row(out + hidden, row, hidden_norm, hidden, eps, shared);
}
KERNEL_EXPORT(pair_draft)

// A row that is the last of its sequence's rows, or has the last cell of a block, leaves its hidden row in that block. Grid R.
extern "C" __global__ void __launch_bounds__(256, 4)
    keep_hidden(unsigned char* pool, i64 block_bytes, i64 hidden_at, const bf16* hidden_rows, const int* positions,
                const int* seq_of, const int* row_begin, const int* row_count, const int* seats, const int* tables,
                int table_stride, int hidden) {
  const int r = blockIdx.x, position = positions[r];
  if (position < 0) return;
  const int sequence = seq_of[r];
  const bool last = r == row_begin[sequence] + row_count[sequence] - 1;
  if (!last && position % BLOCK_CELLS != BLOCK_CELLS - 1) return;
  const i64 at = kept_row(block_bytes, hidden_at, tables, table_stride, seats[sequence], position);
  keep_row(reinterpret_cast<float*>(pool + at), hidden_rows + (i64)r * hidden, hidden);
}
KERNEL_EXPORT(keep_hidden)

// Where drafts were rejected, the block of the last cell that counts gets that cell's row in place of a rejected one's. Grid S.
extern "C" __global__ void __launch_bounds__(256, 4)
    keep_accepted(unsigned char* pool, i64 block_bytes, i64 hidden_at, const bf16* hidden_rows, const int* positions,
                  const int* row_begin, const int* row_count, const int* drafts, const int* accepted, const int* seats,
                  const int* tables, int table_stride, int hidden) {
  const int s = blockIdx.x, taken = accepted[s];
  if (row_count[s] <= 0 || taken < 0 || taken >= drafts[s]) return;
  const int r = row_begin[s] + row_count[s] - 1 - drafts[s] + taken;
  const i64 at = kept_row(block_bytes, hidden_at, tables, table_stride, seats[s], positions[r]);
  keep_row(reinterpret_cast<float*>(pool + at), hidden_rows + (i64)r * hidden, hidden);
}
KERNEL_EXPORT(keep_accepted)
