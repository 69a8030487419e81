// Whether this build has CUDA. A header of its own and no part of core/device.h, so that most files
// are the same text to a CPU and a CUDA build and ccache compiles them once: include it from .cpp
// files only.
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
