// Attention in f32 for one block of 64 query rows: what attend.cuh does in bf16, with fused
// multiply-adds instead of tensor cores and nothing rounded in between. Every score is one chain
// over ascending head dims, every element of O one over ascending keys.
//
// Thread (y, x) of 16 x 16 holds rows 4 y .. 4 y + 3: their scores for keys x, x + 16, ..., and
// columns 4 (x + 16 i) .. + 3 of O. P passes through shared memory, where four threads per row sum
// it into the four parts of l. All of that is within one warp, which has 8 rows.
#pragma once

#include "kernels/attention/cuda/attend.cuh"

namespace cohort::kernels::cuda {

inline constexpr int kFloatRows = 64, kFloatThreads = 256;

template <int kDim_>
struct FloatShape {
  static constexpr int kDim = kDim_, kKeys = kTileKeys<kDim>;
  // Row lengths in shared memory: aligned, and off the multiples of 32 banks.
  static constexpr int kStride = kDim + 4, kScoreStride = kKeys + 4;
  static constexpr int kOwnKeys = kKeys / 16, kOwnPacks = kDim / 64;
  static constexpr size_t kSharedBytes = sizeof(float) * (kKeys * kStride + kFloatRows * kStride +
                                                          kFloatRows * kScoreStride + kFloatRows);
};

using Float4 = Pack<float, 4>;

// A thread's place in the block, and what it knows of its rows y4 .. y4 + 3.
struct FloatRows {
  int y4, x;
  int sum_row;  // the row whose l the thread has a part of
  int visible[4] = {};
  float row_max_log2[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};  // m c
  float l = 0;
  uint64_t stream = 0;          // of sum_row, for dropout
  float* p = nullptr;           // in shared memory: P of the tile
  float* row_factor = nullptr;  // in shared memory: alpha of each row, at a chunk's end l
};

// Begins to load a tile of keys or values.
template <int kDim, class Rows>
__device__ __forceinline__ void load_float_tile(float* to, const Rows& rows, const float* from,
                                                int tile, const AttendParams& params) {
  using Shape = FloatShape<kDim>;
  constexpr int kChunks = kDim / 4;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kKeys * kChunks; i += kFloatThreads) {
    const int row = i / kChunks;
    const int64_t offset = rows.key_offset(tile * Shape::kKeys + row);
    load_float_chunk(to + row * Shape::kStride, i % kChunks, offset < 0 ? nullptr : from + offset,
                     params.head_dim, params.vectorized);
  }
  copy_async_commit();
}

// s[i][j] = row y4 + i of Q times key x + 16 j.
template <int kDim>
__device__ __forceinline__ void float_scores(float (&s)[4][FloatShape<kDim>::kOwnKeys],
                                             const float* queries, const float* keys, int y4, int x,
                                             int head_dim) {
  using Shape = FloatShape<kDim>;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kOwnKeys; ++j) s[i][j] = 0;
#pragma unroll 1
  for (int d = 0; d < head_dim; d += 4) {
    Float4 q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = load_pack<4>(queries + (y4 + i) * Shape::kStride + d);
#pragma unroll
    for (int j = 0; j < Shape::kOwnKeys; ++j) {
      const Float4 k = load_pack<4>(keys + (x + 16 * j) * Shape::kStride + d);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j] = __fmaf_rn(q[i].v[e], k.v[e], s[i][j]);
    }
  }
}

// S becomes P for the thread's four rows; row_max_log2: their m c. seen: the first key after those
// that each row sees, counted in the tile.
template <int kOwnKeys>
__device__ __forceinline__ void float_softmax(float (&s)[4][kOwnKeys], float (&row_max_log2)[4],
                                              float (&alpha)[4], const AttendParams& params,
                                              const int (&seen)[4], int x) {
  const float c = params.c;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kOwnKeys; ++j) {
      if (x + 16 * j >= seen[i] || x + 16 * j < seen[i] - params.window) s[i][j] = -INFINITY;
      largest = fmaxf(largest, s[i][j]);
    }
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)  // the 16 threads of the row
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    const float raised = fmaxf(row_max_log2[i], largest * c);
    const float origin = raised == -INFINITY ? 0.0f : raised;  // as in raise_maximum()
    alpha[i] = fast_exp2(row_max_log2[i] - origin);
    row_max_log2[i] = raised;
#pragma unroll
    for (int j = 0; j < kOwnKeys; ++j) s[i][j] = fast_exp2(__fmaf_rn(s[i][j], c, -origin));
  }
}

