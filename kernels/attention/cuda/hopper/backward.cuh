// The attention backward on the tensor cores of sm_90, after FlashAttention-3 (Shah et al. 2024):
// five products for each tile of scores instead of the seven of backward_bf16.cuh, and sums in one
// order all the same.
//
// A block owns 128 keys of one key head and streams the queries that see them past it, kStep at a
// time. Two warpgroups compute, each for 64 of the keys, with keys as rows, so that P and dS go
// from the sums of one product into the factors of the next:
//
//   S^T = K Q^T,  dP^T = V dO^T         sums in registers
//   P^T = exp2(c S^T - lse log2(e)),  dS^T = P^T (dP^T - delta)
//   dV += P^T dO,  dK += dS^T Q         factors from registers
//   dQ += dS K                          over all keys: dS through shared memory, then into memory
//
// The product for dQ comes a step later than the others: a warpgroup needs the dS of both, and need
// not wait for the other one then. They start half a step apart, so that one has products where the
// other has exponentials.
//
// Of a third warpgroup one warp copies, and two threads bring out dQ. Many blocks add to a tile of
// dQ. They take turns, last keys first: those that a causal mask leaves the fewest queries reach a
// tile first, so that nobody waits for long. A block waits only for blocks that were started before
// it. dQ is summed in f32 and rounded by a last kernel.
#pragma once

#include <algorithm>

#include "kernels/attention/cuda/hopper/query_tiles.cuh"
#include "kernels/attention/cuda/hopper/stages.cuh"

namespace cohort::kernels::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kComputing = 2;  // warpgroups
constexpr int kOuts = 2;       // tiles of dQ on their way, each with a thread

template <int kDim_>
struct BackwardShape {
  static constexpr int kDim = kDim_, kColumns = kPanelColumns<kDim>;
  static constexpr int kOwnKeys = 128, kStep = kDim == 64 ? 128 : 64;
  static constexpr int kThreads = kWarpgroup * (1 + kComputing);
  static constexpr int kProducerRegisters = kDim == 64 ? 24 : 40;
  static constexpr int kConsumerRegisters = kDim == 64 ? 240 : 232;
  static constexpr int kOwnBytes = 2 * kOwnKeys * kColumns, kStepBytes = 2 * kStep * kColumns;
  static constexpr int kScoreBytes = 2 * kOwnKeys * kStep;
  // A half of a tile of dQ, 64 x 64 in f32: one of each warpgroup.
  static constexpr int kHalfBytes = 4 * 64 * 64;
  static_assert(2 * kHalfBytes == 4 * kStep * kColumns);
  static constexpr int kKeys = 0, kValues = kOwnBytes, kQueries = 2 * kOwnBytes;
  static constexpr int kGradients = kQueries + kStages * kStepBytes;  // dO
  static constexpr int kScores = kGradients + kStages * kStepBytes;   // dS
  static constexpr int kOut = kScores + kStages * kScoreBytes;        // dQ
  static constexpr int kLse = kOut + kOuts * 2 * kHalfBytes;          // [kStages][kStep]
  static constexpr int kDelta = kLse + kStages * kStep * 4;
  static constexpr int kBarriers = kDelta + kStages * kStep * 4;
  static constexpr int kSteps = kBarriers + 8 * 20;  // [kStages], see Step
  static constexpr int kShare = kSteps + kStages * 8;
  static constexpr int kSharedBytes = kShare + static_cast<int>(sizeof(BackwardShare));
};

// What those that compute have to know of the queries of a stage.
struct Step {
  int first;  // the position of the first of them
  int none;   // whether there are none: no more come
};

struct BackwardBarriers {
  uint32_t first;
  __device__ uint32_t own() const { return first; }
  __device__ uint32_t queries(int stage) const { return first + 8 * (1 + stage); }
  __device__ uint32_t gradients(int stage) const { return first + 8 * (3 + stage); }
  __device__ uint32_t scores(int stage) const { return first + 8 * (5 + stage); }
  __device__ uint32_t no_scores(int stage) const { return first + 8 * (7 + stage); }
  __device__ uint32_t out(int number, int half) const {
    return first + 8 * (9 + 2 * number + half);
  }
  __device__ uint32_t no_out(int number) const { return first + 8 * (13 + number); }
  __device__ uint32_t tail() const { return first + 8 * 15; }
  __device__ uint32_t no_queries(int stage) const { return first + 8 * (16 + stage); }
  __device__ uint32_t no_gradients(int stage) const { return first + 8 * (18 + stage); }
};

