// The attention forward on the tensor cores of sm_90, in the canonical order of attention.h and
// with the bits of attention_bf16.cuh, after FlashAttention-3 (Shah et al. 2024).
//
// A block is persistent. It has 64 query rows of one head for each of its consumer warpgroups. One
// more warpgroup, the producer, only loads: the queries, then tiles of 128 keys and values, in two
// stages each. Both sides synchronize by a full and an empty barrier per stage in shared memory.
// When a block has finished a tile of rows, its tile scheduler fetches the next one, whose queries
// and keys are loaded while the last O is written. Heads of more than 128 columns have tiles of 64
// keys, and stage O in the shared memory of their queries. A head of 96 is stored in shared memory
// as one of 128, whose last columns no matmul reads.
//
// For heads of 96 and 128 the two consumer warpgroups use ping-pong scheduling: they alternate in
// issuing their matmuls, so that one has exponentials while the other has matmuls. Each
// participates for every tile of the block, including tiles that its rows do not see; otherwise the
// other one would wait forever.
//
// A warpgroup overlaps the two matmuls of adjacent tiles with the exponentials between them. A
// thread has parts of two rows:
//
//   S(t + 1) = Q K(t + 1)^T and O += P(t) V(t) are issued;
//   when the first completes, the first row's S(t + 1) becomes P(t + 1), alpha, and the search for
//   the second row's maximum overlaps with its exponentials;
//   when the second completes, O = alpha O;
//   the second row's exponentials overlap with rounding P(t + 1); and so on.
//
// S, P and O stay in registers. There is no overlap at the end of a chunk of keys: O and l are
// combined with those of the previous chunks, which are kept in shared memory, or for wide heads in
// global memory.
//
// Tiles of contiguous rows of a tensor are loaded by TMA; a tile that contains the end of a prefix
// or of the sequence is copied by the threads of the producer, with zeros beyond the end. Queries
// beyond the end may be anything: the results of a row depend on itself alone, and those of such
// rows are not stored.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "core/graph.h"
#include "kernels/attention/cuda/forward.cuh"
#include "kernels/attention/cuda/sm90/stages.cuh"
#include "kernels/cuda/e4m3.cuh"

