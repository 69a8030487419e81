// The attention backward on the tensor cores of sm_90 for heads of more than 128 columns, whose dK
// and dV fill the registers of two warpgroups: dQ has a pass of its own, so that there are seven
// products, and no block adds to what another has written.
//
// dK and dV: a block owns 64 keys of one key head and streams the queries that see them past it, 64
// at a time. The two warpgroups divide the products:
//
//   first    S^T = K Q^T,    P^T = exp2(c S^T - lse log2(e)),   dV += P^T dO
//   second   dP^T = V dO^T,  dS^T = P^T (dP^T - delta),         dK += dS^T Q
//
// P^T goes from one to the other through shared memory, in f32: each thread reads what its
// counterpart has written. Sums, and the rounded factors P^T and dS^T, stay in registers.
//
// dQ: a block owns 128 queries of one head, 64 for each of its warpgroups, and streams the keys
// that they see past it, 64 at a time: S = Q K^T, dP = dO V^T, dS, dQ += dS K.
//
// The product that ends a step runs beside those that begin the next one.
#pragma once

#include "kernels/attention/cuda/hopper/backward.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kWideTile = 64;  // keys or queries, of which a step has as many
constexpr int kWideThreads = kWarpgroup * (1 + kComputing);

// c = 64 rows of `a` times 64 rows of `b`, over the head dim. Panels of `a` have kRows rows.
template <int kDim, int kRows>
__device__ __forceinline__ void wide_scores(float (&c)[kWideTile / 8][4], uint32_t a, uint32_t b) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k)
    wgmma<Read::kAlongRows, Read::kAlongRows>(c, along_rows<kRows>(wgmma_factor(a), k),
                                              along_rows<kWideTile>(wgmma_factor(b), k), k > 0);
  wgmma_commit();
}

// sum += factor times the 64 rows of `b`.
template <int kN>
__device__ __forceinline__ void wide_add(float (&sum)[kN][4],
                                         const uint32_t (&factor)[kWideTile / 16][4], uint32_t b) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kWideTile / 16; ++k)
    wgmma<Read::kAcrossRows>(sum, factor[k], across_rows(wgmma_factor(b, kWideTile * 128), k));
  wgmma_commit();
}

__device__ __forceinline__ void round_scores(uint32_t (&factor)[kWideTile / 16][4],
                                             const float (&s)[kWideTile / 8][4]) {
#pragma unroll
  for (int n = 0; n < kWideTile / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      factor[n / 2][n % 2 * 2 + h] = pack_bf16(s[n][2 * h], s[n][2 * h + 1]);
}

template <int kN>
__device__ __forceinline__ void set_zero(float (&sum)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] = 0;
}

// ---- dK and dV

template <int kDim>
struct WideKeysShape {
  static constexpr int kColumns = kDim, kOwnKeys = kWideTile, kStep = kWideTile;
  static constexpr int kOwnBytes = 2 * kOwnKeys * kColumns, kStepBytes = 2 * kStep * kColumns;
  static constexpr int kScoreBytes = 4 * kOwnKeys * kStep;
  static constexpr int kKeys = 0, kValues = kOwnBytes, kQueries = 2 * kOwnBytes;
  static constexpr int kGradients = kQueries + kStages * kStepBytes;  // dO
  static constexpr int kScores = kGradients + kStages * kStepBytes;   // P^T
  static constexpr int kLse = kScores + kStages * kScoreBytes;        // [kStages][kStep]
  static constexpr int kDelta = kLse + kStages * kStep * 4;
  static constexpr int kBarriers = kDelta + kStages * kStep * 4;
  static constexpr int kSteps = kBarriers + 8 * 20;  // [kStages], see Step
  static constexpr int kShare = kSteps + kStages * 8;
  static constexpr int kSharedBytes = kShare + static_cast<int>(sizeof(BackwardShare));
};

