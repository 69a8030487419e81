// Per-query buffers of the backward on sm_90: statistics, which a preceding kernel computes, and
// accumulators of dQ.
#pragma once

#include <bit>

#include "kernels/attention/cuda/backward.cuh"

namespace cohort::kernels::cuda {
namespace {

// Per-query data in tiles of kStep queries of a sequence, so that the TMA can load the statistics
// of a tile; see find_tile() for slots. Zeros follow the last query of a sequence.
struct QueryTiles {
  float *lse_log2, *delta;  // [heads, slots, kStep]: lse log2(e), and dO . O
  float* dq_accum;          // [heads, slots, kStep, columns of whole panels]: dQ in f32
  int32_t* dq_semaphores;   // [heads, slots]: number of blocks that have added to dq_accum
  int32_t* blocks_started;
  int slots;
  int heads_at_once;  // heads that fit in the L2 cache; see find_slice()

  // Tile of a sequence that contains `query`.
  template <int kStep>
  __device__ __forceinline__ int64_t tile(int head, int begin, int sequence, int query) const {
    return static_cast<int64_t>(head) * slots + begin / kStep + sequence + query / kStep;
  }
};

// Byte offset in a half of a tile of dQ: packs of 16 bytes of row `row`, 64 columns, are swizzled
// by the row index against bank conflicts.
__device__ __forceinline__ int half_offset(int row, int pack) {
  return row * 256 + ((pack ^ (row % 8 * 2)) << 4);
}

// Threads of kernels with one tile of queries of one head per block.
constexpr int kTileThreads = 256;

// Computes the statistics of a tile, and resets its semaphore and the number of started blocks.
// kLanes adjacent threads have 8 elements of a row each.
template <int kDim, int kStep>
__global__ void __launch_bounds__(kTileThreads)
    query_statistics_kernel(const __grid_constant__ BackwardArgs<bf16> args,
                            const __grid_constant__ QueryTiles out) {
  launch_dependents_and_wait();
  constexpr int kLanes = std::bit_ceil(kDim / 8u);
  const int head = static_cast<int>(blockIdx.x) % args.heads;
  const int slot = static_cast<int>(blockIdx.x) / args.heads;
  const SequenceTile tile = find_tile(args.sequences, slot, kStep);
  const int64_t index = static_cast<int64_t>(head) * out.slots + slot;
  if (out.dq_semaphores != nullptr && threadIdx.x == 0) {
    out.dq_semaphores[index] = 0;
    if (index == 0) *out.blocks_started = 0;
  }
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll
  for (int first = 0; first < kStep; first += kTileThreads / kLanes) {
    const int row = first + static_cast<int>(threadIdx.x) / kLanes;
    const int query = tile.tile * kStep + row;
    const bool live = query < tile.sequence.length;
    const int token = tile.sequence.begin + query;
    float sum = 0;
    if (live && 8 * lane < args.head_dim) {
      const auto dout = load_pack<8>(args.dout.rows(token, head).data + 8 * lane);
      const auto o = load_pack<8>(args.o.rows(token, head).data + 8 * lane);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = __fmaf_rn(to_float(dout.v[e]), to_float(o.v[e]), sum);
    }
    sum = lane_reduce<kLanes>(sum, Plus{});
    if (lane > 0) continue;
    out.delta[index * kStep + row] = sum;
    out.lse_log2[index * kStep + row] = live ? args.lse[head * args.tokens + token] * kLog2e : 0;
  }
}

// Computes the statistics of all tiles, which are stored in `memory`. dq_semaphores: [heads, slots]
// and one more; null if the blocks do not wait for each other.
template <int kDim, int kStep>
QueryTiles make_query_tiles(const BackwardArgs<bf16>& args, Tensor& memory, int32_t* dq_semaphores,
                            Device device) {
  const int64_t slots = tile_slots(args.tokens, args.sequences.count, kStep);
  memory = Tensor::empty(Shape{2, args.heads * slots, kStep}, DType::kF32, device);
  float* const statistics = pointer<float>(memory);
  const QueryTiles tiles{
      .lse_log2 = statistics,
      .delta = statistics + args.heads * slots * kStep,
      .dq_semaphores = dq_semaphores,
      .blocks_started = dq_semaphores == nullptr ? nullptr : dq_semaphores + args.heads * slots,
      .slots = static_cast<int>(slots)};
  launch("attention_backward_delta", query_statistics_kernel<kDim, kStep>,
         {.grid = blocks_for(slots * args.heads, 1),
          .block = kTileThreads,
          .start = Start::kProgrammatic},
         device, args, tiles);
  return tiles;
}

}  // namespace
}  // namespace cohort::kernels::cuda
