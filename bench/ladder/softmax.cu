// Row softmax, which is bound by memory bandwidth: each rung has fewer or better coalesced
// accesses.
#include "bench/ladder/ladder.h"
#include "kernels/cuda/device.cuh"

namespace cohort::bench::ladder {
namespace {

using namespace kernels::cuda;

constexpr int kThreads = 256;

// Rung 1: one thread per row, three reads and a write. The threads of a warp read different rows,
// so each access loads 32 bytes for 4 useful ones.
__global__ void __launch_bounds__(kThreads)
    naive_kernel(const float* x, float* y, int64_t rows, int64_t cols) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= rows) return;
  x += row * cols;
  y += row * cols;
  float largest = -INFINITY, sum = 0;
  for (int64_t i = 0; i < cols; ++i) largest = fmaxf(largest, x[i]);
  for (int64_t i = 0; i < cols; ++i) sum += __expf(x[i] - largest);
  for (int64_t i = 0; i < cols; ++i) y[i] = __expf(x[i] - largest) / sum;
}

// Rung 2: two reads (Milakov and Gimelshein 2018, online normalizer calculation). The sum is
// relative to the largest value so far and rescaled when a larger one occurs.
__global__ void __launch_bounds__(kThreads)
    online_kernel(const float* x, float* y, int64_t rows, int64_t cols) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= rows) return;
  x += row * cols;
  y += row * cols;
  float largest = -INFINITY, sum = 0;
  for (int64_t i = 0; i < cols; ++i) {
    const float value = x[i];
    if (value > largest) {
      sum *= __expf(largest - value);
      largest = value;
    }
    sum += __expf(value - largest);
  }
  for (int64_t i = 0; i < cols; ++i) y[i] = __expf(x[i] - largest) / sum;
}

// Rungs 3 and 4: the threads of a warp, or of a block, share a row. They load adjacent packs of 16
// bytes, the whole row before its first use, and keep them in registers: one read and one write. A
// warp needs no barrier; a block supports longer rows and has more loads in flight.
template <int kRowThreads, int kPacks>
__global__ void __launch_bounds__(kThreads)
    row_kernel(const float* x, float* y, int64_t rows, int cols) {
  __shared__ float scratch[2][kThreads / 32];
  const auto reduce = [&](float value, float* warps, auto combine) {
    if constexpr (kRowThreads == kThreads) {
      return block_reduce<kThreads>(value, warps, combine);
    } else {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2)
        value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
      return value;
    }
  };
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  if (row >= rows) return;
  x += row * cols;
  y += row * cols;
  Pack<float, 4> packs[kPacks];
  float largest = -INFINITY, sum = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = 4 * (thread + p * kRowThreads);
    packs[p] = column < cols ? load_pack<4>(x + column)
                             : Pack<float, 4>{{-INFINITY, -INFINITY, -INFINITY, -INFINITY}};
  }
#pragma unroll
  for (const Pack<float, 4>& pack : packs)
#pragma unroll
    for (const float value : pack.v) largest = fmaxf(largest, value);
  largest = reduce(largest, scratch[0], Larger{});
#pragma unroll
  for (Pack<float, 4>& pack : packs)
#pragma unroll
    for (float& value : pack.v) sum += value = __expf(value - largest);
  const float inverse = 1 / reduce(sum, scratch[1], Plus{});
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = 4 * (thread + p * kRowThreads);
#pragma unroll
    for (float& value : packs[p].v) value *= inverse;
    if (column < cols) store_pack(y + column, packs[p]);
  }
}

template <class Kernel>
void run_threads(const char* name, Kernel kernel, const Softmax& p) {
  p.check();
  launch(name, kernel, {blocks_for(p.x.dim(0), kThreads), kThreads}, p.x.device(),
         pointer<float>(p.x), pointer<float>(p.y), p.x.dim(0), p.x.dim(1));
}

// Uses the smallest number of registers that holds a row.
template <int kRowThreads, int kPacks = 16>
void run_rows(const char* name, const Softmax& p) {
  const int64_t rows = p.x.dim(0), cols = p.x.dim(1);
  if constexpr (kPacks > 1)
    if (cols <= 4 * kRowThreads * kPacks / 2) return run_rows<kRowThreads, kPacks / 2>(name, p);
  p.check();
  COHORT_CHECK(cols <= 4 * kRowThreads * kPacks, "[", name, "] rows of ", cols, " columns");
  launch(name, row_kernel<kRowThreads, kPacks>,
         {blocks_for(rows, kThreads / kRowThreads), kThreads}, p.x.device(), pointer<float>(p.x),
         pointer<float>(p.y), rows, static_cast<int>(cols));
}
static_assert(kWarpColumns == 4 * 32 * 16 && kBlockColumns == 4 * kThreads * 16);

}  // namespace

void softmax_naive(const Softmax& p) {
  run_threads("softmax_naive", naive_kernel, p);
}
void softmax_online(const Softmax& p) {
  run_threads("softmax_online", online_kernel, p);
}
void softmax_warp(const Softmax& p) {
  run_rows<32>("softmax_warp", p);
}
void softmax_block(const Softmax& p) {
  run_rows<kThreads>("softmax_block", p);
}

}  // namespace cohort::bench::ladder