// Of both warpgroups.
template <int kDim>
class WideKeysConsumer {
 public:
  __device__ WideKeysConsumer(const BackwardArgs<bf16>& args, const BackwardShare& share,
                              char* memory, const BackwardBarriers& barriers)
      : args_(args),
        share_(share),
        memory_(memory),
        shared_(shared_address(memory)),
        barriers_(barriers),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup),
        key0_(share.own + thread_ / 32 * 16) {
    set_zero(sum_);
    barrier_wait(barriers_.own(), 0);
  }

  // dV, of the first.
  __device__ __forceinline__ void sum_values() {
    Step step = wait_step(0);
    wide_scores<kDim, kWideTile>(s_, shared_ + S::kKeys, streamed(S::kQueries, 0));
    wgmma_wait<0>();
    wgmma_hold(s_);
    make_probabilities(0, step.first);
#pragma unroll 1
    for (int i = 0;; ++i) {
      round_scores(factor_, s_);
      const Turn<kStages> turn(i);
      barrier_wait(barriers_.gradients(turn.stage), turn.parity);
      step = wait_step(i + 1);
      if (step.none != 0) {
        add_last(streamed(S::kGradients, i));
        break;
      }
      wide_scores<kDim, kWideTile>(s_, shared_ + S::kKeys, streamed(S::kQueries, i + 1));
      wide_add(sum_, factor_, streamed(S::kGradients, i));
      wgmma_wait<1>();
      wgmma_hold(s_);
      make_probabilities(i + 1, step.first);
      wgmma_wait<0>();
      wgmma_hold(sum_);
      release(barriers_.no_gradients(turn.stage));
    }
    store_keys(sum_, args_, share_, args_.dv, args_.slices_v, 1.0f, args_.accumulate_v, key0_);
  }

  // dK, of the second.
  __device__ __forceinline__ void sum_keys() {
    wait_step(0);
    barrier_wait(barriers_.gradients(0), 0);
    wide_scores<kDim, kWideTile>(s_, shared_ + S::kValues, streamed(S::kGradients, 0));
    wgmma_wait<0>();
    wgmma_hold(s_);
    make_gradients(0);
#pragma unroll 1
    for (int i = 0;; ++i) {
      round_scores(factor_, s_);
      if (wait_step(i + 1).none != 0) {
        add_last(streamed(S::kQueries, i));
        break;
      }
      const Turn<kStages> next(i + 1);
      barrier_wait(barriers_.gradients(next.stage), next.parity);
      wide_scores<kDim, kWideTile>(s_, shared_ + S::kValues, streamed(S::kGradients, i + 1));
      wide_add(sum_, factor_, streamed(S::kQueries, i));
      wgmma_wait<1>();
      wgmma_hold(s_);
      make_gradients(i + 1);
      wgmma_wait<0>();
      wgmma_hold(sum_);
      release(barriers_.no_queries(Turn<kStages>(i).stage));
    }
    store_keys(sum_, args_, share_, args_.dk, args_.slices_k, args_.scale, args_.accumulate_k,
               key0_);
  }

 private:
  using S = WideKeysShape<kDim>;

  __device__ __forceinline__ Step wait_step(int i) {
    const Turn<kStages> turn(i);
    barrier_wait(barriers_.queries(turn.stage), turn.parity);
    return reinterpret_cast<const Step*>(memory_ + S::kSteps)[turn.stage];
  }
  __device__ __forceinline__ uint32_t streamed(int from, int i) const {
    return shared_ + from + Turn<kStages>(i).stage * S::kStepBytes;
  }
  __device__ __forceinline__ void add_last(uint32_t from) {
    wide_add(sum_, factor_, from);
    wgmma_wait<0>();
    wgmma_hold(sum_);
  }
  // Where the thread's P^T of 8 n queries lies.
  __device__ __forceinline__ float* exchanged(int stage, int n) const {
    return reinterpret_cast<float*>(memory_ + S::kScores + stage * S::kScoreBytes) +
           4 * (n * kWarpgroup + thread_);
  }

  // S^T of step i becomes P^T, for the other warpgroup, too.
  __device__ __forceinline__ void make_probabilities(int i, int first) {
    const Turn<kStages> turn(i);
    float lse_log2[kWideTile / 8][2];
    load_numbers<0, kWideTile / 8>(lse_log2, shared_ + S::kLse + turn.stage * (4 * S::kStep));
    probabilities(s_, lse_log2, args_, share_.length, key0_, first);
    release(barriers_.no_queries(turn.stage));
    barrier_wait(barriers_.no_scores(turn.stage), turn.parity ^ 1);
#pragma unroll
    for (int n = 0; n < kWideTile / 8; ++n)
      store_pack(exchanged(turn.stage, n), Pack<float, 4>{s_[n][0], s_[n][1], s_[n][2], s_[n][3]});
    barrier_arrive(barriers_.scores(turn.stage));
  }

  // dP^T of step i becomes dS^T.
  __device__ __forceinline__ void make_gradients(int i) {
    const Turn<kStages> turn(i);
    float delta[kWideTile / 8][2];
    load_numbers<0, kWideTile / 8>(delta, shared_ + S::kDelta + turn.stage * (4 * S::kStep));
    barrier_wait(barriers_.scores(turn.stage), turn.parity);
#pragma unroll
    for (int n = 0; n < kWideTile / 8; ++n) {
      const auto p = load_pack<4>(exchanged(turn.stage, n));
#pragma unroll
      for (int e = 0; e < 4; ++e) s_[n][e] = p.v[e] * (s_[n][e] - delta[n][e % 2]);
    }
    barrier_arrive(barriers_.no_scores(turn.stage));
    release(barriers_.no_gradients(turn.stage));
  }

  const BackwardArgs<bf16>& args_;
  const BackwardShare& share_;
  char* const memory_;
  const uint32_t shared_;
  const BackwardBarriers barriers_;
  const int thread_, key0_;  // key0_: the warp's first key, in the sequence
  float s_[kWideTile / 8][4], sum_[kDim / 8][4];
  uint32_t factor_[kWideTile / 16][4];
};

