// What changes logits before a draw: penalties, bias and bans, in this order. Twin: gpu_worker/model/sampler.py, _changed.
#pragma once
#include "common.cuh"

// One record a sequence of the step, see gpu_worker/device/draw_params.py.
struct DrawParams {
  u64 key;
  double top_p;
  const int* seen;
  const int* bias;
  const int* banned;
  float* changed;
  int seen_count, bias_count, banned_count;
  float temperature, least;
  int top_k;
  float repetition, presence, frequency;
};

// Each operation rounds by itself, as in the twin.
__device__ __forceinline__ void penalise(float* logit, int count, const DrawParams& p) {
  float v = *logit;
  v = v > 0.f ? v / p.repetition : v * p.repetition;
  if (count > 0) v = __fsub_rn(v, __fadd_rn(p.presence, __fmul_rn(p.frequency, (float)count)));
  *logit = v;
}

// Changes the logits of a row; called by all threads of a block. `depth` drafts (32 at most) at `drafts` come behind the tokens
// that the lists know of, -1 among them is none. column(token): -1 if it has none. `found`: shared memory.
template <class Column>
__device__ __forceinline__ void change(float* row, const DrawParams& p, const int* drafts, int depth, Column column,
                                       unsigned* found) {
  if (threadIdx.x == 0) *found = 0;  // a bit for each draft that is in `seen`
  __syncthreads();
  for (int i = threadIdx.x; i < p.seen_count; i += blockDim.x) {
    const int token = p.seen[2 * i], c = column(token);
    int count = p.seen[2 * i + 1];
    for (int d = 0; d < depth; ++d)
      if (drafts[d] == token) {
        ++count;
        atomicOr(found, 1u << d);
      }
    if (c >= 0) penalise(row + c, count, p);
  }
  __syncthreads();
  const int own = threadIdx.x;
  if (own < depth && !(*found >> own & 1)) {
    const int token = drafts[own], c = column(token);
    int count = 0, first = depth;
    for (int d = depth - 1; d >= 0; --d)
      if (drafts[d] == token) {
        ++count;
        first = d;
      }
    if (c >= 0 && first == own) penalise(row + c, count, p);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.bias_count; i += blockDim.x) {
    const int c = column(p.bias[2 * i]);
    if (c >= 0) row[c] += __int_as_float(p.bias[2 * i + 1]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.banned_count; i += blockDim.x) {
    const int c = column(p.banned[i]);
    if (c >= 0) row[c] = -INFINITY;
  }
  __syncthreads();
}