// One part of a row's l, by (key mod 8) / 2, goes up by the tile's P; with dropout, P is dropped
// afterwards. Four lanes side by side have a row.
template <int kKeys>
__device__ __forceinline__ void float_sums(float& l, float alpha, float* p,
                                           const ProbabilityDropout& dropout, uint64_t stream,
                                           int head, int key0) {
  const int part = static_cast<int>(threadIdx.x % 4);
  l *= alpha;
#pragma unroll 4
  for (int j = 2 * part; j < kKeys; j += 8) {
    const auto pair = load_pack<2>(p + j);
    l += pair.v[0];
    l += pair.v[1];
  }
  if (dropout.first_kept == 0) return;
  __syncwarp();
  for (int j = 4 * part; j < kKeys; j += 16) {
    const uint32_t keep = dropout.keep_four(stream, head, key0 + j);
    Float4 four = load_pack<4>(p + j);
#pragma unroll
    for (int e = 0; e < 4; ++e) four.v[e] = (keep >> e & 1) != 0 ? four.v[e] * dropout.factor : 0;
    store_pack(p + j, four);
  }
}

// o += P V over `count` keys, a multiple of 4.
template <int kDim>
__device__ __forceinline__ void float_values(float (&o)[4][FloatShape<kDim>::kOwnPacks][4],
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
      for (int n = 0; n < Shape::kOwnPacks; ++n) {
        const Float4 v = load_pack<4>(values + (j + key) * Shape::kStride + 4 * (x + 16 * n));
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][n][e] = __fmaf_rn(w[i].v[key], v.v[e], o[i][n][e]);
      }
  }
}

// S of a tile becomes P, in shared memory: a thread's 4 rows by kOwnKeys keys, and their sums go
// into the part of l that the thread has of row `sum_row`.
template <int kDim, class Rows>
__device__ __forceinline__ void float_probabilities(float (&s)[4][FloatShape<kDim>::kOwnKeys],
                                                    FloatRows& own, float (&alpha)[4],
                                                    const Rows& rows, const AttendParams& params,
                                                    int key0) {
  using Shape = FloatShape<kDim>;
  const int seen[4] = {own.visible[0] - key0, own.visible[1] - key0, own.visible[2] - key0,
                       own.visible[3] - key0};
  float_softmax(s, own.row_max_log2, alpha, params, seen, own.x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (own.x == 0) own.row_factor[own.y4 + i] = alpha[i];
#pragma unroll
    for (int j = 0; j < Shape::kOwnKeys; ++j)
      own.p[(own.y4 + i) * Shape::kScoreStride + own.x + 16 * j] = s[i][j];
  }
  __syncwarp();
  float_sums<Shape::kKeys>(own.l, own.row_factor[own.sum_row],
                           own.p + own.sum_row * Shape::kScoreStride, params.dropout, own.stream,
                           rows.head(), key0);
}

// A chunk ends: the l of the thread's rows.
__device__ __forceinline__ void float_chunk_sums(float (&l)[4], FloatRows& own) {
  own.l += __shfl_xor_sync(0xffffffffu, own.l, 1);
  own.l += __shfl_xor_sync(0xffffffffu, own.l, 2);
  __syncwarp();
  if (threadIdx.x % 4 == 0) own.row_factor[own.sum_row] = own.l;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) l[i] = own.row_factor[own.y4 + i];
}

// Joins a chunk with those before it, for rows that have seen keys of both; as join_chunk().
template <int kDim, class Rows>
__device__ __forceinline__ void float_join(float (&o)[4][FloatShape<kDim>::kOwnPacks][4],
                                           float (&l)[4], FloatRows& own, const Rows& rows,
                                           const JoinedChunks& joined) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!kJoinsInShared && own.y4 + i >= rows.count) continue;
    const int64_t row = kJoinsInShared ? own.y4 + i : rows.joined_row(own.y4 + i);
    const ChunkState before = joined.load_state(row), chunk{own.row_max_log2[i], l[i]};
    if (before.row_max_log2 == -INFINITY) continue;
    const bool seen = chunk.row_max_log2 != -INFINITY;
    const JoinFactors by = seen ? join_factors(before, chunk) : JoinFactors{1, 0};
    const ChunkState both = seen ? join(before, chunk, by) : before;
    own.row_max_log2[i] = both.row_max_log2;
    l[i] = both.l;
#pragma unroll
    for (int n = 0; n < FloatShape<kDim>::kOwnPacks; ++n) {
      const Float4 pack = load_pack<4>(joined.o + row * kDim + 4 * (own.x + 16 * n));
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][n][e] = join(pack.v[e], o[i][n][e], by);
    }
  }
}

// Keeps what has been joined and starts the next chunk.
template <int kDim, class Rows>
__device__ __forceinline__ void float_keep(float (&o)[4][FloatShape<kDim>::kOwnPacks][4],
                                           const float (&l)[4], FloatRows& own, const Rows& rows,
                                           const JoinedChunks& joined) {
  __syncwarp();  // what was joined before has been read
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool live = kJoinsInShared || own.y4 + i < rows.count;
    const int64_t row = kJoinsInShared ? own.y4 + i : rows.joined_row(own.y4 + i);
    if (live && own.x == 0) joined.store_state(row, {own.row_max_log2[i], l[i]});
    own.row_max_log2[i] = -INFINITY;
#pragma unroll
    for (int n = 0; n < FloatShape<kDim>::kOwnPacks; ++n) {
      if (live)
        store_pack(joined.o + row * kDim + 4 * (own.x + 16 * n),
                   Float4{o[i][n][0], o[i][n][1], o[i][n][2], o[i][n][3]});
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][n][e] = 0;
    }
  }
  own.l = 0;
}

