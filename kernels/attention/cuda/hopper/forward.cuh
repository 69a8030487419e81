// The attention forward on the tensor cores of sm_90, in the canonical order of attention.h and
// with the bits of attend.cuh, after FlashAttention-3 (Shah et al. 2024).
//
// A block has 64 query rows of one head for each of its warpgroups that compute. One more
// warpgroup, the producer, only copies: the queries, then tiles of 128 keys and values into two
// stages each. Both sides meet at barriers in shared memory, a pair for each stage: full, and empty
// again. When a block has done with some rows it draws the next ones, whose queries and keys are
// copied while the last O is written. Heads of more than 128 columns have tiles of 64 keys, and O
// takes the place of their queries on its way out. A head of 96 lies in shared memory as one of
// 128, whose last columns no product reads.
//
// For heads of 96 and 128 the two warpgroups that compute take turns to issue their products, so
// that one has exponentials where the other has products. Each takes a turn for every tile of the
// block, those that its rows do not see among them: none waits for a turn that does not come.
//
// A warpgroup overlaps the two products of neighbouring tiles with the exponentials between them.
// A thread has parts of two rows:
//
//   S(t + 1) = Q K(t + 1)^T and O += P(t) V(t) are issued;
//   when the first is there, the first row's S(t + 1) becomes P(t + 1), alpha, and beside its
//   exponentials the second row's maximum is looked for;
//   when the second is there, O = alpha O;
//   the second row's exponentials, and beside them P(t + 1) is rounded; and so on.
//
// S, P and O stay in registers. Where a chunk of keys ends nothing overlaps: O and l are joined
// with those of the chunks before, which wait in shared memory, of wide heads in global memory.
//
// The copy engine brings tiles that are rows of one tensor one after the other; the threads of the
// producer copy a tile in which a prefix or the sequence ends, with zeros for what is not there.
// Queries beyond the end may be anything: a row's results depend on itself alone, and those of such
// rows are not stored.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "core/replay.h"
#include "kernels/attention/cuda/forward.cuh"
#include "kernels/attention/cuda/hopper/stages.cuh"

namespace cohort::kernels::cuda {
namespace {

// How many items have been drawn, and how many blocks have found none left. The last of these sets
// both to zero, for the next launch.
struct Drawn {
  int32_t items, blocks;
};

// What a block works on next; none: there is nothing left.
struct Item {
  PackedRows<__nv_bfloat16> rows;
  bool none;

  __device__ int first_tile(int tile_keys) const { return rows.first_key / tile_keys; }
  __device__ int tiles(int tile_keys) const { return (rows.keys + tile_keys - 1) / tile_keys; }
};

// kConsumers warpgroups compute. Registers a thread: what a block of so many threads starts with is
// the same for all; the producer gives up some of its own. All of them together may be no more than
// that: 168 of each of 384 threads, 128 of each of 512. Item n has its queries in stage
// n % kQueryStages.
template <int kDim_>
struct HopperShape {
  static constexpr int kDim = kDim_, kColumns = kPanelColumns<kDim>;
  static constexpr int kConsumers = kDim == 64 ? 3 : 2;
  static constexpr int kRows = 64 * kConsumers, kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = kDim == 64    ? 32
                                            : kDim <= 128 ? 56
                                            : kDim <= 192 ? 40
                                                          : 24;
  static constexpr int kConsumerRegisters = kDim == 64    ? 160
                                            : kDim <= 128 ? 224
                                            : kDim <= 192 ? 232
                                                          : 240;
  static constexpr int kQueryStages = kDim == 64 ? 2 : 1;
  static constexpr bool kTurns = kDim > 64 && kDim <= 128;  // whether warpgroups take turns
  static constexpr bool kJoinsInShared = kDim <= 128;
  static constexpr int kKeys = kTileKeys<kDim>;
  static constexpr int kTileBytes = 2 * kKeys * kColumns, kQueryBytes = 2 * 64 * kColumns;
  static constexpr int kKeyTiles = kQueryStages * kConsumers * kQueryBytes;
  static constexpr int kValueTiles = kKeyTiles + kStages * kTileBytes;
  static constexpr int kJoined = kValueTiles + kStages * kTileBytes;
  static constexpr int kBarriers =
      kJoined + (kJoinsInShared ? static_cast<int>(joined_bytes(kRows, kColumns)) : 0);
  static constexpr int kItems = kBarriers + 8 * 8 * kStages;  // see Item
  static constexpr int kSharedBytes = kItems + kStages * static_cast<int>(sizeof(Item));
};

// Addresses of barriers: what is there, and what has been used.
struct Barriers {
  uint32_t first;
  __device__ uint32_t item(int stage) const { return at(0, stage); }
  __device__ uint32_t no_item(int stage) const { return at(1, stage); }
  __device__ uint32_t keys(int stage) const { return at(2, stage); }
  __device__ uint32_t no_keys(int stage) const { return at(3, stage); }
  __device__ uint32_t values(int stage) const { return at(4, stage); }
  __device__ uint32_t no_values(int stage) const { return at(5, stage); }
  __device__ uint32_t queries(int stage) const { return at(6, stage); }
  __device__ uint32_t no_queries(int stage) const { return at(7, stage); }

