// Device view of the paged key/value cache, and the rows of a block of attention over it.
//
// In attention a block takes adjacent tokens of one sequence in the batch, with up to 64 of the
// query heads that share a key head: up to 64 rows. Only the device knows these tokens: a token
// leads a block if its index is a multiple of the tokens per block, or its sequence differs from
// that of the previous token; the blocks of all other tokens exit at once. The host reads no value,
// so a call can be captured in a graph. Decode steps have their own kernel (decode.cu) where it
// supports them.
#pragma once

#include <limits>

#include "kernels/attention/cuda/attention_bf16.cuh"
#include "kernels/cuda/e4m3.cuh"

namespace cohort::kernels::cuda {

// Maps tokens to cache slots.
struct PageTable {
  const int32_t* table;
  int sequences, max_blocks, block_tokens, blocks;

  // Slot of token `position` of the sequence whose block table row is `row`; negative if the table
  // has no block for it.
  __device__ __forceinline__ int64_t slot(const int32_t* row, int position) const {
    if (position < 0) return -1;
    const int index = position / block_tokens;
    if (index >= max_blocks) return -1;
    const int block = __ldcg(row + index);  // decode.cu reads it ahead, when L1 may be outdated
    if (block < 0 || block >= blocks) return -1;
    return static_cast<int64_t>(block) * block_tokens + (position - index * block_tokens);
  }
  __device__ bool has(int sequence) const { return sequence >= 0 && sequence < sequences; }
  __device__ const int32_t* row(int sequence) const {
    return table + static_cast<int64_t>(sequence) * max_blocks;
  }
  // Maximum number of tokens of a sequence.
  __host__ __device__ int64_t capacity() const {
    return static_cast<int64_t>(max_blocks) * block_tokens;
  }
  // Number of keys visible to a token at `position`; positions beyond the table count as its last
  // one.
  __device__ int keys_of(int position) const {
    return static_cast<int>(max(int64_t{1}, min(static_cast<int64_t>(position) + 1, capacity())));
  }
};

inline PageTable page_table(const PagedKV& cache) {
  return {.table = pointer<int32_t>(cache.block_table),
          .sequences = static_cast<int>(cache.block_table.dim(0)),
          .max_blocks = static_cast<int>(cache.block_table.dim(1)),
          .block_tokens = static_cast<int>(cache.k.dim(1)),
          .blocks = static_cast<int>(cache.k.dim(0))};
}

// Scales from those of keys on; null: none.
inline const float* key_scales(const PagedKV& cache) {
  const Tensor& scales = cache.scales;
  return scales.defined() ? pointer<float>(scales) + scales.numel() - 2 * cache.k.dim(2) : nullptr;
}

// Loads of pages in e4m3 into a tile of bf16 rows in shared memory, by all threads of a block, each
// of 16 or 32 bytes. Keys from `live` of the page on, and all if `from` is null, become zeros.
struct E4m3Tiles {
  int64_t stride;  // from a page of a key head to its next one
  uint32_t k_factor, v_factor;

