// The attention backward on the tensor cores of sm_90, after FlashAttention-3 (Shah et al. 2024):
// five matmuls per tile of scores instead of the seven of backward_bf16.cuh, and still a fixed
// order of accumulation.
//
// A block owns 128 keys of one key head and streams the queries that see them, kStep at a time. Two
// consumer warpgroups have 64 of the keys each, with keys as rows, so that P and dS go from the
// accumulators of one matmul into the operands of the next:
//
//   S^T = K Q^T,  dP^T = V dO^T         accumulators in registers
//   P^T = exp2(c S^T - lse log2(e)),  dS^T = P^T (dP^T - delta)
//   dV += P^T dO,  dK += dS^T Q         operand A from registers
//   dQ += dS K                          over all keys: dS via shared memory, dQ to global memory
//
// The matmul for dQ is issued one step later than the others: a warpgroup needs the dS of both, and
// this way does not wait for the other one. They start half a step apart, so that one has matmuls
// while the other has exponentials.
//
// In the third warpgroup one warp loads, and two threads store dQ. Many blocks add to a tile of dQ,
// ordered by a semaphore, last keys first: under a causal mask the last keys have the fewest
// queries and reach a tile first, so waits are short. A block waits only for blocks that have
// started before it. dQ is accumulated in f32 and rounded by a final kernel.
#pragma once

#include "kernels/attention/cuda/sm90/backward_producer.cuh"

namespace cohort::kernels::cuda {
namespace {

// Loads lse or delta of the thread's queries of columns [8 kFirst, 8 kEnd) from shared address
// `from`.
__device__ __forceinline__ void load_statistics(float (&values)[2], uint32_t from, int n) {
  // The assembly is volatile to keep the loads at this point.
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
               : "=f"(values[0]), "=f"(values[1])
               : "r"(from + threadIdx.x % 4 * 8 + 32 * n)
               : "memory");
}
template <int kFirst, int kEnd, int kN>
__device__ __forceinline__ void load_statistics(float (&values)[kN][2], uint32_t from) {
#pragma unroll
  for (int n = kFirst; n < kEnd; ++n) load_statistics(values[n], from, n);
}

// Distance from the query to the key of element 2 h + i of accumulator n, in matmuls with 16 keys
// from key0 on as rows and queries from position `first` on as columns.
__device__ __forceinline__ KeyDistance<float> key_distance(int key0, int first, int n, int h,
                                                           int i) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return KeyDistance<float>(key0 + lane / 4 + 8 * h - first - 2 * (lane % 4)) + -(8 * n + i);
}

template <int kN, class Rule>
__device__ __forceinline__ void modify_columns(float (&s)[kN][4], const Rule& rule, int key0,
                                               int first) {
  if constexpr (Rule::kModifies)
    rule.modify([&](auto&& stage) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            s[n][2 * h + i] = stage(s[n][2 * h + i], key_distance(key0, first, n, h, i));
    });
}

// S^T of 16 keys from key0 on and 8 kN queries, the first at position `first`, becomes P^T: zero
// where masked and beyond the last key. The statistics are in shared memory at `lse_address`;
// kLoaded of them are in lse_log2.
template <int kLoaded, bool kLoadsAtOnce, int kN, class Rule>
__device__ __forceinline__ void probabilities(float (&s)[kN][4], float (&lse_log2)[kN][2],
                                              uint32_t lse_address, const Rule& rule, int length,
                                              int key0, int first) {
  modify_columns(s, rule, key0, first);
  if constexpr (kLoadsAtOnce) load_statistics<kLoaded, kN>(lse_log2, lse_address);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    if constexpr (!kLoadsAtOnce) load_statistics(lse_log2[n], lse_address, n);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[n][i] = fast_exp2(__fmaf_rn(s[n][i], rule.exponent, -lse_log2[n][i % 2]));
  }
  if (rule.sees_all({first, first + 8 * kN}, {key0, key0 + 16}) && key0 + 16 <= length) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = key0 + lane / 4 + 8 * h;
    const KeyMask mask = rule.key_mask(first + 2 * (lane % 4), key, key < length);
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (mask.hides(8 * n + i)) s[n][2 * h + i] = 0;
  }
}

// Calls fn(row, column, value, next) for the thread's pairs of a gradient of a warp's rows, which
// start at `row0` and end at `length`.
template <int kN, class Fn>
__device__ __forceinline__ void for_pairs(const float (&grad)[kN][4], float scale, int row0,
                                          int length, int head_dim, Fn&& fn) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + lane / 4 + 8 * h;
    if (row >= length) continue;
