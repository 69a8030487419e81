// The attention backward on the tensor cores of sm_90 for heads of more than 128 columns, whose dK
// and dV fill the registers of two warpgroups: dQ has a pass of its own, which makes seven matmuls,
// and no block adds to what another has written.
//
// dK and dV: a block owns 64 keys of one key head and streams the queries that see them, 64 at a
// time. The two warpgroups divide the matmuls:
//
//   first    S^T = K Q^T,    P^T = exp2(c S^T - lse log2(e)),   dV += P^T dO
//   second   dP^T = V dO^T,  dS^T = P^T (dP^T - delta),         dK += dS^T Q
//
// P^T is passed from one to the other through shared memory, in f32: each thread reads what its
// counterpart has written. Accumulators, and the rounded operands P^T and dS^T, stay in registers.
//
// dQ: a block owns 128 queries of one head, 64 per warpgroup, and streams the keys that they see,
// 64 at a time: S = Q K^T, dP = dO V^T, dS, dQ += dS K.
//
// The last matmul of a step overlaps with the first ones of the next.
#pragma once

#include "kernels/attention/cuda/sm90/backward.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kWideTile = 64;  // keys or queries of a tile, and of a step
constexpr int kWideThreads = kWarpgroup * (1 + kConsumers);

// c = 64 rows of `a` times 64 rows of `b`, over the head dim. Panels of `a` have kRows rows.
template <int kDim, int kRows>
__device__ __forceinline__ void wide_scores(float (&c)[kWideTile / 8][4], uint32_t a, uint32_t b) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k)
    wgmma<Major::kK, Major::kK>(c, k_major_step<kRows>(matrix_descriptor(a), k),
                                k_major_step<kWideTile>(matrix_descriptor(b), k), k > 0);
  wgmma_commit();
}

// acc += operand times the 64 rows of `b`.
template <int kN>
__device__ __forceinline__ void wide_accumulate(float (&acc)[kN][4],
                                                const uint32_t (&a)[kWideTile / 16][4],
                                                uint32_t b) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kWideTile / 16; ++k)
    wgmma<Major::kMN>(acc, a[k], mn_major_step(matrix_descriptor(b, kWideTile * 128), k));
  wgmma_commit();
}

