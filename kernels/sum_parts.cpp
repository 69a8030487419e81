#include "kernels/sum_parts.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"
#include "kernels/pairwise_sum.h"

namespace cohort::kernels {

void sum_parts(const SumParts& args) {
  const Tensor& y = args.y.tensor;
  ArgumentCheck("sum_parts")("[n] y; [R, n] parts", y, args.parts);
  const int64_t parts = args.parts.dim(0);
  COHORT_CHECK(y.dtype() == accumulate_dtype(y.dtype()), "[sum_parts] expected f32 or f64, got ",
               y.str());
  COHORT_CHECK(parts >= 1 && parts <= kMaxPairwiseValues, "[sum_parts] expected 1 to ",
               kMaxPairwiseValues, " parts, got ", parts);
  on_device<cpu::sum_parts, cuda::sum_parts>(y.device(), args);
}

}  // namespace cohort::kernels
