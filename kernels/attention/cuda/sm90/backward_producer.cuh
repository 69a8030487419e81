// The producer of the attention backward on sm_90 (backward.cuh): the steps of a block, the loads
// of its keys and of the queries that see them, and the ordered additions to dQ.
#pragma once

#include <algorithm>

#include "kernels/attention/cuda/sm90/query_tiles.cuh"
#include "kernels/attention/cuda/sm90/stages.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kConsumers = 2;  // warpgroups
constexpr int kDqBuffers = 2;  // tiles of dQ being stored, with one thread each

// Barriers, from shared address `own_full` on. The block's own tiles are loaded once; `tail`: TMA
// loads of a tile at the end of a sequence are complete, and its rows beyond the end can be zeroed.
struct BackwardPipelines {
  static constexpr int kBarrier = sizeof(uint64_t);
  static constexpr int kBytes =
      2 * kBarrier + 3 * Pipeline<kStages>::kBytes + Pipeline<kDqBuffers, kConsumers>::kBytes;
  uint32_t own_full, tail = own_full + kBarrier;
  Pipeline<kStages> queries{tail + kBarrier}, dout{queries.end()}, scores{dout.end()};
  Pipeline<kDqBuffers, kConsumers> dq{scores.end()};  // each consumer has half of a tile
};

template <int kDim_, bool kMasks = false>
struct BackwardShape {
  static constexpr int kDim = kDim_, kColumns = kPanelColumns<kDim>;
  static constexpr int kOwnKeys = 128, kStep = kDim == 64 ? 128 : 64;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  // The producer of a tile mask looks for visible tiles.
  static constexpr int kProducerRegisters = kDim == 64 && !kMasks ? 24 : 40;
  static constexpr int kConsumerRegisters = kDim == 64 && !kMasks ? 240 : 232;
  static constexpr int kOwnBytes = 2 * kOwnKeys * kColumns, kStepBytes = 2 * kStep * kColumns;
  static constexpr int kScoreBytes = 2 * kOwnKeys * kStep;
  // Half of a tile of dQ, 64 x 64 in f32: one per warpgroup.
  static constexpr int kHalfBytes = 4 * 64 * 64;
  static_assert(2 * kHalfBytes == 4 * kStep * kColumns);
  static constexpr int kKeys = 0, kValues = kOwnBytes, kQueries = 2 * kOwnBytes;
  static constexpr int kDout = kQueries + kStages * kStepBytes;   // dO
  static constexpr int kScores = kDout + kStages * kStepBytes;    // dS
  static constexpr int kDq = kScores + kStages * kScoreBytes;     // dQ
  static constexpr int kLse = kDq + kDqBuffers * 2 * kHalfBytes;  // [kStages][kStep]
  static constexpr int kDelta = kLse + kStages * kStep * 4;
  static constexpr int kBarriers = kDelta + kStages * kStep * 4;
  static constexpr int kSteps = kBarriers + BackwardPipelines::kBytes;  // [kStages], see Step
  static constexpr int kSlice = kSteps + kStages * 16;
  static constexpr int kSharedBytes = kSlice + static_cast<int>(sizeof(BackwardSlice));
};

// Step metadata that the consumers need.
struct Step {
  int first_position;  // position of the first query of the stage
  int is_end;          // 1: end marker, there are no more steps
  int sequence, head;  // the queries'
};

// Tensor maps of make_head_map(), for tiles of keys and of queries.
struct BackwardMaps {
  CUtensorMap k, v, q, dout;
};
inline BackwardMaps make_backward_maps(const AttentionBackward& in, int keys, int queries) {
  return {.k = make_head_map(in.k, keys),
          .v = make_head_map(in.v, keys),
          .q = make_head_map(in.q, queries),
          .dout = make_head_map(in.dout, queries)};
}

// Iterates over the steps of a block: over the sequences whose queries see its keys, the heads of
// its slice, and tiles of queries. All warps of a block iterate in the same order.
template <class Shape, class Args>
class StepIterator {
 public:
  __device__ StepIterator(const Args& args, const BackwardSlice& slice)
      : args_(args),
        slice_(slice),
        stream_(slice.stream),
        sequence_(slice.index),
        head_(first_head(slice.head_slice)),
        step_(stream_.steps.first) {
    if constexpr (decltype(args.rule)::kMasks) done_ = step_ >= stream_.steps.end;
  }
  __device__ bool done() const { return done_; }
  __device__ void next() {
    step_ = next_step<Pass::kKeys>(args_.rule, {slice_.own, slice_.own + Shape::kOwnKeys},
                                   step_ + 1, stream_.steps.end, Shape::kStep);
    if (step_ < stream_.steps.end) return;
    if (++head_ == first_head(slice_.head_slice + 1)) {
      done_ = !next_stream(args_, slice_, sequence_, stream_, Shape::kOwnKeys, Shape::kStep);
      head_ = first_head(slice_.head_slice);
    }
    step_ = stream_.steps.first;
  }
  __device__ const BackwardStream& stream() const { return stream_; }
  __device__ int sequence() const { return sequence_; }
  __device__ int head() const { return head_; }
  __device__ int query0() const { return step_ * Shape::kStep; }
  __device__ int rows() const { return stream_.length - query0(); }  // remaining, from query0() on
  __device__ int64_t tile(const QueryTiles& tiles) const {
    return tiles.tile<Shape::kStep>(head_, stream_.begin, sequence_, query0());
  }

