// Attention on arrays of the shapes that Python callers have: packed, or a batch.
#pragma once

#include "kernels/attention/attention.h"

namespace cohort::python {

// [B, T, H, D] as packed tokens [B T, H, D]; others as they are. A view where the strides allow it
// and, on CUDA, the kernels' alignment of rows to 16 bytes; else a copy.
Tensor packed(const Tensor& t);

// `cu_seqlens`, or if it is undefined the offsets of a batch of equal sequences of `q`.
Tensor sequence_offsets(const Tensor& cu_seqlens, const Tensor& q);

}  // namespace cohort::python