// Of describe_heads(), for the block's tile of keys and for tiles of queries.
struct BackwardMaps {
  CUtensorMap k, v, q, dout;
};

// The steps of a block: over the sequences whose queries see its keys, over the heads of its slice,
// over tiles of queries. All parties of a block walk the same way.
template <class Shape>
class Walk {
 public:
  __device__ Walk(const BackwardArgs<bf16>& args, const BackwardShare& share)
      : args_(args),
        share_(share),
        stream_(share.stream),
        sequence_(share.sequence),
        head_(first_head(share.slice)),
        step_(stream_.first) {}
  __device__ bool done() const { return done_; }
  __device__ void next() {
    if (++step_ < stream_.end) return;
    if (++head_ == first_head(share_.slice + 1)) {
      done_ = !next_stream(args_, share_, sequence_, stream_, Shape::kOwnKeys, Shape::kStep);
      head_ = first_head(share_.slice);
    }
    step_ = stream_.first;
  }
  __device__ const BackwardStream& stream() const { return stream_; }
  __device__ int sequence() const { return sequence_; }
  __device__ int head() const { return head_; }
  __device__ int query0() const { return step_ * Shape::kStep; }
  __device__ int rows() const { return stream_.length - query0(); }  // from there on
  __device__ int64_t tile(const QueryTiles& tiles) const {
    return tiles.tile<Shape::kStep>(head_, stream_.begin, sequence_, query0());
  }

 private:
  // Computed where it is needed: registers are few.
  __device__ int first_head(int slice) const {
    return share_.head * args_.group() + args_.slice_begin(slice);
  }

  const BackwardArgs<bf16>& args_;
  const BackwardShare& share_;
  BackwardStream stream_;
  int sequence_, head_, step_;
  bool done_ = false;
};

// How many blocks add to a tile of dQ before this one: those with later keys of the tile's own
// sequence, then those with later keys of its prefix.
template <class Shape>
__device__ __forceinline__ int turn_of(const BackwardArgs<bf16>& args, const BackwardShare& share,
                                       const Walk<Shape>& walk) {
  constexpr int kOwnKeys = Shape::kOwnKeys, kStep = Shape::kStep;
  const BackwardStream& stream = walk.stream();
  const int query0 = walk.query0(), last = min(query0 + kStep, stream.length) - 1;
  const int last_tile = (args.causal ? last : stream.length - 1) / kOwnKeys;
  const int tile = share.own / kOwnKeys;
  if (walk.sequence() == share.sequence) return last_tile - tile;
  const int first_tile = max(0, query0 + 1 - args.window) / kOwnKeys;  // of the sequence's own keys
  return last_tile - first_tile + 1 + (share.length - 1) / kOwnKeys - tile;
}

// A thread begins to copy kRows rows of a head, from `token` on; `barrier` has to expect them.
template <int kColumns, int kRows>
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                          int token, int head) {
#pragma unroll 1
  for (int panel = 0; panel < kColumns / 64; ++panel)
    tma_load(to + panel * (kRows * 128), &map, {{64 * panel, head, token, 0}}, barrier);
}

// The first warp sets a tile's rows from `row` on to zero, before it arrives where the tile is made
// known.
template <int kColumns, int kRows>
__device__ __forceinline__ void clear_rows(uint32_t tile, int row) {
  for (int panel = 0; panel < kColumns / 64; ++panel)
    for (int at = row * 128 + static_cast<int>(threadIdx.x) * 16; at < kRows * 128; at += 32 * 16)
      asm volatile(
          "st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(tile + panel * (kRows * 128) + at),
          "r"(0)
          : "memory");
  fence_before_tma();
  __syncwarp();
}

