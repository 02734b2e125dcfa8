// Two kernels for tests of a card: y = a x, and one that adds up in a lot of shared memory.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) scale(float* y, const float* x, int n, float a) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = a * x[i];
}
KERNEL_EXPORT(scale)

// y[0] = x[0] + ... + x[n - 1], launched with one thread and n floats of shared memory.
extern "C" __global__ void __launch_bounds__(32, 2) total(float* y, const float* x, int n) {
  DYN_SHARED(float, kept);
  for (int i = 0; i < n; ++i) kept[i] = x[i];
  float sum = 0.f;
  for (int i = 0; i < n; ++i) sum += kept[i];
  *y = sum;
}
KERNEL_EXPORT(total)
