// Sums over ranks whose order depends on nothing but the number of ranks.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// y[i] (+)= the sum of parts[r, i] over r, in the tree of kernels/pairwise_sum.h, of 1 to 1,024
// parts. f32, or on the CPU f64.
struct SumParts {
  GradOut y;            // [n]
  const Tensor& parts;  // [R, n]
};
COHORT_KERNEL(void sum_parts(const SumParts& args));

}  // namespace cohort::kernels
