// Flash attention in bf16 for one block: up to 16 query rows per warp against the keys they see, in
// the canonical order of attention.h. Training forward and prefill come here; decode.cu takes
// the same steps in the same order, and so a row gets the same bits from each of them.
//
// Per tile of keys (K and V tiles arrive in shared memory by cp.async while the tile before is
// worked on), a warp with 16 rows does the following.
//
//   S = Q K^T       mma.m16n8k16, the head dim (padded with zeros to 64, 128 or 256) in ascending
//                   steps of 16. A thread holds columns 2 quad, 2 quad + 1 of every 8 keys for
//                   two rows: keys with (key mod 8) / 2 = quad.
//   m c, alpha      the largest visible score of the row by shuffles within the quad; alpha is
//                   exactly 1 while it stays
//   P               exp2(fma(S, c, -m c)); 0 where masked; l += P, unrounded, per thread: the four
//                   partial sums of the canonical order are those of the four threads of a quad
//   O = alpha O     rounded, then += bf16(P) V, keys in ascending steps of 16; with dropout, P is
//                   multiplied by 0 or 1 / (1 - p) before it is rounded
//
// Masked keys add exact zeros, so that steps of 16 keys that a warp's rows do not see can be left
// out: only the sign of a zero in O could tell, and adding +0 to the result makes it one sign.
// Rows of K and V that no row of the block sees are zeros in shared memory: what lies there in
// global memory may be anything, and 0 times NaN would show.
//
// At the end of a chunk its l and O are joined with those of the chunks before. These wait in
// memory until then, where each thread reads what it has written.
#pragma once

#include "kernels/attention/cuda/attention.cuh"

namespace cohort::kernels::cuda {

// kKeyStages: 2, so that one barrier per tile is enough, or 1, which leaves room for another block.
// kColumns: of a row in shared memory.
template <int kDim_, int kWarps_, int kKeyStages_>
struct AttendShape {
  static constexpr int kDim = kDim_, kColumns = kDim, kWarps = kWarps_, kKeyStages = kKeyStages_;
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kWarps;
  static constexpr int kKeys = kTileKeys<kDim>, kGroups = kKeys / 16;  // groups of 16 keys
  static constexpr int kTileBytes = 2 * kKeys * kDim, kQueryBytes = 2 * kRows * kDim;
  static constexpr size_t kSharedBytes = (kKeyStages + 2) * kTileBytes + kQueryBytes;
};

// Where the chunks of a block's rows are joined: for each row kColumns values of O, and m c and l.
struct JoinedChunks {
  float *o, *states;

  // Those of rows from `row` on.
  __device__ JoinedChunks from(int64_t row, int dim) const {
    return {o + row * dim, states + 2 * row};
  }
  __device__ ChunkState load_state(int64_t row) const {
    const auto pair = load_pack<2>(states + 2 * row);
    return {pair.v[0], pair.v[1]};
  }
  __device__ void store_state(int64_t row, const ChunkState& state) const {
    store_pack(states + 2 * row, Pack<float, 2>{state.row_max_log2, state.l});
  }
  // A thread's pair of columns 8 n + 2 quad. The packs of 8 columns are swapped around by the row's
  // number: the eight rows that a warp has at once lie in different banks of shared memory.
  template <int kColumns>
  __device__ float* pair(int64_t row, int n) const {
    const int quad = static_cast<int>(threadIdx.x % 4);
    return o + row * kColumns + 8 * (n ^ static_cast<int>(row & 7)) + 2 * quad;
  }
};
inline constexpr size_t joined_bytes(int rows, int dim) {
  return sizeof(float) * static_cast<size_t>(rows) * static_cast<size_t>(dim + 2);
}

// Whether the kernels of packed sequences, and all in f32, join chunks in shared memory, of which
// sm_90 has enough. Others have scratch for it, where a sequence may have several.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kJoinsInShared = false;
#else
inline constexpr bool kJoinsInShared = true;
#endif
// Points `joined` to scratch for so many rows of kernels compiled for `dim`.
inline Tensor joined_scratch(JoinedChunks& joined, int64_t rows, int dim, Device device) {
  Tensor scratch = Tensor::empty({rows * (dim + 2)}, DType::kF32, device);
  auto* const o = pointer<float>(scratch);
  joined = {.o = o, .states = o + rows * dim};
  return scratch;
}

// What the rows of a call share.
struct AttendParams {
  float c;     // exponents of 2 per unit of score
  int window;  // how many keys a row sees at most
  int head_dim;
  bool vectorized;  // rows may be read and written by 16-byte accesses
  ProbabilityDropout dropout;
};

// A thread's part of two rows: `group` and `group` + 8 of its warp's 16.
struct RowState {
  float row_max_log2[2] = {-INFINITY, -INFINITY};  // m c
  float l[2] = {0, 0};                             // the quad thread's partial sum
};

// s = Q K^T for 16 rows of `queries` from `row` on, and kGroups groups of 16 rows of `keys`. Groups
// from `groups` on may be left out, and are zero then.
template <int kDim, int kGroups, bool kMasked>
__device__ __forceinline__ void score_step(float (&s)[2 * kGroups][4], uint32_t queries, int row,
                                           uint32_t keys, int groups) {
  constexpr int kRun = kMasked && kGroups > 4 ? 4 : kGroups;  // groups that share loads of Q
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int q_row = row + lane % 16, k_row = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = 0;
#pragma unroll
  for (int run = 0; run < kGroups; run += kRun) {
    if (kMasked && run >= groups) break;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t a[4];
      load_matrices(a, queries + chunk_offset<kDim>(q_row, 2 * d + lane / 16));
#pragma unroll
      for (int g = run; g < run + kRun; ++g) {
        uint32_t b[4];
        load_matrices(b, keys + chunk_offset<kDim>(k_row + 16 * g, 2 * d + lane / 8 % 2));
        mma_bf16(s[2 * g], a, b[0], b[1]);
        mma_bf16(s[2 * g + 1], a, b[2], b[3]);
      }
    }
  }
}

