#include "kernels/lora.h"

#include "core/with_cuda.h"
#include "kernels/matmul.h"

namespace cohort::kernels {
namespace {

// On CUDA without a kernel of its own. cuBLASLt writes contiguous matrices only; they are allocated
// here and not in the device's code, so that a dry run, which knows of no kernels, counts them.
void lora_input_by_gemm(const LoraInput& args) {
  const auto& [h, x, a, copy] = args;
  Tensor product = copy.defined()      ? copy
                   : h.is_contiguous() ? h
                                       : Tensor::empty(h.shape(), h.dtype(), h.device());
  matmul({.c = product, .a = x, .b = a, .desc = {.b = Transpose::kYes}});
  if (copy.defined() || !h.is_contiguous()) h.copy_(product);
}

}  // namespace

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
  if constexpr (kWithCuda)
    if (device.is_cuda() && !is_dry_run() && cuda::has_lora_kernel(args))
      return on_device<cpu::lora_input, cuda::lora_input>(device, args);
  if (device.is_cuda()) return lora_input_by_gemm(args);
  on_device<cpu::lora_input, cuda::lora_input>(device, args);
}

}  // namespace cohort::kernels
