// Shared by the attention kernels: mapping of blocks to rows, tiles of bf16 rows in shared memory,
// and dispatch over head dims.
#pragma once

#include <mutex>
#include <set>
#include <string>

#include "core/log.h"
#include "kernels/attention/score_rule.h"
#include "kernels/attention/tile_config.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"

namespace cohort::kernels::cuda {

inline constexpr float kLn2 = 0.69314718055994530942f;

// Number of heads, at most `heads`, whose `head_bytes` fit in the L2 cache together.
inline int heads_in_l2(int64_t head_bytes, int64_t heads) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int64_t fit = kCacheBytes / std::max<int64_t>(head_bytes, 1);
  return static_cast<int>(std::clamp<int64_t>(fit, 1, heads));
}

// Calls fn.operator()<kDim>() with the head dim padded to one the generic kernels are compiled for.
template <class F>
void dispatch_head_dim(int64_t head_dim, F&& fn) {
  if (head_dim <= 64)
    fn.template operator()<64>();
  else if (head_dim <= 128)
    fn.template operator()<128>();
  else
    fn.template operator()<256>();
}

// Overload for the head dims of the kernels for sm_90.
template <class F>
void dispatch_sm90_dim(int64_t head_dim, F&& fn) {
  if (head_dim > 64 && head_dim <= 96)
    fn.template operator()<96>();
  else if (head_dim > 128 && head_dim <= 192)
    fn.template operator()<192>();
  else
    dispatch_head_dim(head_dim, fn);
}

// True if the kernels for sm_90 support a bf16 call. Otherwise, on a GPU that has them, logs once
// per op and head dim why the generic kernels are used.
inline bool supports_sm90(const char* name, const AttentionDesc& desc, int64_t head_dim,
                          bool vectorized, Device device) {
  if (!fits(kSm90a, ::cohort::cuda::gpu_properties(device))) return false;
  const char* const reason = desc.dropout.p > 0 ? "it has dropout"
                             : !vectorized      ? "rows are not aligned to 16 bytes"
                                                : nullptr;
  if (reason == nullptr) return true;
  static std::mutex mutex;
  static std::set<std::pair<std::string, int64_t>> logged;
  const std::lock_guard lock(mutex);
  if (logged.emplace(name, head_dim).second)
    logging::info("[", name, "] heads of ", head_dim, ": using the generic kernel because ",
                  reason);
  return false;
}

// Calls fn.operator()<kTiles>() with the large tiles of a kernel if they fit the device, else with
// the small ones. kSharedBytes(tiles): shared memory of a block.
template <auto kSharedBytes, class F>
void dispatch_tiles(Device device, F&& fn) {
  constexpr auto kLarge = static_cast<int64_t>(kSharedBytes(Tiles::kLarge));
  if constexpr (kLarge > static_cast<int64_t>(kSharedBytes(Tiles::kSmall)))
    if (!fits({.shared_memory = kLarge}, ::cohort::cuda::gpu_properties(device)))
      return fn.template operator()<Tiles::kSmall>();
  fn.template operator()<Tiles::kLarge>();
}

// Packed sequences in tiles of `per_tile` tokens. The host does not know the sequence boundaries,
// so sequence s owns the slots from cu[s] / per_tile + s to cu[s + 1] / per_tile + s + 1
// (exclusive): enough for its tiles, some of them empty.
inline int64_t tile_slots(int64_t tokens, int64_t sequences, int64_t per_tile) {
  return sequences == 0 ? 0 : tokens / per_tile + sequences;
}
struct SequenceTile {
  PackedSequence sequence;
  int index;  // the number of the sequence
  int tile;   // its rows [tile * per_tile, ...); beyond its length in an empty slot
};
// Finds the tile of a slot, where sequence s owns the slots from cu[s] / per_tile + own * s on; all
// lanes of a warp must call it, which searches 32 sequences at a time.
__device__ __forceinline__ SequenceTile find_tile(const PackedSequences& sequences, int slot,
                                                  int per_tile, int own = 1) {
  const int32_t* const cu = sequences.cu;
  const int lane = static_cast<int>(threadIdx.x % 32);
  int first = 0, count = sequences.count;  // the sequence is one of [first, first + count)
  while (count > 1) {
    const int step = (count + 31) / 32, offset = lane * step;
    const bool begun =
        offset < count && cu[first + offset] / per_tile + own * (first + offset) <= slot;
    // Lane 0 always has begun == true.
    const int skip = (__popc(__ballot_sync(0xffffffffu, begun)) - 1) * step;
    first += skip;
    count = min(step, count - skip);
  }
  const PackedSequence sequence = sequences[first];
  return {sequence, first, slot - sequence.begin / per_tile - own * first};
}

// The scores of row r of the thread's two become those that the softmax sees. `rule` is bound to
// the row; distance: from its query to the key of s[0][2 r].
template <class Rule, int kN>
__device__ __forceinline__ void modify_scores(float (&s)[kN][4], const Rule& rule, int r,
                                              int distance) {
  if constexpr (Rule::kModifies)
    rule.modify([&, first = KeyDistance<float>(distance)](auto&& stage) {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) s[n][2 * r + e] = stage(s[n][2 * r + e], first + (8 * n + e));
    });
}