// The first warp copies. A tile in which a sequence ends comes with what follows there, which
// becomes zeros before others see the tile: it is there at a barrier of its own first.
template <class S>
__device__ __forceinline__ void copy_streams(const BackwardArgs<bf16>& args,
                                             const BackwardShare& share, const BackwardMaps& maps,
                                             const QueryTiles& tiles, char* memory,
                                             const BackwardBarriers& barriers) {
  constexpr int kColumns = S::kColumns, kStep = S::kStep, kOwnKeys = S::kOwnKeys;
  const uint32_t shared = shared_address(memory), tail = barriers.tail();
  const bool first = threadIdx.x == 0;
  const int own_rows = share.length - share.own;
  if (first) {
    const uint32_t barrier = own_rows >= kOwnKeys ? barriers.own() : tail;
    barrier_expect(barrier, 2 * S::kOwnBytes);
    const int token = share.begin + share.own;
    load_tile<kColumns, kOwnKeys>(shared + S::kKeys, maps.k, barrier, token, share.head);
    load_tile<kColumns, kOwnKeys>(shared + S::kValues, maps.v, barrier, token, share.head);
    if (own_rows >= kOwnKeys) barrier_arrive(barrier);
  }
  if (own_rows < kOwnKeys) {
    if (first) barrier_arrive_and_wait(tail);
    __syncwarp();
    clear_rows<kColumns, kOwnKeys>(shared + S::kKeys, own_rows);
    clear_rows<kColumns, kOwnKeys>(shared + S::kValues, own_rows);
    if (first) barrier_arrive(barriers.own());
  }
  auto* const steps = reinterpret_cast<Step*>(memory + S::kSteps);
  int i = 0;
#pragma unroll 1
  for (Walk<S> walk(args, share); !walk.done(); walk.next(), ++i) {
    const Turn<kStages> turn(i);
    const int s = turn.stage;
    const uint32_t queries = shared + S::kQueries + s * S::kStepBytes;
    const uint32_t gradients = shared + S::kGradients + s * S::kStepBytes;
    const auto load = [&](uint32_t to, const CUtensorMap& map, uint32_t barrier, uint32_t numbers,
                          const float* of_queries) {
      const int token = walk.stream().begin + walk.query0();
      barrier_expect(barrier, 4 * kStep);
      bulk_load(numbers, of_queries + kStep * walk.tile(tiles), 4 * kStep, barrier);
      const uint32_t of_rows = walk.rows() >= kStep ? barrier : tail;
      barrier_expect(of_rows, S::kStepBytes);
      load_tile<kColumns, kStep>(to, map, of_rows, token, walk.head());
    };
    barrier_wait(barriers.no_queries(s), turn.parity ^ 1);
    if (first) {
      load(queries, maps.q, barriers.queries(s), shared + S::kLse + s * kStep * 4, tiles.lse_log2);
      steps[s] = {walk.stream().position + walk.query0(), 0};
      if (walk.rows() >= kStep) barrier_arrive(barriers.queries(s));
    }
    barrier_wait(barriers.no_gradients(s), turn.parity ^ 1);
    if (first) {
      load(gradients, maps.dout, barriers.gradients(s), shared + S::kDelta + s * kStep * 4,
           tiles.delta);
      if (walk.rows() >= kStep) barrier_arrive(barriers.gradients(s));
    }
    if (walk.rows() < kStep) {
      if (first) barrier_arrive_and_wait(tail);
      __syncwarp();
      // A query beyond the end has zeros throughout: P = 1 then, but dO = 0 and dS = 0.
      clear_rows<kColumns, kStep>(queries, walk.rows());
      clear_rows<kColumns, kStep>(gradients, walk.rows());
      if (first) {
        barrier_arrive(barriers.queries(s));
        barrier_arrive(barriers.gradients(s));
      }
    }
  }
  const Turn<kStages> turn(i);
  barrier_wait(barriers.no_queries(turn.stage), turn.parity ^ 1);
  if (!first) return;
  steps[turn.stage].none = 1;
  barrier_arrive(barriers.queries(turn.stage));
}

