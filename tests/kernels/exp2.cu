#include "tests/kernels/exp2.h"

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"

namespace cohort::test {
namespace {

struct Exp2Arguments {
  float* x;
  int64_t count;
};

__global__ void exp2_kernel(Exp2Arguments p) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < p.count) p.x[i] = kernels::cuda::fast_exp2(p.x[i]);
}

}  // namespace

std::vector<float> exp2_on(const std::vector<float>& x, Device device) {
  Tensor values = Tensor::from(x).to(device);
  cuda::launch("exp2", exp2_kernel, {kernels::cuda::blocks_for(values.numel(), 256), 256}, device,
               Exp2Arguments{kernels::cuda::pointer<float>(values), values.numel()});
  return values.to_vector<float>();
}

}  // namespace cohort::test