template <int kDim>
__global__ void __launch_bounds__(kWideThreads, 1)
    backward_wide_keys_kernel(const __grid_constant__ BackwardArgs<bf16> args,
                              const __grid_constant__ BackwardMaps maps,
                              const __grid_constant__ QueryTiles tiles) {
  using S = WideKeysShape<kDim>;
  extern __shared__ __align__(1024) char memory[];
  const BackwardBarriers barriers{shared_address(memory) + S::kBarriers};
  auto& share = *reinterpret_cast<BackwardShare*>(memory + S::kShare);
  if (threadIdx.x < 32) {
    const BackwardShare found =
        find_share<Pass::kKeys>(args, S::kOwnKeys, S::kStep, tiles.heads_at_once);
    if (threadIdx.x == 0) {
      share = found;
      barrier_init(barriers.own(), 1);
      barrier_init(barriers.tail(), 1);
      for (int stage = 0; stage < kStages; ++stage) {
        barrier_init(barriers.queries(stage), 1);
        barrier_init(barriers.gradients(stage), 1);
        barrier_init(barriers.no_queries(stage), 4 * kComputing);
        barrier_init(barriers.no_gradients(stage), 4 * kComputing);
        barrier_init(barriers.scores(stage), kWarpgroup);
        barrier_init(barriers.no_scores(stage), kWarpgroup);
      }
    }
  }
  __syncthreads();
  if (share.own >= share.length) return;
  if (threadIdx.x < kWarpgroup) {
    release_registers<40>();  // the walk over streams needs more than the copies of the other pass
    if (threadIdx.x < 32) copy_streams<S>(args, share, maps, tiles, memory, barriers);
    return;
  }
  take_registers<232>();
  WideKeysConsumer<kDim> consumer(args, share, memory, barriers);
  if (uniform(static_cast<int>(threadIdx.x) / kWarpgroup) == 1)
    consumer.sum_values();
  else
    consumer.sum_keys();
}

