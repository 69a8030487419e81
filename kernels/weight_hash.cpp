#include "kernels/weight_hash.h"

#include "core/with_cuda.h"

namespace cohort::kernels {

void weight_hash(Tensor& hash, std::span<const Tensor> tensors) {
  check_tensor(hash, {1}, DType::kI64, "weight_hash", "hash", hash.device());
  for (const Tensor& t : tensors)
    check_tensor(t, t.shape(), t.dtype(), "weight_hash", "tensor", hash.device());
  on_device<cpu::weight_hash, cuda::weight_hash>(hash.device(), hash, tensors);
}

}  // namespace cohort::kernels