#pragma unroll
    for (int n = 0; n < kN; ++n)
      if (8 * n < head_dim)
        fn(row, 8 * n + 2 * (lane % 4), grad[n][2 * h] * scale, grad[n][2 * h + 1] * scale);
  }
}

template <int kN>
__device__ __forceinline__ void store_rows(const float (&grad)[kN][4], HeadRows<bf16> rows,
                                           float scale, bool accumulate, int row0, int length,
                                           int head_dim) {
  for_pairs(grad, scale, row0, length, head_dim, [&](int row, int column, float low, float high) {
    bf16* const out = rows.row(row) + column;
    if (accumulate) {
      low += to_float(out[0]);
      high += to_float(out[1]);
    }
    *reinterpret_cast<uint32_t*>(out) = pack_bf16(low, high);
  });
}

// Stores a gradient of the own keys of a warp, which start at `row0`: dk or dv, or the part of this
// slice.
template <int kN>
__device__ __forceinline__ void store_keys(const float (&grad)[kN][4],
                                           const BackwardArgs<bf16>& args,
                                           const BackwardSlice& slice, const Heads<bf16>& out,
                                           float* slices, float scale, bool accumulate, int row0) {
  if (args.head_slices == 1) {
    store_rows(grad, out.rows(slice.sequence.begin, slice.head), scale, accumulate, row0,
               slice.sequence.length, args.head_dim);
    return;
  }
  for_pairs(grad, scale, row0, slice.sequence.length, args.head_dim,
            [&](int key, int column, float low, float high) {
              const int64_t token = slice.head_slice * args.tokens + slice.sequence.begin + key;
              store_pack(slices + (token * args.kv_heads + slice.head) * args.head_dim + column,
                         Pack<float, 2>{low, high});
            });
}

