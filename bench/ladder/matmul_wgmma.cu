// Rung 5 of the GEMM, for sm_90a only: the tensor cores of Hopper at their full rate.
//
// One warpgroup, the producer, loads 128 rows of A and 256 of B, 64 columns at a time, by TMA into
// a pipeline of four stages in shared memory. Two more, the consumers, multiply: each has 64 of the
// rows, and its 64 x 256 accumulators stay in registers for the whole mainloop (m64n256k16: wider
// instructions need less shared memory bandwidth). Each stage has a full and an empty barrier. This
// is warp specialization (Bauer et al. 2011, CudaDMA) as in CUTLASS's persistent kernels for
// Hopper.
//
// Blocks are persistent: each multiprocessor has one, which computes tiles of C in sequence, so
// that the producer already fills the stages for the next tile while the consumers store the last
// one. Tiles are in grouped order (grouped_tile()).
#include "bench/ladder/ladder.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/sm90/tma.cuh"
#include "kernels/cuda/sm90/wgmma.cuh"

namespace cohort::bench::ladder {
namespace {

using namespace kernels::cuda;
using Element = __nv_bfloat16;

constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = kWarpgroup * (kConsumers + 1);
constexpr int kRows = 64 * kConsumers, kColumns = 256, kStep = 64, kStages = 4;
// Registers per thread: a block of 384 threads starts with 168 each; the total is preserved.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters == 168 * (kConsumers + 1));

// Shared memory: the stages, then half of each consumer's tile of C, then the barriers.
constexpr int kABytes = kRows * kStep * 2, kBBytes = kColumns * kStep * 2;
constexpr int kStageBytes = kABytes + kBBytes;
constexpr int kHalfColumns = kColumns / 2, kWarpHalfBytes = 16 * kHalfColumns * 2;
constexpr int kHalves = kStages * kStageBytes;
constexpr int kBarriers = kHalves + 4 * kConsumers * kWarpHalfBytes;
constexpr int kSharedBytes = kBarriers + 2 * kStages * 8;

// Tensor maps of A and B with boxes of 64 columns and the rows of a tile.
struct Maps {
  CUtensorMap a, b;
};

struct Tiles {
  int m, n, steps, rows, columns;  // rows, columns: numbers of tiles

