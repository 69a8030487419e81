// Sums over the rows of a [rows, cols] quantity: the shape of every bias and norm weight gradient.
// A block sums a fixed block of rows for up to 32 packs of columns; a second kernel adds the
// blocks' sums. The order follows from the shape and the element size alone.
#pragma once

#include <algorithm>
#include <array>

#include "kernels/common.h"
#include "kernels/cuda/raw.cuh"

namespace cohort::kernels::cuda {

inline constexpr int kColumnThreads = 256;
inline constexpr int kColumnRows = 16;  // rows per thread

struct ColumnLayout {
  int64_t rows = 0;
  int cols = 0;
  int across_log2 = 0;      // threads side by side; the others of the block take other rows
  bool vectorized = false;  // 16-byte accesses

  __host__ __device__ int across() const { return 1 << across_log2; }
  __host__ __device__ int down() const { return kColumnThreads >> across_log2; }
  __host__ __device__ int64_t rows_per_block() const { return int64_t{down()} * kColumnRows; }
};

// Where the sums go: row blockIdx.x of `out`, [blocks, cols], or added to it. Null: nowhere.
template <int kOutputs>
struct ColumnOutputs {
  float* out[kOutputs];
  bool accumulate[kOutputs];
};

// Where the N elements of one row are that a thread adds.
template <class T, bool kVectorized>
struct ColumnPlace {
  static constexpr int N = kPackSize<T>;
  int64_t row, start;  // start: of the row in a contiguous tensor
  int column, live;
  // From a contiguous tensor.
  __device__ __forceinline__ Raw<T, N> load(const T* p) const { return load_row(p + start); }
  // From a row anywhere.
  __device__ __forceinline__ Raw<T, N> load_row(const T* p) const {
    if constexpr (kVectorized)
      return load_raw<N>(p + column);
    else
      return load_some<N>(p + column, live);
  }
  // To a contiguous tensor.
  __device__ __forceinline__ void store(T* p, const Raw<T, N>& raw) const {
    if constexpr (kVectorized)
      store_raw(p + start + column, raw);
    else
      store_some(p + start + column, raw, live);
  }
};

// This thread's rows, ascending. term.load(place) reads what it needs of one row, and
// term.add(place, values, sum) adds it to sum[output][n]. Term::kUnderWay rows of a thread are read
// before the first of them is added, and so before the term stores anything of them;
// Term::kBlocks blocks have room on an SM.
template <class T, bool kVectorized, class Term, int kOutputs, int N>
__device__ __forceinline__ void add_rows(const Term& term, const ColumnLayout& layout,
                                         float (&sum)[kOutputs][N]) {
  const int x = threadIdx.x & (layout.across() - 1), y = threadIdx.x >> layout.across_log2;
  const int c = (blockIdx.y * layout.across() + x) * N, down = layout.down();
  const int64_t first = blockIdx.x * layout.rows_per_block() + y;
  // How many rows are left for this thread from its first one on, at most kColumnRows.
  const int64_t left = (layout.rows - first + down - 1) / down;
  const int count =
      c < layout.cols && left > 0 ? static_cast<int>(min(left, int64_t{kColumnRows})) : 0;
  // Neighbouring threads of a row read neighbouring packs. Rows are `down` apart, and are added in
  // ascending order.
  const auto place = [&](int k) {
    const int64_t row = first + k * down;
    return ColumnPlace<T, kVectorized>{row, row * layout.cols, c, layout.cols - c};
  };
  const auto add = [&]<int kBatch>(int k) {
    typename Term::Values values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) values[i] = term.load(place(k + i));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) term.add(place(k + i), values[i], sum);
  };
  int k = 0;
  for (; k + Term::kUnderWay <= count; k += Term::kUnderWay)
    add.template operator()<Term::kUnderWay>(k);
#pragma unroll 1
  for (; k < count; ++k) add.template operator()<1>(k);
}

// Block (b, j) adds rows [b, b + 1) * rows_per_block() of the columns j * across * N and on. across
// threads side by side have a pack of columns each; down rows of threads have every down-th row.
// Each thread's sums are in registers, one per column of its pack and output; then the threads that
// have the same columns meet in shared memory, where one thread per column adds them from top to
// bottom.
template <class T, class Term, int kOutputs>
__global__ void __launch_bounds__(kColumnThreads, Term::kBlocks)
    column_sum_kernel(const Term term, const ColumnLayout layout,
                      const ColumnOutputs<kOutputs> outputs) {
  start_beside_previous();
  constexpr int N = kPackSize<T>;
  __shared__ float shared[kOutputs][kColumnThreads * N];
  float sum[kOutputs][N] = {};
  if (layout.vectorized)
    add_rows<T, true>(term, layout, sum);
  else
    add_rows<T, false>(term, layout, sum);
#pragma unroll
  for (int o = 0; o < kOutputs; ++o)
#pragma unroll
    for (int n = 0; n < N; ++n) shared[o][threadIdx.x * N + n] = sum[o][n];
  __syncthreads();

  // The pack of thread x holds columns x N on, so that thread row y has left `width` sums in a row.
  const int width = layout.across() * N;  // at most as many columns as threads
  const int c = blockIdx.y * width + threadIdx.x;
  if (threadIdx.x >= width || c >= layout.cols) return;
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    // A single block of rows writes, or adds to, the result itself; more of them write partial
    // sums.
    if (outputs.out[o] == nullptr) continue;
    float total = 0;
    for (int y = 0; y < layout.down(); ++y) total += shared[o][y * width + threadIdx.x];
    float* out = outputs.out[o] + int64_t{blockIdx.x} * layout.cols + c;
    *out = outputs.accumulate[o] ? *out + total : total;
  }
}

