// The matrix product without tensor cores: what memory costs, and what shared memory and registers
// save of it.
#include "bench/ladder/ladder.h"
#include "kernels/cuda/device.cuh"

namespace cohort::bench::ladder {
namespace {

using namespace kernels::cuda;
using Element = __nv_bfloat16;

// A block is a square of threads, side by side in rows of C.
constexpr int kSide = 16, kThreads = kSide * kSide;

// Rung 1, one thread for each element of C. Each product fetches both of its factors, and it is the
// cache that fails to keep up.
__global__ void __launch_bounds__(kThreads)
    naive_kernel(const Element* a, const Element* b, Element* c, int m, int n, int k) {
  const int thread = static_cast<int>(threadIdx.x);
  const int row = static_cast<int>(blockIdx.y) * kSide + thread / kSide;
  const int column = static_cast<int>(blockIdx.x) * kSide + thread % kSide;
  if (row >= m || column >= n) return;
  const Element *const x = a + int64_t{row} * k, *const y = b + int64_t{column} * k;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum = __fmaf_rn(to_float(x[i]), to_float(y[i]), sum);
  c[int64_t{row} * n + column] = from_float<Element>(sum);
}

// Rungs 2 and 3. A block fetches kSide columns at a time of the rows that it multiplies, and all of
// its threads read them from shared memory: each value comes from global memory once for as many
// elements of C as the tile is wide. With kEach = 1 a product still reads two values of shared
// memory. With kEach = 8 a thread has 8 rows by 8 columns of C in registers (register blocking:
// Volkov and Demmel 2008), and 16 values are read for 64 products.
template <int kEach>
__global__ void __launch_bounds__(kThreads)
    tile_kernel(const Element* a, const Element* b, Element* c, int m, int n, int k) {
  constexpr int kTile = kSide * kEach;
  // [column][row], so that threads of neighbouring rows read neighbouring banks; the padding keeps
  // the transposed stores apart.
  __shared__ float a_tile[kSide][kTile + 2], b_tile[kSide][kTile + 2];
  const int thread = static_cast<int>(threadIdx.x);
  const int row0 = static_cast<int>(blockIdx.y) * kTile,
            column0 = static_cast<int>(blockIdx.x) * kTile;
  // Each thread fetches kEach neighbours of a row; there are as many as it needs.
  constexpr int kFetches = kSide / kEach;
  const int fetch_row = thread / kFetches, fetch_k = thread % kFetches * kEach;
  const auto fetch = [&](float(&tile)[kSide][kTile + 2], const Element* from, int row, int rows,
                         int k0) {
    Pack<Element, kEach> values{};
    if (row < rows && k0 + fetch_k < k)
      values = load_pack<kEach>(from + int64_t{row} * k + k0 + fetch_k);
#pragma unroll
    for (int e = 0; e < kEach; ++e) tile[fetch_k + e][fetch_row] = to_float(values.v[e]);
  };
  // Rows y + kSide i and columns x + kSide j of the tile are this thread's.
  const int y = thread / kSide, x = thread % kSide;
  float sums[kEach][kEach] = {};
  for (int k0 = 0; k0 < k; k0 += kSide) {
    fetch(a_tile, a, row0 + fetch_row, m, k0);
    fetch(b_tile, b, column0 + fetch_row, n, k0);
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
        for (int j = 0; j < kEach; ++j) sums[i][j] = __fmaf_rn(left[i], right[j], sums[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int row = row0 + y + kSide * i, column = column0 + x + kSide * j;
      if (row < m && column < n) c[int64_t{row} * n + column] = from_float<Element>(sums[i][j]);
    }
}

template <class Kernel>
void run(const char* name, Kernel kernel, int tile, const Product& p) {
  p.check();
  launch(name, kernel, {dim3(blocks_for(p.n(), tile), blocks_for(p.m(), tile)), kThreads},
         p.c.device(), pointer<Element>(p.a), pointer<Element>(p.b), pointer<Element>(p.c), p.m(),
         p.n(), p.k());
}

}  // namespace

void matmul_naive(const Product& p) {
  run("matmul_naive", naive_kernel, kSide, p);
}
void matmul_shared(const Product& p) {
  run("matmul_shared", tile_kernel<1>, kSide, p);
}
void matmul_registers(const Product& p) {
  run("matmul_registers", tile_kernel<8>, 8 * kSide, p);
}

}  // namespace cohort::bench::ladder