__device__ __forceinline__ void round_scores(uint32_t (&operand)[kWideTile / 16][4],
                                             const float (&s)[kWideTile / 8][4]) {
#pragma unroll
  for (int n = 0; n < kWideTile / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      operand[n / 2][n % 2 * 2 + h] = pack_bf16(s[n][2 * h], s[n][2 * h + 1]);
}

// ---- dK and dV

template <int kDim>
struct WideKeysShape {
  static constexpr int kColumns = kDim, kOwnKeys = kWideTile, kStep = kWideTile;
  static constexpr int kOwnBytes = 2 * kOwnKeys * kColumns, kStepBytes = 2 * kStep * kColumns;
  static constexpr int kScoreBytes = 4 * kOwnKeys * kStep;
  static constexpr int kKeys = 0, kValues = kOwnBytes, kQueries = 2 * kOwnBytes;
  static constexpr int kDout = kQueries + kStages * kStepBytes;  // dO
  static constexpr int kScores = kDout + kStages * kStepBytes;   // P^T
  static constexpr int kLse = kScores + kStages * kScoreBytes;   // [kStages][kStep]
  static constexpr int kDelta = kLse + kStages * kStep * 4;
  static constexpr int kBarriers = kDelta + kStages * kStep * 4;
  static constexpr int kSteps = kBarriers + BackwardPipelines::kBytes;  // [kStages], see Step
  static constexpr int kSlice = kSteps + kStages * 16;
  static constexpr int kSharedBytes = kSlice + static_cast<int>(sizeof(BackwardSlice));
};

// Consumer of either warpgroup: accumulate_dv() or accumulate_dk().
template <int kDim, class Args>
class WideKeysConsumer {
 public:
  __device__ WideKeysConsumer(const Args& args, const BackwardSlice& slice, char* memory,
                              const BackwardPipelines& pipelines)
      : args_(args),
        slice_(slice),
        memory_(memory),
        shared_(shared_address(memory)),
        pipelines_(pipelines),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup),
        key0_(slice.own + thread_ / 32 * 16) {
    set_zero(acc_);
    barrier_wait(pipelines_.own_full, 0);
  }

  // First warpgroup.
  __device__ __forceinline__ void accumulate_dv() {
    Step step = wait_step(0);
    if (Rule::kMasks && step.is_end != 0)  // no query sees the keys
      return store(args_.dv, args_.dv_slices, 1.0f, args_.accumulate_v);
    wide_scores<kDim, kWideTile>(s_, shared_ + S::kKeys, streamed(S::kQueries, 0));
    wgmma_wait<0>();
    wgmma_fence_operand(s_);
    make_probabilities(0, step);
#pragma unroll 1
    for (int i = 0;; ++i) {
      round_scores(operand_, s_);
      pipelines_.dout.consumer_wait(i);
      step = wait_step(i + 1);
      if (step.is_end != 0) {
        accumulate_last(streamed(S::kDout, i));
        break;
      }
      wide_scores<kDim, kWideTile>(s_, shared_ + S::kKeys, streamed(S::kQueries, i + 1));
      wide_accumulate(acc_, operand_, streamed(S::kDout, i));
      wgmma_wait<1>();
      wgmma_fence_operand(s_);
      make_probabilities(i + 1, step);
      wgmma_wait<0>();
      wgmma_fence_operand(acc_);
      pipelines_.dout.consumer_release_warp(i);
    }
    store(args_.dv, args_.dv_slices, 1.0f, args_.accumulate_v);
  }

  // Second warpgroup.
  __device__ __forceinline__ void accumulate_dk() {
    if (const Step step = wait_step(0); Rule::kMasks && step.is_end != 0)
      return store(args_.dk, args_.dk_slices, 1.0f, args_.accumulate_k);
    pipelines_.dout.consumer_wait(0);
    wide_scores<kDim, kWideTile>(s_, shared_ + S::kValues, streamed(S::kDout, 0));
    wgmma_wait<0>();
    wgmma_fence_operand(s_);
    make_ds(0);
#pragma unroll 1
    for (int i = 0;; ++i) {
      round_scores(operand_, s_);
      if (wait_step(i + 1).is_end != 0) {
        accumulate_last(streamed(S::kQueries, i));
        break;
      }
      pipelines_.dout.consumer_wait(i + 1);
      wide_scores<kDim, kWideTile>(s_, shared_ + S::kValues, streamed(S::kDout, i + 1));
      wide_accumulate(acc_, operand_, streamed(S::kQueries, i));
      wgmma_wait<1>();
      wgmma_fence_operand(s_);
      make_ds(i + 1);
      wgmma_wait<0>();
      wgmma_fence_operand(acc_);
      pipelines_.queries.consumer_release_warp(i);
    }
    store(args_.dk, args_.dk_slices, args_.rule.scale, args_.accumulate_k);
  }

 private:
  using S = WideKeysShape<kDim>;
  using Rule = decltype(Args::rule);

  __device__ __forceinline__ void store(const Heads<bf16>& out, float* slices, float scale,
                                        bool accumulate) const {
    store_keys(acc_, args_, slice_, out, slices, scale, accumulate, key0_);
  }

  __device__ __forceinline__ Step wait_step(int i) {
    const PipelineState<kStages> state(i);
    pipelines_.queries.consumer_wait(state);
    return reinterpret_cast<const Step*>(memory_ + S::kSteps)[state.index];
  }
  __device__ __forceinline__ uint32_t streamed(int from, int i) const {
    return shared_ + from + PipelineState<kStages>(i).index * S::kStepBytes;
  }
  __device__ __forceinline__ void accumulate_last(uint32_t from) {
    wide_accumulate(acc_, operand_, from);
    wgmma_wait<0>();
    wgmma_fence_operand(acc_);
  }
  // The thread's P^T of queries 8 n .. 8 n + 7 in shared memory.
  __device__ __forceinline__ float* exchange_slot(int stage, int n) const {
    return reinterpret_cast<float*>(memory_ + S::kScores + stage * S::kScoreBytes) +
           4 * (n * kWarpgroup + thread_);
  }

  // S^T of step i becomes P^T, and is stored for the other warpgroup, times the derivative of the
  // rule.
  __device__ __forceinline__ void make_probabilities(int i, const Step& step) {
    const PipelineState<kStages> state(i);
    const int first = step.first_position;
    const typename Rule::Bound rule =
        args_.rule.bind(step.sequence, step.head, slice_.sequence.length);
    float lse_log2[kWideTile / 8][2];
    const uint32_t lse_address = shared_ + S::kLse + state.index * (4 * S::kStep);
    probabilities<0, !Rule::kModifies>(s_, lse_log2, lse_address, rule, slice_.sequence.length,
                                       key0_, first);
    pipelines_.queries.consumer_release_warp(state);
    pipelines_.scores.producer_acquire(state);
#pragma unroll
    for (int n = 0; n < kWideTile / 8; ++n) {
      Pack<float, 4> p{s_[n][0], s_[n][1], s_[n][2], s_[n][3]};
      if constexpr (Rule::kModifies)
        rule.differentiate([&](auto&& derivative) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            p.v[e] *= derivative(s_[n][e], lse_log2[n][e % 2],
                                 key_distance(key0_, first, n, e / 2, e % 2));
        });
      store_pack(exchange_slot(state.index, n), p);
    }
    pipelines_.scores.producer_commit(state);
  }

  // dP^T of step i becomes dS^T.
  __device__ __forceinline__ void make_ds(int i) {
    const PipelineState<kStages> state(i);
    float delta[kWideTile / 8][2];
    load_statistics<0, kWideTile / 8>(delta, shared_ + S::kDelta + state.index * (4 * S::kStep));
    pipelines_.scores.consumer_wait(state);
#pragma unroll
    for (int n = 0; n < kWideTile / 8; ++n) {
      const auto p = load_pack<4>(exchange_slot(state.index, n));
#pragma unroll
      for (int e = 0; e < 4; ++e) s_[n][e] = p.v[e] * (s_[n][e] - delta[n][e % 2]);
    }
    pipelines_.scores.consumer_release(state);
    pipelines_.dout.consumer_release_warp(state);
  }

  const Args& args_;
  const BackwardSlice& slice_;
  char* const memory_;
  const uint32_t shared_;
  const BackwardPipelines pipelines_;
  const int thread_, key0_;  // key0_: first key of the warp, within the sequence
  float s_[kWideTile / 8][4], acc_[kDim / 8][4];
  uint32_t operand_[kWideTile / 16][4];
};

