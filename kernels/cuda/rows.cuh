// Distribution of matrix rows over the threads of a block: a group of 1 to 512 adjacent threads
// processes a row, each thread 16-byte packs of it, kPacks at a time in registers. The assignment
// of elements to threads, and so the order of every reduction, depends on the number of columns and
// the element size only; in unaligned rows the same elements are accessed one by one.
#pragma once

#include "kernels/common.h"
#include "kernels/cuda/raw.cuh"

namespace cohort::kernels::cuda {

inline constexpr int kRowPacks = 4;  // default packs per thread
inline constexpr int kMaxGroup = 512;
// Number of multiprocessors of an H100; fewer blocks leave some idle.
inline constexpr unsigned kFewBlocks = 132;

struct RowLayout {
  int64_t rows = 0;
  int cols = 0;
  int group_log2 = 0;       // threads per row
  int tiles = 0;            // tiles of group * kPacks packs per row
  bool vectorized = false;  // 16-byte accesses

  int group() const { return 1 << group_log2; }
  int threads() const { return std::max(128, group()); }
  // Number of blocks if each processes one set of rows.
  unsigned blocks() const { return blocks_for(rows, threads() / group()); }
  // For kernels with independent rows. Few rows are spread over more multiprocessors: a block then
  // has one row, or as many as fit into a warp.
  LaunchShape launch_shape(Start start = Start::kAfterPrevious) const {
    const int block = blocks() < kFewBlocks ? std::max(32, group()) : threads();
    return {.grid = blocks_for(rows, block / group()),
            .block = static_cast<unsigned>(block),
            .start = start};
  }
};

// Layout of rows of T. `vectorized`: every row of every tensor starts at a multiple of 16 bytes,
// see vectorized_rows().
template <class T, int kPacks = kRowPacks>
RowLayout row_layout(int64_t rows, int64_t cols, bool vectorized) {
  COHORT_CHECK(cols < (1 << 30), "[rows] rows of ", cols, " columns are too long");
  const auto packs = static_cast<int>((cols + kPackSize<T> - 1) / kPackSize<T>);
  RowLayout layout{.rows = rows, .cols = static_cast<int>(cols), .vectorized = vectorized};
  while (layout.group() < kMaxGroup && layout.group() * kPacks < packs) ++layout.group_log2;
  // The group grows before the number of tiles, so that short rows leave few threads idle and rows
  // of at most kMaxGroup * kPacks packs are read once.
  const int tile = layout.group() * kPacks;
  layout.tiles = (packs + tile - 1) / tile;
  return layout;
}
template <class... T>
bool vectorized_rows(int64_t cols, const T*... rows) {
  return aligned(rows...) && ((cols * static_cast<int64_t>(sizeof(T)) % 16 == 0) && ...);
}

// True if strided rows start at multiples of 16 bytes.
template <class T>
bool vectorized_starts(const RowOffsets& starts) {
  return starts.outer % kPackSize<T> == 0 && starts.cols % kPackSize<T> == 0;
}

// A thread's slice of its row. A thread past the last row has no columns: it participates in
// reductions but accesses no memory.
template <class T, int kPacks = kRowPacks>
struct RowSlice {
  static constexpr int N = kPackSize<T>;
  using Packs = Raw<T, N>[kPacks];

  int64_t row;
  int cols, lane, group;
  bool vectorized;

  __device__ explicit RowSlice(const RowLayout& layout, int64_t block = blockIdx.x)
      : row(block * (blockDim.x >> layout.group_log2) + (threadIdx.x >> layout.group_log2)),
        cols(row < layout.rows ? layout.cols : 0),
        lane(threadIdx.x & ((1 << layout.group_log2) - 1)),
        group(1 << layout.group_log2),
        vectorized(layout.vectorized) {
    // Threads past the last row remain for the barriers of reductions and get the valid addresses
    // of row 0.
    if (row >= layout.rows) row = 0;
  }
  __device__ bool is_leader() const { return cols > 0 && lane == 0; }
  // First column of pack u of a tile.
  __device__ int column(int tile, int u) const { return ((tile * kPacks + u) * group + lane) * N; }

  // Elements past the end of the row are 0.
  __device__ __forceinline__ void load(const T* start, int tile, Packs& packs) const {
    // Uniform over the grid.
    if (vectorized) {
#pragma unroll
      for (int u = 0; u < kPacks; ++u) {
        packs[u] = {};
        if (column(tile, u) < cols) packs[u] = load_raw<N>(start + column(tile, u));
      }
    } else {
#pragma unroll
      for (int u = 0; u < kPacks; ++u)
        packs[u] = load_some<N>(start + column(tile, u), cols - column(tile, u));
    }
  }
  __device__ __forceinline__ void store(T* start, int tile, int u, const Raw<T, N>& pack) const {
    const int c = column(tile, u);
    if (!vectorized)
      store_some(start + c, pack, cols - c);
    else if (c < cols)
      store_raw(start + c, pack);
  }
};

// Reduces kValues values per thread over the threads of a row: a butterfly over lanes, then one
// over warps. Every thread of the block must call it; `scratch` holds 32 floats per value. It ends
// without a barrier, so consecutive calls need two alternating scratch arrays.
template <int kValues, class Combine>
__device__ __forceinline__ void group_reduce(float (&x)[kValues], int group, float* scratch,
                                             Combine combine) {
  const auto butterfly = [&](int lanes) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      if (offset < lanes)
#pragma unroll
        for (int k = 0; k < kValues; ++k)
          x[k] = combine(x[k], __shfl_xor_sync(0xffffffffu, x[k], offset));
  };
  // Groups of at most a warp are aligned within it: offsets below `lanes` stay inside the group, so
  // shared memory is not needed.
  if (group <= 32) return butterfly(group);
  butterfly(32);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_mask = group / 32 - 1;  // a row has a power of two of warps
#pragma unroll
  for (int k = 0; k < kValues; ++k)
    if (lane == 0) scratch[32 * k + warp] = x[k];
  __syncthreads();
  // Each lane reads the value of one warp of its row, repeating if the row has fewer than 32 warps;
  // a butterfly over as many lanes reduces them.
#pragma unroll
  for (int k = 0; k < kValues; ++k)
    x[k] = scratch[32 * k + (warp & ~warp_mask) + (lane & warp_mask)];
  butterfly(warp_mask + 1);
}
template <class Combine>
__device__ __forceinline__ float group_reduce(float x, int group, float* scratch, Combine combine) {
  float values[1] = {x};
  group_reduce(values, group, scratch, combine);
  return values[0];
}

}  // namespace cohort::kernels::cuda