// The first tile of keys from `tile` on that some of the block's rows see by the tile mask.
template <int kKeys, class Rule, class Rows>
__device__ __forceinline__ int next_tile(const Rule& rule, const Rows& rows, int tile, int end) {
  if constexpr (Rule::kMasks)
    return min(end, rule.next_key(rows.positions_range(), tile * kKeys, end * kKeys) / kKeys);
  else
    return tile;
}

// The end of a row: the factor of its O, and its log-sum-exp.
struct RowEnd {
  float factor, lse;
};
template <class Rule>
__device__ __forceinline__ RowEnd finish_row(const Rule& rule, int head, float row_max_log2,
                                             float l) {
  if constexpr (!Rule::kMasks) {
    return {1.0f / l, __fmaf_rn(row_max_log2, kLn2, logf(l))};
  } else {
    float factor = l == 0 ? 0.0f : 1.0f / l;
    if (const float sink = rule.sink_log2(head); sink > -INFINITY) {
      const float both = fmaxf(row_max_log2, sink), a = fast_exp2(row_max_log2 - both);
      l = __fmaf_rn(l, a, fast_exp2(sink - both));
      row_max_log2 = both;
      factor = a * (1.0f / l);
    }
    return {factor, __fmaf_rn(row_max_log2, kLn2, logf(l))};
  }
}

// m c and l of a row over a chunk or over combined chunks; m c is -infinity if it saw no key.
struct ChunkState {
  float row_max_log2, l;
};
// Scales a and b of the canonical order, of the previous chunks and of the next one.
struct CombineScales {
  float before, chunk;
};
__device__ __forceinline__ CombineScales combine_scales(const ChunkState& before,
                                                        const ChunkState& chunk) {
  const float row_max_log2 = fmaxf(before.row_max_log2, chunk.row_max_log2);
  return {fast_exp2(before.row_max_log2 - row_max_log2),
          fast_exp2(chunk.row_max_log2 - row_max_log2)};
}
// Combines l or an element of O.
__device__ __forceinline__ float combine(float before, float chunk, const CombineScales& by) {
  return __fmaf_rn(chunk, by.chunk, __fmul_rn(before, by.before));
}
__device__ __forceinline__ ChunkState combine(const ChunkState& before, const ChunkState& chunk,
                                              const CombineScales& by) {
  return {fmaxf(before.row_max_log2, chunk.row_max_log2), combine(before.l, chunk.l, by)};
}

// Byte offset of a 16-byte chunk in a tile of rows of kDim bf16 values in shared memory. The chunks
// of a row are swizzled by the row index, so that the eight rows of a matrix read by ldmatrix are
// in different banks.
template <int kDim>
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  static_assert(kDim % 64 == 0);
  return static_cast<uint32_t>(row * (2 * kDim) + ((chunk ^ (row & 7)) << 4));
}

// Starts the copy of one 16-byte chunk of a row of `head_dim` elements into `tile` (a shared
// address); columns beyond the head dim, or all of them if `row_data` is null, become zero. With
// `vectorized`, rows are 16-byte aligned and head_dim is a multiple of 8. Complete after the next
// copy_async_wait() of the thread and a barrier.
template <int kDim>
__device__ __forceinline__ void load_chunk(uint32_t tile, int row, int chunk, const bf16* row_data,
                                           int head_dim, bool vectorized) {
  const uint32_t to = tile + chunk_offset<kDim>(row, chunk);
  const int column = 8 * chunk;
  const bool live = row_data != nullptr && column < head_dim;
  if (vectorized) {
    copy_async(to, live ? row_data + column : nullptr, live ? 16 : 0);
    return;
  }
  for (int pair = 0; pair < 4; ++pair) {
    const int at = column + 2 * pair;
    const bool low = live && at < head_dim, high = live && at + 1 < head_dim;
    const uint32_t bits = (low ? uint32_t{__bfloat16_as_ushort(row_data[at])} : 0u) |
                          (high ? uint32_t{__bfloat16_as_ushort(row_data[at + 1])} << 16 : 0u);
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(to + 4 * pair), "r"(bits) : "memory");
  }
}

// True if every head of these tensors [T, heads, head_dim] supports 16-byte accesses.
template <class T, class... Tensors>
bool vectorized_heads(const Tensors&... heads) {
  return ((heads.dim(-1) % kPackSize<T> == 0 && heads.strides()[0] % kPackSize<T> == 0 &&
           heads.strides()[1] % kPackSize<T> == 0 && aligned(pointer<T>(heads))) &&
          ...);
}

// Starts the copy of 4 elements of a row of `head_dim` (null: zeros) into a row of shared memory,
// with zeros beyond the head dim; as load_chunk().
__device__ __forceinline__ void load_float_chunk(float* to, int chunk, const float* row,
                                                 int head_dim, bool vectorized) {
  const int column = 4 * chunk;
  const bool live = row != nullptr && column < head_dim;
  if (vectorized) {
    copy_async(shared_address(to + column), live ? row + column : nullptr, live ? 16 : 0);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e)
    to[column + e] = live && column + e < head_dim ? row[column + e] : 0.0f;
}

}  // namespace cohort::kernels::cuda
