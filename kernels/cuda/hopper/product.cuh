// Matrix products on the tensor cores of sm_90 with what comes after them: C = A op(B), sums in f32
// over ascending k in steps of 16 (product_order.h), of which a Result makes what goes to memory.
//
// One warpgroup, the producer, only has the copy engine at work: its first warp brings 128 rows of
// A and 192 columns of op(B), 64 of k at a time, into a ring of stages in shared memory. Two more
// warpgroups, the consumers, compute tiles of C in turns: while the products of one consumer's tile
// run, the other makes its results of the sums, parts of 64 rows and 32 columns, in one of two
// buffers in shared memory. Two more warps of the producer, one for each consumer, have the copy
// engine take them from there, and bring what the next parts need. So neither memory nor formulas
// keep the tensor cores waiting, which counts where k is short: a tile of a model with 896 channels
// has 14 steps. Blocks are persistent: each multiprocessor has one.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace cohort::kernels::cuda {
namespace {

using bf16 = __nv_bfloat16;

// How B lies in memory, K or N innermost, and which columns of C make a tile.
enum class Factor {
  kTwoRows,  // [2 F, K]: 96 of the first F, and the same 96 of the others
  kColumns   // [K, N]: 192
};

constexpr int kPartRows = 64, kPartColumns = 32, kPartBuffers = 2;

template <class Result>
struct ProductShape {
  static constexpr int kConsumers = 2, kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr int kRows = 2 * kPartRows, kColumns = 192, kStep = 64, kStages = 4;
  // Registers of a thread: a block of 384 starts with 168 each, and the sum stays the same.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kABytes = 2 * kRows * kStep, kBBytes = 2 * kColumns * kStep;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kPartsBegin = kStages * kStageBytes;
  static constexpr int kBarriers = kPartsBegin + kConsumers * kPartBuffers * Result::kPartBytes;
  static constexpr int kSharedBytes = kBarriers + 8 * (2 * kStages + 4 * kPartBuffers);
};

// A thread's part of 64 rows of a tile: sums[n][0 .. 3] as wgmma.cuh says.
using TileSums = float[24][4];

// A and B as the copy engine sees them.
struct ProductMaps {
  CUtensorMap a, b;
};

// C in tiles.
struct ProductTiles {
  int steps, rows, columns;  // of k; of tiles

  __device__ int count() const { return rows * columns; }
  __device__ TilePlace find(int i) const { return grouped_tile(i, rows, columns); }
};

// Addresses in shared memory.
template <class Result>
struct ProductMemory {
  using S = ProductShape<Result>;
  uint32_t first;
  __device__ uint32_t a(int stage) const { return first + stage * S::kStageBytes; }
  __device__ uint32_t b(int stage) const { return a(stage) + S::kABytes; }
  __device__ uint32_t part(int consumer, int buffer) const {
    return first + S::kPartsBegin + (consumer * kPartBuffers + buffer) * Result::kPartBytes;
  }
  // Barriers: factors are there, and have been used; a part may be made, and has been made.
  __device__ uint32_t full(int stage) const { return first + S::kBarriers + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(S::kStages + stage); }
  __device__ uint32_t ready(int consumer, int buffer) const {
    return full(2 * S::kStages + consumer * kPartBuffers + buffer);
  }
  __device__ uint32_t made(int consumer, int buffer) const {
    return ready(S::kConsumers + consumer, buffer);
  }
};

// One thread brings the factors.
template <class Result>
__device__ __forceinline__ void bring_factors(const ProductTiles& tiles, const ProductMaps& maps,
                                              const ProductMemory<Result>& memory) {
  using S = ProductShape<Result>;
  int number = 0;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x); i < tiles.count(); i += static_cast<int>(gridDim.x)) {
    const auto [row, column] = tiles.find(i);
#pragma unroll 1
    for (int step = 0; step < tiles.steps; ++step, ++number) {
      const Turn<S::kStages> turn(number);
      barrier_wait(memory.empty(turn.stage), turn.parity ^ 1);
      const uint32_t full = memory.full(turn.stage), b = memory.b(turn.stage);
      const int k = step * S::kStep, first = column * Result::kColumns;
      barrier_arrive_expect(full, S::kStageBytes);
      tma_load(memory.a(turn.stage), &maps.a, {{k, row * S::kRows, 0, 0}}, full);
      if constexpr (Result::kFactor == Factor::kColumns) {
        for (int p = 0; p < S::kColumns / 64; ++p)
          tma_load(b + p * (S::kStep * 128), &maps.b, {{first + 64 * p, k, 0, 0}}, full);
      } else {  // of both halves
        tma_load(b, &maps.b, {{k, first, 0, 0}}, full);
      }
    }
  }
}

