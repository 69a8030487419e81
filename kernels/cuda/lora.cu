// h = x A^T of LoRA's adapters in bf16, on the tensor cores of sm_80 and newer: few columns, so it
// is limited by reading x, or with few rows by latency.
//
// All kernels add in one order, which depends on K alone. K is divided into chunks of 32 columns,
// and the chunks into at most kSlices slices of equal size (the last may be shorter). A slice is
// one chain of mma.m16n8k16 with ascending chunks, two instructions each; the sums of four slices,
// a group, are added in ascending order, then those of the groups, and the total is rounded once.
// An instruction does not have 16 adjacent columns: its quad q takes columns 8 q + 4 s to
// 8 q + 4 s + 3 of the chunk in step s, so that a lane loads its operands of both steps as eight
// adjacent columns, 16 bytes.
//
// Few rows: split_kernel() spreads the slices over the warps of a block, or of a thread block
// cluster, each with operands straight from global memory (sm_90). Many rows: a warp of
// tiled_kernel() computes all slices of 16 rows one after another, and the warps of a block share
// the tile of A in shared memory.
#include "kernels/lora.h"

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/raw.cuh"
#include "kernels/cuda/sm90/cluster.cuh"
#include "kernels/cuda/sm90/tma.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kChunk = 32, kSlices = 16, kGroup = 4;
constexpr int kColumns = 64;  // P is a multiple of this

struct Problem {
  const bf16 *x, *a;
  bf16 *h, *copy;  // copy may be null
  int64_t x_stride, h_stride;
  int64_t rows;
  int k, p;
  int chunks, slice_chunks, slices;
  bool may_prefetch_a;

  // Writes columns `column` and `column` + 1 of a row of h.
  __device__ void store(int64_t row, int column, float first, float second) const {
    const Raw<bf16, 2> pair{pack_bf16(first, second)};
    store_raw(h + row * h_stride + column, pair);
    if (copy != nullptr) store_raw(copy + row * p + column, pair);
  }
};

// A lane's operands of a chunk in a row of x or A: columns 8 quad to 8 quad + 7.
using Operand = Raw<bf16, kPackSize<bf16>>;

// Adds a chunk to the sums of 16 kM rows of x and 8 kN rows of A; x: rows `group` and `group` + 8.
template <int kM, int kN>
__device__ __forceinline__ void multiply(float (&sums)[kM][kN][4], const Operand (&x)[kM][2],
                                         const Operand (&a)[kN]) {
#pragma unroll
  for (int step = 0; step < 2; ++step)
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      const uint32_t left[4] = {x[i][0].word[2 * step], x[i][1].word[2 * step],
                                x[i][0].word[2 * step + 1], x[i][1].word[2 * step + 1]};
#pragma unroll
      for (int j = 0; j < kN; ++j)
        mma_bf16(sums[i][j], left, a[j].word[2 * step], a[j].word[2 * step + 1]);
    }
}

// A block, or a cluster with a block for each group of slices, computes a tile of 16 kM rows and
// 8 kN columns of h, a warp of it one slice. In a cluster each block adds the groups of some rows,
// whose sums the others store to its shared memory. Grid: the blocks of a cluster, tiles of
// columns, tiles of rows. kBatch: chunks whose operands are in flight.
template <int kM, int kN, int kBatch, int kBlocks_>
struct SplitTile {
  static constexpr int kBlocks = kBlocks_, kWarps = kSlices / kBlocks, kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kM, kTileColumns = 8 * kN, kRowPairs = kTileColumns / 2;
  static constexpr int kPairs = kRows * kRowPairs;
  // The sums of a block's slices, and of all groups for its rows.
  static constexpr int kGroups = kSlices / kGroup, kBlockPairs = kPairs / kBlocks;
  static constexpr int kShared = (kWarps * kPairs + kGroups * kBlockPairs) * int{sizeof(float2)};
  static_assert((kBlocks == 1 || kBlocks == kGroups) && kRows % kBlocks == 0);

  float sums[kM][kN][4] = {};

