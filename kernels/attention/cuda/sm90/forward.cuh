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

namespace cohort::kernels::cuda {
namespace {

// State of the tile scheduler: the next row tile, and the number of blocks that have found none
// left. The last of these resets both to zero for the next launch.
struct SchedulerState {
  int32_t next_tile, finished_blocks;
};

// Work tile: rows of a block; is_end: there are no more tiles.
struct WorkTile {
  PackedRows<bf16> rows;
  bool is_end;

  __device__ int first_tile(int tile_keys) const { return rows.first_key / tile_keys; }
  __device__ int tiles(int tile_keys) const { return (rows.keys + tile_keys - 1) / tile_keys; }
};

// kConsumers warpgroups compute. Registers per thread: all threads of a block start with the same
// number; the producer releases some of its own to the consumers. The total is limited to the
// initial one: 168 for each of 384 threads, 128 for each of 512. Work tile n has its queries in
// stage n % kQueryStages.
template <int kDim_>
struct Sm90Shape {
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
  static constexpr bool kPingPong = kDim > 64 && kDim <= 128;
  static constexpr bool kCombinesInShared = kDim <= 128;
  static constexpr int kKeys = kTileKeys<kDim>;
  static constexpr int kTileBytes = 2 * kKeys * kColumns, kQueryBytes = 2 * 64 * kColumns;
  static constexpr int kKeyTiles = kQueryStages * kConsumers * kQueryBytes;
  static constexpr int kValueTiles = kKeyTiles + kStages * kTileBytes;
  static constexpr int kCombined = kValueTiles + kStages * kTileBytes;
  static constexpr int kBarriers =
      kCombined + (kCombinesInShared ? static_cast<int>(combined_bytes(kRows, kColumns)) : 0);
  static constexpr int kWorkTiles = kBarriers + 8 * 8 * kStages;  // [kStages], see WorkTile
  static constexpr int kSharedBytes = kWorkTiles + kStages * static_cast<int>(sizeof(WorkTile));
};

// Addresses of the full and empty barriers.
struct Barriers {
  uint32_t first;
  __device__ uint32_t work_full(int stage) const { return at(0, stage); }
  __device__ uint32_t work_empty(int stage) const { return at(1, stage); }
  __device__ uint32_t keys_full(int stage) const { return at(2, stage); }
  __device__ uint32_t keys_empty(int stage) const { return at(3, stage); }
  __device__ uint32_t values_full(int stage) const { return at(4, stage); }
  __device__ uint32_t values_empty(int stage) const { return at(5, stage); }
  __device__ uint32_t queries_full(int stage) const { return at(6, stage); }
  __device__ uint32_t queries_empty(int stage) const { return at(7, stage); }

 private:
  __device__ uint32_t at(int kind, int stage) const { return first + 8 * (kind * kStages + stage); }
};

// Tensor maps of make_head_map(), for 64 queries, and for tiles of keys.
struct ForwardMaps {
  CUtensorMap q, k, v;
};

// cp.async producer: arrives at the full barrier of a stage one commit group late, so that two
// groups are in flight. When the copies of a thread have completed, a proxy fence makes them
// visible to the tensor cores, and the thread arrives.
class CpAsyncProducer {
 public:
  // Commits a group of copies, whose full barrier is `barrier`.
  __device__ __forceinline__ void commit(uint32_t barrier) {
    copy_async_commit();
    if (pending_barrier_ != 0) {
      copy_async_wait<1>();
      arrive();
    }
    pending_barrier_ = barrier;
  }
  // Waits until a stage is empty. Pending copies are completed first, since the consumers that
  // release the stage may be waiting for them.
  __device__ __forceinline__ void wait_empty(uint32_t barrier, uint32_t phase) {
    if (barrier_is_done(barrier, phase)) return;
    finish();
    barrier_wait(barrier, phase);
  }
  __device__ __forceinline__ void finish() {
    if (pending_barrier_ == 0) return;
    copy_async_wait<0>();
    arrive();
    pending_barrier_ = 0;
  }

 private:
  __device__ __forceinline__ void arrive() {
    fence_proxy_async();  // orders the writes before reads by the tensor cores
    barrier_arrive(pending_barrier_);
  }
  uint32_t pending_barrier_ = 0;
};

template <class Shape>
class ForwardProducer {
 public:
  __device__ ForwardProducer(const ForwardProblem<bf16>& problem, const ForwardMaps& maps,
                             SchedulerState* scheduler, char* memory, const Barriers& barriers)
      : problem_(problem),
        maps_(maps),
        scheduler_(scheduler),
        work_tiles_(reinterpret_cast<WorkTile*>(memory + Shape::kWorkTiles)),
        shared_(shared_address(memory)),
        barriers_(barriers) {}