template <int kDim, class Args>
class BackwardConsumer {
 public:
  __device__ BackwardConsumer(const Args& args, const BackwardSlice& slice, char* memory,
                              const BackwardPipelines& pipelines)
      : args_(args),
        slice_(slice),
        memory_(memory),
        shared_(shared_address(memory)),
        pipelines_(pipelines),
        group_(uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_row_(64 * group_ + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dk_[n][i] = dv_[n][i] = 0;
    barrier_wait(pipelines_.own_full, 0);
    if (group_ > 0) named_barrier(1, kConsumers * kWarpgroup);
    int i = 0;
#pragma unroll 1
    for (;; ++i) {
      const PipelineState<kStages> state(i);
      pipelines_.queries.consumer_wait(state);
      const Step step = reinterpret_cast<const Step*>(memory_ + S::kSteps)[state.index];
      if (step.is_end != 0) break;
      process_step(i, step);
    }
    if (!Rule::kMasks || i > 0)
      finish_dq(i - 1);
    else if (group_ == 0)  // no query sees the keys, by a tile mask
      named_arrive(1, kConsumers * kWarpgroup);
    const int key0 = slice_.own + warp_row_;
    store_keys(dk_, args_, slice_, args_.dk, args_.dk_slices, args_.rule.scale, args_.accumulate_k,
               key0);
    store_keys(dv_, args_, slice_, args_.dv, args_.dv_slices, 1.0f, args_.accumulate_v, key0);
  }

 private:
  using Rule = decltype(Args::rule);
  using S = BackwardShape<kDim, Rule::kMasks>;
  static constexpr int kOwnKeys = S::kOwnKeys, kStep = S::kStep;
  // Without registers to spare, statistics are loaded where they are used.
  static constexpr bool kLoadsAtOnce = !Rule::kModifies && (kDim == 64 || !Rule::kMasks);

  // Computes and commits dQ of step i, the last one, and commits that of the step before.
  __device__ __forceinline__ void finish_dq(int i) const {
    if (i > 0) commit_dq(i - 1);
    const PipelineState<kStages> last(i);
    float dq[8][4];
    pipelines_.scores.consumer_wait(last);
    issue_dq(dq, last.index);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(dq);
    stage_dq(dq, i);
    commit_dq(i);
  }

  // Processes step i of the block.
  __device__ __forceinline__ void process_step(int i, const Step& step) {
    const PipelineState<kStages> state(i);
    const uint32_t queries = shared_ + S::kQueries + state.index * S::kStepBytes;
    const uint32_t dout = shared_ + S::kDout + state.index * S::kStepBytes;
    uint32_t p[kStep / 16][4], ds[kStep / 16][4];
    compute_scores(p, ds, i, step, queries, dout);
    issue_gradient(dv_, p, dout);
    store_scores(ds, state);
    if (i == 0) {
      issue_gradient(dk_, ds, queries);
      commit_scores(state);
      wgmma_wait<1>();
      pipelines_.dout.consumer_release_warp(state);
    } else {
      const PipelineState<kStages> previous(i - 1);
      pipelines_.scores.consumer_wait(previous);
      float dq[8][4];
      issue_dq(dq, previous.index);
      wgmma_commit();
      issue_gradient(dk_, ds, queries);
      commit_scores(state);
      wgmma_wait<1>();
      wgmma_fence_operand(dq);
      pipelines_.dout.consumer_release_warp(state);
      pipelines_.scores.consumer_release_warp(previous);
      stage_dq(dq, i - 1);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(dk_);
    wgmma_fence_operand(dv_);
    pipelines_.queries.consumer_release_warp(state);
  }

  // Computes P^T and dS^T of step i, rounded. `queries` and `dout`: shared addresses.
  __device__ __forceinline__ void compute_scores(uint32_t (&p)[kStep / 16][4],
                                                 uint32_t (&ds)[kStep / 16][4], int i,
                                                 const Step& step, uint32_t queries,
                                                 uint32_t dout) const {
    const PipelineState<kStages> state(i);
    float s[kStep / 8][4], dp[kStep / 8][4];
    // As many values of lse and delta as registers allow are loaded before the matmuls.
    float lse_log2[kStep / 8][2], delta[kStep / 8][2];
    const uint32_t lse_address = shared_ + S::kLse + state.index * (4 * kStep);
    const uint32_t delta_address = shared_ + S::kDelta + state.index * (4 * kStep);
    if constexpr (kLoadsAtOnce) load_statistics<0, 8>(lse_log2, lse_address);
    matmul(s, shared_ + S::kKeys, queries);
    wgmma_commit();
    pipelines_.dout.consumer_wait(state);
    matmul(dp, shared_ + S::kValues, dout);
    wgmma_commit();
    if (i > 1) commit_dq(i - 2);
    if constexpr (kLoadsAtOnce) load_statistics<0, 2>(delta, delta_address);
    wgmma_wait<1>();
    wgmma_fence_operand(s);
    const int key0 = slice_.own + warp_row_, first = step.first_position;
    probabilities<8, kLoadsAtOnce>(s, lse_log2, lse_address, bound_rule(step),
                                   slice_.sequence.length, key0, first);
    if (group_ == 0 && i == 0) named_arrive(1, kConsumers * kWarpgroup);
    wgmma_wait<0>();
    wgmma_fence_operand(dp);
    if constexpr (kLoadsAtOnce) load_statistics<2, kStep / 8>(delta, delta_address);
    const typename Rule::Bound rule = bound_rule(step);
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n) {
      if constexpr (!kLoadsAtOnce) load_statistics(delta[n], delta_address, n);
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[n][e] -= delta[n][e % 2];
      if constexpr (Rule::kModifies)
        rule.differentiate([&](auto&& derivative) {
          float lse[2];
          load_statistics(lse, lse_address, n);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            dp[n][e] *= derivative(s[n][e], lse[e % 2], key_distance(key0, first, n, e / 2, e % 2));
        });
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = s[n][2 * h], high = s[n][2 * h + 1];
        p[n / 2][n % 2 * 2 + h] = pack_bf16(low, high);
        ds[n / 2][n % 2 * 2 + h] = pack_bf16(low * dp[n][2 * h], high * dp[n][2 * h + 1]);
      }
    }
  }
  // Computed where it is used, for the sake of registers.
  __device__ __forceinline__ typename Rule::Bound bound_rule(const Step& step) const {
    return args_.rule.bind(step.sequence, step.head, slice_.sequence.length);
  }

  // Writes dS^T as rows of keys, for both warpgroups. Advancing by two chunks flips another address
  // bit, or moves to the next panel.
  __device__ __forceinline__ void store_scores(const uint32_t (&ds)[kStep / 16][4],
                                               const PipelineState<kStages>& state) const {
    pipelines_.scores.producer_acquire(state);
    const uint32_t to = shared_ + S::kScores + state.index * S::kScoreBytes +
                        panel_offset<kOwnKeys>(warp_row_ + lane_ % 16, lane_ / 16);
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      store_matrices((to ^ (k % 4 << 5)) + k / 4 * (kOwnKeys * 128), ds[k]);
  }