// The parts that a consumer makes, one after the other: of the upper rows of a tile, then of the
// lower ones.
template <class Result>
class PartWalk {
 public:
  __device__ PartWalk(const ProductTiles& tiles, int consumer)
      : tiles_(tiles), tile_(static_cast<int>(blockIdx.x + consumer * gridDim.x)) {
    find();
  }
  __device__ bool done() const { return tile_ >= tiles_.count(); }
  __device__ void next() {
    if (++part_ < 2 * Result::kParts) return;
    part_ = 0;
    tile_ += ProductShape<Result>::kConsumers * static_cast<int>(gridDim.x);
    find();
  }
  __device__ int row() const {
    return place_.row * ProductShape<Result>::kRows + part_ / Result::kParts * kPartRows;
  }
  __device__ int column() const {
    return place_.column * Result::kColumns + part_ % Result::kParts * kPartColumns;
  }

 private:
  __device__ void find() {
    if (!done()) place_ = tiles_.find(tile_);
  }
  const ProductTiles& tiles_;
  int tile_, part_ = 0;
  TilePlace place_{};
};

// A thread takes a consumer's parts to memory, and brings what the next ones are made of.
template <class Result>
__device__ __forceinline__ void take_parts(const ProductTiles& tiles, const Result& result,
                                           const ProductMemory<Result>& memory, int consumer) {
  PartWalk<Result> ahead(tiles, consumer);
  const auto begin = [&](int buffer) {
    if (ahead.done()) return;
    result.begin(memory.part(consumer, buffer), ahead.row(), ahead.column(),
                 memory.ready(consumer, buffer));
    ahead.next();
  };
  for (int buffer = 0; buffer < kPartBuffers; ++buffer) begin(buffer);
  int number = 0;
#pragma unroll 1
  for (PartWalk<Result> walk(tiles, consumer); !walk.done(); walk.next(), ++number) {
    const Turn<kPartBuffers> turn(number);
    barrier_wait(memory.made(consumer, turn.stage), turn.parity);
    result.take(memory.part(consumer, turn.stage), walk.row(), walk.column());
    bulk_commit();
    bulk_wait_read();
    begin(turn.stage);
  }
  bulk_wait();
}

// A warpgroup that computes.
template <class Result>
class ProductConsumer {
 public:
  __device__ ProductConsumer(const ProductTiles& tiles, const Result& result,
                             const ProductMemory<Result>& memory)
      : tiles_(tiles),
        result_(result),
        memory_(memory),
        consumer_(uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1)) {}

  // Every other tile of the block.
  __device__ __forceinline__ void run() {
    const int stride = static_cast<int>(gridDim.x);
    int number = consumer_;
#pragma unroll 1
    for (int tile = static_cast<int>(blockIdx.x) + consumer_ * stride; tile < tiles_.count();
         tile += S::kConsumers * stride, number += S::kConsumers) {
      TileSums upper, lower;
      if (number > 0) named_barrier(1 + consumer_, S::kConsumers * kWarpgroup);
      multiply(upper, lower, number * tiles_.steps, tile + stride < tiles_.count());
      const int column = tiles_.find(tile).column * Result::kColumns;
      make(upper, column);
      make(lower, column);
    }
  }

 private:
  using S = ProductShape<Result>;
  static constexpr Read kRead =
      Result::kFactor == Factor::kColumns ? Read::kAcrossRows : Read::kAlongRows;

  // The sums of a tile, whose first step has this number among all of the block. When all steps are
  // issued it is the other consumer's turn, if there is another tile: it may not look at the
  // barriers of stages before, whose phases it would take for others.
  __device__ __forceinline__ void multiply(TileSums& upper, TileSums& lower, int first,
                                           bool another) {
#pragma unroll 1
    for (int step = 0; step < tiles_.steps; ++step) {
      const Turn<S::kStages> turn(first + step);
      barrier_wait(memory_.full(turn.stage), turn.parity);
      const WgmmaFactor a = wgmma_factor(memory_.a(turn.stage));
      const WgmmaFactor b = wgmma_factor(memory_.b(turn.stage), S::kStep * 128);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < S::kStep / 16; ++k) {
        const WgmmaFactor right =
            kRead == Read::kAlongRows ? along_rows<S::kColumns>(b, k) : across_rows(b, k);
        const WgmmaFactor left = along_rows<S::kRows>(a, k);
        wgmma<Read::kAlongRows, kRead>(upper, left, right, step > 0 || k > 0);
        wgmma<Read::kAlongRows, kRead>(lower, left.plus(kPartRows * 128), right, step > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(memory_.empty(Turn<S::kStages>(first + step - 1).stage));
    }
    if (another) named_arrive(2 - consumer_, S::kConsumers * kWarpgroup);
    wgmma_wait<0>();
    wgmma_hold(upper);
    wgmma_hold(lower);
    release(memory_.empty(Turn<S::kStages>(first + tiles_.steps - 1).stage));
  }

  // The parts of 64 rows.
  __device__ __forceinline__ void make(const TileSums& sums, int column) {
#pragma unroll
    for (int part = 0; part < Result::kParts; ++part) {
      const Turn<kPartBuffers> turn(part_number_++);
      const uint32_t at = memory_.part(consumer_, turn.stage);
      barrier_wait(memory_.ready(consumer_, turn.stage), turn.parity);
      result_.make(part, sums, at, column + kPartColumns * part);
      fence_before_tma();
      release(memory_.made(consumer_, turn.stage));
    }
  }

  const ProductTiles& tiles_;
  const Result& result_;
  const ProductMemory<Result> memory_;
  const int consumer_;
  int part_number_ = 0;
};

