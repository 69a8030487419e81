// Rung 5 of the matrix product, for sm_90a alone: the tensor cores of Hopper at their full rate.
//
// One warpgroup, the producer, has the copy engine (TMA) bring 128 rows of A and 256 of B, 64
// columns at a time, into a ring of four stages in shared memory. Two more, the consumers,
// multiply: each has 64 of the rows, and its 64 x 256 sums stay in registers from the first step
// to the last (m64n256k16: the wider a product, the less of the bandwidth of shared memory it
// takes). A pair of barriers for each stage says when it is full and when it is empty again. The
// roles are those of warp specialization (Bauer et al. 2011, CudaDMA), in the form of CUTLASS's
// persistent kernels for Hopper.
//
// Blocks are persistent: each multiprocessor has one, which computes tiles of C one after the
// other, so that the producer already fills the stages for the next tile while the consumers write
// the last one. Tiles follow each other in groups of rows (grouped_tile()).
#include "bench/ladder/ladder.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace cohort::bench::ladder {
namespace {

using namespace kernels::cuda;
using Element = __nv_bfloat16;

constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = kWarpgroup * (kConsumers + 1);
constexpr int kRows = 64 * kConsumers, kColumns = 256, kStep = 64, kStages = 4;
// Registers of a thread: a block of 384 starts with 168 each, and the sum stays the same.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters == 168 * (kConsumers + 1));

// Shared memory: the stages, then half of each consumer's tile of C, then the barriers.
constexpr int kABytes = kRows * kStep * 2, kBBytes = kColumns * kStep * 2;
constexpr int kStageBytes = kABytes + kBBytes;
constexpr int kHalfColumns = kColumns / 2, kWarpHalfBytes = 16 * kHalfColumns * 2;
constexpr int kHalves = kStages * kStageBytes;
constexpr int kBarriers = kHalves + 4 * kConsumers * kWarpHalfBytes;
constexpr int kSharedBytes = kBarriers + 2 * kStages * 8;

// A and B as the copy engine sees them, in boxes of 64 columns of as many rows as a tile has.
struct Maps {
  CUtensorMap a, b;
};

// C in tiles.
struct Tiles {
  int m, n, steps, rows, columns;  // rows, columns: of tiles

  __device__ int count() const { return rows * columns; }
  __device__ TilePlace find(int i) const { return grouped_tile(i, rows, columns); }
};

// Goes round the stages; parity: that of the phase in which the barriers of a stage are.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Memory {
  uint32_t first;
  __device__ uint32_t a(int stage) const { return first + stage * kStageBytes; }
  __device__ uint32_t b(int stage) const { return a(stage) + kABytes; }
  __device__ uint32_t full(int stage) const { return first + kBarriers + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(kStages + stage); }
};

// One thread does all that the producer has to do.
__device__ __forceinline__ void produce(const Tiles& tiles, const Maps& maps,
                                        const Memory& memory) {
  Turn turn;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x); i < tiles.count(); i += static_cast<int>(gridDim.x)) {
    const auto [row, column] = tiles.find(i);
#pragma unroll 1
    for (int step = 0; step < tiles.steps; ++step, turn.next()) {
      barrier_wait(memory.empty(turn.stage), turn.parity ^ 1);
      const uint32_t full = memory.full(turn.stage);
      barrier_arrive_expect(full, kStageBytes);
      tma_load(memory.a(turn.stage), &maps.a, {{step * kStep, row * kRows, 0, 0}}, full);
      tma_load(memory.b(turn.stage), &maps.b, {{step * kStep, column * kColumns, 0, 0}}, full);
    }
  }
}

// The sums of a tile; `group`: which of the consumers this is. The products of a step are issued
// before those of the step before have ended, so that the tensor cores never wait.
__device__ __forceinline__ void multiply(float (&sums)[kColumns / 8][4], int steps, int group,
                                         const Memory& memory, Turn& turn) {
  // A warp's first thread says for all of its threads that they have done with a stage.
  const auto release = [&](int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(memory.empty(stage));
  };
  int last_stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, turn.next()) {
    barrier_wait(memory.full(turn.stage), turn.parity);
    const uint32_t a = memory.a(turn.stage) + static_cast<uint32_t>(group * (64 * 128));
    const uint32_t b = memory.b(turn.stage);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      wgmma<Read::kAlongRows, Read::kAlongRows>(sums, along_rows<kRows>(wgmma_factor(a), k),
                                                along_rows<kColumns>(wgmma_factor(b), k),
                                                step > 0 || k > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release(last_stage);
    last_stage = turn.stage;
  }
  wgmma_wait<0>();
  wgmma_hold(sums);
  release(last_stage);
}