  // c = the warpgroup's rows of `own` times all of `streamed`, over the head dim.
  __device__ __forceinline__ void matmul(float (&c)[kStep / 8][4], uint32_t own,
                                         uint32_t streamed) const {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      wgmma<Major::kK, Major::kK>(
          c, k_major_step<kOwnKeys>(matrix_descriptor(own + group_ * (64 * 128)), k),
          k_major_step<kStep>(matrix_descriptor(streamed), k), k > 0);
  }
  // Issues dV += P^T dO, or dK += dS^T Q.
  __device__ __forceinline__ void issue_gradient(float (&grad)[kDim / 8][4],
                                                 const uint32_t (&own)[kStep / 16][4],
                                                 uint32_t streamed) const {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      wgmma<Major::kMN>(grad, own[k], mn_major_step(matrix_descriptor(streamed, kStep * 128), k));
    wgmma_commit();
  }
  // Issues the block's part of dQ from dS of a stage: a warpgroup has 64 of the queries, or 64 of
  // the columns.
  __device__ __forceinline__ void issue_dq(float (&dq)[8][4], int stage) const {
    const uint32_t scores = shared_ + S::kScores + stage * S::kScoreBytes +
                            (kStep > 64 ? group_ * (kOwnKeys * 128) : 0);
    const uint32_t columns = shared_ + S::kKeys + (kDim > 64 ? group_ * (kOwnKeys * 128) : 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kOwnKeys / 16; ++k)
      wgmma<Major::kMN, Major::kMN>(dq, mn_major_step(matrix_descriptor(scores), k),
                                    mn_major_step(matrix_descriptor(columns), k), k > 0);
  }

  // Writes the warpgroup's half of the dQ of step i to shared memory, for store_dq().
  __device__ __forceinline__ void stage_dq(const float (&dq)[8][4], int i) const {
    const PipelineState<kDqBuffers> state(i);
    pipelines_.dq.producer_acquire(state);
    char* const half = memory_ + S::kDq + (2 * state.index + group_) * S::kHalfBytes;
    const int row = warp_row_ % 64 + lane_ / 4;
    const int first = half_offset(row, lane_ % 4 / 2) + lane_ % 2 * 8;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)  // two packs further flips another bit of the offset
        store_pack(reinterpret_cast<float*>(half + (first ^ n << 5) + h * (8 * 256)),
                   Pack<float, 2>{dq[n][2 * h], dq[n][2 * h + 1]});
  }
  // Commit the writes of stage_dq() and of dS: called later than those, since a proxy fence waits
  // until the writes have completed.
  __device__ __forceinline__ void commit_dq(int i) const {
    fence_proxy_async();
    pipelines_.dq.producer_commit_warp(i, group_);
  }
  __device__ __forceinline__ void commit_scores(const PipelineState<kStages>& state) const {
    fence_proxy_async();
    pipelines_.scores.producer_commit_warp(state);
  }

  const Args& args_;
  const BackwardSlice& slice_;
  char* const memory_;
  const uint32_t shared_;
  const BackwardPipelines pipelines_;
  const int group_, lane_, warp_row_;  // warp_row_: first key of the warp, within the block
  float dk_[kDim / 8][4], dv_[kDim / 8][4];
};

template <int kDim, class Args>
__global__ void __launch_bounds__(BackwardShape<kDim>::kThreads, 1)
    backward_sm90_kernel(const __grid_constant__ Args args,
                         const __grid_constant__ BackwardMaps maps,
                         const __grid_constant__ QueryTiles tiles) {
  launch_dependents_and_wait();
  using S = BackwardShape<kDim, decltype(args.rule)::kMasks>;
  extern __shared__ __align__(1024) char memory[];
  const BackwardPipelines pipelines{shared_address(memory) + S::kBarriers};
  auto& slice = *reinterpret_cast<BackwardSlice*>(memory + S::kSlice);
  if (threadIdx.x < 32) {
    // Blocks wait for those before them, so they are numbered in the order in which they start.
    const int block =
        __shfl_sync(0xffffffffu, threadIdx.x == 0 ? atomicAdd(tiles.blocks_started, 1) : 0, 0);
    const BackwardSlice found =
        find_slice<Pass::kKeys, true>(args, block, S::kOwnKeys, S::kStep, tiles.heads_at_once);
    if (threadIdx.x == 0) {
      slice = found;
      barrier_init(pipelines.own_full, 1);
      barrier_init(pipelines.tail, 1);
      pipelines.queries.init(1, 4 * kConsumers);
      pipelines.dout.init(1, 4 * kConsumers);
      pipelines.scores.init(4 * kConsumers, 4 * kConsumers);
      pipelines.dq.init(4, 1);
    }
  }
  __syncthreads();
  if (slice.own >= slice.sequence.length) return;
  if (threadIdx.x < kWarpgroup) {
    deallocate_registers<S::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0)
      load_streams<S>(args, slice, maps, tiles, memory, pipelines);
    else if (warp <= kDqBuffers && threadIdx.x % 32 == 0)
      store_dq<kDim>(args, slice, tiles, shared_address(memory), pipelines, warp - 1);
  } else {
    allocate_registers<S::kConsumerRegisters>();
    BackwardConsumer<kDim, Args>(args, slice, memory, pipelines).run();
  }
}