 private:
  __device__ uint32_t at(int kind, int stage) const { return first + 8 * (kind * kStages + stage); }
};

// Of describe_heads(), for 64 queries, and for tiles of keys.
struct ForwardMaps {
  CUtensorMap q, k, v;
};

// Copies by some warps of a block. What a group of copies has brought is made known one group
// later, so that two are under way at a time: when the thread's own copies have ended, what they
// wrote is shown to the tensor cores, and the thread arrives.
class Producer {
 public:
  // Ends a group of copies; those that wait at `barrier` may read when it is there.
  __device__ __forceinline__ void submit(uint32_t barrier) {
    copy_async_commit();
    if (waiting_ != 0) {
      copy_async_wait<1>();
      show();
    }
    waiting_ = barrier;
  }
  // Waits until a stage is empty; what is under way is made known first, since those who empty the
  // stage may wait for it.
  __device__ __forceinline__ void wait_empty(uint32_t barrier, uint32_t parity) {
    if (barrier_is_done(barrier, parity)) return;
    finish();
    barrier_wait(barrier, parity);
  }
  __device__ __forceinline__ void finish() {
    if (waiting_ == 0) return;
    copy_async_wait<0>();
    show();
    waiting_ = 0;
  }

 private:
  __device__ __forceinline__ void show() {
    fence_before_tma();  // also orders what was written before reads by the tensor cores
    barrier_arrive(waiting_);
  }
  uint32_t waiting_ = 0;
};

template <class Shape>
class ForwardProducer {
 public:
  __device__ ForwardProducer(const ForwardProblem<__nv_bfloat16>& problem, const ForwardMaps& maps,
                             Drawn* drawn, char* memory, const Barriers& barriers)
      : problem_(problem),
        maps_(maps),
        drawn_(drawn),
        items_(reinterpret_cast<Item*>(memory + Shape::kItems)),
        shared_(shared_address(memory)),
        barriers_(barriers) {}

  __device__ __forceinline__ void run() {
    int tile_number = 0;
#pragma unroll 1
    for (int n = 0;; ++n) {
      const Item& item = draw(n);
      if (item.none) break;
      const int first_tile = item.first_tile(Shape::kKeys), tiles = item.tiles(Shape::kKeys);
      copy_keys(item.rows, first_tile, tile_number);
      copy_queries(n, item.rows);
      // A tile's keys are used before the values of the tile before it.
#pragma unroll 1
      for (int tile = first_tile; tile < tiles; ++tile, ++tile_number) {
        if (tile + 1 < tiles) copy_keys(item.rows, tile + 1, tile_number + 1);
        copy_values(item.rows, tile, tile_number);
      }
    }
    producer_.finish();
    if (threadIdx.x == 0 && atomicAdd(&drawn_->blocks, 1) + 1 == static_cast<int>(gridDim.x))
      *drawn_ = {0, 0};
  }

 private:
  // Item number n of the block, made known to all. The first warp looks for it.
  __device__ __forceinline__ const Item& draw(int n) {
    const Turn<kStages> turn(n);
    Item& item = items_[turn.stage];
    if (threadIdx.x < 32) {
      producer_.wait_empty(barriers_.no_item(turn.stage), turn.parity ^ 1);
      const int blocks = problem_.slots * problem_.heads;
      int block = 0;
      do {  // all threads write the same rows
        if (threadIdx.x == 0) block = atomicAdd(&drawn_->items, 1);
        block = uniform(block);
      } while (block < blocks && !problem_.find(block, Shape::kRows, item.rows));
      item.none = block >= blocks;
      barrier_arrive(barriers_.item(turn.stage));
    }
    named_barrier(1, kWarpgroup);
    return item;
  }

