#include "kernels/decode.h"

namespace cohort::kernels::cpu {

void increment(Tensor& t) {
  if (t.dtype() == DType::kI32)
    for (int64_t i = 0; i < t.numel(); ++i) t.data<int32_t>()[i] += 1;
  else
    for (int64_t i = 0; i < t.numel(); ++i) t.data<int64_t>()[i] += 1;
}

}  // namespace cohort::kernels::cpu