// ---- dQ

template <int kDim>
struct WideQueriesShape {
  static constexpr int kRows = 64 * kComputing;
  static constexpr int kOwnBytes = 2 * kRows * kDim, kTileBytes = 2 * kWideTile * kDim;
  static constexpr int kQueries = 0, kGradients = kOwnBytes;                           // dO
  static constexpr int kKeys = 2 * kOwnBytes, kValues = kKeys + kStages * kTileBytes;  // one stage
  static constexpr int kBarriers = kValues + kTileBytes;
  static constexpr int kShare = kBarriers + 8 * 8;
  static constexpr int kSharedBytes = kShare + static_cast<int>(sizeof(BackwardShare));
};

struct WideQueriesBarriers {
  uint32_t first;
  __device__ uint32_t own() const { return first; }
  __device__ uint32_t keys(int stage) const { return first + 8 * (1 + stage); }
  __device__ uint32_t no_keys(int stage) const { return first + 8 * (3 + stage); }
  __device__ uint32_t values() const { return first + 8 * 5; }
  __device__ uint32_t no_values() const { return first + 8 * 6; }
};

// The first warp copies.
template <int kDim>
__device__ __forceinline__ void copy_wide_keys(const BackwardArgs<bf16>& args,
                                               const BackwardShare& share, const BackwardMaps& maps,
                                               uint32_t shared,
                                               const WideQueriesBarriers& barriers) {
  using S = WideQueriesShape<kDim>;
  // Rows [row0, row0 + kRows) of `rows`, zeros from row `end` on. Those that lie one after the
  // other, from `token` on, come by the copy engine.
  const auto copy = [&]<int kRows>(uint32_t to, const HeadRows<const bf16>& rows, int row0, int end,
                                   const CUtensorMap& map, uint32_t barrier, int token, int head) {
    if (row0 + kRows <= end && (row0 >= rows.own || row0 + kRows <= rows.own)) {
      if (threadIdx.x > 0) return;
      barrier_arrive_expect(barrier, 2 * kRows * kDim);
      return load_tile<kDim, kRows>(to, map, barrier, token, head);
    }
    copy_rows<kDim, kRows, 32>(
        to, args.head_dim, [&](int r) { return row0 + r < end ? rows.row(row0 + r) : nullptr; });
    copy_async_commit();
    copy_async_wait<0>();
    fence_before_tma();
    release(barrier);
  };
  const auto own = [&](uint32_t to, const Heads<const bf16>& tensor, const CUtensorMap& map) {
    copy.template operator()<S::kRows>(to, tensor.rows(share.begin, share.head, args.head_dim),
                                       share.own, share.length, map, barriers.own(),
                                       share.begin + share.own, share.head);
  };
  own(shared + S::kQueries, args.q, maps.q);
  own(shared + S::kGradients, args.dout, maps.dout);
  const int head = share.head / args.group();
  const auto copy_keys = [&](uint32_t to, const Heads<const bf16>& tensor, const CUtensorMap& map,
                             uint32_t barrier, int key0) {
    const int begin = key0 < share.prefix ? share.prefix_begin : share.begin - share.prefix;
    copy.template operator()<kWideTile>(to, key_rows(tensor, share, head, args.head_dim), key0,
                                        share.stream.length, map, barrier, begin + key0, head);
  };
  int i = 0;
#pragma unroll 1
  for (int step = share.stream.first; step < share.stream.end; ++step, ++i) {
    const Turn<kStages> turn(i);
    const Turn<1> of_values(i);
    barrier_wait(barriers.no_keys(turn.stage), turn.parity ^ 1);
    copy_keys(shared + S::kKeys + turn.stage * S::kTileBytes, args.k, maps.k,
              barriers.keys(turn.stage), step * kWideTile);
    barrier_wait(barriers.no_values(), of_values.parity ^ 1);
    copy_keys(shared + S::kValues, args.v, maps.v, barriers.values(), step * kWideTile);
  }
}

