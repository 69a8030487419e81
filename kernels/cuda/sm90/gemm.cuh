// GEMM with a fused epilogue on the tensor cores of sm_90: C = A op(B) with f32 accumulators over
// ascending k in steps of 16 (accumulation_order.h); an Epilogue computes the outputs from them.
//
// Warp specialised. The first warp of the producer warpgroup loads [128, 64] of A and [64, 192] of
// op(B) by TMA into a pipeline of stages in shared memory. Two consumer warpgroups compute tiles of
// C in ping-pong: while the mainloop of one consumer's tile runs, the other runs its epilogue on
// subtiles of 64 rows and 32 columns, double buffered in shared memory. Two more warps of the
// producer, one per consumer, store the subtiles by TMA and load the inputs of the next ones. So
// neither memory nor the epilogue stalls the tensor cores, which matters for short k: with 896
// channels a tile has 14 steps. Blocks are persistent, one per multiprocessor.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/sm90/pipeline.cuh"
#include "kernels/cuda/sm90/wgmma.cuh"

namespace cohort::kernels::cuda {
namespace {

// Layout of B in memory, and the columns of C in a tile.
enum class OperandB {
  kStackedKMajor,  // [2 F, K]: 96 columns of each half
  kMnMajor         // [K, N]: 192 columns
};

constexpr int kSubtileRows = 64, kSubtileColumns = 32, kEpilogueStages = 2;

template <class Epilogue>
struct GemmShape {
  static constexpr int kConsumers = 2, kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr int kRows = 2 * kSubtileRows, kColumns = 192, kStep = 64, kStages = 4;
  // Registers per thread: a block of 384 threads starts with 168 each; the total is preserved.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kABytes = 2 * kRows * kStep, kBBytes = 2 * kColumns * kStep;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kEpilogueBegin = kStages * kStageBytes;
  static constexpr int kBarriers =
      kEpilogueBegin + kConsumers * kEpilogueStages * Epilogue::kSubtileBytes;
  static constexpr int kSharedBytes = kBarriers + 8 * (2 * kStages + 4 * kEpilogueStages);
};

// A thread's accumulators of 64 rows of a tile, in the layout of wgmma.cuh.
using TileAccumulators = float[24][4];

struct GemmTensorMaps {
  CUtensorMap a, b;
};

struct GemmTiles {
  int steps, rows, columns;  // steps along k; tiles of C along M and N

  __device__ int count() const { return rows * columns; }
  __device__ TileCoordinates tile(int i) const { return grouped_tile(i, rows, columns); }
};

// Shared memory addresses.
template <class Epilogue>
struct GemmSharedMemory {
  using S = GemmShape<Epilogue>;
  uint32_t first;
  __device__ uint32_t a(int stage) const { return first + stage * S::kStageBytes; }
  __device__ uint32_t b(int stage) const { return a(stage) + S::kABytes; }
  __device__ uint32_t subtile(int consumer, int buffer) const {
    return first + S::kEpilogueBegin +
           (consumer * kEpilogueStages + buffer) * Epilogue::kSubtileBytes;
  }
  // Full and empty barriers of the operand stages; barriers of a subtile's buffer, which is free
  // and has its inputs loaded, or holds computed outputs.
  __device__ uint32_t full(int stage) const { return first + S::kBarriers + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(S::kStages + stage); }
  __device__ uint32_t inputs_full(int consumer, int buffer) const {
    return full(2 * S::kStages + consumer * kEpilogueStages + buffer);
  }
  __device__ uint32_t outputs_full(int consumer, int buffer) const {
    return inputs_full(S::kConsumers + consumer, buffer);
  }
};

// Producer loop of one thread.
template <class Epilogue>
__device__ __forceinline__ void load_operands(const GemmTiles& tiles, const GemmTensorMaps& maps,
                                              const GemmSharedMemory<Epilogue>& memory) {
  using S = GemmShape<Epilogue>;
  int number = 0;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x); i < tiles.count(); i += static_cast<int>(gridDim.x)) {
    const auto [row, column] = tiles.tile(i);
#pragma unroll 1
    for (int step = 0; step < tiles.steps; ++step, ++number) {
      const PipelineState<S::kStages> state(number);
      barrier_wait(memory.empty(state.index), state.phase ^ 1);
      const uint32_t full = memory.full(state.index), b = memory.b(state.index);
      const int k = step * S::kStep, first = column * Epilogue::kColumns;
      barrier_arrive_expect_tx(full, S::kStageBytes);
      tma_load(memory.a(state.index), &maps.a, {{k, row * S::kRows, 0, 0}}, full);
      if constexpr (Epilogue::kOperandB == OperandB::kMnMajor) {
        for (int p = 0; p < S::kColumns / 64; ++p)
          tma_load(b + p * (S::kStep * 128), &maps.b, {{first + 64 * p, k, 0, 0}}, full);
      } else {  // both halves
        tma_load(b, &maps.b, {{k, first, 0, 0}}, full);
      }
    }
  }
}