namespace cohort::kernels::cuda {
namespace {

// State of the tile scheduler: the next row tile, and the number of blocks that have found none
// left. The last of these resets both to zero for the next launch.
struct SchedulerState {
  int32_t next_tile, finished_blocks;
};

// Work tile: rows of a block; is_end: there are no more tiles.
template <class Rows>
struct WorkTile {
  Rows rows;
  bool is_end;
};

// kConsumers warpgroups compute. Registers per thread: all threads of a block start with the same
// number; the producer releases some of its own to the consumers. The total is limited to the
// initial one: 168 for each of 384 threads, 128 for each of 512. Work tile n has its queries in
// stage n % kQueryStages.
template <int kDim_, int kConsumers_ = kDim_ == 64 ? 3 : 2, bool kFp8_ = false>  // two with a mask
struct Sm90Shape {
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  static constexpr int kDim = kDim_, kColumns = kPanelColumns<kDim>;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kRows = 64 * kConsumers;
  // With a tile mask, the rows of a block see the same tiles.
  static constexpr bool kTileMasks = kMaskTile % kRows == 0;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = kFp8              ? 24
                                            : kConsumers == 3 ? 32
                                            : kDim <= 128     ? 56
                                            : kDim <= 192     ? 40
                                                              : 24;
  static constexpr int kConsumerRegisters = kFp8              ? 240
                                            : kConsumers == 3 ? 160
                                            : kDim <= 128     ? 224
                                            : kDim <= 192     ? 232
                                                              : 240;
  static constexpr int kQueryStages = kDim == 64 && !kFp8 ? 2 : 1;
  static constexpr bool kPingPong = kConsumers == 2 && (kFp8 || (kDim > 64 && kDim <= 128));
  static constexpr bool kCombinesInShared = kFp8 || kDim <= 128;
  static constexpr int kKeys = kTileKeys<kDim>;
  static constexpr int kTileBytes = kElementBytes * kKeys * kColumns,
                       kQueryBytes = kElementBytes * 64 * kColumns;
  static constexpr int kKeyTiles = kQueryStages * kConsumers * kQueryBytes;
  static constexpr int kValueTiles = kKeyTiles + kStages * kTileBytes;
  static constexpr int kCombined = kValueTiles + kStages * kTileBytes;
  static constexpr int kBarriers =
      kCombined + (kCombinesInShared ? static_cast<int>(combined_bytes(kRows, kColumns)) : 0);
  // [kStages], see WorkTile; behind the barriers of ForwardPipelines
  static constexpr int kWorkTiles =
      kBarriers + 3 * Pipeline<kStages>::kBytes + Pipeline<kQueryStages>::kBytes;
  template <class Rows>
  static constexpr int kSharedBytes = kWorkTiles +
                                      kStages* static_cast<int>(sizeof(WorkTile<Rows>));
};

// Pipelines from the producer to the consumers, with barriers from shared address `first` on.
template <class Shape>
struct ForwardPipelines {
  uint32_t first;
  Pipeline<kStages> work{first}, keys{work.end()}, values{keys.end()};
  Pipeline<Shape::kQueryStages> queries{values.end()};
};

// Tensor maps of make_head_map(), for 64 queries, and for tiles of keys.
struct ForwardMaps {
  CUtensorMap q, k, v;
};

// The first tile of keys from `tile` on that the rows of a block see by the tile mask.
template <class Shape, class Rule, class Rows>
__device__ __forceinline__ int visible_tile(const Rule& rule, const Rows& rows, int tile, int end) {
  if constexpr (Shape::kTileMasks)
    return next_tile<Shape::kKeys>(rule, rows, tile, end);
  else
    return tile;
}

template <class Shape, class Problem>
class ForwardProducer {
 public:
  using Rows = typename Problem::Rows;
  __device__ ForwardProducer(const Problem& problem, const ForwardMaps& maps,
                             SchedulerState* scheduler, char* memory,
                             const ForwardPipelines<Shape>& pipelines)
      : problem_(problem),
        maps_(maps),
        scheduler_(scheduler),
        work_tiles_(reinterpret_cast<WorkTile<Rows>*>(memory + Shape::kWorkTiles)),
        shared_(shared_address(memory)),
        pipelines_(pipelines) {}

  __device__ __forceinline__ void run() {
    int iteration = 0;
#pragma unroll 1
    for (int n = 0;; ++n) {
      const WorkTile<Rows>& work = next_work_tile(n);
      if (work.is_end) break;
      const IndexRange<int> tiles = work.rows.keys.tiles(Shape::kKeys);
      const auto tile_from = [&](int tile) {
        return visible_tile<Shape>(problem_.rule, work.rows, tile, tiles.end);
      };
      int tile = tile_from(tiles.first);
      // Without tiles nothing below commits the values of the previous row tile, which are pending
      // in all warps: the consumers would wait for them while the first warp waits in
      // next_work_tile() for the consumers, and the other warps for the first.
      if (tile < tiles.end)
        load_keys(work.rows, tile, iteration);
      else
        producer_.finish();
      if constexpr (!Shape::kFp8) load_queries(n, work.rows);
#pragma unroll 1
      for (int next; tile < tiles.end; tile = next, ++iteration) {
        next = tile_from(tile + 1);
        // The keys of a tile are used before the values of the previous tile.
        if (next < tiles.end) load_keys(work.rows, next, iteration + 1);
        load_values(work.rows, tile, iteration);
      }
    }
    producer_.finish();
    if (threadIdx.x == 0 &&
        atomicAdd(&scheduler_->finished_blocks, 1) + 1 == static_cast<int>(gridDim.x))
      *scheduler_ = {0, 0};
  }

