// Flash attention in bf16 for one block: up to 16 query rows per warp against the keys they see, in
// the canonical order of attention.h. Used by training forward and prefill; decode.cu performs the
// same steps in the same order, so a row gets the same bits from each of them.
//
// Per tile of keys (K and V tiles are loaded into shared memory by cp.async while the previous tile
// is processed), a warp with 16 rows computes:
//
//   S = Q K^T       mma.m16n8k16, the head dim (zero-padded to 64, 128 or 256) in ascending
//                   steps of 16. A thread holds columns 2 quad, 2 quad + 1 of every 8 keys for
//                   two rows: keys with (key mod 8) / 2 = quad.
//   m c, alpha      largest visible score of the row by shuffles within the quad; alpha is
//                   exactly 1 while the maximum is unchanged
//   P               exp2(fma(S, c, -m c)); 0 where masked; l += P, unrounded, per thread: the
//                   four threads of a quad hold the four partial sums of the canonical order
//   O = alpha O     rounded, then += bf16(P) V, keys in ascending steps of 16; dropped P is
//                   multiplied by 0 or 1 / (1 - p) before it is rounded
//
// Masked keys add exact zeros, so steps of 16 keys that no row of the warp sees can be skipped:
// this could only change the sign of a zero in O, and adding +0 to the result normalizes that sign.
// Rows of K and V that no row of the block sees are zero in shared memory, since global memory may
// hold NaN there, and 0 times NaN is NaN.
//
// At the end of a chunk its l and O are combined with those of the previous chunks, which are kept
// in memory; each thread reads back only what it has written.
//
// In int8 attention S is computed by mma.m16n8k32, exactly, and then multiplied by the scale of the
// key. A row of queries or keys in i8 takes the first half of a row of bf16 in shared memory.
#pragma once

#include <array>

#include "kernels/attention/cuda/attention.cuh"

namespace cohort::kernels::cuda {

// kUnmasked: has code for tiles that all rows see. kColumns: row length in shared memory.
template <int kDim_, int kWarps_, int kKeyStages_, int kValueStages_, bool kUnmasked_>
struct Bf16Shape {
  static constexpr int kDim = kDim_, kColumns = kDim, kWarps = kWarps_;
  static constexpr int kKeyStages = kKeyStages_, kValueStages = kValueStages_;
  static constexpr bool kUnmasked = kUnmasked_;
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kWarps;
  static constexpr int kKeys = kTileKeys<kDim>, kGroups = kKeys / 16;  // groups of 16 keys
  static constexpr int kTileBytes = 2 * kKeys * kDim;
};

// Memory of the combined chunks of a block: per row, kColumns values of O, and m c and l.
struct CombinedChunks {
  float *o, *states;

  // View that starts at row `row`.
  __device__ CombinedChunks from(int64_t row, int dim) const {
    return {o + row * dim, states + 2 * row};
  }
  __device__ ChunkState load_state(int64_t row) const {
    const auto pair = load_pack<2>(states + 2 * row);
    return {pair.v[0], pair.v[1]};
  }
  __device__ void store_state(int64_t row, const ChunkState& state) const {
    store_pack(states + 2 * row, Pack<float, 2>{state.row_max_log2, state.l});
  }
  // A thread's pair of columns 8 n + 2 quad. The packs of 8 columns are swizzled by the row index,
  // so that the eight rows a warp accesses at once are in different banks of shared memory.
  template <int kColumns>
  __device__ float* pair(int64_t row, int n) const {
    const int quad = static_cast<int>(threadIdx.x % 4);
    return o + row * kColumns + 8 * (n ^ static_cast<int>(row & 7)) + 2 * quad;
  }
};
inline constexpr size_t combined_bytes(int rows, int dim) {
  return sizeof(float) * static_cast<size_t>(rows) * static_cast<size_t>(dim + 2);
}

// Allocates memory for `rows` rows of kernels compiled for `dim`, and points `combined` to it.
inline Tensor combined_memory(CombinedChunks& combined, int64_t rows, int dim, Device device) {
  Tensor memory = Tensor::empty({rows * (dim + 2)}, DType::kF32, device);
  auto* const o = pointer<float>(memory);
  combined = {.o = o, .states = o + rows * dim};
  return memory;
}

// The combined chunks of all blocks that run at a time, in global memory: a block with keys of
// several chunks holds a slot while it runs.
struct CombinedScratch : CombinedChunks {
  int32_t* held;  // [slots]: 1 if a block holds the slot
  int slots;      // 0: no block needs one