// From shared memory to memory, as a copy or as a sum, beside the thread's own work.
__device__ __forceinline__ void bulk_copy(float* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_add(float* to, uint32_t from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

// Thread `number` of kOuts adds the block's part of dQ of every kOuts-th step to its tile, when it
// is the block's turn there. An addition takes about as long as a step.
template <int kDim>
__device__ __forceinline__ void bring_out(const BackwardArgs<bf16>& args,
                                          const BackwardShare& share, const QueryTiles& out,
                                          uint32_t shared, const BackwardBarriers& barriers,
                                          int number) {
  using S = BackwardShape<kDim>;
  int i = 0;
#pragma unroll 1
  for (Walk<S> walk(args, share); !walk.done(); walk.next(), ++i) {
    if (i % kOuts != number) continue;
    const auto parity = static_cast<uint32_t>(i / kOuts % 2);
    const int64_t tile = walk.tile(out);
    float* const to = out.sums + tile * (S::kStep * S::kColumns);
    int32_t* const turns = out.turns + tile;
    const int turn = turn_of(args, share, walk);
    for (int now = -1; now != turn;)
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(now) : "l"(turns) : "memory");
    // What others have added, by the copy engine as well, comes before this.
    asm volatile("fence.proxy.async.global;\n" ::: "memory");
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      barrier_wait(barriers.out(number, half), parity);
      const uint32_t from = shared + S::kOut + (2 * number + half) * S::kHalfBytes;
      float* const to_half = to + half * (64 * 64);
      if (turn == 0)
        bulk_copy(to_half, from, S::kHalfBytes);
      else
        bulk_add(to_half, from, S::kHalfBytes);
    }
    bulk_commit();
    bulk_wait_read();
    barrier_arrive(barriers.no_out(number));
    bulk_wait();
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;\n" ::"l"(turns) : "memory");
  }
}

// Where a thread's pair of dQ, columns 8 n + 2 quad and the next of row r, lies in a half: packs of
// 16 bytes are swapped around by the row's number, against conflicts of banks.
__device__ __forceinline__ int half_offset(int row, int pack) {
  return row * 256 + ((pack ^ (row % 8 * 2)) << 4);
}

// Numbers of the thread's queries of columns [8 kFirst, 8 kEnd), lse or delta of those from address
// `from` on.
template <int kFirst, int kEnd, int kN>
__device__ __forceinline__ void load_numbers(float (&numbers)[kN][2], uint32_t from) {
  const uint32_t first = from + threadIdx.x % 4 * 8;
#pragma unroll
  for (int n = kFirst; n < kEnd; ++n)  // here, not where the compiler thinks that it is time
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
                 : "=f"(numbers[n][0]), "=f"(numbers[n][1])
                 : "r"(first + 32 * n)
                 : "memory");
}

// S^T of 16 keys from key0 on and 8 kN queries, the first at position `first`, becomes P^T: zero
// where the mask says so and beyond the last key.
template <int kN>
__device__ __forceinline__ void probabilities(float (&s)[kN][4], const float (&lse_log2)[kN][2],
                                              const BackwardArgs<bf16>& args, int length, int key0,
                                              int first) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[n][i] = fast_exp2(__fmaf_rn(s[n][i], args.exponent, -lse_log2[n][i % 2]));
  const bool all_seen =
      !args.causal || (key0 + 15 <= first && first + 8 * kN - 1 - key0 < args.window);
  if (all_seen && key0 + 16 <= length) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // A query sees the keys that are 0 to window - 1 positions before it: one comparison, if that
  // is an unsigned number.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = key0 + lane / 4 + 8 * h;
    const int nearest = args.causal ? first + 2 * (lane % 4) - key : 0;
    const int seen = args.causal ? args.window : 1 << 30;
    const auto limit = static_cast<uint32_t>(key < length ? seen : 0);
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (static_cast<uint32_t>(nearest + 8 * n + i) >= limit) s[n][2 * h + i] = 0;
  }
}