template <int kDim>
class WideQueriesConsumer {
 public:
  __device__ WideQueriesConsumer(const BackwardArgs<bf16>& args, const BackwardShare& share,
                                 const QueryTiles& tiles, uint32_t shared,
                                 const WideQueriesBarriers& barriers)
      : args_(args),
        share_(share),
        shared_(shared),
        barriers_(barriers),
        group_(uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        row0_(share.own + 64 * group_ + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16) {
    // A query beyond the end has zeros throughout: P = 1 then, but dO = 0 and dS = 0.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0_ + lane_ / 4 + 8 * h;
      const int64_t at =
          kWideTile * tiles.tile<kWideTile>(share.head, share.begin, share.sequence, 0) + row;
      lse_log2_[h] = row < share.length ? tiles.lse_log2[at] : 0.0f;
      delta_[h] = row < share.length ? tiles.delta[at] : 0.0f;
    }
  }

  __device__ __forceinline__ void run() {
    set_zero(sum_);
    barrier_wait(barriers_.own(), 0);
    int i = 0;
#pragma unroll 1
    for (int step = share_.stream.first; step < share_.stream.end; ++step, ++i) {
      const Turn<kStages> turn(i);
      const Turn<1> of_values(i);
      const uint32_t keys = shared_ + S::kKeys + turn.stage * S::kTileBytes;
      const uint32_t own = group_ * (64 * 128);
      float s[kWideTile / 8][4], dp[kWideTile / 8][4];
      barrier_wait(barriers_.keys(turn.stage), turn.parity);
      wide_scores<kDim, S::kRows>(s, shared_ + S::kQueries + own, keys);
      barrier_wait(barriers_.values(), of_values.parity);
      wide_scores<kDim, S::kRows>(dp, shared_ + S::kGradients + own, shared_ + S::kValues);
      wgmma_wait<1>();  // dQ of the step before is there, too
      wgmma_hold(s);
      wgmma_hold(sum_);
      if (i > 0) release(barriers_.no_keys(Turn<kStages>(i - 1).stage));
      make_probabilities(s, step * kWideTile);
      wgmma_wait<0>();
      wgmma_hold(dp);
      release(barriers_.no_values());
#pragma unroll
      for (int n = 0; n < kWideTile / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e] - delta_[e / 2];
      round_scores(factor_, s);
      wide_add(sum_, factor_, keys);
    }
    wgmma_wait<0>();
    wgmma_hold(sum_);
    store_rows(sum_, args_.dq.rows(share_.begin, share_.head, args_.head_dim), args_.scale,
               args_.accumulate_q, row0_, share_.length, args_.head_dim);
  }

 private:
  using S = WideQueriesShape<kDim>;

