// Sizes of attention calls, read from their tensors.
#pragma once

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

}  // namespace cohort::kernels