  // Returns a slot; there are as many as blocks that can run. All threads of the block call both
  // functions; `shared` is memory that they do not use yet.
  __device__ int acquire(int* shared) const {
    if (threadIdx.x == 0) {
      int slot = static_cast<int>(blockIdx.x * gridDim.y + blockIdx.y) % slots;
      for (SpinLimit limit; atomicCAS(held + slot, 0, 1) != 0; limit.check())
        slot = slot + 1 == slots ? 0 : slot + 1;
      __threadfence();
      *shared = slot;
    }
    __syncthreads();
    const int slot = *shared;
    __syncthreads();
    return slot;
  }
  __device__ void release(int slot) const {
    __syncthreads();
    if (threadIdx.x > 0) return;
    __threadfence();
    atomicExch(held + slot, 0);
  }
};

// Allocates slots of `rows` rows for a launch of a kernel that is compiled for `dim`, and points
// `combined` to them.
template <class Kernel>
std::array<Tensor, 2> combined_scratch(CombinedScratch& combined, Kernel kernel,
                                       const LaunchShape& shape, int rows, int dim, Device device) {
  const int64_t slots = std::min(
      int64_t{shape.grid.x} * shape.grid.y,
      ::cohort::cuda::resident_blocks(reinterpret_cast<const void*>(kernel),
                                      static_cast<int>(shape.block.x), shape.shared_bytes, device));
  Tensor held = Tensor::zeros({slots}, DType::kI32, device);
  combined.held = pointer<int32_t>(held);
  combined.slots = static_cast<int>(slots);
  return {held, combined_memory(combined, slots * rows, dim, device)};
}

// Rows of queries, keys, values and outputs in memory.
struct RowFormat {
  int head_dim;
  bool vectorized;  // rows support 16-byte accesses
};

// True if the queries and keys of Rows are i8; its query() then points to pairs of them.
template <class Rows>
inline constexpr bool kInt8Rows = std::is_same_v<decltype(Rows::k), const int8_t*>;

// 1.5 2^23, with which sums of i8 begin: its bits plus an integer are the bits of the float sum.
inline constexpr float kIntegers = 12582912.0f;

// A thread's part of rows `group` and `group` + 8 of its warp's 16.
struct RowState {
  float row_max_log2[2] = {-INFINITY, -INFINITY};  // m c
  float l[2] = {0, 0};                             // partial sum of this thread of the quad
};

// s = Q K^T for 16 rows of `queries` from `row` on, and kGroups groups of 16 rows of `keys`. Groups
// from `groups` on may be skipped and are then zero. In int8 attention s is scaled.
template <int kDim, int kGroups, bool kMasked, class Rows>
__device__ __forceinline__ void score_step(float (&s)[2 * kGroups][4], const Rows& rows,
                                           uint32_t queries, int row, uint32_t keys, int groups) {
  constexpr bool kInt8 = kInt8Rows<Rows>;
  constexpr int kRun = kMasked && kGroups > 4 ? 4 : kGroups;  // groups that share loads of Q
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int q_row = row + lane % 16, k_row = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = kInt8 ? kIntegers : 0;
#pragma unroll
  for (int run = 0; run < kGroups; run += kRun) {
    if (kMasked && run >= groups) break;
#pragma unroll
    for (int d = 0; d < kDim / (kInt8 ? 32 : 16); ++d) {
      uint32_t a[4];
      load_matrices(a, queries + chunk_offset<kDim>(q_row, 2 * d + lane / 16));
#pragma unroll
      for (int g = run; g < run + kRun; ++g) {
        uint32_t b[4];
        load_matrices(b, keys + chunk_offset<kDim>(k_row + 16 * g, 2 * d + lane / 8 % 2));
        constexpr auto* kMma = kInt8 ? mma_i8 : mma_bf16;
        kMma(s[2 * g], a, b[0], b[1]);
        kMma(s[2 * g + 1], a, b[2], b[3]);
      }
    }
  }
  if constexpr (kInt8) rows.template scale_scores<kDim>(s, keys);
}

// Masks the scores of row r of the thread's two that it does not see, of the tile from key0 on.
// `rule` is bound to the row, and `end` its end_key(); sees_tile: by the tile mask.
template <int kN, class Rule>
__device__ __forceinline__ void mask_row(float (&s)[kN][4], const Rule& rule, int r, int end,
                                         int key0, bool sees_tile = true) {
  const int column = key0 + static_cast<int>(threadIdx.x % 4) * 2;
  const int first = rule.first_key(end) - column;
  const uint32_t count = sees_tile ? max(0, rule.visible_end(end) - column - first) : 0;
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (static_cast<uint32_t>(8 * n + e - first) >= count) s[n][2 * r + e] = -INFINITY;
}

// Masks scores of keys that a row does not see. ends[r]: end of the keys that row r sees, relative
// to the tile; no row of the warp sees groups from `groups` on. `hides_first`: some rows of the
// warp do not see the first keys of the tile.
template <int kGroups, class Rule>
__device__ __forceinline__ void mask_scores(float (&s)[2 * kGroups][4], const int (&ends)[2],
                                            const Rule& rule, int groups, bool hides_first) {
  const int column = static_cast<int>(threadIdx.x % 4) * 2;
  if (hides_first)
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * n + column + e % 2 < rule.first_key(ends[e / 2])) s[n][e] = -INFINITY;
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n) {
    if (n >= 2 * groups) break;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (8 * n + column + e % 2 >= ends[e / 2]) s[n][e] = -INFINITY;
  }
}

