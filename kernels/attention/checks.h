// Checks of arguments that the attention ops share. They throw Error naming `op`.
#pragma once

#include "kernels/attention/sizes.h"

namespace cohort::kernels {

// Queries, keys and values of packed sequences.
PackedSizes check_qkv(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
                      const char* op);
// The tensors of attention over a paged cache.
void check_paged_tensors(const AttentionPaged& args, const char* op);

}  // namespace cohort::kernels