  // S becomes P, zero where the mask says so and beyond the last key.
  __device__ __forceinline__ void make_probabilities(float (&s)[kWideTile / 8][4], int key0) const {
#pragma unroll
    for (int n = 0; n < kWideTile / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[n][e] = fast_exp2(__fmaf_rn(s[n][e], args_.exponent, -lse_log2_[e / 2]));
    const int first = share_.prefix + row0_, keys = share_.stream.length;  // of the warp's queries
    const bool all_seen =
        !args_.causal || (key0 + kWideTile - 1 <= first && first + 15 - key0 < args_.window);
    if (all_seen && key0 + kWideTile <= keys) return;
    const int column = key0 + 2 * (lane_ % 4);
#pragma unroll
    for (int n = 0; n < kWideTile / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = column + 8 * n + e % 2, position = first + lane_ / 4 + 8 * (e / 2);
        const bool hidden = args_.causal && static_cast<uint32_t>(position - key) >=
                                                static_cast<uint32_t>(args_.window);
        if (hidden || key >= keys) s[n][e] = 0;
      }
  }

  const BackwardArgs<bf16>& args_;
  const BackwardShare& share_;
  const uint32_t shared_;
  const WideQueriesBarriers barriers_;
  const int group_, lane_, row0_;  // row0_: the warp's first query, in the sequence
  float lse_log2_[2], delta_[2], sum_[kDim / 8][4];
  uint32_t factor_[kWideTile / 16][4];
};

template <int kDim>
__global__ void __launch_bounds__(kWideThreads, 1)
    backward_wide_queries_kernel(const __grid_constant__ BackwardArgs<bf16> args,
                                 const __grid_constant__ BackwardMaps maps,
                                 const __grid_constant__ QueryTiles tiles) {
  using S = WideQueriesShape<kDim>;
  extern __shared__ __align__(1024) char memory[];
  const WideQueriesBarriers barriers{shared_address(memory) + S::kBarriers};
  auto& share = *reinterpret_cast<BackwardShare*>(memory + S::kShare);
  if (threadIdx.x < 32) {
    const BackwardShare found =
        find_share<Pass::kQueries>(args, S::kRows, kWideTile, tiles.heads_at_once);
    if (threadIdx.x == 0) {
      share = found;
      barrier_init(barriers.own(), 2);
      for (int stage = 0; stage < kStages; ++stage) {
        barrier_init(barriers.keys(stage), 1);
        barrier_init(barriers.no_keys(stage), 4 * kComputing);
      }
      barrier_init(barriers.values(), 1);
      barrier_init(barriers.no_values(), 4 * kComputing);
    }
  }
  __syncthreads();
  if (share.own >= share.length) return;
  if (threadIdx.x < kWarpgroup) {
    release_registers<24>();
    if (threadIdx.x < 32) copy_wide_keys<kDim>(args, share, maps, shared_address(memory), barriers);
    return;
  }
  take_registers<240>();
  WideQueriesConsumer<kDim>(args, share, tiles, shared_address(memory), barriers).run();
}

template <int kDim>
void run_backward_wide(const BackwardArgs<bf16>& args, const AttentionBackward& in) {
  const Device device = in.q.device();
  if (args.tokens == 0) return;
  // Blocks that read the same rows run close to each other in time: as many heads side by side as
  // let those stay in the L2 cache.
  const auto at_once = [&](int64_t heads_read, int blocks) {
    constexpr int64_t kCache = 32 << 20;
    const int64_t bytes =
        args.tokens / args.sequences * heads_read * kDim * int64_t{2 * sizeof(bf16)};
    return static_cast<int>(std::clamp<int64_t>(kCache / std::max<int64_t>(bytes, 1), 1, blocks));
  };
  const auto maps = [&](int own_keys, int own_queries) {
    return BackwardMaps{.k = describe_heads(in.k, own_keys),
                        .v = describe_heads(in.v, own_keys),
                        .q = describe_heads(in.q, own_queries),
                        .dout = describe_heads(in.dout, own_queries)};
  };
  Tensor numbers;
  QueryTiles tiles = make_query_tiles<kDim, kWideTile>(args, numbers, nullptr, device);
  tiles.heads_at_once = at_once(args.group() / args.slices, tile_blocks<Pass::kKeys>(args));
  launch("attention_backward", backward_wide_keys_kernel<kDim>,
         {backward_blocks<Pass::kKeys>(args, kWideTile), kWideThreads,
          WideKeysShape<kDim>::kSharedBytes},
         device, args, maps(kWideTile, kWideTile), tiles);
  tiles.heads_at_once = at_once(1, args.heads);
  using OfQueries = WideQueriesShape<kDim>;
  launch("attention_backward_queries", backward_wide_queries_kernel<kDim>,
         {backward_blocks<Pass::kQueries>(args, OfQueries::kRows), kWideThreads,
          OfQueries::kSharedBytes},
         device, args, maps(kWideTile, OfQueries::kRows), tiles);
}

}  // namespace
}  // namespace cohort::kernels::cuda
