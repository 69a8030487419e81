// Marks inline functions that CUDA kernels call as well.
#pragma once

#ifdef __CUDACC__
#define COHORT_HD __host__ __device__
#else
#define COHORT_HD
#endif