// Hides scores of keys that a row does not see. seen[r]: the first key after those that row r sees,
// counted in the tile; groups from `groups` on are seen by none of the warp's rows. `hides`:
// whether the window hides keys of the tile from some of them.
template <int kGroups>
__device__ __forceinline__ void mask_scores(float (&s)[2 * kGroups][4], const int (&seen)[2],
                                            int window, int groups, bool hides) {
  const int column = static_cast<int>(threadIdx.x % 4) * 2;
  if (hides)
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * n + column + e % 2 < seen[e / 2] - window) s[n][e] = -INFINITY;
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n) {
    if (n >= 2 * groups) break;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (8 * n + column + e % 2 >= seen[e / 2]) s[n][e] = -INFINITY;
  }
}

// The largest of `least` and the thread's scores of row r. Four chains of maxima, so that one need
// not wait for the other.
template <int kGroups, bool kMasked>
__device__ __forceinline__ float largest_score(const float (&s)[2 * kGroups][4], int r, float least,
                                               int groups) {
  float largest[4] = {least, least, least, least};
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n) {
    if (kMasked && n >= 2 * groups) break;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& of_chain = largest[n % 2 * 2 + e];
      of_chain = fmaxf(of_chain, s[n][2 * r + e]);
    }
  }
  return fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
}

// Raises the maximum of row r to `largest` of all its threads, and scales l to it by alpha. Returns
// what exponents are relative to: with kMasked 0 for a row that sees nothing of this tile and of
// those before, and so has no maximum yet.
template <bool kMasked>
__device__ __forceinline__ float raise_maximum(float largest, int r, RowState& state, float& alpha,
                                               float c) {
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  const float row_max_log2 = fmaxf(state.row_max_log2[r], largest * c);
  const float origin = kMasked && row_max_log2 == -INFINITY ? 0.0f : row_max_log2;
  alpha = fast_exp2(state.row_max_log2[r] - origin);
  state.row_max_log2[r] = row_max_log2;
  state.l[r] *= alpha;
  return origin;
}

// Row r of S becomes P, and goes into l. Groups of 16 keys from `groups` on may be left out.
template <int kGroups, bool kMasked>
__device__ __forceinline__ void exponentiate(float (&s)[2 * kGroups][4], int r, RowState& state,
                                             float c, float origin, int groups) {
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n) {
    if (kMasked && n >= 2 * groups) break;
#pragma unroll
    for (int e = 2 * r; e < 2 * r + 2; ++e) {
      s[n][e] = fast_exp2(__fmaf_rn(s[n][e], c, -origin));
      state.l[r] += s[n][e];
    }
  }
}

