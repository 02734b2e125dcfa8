// Causal attention over the pool's blocks for decode, drafts and prefill chunks, in one kernel.
//
// attend_d{64,96,128,256}, grid (tiles, kv_heads, splits) x 128 threads, 16 (22 (D + 8) + 32) + 16 bytes of dynamic shared
// memory: 25872, 37136, 48400, 93456.
//
//   out, q       bf16 [rows][heads * D]
//   pool         [block][layer][k|v][kv_head][16 cells][D] bf16, see common.cuh; the rows' own cells are written before
//   gate         bf16 [row * gate_stride + head * D + d], or null: out *= sigmoid(gate)
//   tile_row, tile_count  i32 [tiles]: a tile is up to 16 / G consecutive rows of one sequence, positions ascending, where
//                G = heads / kv_heads query heads share a key-value head, 1 <= G <= 16. No rows: padding, left alone
//   positions, seq_of  i32 [rows]; a tile whose last row has position -1 is left alone
//   seats        i32 [sequences], rows of `tables`, i32 [seats][table_stride] block numbers
//   first        cells before it are not read; a row before it gets zeros
//   part_o, part_ml, done  where splits > 1: float [tiles][kv_heads][splits][16][D], float [tiles][kv_heads][splits][16][2],
//                u32 [tiles][kv_heads] zero before and after
//   q, out and gate lie at multiples of 8 bytes, the pool's blocks at multiples of 16
//
// The 16 rows of the tensor cores' tile are row * G + head, so that the query heads of one key-value head, and draft rows, share
// every byte read. A split is SPLIT cells; each of the 4 warps streams a quarter of it, 4 blocks, through one buffer for keys and
// one for values (the next keys come while P V runs), with an online softmax of its own. The quarters are folded in order into
// the split's part, the parts left to right into the total. With gridDim.z == 1 a thread block walks over all splits; else it
// takes split blockIdx.z (gridDim.z must reach the last cell) and the last one to finish merges the parts. Both do the same
// operations in the same order, and a part without a cell of a row changes no bit of it: a row's result depends neither on its
// company in tile and batch, nor on the form, nor on where its blocks lie.
//
// Registers on sm_90: 117, 128, 140, 205; shared memory, too, lets 4, 4, 3, 2 thread blocks run on a multiprocessor of an H200.
// Floor: the bytes of the cells, 4 D a cell and key-value head, once for each tile; 64 D operations a cell and tile, that is 16 a
// byte, so decode is bound by memory and prefill by the L2 cache. Not measured on a card.
#include "common.cuh"

constexpr int SPLIT = 256;
constexpr int WARPS = 4;
constexpr int TILE = 16;  // rows of a tensor-core product
constexpr int WARP_BLOCKS = SPLIT / WARPS / BLOCK_CELLS;
constexpr int ROW_THREADS = 32 * WARPS / TILE;  // threads that share a row of a part

// A row in shared memory is 16 bytes longer than its data: 8 rows at one column then lie in different banks.
template <int D>
constexpr int PITCH = D + 8;
// A warp's keys and values are as large as its part, float [TILE][PITCH], which takes their place.
static_assert(TILE == BLOCK_CELLS, "a warp's buffers hold its part");

// The arguments that say what a warp reads.
struct Cells {
  const unsigned char* keys;  // of this layer and head in block 0
  const unsigned char* values;
  i64 block_bytes;
  int first, last;  // cells that are read at all
};

// The running softmax of a row: largest product, sum of exponentials.
struct Softmax {
  float top, sum;
};

// What exponents are taken relative to; a row without any cell yet has the largest product -inf.
__device__ __forceinline__ float origin(float top) { return top == -INFINITY ? 0.f : top; }

// One block's keys or values of a head, zeros for cells that are not read: what lies there may be NaN.
template <int D>
__device__ __forceinline__ void load_cells(bf16* to, const unsigned char* from, int cell, const Cells& cells, int lane) {
#pragma unroll 4
  for (int j = 0; j < BLOCK_CELLS * D / 8 / 32; ++j) {
    const int i = j * 32 + lane, row = i / (D / 8), column = i % (D / 8);
    const bool valid = cell + row >= cells.first && cell + row <= cells.last;
    copy16_async(to + row * PITCH<D> + column * 8, from + i * 16, valid);
  }
}

