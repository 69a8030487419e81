// Column sums of a [rows, cols] quantity, as needed for bias gradients. A block sums a fixed block
// of rows for up to 32 packs of columns; a second kernel, which the norms share, adds the partial
// sums of the blocks. The order depends on the shape and the element size only.
#pragma once

#include <array>

#include "kernels/common.h"
#include "kernels/cuda/raw.cuh"

namespace cohort::kernels::cuda {

inline constexpr int kColumnThreads = 256;
inline constexpr int kColumnRows = 16;  // rows per thread

struct ColumnLayout {
  int64_t rows = 0;
  int cols = 0;
  int across_log2 = 0;      // threads per row; the other threads of the block have other rows
  bool vectorized = false;  // 16-byte accesses

  __host__ __device__ int across() const { return 1 << across_log2; }
  __host__ __device__ int down() const { return kColumnThreads >> across_log2; }
  __host__ __device__ int64_t rows_per_block() const { return int64_t{down()} * kColumnRows; }
};

// The N elements of a row that a thread adds, `start` from the beginning of a contiguous tensor.
template <class T, bool kVectorized>
struct PackLocation {
  static constexpr int N = kPackSize<T>;
  int64_t start;
  int live;
  __device__ __forceinline__ Raw<T, N> load(const T* p) const {
    if constexpr (kVectorized)
      return load_raw<N>(p + start);
    else
      return load_some<N>(p + start, live);
  }
  __device__ __forceinline__ void store(T* p, const Raw<T, N>& raw) const {
    if constexpr (kVectorized)
      store_raw(p + start, raw);
    else
      store_some(p + start, raw, live);
  }
};

// Adds this thread's rows in ascending order. term.load(location) loads the inputs of one row;
// term.add(location, values, sum) adds its term to sum[n]. Term::kBatchRows rows are loaded before
// the first of them is added, and so before the term stores any of them. Term::kBlocks: minimum
// resident blocks per multiprocessor.
template <class T, bool kVectorized, class Term, int N>
__device__ __forceinline__ void add_rows(const Term& term, const ColumnLayout& layout,
                                         float (&sum)[N]) {
  const int x = threadIdx.x & (layout.across() - 1), y = threadIdx.x >> layout.across_log2;
  const int c = (blockIdx.y * layout.across() + x) * N, down = layout.down();
  const int64_t first = blockIdx.x * layout.rows_per_block() + y;
  const int64_t remaining = (layout.rows - first + down - 1) / down;
  const int count =
      c < layout.cols && remaining > 0 ? static_cast<int>(min(remaining, int64_t{kColumnRows})) : 0;
  // Adjacent threads of a row read adjacent packs. A thread's rows are `down` apart.
  const auto location = [&](int k) {
    return PackLocation<T, kVectorized>{(first + k * down) * layout.cols + c, layout.cols - c};
  };
  const auto add = [&]<int kBatch>(int k) {
    typename Term::Values values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) values[i] = term.load(location(k + i));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) term.add(location(k + i), values[i], sum);
  };
  int k = 0;
  for (; k + Term::kBatchRows <= count; k += Term::kBatchRows)
    add.template operator()<Term::kBatchRows>(k);
#pragma unroll 1
  for (; k < count; ++k) add.template operator()<1>(k);
}

// Block (b, j) adds rows [b, b + 1) * rows_per_block() of the across * N columns from j * across *
// N. `across` threads have one pack of columns each; each of the `down` thread rows adds every
// down-th row. A thread keeps one sum in registers per column of its pack; then one thread per
// column adds the sums of the thread rows in ascending order through shared memory. The result is
// written or accumulated at row blockIdx.x of `out`, [blocks, cols].
template <class T, class Term>
__global__ void __launch_bounds__(kColumnThreads, Term::kBlocks)
    column_sum_kernel(const Term term, const ColumnLayout layout, float* out, bool accumulate) {
  launch_dependents_and_wait();
  constexpr int N = kPackSize<T>;
  __shared__ float shared[kColumnThreads * N];
  float sum[N] = {};
  if (layout.vectorized)
    add_rows<T, true>(term, layout, sum);
  else
    add_rows<T, false>(term, layout, sum);
#pragma unroll
  for (int n = 0; n < N; ++n) shared[threadIdx.x * N + n] = sum[n];
  __syncthreads();

  // Thread x has the columns from x N, so thread row y has stored `width` consecutive sums.
  const int width = layout.across() * N;  // at most the number of threads
  const int c = blockIdx.y * width + threadIdx.x;
  if (threadIdx.x >= width || c >= layout.cols) return;
  float total = 0;
  for (int y = 0; y < layout.down(); ++y) total += shared[y * width + threadIdx.x];
  out += int64_t{blockIdx.x} * layout.cols + c;
  *out = accumulate ? *out + total : total;
}