// Calls fn(row, column, value, next) for the thread's pairs of a gradient of a warp's rows, which
// start at `row0`; `length`: where they end.
template <int kN, class Fn>
__device__ __forceinline__ void for_pairs(const float (&sum)[kN][4], float scale, int row0,
                                          int length, int head_dim, Fn&& fn) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + lane / 4 + 8 * h;
    if (row >= length) continue;
#pragma unroll
    for (int n = 0; n < kN; ++n)
      if (8 * n < head_dim)
        fn(row, 8 * n + 2 * (lane % 4), sum[n][2 * h] * scale, sum[n][2 * h + 1] * scale);
  }
}

template <int kN>
__device__ __forceinline__ void store_rows(const float (&sum)[kN][4], HeadRows<bf16> rows,
                                           float scale, bool accumulate, int row0, int length,
                                           int head_dim) {
  for_pairs(sum, scale, row0, length, head_dim, [&](int row, int column, float low, float high) {
    bf16* const out = rows.row(row) + column;
    if (accumulate) {
      low += to_float(out[0]);
      high += to_float(out[1]);
    }
    *reinterpret_cast<uint32_t*>(out) = pack_bf16(low, high);
  });
}

// A gradient of a warp's own keys, which start at `row0`: dk or dv, or this slice's part of it.
template <int kN>
__device__ __forceinline__ void store_keys(const float (&sum)[kN][4],
                                           const BackwardArgs<bf16>& args,
                                           const BackwardShare& share, const Heads<bf16>& out,
                                           float* slices, float scale, bool accumulate, int row0) {
  if (args.slices == 1) {
    store_rows(sum, out.rows(share.begin, share.head, args.head_dim), scale, accumulate, row0,
               share.length, args.head_dim);
    return;
  }
  for_pairs(sum, scale, row0, share.length, args.head_dim,
            [&](int key, int column, float low, float high) {
              const int64_t token = share.slice * args.tokens + share.begin + key;
              store_pack(slices + (token * args.kv_heads + share.head) * args.head_dim + column,
                         Pack<float, 2>{low, high});
            });
}

