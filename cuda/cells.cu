// Queries and keys get their norm and their rotation, keys and values become cells of the pool.
//
// qkv [R, qkv_stride] bf16 holds a row's query heads from column q_at on, its key heads from k_at and its value heads from
// v_at, each of D values; strides and columns are multiples of 8. q [R, heads * D] bf16; with `q` null only cells are written.
// cos, sin float32 [positions, rotary_dim / 2]: the halves of the first rotary_dim values are rotated, the others stay. The
// norms, float32 [D], may be null. Norm and rotation are float32, rounded once at the end.
//
// Grid (R, ceil((heads + 2 kv_heads) / 8)) x 256: a warp a head. A head goes through shared memory (8 D floats a block), as an
// element's partner in the rotation lies in another lane. A row's result depends on the row and its position only.
//
// Registers (sm_90): 40 or fewer. Floor: 4 bytes a value of q, k and v, plus 4 rotary_dim a head row of cos and sin from L2.
#include "common.cuh"

template <int D>
__device__ __forceinline__ void write_cells(bf16* q, unsigned char* pool, i64 block_bytes, const bf16* qkv, int qkv_stride,
                                            int q_at, int k_at, int v_at, const int* positions, const int* seq_of,
                                            const int* seats, const int* tables, int table_stride, const float* cos,
                                            const float* sin, int rotary_dim, const float* q_norm, const float* k_norm,
                                            int heads, int kv_heads, int layer, float eps, float* shared) {
  const int r = blockIdx.x, position = positions[r], lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int queries = q ? heads : 0;
  int head = blockIdx.y * 8 + warp;
  if (position < 0 || head >= queries + 2 * kv_heads) return;
  const int part = head < queries ? 0 : head < queries + kv_heads ? 1 : 2;  // query, key, value
  head -= part == 0 ? 0 : part == 1 ? queries : queries + kv_heads;

  const int column = part == 0 ? q_at : part == 1 ? k_at : v_at;
  const bf16* in = qkv + (i64)r * qkv_stride + column + head * D;
  bf16* out;
  if (part == 0) {
    out = q + ((i64)r * heads + head) * D;
  } else {
    const int block = tables[(i64)seats[seq_of[r]] * table_stride + position / BLOCK_CELLS];
    out = reinterpret_cast<bf16*>(pool + head_cells(block, block_bytes, layer, part - 1, head, kv_heads, D)) +
          position % BLOCK_CELLS * D;
  }
  const bool mine = lane < D / 8;  // lanes that have a vector of the head
  uint4 raw = make_uint4(0, 0, 0, 0);
  if (mine) raw = reinterpret_cast<const uint4*>(in)[lane];
  if (part == 2) {
    if (mine) reinterpret_cast<uint4*>(out)[lane] = raw;
    return;
  }

  float v[8];
  unpack8(raw, v);
  const float* norm = part == 0 ? q_norm : k_norm;
  if (norm) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < 8; ++k) sum = fmaf(v[k], v[k], sum);
    const float scale = rsqrtf(warp_sum(sum) / (float)D + eps);
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = mine ? v[k] * scale * norm[lane * 8 + k] : 0.f;
  }
  float* x = shared + warp * D;
  if (mine) {
    reinterpret_cast<float4*>(x)[lane * 2] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(x)[lane * 2 + 1] = make_float4(v[4], v[5], v[6], v[7]);
  }
  __syncwarp();
  const int half = rotary_dim / 2;
  cos += (i64)position * half;
  sin += (i64)position * half;
#pragma unroll
  for (int j = 0; j < D / 32; ++j) {
    const int d = lane + 32 * j;
    float y = x[d];
    if (d < half)
      y = fmaf(y, cos[d], -(x[d + half] * sin[d]));
    else if (d < 2 * half)
      y = fmaf(y, cos[d - half], x[d - half] * sin[d - half]);
    out[d] = to_bf16(y);
  }
}

#define WRITE_CELLS(D)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256, 4) write_cells_d##D(                                                      \
      bf16* q, unsigned char* pool, i64 block_bytes, const bf16* qkv, int qkv_stride, int q_at, int k_at, int v_at,           \
      const int* positions, const int* seq_of, const int* seats, const int* tables, int table_stride, const float* cos,       \
      const float* sin, int rotary_dim, const float* q_norm, const float* k_norm, int heads, int kv_heads, int layer,         \
      float eps) {                                                                                                            \
    __shared__ __align__(16) float shared[8 * D];                                                                             \
    write_cells<D>(q, pool, block_bytes, qkv, qkv_stride, q_at, k_at, v_at, positions, seq_of, seats, tables, table_stride,   \
                   cos, sin, rotary_dim, q_norm, k_norm, heads, kv_heads, layer, eps, shared);                                \
  }                                                                                                                           \
  KERNEL_EXPORT(write_cells_d##D)
WRITE_CELLS(64)
WRITE_CELLS(96)
WRITE_CELLS(128)
WRITE_CELLS(256)