// One warp: its quarter of a split, cells `begin` and on, in the blocks whose numbers the first lanes hold. Leaves its part,
// float [TILE][PITCH], in its buffers. `position`: of rows lane / 4 and lane / 4 + 8 of the tile (-1: no such row).
template <int D>
__device__ __forceinline__ void attend_quarter(bf16* buffers, Softmax* softmax, const bf16* queries, const Cells& cells,
                                               int begin, int numbers, const int* position, float scale, int lane) {
  bf16* keys = buffers;
  bf16* values = buffers + BLOCK_CELLS * PITCH<D>;
  const int blocks = min(WARP_BLOCKS, (cells.last - begin + BLOCK_CELLS) / BLOCK_CELLS);
  float o[D / 8][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  if (blocks > 0) {
    const i64 at = __shfl_sync(FULL, numbers, 0) * cells.block_bytes;
    load_cells<D>(keys, cells.keys + at, begin, cells, lane);
    copies_commit();
    load_cells<D>(values, cells.values + at, begin, cells, lane);
    copies_commit();
  }
#pragma unroll 1
  for (int b = 0; b < blocks; ++b) {
    const int cell = begin + b * BLOCK_CELLS;
    const i64 next = __shfl_sync(FULL, numbers, min(b + 1, blocks - 1)) * cells.block_bytes;
    copies_wait<1>();  // the keys are there, the values under way
    __syncwarp();
    float s[2][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      unsigned q[4], b16[4];
      load_matrices(q, queries + (lane % 16) * PITCH<D> + k * 16 + lane / 16 * 8);
      load_matrices(b16, keys + (lane / 16 * 8 + lane % 8) * PITCH<D> + k * 16 + lane / 8 % 2 * 8);
      mma_16816(s[0], q, b16);
      mma_16816(s[1], q, b16 + 2);
    }
    __syncwarp();
    if (b + 1 < blocks) load_cells<D>(keys, cells.keys + next, cell + BLOCK_CELLS, cells, lane);
    copies_commit();

    unsigned p[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // rows lane / 4 and lane / 4 + 8
      float e[4];
      float row_top = top[h];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = cell + i / 2 * 8 + lane % 4 * 2 + i % 2;
        e[i] = at >= cells.first && at <= position[h] ? s[i / 2][h * 2 + i % 2] : -INFINITY;
        row_top = fmaxf(row_top, e[i]);
      }
      row_top = fmaxf(row_top, __shfl_xor_sync(FULL, row_top, 1));
      row_top = fmaxf(row_top, __shfl_xor_sync(FULL, row_top, 2));
      const float from = origin(row_top), base = from * scale;
      const float shrink = exp2f((top[h] - from) * scale);
#pragma unroll
      for (int i = 0; i < 4; ++i) e[i] = exp2f(fmaf(e[i], scale, -base));
      sum[h] = fmaf(sum[h], shrink, (e[0] + e[1]) + (e[2] + e[3]));
      top[h] = row_top;
      p[h] = pack2(e[0], e[1]);
      p[h + 2] = pack2(e[2], e[3]);
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        o[n][h * 2] *= shrink;
        o[n][h * 2 + 1] *= shrink;
      }
    }
    copies_wait<1>();  // the values are there, the next keys under way
    __syncwarp();
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      unsigned b16[4];
      load_matrices_trans(b16, values + (lane % 16) * PITCH<D> + n * 16 + lane / 16 * 8);
      mma_16816(o[2 * n], p, b16);
      mma_16816(o[2 * n + 1], p, b16 + 2);
    }
    __syncwarp();
    if (b + 1 < blocks) load_cells<D>(values, cells.values + next, cell + BLOCK_CELLS, cells, lane);
    copies_commit();
  }
  float* part = reinterpret_cast<float*>(buffers);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + h * 8;
    sum[h] += __shfl_xor_sync(FULL, sum[h], 1);
    sum[h] += __shfl_xor_sync(FULL, sum[h], 2);
    if (lane % 4 == 0) softmax[row] = {top[h], sum[h]};
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      float2* to = reinterpret_cast<float2*>(part + row * PITCH<D> + n * 8 + lane % 4 * 2);
      *to = make_float2(o[n][h * 2], o[n][h * 2 + 1]);
    }
  }
}

__device__ __forceinline__ float4 scaled(float4 a, float f) { return make_float4(a.x * f, a.y * f, a.z * f, a.w * f); }
__device__ __forceinline__ float4 add_scaled(float4 sum, float4 a, float f) {
  return make_float4(fmaf(a.x, f, sum.x), fmaf(a.y, f, sum.y), fmaf(a.z, f, sum.z), fmaf(a.w, f, sum.w));
}