 private:
  // Fetches work tile n of the block for all its warps. Only the first warp searches.
  __device__ __forceinline__ const WorkTile<Rows>& next_work_tile(int n) {
    const PipelineState<kStages> state(n);
    WorkTile<Rows>& work = work_tiles_[state.index];
    if (threadIdx.x < 32) {
      producer_.acquire(pipelines_.work, state);
      const int blocks = problem_.blocks();
      int block = 0;
      do {  // all threads of the warp write the same rows
        if (threadIdx.x == 0) block = atomicAdd(&scheduler_->next_tile, 1);
        block = uniform(block);
      } while (block < blocks && !problem_.find(problem_.rule, block, Shape::kRows, work.rows));
      work.is_end = block >= blocks;
      pipelines_.work.producer_commit(state);
    }
    named_barrier(1, kWarpgroup);
    return work;
  }

  __device__ __forceinline__ void load_queries(int n, const Rows& rows) {
    const PipelineState<Shape::kQueryStages> state(n);
    const uint32_t full = pipelines_.queries.full(state.index);
    producer_.acquire(pipelines_.queries, state);
    if (threadIdx.x == 0) {
      barrier_expect_tx(full, Shape::kConsumers * Shape::kQueryBytes);
      for (int w = 0; w < Shape::kConsumers; ++w) {
        // A warpgroup without rows loads the first ones again.
        const int row = 64 * w < rows.count ? 64 * w : 0;
        const uint32_t to = shared_ + (state.index * Shape::kConsumers + w) * Shape::kQueryBytes;
        for (int panel = 0; panel < Shape::kColumns / 64; ++panel)
          tma_load(to + panel * (64 * 128), &maps_.q,
                   {{64 * panel, rows.head_index, static_cast<int>(rows.token(row)), 0}}, full);
      }
      barrier_arrive(full);
    }
  }

  __device__ __forceinline__ void load_keys(const Rows& rows, int tile, int iteration) {
    if constexpr (Shape::kFp8)
      load_pages(pipelines_.keys, iteration, Shape::kKeyTiles, rows, tile, false);
    else
      load_tile(pipelines_.keys, iteration, Shape::kKeyTiles, rows, tile, rows.k, &maps_.k);
  }
  __device__ __forceinline__ void load_values(const Rows& rows, int tile, int iteration) {
    if constexpr (Shape::kFp8)
      load_pages(pipelines_.values, iteration, Shape::kValueTiles, rows, tile, true);
    else
      load_tile(pipelines_.values, iteration, Shape::kValueTiles, rows, tile, rows.v, &maps_.v);
  }

  // Loads the pages of a tile in e4m3; those that do not exist are zeros.
  __device__ __forceinline__ void load_pages(const Pipeline<kStages>& pipeline,
                                             const PipelineState<kStages>& state, int stages,
                                             const Rows& rows, int tile, bool is_values) {
    constexpr int kPageThreads = kWarpgroup * kPageTokens / Shape::kKeys;
    constexpr int kBytes = kPageTokens * Shape::kDim;
    const int page = static_cast<int>(threadIdx.x) / kPageThreads,
              thread = static_cast<int>(threadIdx.x) % kPageThreads;
    const uint32_t to = shared_ + stages + state.index * Shape::kTileBytes + page * kBytes;
    const uint32_t full = pipeline.full(state.index);
    const uint8_t* const from =
        problem_.page(rows, tile * Shape::kKeys + page * kPageTokens, is_values);
    pipeline.producer_acquire(state);
    if (from == nullptr) {
#pragma unroll 1
      for (int i = thread; i < kBytes / 16; i += kPageThreads)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(to + 16 * i), "r"(0)
                     : "memory");
      fence_proxy_async();
    } else if (thread == 0) {
      barrier_expect_tx(full, kBytes);
      bulk_load(to, from, kBytes, full);
    }
    barrier_arrive(full);
  }

