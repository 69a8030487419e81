// What the attention kernels share: which block works on which rows, tiles of bf16 rows in shared
// memory, dropout of the probabilities, and the choice of an instantiation.
#pragma once

#include <mutex>
#include <set>
#include <string>

#include "core/log.h"
#include "kernels/attention/attention.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"

namespace cohort::kernels::cuda {

inline constexpr float kLn2 = 0.69314718055994530942f;

// c of the canonical order: exponents of 2 are c times scores.
inline float exponent_scale(const AttentionDesc& desc, int64_t head_dim) {
  return static_cast<float>(softmax_scale(desc, head_dim) * 1.4426950408889634074);
}

// How many keys a causal query sees at most; without a window more than a sequence has.
inline int key_window(const AttentionDesc& desc) {
  constexpr int64_t kAll = 1 << 30;
  return static_cast<int>(desc.window > 0 ? std::min(desc.window, kAll) : kAll);
}

// Calls fn.operator()<kDim>() with the head dim padded to what kernels are compiled for.
template <class F>
void dispatch_head_dim(int64_t head_dim, F&& fn) {
  if (head_dim <= 64)
    fn.template operator()<64>();
  else if (head_dim <= 128)
    fn.template operator()<128>();
  else
    fn.template operator()<256>();
}

// The same with what the kernels for sm_90 are compiled for.
template <class F>
void dispatch_hopper_dim(int64_t head_dim, F&& fn) {
  if (head_dim > 64 && head_dim <= 96)
    fn.template operator()<96>();
  else if (head_dim > 128 && head_dim <= 192)
    fn.template operator()<192>();
  else
    dispatch_head_dim(head_dim, fn);
}

// Whether the kernels for sm_90 take a bf16 call; if not, on a GPU that has them, the log says once
// for each head dim why the portable ones are used.
inline bool takes_hopper(const char* name, int64_t head_dim, bool vectorized, bool drops,
                         Device device) {
  if (!::cohort::cuda::is_hopper(device)) return false;
  const char* const reason = drops         ? "probabilities are dropped"
                             : !vectorized ? "rows are not aligned to 16 bytes"
                                           : nullptr;
  if (reason == nullptr) return true;
  count_portable_attention();
  static std::mutex mutex;
  static std::set<std::pair<std::string, int64_t>> said;
  const std::lock_guard lock(mutex);
  if (said.emplace(name, head_dim).second)
    logging::info("[", name, "] heads of ", head_dim, ": the portable kernel, since ", reason);
  return false;
}

// Keys per tile in the canonical order, for a padded head dim.
template <int kDim>
inline constexpr int kTileKeys = kDim > 128 ? 64 : 128;

// Packed sequences in tiles of `per_tile` tokens. The host does not know where sequences begin, so
// sequence s owns the slots cu[s] / per_tile + s up to, not including, cu[s + 1] / per_tile + s +
// 1: enough for its tiles, some left empty.
inline int64_t tile_slots(int64_t tokens, int64_t sequences, int64_t per_tile) {
  return sequences == 0 ? 0 : tokens / per_tile + sequences;
}
struct SequenceTile {
  int begin, length;  // the sequence's tokens [begin, begin + length)
  int tile;           // its tokens [tile * per_tile, ...); beyond `length` in an empty slot
  int sequence;
};
// The slot's tile; called by whole warps, each of which finds it for itself, 32 sequences at a
// time.
__device__ __forceinline__ SequenceTile find_tile(const int32_t* cu, int sequences, int slot,
                                                  int per_tile) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int first = 0, count = sequences;  // the sequence is one of [first, first + count)
  while (count > 1) {
    const int step = (count + 31) / 32, offset = lane * step;
    const bool begun = offset < count && cu[first + offset] / per_tile + first + offset <= slot;
    // Lane 0 has always begun.
    const int skip = (__popc(__ballot_sync(0xffffffffu, begun)) - 1) * step;
    first += skip;
    count = min(step, count - skip);
  }
  const int begin = cu[first];
  return {begin, cu[first + 1] - begin, slot - begin / per_tile - first, first};
}