// The four quarters of a split, in order. `to`, `quarters`: this thread's columns of its row.
template <int D>
__device__ __forceinline__ Softmax fold_quarters(float* to, const float* quarters, const Softmax* softmax, float scale) {
  Softmax quarter[WARPS], part = {-INFINITY, 0.f};
  float factor[WARPS];
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    quarter[w] = softmax[w * TILE];
    part.top = fmaxf(part.top, quarter[w].top);
  }
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    factor[w] = exp2f((quarter[w].top - origin(part.top)) * scale);
    part.sum = fmaf(quarter[w].sum, factor[w], part.sum);
  }
#pragma unroll
  for (int j = 0; j < D; j += ROW_THREADS * 4) {
    float4 o = scaled(*reinterpret_cast<const float4*>(quarters + j), factor[0]);
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
      o = add_scaled(o, *reinterpret_cast<const float4*>(quarters + w * TILE * PITCH<D> + j), factor[w]);
    }
    *reinterpret_cast<float4*>(to + j) = o;
  }
  return part;
}

// A split's part to the total of the splits before it. `total`, `from`: this thread's columns of its row.
template <int D>
__device__ __forceinline__ void merge(float* total, Softmax& softmax, const float* from, Softmax part, float scale) {
  const float top = fmaxf(softmax.top, part.top);
  const float mine = exp2f((softmax.top - origin(top)) * scale), other = exp2f((part.top - origin(top)) * scale);
  softmax = {top, fmaf(part.sum, other, softmax.sum * mine)};
#pragma unroll
  for (int j = 0; j < D; j += ROW_THREADS * 4) {
    float4* o = reinterpret_cast<float4*>(total + j);
    *o = add_scaled(scaled(*o, mine), *reinterpret_cast<const float4*>(from + j), other);
  }
}

// The result of this thread's columns of one row; `gate` (null: none) and `out` point to column 0 of its head.
template <int D>
__device__ __forceinline__ void write_out(bf16* out, const bf16* gate, const float* total, Softmax softmax, int column) {
  const float inverse = softmax.sum > 0.f ? 1.f / softmax.sum : 0.f;
#pragma unroll
  for (int j = 0; j < D; j += ROW_THREADS * 4) {
    float4 o = scaled(*reinterpret_cast<const float4*>(total + j), inverse);
    if (gate) {
      const uint2 g = *reinterpret_cast<const uint2*>(gate + column + j);
      o.x *= sigmoid(to_float((bf16)(g.x & 0xffffu)));
      o.y *= sigmoid(to_float((bf16)(g.x >> 16)));
      o.z *= sigmoid(to_float((bf16)(g.y & 0xffffu)));
      o.w *= sigmoid(to_float((bf16)(g.y >> 16)));
    }
    *reinterpret_cast<uint2*>(out + column + j) = make_uint2(pack2(o.x, o.y), pack2(o.z, o.w));
  }
}