// Maximum of `init` and the scores of row r in this thread. Four independent chains, for
// instruction-level parallelism.
template <int kGroups, bool kMasked>
__device__ __forceinline__ float row_max(const float (&s)[2 * kGroups][4], int r, float init,
                                         int groups) {
  float largest[4] = {init, init, init, init};
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n) {
    if (kMasked && n >= 2 * groups) break;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& chain = largest[n % 2 * 2 + e];
      chain = fmaxf(chain, s[n][2 * r + e]);
    }
  }
  return fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
}

// Updates the maximum of row r with `largest` across the quad, and rescales l by alpha. Returns the
// value to subtract from exponents: m c, or with kMasked 0 for a row that has seen no key yet. With
// kFp8, m c - 8 replaces m c.
template <bool kMasked, bool kFp8 = false>
__device__ __forceinline__ float update_row_max(float largest, int r, RowState& state, float& alpha,
                                                float c) {
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  const float row_max_log2 =
      fmaxf(state.row_max_log2[r], kFp8 ? __fmaf_rn(largest, c, -8.0f) : largest * c);
  const float safe_row_max = kMasked && row_max_log2 == -INFINITY ? 0.0f : row_max_log2;
  alpha = fast_exp2(state.row_max_log2[r] - safe_row_max);
  state.row_max_log2[r] = row_max_log2;
  state.l[r] *= alpha;
  return safe_row_max;
}

// Row r of S becomes P and is added to l. Groups of 16 keys from `groups` on may be skipped.
template <int kGroups, bool kMasked>
__device__ __forceinline__ void exponentiate(float (&s)[2 * kGroups][4], int r, RowState& state,
                                             float c, float safe_row_max, int groups) {
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n) {
    if (kMasked && n >= 2 * groups) break;
#pragma unroll
    for (int e = 2 * r; e < 2 * r + 2; ++e) {
      s[n][e] = fast_exp2(__fmaf_rn(s[n][e], c, -safe_row_max));
      state.l[r] += s[n][e];
    }
  }
}

// S becomes P, and is added to l. alpha: factors of the previous O.
template <int kGroups, bool kMasked>
__device__ __forceinline__ void softmax_step(float (&s)[2 * kGroups][4], RowState& state,
                                             float (&alpha)[2], float c, int groups) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float largest = row_max<kGroups, kMasked>(s, r, -INFINITY, groups);
    const float safe_row_max = update_row_max<kMasked>(largest, r, state, alpha[r], c);
    exponentiate<kGroups, kMasked>(s, r, state, c, safe_row_max, groups);
  }
}

// Overload for rows with a c of their own, as in int8 attention.
template <int kGroups, bool kMasked>
__device__ __forceinline__ void softmax_step(float (&s)[2 * kGroups][4], RowState& state,
                                             float (&alpha)[2], const float (&c)[2], int groups) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float m = row_max<kGroups, kMasked>(s, r, -INFINITY, groups);
    exponentiate<kGroups, kMasked>(s, r, state, c[r],
                                   update_row_max<kMasked>(m, r, state, alpha[r], c[r]), groups);
  }
}