// Drops elements of P and scales the others. key0: the tile's first key.
template <int kGroups>
__device__ __forceinline__ void dropout_step(float (&s)[2 * kGroups][4],
                                             const ProbabilityDropout& dropout,
                                             const uint64_t (&streams)[2], int head, int key0) {
  const int quad = static_cast<int>(threadIdx.x % 4);
  uint64_t keep = 0;  // four bits for each s[n]
#pragma unroll 1
  for (int n = 0; n < 2 * kGroups; ++n) {
    const int first = key0 + 8 * n + quad / 2 * 4, shift = quad % 2 * 2;
    const uint32_t low = dropout.keep_four(streams[0], head, first) >> shift & 3;
    const uint32_t high = dropout.keep_four(streams[1], head, first) >> shift & 3;
    keep |= static_cast<uint64_t>(high << 2 | low) << 4 * n;
  }
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s[n][e] = (keep >> (4 * n + e) & 1) != 0 ? s[n][e] * dropout.factor : 0.0f;
}

// o = alpha o + P V.
template <int kDim, int kGroups, bool kMasked>
__device__ __forceinline__ void value_step(float (&o)[kDim / 8][4],
                                           const float (&s)[2 * kGroups][4],
                                           const float (&alpha)[2], uint32_t values, int groups) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] *= alpha[e / 2];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (kMasked && g >= groups) break;
    const uint32_t a[4] = {pack_bf16(s[2 * g][0], s[2 * g][1]), pack_bf16(s[2 * g][2], s[2 * g][3]),
                           pack_bf16(s[2 * g + 1][0], s[2 * g + 1][1]),
                           pack_bf16(s[2 * g + 1][2], s[2 * g + 1][3])};
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b,
                               values + chunk_offset<kDim>(16 * g + lane % 16, 2 * n + lane / 16));
      mma_bf16(o[2 * n], a, b[0], b[1]);
      mma_bf16(o[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// Begins to load a tile's keys and values. Each lane finds the address of one row; the warp then
// copies row after row.
template <class Shape, class Rows>
__device__ __forceinline__ void load_tile(const Rows& rows, int tile, uint32_t keys,
                                          uint32_t values, const AttendParams& params) {
  constexpr int kChunks = Shape::kDim / 8, kOwnRows = Shape::kKeys / Shape::kWarps;
  static_assert(kChunks <= 32 && kOwnRows <= 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int first = static_cast<int>(threadIdx.x / 32) * kOwnRows;
  const int64_t mine =
      lane < kOwnRows ? rows.key_offset(tile * Shape::kKeys + first + lane) : int64_t{-1};
  const int chunk = lane % kChunks, column = 8 * chunk;
  const auto row_of = [&](int i) { return i + lane / kChunks; };
  if (params.vectorized) {  // decided once: this stands in the inner loop
#pragma unroll
    for (int i = 0; i < kOwnRows; i += 32 / kChunks) {
      const int64_t offset = __shfl_sync(0xffffffffu, mine, row_of(i));
      const uint32_t to = chunk_offset<Shape::kDim>(first + row_of(i), chunk);
      const bool live = offset >= 0 && column < params.head_dim;
      copy_async(keys + to, live ? rows.k + offset + column : nullptr, live ? 16 : 0);
      copy_async(values + to, live ? rows.v + offset + column : nullptr, live ? 16 : 0);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kOwnRows; i += 32 / kChunks) {
    const int64_t offset = __shfl_sync(0xffffffffu, mine, row_of(i));
    load_chunk<Shape::kDim>(keys, first + row_of(i), chunk, offset < 0 ? nullptr : rows.k + offset,
                            params.head_dim, false);
    load_chunk<Shape::kDim>(values, first + row_of(i), chunk,
                            offset < 0 ? nullptr : rows.v + offset, params.head_dim, false);
  }
}

template <class Shape, class Rows>
__device__ __forceinline__ void load_queries(const Rows& rows, uint32_t queries,
                                             const AttendParams& params) {
  constexpr int kChunks = Shape::kDim / 8;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kRows * kChunks; i += Shape::kThreads)
    load_chunk<Shape::kDim>(queries, i / kChunks, i % kChunks, rows.query(i / kChunks),
                            params.head_dim, params.vectorized);
}

// A chunk ends: l of a row is summed up.
__device__ __forceinline__ void sum_parts(RowState& state) {
#pragma unroll
  for (float& l : state.l) {
    l += __shfl_xor_sync(0xffffffffu, l, 1);
    l += __shfl_xor_sync(0xffffffffu, l, 2);
  }
}

// Joins a chunk, whose l are summed up, with those before it, if the row has seen keys of both.
template <class Shape, class Rows>
__device__ __forceinline__ void join_chunk(float (&o)[Shape::kDim / 8][4], RowState& state,
                                           const Rows& rows, const JoinedChunks& joined,
                                           int own_row) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (own_row + 8 * r >= rows.count) continue;
    const int64_t at = rows.joined_row(own_row + 8 * r);
    const ChunkState before = joined.load_state(at);
    if (before.row_max_log2 == -INFINITY) continue;
    // A chunk without a key, whose O is 0, leaves the others as they are.
    const bool seen = state.row_max_log2[r] != -INFINITY;
    const ChunkState chunk{state.row_max_log2[r], state.l[r]};
    const JoinFactors by = seen ? join_factors(before, chunk) : JoinFactors{1, 0};
    const ChunkState both = seen ? join(before, chunk, by) : before;
    state.row_max_log2[r] = both.row_max_log2;
    state.l[r] = both.l;
#pragma unroll
    for (int n = 0; n < Shape::kDim / 8; ++n) {
      const auto pair = load_pack<2>(joined.pair<Shape::kColumns>(at, n));
#pragma unroll
      for (int e = 0; e < 2; ++e) o[n][2 * r + e] = join(pair.v[e], o[n][2 * r + e], by);
    }
  }
}

// Keeps what has been joined and starts the next chunk.
template <class Shape, class Rows>
__device__ __forceinline__ void keep_chunk(float (&o)[Shape::kDim / 8][4], RowState& state,
                                           const Rows& rows, const JoinedChunks& joined,
                                           int own_row) {
  __syncwarp();  // what was joined before has been read
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t at = rows.joined_row(own_row + 8 * r);
    const bool live = own_row + 8 * r < rows.count;
    if (live) joined.store_state(at, {state.row_max_log2[r], state.l[r]});
#pragma unroll
    for (int n = 0; n < Shape::kDim / 8; ++n) {
      if (live)
        store_pack(joined.pair<Shape::kColumns>(at, n),
                   Pack<float, 2>{o[n][2 * r], o[n][2 * r + 1]});
      o[n][2 * r] = o[n][2 * r + 1] = 0;
    }
  }
  state = RowState();
}