template <int kDim, class Args>
__global__ void __launch_bounds__(kWideThreads, 1)
    backward_wide_keys_kernel(const __grid_constant__ Args args,
                              const __grid_constant__ BackwardMaps maps,
                              const __grid_constant__ QueryTiles tiles) {
  using S = WideKeysShape<kDim>;
  extern __shared__ __align__(1024) char memory[];
  const BackwardPipelines pipelines{shared_address(memory) + S::kBarriers};
  auto& slice = *reinterpret_cast<BackwardSlice*>(memory + S::kSlice);
  if (threadIdx.x < 32) {
    const BackwardSlice found = find_slice<Pass::kKeys>(args, static_cast<int>(blockIdx.x),
                                                        S::kOwnKeys, S::kStep, tiles.heads_at_once);
    if (threadIdx.x == 0) {
      slice = found;
      barrier_init(pipelines.own_full, 1);
      barrier_init(pipelines.tail, 1);
      pipelines.queries.init(1, 4 * kConsumers);
      pipelines.dout.init(1, 4 * kConsumers);
      pipelines.scores.init(kWarpgroup, kWarpgroup);
    }
  }
  __syncthreads();
  if (slice.own >= slice.sequence.length) return;
  if (threadIdx.x < kWarpgroup) {
    deallocate_registers<40>();  // StepIterator needs more than the loads of the dQ pass
    if (threadIdx.x < 32) load_streams<S>(args, slice, maps, tiles, memory, pipelines);
    return;
  }
  allocate_registers<232>();
  WideKeysConsumer<kDim, Args> consumer(args, slice, memory, pipelines);
  if (uniform(static_cast<int>(threadIdx.x) / kWarpgroup) == 1)
    consumer.accumulate_dv();
  else
    consumer.accumulate_dk();
}

