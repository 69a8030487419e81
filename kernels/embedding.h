// Table lookup: y[t, :] = table[ids[t], :].
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// An id outside [0, V) is an Error on the CPU, which names the first one and its position; on CUDA
// its row becomes NaN. On CUDA no later kernel starts before all work enqueued before this one has
// ended (Stream::may_prefetch relies on it).
struct EmbeddingForward {
  Tensor& y;            // [T, C]
  const Tensor& table;  // [V, C]
  const Tensor& ids;    // [T] i32
};
COHORT_KERNEL(void embedding_forward(const EmbeddingForward& args));

// dtable[ids[t], :] += dy[t, :]; kOverwrite zeroes dtable first. A row of dtable depends on its own
// tokens and their order only: the CPU adds them in ascending t; CUDA sums groups of 64 in
// ascending t, then the groups in ascending order, and adds that to the row. CUDA skips ids outside
// [0, V).
struct EmbeddingBackward {
  GradOut dtable;     // [V, C] of accumulate_dtype(dy)
  const Tensor& dy;   // [T, C]
  const Tensor& ids;  // [T] i32
};
COHORT_KERNEL(void embedding_backward(const EmbeddingBackward& args));

}  // namespace cohort::kernels
