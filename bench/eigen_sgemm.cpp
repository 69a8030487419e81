#include "bench/eigen_sgemm.h"

#include <Eigen/Core>

#include "bench/timing.h"

namespace cohort::bench {

double eigen_sgemm_seconds(int64_t m, int64_t n, int64_t k, int threads) {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  Eigen::setNbThreads(threads);
  const Matrix a = Matrix::Random(m, k), b = Matrix::Random(k, n);
  Matrix c(m, n);
  return median_seconds([&] { c.noalias() = a * b; }, 5, 0.1);
}

}  // namespace cohort::bench
