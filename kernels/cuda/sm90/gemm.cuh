// GEMM on the tensor cores of sm_90: C = A op(B) with f32 accumulators over ascending k in steps
// of 16 (accumulation_order.h), perhaps followed by a second pair of operands, whose product is
// added by the same accumulators. A kernel is made of a mainloop (tile shape, element type, layouts
// of the operands), a tile scheduler, and an epilogue, which computes the outputs from the
// accumulators.
//
// Warp specialised. The first warp of the producer warpgroup loads 64 columns of A and of op(B) at
// a time by TMA into a pipeline in shared memory. Two consumer warpgroups compute tiles of C in
// ping-pong: while the mainloop of one consumer's tile runs, the other runs its epilogue on
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

// Layout of B in memory.
enum class OperandB {
  kStackedKMajor,  // [2 N, K]: a tile has the same columns of both halves
  kMnMajor         // [K, N]
};

constexpr int kSubtileRows = 64, kSubtileColumns = 32;

// Mainloop of tiles of kRows x kColumns accumulators, for A [M, K], K-major.
template <class Element_, int kColumns_, OperandB kOperandB, int kStages_>
struct GemmMainloop {
  using Element = Element_;
  static_assert(std::is_same_v<Element, bf16>, "wgmma.cuh has no other instructions");
  static constexpr int kRows = 2 * kSubtileRows, kColumns = kColumns_, kStages = kStages_;
  static constexpr bool kStacked = kOperandB == OperandB::kStackedKMajor;
  // Columns of C in a tile; in each half of C if B is stacked.
  static constexpr int kTileColumns = kStacked ? kColumns / 2 : kColumns;
  static constexpr Major kMajor = kStacked ? Major::kK : Major::kMN;
  static constexpr int kRowBytes = 128, kStep = kRowBytes / int{sizeof(Element)};  // columns of k
  static constexpr int kABytes = kRows * kRowBytes, kBBytes = kColumns * kRowBytes;
  static constexpr int kStageBytes = kABytes + kBBytes;
  // A thread's accumulators of 64 rows of a tile, in the layout of wgmma.cuh.
  using Accumulators = float[kColumns / 8][4];

  uint32_t stages;  // shared address
  Pipeline<kStages> pipeline;

  __device__ uint32_t a(int stage) const { return stages + stage * kStageBytes; }
  __device__ uint32_t b(int stage) const { return a(stage) + kABytes; }

  // One producer thread loads one step along k of a tile.
  __device__ __forceinline__ void load(const CUtensorMap& map_a, const CUtensorMap& map_b,
                                       const TileCoordinates& tile, int step, int iteration) const {
    const PipelineState<kStages> state(iteration);
    pipeline.producer_acquire(state);
    const uint32_t full = pipeline.full(state.index), to_b = b(state.index);
    const int k = step * kStep, column = tile.column * kTileColumns;
    pipeline.producer_commit_expect_tx(state, kStageBytes);
    tma_load(a(state.index), &map_a, {{k, tile.row * kRows, 0, 0}}, full);
    if constexpr (kStacked)
      tma_load(to_b, &map_b, {{k, column, 0, 0}}, full);
    else
      for (int panel = 0; panel < kColumns / 64; ++panel)
        tma_load(to_b + panel * (kStep * 128), &map_b, {{column + 64 * panel, k, 0, 0}}, full);
  }

  // A consumer warpgroup computes the accumulators of a tile, whose first step is iteration `first`
  // of the pipeline. Calls issued() when all matmuls are issued.
  template <class Issued>
  __device__ __forceinline__ void multiply(Accumulators& upper, Accumulators& lower, int first,
                                           int steps, Issued&& issued) const {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const PipelineState<kStages> state(first + step);
      pipeline.consumer_wait(state);
      const MatrixDescriptor left = matrix_descriptor(a(state.index));
      const MatrixDescriptor right = matrix_descriptor(b(state.index), kStep * 128);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) {
        const MatrixDescriptor right_k =
            kStacked ? k_major_step<kColumns>(right, k) : mn_major_step(right, k);
        const MatrixDescriptor left_k = k_major_step<kRows>(left, k);
        wgmma<Major::kK, kMajor>(upper, left_k, right_k, step > 0 || k > 0);
        wgmma<Major::kK, kMajor>(lower, left_k.plus(kSubtileRows * kRowBytes), right_k,
                                 step > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) pipeline.consumer_release_warp(first + step - 1);
    }
    issued();
    wgmma_wait<0>();
    wgmma_fence_operand(upper);
    wgmma_fence_operand(lower);
    pipeline.consumer_release_warp(first + steps - 1);
  }
};