template <int kDim>
class BackwardConsumer {
 public:
  __device__ BackwardConsumer(const BackwardArgs<bf16>& args, const BackwardShare& share,
                              char* memory, const BackwardBarriers& barriers)
      : args_(args),
        share_(share),
        memory_(memory),
        shared_(shared_address(memory)),
        barriers_(barriers),
        group_(uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_row_(64 * group_ + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dk_[n][i] = dv_[n][i] = 0;
    barrier_wait(barriers_.own(), 0);
    if (group_ > 0) named_barrier(1, kComputing * kWarpgroup);
    int i = 0;
#pragma unroll 1
    for (;; ++i) {
      const Turn<kStages> turn(i);
      barrier_wait(barriers_.queries(turn.stage), turn.parity);
      const Step step = reinterpret_cast<const Step*>(memory_ + S::kSteps)[turn.stage];
      if (step.none != 0) break;
      work(i, step.first);
    }
    // The last step's part of dQ; a block has at least one step.
    if (i > 1) show_queries(i - 2);
    float dq[8][4];
    barrier_wait(barriers_.scores(Turn<kStages>(i - 1).stage), Turn<kStages>(i - 1).parity);
    add_queries(dq, Turn<kStages>(i - 1).stage);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(dq);
    hand_over(dq, i - 1);
    show_queries(i - 1);
    const int key0 = share_.own + warp_row_;
    store_keys(dk_, args_, share_, args_.dk, args_.slices_k, args_.scale, args_.accumulate_k, key0);
    store_keys(dv_, args_, share_, args_.dv, args_.slices_v, 1.0f, args_.accumulate_v, key0);
  }

 private:
  using S = BackwardShape<kDim>;
  static constexpr int kOwnKeys = S::kOwnKeys, kStep = S::kStep;

  // Step i of the block; `first`: the position of its first query.
  __device__ __forceinline__ void work(int i, int first) {
    const Turn<kStages> turn(i);
    const uint32_t queries = shared_ + S::kQueries + turn.stage * S::kStepBytes;
    const uint32_t gradients = shared_ + S::kGradients + turn.stage * S::kStepBytes;
    float s[kStep / 8][4], dp[kStep / 8][4];
    // As many of lse and delta as there are registers for are read before the products.
    float lse_log2[kStep / 8][2], delta[kStep / 8][2];
    const uint32_t of_lse = shared_ + S::kLse + turn.stage * (4 * kStep);
    const uint32_t of_delta = shared_ + S::kDelta + turn.stage * (4 * kStep);
    load_numbers<0, 8>(lse_log2, of_lse);
    product(s, shared_ + S::kKeys, queries);
    wgmma_commit();
    barrier_wait(barriers_.gradients(turn.stage), turn.parity);
    product(dp, shared_ + S::kValues, gradients);
    wgmma_commit();
    if (i > 1) show_queries(i - 2);
    load_numbers<0, 2>(delta, of_delta);
    wgmma_wait<1>();
    wgmma_hold(s);
    load_numbers<8, kStep / 8>(lse_log2, of_lse);
    probabilities(s, lse_log2, args_, share_.length, share_.own + warp_row_, first);
    if (group_ == 0 && i == 0) named_arrive(1, kComputing * kWarpgroup);
    wgmma_wait<0>();
    wgmma_hold(dp);
    load_numbers<2, kStep / 8>(delta, of_delta);
    uint32_t p[kStep / 16][4], ds[kStep / 16][4];
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = s[n][2 * h], high = s[n][2 * h + 1];
        p[n / 2][n % 2 * 2 + h] = pack_bf16(low, high);
        ds[n / 2][n % 2 * 2 + h] =
            pack_bf16(low * (dp[n][2 * h] - delta[n][0]), high * (dp[n][2 * h + 1] - delta[n][1]));
      }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      wgmma<Read::kAcrossRows>(dv_, p[k], across_rows(wgmma_factor(gradients, kStep * 128), k));
    wgmma_commit();
    // dS^T as rows of keys; the other warpgroup reads it, too. Two chunks further on is another bit
    // of the address, or the next panel.
    barrier_wait(barriers_.no_scores(turn.stage), turn.parity ^ 1);
    const uint32_t to = shared_ + S::kScores + turn.stage * S::kScoreBytes +
                        panel_offset<kOwnKeys>(warp_row_ + lane_ % 16, lane_ / 16);
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      store_matrices((to ^ (k % 4 << 5)) + k / 4 * (kOwnKeys * 128), ds[k]);
    if (i == 0) {
      add_keys(ds, queries);
      show_scores(turn.stage);
      wgmma_wait<1>();
      release(barriers_.no_gradients(turn.stage));
    } else {
      const Turn<kStages> last(i - 1);
      barrier_wait(barriers_.scores(last.stage), last.parity);
      float dq[8][4];
      add_queries(dq, last.stage);
      wgmma_commit();
      add_keys(ds, queries);
      show_scores(turn.stage);
      wgmma_wait<1>();
      wgmma_hold(dq);
      release(barriers_.no_gradients(turn.stage));
      release(barriers_.no_scores(last.stage));
      hand_over(dq, i - 1);
    }
    wgmma_wait<0>();
    wgmma_hold(dk_);
    wgmma_hold(dv_);
    release(barriers_.no_queries(turn.stage));
  }