  __device__ __forceinline__ void copy_queries(int n, const PackedRows<__nv_bfloat16>& rows) {
    const Turn<Shape::kQueryStages> turn(n);
    const uint32_t barrier = barriers_.queries(turn.stage);
    producer_.wait_empty(barriers_.no_queries(turn.stage), turn.parity ^ 1);
    if (threadIdx.x == 0) {
      barrier_expect(barrier, Shape::kConsumers * Shape::kQueryBytes);
      for (int w = 0; w < Shape::kConsumers; ++w) {
        // Of a warpgroup without rows: the first ones again.
        const int row = 64 * w < rows.count ? 64 * w : 0;
        const uint32_t to = shared_ + (turn.stage * Shape::kConsumers + w) * Shape::kQueryBytes;
        for (int panel = 0; panel < Shape::kColumns / 64; ++panel)
          tma_load(to + panel * (64 * 128), &maps_.q,
                   {{64 * panel, rows.number, static_cast<int>(rows.token(row)), 0}}, barrier);
      }
      barrier_arrive(barrier);
    }
  }

  __device__ __forceinline__ void copy_keys(const PackedRows<__nv_bfloat16>& rows, int tile,
                                            int number) {
    const Turn<kStages> turn(number);
    producer_.wait_empty(barriers_.no_keys(turn.stage), turn.parity ^ 1);
    copy(rows, tile, Shape::kKeyTiles + turn.stage * Shape::kTileBytes, rows.k, &maps_.k,
         barriers_.keys(turn.stage));
  }
  __device__ __forceinline__ void copy_values(const PackedRows<__nv_bfloat16>& rows, int tile,
                                              int number) {
    const Turn<kStages> turn(number);
    producer_.wait_empty(barriers_.no_values(turn.stage), turn.parity ^ 1);
    copy(rows, tile, Shape::kValueTiles + turn.stage * Shape::kTileBytes, rows.v, &maps_.v,
         barriers_.values(turn.stage));
  }

  __device__ __forceinline__ void copy(const PackedRows<__nv_bfloat16>& rows, int tile,
                                       uint32_t offset, const __nv_bfloat16* from,
                                       const CUtensorMap* map, uint32_t barrier) {
    const int key0 = tile * Shape::kKeys, end = key0 + Shape::kKeys;
    const uint32_t to = shared_ + offset;
    if (end <= rows.all_keys && (key0 >= rows.prefix || end <= rows.prefix)) {
      producer_.finish();
      if (threadIdx.x == 0) {
        const int token = key0 < rows.prefix ? rows.prefix_begin + key0
                                             : static_cast<int>(rows.begin) + key0 - rows.prefix;
        barrier_expect(barrier, Shape::kTileBytes);
        for (int panel = 0; panel < Shape::kColumns / 64; ++panel)
          tma_load(to + panel * (Shape::kKeys * 128), map, {{64 * panel, rows.kv_head, token, 0}},
                   barrier);
      }
      barrier_arrive(barrier);
      return;
    }
    copy_rows<Shape::kColumns, Shape::kKeys, kWarpgroup>(to, problem_.params.head_dim, [&](int r) {
      const int64_t row = rows.key_offset(key0 + r);
      return row < 0 ? nullptr : from + row;
    });
    producer_.submit(barrier);
  }

  const ForwardProblem<__nv_bfloat16>& problem_;
  const ForwardMaps& maps_;
  Drawn* const drawn_;
  Item* const items_;
  const uint32_t shared_;
  const Barriers barriers_;
  Producer producer_;
};

template <class Shape>
class Consumer {
 public:
  // tile_number: of the item's first tile, among all of the block; n: of the item.
  __device__ Consumer(const PackedRows<__nv_bfloat16>& rows,
                      const ForwardProblem<__nv_bfloat16>& problem, char* memory,
                      const Barriers& barriers, int tile_number, int n)
      : rows_(rows),
        params_(problem.params),
        shared_(shared_address(memory)),
        barriers_(barriers),
        tile_number_(tile_number),
        queries_(n) {
    auto* const joined = reinterpret_cast<float*>(memory + Shape::kJoined);
    if constexpr (Shape::kJoinsInShared)
      joined_ = {.o = joined, .states = joined + Shape::kRows * kColumns};
    else
      joined_ = problem.joined.from(int64_t{Shape::kRows} * blockIdx.x, kColumns);
    group_ = uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1);
    const int seen[2] = {rows.visible(own_row()), rows.visible(own_row() + 8)};
    least_ = __reduce_min_sync(0xffffffffu, min(seen[0], seen[1]));
    hidden_ = __reduce_max_sync(0xffffffffu, max(seen[0], seen[1])) - params_.window;
  }