// Iterates over a consumer's subtiles: those of a tile's upper 64 rows, then the lower ones.
template <class Epilogue>
class SubtileIterator {
 public:
  __device__ SubtileIterator(const GemmTiles& tiles, int consumer)
      : tiles_(tiles), tile_(static_cast<int>(blockIdx.x + consumer * gridDim.x)) {
    find_tile();
  }
  __device__ bool done() const { return tile_ >= tiles_.count(); }
  __device__ void next() {
    if (++subtile_ < 2 * Epilogue::kSubtiles) return;
    subtile_ = 0;
    tile_ += GemmShape<Epilogue>::kConsumers * static_cast<int>(gridDim.x);
    find_tile();
  }
  __device__ int row() const {
    return coordinates_.row * GemmShape<Epilogue>::kRows +
           subtile_ / Epilogue::kSubtiles * kSubtileRows;
  }
  __device__ int column() const {
    return coordinates_.column * Epilogue::kColumns +
           subtile_ % Epilogue::kSubtiles * kSubtileColumns;
  }

 private:
  __device__ void find_tile() {
    if (!done()) coordinates_ = tiles_.tile(tile_);
  }
  const GemmTiles& tiles_;
  int tile_, subtile_ = 0;
  TileCoordinates coordinates_{};
};

// One thread stores a consumer's subtiles and loads the inputs of the next ones.
template <class Epilogue>
__device__ __forceinline__ void run_epilogue_copies(const GemmTiles& tiles,
                                                    const Epilogue& epilogue,
                                                    const GemmSharedMemory<Epilogue>& memory,
                                                    int consumer) {
  SubtileIterator<Epilogue> next(tiles, consumer);
  const auto load_next = [&](int buffer) {
    if (next.done()) return;
    epilogue.load(memory.subtile(consumer, buffer), next.row(), next.column(),
                  memory.inputs_full(consumer, buffer));
    next.next();
  };
  for (int buffer = 0; buffer < kEpilogueStages; ++buffer) load_next(buffer);
  int number = 0;
#pragma unroll 1
  for (SubtileIterator<Epilogue> it(tiles, consumer); !it.done(); it.next(), ++number) {
    const PipelineState<kEpilogueStages> state(number);
    barrier_wait(memory.outputs_full(consumer, state.index), state.phase);
    epilogue.store(memory.subtile(consumer, state.index), it.row(), it.column());
    bulk_commit();
    bulk_wait_read();
    load_next(state.index);
  }
  bulk_wait();
}