  // The lane's operands in chunks from `chunk` to `end` - 1; zeros past the end, past K and past
  // the rows.
  static __device__ __forceinline__ void load_a(const Problem& problem, int chunk, int end,
                                                Operand (&a)[kBatch][kN]) {
    const int lane = threadIdx.x % 32, row = blockIdx.y * kTileColumns + lane / 4;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int column = (chunk + b) * kChunk + lane % 4 * 8;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        a[b][j] = {};
        if (chunk + b < end && column < problem.k)
          a[b][j] = load_raw<8>(problem.a + int64_t{row + 8 * j} * problem.k + column);
      }
    }
  }
  static __device__ __forceinline__ void load_x(const Problem& problem, int chunk, int end,
                                                Operand (&x)[kBatch][kM][2]) {
    const int lane = threadIdx.x % 32;
    const int64_t row0 = int64_t{blockIdx.z} * kRows + lane / 4;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int column = (chunk + b) * kChunk + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        const int64_t row = row0 + 8 * i;
        x[b][i / 2][i % 2] = {};
        if (chunk + b < end && column < problem.k && row < problem.rows)
          x[b][i / 2][i % 2] = load_raw<8>(problem.x + row * problem.x_stride + column);
      }
    }
  }

  // The chain of a slice. Begins before the previous grids have completed, with A if that is
  // allowed; then x is complete, and the next grid, which may read it at once, is launched.
  __device__ __forceinline__ void multiply_slice(const Problem& problem, int slice) {
    const int first = slice * problem.slice_chunks;
    const int end = min(first + problem.slice_chunks, problem.chunks);
    Operand x[kBatch][kM][2], a[kBatch][kN];
    if (problem.may_prefetch_a) load_a(problem, first, end, a);
    wait_on_dependent_grids();
    launch_dependent_grids();
#pragma unroll 1
    for (int chunk = first; chunk < end; chunk += kBatch) {
      if (chunk > first || !problem.may_prefetch_a) load_a(problem, chunk, end, a);
      load_x(problem, chunk, end, x);
      __syncwarp();  // otherwise the compiler moves loads behind the multiplications of others
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (chunk + b < end) multiply(sums, x[b], a[b]);
    }
  }

  // Stores the slice's sums to `memory`, [kWarps, kRows, kRowPairs].
  __device__ __forceinline__ void store(float2* memory) const {
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
        memory[warp * kPairs + (8 * i + lane / 4) * kRowPairs + lane % 4 + 4 * j] = {
            sums[i / 2][j][i % 2 * 2], sums[i / 2][j][i % 2 * 2 + 1]};
  }

  // The sum of element i of `count` tensors of `stride` elements each, in ascending order.
  static __device__ __forceinline__ float2 add_in_order(const float2* values, int stride, int i,
                                                        int count) {
    float2 total = {};
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
      const float2 value = values[k * stride + i];
      total.x += value.x;
      total.y += value.y;
    }
    return total;
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) split_kernel(const Problem problem) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ float2 slice_sums[];
  __shared__ uint64_t barrier_memory;
  constexpr int kPairs = Tile::kPairs, kBlockPairs = Tile::kBlockPairs;
  float2* const group_sums = slice_sums + Tile::kWarps * kPairs;
  const uint32_t barrier = shared_address(&barrier_memory);
  const int rank = blockIdx.x, first = rank * Tile::kWarps;  // the block's first slice
  const int groups = (problem.slices + kGroup - 1) / kGroup;
  if constexpr (Tile::kBlocks > 1) {
    if (threadIdx.x == 0) {
      barrier_init(barrier, 1);
      barrier_arrive_expect_tx(barrier, groups * kBlockPairs * int{sizeof(float2)});
    }
    cluster_sync();  // the blocks that are stored to have started, with their barriers
  }
  Tile tile;
  tile.multiply_slice(problem, first + static_cast<int>(threadIdx.x) / 32);
  tile.store(slice_sums);
  __syncthreads();
  const int64_t row0 = int64_t{blockIdx.z} * Tile::kRows;
  const auto store = [&](int pair, float2 total) {
    const int64_t row = row0 + pair / Tile::kRowPairs;
    const int column =
        static_cast<int>(blockIdx.y) * Tile::kTileColumns + pair % Tile::kRowPairs * 2;
    if (row < problem.rows) problem.store(row, column, total.x, total.y);
  };
  for (int i = threadIdx.x; i < kPairs; i += Tile::kThreads) {
    float2 total = {};
#pragma unroll
    for (int group = 0; group < Tile::kWarps / kGroup; ++group) {
      const float2 sum = Tile::add_in_order(slice_sums + group * kGroup * kPairs, kPairs, i,
                                            min(kGroup, problem.slices - first - group * kGroup));
      if (group >= groups) break;
      total.x += sum.x;
      total.y += sum.y;
    }
    if constexpr (Tile::kBlocks > 1) {
      if (rank < groups)
        store_in_block(i / kBlockPairs, group_sums + rank * kBlockPairs + i % kBlockPairs, total,
                       barrier);
    } else {
      store(i, total);
    }
  }
  if constexpr (Tile::kBlocks > 1) {
    barrier_wait(barrier, 0);
    for (int i = threadIdx.x; i < kBlockPairs; i += Tile::kThreads)
      store(rank * kBlockPairs + i, Tile::add_in_order(group_sums, kBlockPairs, i, groups));
  }