  // A thread has 16 dims of a key: the first pairs of its words are 8 of them.
  template <class Shape>
  __device__ __forceinline__ void load_keys(uint32_t to, int page, const uint8_t* from,
                                            int live) const {
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kDim; i += Shape::kThreads) {
      const int t = i % 8 + i / (Shape::kDim / 2) * 8, cell = i / 8 % (Shape::kDim / 16);
      uint32_t words[2][4] = {};
      if (from != nullptr && t < live) {
        const auto raw = load_raw<16>(from + Pages::key_cell(t, cell, Shape::kDim));
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const uint2 pairs = dequantize(raw.word[q], k_factor);
          words[0][q] = pairs.x;
          words[1][q] = pairs.y;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store(to + chunk_offset<Shape::kDim>(page * kPageTokens + t, 2 * cell + half), words[half]);
    }
  }
  // A thread has word q of 8 dims: the values of keys 2 q, 2 q + 1, 2 q + 8 and 2 q + 9.
  template <class Shape>
  __device__ __forceinline__ void load_values(uint32_t to, int page, const uint8_t* from,
                                              int live) const {
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kDim / 2; i += Shape::kThreads) {
      const int q = i % 4, chunk = i / 4;
      uint2 pairs[8] = {};
      if (from != nullptr)
#pragma unroll
        for (int d = 0; d < 8; ++d)
          pairs[d] = dequantize(load_raw<4>(from + chunk * 128 + d * 16 + 4 * q).word[0], v_factor);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int t = 2 * q + k / 2 * 8 + k % 2;
        uint32_t words[4] = {};
        if (t < live)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            words[j] = __byte_perm(k < 2 ? pairs[2 * j].x : pairs[2 * j].y,
                                   k < 2 ? pairs[2 * j + 1].x : pairs[2 * j + 1].y,
                                   k % 2 == 0 ? 0x5410 : 0x7632);
        store(to + chunk_offset<Shape::kDim>(page * kPageTokens + t, chunk), words);
      }
    }
  }

 private:
  static __device__ __forceinline__ void store(uint32_t to, const uint32_t (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
};

// Rows (token, head), with the heads of a token adjacent. C: the type of the cache, T or e4m3
// bytes.
template <class T, class C>
struct PagedRows {
  const T* q;                // first row
  const C *k, *v;            // key head in slot 0
  T* o;                      // first row
  const int32_t* positions;  // from the token of the first row on
  const int32_t* blocks;     // block table row of the sequence
  PageTable table;
  int64_t q_stride, kv_stride, o_stride;  // token strides of q and o, and slot stride, in elements
  int heads, first_head;                  // heads in this block
  int head_dim, count;
  IndexRange<int> keys;  // each row sees some of these keys
  int first_position;    // the lowest of the rows
  E4m3Tiles pages;       // if the cache is in e4m3

  __device__ const T* query(int r) const {
    return r < count ? q + r / heads * q_stride + static_cast<int64_t>(r % heads) * head_dim
                     : nullptr;
  }
  __device__ T* output(int r) const { return o + r / heads * o_stride + r % heads * head_dim; }
  template <class Rule>
  __device__ int end_key(const Rule& rule, int r) const {
    return r >= count ? 1 : rule.end_key(table.keys_of(positions[r / heads]) - 1, keys.end);
  }
  __device__ int64_t key_offset(int j) const {
    if (j >= keys.end) return -1;
    const int64_t slot = table.slot(blocks, j);
    return slot < 0 ? -1 : slot * kv_stride;
  }
  template <class Rule>
  __device__ typename Rule::Bound bind(const Rule& rule, int r) const {
    return rule.bind(0, head(r), Rule::kAllKeys);
  }
  template <class Shape>
  __device__ __forceinline__ void load(int tile, const TileLoad<C>& load) const {
    for (int page = 0; page < Shape::kKeys / kPageTokens; ++page) {
      const int first = tile * Shape::kKeys + page * kPageTokens;
      const int64_t slot = first < keys.end ? table.slot(blocks, first) : int64_t{-1};
      const C* const from = slot < 0 ? nullptr : load.from + slot / kPageTokens * pages.stride;
      if (load.is_values)
        pages.load_values<Shape>(load.to, page, from, keys.end - first);
      else
        pages.load_keys<Shape>(load.to, page, from, keys.end - first);
    }
  }
  __device__ int head(int r) const { return first_head + r % heads; }
  __device__ int position(int r) const {
    return r >= count ? 0 : table.keys_of(positions[r / heads]) - 1;
  }
  __device__ IndexRange<int> positions_range() const { return {first_position, keys.end}; }
  __device__ int64_t token(int) const { return 0; }  // for dropout, which no call has
  __device__ void store_lse(int, float) const {}
};

// Maximum number of rows of a block.
inline constexpr int kPagedRows = 64;

template <class T, class C>
struct PagedProblem {
  using Rows = PagedRows<T, C>;
  const T* q;
  const C *k, *v;
  const float* scales;  // key_scales(), for a cache in e4m3
  T* o;
  const int32_t *sequences, *positions;
  PageTable table;
  int64_t tokens, q_stride, o_stride;
  int heads, kv_heads;
  int parts;  // blocks per group of heads
  RowFormat format;
  CombinedScratch combined;
  static constexpr bool kIsE4m3 = !std::is_same_v<T, C>;

  // A token has so many blocks, if it leads some.
  __host__ __device__ int blocks_per_token() const { return kv_heads * parts; }

  // Sequence of a token; -1 if idle.
  __device__ int sequence_of(int64_t token) const {
    return positions[token] < 0 ? -1 : sequences[token];
  }

  // Finds the rows of block `block` of those of token `first`, at most max_rows, a multiple of
  // kPagedRows; `threads` threads call it. Returns false if the token does not lead a block, or
  // belongs to no sequence; in the latter case it gets zeros.
  template <class Rule>
  __device__ __forceinline__ bool find(const Rule& rule, int64_t first, int block, int max_rows,
                                       int threads, Rows& rows) const {
    const int kv_head = block / parts, group = heads / kv_heads;
    const int in_group = block % parts * kPagedRows;
    const int width = min(kPagedRows, group - in_group), per_block = max_rows / width;
    const int in_block = static_cast<int>(first % per_block), sequence = sequence_of(first);
    if (in_block != 0 && sequence_of(first - 1) == sequence) return false;
    const int64_t dim = format.head_dim, head = kv_head * group + in_group;
    rows = {.q = q + first * q_stride + head * dim,
            .k = k + kv_head * (kIsE4m3 ? kPageTokens * dim : dim),
            .v = v + kv_head * (kIsE4m3 ? kPageTokens * dim : dim),
            .o = o + first * o_stride + head * dim,
            .positions = positions + first,
            .blocks = table.has(sequence) ? table.row(sequence) : nullptr,
            .table = table,
            .q_stride = q_stride,
            .kv_stride = kv_heads * dim,
            .o_stride = o_stride,
            .heads = width,
            .first_head = static_cast<int>(head),
            .head_dim = format.head_dim,
            .count = 0,
            .keys = {0, 0},
            .first_position = 0,
            .pages = {}};
    if constexpr (kIsE4m3)
      rows.pages = {.stride = kv_heads * kPageTokens * dim,
                    .k_factor = dequantize_factor(scales[kv_head]),
                    .v_factor = dequantize_factor(scales[kv_heads + kv_head])};
    // The block ends before the first token of another sequence.
    const int limit =
        static_cast<int>(min(static_cast<int64_t>(per_block - in_block), tokens - first));
    const int lane = static_cast<int>(threadIdx.x % 32);
    int count = limit;
    for (int i = lane; i - lane < limit && count == limit; i += 32) {
      const uint32_t others =
          __ballot_sync(0xffffffffu, i < limit && sequence_of(first + i) != sequence);
      if (others != 0) count = i - lane + __ffs(static_cast<int>(others)) - 1;
    }
    int min_keys = std::numeric_limits<int>::max();
    for (int i = lane; i - lane < count; i += 32) {
      const int keys =
          rule.end_key(table.keys_of(rows.positions[min(i, count - 1)]) - 1, rows.keys.end);
      rows.keys.end = max(rows.keys.end, __reduce_max_sync(0xffffffffu, keys));
      min_keys = min(min_keys, __reduce_min_sync(0xffffffffu, keys));
    }
    rows.keys.first = max(0, rule.first_key(min_keys));
    rows.first_position = min_keys - 1;
    rows.count = count * width;
    if (rows.blocks != nullptr) return true;
    for (int r = 0; r < rows.count; ++r)
      for (int d = static_cast<int>(threadIdx.x); d < format.head_dim; d += threads)
        rows.output(r)[d] = from_float<T>(0.0f);
    return false;
  }
};

template <class T, class C = T>
PagedProblem<T, C> paged_problem(const AttentionPaged& args) {
  const int64_t heads = args.q.dim(1), kv_heads = args.cache.k.dim(2);
  return {.q = pointer<T>(args.q),
          .k = pointer<C>(args.cache.k),
          .v = pointer<C>(args.cache.v),
          .scales = key_scales(args.cache),
          .o = pointer<T>(args.o),
          .sequences = pointer<int32_t>(args.sequences),
          .positions = pointer<int32_t>(args.positions),
          .table = page_table(args.cache),
          .tokens = args.q.dim(0),
          .q_stride = args.q.strides()[0],
          .o_stride = args.o.strides()[0],
          .heads = static_cast<int>(heads),
          .kv_heads = static_cast<int>(kv_heads),
          .parts = static_cast<int>((heads / kv_heads + kPagedRows - 1) / kPagedRows),
          .format = {.head_dim = static_cast<int>(args.q.dim(2)),
                     .vectorized = vectorized_heads<T>(args.q, args.o) &&
                                   (!std::is_same_v<T, C> ||
                                    vectorized_heads<T>(args.cache.k, args.cache.v))}};
}

// FP8 attention in bf16 over a cache in e4m3 on sm_90; throws for other devices and caches.
void attention_paged_fp8(const AttentionPaged& args);

}  // namespace cohort::kernels::cuda