  __device__ __forceinline__ void load_tile(const Pipeline<kStages>& pipeline,
                                            const PipelineState<kStages>& state, int stages,
                                            const Rows& rows, int tile, const bf16* from,
                                            const CUtensorMap* map) {
    producer_.acquire(pipeline, state);
    const int key0 = tile * Shape::kKeys, end = key0 + Shape::kKeys;
    const uint32_t to = shared_ + stages + state.index * Shape::kTileBytes;
    const uint32_t full = pipeline.full(state.index);
    if (end <= rows.sequence.keys() && rows.key_offsets.adjacent(key0, end)) {
      producer_.finish();
      if (threadIdx.x == 0) {
        const int token = rows.sequence.token(key0);
        barrier_expect_tx(full, Shape::kTileBytes);
        for (int panel = 0; panel < Shape::kColumns / 64; ++panel)
          tma_load(to + panel * (Shape::kKeys * 128), map, {{64 * panel, rows.kv_head, token, 0}},
                   full);
      }
      barrier_arrive(full);
      return;
    }
    copy_rows<Shape::kColumns, Shape::kKeys, kWarpgroup>(to, problem_.format.head_dim, [&](int r) {
      const int64_t row = rows.key_offset(key0 + r);
      return row < 0 ? nullptr : from + row;
    });
    producer_.commit(full);
  }

  const Problem& problem_;
  const ForwardMaps& maps_;
  SchedulerState* const scheduler_;
  WorkTile<Rows>* const work_tiles_;
  const uint32_t shared_;
  const ForwardPipelines<Shape> pipelines_;
  CpAsyncProducer producer_;
};

template <class Shape, class Problem>
class Consumer {
 public:
  // n: index of the work tile.
  __device__ Consumer(const typename Problem::Rows& rows, const Problem& problem, char* memory,
                      const ForwardPipelines<Shape>& pipelines, int n)
      : rows_(rows),
        problem_(problem),
        rule_(rows.bind(problem.rule, 0)),
        shared_(shared_address(memory)),
        pipelines_(pipelines),
        query_state_(n) {
    auto* const combined = reinterpret_cast<float*>(memory + Shape::kCombined);
    if constexpr (Shape::kCombinesInShared)
      combined_ = {.o = combined, .states = combined + Shape::kRows * kColumns};
    else
      combined_ = problem.combined.from(int64_t{Shape::kRows} * blockIdx.x, kColumns);
    group_ = uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1);
    const int ends[2] = {rows.end_key(problem.rule, thread_row()),
                         rows.end_key(problem.rule, thread_row() + 8)};
    min_end_ = rule_.visible_end(__reduce_min_sync(0xffffffffu, min(ends[0], ends[1])));
    first_common_ = rule_.first_key(__reduce_max_sync(0xffffffffu, max(ends[0], ends[1])));
  }

  // Processes `tiles` of the block, the first of them in pipeline iteration `i`. Returns the
  // iteration after the last tile.
  __device__ __forceinline__ int run(const IndexRange<int>& tiles, int i) {
    return run_with(tiles, i, [&](int tile, int end, int n) { return compute(tile, end, n); });
  }

 protected:
  // run() with a function for compute(). The rows of this warpgroup see only tiles [first, end).
  template <class Compute>
  __device__ __forceinline__ int run_with(const IndexRange<int>& tiles, int i, Compute&& compute) {
    const int last_row = min(rows_.count, 64 * group_ + 64) - 1;
    const bool has_rows = 64 * group_ < rows_.count;
    IndexRange<int> keys{has_rows ? rule_.first_key(rows_.end_key(problem_.rule, 64 * group_)) : 0,
                         has_rows ? rule_.visible_end(rows_.end_key(problem_.rule, last_row)) : 0};
    if constexpr (Problem::kPaged)  // rows are in any order
      if (has_rows) keys = rows_.keys;
    const int end = uniform(keys.tiles(kKeys).end);
    const int first = uniform(has_rows ? max(tiles.first, keys.tiles(kKeys).first) : tiles.first);
    int tile = tile_from(tiles.first, tiles.end);
#pragma unroll 1
    for (; tile < first; tile = tile_from(tile + 1, tiles.end)) skip_tile(i++);
    if (has_rows && (!kTileMasks || tile < end)) {
      i = compute(tile, end, i);
      tile = tile_from(end, tiles.end);
    } else {
      if constexpr (!kFp8) {
        pipelines_.queries.consumer_wait(query_state_);
        if (!has_rows || !kStageInQueries) pipelines_.queries.consumer_release_warp(query_state_);
      }
      if (has_rows) store_without_keys();
    }
#pragma unroll 1
    for (; tile < tiles.end; tile = tile_from(tile + 1, tiles.end)) skip_tile(i++);
    return i;
  }

