// Eigen's multi-threaded sgemm, timed on a shape.
#pragma once

#include <cstdint>

namespace cohort::bench {

// Median seconds of c[m, n] = a[m, k] b[k, n] in f32 on `threads` threads, random data.
__attribute__((visibility("default"))) double eigen_sgemm_seconds(int64_t m, int64_t n, int64_t k,
                                                                  int threads);

}  // namespace cohort::bench