// O (1 / l) and the log-sum-exp of a warp's rows, whose l are summed up. O goes through shared
// memory, in the place of the queries, so that rows are written by whole chunks of 16 bytes.
template <class Shape, class Rows>
__device__ __forceinline__ void store_rows(const Rows& rows, const AttendParams& params,
                                           const float (&o)[Shape::kDim / 8][4],
                                           const RowState& state, uint32_t queries, int row) {
  constexpr int kChunks = Shape::kDim / 8;
  const int lane = static_cast<int>(threadIdx.x % 32), group = lane / 4, quad = lane % 4;
  __syncwarp();  // the warp's reads of its queries are over
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float l = state.l[r], inverse = 1.0f / l;
    const int at = row + group + 8 * r;
    if (quad == 0 && at < rows.count)
      rows.store_lse(at, __fmaf_rn(state.row_max_log2[r], kLn2, logf(l)));
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      const uint32_t pair =
          pack_bf16(o[n][2 * r] * inverse + 0.0f, o[n][2 * r + 1] * inverse + 0.0f);
      asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(
                       queries + chunk_offset<Shape::kColumns>(at, n) + 4 * quad),
                   "r"(pair)
                   : "memory");
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int at = row + i / kChunks, chunk = i % kChunks;
    if (at >= rows.count) continue;
    Pack<uint32_t, 4> words;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(words.v[0]), "=r"(words.v[1]), "=r"(words.v[2]), "=r"(words.v[3])
                 : "r"(queries + chunk_offset<Shape::kColumns>(at, chunk))
                 : "memory");
    __nv_bfloat16* const to = rows.output(at) + 8 * chunk;
    const int live = params.head_dim - 8 * chunk;
    if (params.vectorized && live > 0) store_pack(reinterpret_cast<uint32_t*>(to), words);
    if (!params.vectorized)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (e < live)
          to[e] = __ushort_as_bfloat16(static_cast<uint16_t>(words.v[e / 2] >> 16 * (e % 2)));
  }
}

// What a warp works on in a block: 16 rows from `row` on, of which the thread has a part of
// `own_row` and `own_row` + 8.
struct WarpPart {
  int row, own_row;
  int visible[2];       // of the thread's rows; see Rows below
  int least, most;      // of the warp's
  uint64_t streams[2];  // of the thread's rows, for dropout
};

template <class Shape, bool kDropout, class Rows>
__device__ __forceinline__ WarpPart warp_part(const Rows& rows, const AttendParams& params) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  WarpPart part{};
  part.row = 16 * warp;
  part.own_row = part.row + lane / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = part.own_row + 8 * r;
    part.visible[r] = rows.visible(row);
    if (kDropout && row < rows.count) part.streams[r] = params.dropout.row(rows.token(row));
  }
  part.least = __reduce_min_sync(0xffffffffu, min(part.visible[0], part.visible[1]));
  part.most = __reduce_max_sync(0xffffffffu, max(part.visible[0], part.visible[1]));
  return part;
}