  using Rule = decltype(Problem::rule);
  static constexpr bool kFp8 = Shape::kFp8;
  static constexpr int kDim = Shape::kDim, kColumns = Shape::kColumns;
  static constexpr int kKeys = Shape::kKeys, kGroups = kKeys / 16;
  static constexpr int kChunkTiles = static_cast<int>(kAttentionChunk) / kKeys;
  // Rows may see no key at all, and tiles are skipped.
  static constexpr bool kTileMasks = Rule::kMasks && Shape::kTileMasks;

  // First row of the warp, and of the thread; computed on use.
  __device__ __forceinline__ int row() const {
    return opaque(static_cast<int>(threadIdx.x)) / 32 * 16 - kWarpgroup / 32 * 16;
  }
  __device__ __forceinline__ int thread_row() const {
    return row() + opaque(static_cast<int>(threadIdx.x)) % 32 / 4;
  }

  // O is staged in the shared memory of the queries.
  static constexpr bool kStageInQueries = !Shape::kCombinesInShared;

  // Ping-pong: a warpgroup may issue after the previous one has issued; the first one after the
  // last one has issued for the previous tile.
  __device__ __forceinline__ void ping_pong_wait() const {
    if constexpr (Shape::kPingPong) named_barrier(2 + group_, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void ping_pong_arrive() const {
    if constexpr (Shape::kPingPong)
      named_arrive(2 + (group_ + 1) % Shape::kConsumers, 2 * kWarpgroup);
  }

  __device__ __forceinline__ int tile_from(int tile, int end) const {
    return visible_tile<Shape>(problem_.rule, rows_, tile, end);
  }

  // Skips a tile.
  __device__ __forceinline__ void skip_tile(int i) {
    ping_pong_wait();
    ping_pong_arrive();
    const PipelineState<kStages> state(i);
    for (const auto* pipeline : {&pipelines_.keys, &pipelines_.values}) {
      pipeline->consumer_wait(state);
      pipeline->consumer_release_warp(state);
    }
  }

  // Issues S = Q K^T.
  __device__ __forceinline__ void issue_scores(int i) {
    const PipelineState<kStages> state(i);
    pipelines_.keys.consumer_wait(state);
    const MatrixDescriptor queries = matrix_descriptor(shared_).plus(
        (query_state_.index * Shape::kConsumers + group_) * Shape::kQueryBytes);
    const MatrixDescriptor keys =
        matrix_descriptor(shared_).plus(Shape::kKeyTiles).plus(state.index * Shape::kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      wgmma<Major::kK, Major::kK>(s_, k_major_step<64>(queries, k), k_major_step<kKeys>(keys, k),
                                  k > 0);
    wgmma_commit();
  }
  // Issues O += P V.
  __device__ __forceinline__ void issue_values(int i) {
    const PipelineState<kStages> state(i);
    pipelines_.values.consumer_wait(state);
    const MatrixDescriptor values = matrix_descriptor(shared_, kKeys * 128)
                                        .plus(Shape::kValueTiles)
                                        .plus(state.index * Shape::kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kGroups; ++k) wgmma<Major::kMN>(o_, p_[k], mn_major_step(values, k));
    wgmma_commit();
  }

  // Wait for S of a pipeline iteration, while kPending younger groups of matmuls may be pending,
  // and for O.
  template <int kPending>
  __device__ __forceinline__ void complete_scores(int iteration) {
    wgmma_wait<kPending>();
    wgmma_fence_operand(s_);
    pipelines_.keys.consumer_release_warp(iteration);
  }
  __device__ __forceinline__ void complete_values(int iteration) {
    wgmma_wait<0>();
    wgmma_fence_operand(o_);
    pipelines_.values.consumer_release_warp(iteration);
  }

  // Factor of row r's scores in exponents.
  __device__ __forceinline__ float exponent(int r) const {
    if constexpr (kFp8 && !Rule::kModifies)
      return score_factor_[r];
    else
      return problem_.rule.exponent;
  }
  // Computes the first row's half of P. Returns the value to subtract from the second row's
  // exponents.
  template <bool kMasked>
  __device__ __forceinline__ float begin_softmax(float (&alpha)[2]) {
    const float c = exponent(0);
    const float first = row_max<kGroups, kMasked>(s_, 0, -INFINITY, kGroups);
    const float safe_row_max = update_row_max<kMasked, kFp8>(first, 0, state_, alpha[0], c);
    exponentiate<kGroups, kMasked>(s_, 0, state_, c, safe_row_max, kGroups);
    // -infinity, or NaN, which any score replaces. The dependency on `first` makes the compiler
    // overlap the maxima of the second row with the exponentials of the first.
    const float init = __fmaf_rn(first, 0.0f, -INFINITY);
    const float second = row_max<kGroups, kMasked>(s_, 1, init, kGroups);
    return update_row_max<kMasked, kFp8>(second, 1, state_, alpha[1], exponent(1));
  }
  __device__ __forceinline__ float begin_softmax(int tile, float (&alpha)[2]) {
    const auto& rule = problem_.rule;
    const int key0 = tile * kKeys, row = thread_row();
    if constexpr (kFp8 && Rule::kModifies)
#pragma unroll
      for (int n = 0; n < 2 * kGroups; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s_[n][e] *= score_factor_[e / 2];
    if constexpr (Problem::kPaged && Rule::kMasks) {
      // Rows of a block have different heads, and by a tile mask see different tiles.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int position = rows_.position(row + 8 * r);
        const auto& bound = rows_.bind(rule, row + 8 * r);
        modify_scores(s_, bound, r, key0 + static_cast<int>(threadIdx.x % 4) * 2 - position);
        mask_row(s_, bound, r, rows_.end_key(rule, row + 8 * r), key0,
                 bound.sees_tile(position, key0));
      }
      return begin_softmax<true>(alpha);
    } else {
      return begin_softmax(key0, row, alpha);
    }
  }
  __device__ __forceinline__ float begin_softmax(int key0, int row, float (&alpha)[2]) {
    const auto& rule = problem_.rule;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      modify_scores(s_, rule_, r,
                    key0 + static_cast<int>(threadIdx.x % 4) * 2 - rows_.position(row + 8 * r));
    const bool hides_first = first_common_ > key0;
    if (min_end_ >= key0 + kKeys && !hides_first) return begin_softmax<false>(alpha);
    const int ends[2] = {rows_.end_key(rule, row), rows_.end_key(rule, row + 8)};
    if constexpr (Rule::kMasks)
#pragma unroll
      for (int r = 0; r < 2; ++r) mask_row(s_, rule_, r, ends[r], key0);
    else
      mask_scores<kGroups>(s_, {ends[0] - key0, ends[1] - key0}, rule, kGroups, hides_first);
    return begin_softmax<true>(alpha);
  }
  // Computes the second row's half, and rounds P; in FP8 Fp8Consumer does.
  __device__ __forceinline__ void end_softmax(float safe_row_max) {
    exponentiate<kGroups, false>(s_, 1, state_, exponent(1), safe_row_max, kGroups);
    if constexpr (!kFp8)
#pragma unroll
      for (int k = 0; k < kGroups; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          p_[k][i] = pack_bf16(s_[2 * k + i / 2][i % 2 * 2], s_[2 * k + i / 2][i % 2 * 2 + 1]);
  }

  // Processes the tiles of the block from `tile` to `end`, and stores the rows. Returns the
  // pipeline iteration after the last one.
  __device__ __forceinline__ int compute(int tile, int end, int i) {
    set_zero(o_);
    const int first_chunk = tile / kChunkTiles;
    float alpha[2];
    pipelines_.queries.consumer_wait(query_state_);
    ping_pong_wait();
    issue_scores(i);
    ping_pong_arrive();
    complete_scores<0>(i);
    end_softmax(begin_softmax(tile, alpha));
    int next = tile_from(tile + 1, end);
#pragma unroll 1
    for (int following;; tile = next, next = following, ++i) {
      if (next >= end) {
        if (!kStageInQueries) pipelines_.queries.consumer_release_warp(query_state_);
        issue_values(i);
        complete_values(i);
        break;
      }
      ping_pong_wait();
      issue_scores(i + 1);
      issue_values(i);
      ping_pong_arrive();
      following = tile_from(next + 1, end);  // its load overlaps with the matmuls
      complete_scores<1>(i + 1);
      if (kTileMasks ? next / kChunkTiles > tile / kChunkTiles : next % kChunkTiles == 0)
        end_chunk(tile / kChunkTiles, first_chunk);
      const float safe_row_max = begin_softmax(next, alpha);
      // Most tiles do not change the maxima.
      const bool rescales = __any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f);
      complete_values(i);
      if (rescales) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o_[n][e] *= alpha[e / 2];
      }
      end_softmax(safe_row_max);
    }
    reduce_l(state_);
    if (tile / kChunkTiles > first_chunk)
      combine_chunk<Shape>(o_, state_, rows_, combined_, thread_row());
    store();
    return i + 1;
  }

  // Ends a chunk that is not the last one.
  __device__ __forceinline__ void end_chunk(int chunk, int first_chunk) {
    wgmma_wait<0>();
    wgmma_fence_operand(o_);
    const int row = thread_row();
    reduce_l(state_);
    if (chunk > first_chunk) combine_chunk<Shape>(o_, state_, rows_, combined_, row);
    store_combined<Shape>(o_, state_, rows_, combined_, row);
  }

  __device__ __forceinline__ void store_without_keys() {
    if constexpr (kTileMasks) {
      set_zero(o_);
      store();
    }
  }

  __device__ __forceinline__ void store() {
    if constexpr (kStageInQueries) {
      static_assert(Shape::kQueryStages == 1);
      named_barrier(4 + group_, kWarpgroup);  // the warpgroup has read its queries
      store_rows<Shape>(rows_, rule_, problem_.format, o_, state_, {shared_, row()});
      fence_proxy_async();
      pipelines_.queries.consumer_release_warp(query_state_);
    } else {
      // O is staged in the combined-chunk memory of the warp's rows.
      constexpr int kWaiting = 4 * kColumns, kRow = 2 * kColumns;
      store_rows<Shape>(rows_, rule_, problem_.format, o_, state_,
                        {shared_ + Shape::kCombined + row() * (kWaiting - kRow), row()});
    }
  }

  const typename Problem::Rows& rows_;
  const Problem& problem_;
  typename Rule::Bound rule_;
  const uint32_t shared_;
  const ForwardPipelines<Shape> pipelines_;
  const PipelineState<Shape::kQueryStages> query_state_;
  CombinedChunks combined_;
  int group_;
  int first_common_, min_end_;  // all rows of the warp see the keys [first_common_, min_end_)
  RowState state_;
  float s_[2 * kGroups][4], o_[kDim / 8][4];
  uint32_t p_[kFp8 ? kGroups / 2 : kGroups][4];
  float score_factor_[2];  // Fp8Consumer's
};

template <class Shape, class Problem, class Consumer>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    forward_sm90_kernel(const __grid_constant__ Problem problem,
                        const __grid_constant__ ForwardMaps maps, SchedulerState* scheduler) {
  launch_dependents_and_wait();
  extern __shared__ __align__(1024) char memory[];
  const ForwardPipelines<Shape> pipelines{shared_address(memory) + Shape::kBarriers};
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Shape::kConsumers;
    pipelines.work.init(32, 32 * kConsumerWarps);
    pipelines.queries.init(1, kConsumerWarps);
    pipelines.keys.init(kWarpgroup, kConsumerWarps);
    pipelines.values.init(kWarpgroup, kConsumerWarps);
    if constexpr (!Shape::kFp8)
      for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v}) tma_prefetch(map);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    deallocate_registers<Shape::kProducerRegisters>();
    ForwardProducer<Shape, Problem>(problem, maps, scheduler, memory, pipelines).run();
    return;
  }
  allocate_registers<Shape::kConsumerRegisters>();
  using Work = WorkTile<typename Problem::Rows>;
  const auto* const work_tiles = reinterpret_cast<const Work*>(memory + Shape::kWorkTiles);
  // Lets the first warpgroup issue first.
  if (Shape::kPingPong && threadIdx.x / kWarpgroup == Shape::kConsumers)
    named_arrive(2, 2 * kWarpgroup);
  int iteration = 0;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const PipelineState<kStages> state(n);
    pipelines.work.consumer_wait(state);
    const Work& work = work_tiles[state.index];
    if (work.is_end) return;
    const IndexRange<int> range = work.rows.keys.tiles(Shape::kKeys);
    const IndexRange<int> tiles{uniform(range.first), uniform(range.end)};
    iteration = Consumer(work.rows, problem, memory, pipelines, n).run(tiles, iteration);
    pipelines.work.consumer_release(state);
  }
}