  // Tiles [first_tile, tiles) of the block; this warpgroup's rows see some of [first, end) alone.
  __device__ __forceinline__ void run(int first_tile, int tiles) {
    const int last_row = min(rows_.count, 64 * group_ + 64) - 1;
    const bool any = 64 * group_ < rows_.count;
    const int seen = any ? rows_.visible(last_row) : 0;
    const int end = uniform((seen + kKeys - 1) / kKeys);
    const int before = any ? rows_.visible(64 * group_) - params_.window : 0;
    const int first = uniform(any ? max(first_tile, before / kKeys) : first_tile);
#pragma unroll 1
    for (int tile = first_tile; tile < first; ++tile) pass(tile - first_tile);
    if (any) {
      attend(first_tile, first, end);
    } else {
      barrier_wait(barriers_.queries(queries_.stage), queries_.parity);
      release(barriers_.no_queries(queries_.stage));
    }
#pragma unroll 1
    for (int tile = any ? end : first; tile < tiles; ++tile) pass(tile - first_tile);
  }

 private:
  static constexpr int kDim = Shape::kDim, kColumns = Shape::kColumns;
  static constexpr int kKeys = Shape::kKeys, kGroups = kKeys / 16;
  static constexpr int kChunkTiles = static_cast<int>(kAttentionChunk) / kKeys;

  // The first row of the warp, and of the thread; computed where they are needed.
  __device__ __forceinline__ int row() const {
    return opaque(static_cast<int>(threadIdx.x)) / 32 * 16 - kWarpgroup / 32 * 16;
  }
  __device__ __forceinline__ int own_row() const {
    return row() + opaque(static_cast<int>(threadIdx.x)) % 32 / 4;
  }

  // Whether O goes through where the queries were.
  static constexpr bool kThroughQueries = !Shape::kJoinsInShared;