  __device__ __forceinline__ void run() {
    int iteration = 0;
#pragma unroll 1
    for (int n = 0;; ++n) {
      const WorkTile& work = next_work_tile(n);
      if (work.is_end) break;
      const int first_tile = work.first_tile(Shape::kKeys), tiles = work.tiles(Shape::kKeys);
      load_keys(work.rows, first_tile, iteration);
      load_queries(n, work.rows);
      // The keys of a tile are used before the values of the previous tile.
#pragma unroll 1
      for (int tile = first_tile; tile < tiles; ++tile, ++iteration) {
        if (tile + 1 < tiles) load_keys(work.rows, tile + 1, iteration + 1);
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
  __device__ __forceinline__ const WorkTile& next_work_tile(int n) {
    const PipelineState<kStages> pipe(n);
    WorkTile& work = work_tiles_[pipe.index];
    if (threadIdx.x < 32) {
      producer_.wait_empty(barriers_.work_empty(pipe.index), pipe.phase ^ 1);
      const int blocks = problem_.slots * problem_.heads;
      int block = 0;
      do {  // all threads of the warp write the same rows
        if (threadIdx.x == 0) block = atomicAdd(&scheduler_->next_tile, 1);
        block = uniform(block);
      } while (block < blocks && !problem_.find(block, Shape::kRows, work.rows));
      work.is_end = block >= blocks;
      barrier_arrive(barriers_.work_full(pipe.index));
    }
    named_barrier(1, kWarpgroup);
    return work;
  }

  __device__ __forceinline__ void load_queries(int n, const PackedRows<bf16>& rows) {
    const PipelineState<Shape::kQueryStages> pipe(n);
    const uint32_t barrier = barriers_.queries_full(pipe.index);
    producer_.wait_empty(barriers_.queries_empty(pipe.index), pipe.phase ^ 1);
    if (threadIdx.x == 0) {
      barrier_expect_tx(barrier, Shape::kConsumers * Shape::kQueryBytes);
      for (int w = 0; w < Shape::kConsumers; ++w) {
        // A warpgroup without rows loads the first ones again.
        const int row = 64 * w < rows.count ? 64 * w : 0;
        const uint32_t to = shared_ + (pipe.index * Shape::kConsumers + w) * Shape::kQueryBytes;
        for (int panel = 0; panel < Shape::kColumns / 64; ++panel)
          tma_load(to + panel * (64 * 128), &maps_.q,
                   {{64 * panel, rows.head_index, static_cast<int>(rows.token(row)), 0}}, barrier);
      }
      barrier_arrive(barrier);
    }
  }

  __device__ __forceinline__ void load_keys(const PackedRows<bf16>& rows, int tile, int iteration) {
    const PipelineState<kStages> pipe(iteration);
    producer_.wait_empty(barriers_.keys_empty(pipe.index), pipe.phase ^ 1);
    load_tile(rows, tile, Shape::kKeyTiles + pipe.index * Shape::kTileBytes, rows.k, &maps_.k,
              barriers_.keys_full(pipe.index));
  }
  __device__ __forceinline__ void load_values(const PackedRows<bf16>& rows, int tile,
                                              int iteration) {
    const PipelineState<kStages> pipe(iteration);
    producer_.wait_empty(barriers_.values_empty(pipe.index), pipe.phase ^ 1);
    load_tile(rows, tile, Shape::kValueTiles + pipe.index * Shape::kTileBytes, rows.v, &maps_.v,
              barriers_.values_full(pipe.index));
  }

  __device__ __forceinline__ void load_tile(const PackedRows<bf16>& rows, int tile, uint32_t offset,
                                            const bf16* from, const CUtensorMap* map,
                                            uint32_t barrier) {
    const int key0 = tile * Shape::kKeys, end = key0 + Shape::kKeys;
    const uint32_t to = shared_ + offset;
    if (end <= rows.all_keys && (key0 >= rows.prefix || end <= rows.prefix)) {
      producer_.finish();
      if (threadIdx.x == 0) {
        const int token = key0 < rows.prefix ? rows.prefix_begin + key0
                                             : static_cast<int>(rows.begin) + key0 - rows.prefix;
        barrier_expect_tx(barrier, Shape::kTileBytes);
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
    producer_.commit(barrier);
  }

  const ForwardProblem<bf16>& problem_;
  const ForwardMaps& maps_;
  SchedulerState* const scheduler_;
  WorkTile* const work_tiles_;
  const uint32_t shared_;
  const Barriers barriers_;
  CpAsyncProducer producer_;
};

template <class Shape>
class Consumer {
 public:
  // iteration: pipeline iteration of the first key tile; n: index of the work tile.
  __device__ Consumer(const PackedRows<bf16>& rows, const ForwardProblem<bf16>& problem,
                      char* memory, const Barriers& barriers, int iteration, int n)
      : rows_(rows),
        params_(problem.params),
        shared_(shared_address(memory)),
        barriers_(barriers),
        first_iteration_(iteration),
        query_pipe_(n) {
    auto* const combined = reinterpret_cast<float*>(memory + Shape::kCombined);
    if constexpr (Shape::kCombinesInShared)
      combined_ = {.o = combined, .states = combined + Shape::kRows * kColumns};
    else
      combined_ = problem.combined.from(int64_t{Shape::kRows} * blockIdx.x, kColumns);
    group_ = uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1);
    const int visible[2] = {rows.visible(thread_row()), rows.visible(thread_row() + 8)};
    min_visible_ = __reduce_min_sync(0xffffffffu, min(visible[0], visible[1]));
    window_begin_ = __reduce_max_sync(0xffffffffu, max(visible[0], visible[1])) - params_.window;
  }

  // Processes tiles [first_tile, tiles) of the block; the rows of this warpgroup see only tiles
  // [first, end).
  __device__ __forceinline__ void run(int first_tile, int tiles) {
    const int last_row = min(rows_.count, 64 * group_ + 64) - 1;
    const bool has_rows = 64 * group_ < rows_.count;
    const int visible = has_rows ? rows_.visible(last_row) : 0;
    const int end = uniform((visible + kKeys - 1) / kKeys);
    const int window_begin = has_rows ? rows_.visible(64 * group_) - params_.window : 0;
    const int first = uniform(has_rows ? max(first_tile, window_begin / kKeys) : first_tile);
#pragma unroll 1
    for (int tile = first_tile; tile < first; ++tile) skip_tile(tile - first_tile);
    if (has_rows) {
      compute(first_tile, first, end);
    } else {
      barrier_wait(barriers_.queries_full(query_pipe_.index), query_pipe_.phase);
      arrive_once_per_warp(barriers_.queries_empty(query_pipe_.index));
    }
#pragma unroll 1
    for (int tile = has_rows ? end : first; tile < tiles; ++tile) skip_tile(tile - first_tile);
  }

 private:
  static constexpr int kDim = Shape::kDim, kColumns = Shape::kColumns;
  static constexpr int kKeys = Shape::kKeys, kGroups = kKeys / 16;
  static constexpr int kChunkTiles = static_cast<int>(kAttentionChunk) / kKeys;

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

  // Skips a tile.
  __device__ __forceinline__ void skip_tile(int i) {
    ping_pong_wait();
    ping_pong_arrive();
    const PipelineState<kStages> pipe(first_iteration_ + i);
    barrier_wait(barriers_.keys_full(pipe.index), pipe.phase);
    arrive_once_per_warp(barriers_.keys_empty(pipe.index));
    barrier_wait(barriers_.values_full(pipe.index), pipe.phase);
    arrive_once_per_warp(barriers_.values_empty(pipe.index));
  }

  // Issues S = Q K^T.
  __device__ __forceinline__ void issue_scores(int i) {
    const PipelineState<kStages> pipe(first_iteration_ + i);
    barrier_wait(barriers_.keys_full(pipe.index), pipe.phase);
    const MatrixDescriptor queries = matrix_descriptor(shared_).plus(
        (query_pipe_.index * Shape::kConsumers + group_) * Shape::kQueryBytes);
    const MatrixDescriptor keys =
        matrix_descriptor(shared_).plus(Shape::kKeyTiles).plus(pipe.index * Shape::kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      wgmma<Major::kK, Major::kK>(s_, k_major_step<64>(queries, k), k_major_step<kKeys>(keys, k),
                                  k > 0);
    wgmma_commit();
  }
  // Issues O += P V.
  __device__ __forceinline__ void issue_values(int i) {
    const PipelineState<kStages> pipe(first_iteration_ + i);
    barrier_wait(barriers_.values_full(pipe.index), pipe.phase);
    const MatrixDescriptor values = matrix_descriptor(shared_, kKeys * 128)
                                        .plus(Shape::kValueTiles)
                                        .plus(pipe.index * Shape::kTileBytes);
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
    arrive_once_per_warp(barriers_.keys_empty(PipelineState<kStages>(iteration).index));
  }
  __device__ __forceinline__ void complete_values(int iteration) {
    wgmma_wait<0>();
    wgmma_fence_operand(o_);
    arrive_once_per_warp(barriers_.values_empty(PipelineState<kStages>(iteration).index));
  }

  // Computes the first row's half of P. Returns the value to subtract from the second row's
  // exponents.
  template <bool kMasked>
  __device__ __forceinline__ float begin_softmax(float (&alpha)[2]) {
    const float c = params_.c;
    const float first = row_max<kGroups, kMasked>(s_, 0, -INFINITY, kGroups);
    const float safe_row_max = update_row_max<kMasked>(first, 0, state_, alpha[0], c);
    exponentiate<kGroups, kMasked>(s_, 0, state_, c, safe_row_max, kGroups);
    // -infinity, or NaN, which any score replaces. The dependency on `first` makes the compiler
    // overlap the maxima of the second row with the exponentials of the first.
    const float init = __fmaf_rn(first, 0.0f, -INFINITY);
    const float second = row_max<kGroups, kMasked>(s_, 1, init, kGroups);
    return update_row_max<kMasked>(second, 1, state_, alpha[1], c);
  }
  __device__ __forceinline__ float begin_softmax(int tile, float (&alpha)[2]) {
    const int key0 = tile * kKeys;
    const bool window_hides = window_begin_ > key0;
    if (min_visible_ >= key0 + kKeys && !window_hides) return begin_softmax<false>(alpha);
    const int row = thread_row();
    mask_scores<kGroups>(s_, {rows_.visible(row) - key0, rows_.visible(row + 8) - key0},
                         params_.window, kGroups, window_hides);
    return begin_softmax<true>(alpha);
  }
  // Computes the second row's half, and rounds P.
  __device__ __forceinline__ void end_softmax(float safe_row_max) {
    exponentiate<kGroups, false>(s_, 1, state_, params_.c, safe_row_max, kGroups);
#pragma unroll
    for (int k = 0; k < kGroups; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p_[k][i] = pack_bf16(s_[2 * k + i / 2][i % 2 * 2], s_[2 * k + i / 2][i % 2 * 2 + 1]);
  }

  __device__ __forceinline__ void compute(int first_tile, int first, int end) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[n][i] = 0;
    const int first_chunk = first / kChunkTiles;
    float alpha[2];
    barrier_wait(barriers_.queries_full(query_pipe_.index), query_pipe_.phase);
    ping_pong_wait();
    issue_scores(first - first_tile);
    ping_pong_arrive();
    complete_scores<0>(first_iteration_ + first - first_tile);
    end_softmax(begin_softmax(first, alpha));
#pragma unroll 1
    for (int tile = first;; ++tile) {
      const int i = tile - first_tile;
      if (tile + 1 == end) {
        if (!kStageInQueries) arrive_once_per_warp(barriers_.queries_empty(query_pipe_.index));
        issue_values(i);
        complete_values(first_iteration_ + i);
        break;
      }
      ping_pong_wait();
      issue_scores(i + 1);
      issue_values(i);
      ping_pong_arrive();
      complete_scores<1>(first_iteration_ + i + 1);
      if ((tile + 1) % kChunkTiles == 0) end_chunk(tile / kChunkTiles, first_chunk);
      const float safe_row_max = begin_softmax(tile + 1, alpha);
      // Most tiles do not change the maxima.
      const bool rescales = __any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f);
      complete_values(first_iteration_ + i);
      if (rescales) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o_[n][e] *= alpha[e / 2];
      }
      end_softmax(safe_row_max);
    }
    reduce_l(state_);
    if ((end - 1) / kChunkTiles > first_chunk)
      combine_chunk<Shape>(o_, state_, rows_, combined_, thread_row());
    store();
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

  __device__ __forceinline__ void store() {
    if constexpr (kStageInQueries) {
      static_assert(Shape::kQueryStages == 1);
      named_barrier(4 + group_, kWarpgroup);  // the warpgroup has read its queries
      store_rows<Shape>(rows_, params_, o_, state_, shared_, row());
      fence_proxy_async();
      arrive_once_per_warp(barriers_.queries_empty(query_pipe_.index));
    } else {
      // O is staged in the combined-chunk memory of the warp's rows.
      constexpr int kWaiting = 4 * kColumns, kRow = 2 * kColumns;
      store_rows<Shape>(rows_, params_, o_, state_,
                        shared_ + Shape::kCombined + row() * (kWaiting - kRow), row());
    }
  }

  const PackedRows<bf16>& rows_;
  const AttentionParams& params_;
  const uint32_t shared_;
  const Barriers barriers_;
  const int first_iteration_;
  const PipelineState<Shape::kQueryStages> query_pipe_;
  CombinedChunks combined_;
  int group_;
  // Number of leading keys that all rows of the warp see, and first key that the window shows to
  // all.
  int min_visible_, window_begin_;
  RowState state_;
  float s_[2 * kGroups][4], o_[kDim / 8][4];
  uint32_t p_[kGroups][4];
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    forward_sm90_kernel(const __grid_constant__ ForwardProblem<bf16> problem,
                        const __grid_constant__ ForwardMaps maps, SchedulerState* scheduler) {
  launch_dependents_and_wait();
  extern __shared__ __align__(1024) char memory[];
  const Barriers barriers{shared_address(memory) + Shape::kBarriers};
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Shape::kConsumers;
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(barriers.work_full(stage), 32);
      barrier_init(barriers.work_empty(stage), 32 * kConsumerWarps);
      barrier_init(barriers.queries_full(stage), 1);
      barrier_init(barriers.queries_empty(stage), kConsumerWarps);
      barrier_init(barriers.keys_full(stage), kWarpgroup);
      barrier_init(barriers.keys_empty(stage), kConsumerWarps);
      barrier_init(barriers.values_full(stage), kWarpgroup);
      barrier_init(barriers.values_empty(stage), kConsumerWarps);
    }
    tma_prefetch(&maps.q);
    tma_prefetch(&maps.k);
    tma_prefetch(&maps.v);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    deallocate_registers<Shape::kProducerRegisters>();
    ForwardProducer<Shape>(problem, maps, scheduler, memory, barriers).run();
    return;
  }
  allocate_registers<Shape::kConsumerRegisters>();
  const auto* const work_tiles = reinterpret_cast<const WorkTile*>(memory + Shape::kWorkTiles);
  // Lets the first warpgroup issue first.
  if (Shape::kPingPong && threadIdx.x / kWarpgroup == Shape::kConsumers)
    named_arrive(2, 2 * kWarpgroup);
  int iteration = 0;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const PipelineState<kStages> pipe(n);
    barrier_wait(barriers.work_full(pipe.index), pipe.phase);
    const WorkTile& work = work_tiles[pipe.index];
    if (work.is_end) return;
    const int first_tile = uniform(work.first_tile(Shape::kKeys)),
              tiles = uniform(work.tiles(Shape::kKeys));
    Consumer<Shape>(work.rows, problem, memory, barriers, iteration, n).run(first_tile, tiles);
    iteration += tiles - first_tile;
    barrier_arrive(barriers.work_empty(pipe.index));
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

}  // namespace

template <int kDim>
void run_forward_sm90(ForwardProblem<bf16> problem, const AttentionForward& in) {
  using Shape = Sm90Shape<kDim>;
  const Device device = in.q.device();
  const int64_t slots = tile_slots(problem.tokens, problem.sequences, Shape::kRows);
  problem.slots = static_cast<int>(slots);
  if (problem.tokens == 0) return;
  const int64_t blocks =
      std::min<int64_t>(slots * problem.heads, ::cohort::cuda::multiprocessors(device));
  Tensor scheduler = scheduler_state(device), scratch;
  if (!Shape::kCombinesInShared && problem.tokens > kAttentionChunk)
    scratch = combined_scratch(problem.combined, blocks * Shape::kRows, Shape::kColumns, device);
  launch("attention_forward", forward_sm90_kernel<Shape>,
         {.grid = blocks_for(blocks, 1),
          .block = Shape::kThreads,
          .shared_bytes = Shape::kSharedBytes,
          .start = Start::kProgrammatic},
         device, problem,
         ForwardMaps{.q = make_head_map(in.q, 64),
                     .k = make_head_map(in.k, Shape::kKeys),
                     .v = make_head_map(in.v, Shape::kKeys)},
         reinterpret_cast<SchedulerState*>(pointer<int32_t>(scheduler)));
}

}  // namespace cohort::kernels::cuda
