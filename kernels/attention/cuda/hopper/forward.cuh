// The attention forward on the tensor cores of sm_90, in the canonical order of attention.h and
// with the bits of attend.cuh, after FlashAttention-3 (Shah et al. 2024).
//
// A block has 64 query rows of one head for each of its warpgroups that compute. One more
// warpgroup, the producer, only copies: tiles of 128 keys and values into two stages each. Both
// sides meet at barriers in shared memory, a pair for each stage: full, and empty again.
//
// A warpgroup overlaps the two products of neighbouring tiles with the exponentials between them:
//
//   S(t + 1) = Q K(t + 1)^T and O += P(t) V(t) are issued;
//   while the second runs, S(t + 1) becomes P(t + 1), alpha;
//   O = alpha O, and so on.
//
// S, P and O stay in registers. Where a chunk of keys ends nothing overlaps: O and l are joined
// with those of the chunks before.
#pragma once

#include "kernels/attention/cuda/forward.cuh"
#include "kernels/attention/cuda/hopper/stages.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kHopperKeys = 128;

// kConsumers warpgroups compute. Registers a thread: what a block of so many threads starts with is
// the same for all; the producer gives up some of its own.
template <int kDim_>
struct HopperShape {
  static constexpr int kDim = kDim_, kConsumers = kDim == 64 ? 3 : 2;
  static constexpr int kRows = 64 * kConsumers, kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr int kTileBytes = 2 * kHopperKeys * kDim, kQueryBytes = 2 * 64 * kDim;
  static constexpr int kKeyTiles = kConsumers * kQueryBytes;
  static constexpr int kValueTiles = kKeyTiles + kStages * kTileBytes;
  static constexpr int kJoined = kValueTiles + kStages * kTileBytes;
  static constexpr int kBarriers = kJoined + static_cast<int>(joined_bytes(kRows, kDim));
  static constexpr int kBlockRows = kBarriers + 8 * (1 + 4 * kStages);  // a PackedRows
  static constexpr int kSharedBytes =
      kBlockRows + static_cast<int>(sizeof(PackedRows<__nv_bfloat16>));
};

// Addresses of barriers.
struct Barriers {
  uint32_t first;
  __device__ uint32_t queries() const { return first; }
  __device__ uint32_t keys(int stage) const { return first + 8 * (1 + stage); }
  __device__ uint32_t values(int stage) const { return first + 8 * (1 + kStages + stage); }
  __device__ uint32_t no_keys(int stage) const { return first + 8 * (1 + 2 * kStages + stage); }
  __device__ uint32_t no_values(int stage) const { return first + 8 * (1 + 3 * kStages + stage); }
};

template <class Shape>
__device__ __forceinline__ void produce(const PackedRows<__nv_bfloat16>& rows, uint32_t shared,
                                        const Barriers& barriers, int first_tile, int tiles) {
  constexpr int kDim = Shape::kDim;
  Producer producer;
#pragma unroll 1
  for (int w = 0; w < Shape::kConsumers; ++w)
    copy_rows<kDim, 64, kWarpgroup>(shared + w * Shape::kQueryBytes,
                                    [&](int r) { return rows.query(64 * w + r); });
  producer.submit(barriers.queries());
#pragma unroll 1
  for (int i = 0; first_tile + i < tiles; ++i) {
    const Turn turn(i);
    const int key0 = (first_tile + i) * kHopperKeys;
    const auto copy = [&](uint32_t to, const __nv_bfloat16* from) {
      copy_rows<kDim, kHopperKeys, kWarpgroup>(to, [&](int r) {
        const int64_t offset = rows.key_offset(key0 + r);
        return offset < 0 ? nullptr : from + offset;
      });
    };
    producer.wait_empty(barriers.no_keys(turn.stage), turn.parity ^ 1);
    copy(shared + Shape::kKeyTiles + turn.stage * Shape::kTileBytes, rows.k);
    producer.submit(barriers.keys(turn.stage));
    producer.wait_empty(barriers.no_values(turn.stage), turn.parity ^ 1);
    copy(shared + Shape::kValueTiles + turn.stage * Shape::kTileBytes, rows.v);
    producer.submit(barriers.values(turn.stage));
  }
  producer.finish();
}