// Zeroed scheduler state for a launch on the device's current stream; the kernel resets it.
inline Tensor scheduler_state(Device device) {
  static std::mutex mutex;
  static auto& states = *new std::map<std::pair<int, void*>, Tensor>;  // never destroyed
  const auto make = [&] {
    return Tensor::zeros({static_cast<int64_t>(sizeof(SchedulerState) / sizeof(int32_t))},
                         DType::kI32, device);
  };
  const cudaStream_t stream = ::cohort::cuda::stream(device);
  // During capture the zeroing is only recorded, so that this tensor must not be reused.
  if (::cohort::is_capturing(device)) return make();
  const std::lock_guard lock(mutex);
  Tensor& state = states[{device.index, stream}];
  if (!state.defined()) state = make();
  return state;
}

template <class Shape, class... Rules>
void run_forward_shape(ForwardProblem<bf16> problem, const AttentionForward& in) {
  const Device device = in.q.device();
  const int64_t slots = tile_slots(problem.tokens, problem.sequences.count, Shape::kRows);
  problem.slots = static_cast<int>(slots);
  if (problem.tokens == 0) return;
  const int64_t blocks = std::min<int64_t>(slots * problem.heads,
                                           ::cohort::cuda::gpu_properties(device).multiprocessors);
  Tensor scheduler = scheduler_state(device), scratch;
  if (!Shape::kCombinesInShared && problem.tokens > kAttentionChunk)
    scratch = combined_memory(problem.combined, blocks * Shape::kRows, Shape::kColumns, device);
  const auto run = [&]<class Call>(const Call& call) {
    launch("attention_forward", forward_sm90_kernel<Shape, Call, Consumer<Shape, Call>>,
           {.grid = blocks_for(blocks, 1),
            .block = Shape::kThreads,
            .shared_bytes = Shape::template kSharedBytes<typename Call::Rows>,
            .start = Start::kProgrammatic},
           device, call,
           ForwardMaps{.q = make_head_map(in.q, 64),
                       .k = make_head_map(in.k, Shape::kKeys),
                       .v = make_head_map(in.v, Shape::kKeys)},
           reinterpret_cast<SchedulerState*>(pointer<int32_t>(scheduler)));
  };
  with_rule<Rules...>(problem, in.desc, in.q.dim(2), problem.tokens, run);
}

}  // namespace

template <int kDim>
void run_forward_sm90(ForwardProblem<bf16> problem, const AttentionForward& in) {
  if constexpr (!Sm90Shape<kDim>::kTileMasks)
    if (in.desc.tiles.defined())
      return run_forward_shape<Sm90Shape<kDim, 2>, MaskRuleFor<kDim>, ModifyRule<float>>(problem,
                                                                                         in);
  run_forward_shape<Sm90Shape<kDim>, WindowRule<float>, MaskRuleFor<kDim>, ModifyRule<float>>(
      problem, in);
}

}  // namespace cohort::kernels::cuda