// O (1 / l) and the log-sum-exp of the thread's rows.
template <int kDim, class Rows>
__device__ __forceinline__ void float_store(const float (&o)[4][FloatShape<kDim>::kOwnPacks][4],
                                            const float (&l)[4], const FloatRows& own,
                                            const Rows& rows, const AttendParams& params) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = own.y4 + i;
    if (row >= rows.count) continue;
    const float sum = l[i], inverse = 1.0f / sum;
    if (own.x == 0) rows.store_lse(row, __fmaf_rn(own.row_max_log2[i], kLn2, logf(sum)));
    float* const to = rows.output(row);
#pragma unroll
    for (int n = 0; n < FloatShape<kDim>::kOwnPacks; ++n) {
      const int column = 4 * (own.x + 16 * n);
      Float4 out;
#pragma unroll
      for (int e = 0; e < 4; ++e) out.v[e] = o[i][n][e] * inverse + 0.0f;
      if (params.vectorized && column < params.head_dim) store_pack(to + column, out);
      if (!params.vectorized)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (column + e < params.head_dim) to[column + e] = out.v[e];
    }
  }
}

// A block's work; Rows as in attend().
template <int kDim, class Rows>
__device__ __forceinline__ void attend_float(const Rows& rows, const AttendParams& params,
                                             float* shared, const JoinedChunks& scratch) {
  using Shape = FloatShape<kDim>;
  constexpr int kKeys = Shape::kKeys, kChunkTiles = kAttentionChunk / kKeys;
  float* const tile_rows = shared;  // keys, then values
  float* const queries = tile_rows + kKeys * Shape::kStride;
  const int thread = static_cast<int>(threadIdx.x);
  FloatRows own{.y4 = thread / 16 * 4, .x = thread % 16, .sum_row = thread / 4};
  own.p = queries + kFloatRows * Shape::kStride;
  own.row_factor = own.p + kFloatRows * Shape::kScoreStride;
  float* const after = own.row_factor + kFloatRows;
  const JoinedChunks joined =
      kJoinsInShared ? JoinedChunks{.o = after, .states = after + kFloatRows * kDim} : scratch;
  int most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    own.visible[i] = rows.visible(own.y4 + i);
    most = max(most, own.visible[i]);
  }
  most = __reduce_max_sync(0xffffffffu, most);
  if (params.dropout.first_kept > 0 && own.sum_row < rows.count)
    own.stream = params.dropout.row(rows.token(own.sum_row));

  float o[4][Shape::kOwnPacks][4] = {};
  for (int i = thread; i < kFloatRows * (kDim / 4); i += kFloatThreads)
    load_float_chunk(queries + i / (kDim / 4) * Shape::kStride, i % (kDim / 4),
                     rows.query(i / (kDim / 4)), params.head_dim, params.vectorized);
  const int first_tile = rows.first_key / kKeys, tiles = (rows.keys + kKeys - 1) / kKeys;
  float l[4];
  const int first_end = (first_tile / kChunkTiles + 1) * kChunkTiles;
#pragma unroll 1
  for (int tile = first_tile, end = min(first_end, tiles);;) {  // chunks, [tile, end)
#pragma unroll 1
    for (; tile < end; ++tile) {
      const int key0 = tile * kKeys;
      const bool any = most > key0;  // the same in a warp
      __syncthreads();               // the values before are done with
      load_float_tile<kDim>(tile_rows, rows, rows.k, tile, params);
      copy_async_wait<0>();
      __syncthreads();
      float s[4][Shape::kOwnKeys], alpha[4];
      if (any) float_scores<kDim>(s, queries, tile_rows, own.y4, own.x, params.head_dim);
      __syncthreads();
      load_float_tile<kDim>(tile_rows, rows, rows.v, tile, params);
      if (any) float_probabilities<kDim>(s, own, alpha, rows, params, key0);
      copy_async_wait<0>();
      __syncthreads();
      if (!any) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int n = 0; n < Shape::kOwnPacks; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][n][e] *= alpha[i];
      float_values<kDim>(o, own.p, tile_rows, own.y4, own.x, min(kKeys, (most - key0 + 3) / 4 * 4));
    }
    float_chunk_sums(l, own);
    if (end > first_end) float_join<kDim>(o, l, own, rows, joined);
    if (end == tiles) break;
    float_keep<kDim>(o, l, own, rows, joined);
    end = min(end + kChunkTiles, tiles);
  }
  float_store<kDim>(o, l, own, rows, params);
}

}  // namespace cohort::kernels::cuda