 private:
  // Computed on use, since registers are scarce.
  __device__ int first_head(int slice) const {
    return slice_.head * args_.group() + args_.slice_begin(slice);
  }

  const Args& args_;
  const BackwardSlice& slice_;
  BackwardStream stream_;
  int sequence_, head_, step_;
  bool done_ = false;
};

// Number of blocks that add to a tile of dQ before this one: those with later keys of the same
// sequence that the queries see, then those with later keys of its prefix.
template <class Shape, class Args>
__device__ __forceinline__ int dq_order(const Args& args, const BackwardSlice& slice,
                                        const StepIterator<Shape, Args>& it) {
  constexpr int kOwnKeys = Shape::kOwnKeys, kStep = Shape::kStep;
  const BackwardStream& stream = it.stream();
  const int query0 = it.query0(), end = min(query0 + kStep, stream.length);
  // Tiles of keys of the queries' own sequence that they see.
  const IndexRange<int> tiles = args.rule.bind(it.sequence(), it.head(), stream.length)
                                    .keys_of({query0, end}, stream.length)
                                    .tiles(kOwnKeys);
  const int tile = slice.own / kOwnKeys;
  if constexpr (decltype(args.rule)::kMasks)
    if (it.sequence() == slice.index) return args.rule.count_tiles(query0, tile + 1, tiles.end);
  if (it.sequence() == slice.index) return tiles.end - 1 - tile;
  return tiles.end - tiles.first + (slice.sequence.length - 1) / kOwnKeys - tile;
}

// Starts a TMA load of kRows rows of a head, from `token` on; `barrier` must expect the bytes.
template <int kColumns, int kRows>
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                          int token, int head) {
#pragma unroll 1
  for (int panel = 0; panel < kColumns / 64; ++panel)
    tma_load(to + panel * (kRows * 128), &map, {{64 * panel, head, token, 0}}, barrier);
}

// The first warp zeroes the rows of a tile from `row` on, before it arrives at the full barrier.
template <int kColumns, int kRows>
__device__ __forceinline__ void clear_rows(uint32_t tile, int row) {
  for (int panel = 0; panel < kColumns / 64; ++panel)
    for (int at = row * 128 + static_cast<int>(threadIdx.x) * 16; at < kRows * 128; at += 32 * 16)
      asm volatile(
          "st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(tile + panel * (kRows * 128) + at),
          "r"(0)
          : "memory");
  fence_proxy_async();
  __syncwarp();
}

// Producer warp: loads the block's keys and values. A tile at the end of a sequence is loaded with
// the rows that follow it, which must be zeroed before the consumers read it: it first completes on
// the `tail` barrier.
template <class S>
__device__ __forceinline__ void load_own(const BackwardSlice& slice, const BackwardMaps& maps,
                                         uint32_t shared, const BackwardPipelines& pipelines) {
  constexpr int kColumns = S::kColumns, kOwnKeys = S::kOwnKeys;
  const bool first = threadIdx.x == 0;
  const int own_rows = slice.sequence.length - slice.own;
  if (first) {
    const uint32_t barrier = own_rows >= kOwnKeys ? pipelines.own_full : pipelines.tail;
    barrier_expect_tx(barrier, 2 * S::kOwnBytes);
    const int token = slice.sequence.begin + slice.own;
    load_tile<kColumns, kOwnKeys>(shared + S::kKeys, maps.k, barrier, token, slice.head);
    load_tile<kColumns, kOwnKeys>(shared + S::kValues, maps.v, barrier, token, slice.head);
    if (own_rows >= kOwnKeys) barrier_arrive(barrier);
  }
  if (own_rows < kOwnKeys) {
    if (first) barrier_arrive_and_wait(pipelines.tail);
    __syncwarp();
    clear_rows<kColumns, kOwnKeys>(shared + S::kKeys, own_rows);
    clear_rows<kColumns, kOwnKeys>(shared + S::kValues, own_rows);
    if (first) barrier_arrive(pipelines.own_full);
  }
}

