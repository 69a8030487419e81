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
// Few rows: split_kernel() spreads the slices over the warps of a block, with operands straight
// from global memory. More rows: staged_kernel() spreads them over a thread block cluster, whose
// blocks stage x and A in shared memory with TMA, so that several warps share A (sm_90). Otherwise
// a warp of tiled_kernel() computes all slices of 16 rows one after another, and the warps of a
// block share the tile of A.
#include "kernels/lora.h"

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/raw.cuh"
#include "kernels/cuda/sm90/cluster.cuh"
#include "kernels/cuda/sm90/pipeline.cuh"
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

// A block computes a tile of 16 rows and 8 kN columns of h, a warp of it one slice. Grid: tiles of
// columns, tiles of rows.
struct SplitTile {
  static constexpr int kN = 2, kThreads = 32 * kSlices;
  static constexpr int kBatch = 4;  // chunks whose operands are in flight
  static constexpr int kRows = 16, kTileColumns = 8 * kN, kRowPairs = kTileColumns / 2;
  static constexpr int kPairs = kRows * kRowPairs;

  float sums[1][kN][4] = {};

  // The lane's operands in chunks from `chunk` to `end` - 1; zeros past the end, past K and past
  // the rows.
  static __device__ __forceinline__ void load_a(const Problem& problem, int chunk, int end,
                                                Operand (&a)[kBatch][kN]) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * kTileColumns + lane / 4;
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
                                                Operand (&x)[kBatch][1][2]) {
    const int lane = threadIdx.x % 32;
    const int64_t row0 = int64_t{blockIdx.y} * kRows + lane / 4;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int column = (chunk + b) * kChunk + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t row = row0 + 8 * i;
        x[b][0][i] = {};
        if (chunk + b < end && column < problem.k && row < problem.rows)
          x[b][0][i] = load_raw<8>(problem.x + row * problem.x_stride + column);
      }
    }
  }

  // The chain of a slice. Begins before the previous grids have completed, with A if that is
  // allowed; then x is complete, and the next grid, which may read it at once, is launched.
  __device__ __forceinline__ void multiply_slice(const Problem& problem, int slice) {
    const int first = slice * problem.slice_chunks;
    const int end = min(first + problem.slice_chunks, problem.chunks);
    Operand x[kBatch][1][2], a[kBatch][kN];
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

  // Stores the slice's sums to `memory`, [kSlices, kRows, kRowPairs].
  __device__ __forceinline__ void store(float2* memory) const {
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
        memory[warp * kPairs + (8 * i + lane / 4) * kRowPairs + lane % 4 + 4 * j] = {
            sums[0][j][2 * i], sums[0][j][2 * i + 1]};
  }
};

__global__ void __launch_bounds__(SplitTile::kThreads) split_kernel(const Problem problem) {
  using Tile = SplitTile;
  __shared__ float2 slice_sums[kSlices * Tile::kPairs];
  Tile tile;
  tile.multiply_slice(problem, static_cast<int>(threadIdx.x) / 32);
  tile.store(slice_sums);
  __syncthreads();
  const int i = threadIdx.x;
  const int64_t row = int64_t{blockIdx.y} * Tile::kRows + i / Tile::kRowPairs;
  if (i >= Tile::kPairs || row >= problem.rows) return;
  float2 total = {};
#pragma unroll
  for (int group = 0; group < kSlices; group += kGroup) {
    if (group >= problem.slices) break;
    float2 sum = {};
#pragma unroll
    for (int slice = group; slice < group + kGroup; ++slice) {
      if (slice >= problem.slices) break;
      const float2 value = slice_sums[slice * Tile::kPairs + i];
      sum.x += value.x;
      sum.y += value.y;
    }
    total.x += sum.x;
    total.y += sum.y;
  }
  problem.store(row, static_cast<int>(blockIdx.x) * Tile::kTileColumns + i % Tile::kRowPairs * 2,
                total.x, total.y);
}

