// Attention in f32 for one block of 64 query rows: the algorithm of attention_bf16.cuh with fused
// multiply-adds instead of tensor cores and no intermediate rounding. Every score is one chain over
// ascending head dims, every element of O one over ascending keys.
//
// Thread (y, x) of 16 x 16 holds rows 4 y .. 4 y + 3: their scores for keys x, x + 16, ..., and
// columns 4 (x + 16 i) .. + 3 of O. P passes through shared memory, where four threads per row add
// it to the four partial sums of l. All of this stays within one warp, which has 8 rows.
#pragma once

#include "kernels/attention/cuda/attention_bf16.cuh"

namespace cohort::kernels::cuda {

inline constexpr int kFloatThreads = 256;

// kLoadedKeys: keys or values in shared memory at a time.
template <int kDim_>
struct FloatShape {
  static constexpr int kDim = kDim_, kKeys = kTileKeys<kDim>, kLoadedKeys = float_loaded_keys(kDim);
  static constexpr int kRows = kFloatRows, kThreads = kFloatThreads;
  static constexpr int kStride = kDim + 4, kScoreStride = kKeys + 4;
  static constexpr int kKeysPerThread = kKeys / 16, kPacksPerThread = kDim / 64;
  static constexpr size_t kSharedBytes = float_shared_bytes(kDim);
};

// Sizes of a kernel in either precision.
template <class T, int kDim, RowTiles kTiles, bool kUnmasked>
using RowsShape = std::conditional_t<
    std::is_same_v<T, float>, FloatShape<kDim>,
    Bf16Shape<kDim, kTiles.warps, kTiles.key_stages, kTiles.value_stages, kUnmasked>>;
// Shared memory of a block of that shape.
template <class T, int kDim, auto kTilesOf>
constexpr size_t rows_shared_bytes(Tiles tiles) {
  return std::is_same_v<T, float> ? float_shared_bytes(kDim)
                                  : kTilesOf(kDim, tiles).shared_bytes(kDim);
}

using Float4 = Pack<float, 4>;

// State of a thread: its rows are y4 .. y4 + 3, and it accumulates one partial sum of l, of row
// l_row.
struct FloatThreadState {
  int y4, x;
  int l_row;
  int ends[4] = {};
  int max_end = 0;  // over the rows of the warp
  float row_max_log2[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};  // m c
  float l = 0;
  uint64_t stream = 0;          // Philox stream of l_row
  float* loaded = nullptr;      // in shared memory: keys, then values, followed by the queries
  float* p = nullptr;           // in shared memory: P of the tile
  float* row_factor = nullptr;  // in shared memory: alpha of each row; l at the end of a chunk
};

// Starts loading kLoadedKeys keys or values from `first` on, after all threads have read the
// previous ones.
template <int kDim, class Rows>
__device__ __forceinline__ void load_float_rows(float* to, const Rows& rows, const float* from,
                                                int first, const RowFormat& format) {
  using Shape = FloatShape<kDim>;
  constexpr int kChunks = kDim / 4;
  __syncthreads();
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kLoadedKeys * kChunks;
       i += kFloatThreads) {
    const int row = i / kChunks;
    const int64_t offset = rows.key_offset(first + row);
    load_float_chunk(to + row * Shape::kStride, i % kChunks, offset < 0 ? nullptr : from + offset,
                     format.head_dim, format.vectorized);
  }
  copy_async_commit();
}
__device__ __forceinline__ void finish_loading() {
  copy_async_wait<0>();
  __syncthreads();
}

// s[i][j0 + j] = row y4 + i of Q times loaded key x + 16 j.
template <int kDim>
__device__ __forceinline__ void float_scores(float (&s)[4][FloatShape<kDim>::kKeysPerThread],
                                             int j0, const float* queries, const float* keys,
                                             const FloatThreadState& state, int head_dim) {
  using Shape = FloatShape<kDim>;
  constexpr int kCount = Shape::kLoadedKeys / 16;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < kCount; ++j) s[i][j0 + j] = 0;
#pragma unroll 1
  for (int d = 0; d < head_dim; d += 4) {
    Float4 q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = load_pack<4>(queries + (state.y4 + i) * Shape::kStride + d);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const Float4 k = load_pack<4>(keys + (state.x + 16 * j) * Shape::kStride + d);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j0 + j] = __fmaf_rn(q[i].v[e], k.v[e], s[i][j0 + j]);
    }
  }
}