#endif
}

// Tiles of 16 rows per warp and 64 columns of h. A stage of the pipeline has two chunks of the rows
// of x and A, each [rows, 32]: eight lanes read two adjacent rows, 128 bytes, without bank
// conflicts.
template <int kWarps>
struct TiledShape {
  static constexpr int kRows = 16 * kWarps, kThreads = 32 * kWarps, kStages = 4;
  static constexpr int kPacks = kChunk / kPackSize<bf16>;  // packs of 16 bytes: a row of a chunk
  static constexpr int kStageRows = kRows + kColumns, kChunkPacks = kStageRows * kPacks;
  static constexpr int kCopies = 2 * kChunkPacks / kThreads;  // per thread and stage
  static constexpr int kStageBytes = 2 * kChunkPacks * 16, kShared = kStages * kStageBytes;
  static constexpr int kBlocksPerSm = kWarps > 4 ? 1 : 3;
  static_assert(2 * kChunkPacks % kThreads == 0);
};

// Copies of a thread: the packs of a stage in the order of its memory.
template <class Shape>
struct StageCopies {
  const bf16* from[Shape::kCopies];

  // Rows of x past the last one are copies of it, whose results are not stored.
  __device__ __forceinline__ StageCopies(const Problem& problem, int64_t row0, int column0) {
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i) {
      const int row = pack(i) / Shape::kPacks % Shape::kStageRows;
      const int64_t x_row = min(row0 + row, problem.rows - 1);
      from[i] =
          (row < Shape::kRows ? problem.x + x_row * problem.x_stride
                              : problem.a + int64_t{column0 + row - Shape::kRows} * problem.k) +
          column(i);
    }
  }
  // Starts the copies of the stage from column `begin` on to shared address `to`.
  __device__ __forceinline__ void start(const Problem& problem, int begin, uint32_t to) const {
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i)
      copy_async(to + pack(i) * 16, from[i] + begin, begin + column(i) < problem.k ? 16 : 0);
  }

 private:
  static __device__ int pack(int i) {
    return static_cast<int>(threadIdx.x) + i * Shape::kThreads;
  }
  static __device__ int column(int i) {
    return pack(i) / Shape::kChunkPacks * kChunk + pack(i) % Shape::kPacks * kPackSize<bf16>;
  }
};

// Adds `from` to `to`, and clears it.
__device__ __forceinline__ void move_sums(float (&to)[kColumns / 8][4],
                                          float (&from)[kColumns / 8][4]) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[j][e] += from[j][e];
      from[j][e] = 0;
    }
}

template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps, TiledShape<kWarps>::kBlocksPerSm)
    tiled_kernel(const Problem problem) {
  using Shape = TiledShape<kWarps>;
  wait_on_dependent_grids();
  launch_dependent_grids();  // not earlier: the next grid may read x at once
  extern __shared__ __align__(16) char stages[];
  const int lane = threadIdx.x % 32, group = lane / 4, warp_row = threadIdx.x / 32 * 16 + group;
  const int tiles = problem.p / kColumns;
  const int column0 = static_cast<int>(blockIdx.x) % tiles * kColumns;
  const int64_t row0 = int64_t{blockIdx.x / tiles} * Shape::kRows;
  const StageCopies<Shape> copies(problem, row0, column0);
  const int steps = (problem.chunks + 1) / 2;
  const auto load = [&](int step) {
    if (step < steps)
      copies.start(problem, step * 2 * kChunk,
                   shared_address(stages) + step % Shape::kStages * Shape::kStageBytes);
    copy_async_commit();
  };
  for (int step = 0; step < Shape::kStages - 1; ++step) load(step);
  float sums[1][kColumns / 8][4] = {}, group_sums[kColumns / 8][4] = {},
                           totals[kColumns / 8][4] = {};
  // Chunks that the slice and slices that the group still have.
  int chunks_left = problem.slice_chunks, slices_left = kGroup;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<Shape::kStages - 2>();
    __syncthreads();  // all warps have read the stage that is loaded next
    load(step + Shape::kStages - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (2 * step + half == problem.chunks) break;
      const bf16* const chunk = reinterpret_cast<const bf16*>(stages) + lane % 4 * 8 +
                                (step % Shape::kStages * 2 + half) * Shape::kStageRows * kChunk;
      Operand x[1][2], a[kColumns / 8];
#pragma unroll
      for (int i = 0; i < 2; ++i) x[0][i] = load_raw<8>(chunk + (warp_row + 8 * i) * kChunk);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
        a[j] = load_raw<8>(chunk + (Shape::kRows + 8 * j + group) * kChunk);
      multiply(sums, x, a);
      const bool is_last = 2 * step + half + 1 == problem.chunks;
      if (--chunks_left > 0 && !is_last) continue;
      chunks_left = problem.slice_chunks;
      move_sums(group_sums, sums[0]);
      if (--slices_left > 0 && !is_last) continue;
      slices_left = kGroup;
      move_sums(totals, group_sums);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = row0 + warp_row + 8 * half;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
      if (row < problem.rows)
        problem.store(row, column0 + 8 * j + lane % 4 * 2, totals[j][2 * half],
                      totals[j][2 * half + 1]);
  }
}

