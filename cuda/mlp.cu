// The gated activation between the two products of a feed-forward layer.
//
// y [rows, inter] bf16 = silu(gate) * up for gate_up [rows, 2 * inter] bf16 with the gate's columns first; `inter` is a
// multiple of 8, rows * inter / 8 below 2^31. float32 inside, rounded once. Launch: any grid x 256, a thread takes vectors of 8
// until none is left.
//
// Registers (sm_90): 32 or fewer. Floor: 6 bytes a value.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256, 4) silu_mul(bf16* y, const bf16* gate_up, int rows, int inter) {
  const unsigned vectors = inter / 8, all = rows * vectors, step = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
    const unsigned row = i / vectors;
    const uint4* in = reinterpret_cast<const uint4*>(gate_up) + (u64)row * vectors + i;
    float gate[8], up[8];
    unpack8(in[0], gate);
    unpack8(in[vectors], up);
#pragma unroll
    for (int k = 0; k < 8; ++k) gate[k] = silu(gate[k]) * up[k];
    reinterpret_cast<uint4*>(y)[i] = pack8(gate);
  }
}
KERNEL_EXPORT(silu_mul)