// c of all rows, or those of the thread's two.
template <class Rule, class Rows>
__device__ __forceinline__ decltype(auto) exponents(const Rule& rule, const Rows& rows) {
  if constexpr (kInt8Rows<Rows>)
    return (rows.exponents);
  else
    return rule.exponent;
}

// Zeroes dropped elements of P and scales the others. key0: first key of the tile.
template <int kGroups>
__device__ __forceinline__ void drop_step(float (&s)[2 * kGroups][4],
                                          const DropoutMask<float>& drop,
                                          const uint64_t (&streams)[2], int head, int key0) {
  const int quad = static_cast<int>(threadIdx.x % 4);
  uint64_t keep = 0;  // four bits for each s[n]
#pragma unroll 1
  for (int n = 0; n < 2 * kGroups; ++n) {
    const int first = key0 + 8 * n + quad / 2 * 4, shift = quad % 2 * 2;
    const uint32_t low = drop.keep_four(streams[0], head, first) >> shift & 3;
    const uint32_t high = drop.keep_four(streams[1], head, first) >> shift & 3;
    keep |= static_cast<uint64_t>(high << 2 | low) << 4 * n;
  }
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s[n][e] = (keep >> (4 * n + e) & 1) != 0 ? s[n][e] * drop.factor : 0.0f;
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

// Keys or values to load: the first key of `rows`, and the tile in shared memory. C: their type.
template <class C>
struct TileLoad {
  const C* from;
  uint32_t to;
  bool is_values;
};

// Starts loading the rows of a tile, of keys, values or both. Each lane computes the offset of one
// row; the warp then copies row by row.
template <class Shape, class Rows, class... Loads>
__device__ __forceinline__ void load_tile(const Rows& rows, int tile, const RowFormat& format,
                                          const Loads&... loads) {
  constexpr int kChunks = Shape::kDim / 8, kRowsPerWarp = Shape::kKeys / Shape::kWarps;
  static_assert(kChunks <= 32 && kRowsPerWarp <= 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int first = static_cast<int>(threadIdx.x / 32) * kRowsPerWarp;
  const int64_t lane_offset =
      lane < kRowsPerWarp ? rows.key_offset(tile * Shape::kKeys + first + lane) : int64_t{-1};
  const int chunk = lane % kChunks, column = 8 * chunk;
  const auto row_of = [&](int i) { return i + lane / kChunks; };
  if (format.vectorized) {  // hoisted out of the inner loop
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; i += 32 / kChunks) {
      const int64_t offset = __shfl_sync(0xffffffffu, lane_offset, row_of(i));
      const uint32_t to = chunk_offset<Shape::kDim>(first + row_of(i), chunk);
      const bool live = offset >= 0 && column < format.head_dim;
      (copy_async(loads.to + to, live ? loads.from + offset + column : nullptr, live ? 16 : 0),
       ...);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kRowsPerWarp; i += 32 / kChunks) {
    const int64_t offset = __shfl_sync(0xffffffffu, lane_offset, row_of(i));
    (load_chunk<Shape::kDim>(loads.to, first + row_of(i), chunk,
                             offset < 0 ? nullptr : loads.from + offset, format.head_dim, false),
     ...);
  }
}

template <class Shape, class Rows>
__device__ __forceinline__ void load_queries(const Rows& rows, uint32_t queries,
                                             const RowFormat& format) {
  constexpr int kChunks = Shape::kDim / 8;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kRows * kChunks; i += Shape::kThreads)
    load_chunk<Shape::kDim>(queries, i / kChunks, i % kChunks, rows.query(i / kChunks),
                            format.head_dim, format.vectorized);
}

// Reduces l over the quad at the end of a chunk.
__device__ __forceinline__ void reduce_l(RowState& state) {
#pragma unroll
  for (float& l : state.l) {
    l += __shfl_xor_sync(0xffffffffu, l, 1);
    l += __shfl_xor_sync(0xffffffffu, l, 2);
  }
}

// Combines a chunk, whose l is reduced, with the previous ones, if the row has seen keys of both.
template <class Shape, class Rows>
__device__ __forceinline__ void combine_chunk(float (&o)[Shape::kDim / 8][4], RowState& state,
                                              const Rows& rows, const CombinedChunks& combined,
                                              int thread_row) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (thread_row + 8 * r >= rows.count) continue;
    const int64_t at = thread_row + 8 * r;
    const ChunkState before = combined.load_state(at);
    if (before.row_max_log2 == -INFINITY) continue;
    // A chunk without visible keys, whose O is 0, leaves the others unchanged.
    const bool any_key = state.row_max_log2[r] != -INFINITY;
    const ChunkState chunk{state.row_max_log2[r], state.l[r]};
    const CombineScales by = any_key ? combine_scales(before, chunk) : CombineScales{1, 0};
    const ChunkState both = any_key ? combine(before, chunk, by) : before;
    state.row_max_log2[r] = both.row_max_log2;
    state.l[r] = both.l;
#pragma unroll
    for (int n = 0; n < Shape::kDim / 8; ++n) {
      const auto pair = load_pack<2>(combined.pair<Shape::kColumns>(at, n));
#pragma unroll
      for (int e = 0; e < 2; ++e) o[n][2 * r + e] = combine(pair.v[e], o[n][2 * r + e], by);
    }
  }
}

