#include "kernels/fingerprint.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

void fingerprint(Tensor& sum, const Tensor& t, int64_t address) {
  ArgumentCheck("fingerprint")("i64 [1] sum; any [...] t", sum, t);
  on_device<cpu::fingerprint, cuda::fingerprint>(sum.device(), sum, t, address);
}

}  // namespace cohort::kernels
