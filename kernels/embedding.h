// Table lookup: y[t, :] = table[ids[t], :].
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// table: [V, C], ids: [T] i32; y: [T, C]. An id outside [0, V) is an Error on the CPU, which names
// the first one and its position; on CUDA its row becomes NaN.
void embedding_forward(Tensor& y, const Tensor& table, const Tensor& ids);
// dtable[ids[t], :] += dy[t, :]; dtable: [V, C] of accumulate_dtype(dy.dtype()). Overwrite zeroes
// first. A row of dtable depends on its own tokens and their order only: on the CPU they are added
// t ascending; on CUDA in groups of 64, t ascending in a group, then the groups ascending, then
// that sum to the row. CUDA skips ids outside [0, V).
void embedding_backward(Tensor& dtable, const Tensor& dy, const Tensor& ids, Grad mode);

}  // namespace cohort::kernels