// Producer warp: loads the keys and values, then the queries of all steps.
template <class S, class Args>
__device__ __forceinline__ void load_streams(const Args& args, const BackwardSlice& slice,
                                             const BackwardMaps& maps, const QueryTiles& tiles,
                                             char* memory, const BackwardPipelines& pipelines) {
  constexpr int kColumns = S::kColumns, kStep = S::kStep;
  const uint32_t shared = shared_address(memory);
  const bool first = threadIdx.x == 0;
  load_own<S>(slice, maps, shared, pipelines);
  auto* const steps = reinterpret_cast<Step*>(memory + S::kSteps);
  int i = 0;
#pragma unroll 1
  for (StepIterator<S, Args> it(args, slice); !it.done(); it.next(), ++i) {
    const PipelineState<kStages> state(i);
    const int s = state.index;
    const uint32_t queries = shared + S::kQueries + s * S::kStepBytes;
    const uint32_t dout = shared + S::kDout + s * S::kStepBytes;
    const auto load = [&](uint32_t to, const CUtensorMap& map, uint32_t full,
                          uint32_t to_statistics, const float* statistics) {
      const int token = it.stream().begin + it.query0();
      barrier_expect_tx(full, 4 * kStep);
      bulk_load(to_statistics, statistics + kStep * it.tile(tiles), 4 * kStep, full);
      const uint32_t rows_barrier = it.rows() >= kStep ? full : pipelines.tail;
      barrier_expect_tx(rows_barrier, S::kStepBytes);
      load_tile<kColumns, kStep>(to, map, rows_barrier, token, it.head());
    };
    pipelines.queries.producer_acquire(state);
    if (first) {
      load(queries, maps.q, pipelines.queries.full(s), shared + S::kLse + s * kStep * 4,
           tiles.lse_log2);
      steps[s] = {it.stream().position + it.query0(), 0, it.sequence(), it.head()};
      if (it.rows() >= kStep) pipelines.queries.producer_commit(state);
    }
    pipelines.dout.producer_acquire(state);
    if (first) {
      load(dout, maps.dout, pipelines.dout.full(s), shared + S::kDelta + s * kStep * 4,
           tiles.delta);
      if (it.rows() >= kStep) pipelines.dout.producer_commit(state);
    }
    if (it.rows() < kStep) {
      if (first) barrier_arrive_and_wait(pipelines.tail);
      __syncwarp();
      // Queries beyond the end are all zeros: P = 1, but dO = 0 and dS = 0.
      clear_rows<kColumns, kStep>(queries, it.rows());
      clear_rows<kColumns, kStep>(dout, it.rows());
      if (first) {
        pipelines.queries.producer_commit(state);
        pipelines.dout.producer_commit(state);
      }
    }
  }
  const PipelineState<kStages> state(i);
  pipelines.queries.producer_acquire(state);
  if (!first) return;
  steps[state.index].is_end = 1;
  pipelines.queries.producer_commit(state);
}

// Thread of buffer `buffer`: adds the dQ of every kDqBuffers-th step to its tile, when the
// semaphore of the tile reaches the position of the block in the order. An addition takes about as
// long as a step.
template <int kDim, class Args>
__device__ __forceinline__ void store_dq(const Args& args, const BackwardSlice& slice,
                                         const QueryTiles& out, uint32_t shared,
                                         const BackwardPipelines& pipelines, int buffer) {
  using S = BackwardShape<kDim>;
  int i = 0;
#pragma unroll 1
  for (StepIterator<S, Args> it(args, slice); !it.done(); it.next(), ++i) {
    const PipelineState<kDqBuffers> state(i);
    if (state.index != buffer) continue;
    const int64_t tile = it.tile(out);
    float* const to = out.dq_accum + tile * (S::kStep * S::kColumns);
    int32_t* const semaphore = out.dq_semaphores + tile;
    const int order = dq_order(args, slice, it);
    SpinLimit limit;
    for (int now = -1; now != order; limit.check())
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(now) : "l"(semaphore) : "memory");
    // Orders the bulk additions of other blocks before this one.
    asm volatile("fence.proxy.async.global;\n" ::: "memory");
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      pipelines.dq.consumer_wait(state, half);
      const uint32_t from = shared + S::kDq + (2 * buffer + half) * S::kHalfBytes;
      float* const to_half = to + half * (64 * 64);
      if (order == 0)
        bulk_store(to_half, from, S::kHalfBytes);
      else
        bulk_reduce_add(to_half, from, S::kHalfBytes);
    }
    bulk_commit();
    bulk_wait_read();
    pipelines.dq.consumer_release(state);
    bulk_wait();
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;\n" ::"l"(semaphore) : "memory");
  }
}

}  // namespace
}  // namespace cohort::kernels::cuda
