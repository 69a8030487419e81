#ifndef COHORT_SPIN_LIMIT
#define COHORT_SPIN_LIMIT
#endif
#include "tests/kernels/spin_limit.h"

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/sm90/tma.cuh"

namespace cohort::test {
namespace {

// A type of this file alone, so that no other one instantiates launch() for it.
struct NoArguments {};

__global__ void waiting_kernel(NoArguments) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ uint64_t barrier;
  const uint32_t address = kernels::cuda::shared_address(&barrier);
  kernels::cuda::barrier_init(address, 1);
  kernels::cuda::barrier_wait(address, 0);
#endif
}

}  // namespace

void wait_at_a_barrier_forever(Device device) {
  cuda::launch("waiting_kernel", waiting_kernel, {1, 1}, device, NoArguments{});
}

}  // namespace cohort::test