// Stores the combined chunks and starts the next chunk.
template <class Shape, class Rows>
__device__ __forceinline__ void store_combined(float (&o)[Shape::kDim / 8][4], RowState& state,
                                               const Rows& rows, const CombinedChunks& combined,
                                               int thread_row) {
  __syncwarp();  // the previous combined state has been read
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t at = thread_row + 8 * r;
    const bool live = thread_row + 8 * r < rows.count;
    if (live) combined.store_state(at, {state.row_max_log2[r], state.l[r]});
#pragma unroll
    for (int n = 0; n < Shape::kDim / 8; ++n) {
      if (live)
        store_pack(combined.pair<Shape::kColumns>(at, n),
                   Pack<float, 2>{o[n][2 * r], o[n][2 * r + 1]});
      o[n][2 * r] = o[n][2 * r + 1] = 0;
    }
  }
  state = RowState();
}

// Stores O (1 / l) and the log-sum-exp of a warp's rows, whose l is reduced. O is staged in the
// shared memory of the queries, so that rows are written in 16-byte chunks.
struct StagedRows {
  uint32_t queries;  // shared address
  int row;           // first row of the warp
};
template <class Shape, class Rule, class Rows>
__device__ __forceinline__ void store_rows(const Rows& rows, const Rule& rule,
                                           const RowFormat& format,
                                           const float (&o)[Shape::kDim / 8][4],
                                           const RowState& state, const StagedRows& staged) {
  const uint32_t queries = staged.queries;
  const int row = staged.row;
  constexpr int kChunks = Shape::kDim / 8;
  const int lane = static_cast<int>(threadIdx.x % 32), group = lane / 4, quad = lane % 4;
  __syncwarp();  // the warp has finished reading its queries
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = row + group + 8 * r;
    const auto [factor, lse] = finish_row(rule, rows.head(at), state.row_max_log2[r], state.l[r]);
    if (quad == 0 && at < rows.count) rows.store_lse(at, lse);
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      const uint32_t pair = pack_bf16(o[n][2 * r] * factor + 0.0f, o[n][2 * r + 1] * factor + 0.0f);
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
    bf16* const to = rows.output(at) + 8 * chunk;
    const int live = format.head_dim - 8 * chunk;
    if (format.vectorized && live > 0) store_pack(reinterpret_cast<uint32_t*>(to), words);
    if (!format.vectorized)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (e < live)
          to[e] = __ushort_as_bfloat16(static_cast<uint16_t>(words.v[e / 2] >> 16 * (e % 2)));
  }
}

// Rows of a warp: 16 rows from `row` on; the thread holds parts of `thread_row` and `thread_row` +
// 8.
struct WarpRows {
  int row, thread_row;
  int ends[2];           // end_key() per row of the thread; see Rows below
  int min_end, max_end;  // visible_end() over the rows of the warp
  int first_common;      // keys before it are hidden from some of the rows
  uint64_t streams[2];   // Philox stream per row of the thread
};