template <class Epilogue>
class GemmConsumer {
 public:
  __device__ GemmConsumer(const GemmTiles& tiles, const Epilogue& epilogue,
                          const GemmSharedMemory<Epilogue>& memory)
      : tiles_(tiles),
        epilogue_(epilogue),
        memory_(memory),
        consumer_(uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1)) {}

  // Processes every second tile of the block.
  __device__ __forceinline__ void run() {
    const int stride = static_cast<int>(gridDim.x);
    int number = consumer_;
#pragma unroll 1
    for (int tile = static_cast<int>(blockIdx.x) + consumer_ * stride; tile < tiles_.count();
         tile += S::kConsumers * stride, number += S::kConsumers) {
      TileAccumulators upper, lower;
      if (number > 0) named_barrier(1 + consumer_, S::kConsumers * kWarpgroup);
      mainloop(upper, lower, number * tiles_.steps, tile + stride < tiles_.count());
      const int column = tiles_.tile(tile).column * Epilogue::kColumns;
      run_epilogue(upper, column);
      run_epilogue(lower, column);
    }
  }

 private:
  using S = GemmShape<Epilogue>;
  static constexpr Major kMajor =
      Epilogue::kOperandB == OperandB::kMnMajor ? Major::kMN : Major::kK;

  // Computes the accumulators of a tile; `first` is the index of its first step among the block's
  // steps. Once all steps are issued, signals the other consumer if the block has a next tile. The
  // other must not test the stages' barriers earlier: it would confuse their phases.
  __device__ __forceinline__ void mainloop(TileAccumulators& upper, TileAccumulators& lower,
                                           int first, bool has_next) {
#pragma unroll 1
    for (int step = 0; step < tiles_.steps; ++step) {
      const PipelineState<S::kStages> state(first + step);
      barrier_wait(memory_.full(state.index), state.phase);
      const MatrixDescriptor a = matrix_descriptor(memory_.a(state.index));
      const MatrixDescriptor b = matrix_descriptor(memory_.b(state.index), S::kStep * 128);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < S::kStep / 16; ++k) {
        const MatrixDescriptor right =
            kMajor == Major::kK ? k_major_step<S::kColumns>(b, k) : mn_major_step(b, k);
        const MatrixDescriptor left = k_major_step<S::kRows>(a, k);
        wgmma<Major::kK, kMajor>(upper, left, right, step > 0 || k > 0);
        wgmma<Major::kK, kMajor>(lower, left.plus(kSubtileRows * 128), right, step > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0)
        arrive_once_per_warp(memory_.empty(PipelineState<S::kStages>(first + step - 1).index));
    }
    if (has_next) named_arrive(2 - consumer_, S::kConsumers * kWarpgroup);
    wgmma_wait<0>();
    wgmma_fence_operand(upper);
    wgmma_fence_operand(lower);
    arrive_once_per_warp(memory_.empty(PipelineState<S::kStages>(first + tiles_.steps - 1).index));
  }

  // Computes the subtiles of 64 rows.
  __device__ __forceinline__ void run_epilogue(const TileAccumulators& accumulators, int column) {
#pragma unroll
    for (int i = 0; i < Epilogue::kSubtiles; ++i) {
      const PipelineState<kEpilogueStages> state(subtile_number_++);
      const uint32_t buffer = memory_.subtile(consumer_, state.index);
      barrier_wait(memory_.inputs_full(consumer_, state.index), state.phase);
      epilogue_.compute(i, accumulators, buffer, column + kSubtileColumns * i);
      fence_proxy_async();
      arrive_once_per_warp(memory_.outputs_full(consumer_, state.index));
    }
  }

  const GemmTiles& tiles_;
  const Epilogue& epilogue_;
  const GemmSharedMemory<Epilogue> memory_;
  const int consumer_;
  int subtile_number_ = 0;
};

// An Epilogue computes subtiles of 64 rows and 32 columns, each in a buffer of kSubtileBytes:
//   kOperandB, kColumns, kSubtiles             layout of B; columns of a tile; subtiles per row
//   compute(i, accumulators, buffer, column)   subtile i, columns 32 i to 32 i + 31
//   load(buffer, row, column, inputs_full)     one thread loads the inputs of compute() and arrives
//   store(buffer, row, column)                 one thread issues TMA stores of the outputs
template <class Epilogue>
__global__ void __launch_bounds__(GemmShape<Epilogue>::kThreads, 1)
    gemm_kernel(const __grid_constant__ GemmTensorMaps maps,
                const __grid_constant__ GemmTiles tiles,
                const __grid_constant__ Epilogue epilogue) {
  using S = GemmShape<Epilogue>;
  extern __shared__ __align__(1024) char shared[];
  const GemmSharedMemory<Epilogue> memory{shared_address(shared)};
  launch_dependent_grids();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < S::kStages; ++stage) {
      barrier_init(memory.full(stage), 1);
      barrier_init(memory.empty(stage), 4);
    }
    for (int consumer = 0; consumer < S::kConsumers; ++consumer)
      for (int buffer = 0; buffer < kEpilogueStages; ++buffer) {
        barrier_init(memory.inputs_full(consumer, buffer), 1);
        barrier_init(memory.outputs_full(consumer, buffer), 4);
      }
    tma_prefetch(&maps.a);
    tma_prefetch(&maps.b);
  }
  wait_on_dependent_grids();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    deallocate_registers<S::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x % 32 != 0) return;
    if (warp == 0) load_operands<Epilogue>(tiles, maps, memory);
    if (warp >= 1 && warp <= S::kConsumers)
      run_epilogue_copies<Epilogue>(tiles, epilogue, memory, warp - 1);
    return;
  }
  allocate_registers<S::kConsumerRegisters>();
  GemmConsumer<Epilogue>(tiles, epilogue, memory).run();
}