// A cluster computes a tile of 32 kRowWarps rows and 64 columns of h, each block of it a group of
// slices, and a warp a slice of 32 rows. A stage of the pipeline has two chunks of the rows of x
// and A, [rows, 64] with the 128-byte swizzle, and zeros past K and past the rows. The slices take
// the stages in turn; those past K add zero. Grid: the blocks of a cluster, tiles of columns, tiles
// of rows.
template <int kRowWarps_, int kBlocksPerSm_>
struct StagedTile {
  static constexpr int kRowWarps = kRowWarps_, kRows = 32 * kRowWarps;
  static constexpr int kBlocks = kSlices / kGroup, kThreads = 32 * kGroup * kRowWarps;
  static constexpr int kBlocksPerSm = kBlocksPerSm_, kBlockRows = kRows / kBlocks;
  static constexpr int kBox = 64, kBoxRowBytes = kBox * int{sizeof(bf16)};
  static constexpr int kStageBytes = (kRows + kColumns) * kBoxRowBytes;
  // The sums of the block's slices, [kGroup, kRows, kSumStride], replace the stages; a warp writes
  // four adjacent elements of eight rows without bank conflicts. The sums of all groups for the
  // block's rows, [kBlocks, kBlockRows, kColumns], have their own memory.
  static constexpr int kSumStride = kColumns + 4, kSliceSums = kRows * kSumStride;
  static constexpr int kSliceBytes = kSliceSums * int{sizeof(float)};
  static constexpr int kGroupSums = kBlockRows * kColumns;
  static constexpr int kGroupBytes = kBlocks * kGroupSums * int{sizeof(float)};
  // As many as fit 228 KiB, of which 1 KiB per block is reserved, with less than 1 KiB of barriers.
  // A stage is always of the same slice: warps of another one, which may be ahead by a round, could
  // not tell by the barrier's phase whether it has their data.
  static constexpr int kMaxStages =
      ((228 << 10) / kBlocksPerSm - (2 << 10) - kGroupBytes) / kStageBytes;
  static constexpr int kStages = kMaxStages / kGroup * kGroup;
  static constexpr int kGroupOffset = std::max(kStages * kStageBytes, kGroup* kSliceBytes);
  static constexpr int kBarrierOffset = kGroupOffset + kGroupBytes;
  static constexpr int kShared = kBarrierOffset + Pipeline<kStages>::kBytes;

  // A lane loads this one of eight rows of x or A for row or column `group` of an instruction: rows
  // r and r + 4, whose swizzled columns differ, are adjacent, so that there are no bank conflicts.
  static __device__ int row_of(int group) { return group / 2 + group % 2 * 4; }
};

// Loads of the stages, each by one thread.
template <class Tile>
struct StageLoads {
  const Problem& problem;
  const CUtensorMap *x, *a;
  uint32_t stages;
  Pipeline<Tile::kStages> pipeline;

  __device__ int count() const { return (problem.slice_chunks + 1) / 2 * kGroup; }
  __device__ __forceinline__ void load_a(int i) const {
    pipeline.producer_commit_expect_tx(i, Tile::kStageBytes);
    load(i, a, static_cast<int>(blockIdx.y) * kColumns, Tile::kRows);
  }
  __device__ __forceinline__ void load_x(int i) const {
    load(i, x, static_cast<int>(blockIdx.z) * Tile::kRows, 0);
  }
  // Loads the next contents of the stage, when all warps of the slice have read it.
  __device__ __forceinline__ void load_after(int i) const {
    const int next = i + Tile::kStages;
    if (next >= count()) return;
    pipeline.producer_acquire(next);
    load_a(next);
    load_x(next);
  }

 private:
  __device__ __forceinline__ void load(int i, const CUtensorMap* map, int row, int to_row) const {
    const PipelineState<Tile::kStages> state(i);
    const int slice = static_cast<int>(blockIdx.x) * kGroup + i % kGroup;
    const int column = slice * problem.slice_chunks * kChunk + i / kGroup * Tile::kBox;
    tma_load(stages + state.index * Tile::kStageBytes + to_row * Tile::kBoxRowBytes, map,
             {{column, row, 0, 0}}, pipeline.full(state.index));
  }
};

// The chain of a slice of the block. Begins as that of SplitTile.
template <class Tile>
__device__ __forceinline__ void multiply_stages(float (&sums)[2][2][4][4],
                                                const StageLoads<Tile>& loads, const char* stages) {
  const Problem& problem = loads.problem;
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int slice = warp / Tile::kRowWarps, row_warp = warp % Tile::kRowWarps;
  const bool is_loader = row_warp == 0 && lane == 0;
  const int first_loads = is_loader ? min(loads.count(), Tile::kStages) : 0;
  if (problem.may_prefetch_a)
    for (int i = slice; i < first_loads; i += kGroup) loads.load_a(i);
  wait_on_dependent_grids();
  launch_dependent_grids();
  for (int i = slice; i < first_loads; i += kGroup) {
    if (!problem.may_prefetch_a) loads.load_a(i);
    loads.load_x(i);
  }
  __syncwarp();
  const int row = Tile::row_of(lane / 4), offset = row * Tile::kBox + (lane % 4 ^ row) * 8;
  const int other_chunk = (offset ^ kChunk) - offset;
  const int first = (static_cast<int>(blockIdx.x) * kGroup + slice) * problem.slice_chunks;
  const int end = min(first + problem.slice_chunks, problem.chunks);
#pragma unroll 1
  for (int i = slice, chunk = first; i < loads.count(); i += kGroup, chunk += 2) {
    const PipelineState<Tile::kStages> state(i);
    const bf16* stage =
        reinterpret_cast<const bf16*>(stages + state.index * Tile::kStageBytes) + offset;
    loads.pipeline.consumer_wait(state);
#pragma unroll
    for (int half = 0; half < 2; ++half, stage += other_chunk) {
      if (chunk + half >= end) break;
      Operand x[2][2], a[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        x[k / 2][k % 2] = load_raw<8>(stage + (32 * row_warp + 8 * k) * Tile::kBox);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          a[j] = load_raw<8>(stage + (Tile::kRows + 32 * n + 8 * j) * Tile::kBox);
        multiply(sums[n], x, a);
      }
    }
    loads.pipeline.consumer_release_warp(state);
    if (is_loader) loads.load_after(i);
    __syncwarp();
  }
}