// S of the tile from key0 on becomes P for the four rows of the thread.
template <int kKeysPerThread, class Rule, class Rows>
__device__ __forceinline__ void float_softmax(float (&s)[4][kKeysPerThread],
                                              FloatThreadState& state, float (&alpha)[4],
                                              const Rule& rule, const Rows& rows, int key0) {
  const float c = rule.exponent;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float largest = -INFINITY;
    const int position = rows.position(state.y4 + i), first = key0 + state.x;
    const auto& bound = rows.bind(rule, state.y4 + i);
    bound.modify([&, distance = KeyDistance<float>(first - position)](auto&& stage) {
#pragma unroll
      for (int j = 0; j < kKeysPerThread; ++j) s[i][j] = stage(s[i][j], distance + 16 * j);
    });
    const bool sees_tile = bound.sees_tile(position, key0);
#pragma unroll
    for (int j = 0; j < kKeysPerThread; ++j) {
      if (!sees_tile || bound.outside(first + 16 * j, state.ends[i])) s[i][j] = -INFINITY;
      largest = fmaxf(largest, s[i][j]);
    }
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)  // the 16 threads of the row
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    float& row_max_log2 = state.row_max_log2[i];
    const float new_max = fmaxf(row_max_log2, largest * c);
    const float safe_row_max = new_max == -INFINITY ? 0.0f : new_max;  // as in update_row_max()
    alpha[i] = fast_exp2(row_max_log2 - safe_row_max);
    row_max_log2 = new_max;
#pragma unroll
    for (int j = 0; j < kKeysPerThread; ++j)
      s[i][j] = fast_exp2(__fmaf_rn(s[i][j], c, -safe_row_max));
  }
}

// Adds the tile's P to one partial sum of l, of row l_row, by (key mod 8) / 2; P may be
// dropped afterwards. Four adjacent lanes share a row.
template <int kDim, class Rule>
__device__ __forceinline__ void float_add_to_l(FloatThreadState& state, const Rule& rule, int head,
                                               int key0) {
  constexpr int kKeys = FloatShape<kDim>::kKeys;
  const int quad = static_cast<int>(threadIdx.x % 4);
  float* const p = state.p + state.l_row * FloatShape<kDim>::kScoreStride;
  float& l = state.l;
  l *= state.row_factor[state.l_row];
#pragma unroll 4
  for (int j = 2 * quad; j < kKeys; j += 8) {
    const auto pair = load_pack<2>(p + j);
    l += pair.v[0];
    l += pair.v[1];
  }
  if constexpr (Rule::kDrops) {
    if (!rule.drops()) return;
    __syncwarp();
    for (int j = 4 * quad; j < kKeys; j += 16) {
      const uint32_t keep = rule.drop.keep_four(state.stream, head, key0 + j);
      Float4 four = load_pack<4>(p + j);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        four.v[e] = (keep >> e & 1) != 0 ? four.v[e] * rule.drop.factor : 0;
      store_pack(p + j, four);
    }
  }
}

// o += P V over `count` keys, a multiple of 4.
template <int kDim>
__device__ __forceinline__ void float_values(float (&o)[4][FloatShape<kDim>::kPacksPerThread][4],
                                             const float* p, const float* values, int y4, int x,
                                             int count) {
  using Shape = FloatShape<kDim>;
#pragma unroll 1
  for (int j = 0; j < count; j += 4) {
    Float4 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = load_pack<4>(p + (y4 + i) * Shape::kScoreStride + j);
#pragma unroll
    for (int key = 0; key < 4; ++key)
#pragma unroll
      for (int n = 0; n < Shape::kPacksPerThread; ++n) {
        const Float4 v = load_pack<4>(values + (j + key) * Shape::kStride + 4 * (x + 16 * n));
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][n][e] = __fmaf_rn(w[i].v[key], v.v[e], o[i][n][e]);
      }
  }
}

// S of a tile becomes P, in shared memory: 4 rows by kKeysPerThread keys per thread, and is added
// to the partial sum of l of row `l_row`.
template <int kDim, class Rule, class Rows>
__device__ __forceinline__ void float_probabilities(float (&s)[4][FloatShape<kDim>::kKeysPerThread],
                                                    FloatThreadState& state, float (&alpha)[4],
                                                    const Rows& rows, const Rule& rule, int key0) {
  using Shape = FloatShape<kDim>;
  float_softmax(s, state, alpha, rule, rows, key0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (state.x == 0) state.row_factor[state.y4 + i] = alpha[i];
#pragma unroll
    for (int j = 0; j < Shape::kKeysPerThread; ++j)
      state.p[(state.y4 + i) * Shape::kScoreStride + state.x + 16 * j] = s[i][j];
  }
  __syncwarp();
  float_add_to_l<kDim>(state, rule, rows.head(0), key0);
}