// Tile scheduler: a block has the tiles blockIdx.x, blockIdx.x + gridDim.x and so on.
struct TileScheduler {
  int rows, columns;  // tiles of C along M and N

  __device__ int count() const { return rows * columns; }
  __device__ TileCoordinates tile(int i) const { return grouped_tile(i, rows, columns); }
};

// Epilogue behind E::Mainloop, a GemmMainloop: computes subtiles of 64 rows and 32 columns, each in
// one of a consumer's kBuffers buffers of kSubtileBytes in shared memory.
template <class E>
concept GemmEpilogue = requires(const E& epilogue, const typename E::Mainloop::Accumulators& sums,
                                uint32_t buffer, int i, int row, int column, uint32_t full) {
  E::kSubtileBytes;
  E::kBuffers;
  epilogue.compute(i, sums, buffer, column);  // subtile i of 64 rows of a tile, from `column` on
  epilogue.load(buffer, row, column, full);   // one thread loads the inputs of compute(), arrives
  epilogue.store(buffer, row, column);        // one thread issues TMA stores of the outputs
};

struct OperandMaps {
  CUtensorMap a, b;
  int steps;  // along k
};

template <GemmEpilogue Epilogue>
struct GemmArguments {
  OperandMaps first, second;  // no steps: no second pair
  int early_steps;            // steps of `first` that are loaded while the kernel before runs
  TileScheduler tiles;
  Epilogue epilogue;
};

// Shared memory: the stages of the mainloop, each consumer's buffers of subtiles, the barriers.
template <GemmEpilogue Epilogue>
struct GemmShape {
  using Mainloop = typename Epilogue::Mainloop;
  static constexpr int kConsumers = 2, kThreads = kWarpgroup * (1 + kConsumers);
  // Registers per thread: a block of 384 threads starts with 168 each; the total is preserved.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kSubtiles = Mainloop::kTileColumns / kSubtileColumns;  // per 64 rows
  static constexpr int kFirstBuffer = Mainloop::kStages * Mainloop::kStageBytes;
  static constexpr int kBarriers =
      kFirstBuffer + kConsumers * Epilogue::kBuffers * Epilogue::kSubtileBytes;
  static constexpr int kSharedBytes = kBarriers + Pipeline<Mainloop::kStages>::kBytes +
                                      kConsumers * Pipeline<Epilogue::kBuffers>::kBytes;
};

// A consumer's buffers of subtiles. The copying thread is their producer: it fills a buffer with
// the inputs of a subtile. The consumer releases it with the outputs in their place.
template <GemmEpilogue Epilogue>
struct EpilogueBuffers {
  using S = GemmShape<Epilogue>;
  uint32_t buffers;
  Pipeline<Epilogue::kBuffers> pipeline;

  __device__ EpilogueBuffers(uint32_t shared, const typename S::Mainloop& mainloop, int consumer)
      : buffers(shared + S::kFirstBuffer +
                consumer * (Epilogue::kBuffers * Epilogue::kSubtileBytes)),
        pipeline{mainloop.pipeline.end() + consumer * Pipeline<Epilogue::kBuffers>::kBytes} {}
  __device__ uint32_t buffer(int stage) const { return buffers + stage * Epilogue::kSubtileBytes; }
};

// Iterates over a consumer's subtiles: those of a tile's upper 64 rows, then the lower ones.
template <GemmEpilogue Epilogue>
class SubtileIterator {
 public:
  __device__ SubtileIterator(const TileScheduler& tiles, int consumer)
      : tiles_(tiles), tile_(static_cast<int>(blockIdx.x + consumer * gridDim.x)) {
    find_tile();
  }
  __device__ bool done() const { return tile_ >= tiles_.count(); }
  __device__ void next() {
    if (++subtile_ < 2 * S::kSubtiles) return;
    subtile_ = 0;
    tile_ += S::kConsumers * static_cast<int>(gridDim.x);
    find_tile();
  }
  __device__ int row() const {
    return coordinates_.row * S::Mainloop::kRows + subtile_ / S::kSubtiles * kSubtileRows;
  }
  __device__ int column() const {
    return coordinates_.column * S::Mainloop::kTileColumns +
           subtile_ % S::kSubtiles * kSubtileColumns;
  }