  __device__ int count() const { return rows * columns; }
  __device__ TileCoordinates tile(int i) const { return grouped_tile(i, rows, columns); }
};

// Stage index and barrier phase.
struct PipelineState {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

struct SharedMemory {
  uint32_t first;
  __device__ uint32_t a(int stage) const { return first + stage * kStageBytes; }
  __device__ uint32_t b(int stage) const { return a(stage) + kABytes; }
  __device__ uint32_t full(int stage) const { return first + kBarriers + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(kStages + stage); }
};

// Producer loop of one thread.
__device__ __forceinline__ void run_producer(const Tiles& tiles, const Maps& maps,
                                             const SharedMemory& memory) {
  PipelineState state;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x); i < tiles.count(); i += static_cast<int>(gridDim.x)) {
    const auto [row, column] = tiles.tile(i);
#pragma unroll 1
    for (int step = 0; step < tiles.steps; ++step, state.next()) {
      barrier_wait(memory.empty(state.index), state.phase ^ 1);
      const uint32_t full = memory.full(state.index);
      barrier_arrive_expect_tx(full, kStageBytes);
      tma_load(memory.a(state.index), &maps.a, {{step * kStep, row * kRows, 0, 0}}, full);
      tma_load(memory.b(state.index), &maps.b, {{step * kStep, column * kColumns, 0, 0}}, full);
    }
  }
}

// Mainloop of consumer `group`. The wgmmas of a step are issued before those of the previous step
// have completed, so that the tensor cores never idle.
__device__ __forceinline__ void multiply(float (&accumulators)[kColumns / 8][4], int steps,
                                         int group, const SharedMemory& memory,
                                         PipelineState& state) {
  // One arrival per warp.
  const auto release_stage = [&](int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(memory.empty(stage));
  };
  int last_stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, state.next()) {
    barrier_wait(memory.full(state.index), state.phase);
    const uint32_t a = memory.a(state.index) + static_cast<uint32_t>(group * (64 * 128));
    const uint32_t b = memory.b(state.index);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      wgmma<Major::kK, Major::kK>(accumulators, k_major_step<kRows>(matrix_descriptor(a), k),
                                  k_major_step<kColumns>(matrix_descriptor(b), k),
                                  step > 0 || k > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release_stage(last_stage);
    last_stage = state.index;
  }
  wgmma_wait<0>();
  wgmma_fence_operand(accumulators);
  release_stage(last_stage);
}

// Stores a warp's 16 rows of C, half of the columns at a time, through its buffer in shared memory,
// so that the warp writes whole rows in chunks of 16 bytes. Chunks are swizzled to avoid bank
// conflicts.
__device__ __forceinline__ void store(const float (&accumulators)[kColumns / 8][4], char* buffer,
                                      Element* c, const Tiles& tiles, int row0, int column0) {
  constexpr int kChunks = kHalfColumns / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, group = lane / 4, quad = lane % 4;
  const auto chunk_address = [&](int row, int chunk) {
    return buffer + row * (kHalfColumns * 2) + ((chunk ^ (row & 7)) << 4);
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __syncwarp();  // the buffer may still be read
#pragma unroll
    for (int n = 0; n < kChunks; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* const pair = accumulators[half * kChunks + n] + 2 * r;
        *reinterpret_cast<uint32_t*>(chunk_address(group + 8 * r, n) + 4 * quad) =
            pack_bf16(pair[0], pair[1]);
      }
    __syncwarp();
    const int chunk = lane % kChunks, column = column0 + half * kHalfColumns + 8 * chunk;
#pragma unroll
    for (int r = lane / kChunks; r < 16; r += 32 / kChunks) {
      const auto words = load_pack<4>(reinterpret_cast<const uint32_t*>(chunk_address(r, chunk)));
      if (row0 + r < tiles.m && column < tiles.n)
        store_pack(reinterpret_cast<uint32_t*>(c + int64_t{row0 + r} * tiles.n + column), words);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    wgmma_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Tiles tiles,
                 Element* c) {
  extern __shared__ __align__(1024) char shared[];
  const SharedMemory memory{shared_address(shared)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(memory.full(stage), 1);
      barrier_init(memory.empty(stage), 4 * kConsumers);
    }
    tma_prefetch(&maps.a);
    tma_prefetch(&maps.b);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    deallocate_registers<kProducerRegisters>();
    if (threadIdx.x == 0) run_producer(tiles, maps, memory);
    return;
  }
  allocate_registers<kConsumerRegisters>();
  // The shuffle tells the compiler that the value is warp-uniform.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 - 4, 0);
  float accumulators[kColumns / 8][4];
  PipelineState state;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x); i < tiles.count(); i += static_cast<int>(gridDim.x)) {
    multiply(accumulators, tiles.steps, warp / 4, memory, state);
    const auto [row, column] = tiles.tile(i);
    store(accumulators, shared + kHalves + warp * kWarpHalfBytes, c, tiles, row * kRows + 16 * warp,
          column * kColumns);
  }
}

CUtensorMap operand_tensor_map(const Tensor& t, int box_rows) {
  const auto rows = static_cast<cuuint64_t>(t.dim(0)), columns = static_cast<cuuint64_t>(t.dim(1));
  const cuuint64_t row_bytes = columns * sizeof(Element), bytes = rows * row_bytes;
  return make_tensor_map({.t = t,
                          .sizes = {columns, rows, 1, 1},
                          .strides = {row_bytes, bytes, bytes},
                          .box = {kStep, static_cast<cuuint32_t>(box_rows), 1, 1}});
}

}  // namespace

bool has_wgmma(Device device) {
  return fits(kSm90a, ::cohort::cuda::gpu_properties(device));
}

void matmul_wgmma(const Gemm& p) {
  p.check();
  const auto tiles_along = [](int size, int tile) { return (size + tile - 1) / tile; };
  const Tiles tiles{.m = p.m(),
                    .n = p.n(),
                    .steps = tiles_along(p.k(), kStep),
                    .rows = tiles_along(p.m(), kRows),
                    .columns = tiles_along(p.n(), kColumns)};
  const int64_t count = int64_t{tiles.rows} * tiles.columns;
  const Device device = p.c.device();
  launch("matmul_wgmma", wgmma_kernel,
         {blocks_for(
              std::min<int64_t>(count, ::cohort::cuda::gpu_properties(device).multiprocessors), 1),
          kThreads, kSharedBytes},
         device, Maps{operand_tensor_map(p.a, kRows), operand_tensor_map(p.b, kColumns)}, tiles,
         pointer<Element>(p.c));
}

}  // namespace cohort::bench::ladder