// Reduces l of the rows of the thread at the end of a chunk.
__device__ __forceinline__ void float_reduce_l(float (&l)[4], FloatThreadState& state) {
  state.l += __shfl_xor_sync(0xffffffffu, state.l, 1);
  state.l += __shfl_xor_sync(0xffffffffu, state.l, 2);
  __syncwarp();
  if (threadIdx.x % 4 == 0) state.row_factor[state.l_row] = state.l;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) l[i] = state.row_factor[state.y4 + i];
}

// Combines a chunk with the previous ones, for rows that have seen keys of both; as
// combine_chunk().
template <int kDim, class Rows>
__device__ __forceinline__ void float_combine(float (&o)[4][FloatShape<kDim>::kPacksPerThread][4],
                                              float (&l)[4], FloatThreadState& state,
                                              const Rows& rows, const CombinedChunks& combined) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (state.y4 + i >= rows.count) continue;
    const int64_t row = state.y4 + i;
    const ChunkState before = combined.load_state(row), chunk{state.row_max_log2[i], l[i]};
    if (before.row_max_log2 == -INFINITY) continue;
    const bool any_key = chunk.row_max_log2 != -INFINITY;
    const CombineScales by = any_key ? combine_scales(before, chunk) : CombineScales{1, 0};
    const ChunkState both = any_key ? combine(before, chunk, by) : before;
    state.row_max_log2[i] = both.row_max_log2;
    l[i] = both.l;
#pragma unroll
    for (int n = 0; n < FloatShape<kDim>::kPacksPerThread; ++n) {
      const Float4 pack = load_pack<4>(combined.o + row * kDim + 4 * (state.x + 16 * n));
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][n][e] = combine(pack.v[e], o[i][n][e], by);
    }
  }
}

// Stores the combined chunks and starts the next chunk.
template <int kDim, class Rows>
__device__ __forceinline__ void float_store_combined(
    float (&o)[4][FloatShape<kDim>::kPacksPerThread][4], const float (&l)[4],
    FloatThreadState& state, const Rows& rows, const CombinedChunks& combined) {
  __syncwarp();  // what was combined before has been read
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool live = state.y4 + i < rows.count;
    const int64_t row = state.y4 + i;
    if (live && state.x == 0) combined.store_state(row, {state.row_max_log2[i], l[i]});
    state.row_max_log2[i] = -INFINITY;
#pragma unroll
    for (int n = 0; n < FloatShape<kDim>::kPacksPerThread; ++n) {
      if (live)
        store_pack(combined.o + row * kDim + 4 * (state.x + 16 * n),
                   Float4{o[i][n][0], o[i][n][1], o[i][n][2], o[i][n][3]});
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][n][e] = 0;
    }
  }
  state.l = 0;
}

// Stores O (1 / l) and the log-sum-exp of the thread's rows.
template <int kDim, class Rule, class Rows>
__device__ __forceinline__ void float_store(
    const float (&o)[4][FloatShape<kDim>::kPacksPerThread][4], const float (&l)[4],
    const FloatThreadState& state, const Rows& rows, const Rule& rule, const RowFormat& format) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = state.y4 + i;
    if (row >= rows.count) continue;
    const auto [factor, lse] = finish_row(rule, rows.head(row), state.row_max_log2[i], l[i]);
    if (state.x == 0) rows.store_lse(row, lse);
    float* const to = rows.output(row);
#pragma unroll
    for (int n = 0; n < FloatShape<kDim>::kPacksPerThread; ++n) {
      const int column = 4 * (state.x + 16 * n);
      Float4 out;
#pragma unroll
      for (int e = 0; e < 4; ++e) out.v[e] = o[i][n][e] * factor + 0.0f;
      if (format.vectorized && column < format.head_dim) store_pack(to + column, out);
      if (!format.vectorized)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (column + e < format.head_dim) to[column + e] = out.v[e];
    }
  }
}

// o *= alpha, row by row.
template <int kPacks>
__device__ __forceinline__ void float_rescale(float (&o)[4][kPacks][4], const float (&alpha)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int n = 0; n < kPacks; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][n][e] *= alpha[i];
}