// ---- dQ

// Barriers, from shared address `own_full` on.
struct WideQueriesPipelines {
  static constexpr int kBarrier = sizeof(uint64_t);
  static constexpr int kBytes = kBarrier + Pipeline<kStages>::kBytes + Pipeline<1>::kBytes;
  uint32_t own_full;
  Pipeline<kStages> keys{own_full + kBarrier};
  Pipeline<1> values{keys.end()};
};

template <int kDim>
struct WideQueriesShape {
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kOwnBytes = 2 * kRows * kDim, kTileBytes = 2 * kWideTile * kDim;
  static constexpr int kQueries = 0, kDout = kOwnBytes;                                // dO
  static constexpr int kKeys = 2 * kOwnBytes, kValues = kKeys + kStages * kTileBytes;  // one stage
  static constexpr int kBarriers = kValues + kTileBytes;
  static constexpr int kSlice = kBarriers + (WideQueriesPipelines::kBytes + 15) / 16 * 16;
  static constexpr int kSharedBytes = kSlice + static_cast<int>(sizeof(BackwardSlice));
};

// The step after `step`.
template <class Rule>
__device__ __forceinline__ int next_wide_step(const Rule& rule, const BackwardSlice& slice,
                                              int step) {
  return next_step<Pass::kQueries>(rule, {slice.own, slice.own + 64 * kConsumers}, step + 1,
                                   slice.stream.steps.end, kWideTile);
}

// Producer warp.
template <int kDim, class Args>
__device__ __forceinline__ void load_wide_keys(const Args& args, const BackwardSlice& slice,
                                               const BackwardMaps& maps, uint32_t shared,
                                               const WideQueriesPipelines& pipelines) {
  using S = WideQueriesShape<kDim>;
  // Loads rows [row0, row0 + kRows) of `rows`, zeros from row `end` on. Contiguous rows, from
  // `token` on, are loaded by TMA.
  const auto load = [&]<int kRows>(uint32_t to, const HeadRows<const bf16>& rows, int row0, int end,
                                   const CUtensorMap& map, uint32_t barrier, int token, int head) {
    if (row0 + kRows <= end && rows.offset.adjacent(row0, row0 + kRows)) {
      if (threadIdx.x > 0) return;
      barrier_arrive_expect_tx(barrier, 2 * kRows * kDim);
      return load_tile<kDim, kRows>(to, map, barrier, token, head);
    }
    copy_rows<kDim, kRows, 32>(
        to, args.head_dim, [&](int r) { return row0 + r < end ? rows.row(row0 + r) : nullptr; });
    copy_async_commit();
    copy_async_wait<0>();
    fence_proxy_async();
    arrive_once_per_warp(barrier);
  };
  const auto load_own = [&](uint32_t to, const Heads<const bf16>& tensor, const CUtensorMap& map) {
    load.template operator()<S::kRows>(to, tensor.rows(slice.sequence.begin, slice.head), slice.own,
                                       slice.sequence.length, map, pipelines.own_full,
                                       slice.sequence.begin + slice.own, slice.head);
  };
  load_own(shared + S::kQueries, args.q, maps.q);
  load_own(shared + S::kDout, args.dout, maps.dout);
  const int head = slice.head / args.group();
  const auto load_keys = [&](uint32_t to, const Heads<const bf16>& tensor, const CUtensorMap& map,
                             uint32_t barrier, int key0) {
    load.template operator()<kWideTile>(to, tensor.keys(slice.sequence, head), key0,
                                        slice.stream.length, map, barrier,
                                        slice.sequence.token(key0), head);
  };
  int i = 0;
#pragma unroll 1
  for (int step = slice.stream.steps.first; step < slice.stream.steps.end;
       step = next_wide_step(args.rule, slice, step), ++i) {
    const PipelineState<kStages> state(i);
    pipelines.keys.producer_acquire(state);
    load_keys(shared + S::kKeys + state.index * S::kTileBytes, args.k, maps.k,
              pipelines.keys.full(state.index), step * kWideTile);
    pipelines.values.producer_acquire(i);
    load_keys(shared + S::kValues, args.v, maps.v, pipelines.values.full(0), step * kWideTile);
  }
}

