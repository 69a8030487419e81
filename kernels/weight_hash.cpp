#include "kernels/weight_hash.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

void weight_hash(Tensor& hash, std::span<const Tensor> tensors) {
  ArgumentCheck("weight_hash")("i64 [1] hash", hash);
  for (const Tensor& t : tensors) ArgumentCheck("weight_hash", hash.device())("[...] tensor", t);
  on_device<cpu::weight_hash, cuda::weight_hash>(hash.device(), hash, tensors);
}

}  // namespace cohort::kernels