  // A warpgroup's turn begins when the one before it ends its own; the first one's begins when the
  // last one has ended that for the tile before.
  __device__ __forceinline__ void begin_turn() const {
    if constexpr (Shape::kTurns) named_barrier(2 + group_, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (Shape::kTurns) named_arrive(2 + (group_ + 1) % Shape::kConsumers, 2 * kWarpgroup);
  }

  // Lets a tile go by.
  __device__ __forceinline__ void pass(int i) {
    begin_turn();
    end_turn();
    const Turn<kStages> turn(tile_number_ + i);
    barrier_wait(barriers_.keys(turn.stage), turn.parity);
    release(barriers_.no_keys(turn.stage));
    barrier_wait(barriers_.values(turn.stage), turn.parity);
    release(barriers_.no_values(turn.stage));
  }

  // S = Q K^T is issued.
  __device__ __forceinline__ void issue_scores(int i) {
    const Turn<kStages> turn(tile_number_ + i);
    barrier_wait(barriers_.keys(turn.stage), turn.parity);
    const WgmmaFactor queries = wgmma_factor(shared_).plus(
        (queries_.stage * Shape::kConsumers + group_) * Shape::kQueryBytes);
    const WgmmaFactor keys =
        wgmma_factor(shared_).plus(Shape::kKeyTiles).plus(turn.stage * Shape::kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      wgmma<Read::kAlongRows, Read::kAlongRows>(s_, along_rows<64>(queries, k),
                                                along_rows<kKeys>(keys, k), k > 0);
    wgmma_commit();
  }
  // O += P V is issued.
  __device__ __forceinline__ void issue_values(int i) {
    const Turn<kStages> turn(tile_number_ + i);
    barrier_wait(barriers_.values(turn.stage), turn.parity);
    const WgmmaFactor values = wgmma_factor(shared_, kKeys * 128)
                                   .plus(Shape::kValueTiles)
                                   .plus(turn.stage * Shape::kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kGroups; ++k) wgmma<Read::kAcrossRows>(o_, p_[k], across_rows(values, k));
    wgmma_commit();
  }

  // The first row's half of P. Returns what the second row's exponents are relative to.
  template <bool kMasked>
  __device__ __forceinline__ float begin_softmax(float (&alpha)[2]) {
    const float c = params_.c;
    const float first = largest_score<kGroups, kMasked>(s_, 0, -INFINITY, kGroups);
    const float origin = raise_maximum<kMasked>(first, 0, state_, alpha[0], c);
    exponentiate<kGroups, kMasked>(s_, 0, state_, c, origin, kGroups);
    // -infinity, or NaN, which any score replaces; but not before `first` is there, so that the
    // compiler puts the second row's maxima beside the first one's exponentials.
    const float least = __fmaf_rn(first, 0.0f, -INFINITY);
    const float second = largest_score<kGroups, kMasked>(s_, 1, least, kGroups);
    return raise_maximum<kMasked>(second, 1, state_, alpha[1], c);
  }
  __device__ __forceinline__ float begin_softmax(int tile, float (&alpha)[2]) {
    const int key0 = tile * kKeys;
    const bool hides = hidden_ > key0;
    if (least_ >= key0 + kKeys && !hides) return begin_softmax<false>(alpha);
    const int row = own_row();
    mask_scores<kGroups>(s_, {rows_.visible(row) - key0, rows_.visible(row + 8) - key0},
                         params_.window, kGroups, hides);
    return begin_softmax<true>(alpha);
  }
  // The second row's half, and P rounded.
  __device__ __forceinline__ void end_softmax(float origin) {
    exponentiate<kGroups, false>(s_, 1, state_, params_.c, origin, kGroups);
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
    barrier_wait(barriers_.queries(queries_.stage), queries_.parity);
    begin_turn();
    issue_scores(first - first_tile);
    end_turn();
    wgmma_wait<0>();
    wgmma_hold(s_);
    release(barriers_.no_keys(Turn<kStages>(tile_number_ + first - first_tile).stage));
    end_softmax(begin_softmax(first, alpha));
#pragma unroll 1
    for (int tile = first;; ++tile) {
      const int i = tile - first_tile;
      if (tile + 1 == end) {
        if (!kThroughQueries) release(barriers_.no_queries(queries_.stage));
        issue_values(i);
        wgmma_wait<0>();
        wgmma_hold(o_);
        release(barriers_.no_values(Turn<kStages>(tile_number_ + i).stage));
        break;
      }
      begin_turn();
      issue_scores(i + 1);
      issue_values(i);
      end_turn();
      wgmma_wait<1>();
      wgmma_hold(s_);
      release(barriers_.no_keys(Turn<kStages>(tile_number_ + i + 1).stage));
      if ((tile + 1) % kChunkTiles == 0) {  // a chunk ends
        wgmma_wait<0>();
        wgmma_hold(o_);
        const int row = own_row();
        sum_parts(state_);
        if (tile / kChunkTiles > first_chunk) join_chunk<Shape>(o_, state_, rows_, joined_, row);
        keep_chunk<Shape>(o_, state_, rows_, joined_, row);
      }
      const float origin = begin_softmax(tile + 1, alpha);
      // Most tiles leave the largest scores as they are.
      const bool raised = __any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f);
      wgmma_wait<0>();
      wgmma_hold(o_);
      release(barriers_.no_values(Turn<kStages>(tile_number_ + i).stage));
      if (raised) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o_[n][e] *= alpha[e / 2];
      }
      end_softmax(origin);
    }
    sum_parts(state_);
    if ((end - 1) / kChunkTiles > first_chunk)
      join_chunk<Shape>(o_, state_, rows_, joined_, own_row());
    if constexpr (kThroughQueries) {
      static_assert(Shape::kQueryStages == 1);
      named_barrier(4 + group_, kWarpgroup);  // the warpgroup has read its queries
      store_rows<Shape>(rows_, params_, o_, state_, shared_, row());
      fence_before_tma();
      release(barriers_.no_queries(queries_.stage));
    } else {
      // O goes through where the warp's own rows would wait for other chunks.
      constexpr int kWaiting = 4 * kColumns, kRow = 2 * kColumns;
      store_rows<Shape>(rows_, params_, o_, state_,
                        shared_ + Shape::kJoined + row() * (kWaiting - kRow), row());
    }
  }