// A block's work. Rows says what it is:
//   int count, keys        query rows; they see keys 0 .. keys - 1, at least one, less the window
//   int first_key          none of them sees a key before this one
//   k, v, key_offset(j)    where key j's vectors start from k and v; negative beyond `keys`
//   query(r), output(r)    where row r starts; no query (null) from `count` on
//   visible(r)             row r sees the window's last of keys 0 .. visible - 1; 1 from `count` on
//   store_lse(r, value), head(), token(r)
//   joined_row(r)          where row r lies in `joined`
template <class Shape, bool kDropout, class Rows>
__device__ __forceinline__ void attend(const Rows& rows, const AttendParams& params, char* shared,
                                       const JoinedChunks& joined) {
  constexpr int kKeys = Shape::kKeys, kGroups = Shape::kGroups;
  constexpr int kChunkTiles = kAttentionChunk / kKeys;
  constexpr uint32_t kTileBytes = Shape::kTileBytes;
  const uint32_t keys = shared_address(shared), values = keys + Shape::kKeyStages * kTileBytes;
  const uint32_t queries = values + 2 * kTileBytes;

  const WarpPart part = warp_part<Shape, kDropout>(rows, params);
  RowState state;
  float o[Shape::kDim / 8][4] = {};
  const int tiles = (rows.keys + kKeys - 1) / kKeys;
  const auto load = [&](int tile) {
    if (tile < tiles)
      load_tile<Shape>(rows, tile, keys + tile % Shape::kKeyStages * kTileBytes,
                       values + tile % 2 * kTileBytes, params);
    copy_async_commit();
  };
  // Whether the window hides keys before this one from some of the warp's rows.
  const int hidden = part.most - params.window;
  const int first_tile = rows.first_key / kKeys;
  load_queries<Shape>(rows, queries, params);
  load(first_tile);
  const int first_end = (first_tile / kChunkTiles + 1) * kChunkTiles;
#pragma unroll 1
  for (int tile = first_tile, end = min(first_end, tiles);;) {  // chunks, [tile, end)
#pragma unroll 1
    for (; tile < end; ++tile) {
      copy_async_wait<0>();
      __syncthreads();
      if constexpr (Shape::kKeyStages == 2) load(tile + 1);
      const int key0 = tile * kKeys, groups = min(kGroups, max(0, (part.most - key0 + 15) / 16));
      const int seen[2] = {part.visible[0] - key0, part.visible[1] - key0};
      const uint32_t tile_keys = keys + tile % Shape::kKeyStages * kTileBytes;
      const uint32_t tile_values = values + tile % 2 * kTileBytes;
      float s[2 * kGroups][4], alpha[2];
      const auto softmax_and_values = [&]<bool kMasked>() {
        if (kMasked) mask_scores<kGroups>(s, seen, params.window, groups, hidden > key0);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float largest = largest_score<kGroups, kMasked>(s, r, -INFINITY, groups);
          const float origin = raise_maximum<kMasked>(largest, r, state, alpha[r], params.c);
          exponentiate<kGroups, kMasked>(s, r, state, params.c, origin, groups);
        }
        if constexpr (kDropout)
          dropout_step<kGroups>(s, params.dropout, part.streams, rows.head(), key0);
        value_step<Shape::kDim, kGroups, kMasked>(o, s, alpha, tile_values, groups);
      };
      if constexpr (Shape::kKeyStages == 1) {
        score_step<Shape::kDim, kGroups, true>(s, queries, part.row, tile_keys, groups);
        __syncthreads();
        load(tile + 1);
        if (groups > 0) softmax_and_values.template operator()<true>();
      } else if (!kDropout && part.least >= key0 + kKeys && hidden <= key0) {
        score_step<Shape::kDim, kGroups, false>(s, queries, part.row, tile_keys, groups);
        softmax_and_values.template operator()<false>();
      } else if (groups > 0) {
        score_step<Shape::kDim, kGroups, true>(s, queries, part.row, tile_keys, groups);
        softmax_and_values.template operator()<true>();
      }
    }
    sum_parts(state);
    if (end > first_end) join_chunk<Shape>(o, state, rows, joined, part.own_row);
    if (end == tiles) break;
    keep_chunk<Shape>(o, state, rows, joined, part.own_row);
    end = min(end + kChunkTiles, tiles);
  }
  store_rows<Shape>(rows, params, o, state, queries, part.row);
}

}  // namespace cohort::kernels::cuda
