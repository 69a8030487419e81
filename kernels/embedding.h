// Table lookup: y[t, :] = table[ids[t], :].
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// table: [V, C], ids: [T] i32 in [0, V) else Error naming the first bad id and its position; y: [T,
// C].
void embedding_forward(Tensor& y, const Tensor& table, const Tensor& ids);
// dtable[ids[t], :] += dy[t, :], t ascending for each row, so deterministic for any thread count.
// Overwrite zeroes first.
void embedding_backward(Tensor& dtable, const Tensor& dy, const Tensor& ids, Grad mode);

}  // namespace cohort::kernels