  const PackedRows<__nv_bfloat16>& rows_;
  const AttendParams& params_;
  const uint32_t shared_;
  const Barriers barriers_;
  const int tile_number_;
  const Turn<Shape::kQueryStages> queries_;
  JoinedChunks joined_;
  int group_;
  // How many of the first keys all rows of the warp see, and how many the window hides from some.
  int least_, hidden_;
  RowState state_;
  float s_[2 * kGroups][4], o_[kDim / 8][4];
  uint32_t p_[kGroups][4];
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    forward_hopper_kernel(const __grid_constant__ ForwardProblem<__nv_bfloat16> problem,
                          const __grid_constant__ ForwardMaps maps, Drawn* drawn) {
  start_beside_previous();
  extern __shared__ __align__(1024) char memory[];
  const Barriers barriers{shared_address(memory) + Shape::kBarriers};
  if (threadIdx.x == 0) {
    constexpr int kConsumingWarps = 4 * Shape::kConsumers;
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(barriers.item(stage), 32);
      barrier_init(barriers.no_item(stage), 32 * kConsumingWarps);
      barrier_init(barriers.queries(stage), 1);
      barrier_init(barriers.no_queries(stage), kConsumingWarps);
      barrier_init(barriers.keys(stage), kWarpgroup);
      barrier_init(barriers.no_keys(stage), kConsumingWarps);
      barrier_init(barriers.values(stage), kWarpgroup);
      barrier_init(barriers.no_values(stage), kConsumingWarps);
    }
    tma_prefetch(&maps.q);
    tma_prefetch(&maps.k);
    tma_prefetch(&maps.v);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    release_registers<Shape::kProducerRegisters>();
    ForwardProducer<Shape>(problem, maps, drawn, memory, barriers).run();
    return;
  }
  take_registers<Shape::kConsumerRegisters>();
  const auto* const items = reinterpret_cast<const Item*>(memory + Shape::kItems);
  // The first turn of the first warpgroup.
  if (Shape::kTurns && threadIdx.x / kWarpgroup == Shape::kConsumers)
    named_arrive(2, 2 * kWarpgroup);
  int tile_number = 0;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Turn<kStages> turn(n);
    barrier_wait(barriers.item(turn.stage), turn.parity);
    const Item& item = items[turn.stage];
    if (item.none) return;
    const int first_tile = uniform(item.first_tile(Shape::kKeys)),
              tiles = uniform(item.tiles(Shape::kKeys));
    Consumer<Shape>(item.rows, problem, memory, barriers, tile_number, n).run(first_tile, tiles);
    tile_number += tiles - first_tile;
    barrier_arrive(barriers.no_item(turn.stage));
  }
}

// Zeros for a launch on the device's current stream, which sets them to zero again.
inline Tensor zeros_for_launch(Device device) {
  static std::mutex mutex;
  static auto& of_streams = *new std::map<std::pair<int, void*>, Tensor>;  // never destroyed
  const auto make = [&] {
    return Tensor::zeros({static_cast<int64_t>(sizeof(Drawn) / sizeof(int32_t))}, DType::kI32,
                         device);
  };
  const cudaStream_t stream = ::cohort::cuda::stream(device);
  // What is recorded now would be set to zero when it is replayed, and not before.
  if (::cohort::is_recording(device)) return make();
  const std::lock_guard lock(mutex);
  Tensor& zeros = of_streams[{device.index, stream}];
  if (!zeros.defined()) zeros = make();
  return zeros;
}

}  // namespace

template <int kDim>
void run_forward_hopper(ForwardProblem<__nv_bfloat16> problem, const AttentionForward& in) {
  using Shape = HopperShape<kDim>;
  const Device device = in.q.device();
  const int64_t slots = tile_slots(problem.tokens, problem.sequences, Shape::kRows);
  problem.slots = static_cast<int>(slots);
  if (problem.tokens == 0) return;
  const int64_t blocks =
      std::min<int64_t>(slots * problem.heads, ::cohort::cuda::multiprocessors(device));
  Tensor drawn = zeros_for_launch(device), scratch;
  if (!Shape::kJoinsInShared && problem.tokens > kAttentionChunk)
    scratch = joined_scratch(problem.joined, blocks * Shape::kRows, Shape::kColumns, device);
  launch("attention_forward", forward_hopper_kernel<Shape>,
         {.grid = blocks_for(blocks, 1),
          .block = Shape::kThreads,
          .shared_bytes = Shape::kSharedBytes,
          .start = Start::kBesidePrevious},
         device, problem,
         ForwardMaps{.q = describe_heads(in.q, 64),
                     .k = describe_heads(in.k, Shape::kKeys),
                     .v = describe_heads(in.v, Shape::kKeys)},
         reinterpret_cast<Drawn*>(pointer<int32_t>(drawn)));
}

}  // namespace cohort::kernels::cuda
