// Whether this build has CUDA. A header of its own and no part of core/device.h, so that most files
// are the same text to a CPU and a CUDA build and ccache compiles them once: it is for .cpp files
// (those of kernels get it by kernels/cuda_dispatch.h), not for headers that many include.
#pragma once

namespace cohort {

// Code behind `if constexpr (kWithCuda)` may name functions that only `.cu` and `*_cuda.cpp` files
// define.
#ifdef COHORT_WITH_CUDA
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

}  // namespace cohort
