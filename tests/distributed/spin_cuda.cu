#include "core/cuda.h"
#include "tests/distributed/spin_cuda.h"

namespace cohort::test {
namespace {

__device__ unsigned long long nanoseconds() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__global__ void spin(const volatile int* flag) {
  const unsigned long long end = nanoseconds() + 60'000'000'000;
  while (*flag == 0 && nanoseconds() < end) {
  }
}

}  // namespace

void enqueue_spin(const volatile int* flag, Device device) {
  spin<<<1, 1, 0, cuda::stream(device)>>>(flag);
  COHORT_CUDA_CHECK(cudaGetLastError());
}

}  // namespace cohort::test