// A row's m c and l over a chunk, or over chunks that are joined; no key seen: m c is -infinity.
struct ChunkState {
  float row_max_log2, l;
};
// What both sides of a join are multiplied by: a and b of the canonical order.
struct JoinFactors {
  float before, chunk;
};
__device__ __forceinline__ JoinFactors join_factors(const ChunkState& before,
                                                    const ChunkState& chunk) {
  const float row_max_log2 = fmaxf(before.row_max_log2, chunk.row_max_log2);
  return {fast_exp2(before.row_max_log2 - row_max_log2),
          fast_exp2(chunk.row_max_log2 - row_max_log2)};
}
// l, or an element of O.
__device__ __forceinline__ float join(float before, float chunk, const JoinFactors& by) {
  return __fmaf_rn(chunk, by.chunk, __fmul_rn(before, by.before));
}
__device__ __forceinline__ ChunkState join(const ChunkState& before, const ChunkState& chunk,
                                           const JoinFactors& by) {
  return {fmaxf(before.row_max_log2, chunk.row_max_log2), join(before.l, chunk.l, by)};
}

// A tile of rows of kDim bf16 values in shared memory, in chunks of 16 bytes. A row's chunks are
// swapped around by the row's number, so that the eight rows of a matrix that ldmatrix reads lie in
// different banks. The byte offset of a chunk:
template <int kDim>
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  static_assert(kDim % 64 == 0);
  return static_cast<uint32_t>(row * (2 * kDim) + ((chunk ^ (row & 7)) << 4));
}

// Begins to copy one chunk of a row of `head_dim` elements to its place in `tile` (a shared
// address); columns beyond the head dim, and all of them if `row_data` is null, become zero. With
// `vectorized`, rows are 16-byte aligned and head_dim is a multiple of 8. Ends with the thread's
// next copy_async_wait() and a barrier.
template <int kDim>
__device__ __forceinline__ void load_chunk(uint32_t tile, int row, int chunk,
                                           const __nv_bfloat16* row_data, int head_dim,
                                           bool vectorized) {
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

// True if every head of these tensors [T, heads, head_dim] can be moved by 16-byte accesses.
template <class T, class... Tensors>
bool vectorized_heads(const Tensors&... heads) {
  return ((heads.dim(-1) % kPackSize<T> == 0 && heads.strides()[0] % kPackSize<T> == 0 &&
           aligned(pointer<T>(heads))) &&
          ...);
}

// Begins to copy 4 elements of a row of `head_dim` (null: zeros) to their place in a row of shared
// memory, with zeros beyond the head dim; as load_chunk().
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

// Dropout of the probabilities of one call; off while `first_kept` is 0. The bits are those of
// dropout_keep() with element = head * 2^32 + key.
struct ProbabilityDropout {
  const int64_t* sequences = nullptr;
  const int32_t* positions = nullptr;
  uint64_t seed = 0, stream = 0;
  uint32_t first_kept = 0;  // the smallest word that keeps its probability
  float factor = 1;         // a kept probability times this

  ProbabilityDropout() = default;
  explicit ProbabilityDropout(const DropoutSpec& spec) {
    if (spec.p == 0) return;
    sequences = pointer<int64_t>(spec.sequences);
    positions = pointer<int32_t>(spec.positions);
    seed = spec.seed;
    stream = spec.stream;
    first_kept = dropout_first_kept(static_cast<float>(spec.p));
    factor = static_cast<float>(1 / (1 - spec.p));
  }

  // The Philox stream of a query's row.
  __device__ uint64_t row(int64_t token) const {
    return dropout_row(stream, sequences[token], positions[token]);
  }
  // Bit i: whether key `first` + i is kept, for i < 4; `first` is a multiple of 4.
  __device__ uint32_t keep_four(uint64_t row_stream, int head, int first) const {
    const uint64_t element = static_cast<uint64_t>(head) << 32 | static_cast<uint64_t>(first);
    const auto words = philox(seed, row_stream, element >> 2);
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) bits |= words[i] >= first_kept ? 1u << i : 0u;
    return bits;
  }
};

}  // namespace cohort::kernels::cuda