  // c = the warpgroup's rows of `own` times all of `streamed`, over the head dim.
  __device__ __forceinline__ void product(float (&c)[kStep / 8][4], uint32_t own,
                                          uint32_t streamed) const {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      wgmma<Read::kAlongRows, Read::kAlongRows>(
          c, along_rows<kOwnKeys>(wgmma_factor(own + group_ * (64 * 128)), k),
          along_rows<kStep>(wgmma_factor(streamed), k), k > 0);
  }
  // dK += dS^T Q is issued.
  __device__ __forceinline__ void add_keys(const uint32_t (&ds)[kStep / 16][4], uint32_t queries) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      wgmma<Read::kAcrossRows>(dk_, ds[k], across_rows(wgmma_factor(queries, kStep * 128), k));
    wgmma_commit();
  }
  // The block's part of dQ, of a stage's dS, is issued: a warpgroup has 64 of the queries, or 64 of
  // the columns.
  __device__ __forceinline__ void add_queries(float (&dq)[8][4], int stage) const {
    const uint32_t scores = shared_ + S::kScores + stage * S::kScoreBytes +
                            (kStep > 64 ? group_ * (kOwnKeys * 128) : 0);
    const uint32_t columns = shared_ + S::kKeys + (kDim > 64 ? group_ * (kOwnKeys * 128) : 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kOwnKeys / 16; ++k)
      wgmma<Read::kAcrossRows, Read::kAcrossRows>(dq, across_rows(wgmma_factor(scores), k),
                                                  across_rows(wgmma_factor(columns), k), k > 0);
  }

  // The warpgroup's half of step i's tile of dQ, for bring_out().
  __device__ __forceinline__ void hand_over(const float (&dq)[8][4], int i) const {
    const int number = i % kOuts;
    barrier_wait(barriers_.no_out(number), static_cast<uint32_t>(i / kOuts % 2) ^ 1);
    char* const half = memory_ + S::kOut + (2 * number + group_) * S::kHalfBytes;
    const int row = warp_row_ % 64 + lane_ / 4;
    const int first = half_offset(row, lane_ % 4 / 2) + lane_ % 2 * 8;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)  // two packs further on is another bit of the offset
        store_pack(reinterpret_cast<float*>(half + (first ^ n << 5) + h * (8 * 256)),
                   Pack<float, 2>{dq[n][2 * h], dq[n][2 * h + 1]});
  }
  // Makes known what hand_over() and the stores of dS have written: later than they, since a fence
  // waits until the writes have ended.
  __device__ __forceinline__ void show_queries(int i) const {
    fence_before_tma();
    release(barriers_.out(i % kOuts, group_));
  }
  __device__ __forceinline__ void show_scores(int stage) const {
    fence_before_tma();
    release(barriers_.scores(stage));
  }

  const BackwardArgs<bf16>& args_;
  const BackwardShare& share_;
  char* const memory_;
  const uint32_t shared_;
  const BackwardBarriers barriers_;
  const int group_, lane_, warp_row_;  // warp_row_: the warp's first key, in the block
  float dk_[kDim / 8][4], dv_[kDim / 8][4];
};

template <int kDim>
__global__ void __launch_bounds__(BackwardShape<kDim>::kThreads, 1)
    backward_hopper_kernel(const __grid_constant__ BackwardArgs<bf16> args,
                           const __grid_constant__ BackwardMaps maps,
                           const __grid_constant__ QueryTiles tiles) {
  start_beside_previous();
  using S = BackwardShape<kDim>;
  extern __shared__ __align__(1024) char memory[];
  const BackwardBarriers barriers{shared_address(memory) + S::kBarriers};
  auto& share = *reinterpret_cast<BackwardShare*>(memory + S::kShare);
  if (threadIdx.x < 32) {
    const BackwardShare found =
        find_share<Pass::kKeys, true>(args, S::kOwnKeys, S::kStep, tiles.heads_at_once);
    if (threadIdx.x == 0) {
      share = found;
      barrier_init(barriers.own(), 1);
      barrier_init(barriers.tail(), 1);
      for (int stage = 0; stage < kStages; ++stage) {
        barrier_init(barriers.queries(stage), 1);
        barrier_init(barriers.gradients(stage), 1);
        barrier_init(barriers.no_queries(stage), 4 * kComputing);
        barrier_init(barriers.no_gradients(stage), 4 * kComputing);
        barrier_init(barriers.scores(stage), 4 * kComputing);
        barrier_init(barriers.no_scores(stage), 4 * kComputing);
      }
      for (int number = 0; number < kOuts; ++number) {
        for (int half = 0; half < 2; ++half) barrier_init(barriers.out(number, half), 4);
        barrier_init(barriers.no_out(number), 1);
      }
    }
  }
  __syncthreads();
  if (share.own >= share.length) return;
  if (threadIdx.x < kWarpgroup) {
    release_registers<S::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0)
      copy_streams<S>(args, share, maps, tiles, memory, barriers);
    else if (warp <= kOuts && threadIdx.x % 32 == 0)
      bring_out<kDim>(args, share, tiles, shared_address(memory), barriers, warp - 1);
  } else {
    take_registers<S::kConsumerRegisters>();
    BackwardConsumer<kDim>(args, share, memory, barriers).run();
  }
}