// The blocks' sums of each output, [blocks, cols], and where their sums go. Null: nowhere.
template <size_t kOutputs>
struct ColumnPartials {
  const float* partial[kOutputs];
  float* out[kOutputs];
  bool accumulate[kOutputs];
};

// A block has 32 columns and 32 threads for each; thread row y adds the sums of blocks y, y + 32,
// and so on, then row 0 adds the 32 totals from shared memory in order. Threads along x have
// neighbouring columns, so that a warp reads 128 bytes in a row. Grid: columns, outputs.
inline constexpr int kPartialsWidth = 32;  // columns of a block, and threads for each
template <size_t kOutputs>
__global__ void __launch_bounds__(kPartialsWidth* kPartialsWidth)
    reduce_partials_kernel(const __grid_constant__ ColumnPartials<kOutputs> partials, int blocks,
                           int cols) {
  start_beside_previous();
  __shared__ float scratch[kPartialsWidth][kPartialsWidth];
  // blockIdx.y names an output; one that nobody wants costs a block that ends here.
  const float* partial = partials.partial[blockIdx.y];
  if (partial == nullptr) return;
  const int x = threadIdx.x, y = threadIdx.y, c = blockIdx.x * kPartialsWidth + x;
  float sum = 0;
  // Eight loads under way at a time; their order of addition is ascending all the same.
  if (c < cols) {
#pragma unroll 8
    for (int b = y; b < blocks; b += kPartialsWidth) sum += partial[int64_t{b} * cols + c];
  }
  scratch[y][x] = sum;
  __syncthreads();
  // scratch[y][x]: the first warp now reads its 32 columns row after row, without bank conflicts.
  if (y > 0 || c >= cols) return;
  float total = 0;
#pragma unroll
  for (int k = 0; k < kPartialsWidth; ++k) total += scratch[k][x];
  float* out = partials.out[blockIdx.y] + c;
  *out = partials.accumulate[blockIdx.y] ? *out + total : total;
}

// out[o] (+)= column sums of partial[o], for those that are defined.
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
          .start = Start::kBesidePrevious},
         any->device(), partials, static_cast<int>(any->rows()), static_cast<int>(any->cols()));
}

// out[o][c] (+)= sum over rows of the term, for outputs that are defined: f32 [cols]. T is the type
// that the term reads, `vectorized` whether its rows are aligned.
template <class T, class Term, size_t kOutputs>
void column_sum(const char* name, const Term& term, int64_t rows, int64_t cols, bool vectorized,
                const std::array<GradOut, kOutputs>& out) {
  COHORT_CHECK(cols < (1 << 30), "[column_sum] ", cols, " columns are too many");
  const auto wanted = std::find_if(out.begin(), out.end(), [](auto& o) { return o.wanted(); });
  if (wanted == out.end()) return;
  const Device device = wanted->tensor.device();
  constexpr int N = kPackSize<T>;
  ColumnLayout layout{.rows = rows, .cols = static_cast<int>(cols), .vectorized = vectorized};
  while (layout.across() < 32 && layout.across() * N < cols) ++layout.across_log2;
  const unsigned blocks = blocks_for(rows, layout.rows_per_block());
  std::array<Tensor, kOutputs> partial;
  ColumnOutputs<static_cast<int>(kOutputs)> outputs{};
  for (size_t o = 0; o < kOutputs; ++o) {
    if (!out[o].wanted()) continue;
    if (rows == 0 && out[o].mode == Grad::kOverwrite) out[o].tensor.zero_();
    if (blocks > 1) partial[o] = Tensor::empty({blocks, cols}, DType::kF32, device);
    outputs.out[o] = pointer<float>(blocks > 1 ? partial[o] : out[o].tensor);
    outputs.accumulate[o] = blocks <= 1 && out[o].mode == Grad::kAccumulate;
  }
  launch(name, column_sum_kernel<T, Term, static_cast<int>(kOutputs)>,
         {.grid = {blocks, blocks_for(cols, int64_t{layout.across()} * N)},
          .block = kColumnThreads,
          .start = Start::kBesidePrevious},
         device, term, layout, outputs);
  reduce_partials(partial, out);
}

}  // namespace cohort::kernels::cuda
