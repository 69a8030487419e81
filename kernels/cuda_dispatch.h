// How a kernel reaches its CUDA version. Its public function lives in <op>_cpu.cpp, the only place
// to include this: it checks its arguments, hands CUDA tensors to the function of the same name and
// signature in namespace cuda (<op>.cu), and goes on with the CPU's code.
//
//   COHORT_DECLARE_CUDA(softmax_forward);
//   void softmax_forward(Tensor& y, const Tensor& x) {
//     check_tensor(y, x.shape(), x.dtype(), "softmax", "y", x.device());
//     COHORT_FORWARD_TO_CUDA(x, softmax_forward(y, x));
//     ...
#pragma once

#include "core/with_cuda.h"

#define COHORT_DECLARE_CUDA(name)         \
  namespace cuda {                        \
  decltype(::cohort::kernels::name) name; \
  }
#define COHORT_FORWARD_TO_CUDA(tensor, call)              \
  do {                                                    \
    if constexpr (kWithCuda) {                            \
      if ((tensor).device().is_cuda()) return cuda::call; \
    }                                                     \
  } while (false)