// Partial sums [blocks, cols] of each output, and their destinations. Null outputs are skipped.
template <size_t kOutputs>
struct ColumnPartials {
  const float* partial[kOutputs];
  float* out[kOutputs];
  bool accumulate[kOutputs];
};

// A block has 32 columns with 32 threads each; thread row y adds the sums of blocks y, y + 32, ...,
// then row 0 adds the 32 totals from shared memory in order. Threads along x have adjacent columns,
// so that a warp reads 128 contiguous bytes. Grid: columns, outputs.
inline constexpr int kPartialsWidth = 32;  // columns per block, and threads per column
template <size_t kOutputs>
__global__ void __launch_bounds__(kPartialsWidth* kPartialsWidth)
    reduce_partials_kernel(const __grid_constant__ ColumnPartials<kOutputs> partials, int blocks,
                           int cols) {
  launch_dependents_and_wait();
  __shared__ float scratch[kPartialsWidth][kPartialsWidth];
  // blockIdx.y is the output; blocks of an undefined output return here.
  const float* partial = partials.partial[blockIdx.y];
  if (partial == nullptr) return;
  const int x = threadIdx.x, y = threadIdx.y, c = blockIdx.x * kPartialsWidth + x;
  float sum = 0;
  // Eight loads in flight; the order of addition remains ascending.
  if (c < cols) {
#pragma unroll 8
    for (int b = y; b < blocks; b += kPartialsWidth) sum += partial[int64_t{b} * cols + c];
  }
  scratch[y][x] = sum;
  __syncthreads();
  // The first warp reads its 32 columns row by row, without bank conflicts.
  if (y > 0 || c >= cols) return;
  float total = 0;
#pragma unroll
  for (int k = 0; k < kPartialsWidth; ++k) total += scratch[k][x];
  float* out = partials.out[blockIdx.y] + c;
  *out = partials.accumulate[blockIdx.y] ? *out + total : total;
}

// out[o] (+)= column sums of partial[o] for all defined partial[o].
template <size_t kOutputs>
void reduce_partials(const std::array<Tensor, kOutputs>& partial,
                     const std::array<GradOut, kOutputs>& out) {
  ColumnPartials<kOutputs> partials{};
  const Tensor* any = nullptr;
  for (size_t o = 0; o < kOutputs; ++o) {
    if (!partial[o].defined()) continue;
    any = &partial[o];
    partials.partial[o] = pointer<float>(partial[o]);
    partials.out[o] = pointer<float>(out[o].tensor);
    partials.accumulate[o] = out[o].mode == Grad::kAccumulate;
  }
  if (any == nullptr) return;
  launch("reduce_partials", reduce_partials_kernel<kOutputs>,
         {.grid = {blocks_for(any->cols(), kPartialsWidth), kOutputs},
          .block = {kPartialsWidth, kPartialsWidth},
          .start = Start::kProgrammatic},
         any->device(), partials, static_cast<int>(any->rows()), static_cast<int>(any->cols()));
}

// Term of column_sum(): the rows of a contiguous matrix.
template <class T>
struct RowsTerm {
  static constexpr int kBatchRows = 4, kBlocks = 5, N = kPackSize<T>;
  const T* rows;

  using Values = Raw<T, N>;
  template <class Location>
  __device__ __forceinline__ Values load(const Location& at) const {
    return at.load(rows);
  }
  template <class Location>
  __device__ __forceinline__ void add(const Location&, const Values& row, float (&sum)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] += element(row, n);
  }
};

// out[c] (+)= sum over rows of the term: f32 [cols]. T is the type that the term reads;
// `vectorized`: its rows are aligned to 16 bytes.
template <class T, class Term>
void column_sum(const char* name, const Term& term, int64_t rows, int64_t cols, bool vectorized,
                const GradOut& out) {
  COHORT_CHECK(cols < (1 << 30), "[column_sum] ", cols, " columns are too many");
  const Device device = out.tensor.device();
  constexpr int N = kPackSize<T>;
  ColumnLayout layout{.rows = rows, .cols = static_cast<int>(cols), .vectorized = vectorized};
  while (layout.across() < 32 && layout.across() * N < cols) ++layout.across_log2;
  const unsigned blocks = blocks_for(rows, layout.rows_per_block());
  const bool accumulate = out.mode == Grad::kAccumulate;
  if (rows == 0 && !accumulate) out.tensor.zero_();
  // A single block of rows writes or accumulates the result directly; several write partial sums.
  Tensor partial;
  if (blocks > 1) partial = Tensor::empty({blocks, cols}, DType::kF32, device);
  launch(name, column_sum_kernel<T, Term>,
         {.grid = {blocks, blocks_for(cols, int64_t{layout.across()} * N)},
          .block = kColumnThreads,
          .start = Start::kProgrammatic},
         device, term, layout, pointer<float>(blocks > 1 ? partial : out.tensor),
         accumulate && blocks <= 1);
  reduce_partials<1>({partial}, {out});
}

}  // namespace cohort::kernels::cuda