// A Result makes parts of 64 rows and 32 columns of the sums, in kPartBytes of shared memory:
//   kFactor, kColumns, kParts            which of B; columns of a tile, and parts of a row of it
//   make(part, sums, at, column)         columns 32 part to 32 part + 31 of the sums
//   begin(at, row, column, ready)        one thread arrives at `ready`, with what make() reads
//   take(at, row, column)                one thread starts copies of what make() has written
template <class Result>
__global__ void __launch_bounds__(ProductShape<Result>::kThreads, 1)
    product_kernel(const __grid_constant__ ProductMaps maps,
                   const __grid_constant__ ProductTiles tiles,
                   const __grid_constant__ Result result) {
  using S = ProductShape<Result>;
  extern __shared__ __align__(1024) char memory[];
  const ProductMemory<Result> at{shared_address(memory)};
  let_next_start();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < S::kStages; ++stage) {
      barrier_init(at.full(stage), 1);
      barrier_init(at.empty(stage), 4);
    }
    for (int consumer = 0; consumer < S::kConsumers; ++consumer)
      for (int buffer = 0; buffer < kPartBuffers; ++buffer) {
        barrier_init(at.ready(consumer, buffer), 1);
        barrier_init(at.made(consumer, buffer), 4);
      }
    tma_prefetch(&maps.a);
    tma_prefetch(&maps.b);
  }
  wait_for_previous();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    release_registers<S::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x % 32 != 0) return;
    if (warp == 0) bring_factors<Result>(tiles, maps, at);
    if (warp >= 1 && warp <= S::kConsumers) take_parts<Result>(tiles, result, at, warp - 1);
    return;
  }
  take_registers<S::kConsumerRegisters>();
  ProductConsumer<Result>(tiles, result, at).run();
}

// Where columns 2 quad and the next of a block of 8, number n of a part, lie in row r of a part of
// bf16 that the copy engine takes: rows of 64 bytes, whose chunks of 16 are swapped around.
__device__ __forceinline__ uint32_t pair_offset(int r, int n) {
  return static_cast<uint32_t>(r * 64 + ((n ^ (r >> 1 & 3)) << 4) +
                               static_cast<int>(threadIdx.x % 4) * 4);
}
// The thread's first row of a part; its second one is 8 further.
__device__ __forceinline__ int part_row() {
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

// A matrix of `halves` halves side by side, [rows, halves, cols], in boxes of `box_rows` rows of
// `box_cols` columns of one half.
inline CUtensorMap describe_matrix(const Tensor& t, int halves, int box_rows, int box_cols) {
  const auto rows = static_cast<cuuint64_t>(t.rows()),
             cols = static_cast<cuuint64_t>(t.cols() / halves);
  const cuuint64_t half_bytes = cols * sizeof(bf16), row_bytes = half_bytes * halves;
  return tma_describe(
      {.t = t,
       .sizes = {cols, rows, static_cast<cuuint64_t>(halves), 1},
       .strides = {row_bytes, half_bytes, row_bytes * rows},
       .box = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows), 1, 1}});
}
// Its halves one below the other, [2, rows, cols], in boxes of 96 rows of both.
inline CUtensorMap describe_two_rows(const Tensor& w) {
  const auto rows = static_cast<cuuint64_t>(w.rows() / 2), cols = static_cast<cuuint64_t>(w.cols());
  const cuuint64_t row_bytes = cols * sizeof(bf16), half_bytes = row_bytes * rows;
  return tma_describe({.t = w,
                       .sizes = {cols, rows, 2, 1},
                       .strides = {row_bytes, half_bytes, half_bytes * 2},
                       .box = {64, 96, 2, 1}});
}

// Launches the product of a [M, K] and b, whose C has `columns` columns, in each half.
template <class Result>
void run_product(const char* name, const Tensor& a, const Tensor& b, int64_t columns,
                 const Result& result) {
  using S = ProductShape<Result>;
  const auto tiles_of = [](int64_t size, int tile) {
    return static_cast<int>((size + tile - 1) / tile);
  };
  const ProductTiles tiles{.steps = tiles_of(a.cols(), S::kStep),
                           .rows = tiles_of(a.rows(), S::kRows),
                           .columns = tiles_of(columns, Result::kColumns)};
  const Device device = a.device();
  const int64_t blocks = std::min<int64_t>(int64_t{tiles.rows} * tiles.columns,
                                           ::cohort::cuda::multiprocessors(device));
  const ProductMaps maps{.a = describe_matrix(a, 1, S::kRows, S::kStep),
                         .b = Result::kFactor == Factor::kColumns
                                  ? describe_matrix(b, 1, S::kStep, 64)
                                  : describe_two_rows(b)};
  launch(name, product_kernel<Result>,
         {.grid = blocks_for(blocks, 1),
          .block = S::kThreads,
          .shared_bytes = S::kSharedBytes,
          .start = Start::kBesidePrevious},
         device, maps, tiles, result);
}

}  // namespace
}  // namespace cohort::kernels::cuda