 private:
  using S = GemmShape<Epilogue>;
  __device__ void find_tile() {
    if (!done()) coordinates_ = tiles_.tile(tile_);
  }
  const TileScheduler& tiles_;
  int tile_, subtile_ = 0;
  TileCoordinates coordinates_{};
};

// One thread stores a consumer's subtiles and loads the inputs of the next ones.
template <GemmEpilogue Epilogue>
__device__ __forceinline__ void run_epilogue_copies(const GemmArguments<Epilogue>& args,
                                                    const EpilogueBuffers<Epilogue>& memory,
                                                    int consumer) {
  SubtileIterator<Epilogue> next(args.tiles, consumer);
  const auto load_next = [&](int stage) {
    if (next.done()) return;
    args.epilogue.load(memory.buffer(stage), next.row(), next.column(),
                       memory.pipeline.full(stage));
    next.next();
  };
  for (int stage = 0; stage < Epilogue::kBuffers; ++stage) load_next(stage);
  int iteration = Epilogue::kBuffers;  // the next load
#pragma unroll 1
  for (SubtileIterator<Epilogue> it(args.tiles, consumer); !it.done(); it.next(), ++iteration) {
    const PipelineState<Epilogue::kBuffers> state(iteration);
    memory.pipeline.producer_acquire(state);
    args.epilogue.store(memory.buffer(state.index), it.row(), it.column());
    bulk_commit();
    bulk_wait_read();
    load_next(state.index);
  }
  bulk_wait();
}

// A consumer warpgroup processes every second tile of the block.
template <GemmEpilogue Epilogue>
__device__ __forceinline__ void consume_tiles(const GemmArguments<Epilogue>& args,
                                              const typename Epilogue::Mainloop& mainloop,
                                              const EpilogueBuffers<Epilogue>& memory,
                                              int consumer) {
  using S = GemmShape<Epilogue>;
  const int stride = static_cast<int>(gridDim.x);
  const int steps = args.first.steps + args.second.steps;
  int number = consumer, subtile = 0;
  const auto run_epilogue = [&](const auto& accumulators, int column) {
#pragma unroll
    for (int i = 0; i < S::kSubtiles; ++i) {
      const PipelineState<Epilogue::kBuffers> state(subtile++);
      memory.pipeline.consumer_wait(state);
      args.epilogue.compute(i, accumulators, memory.buffer(state.index),
                            column + kSubtileColumns * i);
      memory.pipeline.consumer_release_fenced(state);
    }
  };
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x) + consumer * stride; tile < args.tiles.count();
       tile += S::kConsumers * stride, number += S::kConsumers) {
    typename S::Mainloop::Accumulators upper, lower;
    // The other consumer's turn ends when it has issued its matmuls, if the block has a next tile.
    // Testing the stages' barriers earlier would confuse their phases.
    if (number > 0) named_barrier(1 + consumer, S::kConsumers * kWarpgroup);
    mainloop.multiply(upper, lower, number * steps, steps, [&] {
      if (tile + stride < args.tiles.count())
        named_arrive(2 - consumer, S::kConsumers * kWarpgroup);
    });
    const int column = args.tiles.tile(tile).column * S::Mainloop::kTileColumns;
    run_epilogue(upper, column);
    run_epilogue(lower, column);
  }
}

