#include "kernels/lora.h"

#include "core/with_cuda.h"

namespace cohort::kernels {

void lora_input(const LoraInput& args) {
  constexpr const char* kOp = "lora_input";
  const auto& [h, x, a, copy] = args;
  const Device device = x.device();
  COHORT_CHECK(x.rank() == 2 && a.rank() == 2 && x.dim(1) == a.dim(1), "[", kOp,
               "] expected rows of x and a of one length, got ", x.str(), " and ", a.str());
  const Shape shape{x.dim(0), a.dim(0)};
  check_rows(x, x.shape(), x.dtype(), kOp, "x", device);
  check_tensor(a, a.shape(), x.dtype(), kOp, "a", device);
  check_rows(h, shape, x.dtype(), kOp, "h", device);
  if (copy.defined()) check_tensor(copy, shape, x.dtype(), kOp, "copy", device);
  on_device<cpu::lora_input, cuda::lora_input>(device, args);
}

}  // namespace cohort::kernels