// Writes a warp's 16 rows of C, half of the columns at a time: by way of its own piece of shared
// memory, where a thread puts pairs and finds chunks of 16 bytes, and a warp whole rows. Chunks are
// swapped around by the row's number, so that neither has conflicts of banks.
__device__ __forceinline__ void store(const float (&sums)[kColumns / 8][4], char* piece, Element* c,
                                      const Tiles& tiles, int row0, int column0) {
  constexpr int kChunks = kHalfColumns / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, group = lane / 4, quad = lane % 4;
  const auto chunk_at = [&](int row, int chunk) {
    return piece + row * (kHalfColumns * 2) + ((chunk ^ (row & 7)) << 4);
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __syncwarp();  // what the piece held before is read
#pragma unroll
    for (int n = 0; n < kChunks; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* const pair = sums[half * kChunks + n] + 2 * r;
        *reinterpret_cast<uint32_t*>(chunk_at(group + 8 * r, n) + 4 * quad) =
            pack_bf16(pair[0], pair[1]);
      }
    __syncwarp();
    const int chunk = lane % kChunks, column = column0 + half * kHalfColumns + 8 * chunk;
#pragma unroll
    for (int r = lane / kChunks; r < 16; r += 32 / kChunks) {
      const auto words = load_pack<4>(reinterpret_cast<const uint32_t*>(chunk_at(r, chunk)));
      if (row0 + r < tiles.m && column < tiles.n)
        store_pack(reinterpret_cast<uint32_t*>(c + int64_t{row0 + r} * tiles.n + column), words);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    wgmma_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Tiles tiles,
                 Element* c) {
  extern __shared__ __align__(1024) char memory[];
  const Memory at{shared_address(memory)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(at.full(stage), 1);
      barrier_init(at.empty(stage), 4 * kConsumers);
    }
    tma_prefetch(&maps.a);
    tma_prefetch(&maps.b);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(tiles, maps, at);
    return;
  }
  take_registers<kConsumerRegisters>();
  // The same for all threads of a warp, which the compiler sees by the shuffle.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 - 4, 0);
  float sums[kColumns / 8][4];
  Turn turn;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x); i < tiles.count(); i += static_cast<int>(gridDim.x)) {
    multiply(sums, tiles.steps, warp / 4, at, turn);
    const auto [row, column] = tiles.find(i);
    store(sums, memory + kHalves + warp * kWarpHalfBytes, c, tiles, row * kRows + 16 * warp,
          column * kColumns);
  }
}

CUtensorMap describe(const Tensor& t, int box_rows) {
  const auto rows = static_cast<cuuint64_t>(t.dim(0)), columns = static_cast<cuuint64_t>(t.dim(1));
  const cuuint64_t row_bytes = columns * sizeof(Element), bytes = rows * row_bytes;
  return tma_describe({.t = t,
                       .sizes = {columns, rows, 1, 1},
                       .strides = {row_bytes, bytes, bytes},
                       .box = {kStep, static_cast<cuuint32_t>(box_rows), 1, 1}});
}

}  // namespace

bool has_wgmma(Device device) {
  return ::cohort::cuda::is_hopper(device);
}

void matmul_wgmma(const Product& p) {
  p.check();
  const auto up = [](int size, int tile) { return (size + tile - 1) / tile; };
  const Tiles tiles{.m = p.m(),
                    .n = p.n(),
                    .steps = up(p.k(), kStep),
                    .rows = up(p.m(), kRows),
                    .columns = up(p.n(), kColumns)};
  const int64_t count = int64_t{tiles.rows} * tiles.columns;
  const Device device = p.c.device();
  launch("matmul_wgmma", wgmma_kernel,
         {blocks_for(std::min<int64_t>(count, ::cohort::cuda::multiprocessors(device)), 1),
          kThreads, kSharedBytes},
         device, Maps{describe(p.a, kRows), describe(p.b, kColumns)}, tiles, pointer<Element>(p.c));
}

}  // namespace cohort::bench::ladder