template <class Shape>
class Consumer {
 public:
  __device__ Consumer(const PackedRows<__nv_bfloat16>& rows, const AttendParams& params,
                      uint32_t shared, const Barriers& barriers, const JoinedChunks& joined)
      : rows_(rows), params_(params), shared_(shared), barriers_(barriers), joined_(joined) {
    group_ = uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1);
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    row_ = 64 * group_ + 16 * warp;
    own_row_ = row_ + lane / 4;
    for (int r = 0; r < 2; ++r) visible_[r] = rows.visible(own_row_ + 8 * r);
    least_ = __reduce_min_sync(0xffffffffu, min(visible_[0], visible_[1]));
    hidden_ = __reduce_max_sync(0xffffffffu, max(visible_[0], visible_[1])) - params.window;
  }

  // Tiles [first_tile, tiles) of the block; this warpgroup's rows see some of [first, end) alone.
  __device__ __forceinline__ void run(int first_tile, int tiles) {
    const int last_row = min(rows_.count, 64 * group_ + 64) - 1;
    const bool any = 64 * group_ < rows_.count;
    const int seen = any ? rows_.visible(last_row) : 0;
    const int end = uniform((seen + kHopperKeys - 1) / kHopperKeys);
    const int before = any ? rows_.visible(64 * group_) - params_.window : 0;
    const int first = uniform(any ? max(first_tile, before / kHopperKeys) : first_tile);
#pragma unroll 1
    for (int tile = first_tile; tile < first; ++tile) pass(tile - first_tile);
    if (any) attend(first_tile, first, end);
#pragma unroll 1
    for (int tile = any ? end : first; tile < tiles; ++tile) pass(tile - first_tile);
  }

 private:
  static constexpr int kDim = Shape::kDim, kGroups = kHopperKeys / 16;
  static constexpr int kChunkTiles = static_cast<int>(kAttentionChunk) / kHopperKeys;

  // Lets a tile go by.
  __device__ __forceinline__ void pass(int i) {
    const Turn turn(i);
    barrier_wait(barriers_.keys(turn.stage), turn.parity);
    release(barriers_.no_keys(turn.stage));
    barrier_wait(barriers_.values(turn.stage), turn.parity);
    release(barriers_.no_values(turn.stage));
  }

  // S = Q K^T is issued.
  __device__ __forceinline__ void issue_scores(int i) {
    const Turn turn(i);
    barrier_wait(barriers_.keys(turn.stage), turn.parity);
    const uint32_t queries = shared_ + group_ * Shape::kQueryBytes;
    const uint32_t keys = shared_ + Shape::kKeyTiles + turn.stage * Shape::kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      wgmma<Read::kAlongRows, Read::kAlongRows>(s_, wgmma_factor(along_rows<64>(queries, k)),
                                                wgmma_factor(along_rows<kHopperKeys>(keys, k)),
                                                k > 0);
    wgmma_commit();
  }
  // O += P V is issued.
  __device__ __forceinline__ void issue_values(int i) {
    const Turn turn(i);
    barrier_wait(barriers_.values(turn.stage), turn.parity);
    const uint32_t values = shared_ + Shape::kValueTiles + turn.stage * Shape::kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kGroups; ++k)
      wgmma<Read::kAcrossRows>(o_, p_[k], wgmma_factor(across_rows(values, k), kHopperKeys * 128));
    wgmma_commit();
  }

  // S becomes P, unrounded, in place.
  __device__ __forceinline__ void softmax(int tile, float (&alpha)[2]) {
    const int key0 = tile * kHopperKeys;
    const int seen[2] = {visible_[0] - key0, visible_[1] - key0};
    const bool hides = hidden_ > key0;
    if (least_ >= key0 + kHopperKeys && !hides)
      softmax_step<kGroups, false>(s_, state_, alpha, params_, seen, kGroups, false);
    else
      softmax_step<kGroups, true>(s_, state_, alpha, params_, seen, kGroups, hides);
  }
  __device__ __forceinline__ void round_probabilities() {
#pragma unroll
    for (int k = 0; k < kGroups; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p_[k][i] = pack_bf16(s_[2 * k + i / 2][i % 2 * 2], s_[2 * k + i / 2][i % 2 * 2 + 1]);
  }

  __device__ __forceinline__ void attend(int first_tile, int first, int end) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[n][i] = 0;
    const int first_chunk = first / kChunkTiles;
    float alpha[2];
    barrier_wait(barriers_.queries(), 0);
    issue_scores(first - first_tile);
    wgmma_wait<0>();
    wgmma_hold(s_);
    release(barriers_.no_keys(Turn(first - first_tile).stage));
    softmax(first, alpha);
    round_probabilities();
#pragma unroll 1
    for (int tile = first;; ++tile) {
      const int i = tile - first_tile;
      if (tile + 1 == end) {
        issue_values(i);
        wgmma_wait<0>();
        wgmma_hold(o_);
        release(barriers_.no_values(Turn(i).stage));
        break;
      }
      issue_scores(i + 1);
      issue_values(i);
      wgmma_wait<1>();
      wgmma_hold(s_);
      release(barriers_.no_keys(Turn(i + 1).stage));
      const bool chunk_ends = (tile + 1) % kChunkTiles == 0;
      if (chunk_ends) {
        wgmma_wait<0>();
        wgmma_hold(o_);
        sum_parts(state_);
        if (tile / kChunkTiles > first_chunk)
          join_chunk<Shape>(o_, state_, rows_, joined_, own_row_);
        keep_chunk<Shape>(o_, state_, rows_, joined_, own_row_);
      }
      softmax(tile + 1, alpha);
      if (!chunk_ends) {
        wgmma_wait<0>();
        wgmma_hold(o_);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o_[n][e] *= alpha[e / 2];
      }
      release(barriers_.no_values(Turn(i).stage));
      round_probabilities();
    }
    sum_parts(state_);
    if ((end - 1) / kChunkTiles > first_chunk)
      join_chunk<Shape>(o_, state_, rows_, joined_, own_row_);
    // All warps of the group have read their queries, whose place the rows of O take.
    named_barrier(1 + group_, kWarpgroup);
    store_rows<Shape>(rows_, params_, o_, state_, shared_, row_);
  }

  const PackedRows<__nv_bfloat16>& rows_;
  const AttendParams& params_;
  const uint32_t shared_;
  const Barriers barriers_;
  const JoinedChunks joined_;
  int group_, row_, own_row_;
  int visible_[2], least_, hidden_;
  RowState state_;
  float s_[2 * kGroups][4], o_[kDim / 8][4];
  uint32_t p_[kGroups][4];
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    forward_hopper_kernel(const __grid_constant__ ForwardProblem<__nv_bfloat16> problem) {
  extern __shared__ __align__(1024) char memory[];
  const uint32_t shared = shared_address(memory);
  const Barriers barriers{shared + Shape::kBarriers};
  // Registers are for S, P and O: what describes the block lies in shared memory.
  auto& rows = *reinterpret_cast<PackedRows<__nv_bfloat16>*>(memory + Shape::kBlockRows);
  bool none = false;
  if (threadIdx.x < 32) {
    PackedRows<__nv_bfloat16> found;
    none = !problem.find(Shape::kRows, found);
    if (!none && threadIdx.x == 0) rows = found;
  }
  if (threadIdx.x == 0) {
    barrier_init(barriers.queries(), kWarpgroup);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(barriers.keys(stage), kWarpgroup);
      barrier_init(barriers.values(stage), kWarpgroup);
      barrier_init(barriers.no_keys(stage), 4 * Shape::kConsumers);
      barrier_init(barriers.no_values(stage), 4 * Shape::kConsumers);
    }
  }
  if (__syncthreads_or(none)) return;
  const int tiles = uniform((rows.keys + kHopperKeys - 1) / kHopperKeys);
  const int first_tile = uniform(rows.first_key / kHopperKeys);
  if (threadIdx.x < kWarpgroup) {
    release_registers<Shape::kProducerRegisters>();
    produce<Shape>(rows, shared, barriers, first_tile, tiles);
  } else {
    take_registers<Shape::kConsumerRegisters>();
    auto* const joined = reinterpret_cast<float*>(memory + Shape::kJoined);
    Consumer<Shape> consumer(rows, problem.params, shared, barriers,
                             {.o = joined, .states = joined + Shape::kRows * Shape::kDim});
    consumer.run(first_tile, tiles);
  }
}

}  // namespace

template <int kDim>
void run_forward_hopper(ForwardProblem<__nv_bfloat16> problem, Device device) {
  using Shape = HopperShape<kDim>;
  const int64_t slots = tile_slots(problem.tokens, problem.sequences, Shape::kRows);
  problem.slots = static_cast<int>(slots);
  launch("attention_forward", forward_hopper_kernel<Shape>,
         {blocks_for(slots * problem.heads, 1), Shape::kThreads, Shape::kSharedBytes}, device,
         problem);
}

}  // namespace cohort::kernels::cuda
