// Sums over ranks, of which each rank gets its part, in an order that depends on nothing but the
// number of ranks.
#pragma once

#include "distributed/communicator.h"
#include "kernels/common.h"

namespace cohort {

// y (+)= the sum over ranks of their parts[rank()], in the tree of kernels/pairwise_sum.h. `parts`:
// [size, n], f32 or on the CPU f64, each row contiguous; y: [n]; `memory`, at least [size * n], is
// overwritten. If each of several hosts has a power of two of ranks, these are added first, so that
// other hosts receive sums only. The bits are the same: the tree begins with them. Every rank must
// call it.
void reduce_scatter(Communicator& comm, const Tensor& parts, const Tensor& memory,
                    const kernels::GradOut& y);

}  // namespace cohort