template <int D>
__device__ __forceinline__ void attend(bf16* out, const bf16* q, const unsigned char* pool, i64 block_bytes, const bf16* gate,
                                       int gate_stride, const int* tile_row, const int* tile_count, const int* positions,
                                       const int* seq_of, const int* seats, const int* tables, int table_stride, int heads,
                                       int kv_heads, int layer, int first, float scale, float* part_o, float* part_ml,
                                       unsigned* done) {
  const int tile = blockIdx.x, kv_head = blockIdx.y, count = tile_count[tile], begin_row = tile_row[tile];
  if (count <= 0) return;
  const int group = heads / kv_heads, last = positions[begin_row + count - 1], sequence = seq_of[begin_row];
  if (last < 0) return;
  const int splits = last / SPLIT + 1;
  const bool walk = gridDim.z == 1;
  if (!walk && splits > (int)gridDim.z) __trap();
  if (!walk && (int)blockIdx.z >= splits) return;
  scale *= 1.44269504f;  // exponentials are powers of 2

  DYN_SHARED(unsigned char, shared);
  float* quarters = reinterpret_cast<float*>(shared);
  float* total = quarters + WARPS * TILE * PITCH<D>;
  Softmax* softmax = reinterpret_cast<Softmax*>(total + TILE * PITCH<D>);
  bf16* queries = reinterpret_cast<bf16*>(softmax + WARPS * TILE);
  unsigned* order = reinterpret_cast<unsigned*>(queries + TILE * PITCH<D>);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int* table = tables + (i64)seats[sequence] * table_stride;
  // Numbers of the warp's blocks, a lane each, read ahead of their use.
  const auto block_numbers = [&](int split) {
    const int block = (split * WARPS + warp) * WARP_BLOCKS + lane;
    return lane < WARP_BLOCKS && block <= last / BLOCK_CELLS ? table[block] : 0;
  };
  const int first_split = walk ? 0 : blockIdx.z;
  int numbers = block_numbers(first_split);

  // This thread's share of queries, parts and total: 4 columns of 32, from `column` on, of one row.
  const int row = threadIdx.x / ROW_THREADS, column = threadIdx.x % ROW_THREADS * 4, own = row * PITCH<D> + column;
  const int token = begin_row + row / group, head = kv_head * group + row % group;
  const bool real = row < count * group;
#pragma unroll
  for (int j = 0; j < D; j += ROW_THREADS * 4) {
    uint2 four = make_uint2(0, 0);
    if (real) four = *reinterpret_cast<const uint2*>(q + ((i64)token * heads + head) * D + column + j);
    *reinterpret_cast<uint2*>(queries + own + j) = four;
    *reinterpret_cast<float4*>(total + own + j) = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  __syncthreads();

  int position[2];  // of the rows that this thread holds in tensor-core products
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int at = lane / 4 + h * 8;
    position[h] = at < count * group ? positions[begin_row + at / group] : -1;
  }
  const unsigned char* layer_cells = pool + head_cells(0, 0, layer, 0, kv_head, kv_heads, D);
  const Cells cells = {layer_cells, layer_cells + (i64)kv_heads * BLOCK_CELLS * D * 2, block_bytes, first, last};
  const i64 part_row = walk ? 0 : ((i64)tile * kv_heads + kv_head) * gridDim.z * TILE + row;  // of this thread, split 0

  bf16* buffers = reinterpret_cast<bf16*>(quarters + warp * TILE * PITCH<D>);
  Softmax sum = {-INFINITY, 0.f}, part;
#pragma unroll 1
  for (int split = first_split; split < splits; ++split) {
    const int begin = (split * WARPS + warp) * WARP_BLOCKS * BLOCK_CELLS, next = block_numbers(split + 1);
    attend_quarter<D>(buffers, softmax + warp * TILE, queries, cells, begin, numbers, position, scale, lane);
    numbers = next;
    __syncthreads();
    float* to = walk ? quarters + own : part_o + (part_row + split * TILE) * D + column;
    part = fold_quarters<D>(to, quarters + own, softmax + row, scale);
    if (!walk) break;
    merge<D>(total + own, sum, quarters + own, part, scale);
    __syncthreads();
  }
  if (!walk) {
    Softmax* parts = reinterpret_cast<Softmax*>(part_ml) + part_row;
    if (column == 0) parts[first_split * TILE] = part;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *order = atomicInc(done + (i64)tile * kv_heads + kv_head, splits - 1);  // the last one leaves 0
    __syncthreads();
    if (*order != (unsigned)splits - 1) return;
    __threadfence();
#pragma unroll 1
    for (int split = 0; split < splits; ++split) {
      merge<D>(total + own, sum, part_o + (part_row + split * TILE) * D + column, parts[split * TILE], scale);
    }
  }
  if (!real) return;
  const bf16* own_gate = gate ? gate + (i64)token * gate_stride + head * D : nullptr;
  write_out<D>(out + ((i64)token * heads + head) * D, own_gate, total + own, sum, column);
}

#define ATTEND(D, BLOCKS)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) attend_d##D(                                               \
      bf16* out, const bf16* q, const unsigned char* pool, i64 block_bytes, const bf16* gate, int gate_stride,                \
      const int* tile_row, const int* tile_count, const int* positions, const int* seq_of, const int* seats,                  \
      const int* tables, int table_stride, int heads, int kv_heads, int layer, int first, float scale, float* part_o,         \
      float* part_ml, unsigned* done) {                                                                                       \
    attend<D>(out, q, pool, block_bytes, gate, gate_stride, tile_row, tile_count, positions, seq_of, seats, tables,           \
              table_stride, heads, kv_heads, layer, first, scale, part_o, part_ml, done);                                     \
  }                                                                                                                           \
  KERNEL_EXPORT(attend_d##D)
ATTEND(64, 4)
ATTEND(96, 3)
ATTEND(128, 3)
ATTEND(256, 2)
