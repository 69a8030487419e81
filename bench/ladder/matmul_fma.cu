// GEMM without tensor cores: the cost of memory accesses, reduced by tiles in shared memory and in
// registers.
#include "bench/ladder/ladder.h"
#include "kernels/cuda/device.cuh"

namespace cohort::bench::ladder {
namespace {

using namespace kernels::cuda;
using Element = __nv_bfloat16;

// A block is a square of threads; adjacent threads have adjacent columns of C.
constexpr int kSide = 16, kThreads = kSide * kSide;

// Rung 1: one thread per element of C. Each FMA loads both operands, so the cache is the
// bottleneck.
__global__ void __launch_bounds__(kThreads)
    naive_kernel(const Element* a, const Element* b, Element* c, int m, int n, int k) {
  const int thread = static_cast<int>(threadIdx.x);
  const int row = static_cast<int>(blockIdx.y) * kSide + thread / kSide;
  const int column = static_cast<int>(blockIdx.x) * kSide + thread % kSide;
  if (row >= m || column >= n) return;
  const Element *const x = a + int64_t{row} * k, *const y = b + int64_t{column} * k;
  float accumulator = 0;
  for (int i = 0; i < k; ++i) accumulator = __fmaf_rn(to_float(x[i]), to_float(y[i]), accumulator);
  c[int64_t{row} * n + column] = from_float<Element>(accumulator);
}

// Rungs 2 and 3. A block loads kSide columns of its rows of A and B at a time to shared memory:
// each value is loaded from global memory once per tile. With kEach = 1 an FMA still reads two
// values from shared memory. With kEach = 8 a thread has 8 rows by 8 columns of C in registers
// (register blocking: Volkov and Demmel 2008) and reads 16 values for 64 FMAs.
template <int kEach>
__global__ void __launch_bounds__(kThreads)
    tile_kernel(const Element* a, const Element* b, Element* c, int m, int n, int k) {
  constexpr int kTile = kSide * kEach;
  // [column][row], so that threads of adjacent rows read adjacent banks; the padding avoids bank
  // conflicts of the transposed stores.
  __shared__ float a_tile[kSide][kTile + 2], b_tile[kSide][kTile + 2];
  const int thread = static_cast<int>(threadIdx.x);
  const int row0 = static_cast<int>(blockIdx.y) * kTile,
            column0 = static_cast<int>(blockIdx.x) * kTile;
  // Each thread loads kEach adjacent values of a row.
  constexpr int kLoads = kSide / kEach;
  const int load_row = thread / kLoads, load_k = thread % kLoads * kEach;
  const auto load = [&](float(&tile)[kSide][kTile + 2], const Element* from, int row, int rows,
                        int k0) {
    Pack<Element, kEach> values{};
    if (row < rows && k0 + load_k < k)
      values = load_pack<kEach>(from + int64_t{row} * k + k0 + load_k);
#pragma unroll
    for (int e = 0; e < kEach; ++e) tile[load_k + e][load_row] = to_float(values.v[e]);
  };
  // This thread has rows y + kSide i and columns x + kSide j of the tile.
  const int y = thread / kSide, x = thread % kSide;
  float accumulators[kEach][kEach] = {};
  for (int k0 = 0; k0 < k; k0 += kSide) {
    load(a_tile, a, row0 + load_row, m, k0);
    load(b_tile, b, column0 + load_row, n, k0);
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < kSide; ++kk) {
      float left[kEach], right[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        left[i] = a_tile[kk][y + kSide * i];
        right[i] = b_tile[kk][x + kSide * i];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          accumulators[i][j] = __fmaf_rn(left[i], right[j], accumulators[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int row = row0 + y + kSide * i, column = column0 + x + kSide * j;
      if (row < m && column < n)
        c[int64_t{row} * n + column] = from_float<Element>(accumulators[i][j]);
    }
}

template <class Kernel>
void run(const char* name, Kernel kernel, int tile, const Gemm& p) {
  p.check();
  launch(name, kernel, {dim3(blocks_for(p.n(), tile), blocks_for(p.m(), tile)), kThreads},
         p.c.device(), pointer<Element>(p.a), pointer<Element>(p.b), pointer<Element>(p.c), p.m(),
         p.n(), p.k());
}

}  // namespace

void matmul_naive(const Gemm& p) {
  run("matmul_naive", naive_kernel, kSide, p);
}
void matmul_shared(const Gemm& p) {
  run("matmul_shared", tile_kernel<1>, kSide, p);
}
void matmul_registers(const Gemm& p) {
  run("matmul_registers", tile_kernel<8>, 8 * kSide, p);
}

}  // namespace cohort::bench::ladder