// Computes the sums of the block's slices and stores them to the place of the stages.
template <class Tile>
__device__ __forceinline__ void compute_slices(const StageLoads<Tile>& loads, char* memory) {
  // Twice 32 columns, so that fewer operands are in registers.
  float sums[2][2][4][4] = {};
  multiply_stages(sums, loads, memory);
  __syncthreads();  // all stages have been read
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int row = warp % Tile::kRowWarps * 32 + Tile::row_of(lane / 4);
  float* const to = reinterpret_cast<float*>(memory) + warp / Tile::kRowWarps * Tile::kSliceSums +
                    row * Tile::kSumStride + lane % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        to[8 * i * Tile::kSumStride + 32 * n + 4 * j] = sums[n][i / 2][j / 2][i % 2 * 2 + j % 2];
  __syncthreads();
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    staged_kernel(const __grid_constant__ Problem problem, const __grid_constant__ CUtensorMap x,
                  const __grid_constant__ CUtensorMap a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
  // sm_120 has less shared memory than a block needs.
  extern __shared__ __align__(1024) char tile_memory[];
  const uint32_t stages = shared_address(tile_memory);
  const StageLoads<Tile> loads{problem, &x, &a, stages, {stages + Tile::kBarrierOffset}};
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    tma_prefetch(&x);
    tma_prefetch(&a);
    loads.pipeline.init(1, Tile::kRowWarps);
  }
  __syncthreads();
  cluster_arrive_relaxed();
  compute_slices(loads, tile_memory);
  // A block adds all groups for a quarter of the rows, a thread four columns of one. For each
  // quarter, a thread adds the slices of this block's group and stores the sum to the quarter's.
  constexpr int kRowPacks = kColumns / 4;
  static_assert(Tile::kBlockRows * kRowPacks == Tile::kThreads);
  const int rank = blockIdx.x, block_row = thread / kRowPacks, pack = thread % kRowPacks;
  using Four = float[4];
  const auto add = [](Four& total, const float* from) {
    const Pack<float, 4> values = load_pack<4>(from);
#pragma unroll
    for (int e = 0; e < 4; ++e) total[e] += values.v[e];
  };
  const float* const slices =
      reinterpret_cast<const float*>(tile_memory) + block_row * Tile::kSumStride + 4 * pack;
  float* const groups = reinterpret_cast<float*>(tile_memory + Tile::kGroupOffset) + 4 * thread;
  cluster_wait();  // the blocks that are stored to have started
#pragma unroll
  for (int block = 0; block < Tile::kBlocks; ++block) {
    Four total = {};
#pragma unroll
    for (int slice = 0; slice < kGroup; ++slice)
      add(total, slices + slice * Tile::kSliceSums + block * Tile::kBlockRows * Tile::kSumStride);
    store_floats(in_block(groups + rank * Tile::kGroupSums, block), total);
  }
  cluster_sync();
  Four total = {};
#pragma unroll
  for (int group = 0; group < Tile::kBlocks; ++group) add(total, groups + group * Tile::kGroupSums);
  const int64_t row = int64_t{blockIdx.z} * Tile::kRows + rank * Tile::kBlockRows + block_row;
  const int column = static_cast<int>(blockIdx.y) * kColumns + 4 * pack;
  if (row >= problem.rows) return;
  problem.store(row, column, total[0], total[1]);
  problem.store(row, column + 2, total[2], total[3]);
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

void run_split(const Problem& problem, Device device) {
  launch("lora_input", split_kernel,
         {.grid = dim3(blocks_for(problem.p, SplitTile::kTileColumns),
                       blocks_for(problem.rows, SplitTile::kRows)),
          .block = SplitTile::kThreads,
          .start = Start::kProgrammatic,
          .trigger = Trigger::kLate},
         device, problem);
}
// Boxes of `rows` rows and 64 columns of x or A.
template <class Tile>
CUtensorMap operand_map(const Tensor& t, int rows) {
  const auto count = static_cast<cuuint64_t>(t.rows());
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(RowOffsets(t).outer) * sizeof(bf16);
  return make_tensor_map({.t = t,
                          .sizes = {static_cast<cuuint64_t>(t.cols()), count, 1, 1},
                          .strides = {row_bytes, row_bytes * count, row_bytes * count},
                          .box = {Tile::kBox, static_cast<cuuint32_t>(rows), 1, 1}});
}
// Number of clusters that the device runs at the same time, and whether that is a whole grid.
template <class Tile>
int clusters_at_once(Device device) {
  return ::cohort::cuda::active_clusters(reinterpret_cast<const void*>(staged_kernel<Tile>),
                                         Tile::kBlocks, Tile::kThreads, Tile::kShared, device);
}
template <class Tile>
bool fits_at_once(const Problem& problem, Device device) {
  return problem.rows * (problem.p / kColumns) <=
         int64_t{clusters_at_once<Tile>(device)} * Tile::kRows;
}
template <class Tile>
void run_staged(const LoraInput& args, const Problem& problem, Device device) {
  launch("lora_input", staged_kernel<Tile>,
         {.grid = dim3(Tile::kBlocks, blocks_for(problem.p, kColumns),
                       blocks_for(problem.rows, Tile::kRows)),
          .block = Tile::kThreads,
          .shared_bytes = Tile::kShared,
          .start = Start::kProgrammatic,
          .trigger = Trigger::kLate,
          .cluster = Tile::kBlocks},
         device, problem, operand_map<Tile>(args.x, Tile::kRows),
         operand_map<Tile>(args.a, kColumns));
}
template <int kWarps>
void run_tiled(const Problem& problem, Device device) {
  using Shape = TiledShape<kWarps>;
  launch("lora_input", tiled_kernel<kWarps>,
         {.grid = blocks_for(problem.rows, Shape::kRows) * blocks_for(problem.p, kColumns),
          .block = Shape::kThreads,
          .shared_bytes = Shape::kShared,
          .start = Start::kProgrammatic,
          .trigger = Trigger::kLate},
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

template <class T>
__global__ void __launch_bounds__(256)
    select_adapters_kernel(T* h, int64_t stride, int64_t elements, int cols, int columns,
                           const int32_t* rows, const int32_t* adapters) {
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= elements) return;
  const int64_t t = i / cols;
  const int c = static_cast<int>(i % cols), row = rows == nullptr ? 0 : rows[t];
  const int adapter = row < 0 ? -1 : rows == nullptr ? 0 : adapters[row];
  if (c / columns != adapter) h[t * stride + c] = T(0.0f);
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
// The staged tile is the smallest of which the device runs all clusters at once, or the largest.
// With many rows and few columns its exchange of sums takes longer than its reads save.
void lora_input(const LoraInput& args) {
  constexpr int64_t kSplitRows = 128, kSplitElements = 1 << 20, kFewRows = 4096, kFewColumns = 1024;
  using Staged32 = StagedTile<1, 2>;
  using Staged64 = StagedTile<2, 1>;
  using Staged96 = StagedTile<3, 1>;
  using Staged128 = StagedTile<4, 1>;
  const Device device = args.x.device();
  if (args.h.numel() == 0) return;
  const Problem problem = problem_of(args);
  const int64_t rows = problem.rows;
  if (rows <= kSplitRows || rows * problem.k <= kSplitElements) return run_split(problem, device);
  if ((rows <= kFewRows || problem.k > kFewColumns) &&
      ::cohort::cuda::fits(reinterpret_cast<const void*>(staged_kernel<Staged128>),
                           {.shared_memory = Staged128::kShared, .compute_capability = 90},
                           device) &&
      clusters_at_once<Staged128>(device) > 0) {
    if (fits_at_once<Staged32>(problem, device)) return run_staged<Staged32>(args, problem, device);
    if (fits_at_once<Staged64>(problem, device)) return run_staged<Staged64>(args, problem, device);
    if (fits_at_once<Staged96>(problem, device)) return run_staged<Staged96>(args, problem, device);
    return run_staged<Staged128>(args, problem, device);
  }
  const int64_t multiprocessors = ::cohort::cuda::gpu_properties(device).multiprocessors;
  if (rows < multiprocessors * TiledShape<8>::kRows) return run_tiled<4>(problem, device);
  run_tiled<8>(problem, device);
}

void select_adapters(const SelectAdapters& args) {
  dispatch_device(args.h.dtype(), "select_adapters", [&]<class T>() {
    launch("select_adapters", select_adapters_kernel<T>, {blocks_for(args.h.numel(), 256), 256},
           args.h.device(), pointer<T>(args.h), RowOffsets(args.h).outer, args.h.numel(),
           static_cast<int>(args.h.cols()), static_cast<int>(args.columns),
           pointer<int32_t>(args.rows), pointer<int32_t>(args.adapters));
  });
}

}  // namespace cohort::kernels::cuda