// Offset of columns 8 n + 2 quad and 8 n + 2 quad + 1 of row r in a bf16 subtile: rows of 64 bytes
// in the 64-byte swizzle of TMA.
__device__ __forceinline__ uint32_t pair_offset(int r, int n) {
  return static_cast<uint32_t>(r * 64 + ((n ^ (r >> 1 & 3)) << 4) +
                               static_cast<int>(threadIdx.x % 4) * 4);
}
// First of the thread's two rows in a subtile; the second is 8 further.
__device__ __forceinline__ int subtile_row() {
  return static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 +
         static_cast<int>(threadIdx.x) % 32 / 4;
}
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(word) : "memory");
}

// Tensor map of a matrix of `halves` halves side by side, [rows, halves, cols], with boxes of
// [box_rows, box_cols] of one half.
inline CUtensorMap matrix_tensor_map(const Tensor& t, int halves, int box_rows, int box_cols) {
  const auto rows = static_cast<cuuint64_t>(t.rows()),
             cols = static_cast<cuuint64_t>(t.cols() / halves);
  const cuuint64_t half_bytes = cols * sizeof(bf16), row_bytes = half_bytes * halves;
  return make_tensor_map(
      {.t = t,
       .sizes = {cols, rows, static_cast<cuuint64_t>(halves), 1},
       .strides = {row_bytes, half_bytes, row_bytes * rows},
       .box = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows), 1, 1}});
}
// Tensor map of two stacked halves, [2, rows, cols], with boxes of 96 rows of both.
inline CUtensorMap stacked_tensor_map(const Tensor& w) {
  const auto rows = static_cast<cuuint64_t>(w.rows() / 2), cols = static_cast<cuuint64_t>(w.cols());
  const cuuint64_t row_bytes = cols * sizeof(bf16), half_bytes = row_bytes * rows;
  return make_tensor_map({.t = w,
                          .sizes = {cols, rows, 2, 1},
                          .strides = {row_bytes, half_bytes, half_bytes * 2},
                          .box = {64, 96, 2, 1}});
}

// Launches the GEMM of a [M, K] and b; C has `columns` columns (per half if B is stacked).
template <class Epilogue>
void launch_gemm(const char* name, const Tensor& a, const Tensor& b, int64_t columns,
                 const Epilogue& epilogue) {
  using S = GemmShape<Epilogue>;
  const auto tiles_along = [](int64_t size, int tile) {
    return static_cast<int>((size + tile - 1) / tile);
  };
  const GemmTiles tiles{.steps = tiles_along(a.cols(), S::kStep),
                        .rows = tiles_along(a.rows(), S::kRows),
                        .columns = tiles_along(columns, Epilogue::kColumns)};
  const Device device = a.device();
  const int64_t blocks = std::min<int64_t>(int64_t{tiles.rows} * tiles.columns,
                                           ::cohort::cuda::multiprocessors(device));
  const GemmTensorMaps maps{.a = matrix_tensor_map(a, 1, S::kRows, S::kStep),
                            .b = Epilogue::kOperandB == OperandB::kMnMajor
                                     ? matrix_tensor_map(b, 1, S::kStep, 64)
                                     : stacked_tensor_map(b)};
  launch(name, gemm_kernel<Epilogue>,
         {.grid = blocks_for(blocks, 1),
          .block = S::kThreads,
          .shared_bytes = S::kSharedBytes,
          .start = Start::kProgrammatic},
         device, maps, tiles, epilogue);
}

}  // namespace
}  // namespace cohort::kernels::cuda
