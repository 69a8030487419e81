#include "kernels/decode.h"

#include "core/with_cuda.h"

namespace cohort::kernels {

void increment(Tensor& t) {
  COHORT_CHECK(t.dtype() == DType::kI32 || t.dtype() == DType::kI64,
               "[increment] expected i32 or i64, got ", t.str());
  check_tensor(t, t.shape(), t.dtype(), "increment", "t", t.device());
  on_device<cpu::increment, cuda::increment>(t.device(), t);
}

}  // namespace cohort::kernels