template <class Tile>
bool has_clusters(Device device) {
  return ::cohort::cuda::fits(reinterpret_cast<const void*>(split_kernel<Tile>),
                              {.shared_memory = Tile::kShared, .compute_capability = 90}, device);
}
template <class Tile>
void run_split(const Problem& problem, Device device) {
  launch("lora_input", split_kernel<Tile>,
         {.grid = dim3(Tile::kBlocks, blocks_for(problem.p, Tile::kTileColumns),
                       blocks_for(problem.rows, Tile::kRows)),
          .block = Tile::kThreads,
          .shared_bytes = Tile::kShared,
          .start = Start::kProgrammatic,
          .cluster = Tile::kBlocks},
         device, problem);
}
template <int kWarps>
void run_tiled(const Problem& problem, Device device) {
  using Shape = TiledShape<kWarps>;
  launch("lora_input", tiled_kernel<kWarps>,
         {.grid = blocks_for(problem.rows, Shape::kRows) * blocks_for(problem.p, kColumns),
          .block = Shape::kThreads,
          .shared_bytes = Shape::kShared,
          .start = Start::kProgrammatic},
         device, problem);
}

Problem problem_of(const LoraInput& args) {
  const auto& [h, x, a, copy] = args;
  Tensor copied = copy;
  const auto chunks = static_cast<int>((x.cols() + kChunk - 1) / kChunk);
  const int slice_chunks = std::max(1, (chunks + kSlices - 1) / kSlices);
  const int slices = (chunks + slice_chunks - 1) / slice_chunks;
  return {.x = pointer<bf16>(x),
          .a = pointer<bf16>(a),
          .h = pointer<bf16>(h),
          .copy = pointer<bf16>(copied),
          .x_stride = RowOffsets(x).outer,
          .h_stride = RowOffsets(h).outer,
          .rows = x.rows(),
          .k = static_cast<int>(x.cols()),
          .p = static_cast<int>(h.cols()),
          .chunks = chunks,
          .slice_chunks = slice_chunks,
          .slices = slices,
          .may_prefetch_a = current_stream(x.device()).may_prefetch};
}

}  // namespace

bool has_lora_kernel(const LoraInput& args) {
  const auto& [h, x, a, copy] = args;
  const auto has_aligned_rows = [](const Tensor& t) {
    return !t.defined() || (t.dtype() == DType::kBF16 && t.cols() % kPackSize<bf16> == 0 &&
                            RowOffsets(t).outer % kPackSize<bf16> == 0 &&
                            aligned(static_cast<const char*>(t.raw())));
  };
  return has_aligned_rows(h) && has_aligned_rows(x) && has_aligned_rows(a) &&
         has_aligned_rows(copy) && h.cols() % kColumns == 0 && x.cols() < (1 << 30) &&
         ::cohort::cuda::fits(reinterpret_cast<const void*>(tiled_kernel<8>),
                              {.shared_memory = TiledShape<8>::kShared}, x.device());
}

// Tiles of 16 x 16 outputs have the least latency, but read x and A often; larger ones read less.
void lora_input(const LoraInput& args) {
  using Small = SplitTile<1, 2, 4, 1>;
  using Middle = SplitTile<1, 8, 4, 4>;
  using Large = SplitTile<2, 8, 2, 4>;
  constexpr int64_t kSmallRows = 128, kSmallElements = 1 << 20, kMiddleRows = 1024,
                    kLargeRows = 4096;
  const Device device = args.x.device();
  if (args.h.numel() == 0) return;
  const Problem problem = problem_of(args);
  const bool is_small = problem.rows <= kSmallRows || problem.rows * problem.k <= kSmallElements;
  if (problem.rows <= kLargeRows && has_clusters<Large>(device)) {
    if (is_small) return run_split<Small>(problem, device);
    if (problem.rows <= kMiddleRows) return run_split<Middle>(problem, device);
    return run_split<Large>(problem, device);
  }
  const int64_t multiprocessors = ::cohort::cuda::gpu_properties(device).multiprocessors;
  if (problem.rows < multiprocessors * TiledShape<8>::kRows) return run_tiled<4>(problem, device);
  run_tiled<8>(problem, device);
}

}  // namespace cohort::kernels::cuda