template <class Shape, class Rule, class Rows>
__device__ __forceinline__ WarpRows make_warp_rows(const Rows& rows, const Rule& rule) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  WarpRows warp_rows{};
  warp_rows.row = 16 * warp;
  warp_rows.thread_row = warp_rows.row + lane / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_rows.thread_row + 8 * r;
    warp_rows.ends[r] = rows.end_key(rule, row);
    if constexpr (Rule::kDrops)
      if (rule.drops() && row < rows.count) warp_rows.streams[r] = rule.drop.row(rows.token(row));
  }
  const auto& bound = rows.bind(rule, 0);
  const int min_end = __reduce_min_sync(0xffffffffu, min(warp_rows.ends[0], warp_rows.ends[1]));
  const int max_end = __reduce_max_sync(0xffffffffu, max(warp_rows.ends[0], warp_rows.ends[1]));
  warp_rows.min_end = bound.visible_end(min_end);
  warp_rows.max_end = bound.visible_end(max_end);
  warp_rows.first_common = rule.first_key(max_end);
  return warp_rows;
}

// The stages of keys and values in shared memory, from address `keys` on, and the queries after
// them. The i-th tile of the block is in stage i modulo their number.
template <class Shape, class Rows>
struct BlockStages {
  const Rows& rows;
  const RowFormat& format;
  uint32_t keys;
  int end_tile;

  __device__ auto keys_of(int i) const {
    return TileLoad{rows.k, keys + i % Shape::kKeyStages * uint32_t{Shape::kTileBytes}, false};
  }
  __device__ auto values_of(int i) const {
    const int stage = Shape::kKeyStages + i % Shape::kValueStages;
    return TileLoad{rows.v, keys + stage * uint32_t{Shape::kTileBytes}, true};
  }
  __device__ uint32_t queries() const {
    return keys + (Shape::kKeyStages + Shape::kValueStages) * uint32_t{Shape::kTileBytes};
  }
  // Starts loading the keys of a tile, unless it is past the last one, and its values too unless
  // their single stage is still in use.
  __device__ __forceinline__ void load(int tile, int i) const {
    if (tile < end_tile) {
      if constexpr (Shape::kValueStages == 1)
        start_loads(tile, keys_of(i));
      else
        start_loads(tile, keys_of(i), values_of(i));
    }
    copy_async_commit();
  }
  __device__ __forceinline__ void load_values(int tile, int i) const {
    start_loads(tile, values_of(i));
    copy_async_commit();
  }

 private:
  template <class... Loads>
  __device__ __forceinline__ void start_loads(int tile, const Loads&... loads) const {
    if constexpr (sizeof(*rows.k) == 1)
      (rows.template load<Shape>(tile, loads), ...);
    else
      load_tile<Shape>(rows, tile, format, loads...);
  }
};

// A tile of keys, the next one, and the number of tiles before it, up to a constant.
struct TileStep {
  int tile, next, index;
};

// Adds a tile of keys and values to O and to the state of its chunk.
template <class Shape, class Rule, class Rows>
__device__ __forceinline__ void attention_step(float (&o)[Shape::kDim / 8][4], RowState& state,
                                               const BlockStages<Shape, Rows>& stages,
                                               const WarpRows& warp_rows, const Rule& rule,
                                               const TileStep& step) {
  const int tile = step.tile, next = step.next, i = step.index;
  constexpr int kKeys = Shape::kKeys, kGroups = Shape::kGroups;
  constexpr int kKeyStages = Shape::kKeyStages, kValueStages = Shape::kValueStages;
  copy_async_wait<0>();
  __syncthreads();
  if constexpr (kKeyStages == 2) stages.load(next, i + 1);
  if constexpr (kValueStages == 1) stages.load_values(tile, i);
  const int key0 = tile * kKeys,
            groups = min(kGroups, max(0, (warp_rows.max_end - key0 + 15) / 16));
  const int ends[2] = {warp_rows.ends[0] - key0, warp_rows.ends[1] - key0};
  const bool hides_first = warp_rows.first_common > key0;
  float s[2 * kGroups][4], alpha[2];
  const auto scores = [&]<bool kMasked>() {
    score_step<Shape::kDim, kGroups, kMasked>(s, stages.rows, stages.queries(), warp_rows.row,
                                              stages.keys_of(i).to, groups);
  };
  const auto softmax_and_values = [&]<bool kMasked>() {
    if constexpr (Rule::kMasks) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp_rows.thread_row + 8 * r, position = stages.rows.position(row);
        const auto& bound = stages.rows.bind(rule, row);
        modify_scores(s, bound, r, key0 + static_cast<int>(threadIdx.x % 4) * 2 - position);
        if (kMasked)
          mask_row(s, bound, r, warp_rows.ends[r], key0, bound.sees_tile(position, key0));
      }
    } else {
      if (kMasked) mask_scores<kGroups>(s, ends, rule, groups, hides_first);
    }
    softmax_step<kGroups, kMasked>(s, state, alpha, exponents(rule, stages.rows), groups);
    if constexpr (Rule::kDrops)
      if (rule.drops())
        drop_step<kGroups>(s, rule.drop, warp_rows.streams, stages.rows.head(0), key0);
    value_step<Shape::kDim, kGroups, kMasked>(o, s, alpha, stages.values_of(i).to, groups);
  };
  const bool unmasked =
      Shape::kUnmasked && !Rule::kMasks && warp_rows.min_end >= key0 + kKeys && !hides_first;
  if constexpr (kKeyStages == 1) {
    unmasked ? scores.template operator()<false>() : scores.template operator()<true>();
    if constexpr (kValueStages == 1) copy_async_wait<0>();
    __syncthreads();
    stages.load(next, i + 1);
    if (unmasked)
      softmax_and_values.template operator()<false>();
    else if (groups > 0)
      softmax_and_values.template operator()<true>();
  } else if (unmasked) {
    scores.template operator()<false>();
    softmax_and_values.template operator()<false>();
  } else if (groups > 0) {
    scores.template operator()<true>();
    softmax_and_values.template operator()<true>();
  }
}