// dq (+)= scale times its sums. A thread has 4 columns at a time.
template <int kDim>
__global__ void __launch_bounds__(kTileThreads)
    round_queries_kernel(const __grid_constant__ BackwardArgs<bf16> args,
                         const __grid_constant__ QueryTiles in) {
  start_beside_previous();
  constexpr int kStep = BackwardShape<kDim>::kStep, kColumns = BackwardShape<kDim>::kColumns;
  constexpr int kPacks = kColumns / 4;
  const int head = static_cast<int>(blockIdx.x) % args.heads;
  const int slot = static_cast<int>(blockIdx.x) / args.heads;
  const SequenceTile tile = find_tile(args.cu, args.sequences, slot, kStep);
  const auto* const sums = reinterpret_cast<const char*>(
      in.sums + (static_cast<int64_t>(head) * in.slots + slot) * (kStep * kColumns));
  const auto rows = args.dq.rows(tile.begin, head, args.head_dim);
  for (int i = static_cast<int>(threadIdx.x); i < kStep * kPacks; i += kTileThreads) {
    const int row = i / kPacks, pack = i % kPacks, query = tile.tile * kStep + row;
    if (query >= tile.length) return;
    if (4 * pack >= args.head_dim) continue;
    // One of the halves has other queries, or other columns.
    const int half = kStep > 64 ? row / 64 : pack / 16;
    const auto sum = load_pack<4>(reinterpret_cast<const float*>(
        sums + half * BackwardShape<kDim>::kHalfBytes + half_offset(row % 64, pack % 16)));
    bf16* const out = rows.row(query) + 4 * pack;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = sum.v[e] * args.scale;
      if (args.accumulate_q) x[e] += to_float(out[e]);
    }
    store_pack(reinterpret_cast<uint32_t*>(out),
               Pack<uint32_t, 2>{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])});
  }
}

}  // namespace

template <int kDim>
void run_backward_hopper(const BackwardArgs<bf16>& args, const AttentionBackward& in) {
  using S = BackwardShape<kDim>;
  const Device device = in.q.device();
  if (args.tokens == 0) return;
  const int64_t slots = tile_slots(args.tokens, args.sequences, S::kStep);
  Tensor sums =
      Tensor::empty(Shape{args.heads * slots, S::kStep, S::kColumns}, DType::kF32, device);
  Tensor turns = Tensor::empty(Shape{args.heads * slots}, DType::kI32, device), numbers;
  QueryTiles tiles =
      make_query_tiles<kDim, S::kStep>(args, numbers, pointer<int32_t>(turns), device);
  tiles.sums = pointer<float>(sums);
  // A head's blocks read all the queries of its slice and add to all their sums.
  constexpr int64_t kCache = 32 << 20;
  const int64_t head_bytes = args.tokens / args.sequences * args.group() / args.slices * kDim *
                             int64_t{sizeof(float) + 2 * sizeof(bf16)};
  tiles.heads_at_once = static_cast<int>(std::clamp<int64_t>(
      kCache / std::max<int64_t>(head_bytes, 1), 1, tile_blocks<Pass::kKeys>(args)));
  launch("attention_backward", backward_hopper_kernel<kDim>,
         {backward_blocks<Pass::kKeys>(args, S::kOwnKeys), S::kThreads, S::kSharedBytes,
          Start::kBesidePrevious},
         device, args,
         BackwardMaps{.k = describe_heads(in.k, S::kOwnKeys),
                      .v = describe_heads(in.v, S::kOwnKeys),
                      .q = describe_heads(in.q, S::kStep),
                      .dout = describe_heads(in.dout, S::kStep)},
         tiles);
  launch("attention_backward_queries", round_queries_kernel<kDim>,
         {blocks_for(slots * args.heads, 1), kTileThreads, 0, Start::kBesidePrevious}, device, args,
         tiles);
}

}  // namespace cohort::kernels::cuda