// Adds a tile of keys and values to O and to the state of its chunk.
template <int kDim, class Rule, class Rows>
__device__ __forceinline__ void float_step(float (&o)[4][FloatShape<kDim>::kPacksPerThread][4],
                                           FloatThreadState& state, const Rows& rows,
                                           const Rule& rule, const RowFormat& format, int tile) {
  using Shape = FloatShape<kDim>;
  constexpr int kKeys = Shape::kKeys, kLoadedKeys = Shape::kLoadedKeys;
  const float* const queries = state.loaded + kLoadedKeys * Shape::kStride;
  const int key0 = tile * kKeys;
  const bool any = state.max_end > key0;  // uniform in a warp
  float s[4][Shape::kKeysPerThread], alpha[4];
#pragma unroll
  for (int first = 0; first < kKeys; first += kLoadedKeys) {
    load_float_rows<kDim>(state.loaded, rows, rows.k, key0 + first, format);
    finish_loading();
    if (any) float_scores<kDim>(s, first / 16, queries, state.loaded, state, format.head_dim);
  }
  load_float_rows<kDim>(state.loaded, rows, rows.v, key0, format);
  if (any) float_probabilities<kDim>(s, state, alpha, rows, rule, key0);
  finish_loading();
  if (any) float_rescale(o, alpha);
#pragma unroll 1
  for (int first = 0; first < kKeys; first += kLoadedKeys) {
    if (first > 0) {
      load_float_rows<kDim>(state.loaded, rows, rows.v, key0 + first, format);
      finish_loading();
    }
    if (any)
      float_values<kDim>(o, state.p + first, state.loaded, state.y4, state.x,
                         min(kLoadedKeys, (state.max_end - key0 - first + 3) / 4 * 4));
  }
}

// Computes the rows of a block; Rows as in attention_bf16().
template <int kDim, class Rule, class Rows>
__device__ __forceinline__ void attention_f32(const Rows& rows, const Rule& rule,
                                              const RowFormat& format, float* shared,
                                              const CombinedChunks& combined) {
  using Shape = FloatShape<kDim>;
  constexpr int kChunkTiles = kAttentionChunk / Shape::kKeys;
  const int thread = static_cast<int>(threadIdx.x);
  FloatThreadState state{.y4 = thread / 16 * 4, .x = thread % 16, .l_row = thread / 4};
  state.loaded = shared;
  float* const queries = shared + Shape::kLoadedKeys * Shape::kStride;
  state.p = queries + kFloatRows * Shape::kStride;
  state.row_factor = state.p + kFloatRows * Shape::kScoreStride;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    state.ends[i] = rows.end_key(rule, state.y4 + i);
    state.max_end = max(state.max_end, rows.bind(rule, 0).visible_end(state.ends[i]));
  }
  state.max_end = __reduce_max_sync(0xffffffffu, state.max_end);
  if constexpr (Rule::kDrops)
    if (rule.drops() && state.l_row < rows.count)
      state.stream = rule.drop.row(rows.token(state.l_row));

  float o[4][Shape::kPacksPerThread][4] = {};
  for (int i = thread; i < kFloatRows * (kDim / 4); i += kFloatThreads)
    load_float_chunk(queries + i / (kDim / 4) * Shape::kStride, i % (kDim / 4),
                     rows.query(i / (kDim / 4)), format.head_dim, format.vectorized);
  const IndexRange<int> tiles = rows.keys.tiles(Shape::kKeys);
  float l[4];
  int tile = next_tile<Shape::kKeys>(rule, rows, tiles.first, tiles.end);
  const int first_end = (tile / kChunkTiles + 1) * kChunkTiles;
#pragma unroll 1
  for (int end = min(first_end, tiles.end);;) {  // chunks, [tile, end)
#pragma unroll 1
    for (; tile < end; tile = next_tile<Shape::kKeys>(rule, rows, tile + 1, tiles.end))
      float_step<kDim>(o, state, rows, rule, format, tile);
    float_reduce_l(l, state);
    if (end > first_end) float_combine<kDim>(o, l, state, rows, combined);
    if (end == tiles.end) break;
    float_store_combined<kDim>(o, l, state, rows, combined);
    end = min(end + kChunkTiles, tiles.end);
  }
  float_store<kDim>(o, l, state, rows, rule, format);
}

// Computes the rows of a block in the precision of the shape.
template <class Shape, class Rule, class Rows>
__device__ __forceinline__ void attention_rows(const Rows& rows, const Rule& rule,
                                               const RowFormat& format, char* shared,
                                               const CombinedScratch& scratch) {
  const bool combines = rows.keys.end > kAttentionChunk;
  const int slot = combines ? scratch.acquire(reinterpret_cast<int*>(shared)) : 0;
  const CombinedChunks combined = scratch.from(int64_t{slot} * Shape::kRows, Shape::kDim);
  if constexpr (std::is_base_of_v<FloatShape<Shape::kDim>, Shape>)
    attention_f32<Shape::kDim>(rows, rule, format, reinterpret_cast<float*>(shared), combined);
  else
    attention_bf16<Shape>(rows, rule, format, shared, combined);
  if (combines) scratch.release(slot);
}

}  // namespace cohort::kernels::cuda
