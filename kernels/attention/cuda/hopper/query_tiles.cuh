// What the backward on sm_90 keeps of queries beside the tensors of the call: numbers, and sums of
// dQ. A kernel before the others fills in the numbers.
#pragma once

#include <bit>

#include "kernels/attention/cuda/backward.cuh"

namespace cohort::kernels::cuda {
namespace {

// What belongs to queries, in tiles of kStep of a sequence, so that the copy engine can read a
// tile's numbers; see find_tile() for slots. Zeros follow the last query of a sequence.
struct QueryTiles {
  float *lse_log2, *delta;  // [heads, slots, kStep]: lse log2(e), and dO . O
  float* sums;              // [heads, slots, kStep, columns of whole panels]: of dQ
  int32_t* turns;           // [heads, slots]: whose turn it is at the sums
  int slots;
  int heads_at_once;  // that fit the L2 cache, see find_share()

  // The tile of a sequence in which `query` is.
  template <int kStep>
  __device__ __forceinline__ int64_t tile(int head, int begin, int sequence, int query) const {
    return static_cast<int64_t>(head) * slots + begin / kStep + sequence + query / kStep;
  }
};

// Kernels whose blocks have a tile of queries of one head each.
constexpr int kTileThreads = 256;

// A tile's numbers, and its first turn. kLanes neighbouring threads have 8 elements of a row each.
template <int kDim, int kStep>
__global__ void __launch_bounds__(kTileThreads)
    query_numbers_kernel(const __grid_constant__ BackwardArgs<__nv_bfloat16> args,
                         const __grid_constant__ QueryTiles out) {
  start_beside_previous();
  constexpr int kLanes = std::bit_ceil(kDim / 8u);
  const int head = static_cast<int>(blockIdx.x) % args.heads;
  const int slot = static_cast<int>(blockIdx.x) / args.heads;
  const SequenceTile tile = find_tile(args.cu, args.sequences, slot, kStep);
  const int64_t number = static_cast<int64_t>(head) * out.slots + slot;
  if (out.turns != nullptr && threadIdx.x == 0) out.turns[number] = 0;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll
  for (int first = 0; first < kStep; first += kTileThreads / kLanes) {
    const int row = first + static_cast<int>(threadIdx.x) / kLanes;
    const int query = tile.tile * kStep + row;
    const bool live = query < tile.length;
    const int64_t token = tile.begin + query;
    float sum = 0;
    if (live && 8 * lane < args.head_dim) {
      const int64_t at = (token * args.heads + head) * args.head_dim + 8 * lane;
      const auto dout = load_pack<8>(args.dout.data + at), o = load_pack<8>(args.o + at);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = __fmaf_rn(to_float(dout.v[e]), to_float(o.v[e]), sum);
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane > 0) continue;
    out.delta[number * kStep + row] = sum;
    out.lse_log2[number * kStep + row] = live ? args.lse[head * args.tokens + token] * kLog2e : 0;
  }
}

// Fills the numbers of all tiles, which lie in `memory` from then on.
template <int kDim, int kStep>
QueryTiles make_query_tiles(const BackwardArgs<__nv_bfloat16>& args, Tensor& memory, int32_t* turns,
                            Device device) {
  const int64_t slots = tile_slots(args.tokens, args.sequences, kStep);
  memory = Tensor::empty(Shape{2, args.heads * slots, kStep}, DType::kF32, device);
  float* const numbers = pointer<float>(memory);
  const QueryTiles tiles{.lse_log2 = numbers,
                         .delta = numbers + args.heads * slots * kStep,
                         .turns = turns,
                         .slots = static_cast<int>(slots)};
  launch("attention_backward_delta", query_numbers_kernel<kDim, kStep>,
         {.grid = blocks_for(slots * args.heads, 1),
          .block = kTileThreads,
          .start = Start::kBesidePrevious},
         device, args, tiles);
  return tiles;
}

}  // namespace
}  // namespace cohort::kernels::cuda
