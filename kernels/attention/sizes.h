// Sizes of attention calls, read from their tensors.
#pragma once

#include <algorithm>

#include "kernels/attention/attention.h"

namespace cohort::kernels {

// Sizes of a call on packed sequences.
struct PackedSizes {
  int64_t tokens, heads, kv_heads, head_dim, sequences;
  int64_t group() const { return heads / kv_heads; }
};
inline PackedSizes packed_sizes(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens) {
  return {q.dim(0), q.dim(1), k.dim(1), q.dim(2), cu_seqlens.numel() - 1};
}

// Keys [first, last) of a sequence of `length` tokens that its query at `position` sees.
struct VisibleKeys {
  int64_t first, last;
};
inline VisibleKeys visible_keys(const AttentionDesc& desc, int64_t position, int64_t length) {
  if (desc.mask == Mask::kFull) return {0, length};
  const int64_t last = position + 1;
  return {desc.window > 0 ? std::max<int64_t>(0, last - desc.window) : 0, last};
}

// Maps the keys of a packed sequence to tokens: its shared prefix first, then its own tokens.
struct KeyTokens {
  int64_t prefix_begin = 0, prefix = 0, begin = 0;
  int64_t operator()(int64_t key) const {
    return key < prefix ? prefix_begin + key : begin + key - prefix;
  }
};

struct CacheSizes {
  int64_t blocks, block_tokens, kv_heads, head_dim, sequences, max_blocks;
};
inline CacheSizes cache_sizes(const PagedKV& cache) {
  return {cache.k.dim(0), cache.k.dim(1),           cache.k.dim(2),
          cache.k.dim(3), cache.block_table.dim(0), cache.block_table.dim(1)};
}

}  // namespace cohort::kernels
