#include "kernels/cuda/device.cuh"
#include "kernels/decode.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// One thread per element.
template <class T>
__global__ void increment_kernel(T* p, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < n) p[i] += 1;
}

}  // namespace

void increment(Tensor& t) {
  const LaunchShape shape{{blocks_for(t.numel(), kThreads)}, {kThreads}};
  if (t.dtype() == DType::kI32)
    launch("increment", increment_kernel<int32_t>, shape, t.device(), pointer<int32_t>(t),
           t.numel());
  else
    launch("increment", increment_kernel<int64_t>, shape, t.device(), pointer<int64_t>(t),
           t.numel());
}

}  // namespace cohort::kernels::cuda