template <GemmEpilogue Epilogue>
__global__ void __launch_bounds__(GemmShape<Epilogue>::kThreads, 1)
    gemm_kernel(const __grid_constant__ GemmArguments<Epilogue> args) {
  using S = GemmShape<Epilogue>;
  extern __shared__ __align__(1024) char memory[];
  const uint32_t shared = shared_address(memory);
  const typename S::Mainloop mainloop{shared, {shared + S::kBarriers}};
  launch_dependent_grids();
  if (threadIdx.x == 0) {
    mainloop.pipeline.init(1, 4);
    for (int consumer = 0; consumer < S::kConsumers; ++consumer)
      EpilogueBuffers<Epilogue>(shared, mainloop, consumer).pipeline.init(1, 4);
    tma_prefetch(&args.first.a);
    tma_prefetch(&args.first.b);
  }
  // With early steps only the producer waits: the others have their data from it.
  if (args.early_steps == 0) wait_on_dependent_grids();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    deallocate_registers<S::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x % 32 != 0 || warp > S::kConsumers) return;
    if (warp > 0)
      return run_epilogue_copies<Epilogue>(args, {shared, mainloop, warp - 1}, warp - 1);
    int iteration = 0;
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.x); i < args.tiles.count();
         i += static_cast<int>(gridDim.x)) {
      const TileCoordinates tile = args.tiles.tile(i);
#pragma unroll 1
      for (int step = 0; step < args.first.steps; ++step) {
        if (iteration == args.early_steps) wait_on_dependent_grids();
        mainloop.load(args.first.a, args.first.b, tile, step, iteration++);
      }
#pragma unroll 1
      for (int step = 0; step < args.second.steps; ++step)
        mainloop.load(args.second.a, args.second.b, tile, step, iteration++);
    }
    return;
  }
  allocate_registers<S::kConsumerRegisters>();
  const int consumer = uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1);
  consume_tiles<Epilogue>(args, mainloop, {shared, mainloop, consumer}, consumer);
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
  const cuuint64_t half_bytes = cols * sizeof(bf16);
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(RowOffsets(t).outer) * sizeof(bf16);
  return make_tensor_map(
      {.t = t,
       .sizes = {cols, rows, static_cast<cuuint64_t>(halves), 1},
       .strides = {row_bytes, half_bytes, row_bytes * rows},
       .box = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows), 1, 1}});
}
// Tensor map of two stacked halves, [2, rows, cols], with boxes of box_rows of both.
inline CUtensorMap stacked_tensor_map(const Tensor& w, int box_rows) {
  const auto rows = static_cast<cuuint64_t>(w.rows() / 2), cols = static_cast<cuuint64_t>(w.cols());
  const cuuint64_t row_bytes = cols * sizeof(bf16), half_bytes = row_bytes * rows;
  return make_tensor_map({.t = w,
                          .sizes = {cols, rows, 2, 1},
                          .strides = {row_bytes, half_bytes, half_bytes * 2},
                          .box = {64, static_cast<cuuint32_t>(box_rows), 2, 1}});
}

struct GemmOperands {
  const Tensor &a, &b;  // [M, K], and B in the layout of the mainloop
  // The last columns of a, written by the kernel right before, which starts when the others exist.
  int64_t tail = 0;
};

// Launches the GEMM of `first`, and of `second` if its tensors are defined; C has `columns` columns
// (per half if B is stacked).
template <GemmEpilogue Epilogue>
void launch_gemm(const char* name, const GemmOperands& first, const GemmOperands& second,
                 int64_t columns, const Epilogue& epilogue) {
  using S = GemmShape<Epilogue>;
  using Mainloop = typename S::Mainloop;
  const auto tiles_along = [](int64_t size, int tile) {
    return static_cast<int>((size + tile - 1) / tile);
  };
  const auto maps = [&](const GemmOperands& in) -> OperandMaps {
    if (!in.a.defined()) return {};
    return {.a = matrix_tensor_map(in.a, 1, Mainloop::kRows, Mainloop::kStep),
            .b = Mainloop::kStacked ? stacked_tensor_map(in.b, Mainloop::kTileColumns)
                                    : matrix_tensor_map(in.b, 1, Mainloop::kStep, 64),
            .steps = tiles_along(in.a.cols(), Mainloop::kStep)};
  };
  const GemmArguments<Epilogue> args{
      .first = maps(first),
      .second = maps(second),
      .early_steps =
          first.tail > 0 ? static_cast<int>((first.a.cols() - first.tail) / Mainloop::kStep) : 0,
      .tiles = {.rows = tiles_along(first.a.rows(), Mainloop::kRows),
                .columns = tiles_along(columns, Mainloop::kTileColumns)},
      .epilogue = epilogue};
  const Device device = first.a.device();
  const int64_t blocks = std::min<int64_t>(int64_t{args.tiles.rows} * args.tiles.columns,
                                           ::cohort::cuda::gpu_properties(device).multiprocessors);
  launch(name, gemm_kernel<Epilogue>,
         {.grid = blocks_for(blocks, 1),
          .block = S::kThreads,
          .shared_bytes = S::kSharedBytes,
          .start = Start::kProgrammatic},
         device, args);
}

}  // namespace
}  // namespace cohort::kernels::cuda