// dq (+)= scale times its accumulator, to which no block has added if its queries see no key. A
// thread has 4 columns at a time.
template <int kDim>
__global__ void __launch_bounds__(kTileThreads)
    round_dq_kernel(const __grid_constant__ BackwardArgs<bf16> args,
                    const __grid_constant__ QueryTiles in, float scale) {
  launch_dependents_and_wait();
  constexpr int kStep = BackwardShape<kDim>::kStep, kColumns = BackwardShape<kDim>::kColumns;
  constexpr int kPacks = kColumns / 4;
  const int head = static_cast<int>(blockIdx.x) % args.heads;
  const int slot = static_cast<int>(blockIdx.x) / args.heads;
  const SequenceTile tile = find_tile(args.sequences, slot, kStep);
  const auto* const accum = reinterpret_cast<const char*>(
      in.dq_accum + (static_cast<int64_t>(head) * in.slots + slot) * (kStep * kColumns));
  const auto rows = args.dq.rows(tile.sequence.begin, head);
  const bool any_key = in.dq_semaphores[static_cast<int64_t>(head) * in.slots + slot] > 0;
  for (int i = static_cast<int>(threadIdx.x); i < kStep * kPacks; i += kTileThreads) {
    const int row = i / kPacks, pack = i % kPacks, query = tile.tile * kStep + row;
    if (query >= tile.sequence.length) return;
    if (4 * pack >= args.head_dim) continue;
    // The second half holds the later queries, or the later columns.
    const int half = kStep > 64 ? row / 64 : pack / 16;
    const auto dq = load_pack<4>(reinterpret_cast<const float*>(
        accum + half * BackwardShape<kDim>::kHalfBytes + half_offset(row % 64, pack % 16)));
    bf16* const out = rows.row(query) + 4 * pack;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = any_key ? dq.v[e] * scale : 0.0f;
      if (args.accumulate_q) x[e] += to_float(out[e]);
    }
    store_pack(reinterpret_cast<uint32_t*>(out),
               Pack<uint32_t, 2>{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])});
  }
}

}  // namespace

template <int kDim>
void run_backward_sm90(const BackwardArgs<bf16>& args, const AttentionBackward& in) {
  using S = BackwardShape<kDim>;
  const Device device = in.q.device();
  if (args.tokens == 0) return;
  const int64_t slots = tile_slots(args.tokens, args.sequences.count, S::kStep);
  Tensor dq_accum =
      Tensor::empty(Shape{args.heads * slots, S::kStep, S::kColumns}, DType::kF32, device);
  Tensor semaphores = Tensor::empty(Shape{args.heads * slots + 1}, DType::kI32, device), statistics;
  QueryTiles tiles =
      make_query_tiles<kDim, S::kStep>(args, statistics, pointer<int32_t>(semaphores), device);
  tiles.dq_accum = pointer<float>(dq_accum);
  // The blocks of a head read all queries of its slice and add to all their dQ accumulators.
  const int64_t head_bytes = args.tokens / args.sequences.count * args.group() / args.head_slices *
                             kDim * int64_t{sizeof(float) + 2 * sizeof(bf16)};
  tiles.heads_at_once = heads_in_l2(head_bytes, tile_blocks<Pass::kKeys>(args));
  const auto run = [&]<class Call>(const Call& call) {
    launch("attention_backward", backward_sm90_kernel<kDim, Call>,
           {backward_blocks<Pass::kKeys>(args, S::kOwnKeys), S::kThreads, S::kSharedBytes,
            Start::kProgrammatic},
           device, call, make_backward_maps(in, S::kOwnKeys, S::kStep), tiles);
    launch("attention_backward_queries", round_dq_kernel<kDim>,
           {blocks_for(slots * args.heads, 1), kTileThreads, 0, Start::kProgrammatic}, device, args,
           tiles, call.rule.scale);
  };
  with_rule<WindowRule<float>, MaskRuleFor<kDim>, ModifyRule<float>>(args, in.desc, args.head_dim,
                                                                     args.tokens, run);
}

}  // namespace cohort::kernels::cuda