template <int kDim, class Args>
class WideQueriesConsumer {
 public:
  __device__ WideQueriesConsumer(const Args& args, const BackwardSlice& slice,
                                 const QueryTiles& tiles, uint32_t shared,
                                 const WideQueriesPipelines& pipelines)
      : args_(args),
        slice_(slice),
        shared_(shared),
        pipelines_(pipelines),
        group_(uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        row0_(slice.own + 64 * group_ + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16) {
    // Queries beyond the end are all zeros: P = 1, but dO = 0 and dS = 0.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0_ + lane_ / 4 + 8 * h;
      const int64_t at =
          kWideTile * tiles.tile<kWideTile>(slice.head, slice.sequence.begin, slice.index, 0) + row;
      lse_log2_[h] = row < slice.sequence.length ? tiles.lse_log2[at] : 0.0f;
      delta_[h] = row < slice.sequence.length ? tiles.delta[at] : 0.0f;
    }
  }

  __device__ __forceinline__ void run() {
    set_zero(acc_);
    barrier_wait(pipelines_.own_full, 0);
    int i = 0;
#pragma unroll 1
    for (int step = slice_.stream.steps.first; step < slice_.stream.steps.end;
         step = next_wide_step(args_.rule, slice_, step), ++i) {
      const PipelineState<kStages> state(i);
      const uint32_t keys = shared_ + S::kKeys + state.index * S::kTileBytes;
      const uint32_t own = group_ * (64 * 128);
      float s[kWideTile / 8][4], dp[kWideTile / 8][4];
      pipelines_.keys.consumer_wait(state);
      wide_scores<kDim, S::kRows>(s, shared_ + S::kQueries + own, keys);
      pipelines_.values.consumer_wait(i);
      wide_scores<kDim, S::kRows>(dp, shared_ + S::kDout + own, shared_ + S::kValues);
      wgmma_wait<1>();  // dQ of the previous step is complete, too
      wgmma_fence_operand(s);
      wgmma_fence_operand(acc_);
      if (i > 0) pipelines_.keys.consumer_release_warp(i - 1);
      make_probabilities(s, step * kWideTile);
      wgmma_wait<0>();
      wgmma_fence_operand(dp);
      pipelines_.values.consumer_release_warp(i);
#pragma unroll
      for (int n = 0; n < kWideTile / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[n][e] -= delta_[e / 2];
      if constexpr (Rule::kModifies)
        rule().differentiate([&](auto&& derivative) {
#pragma unroll
          for (int n = 0; n < kWideTile / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              dp[n][e] *= derivative(s[n][e], lse_log2_[e / 2],
                                     distance(step * kWideTile, e / 2) + (8 * n + e % 2));
        });
#pragma unroll
      for (int n = 0; n < kWideTile / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e];
      round_scores(operand_, s);
      wide_accumulate(acc_, operand_, keys);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(acc_);
    store_rows(acc_, args_.dq.rows(slice_.sequence.begin, slice_.head), args_.rule.scale,
               args_.accumulate_q, row0_, slice_.sequence.length, args_.head_dim);
  }

 private:
  using S = WideQueriesShape<kDim>;
  using Rule = decltype(Args::rule);

  __device__ __forceinline__ typename Rule::Bound rule() const {
    return args_.rule.bind(slice_.index, slice_.head, slice_.stream.length);
  }
  // Distance from row h of the thread's two to its first key of a tile.
  __device__ __forceinline__ KeyDistance<float> distance(int key0, int h) const {
    return KeyDistance<float>(key0 + 2 * (lane_ % 4) - slice_.sequence.position(row0_) - lane_ / 4 -
                              8 * h);
  }

  // S becomes P, zero where masked and beyond the last key.
  __device__ __forceinline__ void make_probabilities(float (&s)[kWideTile / 8][4], int key0) const {
    const typename Rule::Bound rule = this->rule();
#pragma unroll
    for (int r = 0; r < 2; ++r) modify_scores(s, rule, r, distance(key0, r).whole);
#pragma unroll
    for (int n = 0; n < kWideTile / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[n][e] = fast_exp2(__fmaf_rn(s[n][e], rule.exponent, -lse_log2_[e / 2]));
    const int first = slice_.sequence.position(row0_), keys = slice_.stream.length;
    if (rule.sees_all({first, first + 16}, {key0, key0 + kWideTile}) && key0 + kWideTile <= keys)
      return;
    const int column = key0 + 2 * (lane_ % 4);
#pragma unroll
    for (int n = 0; n < kWideTile / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = column + 8 * n + e % 2, position = first + lane_ / 4 + 8 * (e / 2);
        if (rule.masked(position, key) || key >= keys) s[n][e] = 0;
      }
  }

  const Args& args_;
  const BackwardSlice& slice_;
  const uint32_t shared_;
  const WideQueriesPipelines pipelines_;
  const int group_, lane_, row0_;  // row0_: first query of the warp, within the sequence
  float lse_log2_[2], delta_[2], acc_[kDim / 8][4];
  uint32_t operand_[kWideTile / 16][4];
};

template <int kDim, class Args>
__global__ void __launch_bounds__(kWideThreads, 1)
    backward_wide_queries_kernel(const __grid_constant__ Args args,
                                 const __grid_constant__ BackwardMaps maps,
                                 const __grid_constant__ QueryTiles tiles) {
  using S = WideQueriesShape<kDim>;
  extern __shared__ __align__(1024) char memory[];
  const WideQueriesPipelines pipelines{shared_address(memory) + S::kBarriers};
  auto& slice = *reinterpret_cast<BackwardSlice*>(memory + S::kSlice);
  if (threadIdx.x < 32) {
    const BackwardSlice found = find_slice<Pass::kQueries>(
        args, static_cast<int>(blockIdx.x), S::kRows, kWideTile, tiles.heads_at_once);
    if (threadIdx.x == 0) {
      slice = found;
      barrier_init(pipelines.own_full, 2);
      pipelines.keys.init(1, 4 * kConsumers);
      pipelines.values.init(1, 4 * kConsumers);
    }
  }
  __syncthreads();
  if (slice.own >= slice.sequence.length) return;
  if (threadIdx.x < kWarpgroup) {
    deallocate_registers<24>();
    if (threadIdx.x < 32)
      load_wide_keys<kDim>(args, slice, maps, shared_address(memory), pipelines);
    return;
  }
  allocate_registers<240>();
  WideQueriesConsumer<kDim, Args>(args, slice, tiles, shared_address(memory), pipelines).run();
}

}  // namespace

template <int kDim>
void run_backward_wide(const BackwardArgs<bf16>& args, const AttentionBackward& in) {
  const Device device = in.q.device();
  if (args.tokens == 0) return;
  // Blocks that read the same rows run close in time: as many heads at once as have rows that fit
  // in the L2 cache.
  const int64_t head_bytes = args.tokens / args.sequences.count * kDim * int64_t{2 * sizeof(bf16)};
  Tensor statistics;
  QueryTiles tiles = make_query_tiles<kDim, kWideTile>(args, statistics, nullptr, device);
  const auto run = [&]<class Call>(const Call& call) {
    tiles.heads_at_once =
        heads_in_l2(head_bytes * (args.group() / args.head_slices), tile_blocks<Pass::kKeys>(args));
    launch("attention_backward", backward_wide_keys_kernel<kDim, Call>,
           {backward_blocks<Pass::kKeys>(args, kWideTile), kWideThreads,
            WideKeysShape<kDim>::kSharedBytes},
           device, call, make_backward_maps(in, kWideTile, kWideTile), tiles);
    tiles.heads_at_once = heads_in_l2(head_bytes, args.heads);
    using QueriesShape = WideQueriesShape<kDim>;
    launch("attention_backward_queries", backward_wide_queries_kernel<kDim, Call>,
           {backward_blocks<Pass::kQueries>(args, QueriesShape::kRows), kWideThreads,
            QueriesShape::kSharedBytes},
           device, call, make_backward_maps(in, kWideTile, QueriesShape::kRows), tiles);
  };
  with_rule<WindowRule<float>, ModifyRule<float>>(args, in.desc, args.head_dim, args.tokens, run);
}

}  // namespace cohort::kernels::cuda
