#include "kernels/cuda_dispatch.h"
#include "kernels/decode.h"

namespace cohort::kernels {

COHORT_DECLARE_CUDA(increment)

void increment(Tensor& t) {
  COHORT_CHECK(t.dtype() == DType::kI32 || t.dtype() == DType::kI64,
               "[increment] expected i32 or i64, got ", t.str());
  check_tensor(t, t.shape(), t.dtype(), "increment", "t", t.device());
  COHORT_FORWARD_TO_CUDA(t, increment(t));
  if (t.dtype() == DType::kI32)
    for (int64_t i = 0; i < t.numel(); ++i) t.data<int32_t>()[i] += 1;
  else
    for (int64_t i = 0; i < t.numel(); ++i) t.data<int64_t>()[i] += 1;
}

}  // namespace cohort::kernels
