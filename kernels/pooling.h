// Means over the tokens of packed sequences, the usual embeddings of texts. Forward only.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// y[s, c] = sum(x[t, c]) / n over the n tokens t of sequence s, added in ascending order; NaN for a
// sequence without tokens.
struct SegmentMean {
  Tensor& y;                 // [S, C] in accumulate_dtype(x)
  const Tensor& x;           // [T, C]
  const Tensor& cu_seqlens;  // [S + 1] i32: ascending, from 0 to T
};
COHORT_KERNEL(void segment_mean(const SegmentMean& args));

}  // namespace cohort::kernels