// Computes the rows of a block, given by Rows:
//   int count              query rows
//   IndexRange<int> keys   every row sees some of these keys, and no other
//   k, v, key_offset(j)    offset of key j from k and v; negative from keys.end on
//   query(r), output(r)    start of row r; the query is null from `count` on
//   end_key(rule, r)       end of the keys that row r sees; 1 from `count` on
//   bind(rule, r)          the rule of row r
//   positions_range()      that of the rows
//   store_lse(r, value), head(r), position(r), token(r)
// For keys in bytes load<Shape>(tile, load), and for i8 `exponents`, c of the thread's rows, and
// scale_scores<kDim>(s, keys): sums that began with kIntegers become z.
template <class Shape, class Rule, class Rows>
__device__ __forceinline__ void attention_bf16(const Rows& rows, const Rule& rule,
                                               const RowFormat& format, char* shared,
                                               const CombinedChunks& combined) {
  constexpr int kChunkTiles = kAttentionChunk / Shape::kKeys;
  const IndexRange<int> tiles = rows.keys.tiles(Shape::kKeys);
  const BlockStages<Shape, Rows> stages{rows, format, shared_address(shared), tiles.end};
  const WarpRows warp_rows = make_warp_rows<Shape>(rows, rule);
  RowState state;
  float o[Shape::kDim / 8][4] = {};
  if constexpr (kInt8Rows<Rows>)
    load_queries<Shape>(rows, stages.queries(), {Shape::kDim / 2, true});
  else
    load_queries<Shape>(rows, stages.queries(), format);
  int tile = next_tile<Shape::kKeys>(rule, rows, tiles.first, tiles.end), i = tile;
  stages.load(tile, i);
  const int first_end = (tile / kChunkTiles + 1) * kChunkTiles;
#pragma unroll 1
  for (int end = min(first_end, tiles.end);;) {  // chunks, [tile, end)
#pragma unroll 1
    for (int next; tile < end; tile = next, ++i) {
      next = next_tile<Shape::kKeys>(rule, rows, tile + 1, tiles.end);
      attention_step(o, state, stages, warp_rows, rule, {tile, next, i});
    }
    reduce_l(state);
#pragma unroll
    for (int r = 0; r < 2 && kInt8Rows<Rows>; ++r)  // a row has seen keys whose scores are all NaN
      if (state.l[r] != state.l[r]) state.row_max_log2[r] = state.l[r];
    if (end > first_end) combine_chunk<Shape>(o, state, rows, combined, warp_rows.thread_row);
    if (end == tiles.end) break;
    store_combined<Shape>(o, state, rows, combined, warp_rows.thread_row);
    end = min(end + kChunkTiles, tiles.end);
  }
  if constexpr (Rule::kMasks) {  // the queries are loaded, even if their rows see no key
    copy_async_wait<0>();
    __syncthreads();
  }
  store_rows<Shape>(rows, rule, format, o, state, {stages.queries(), warp_rows.row});
}

}  // namespace cohort::kernels::cuda
