// Two optimisation ladders of kernels, slowest rung first: a GEMM and a softmax. All rungs compute
// the same function; each documents its improvement over the previous one.
#pragma once

#include "core/check.h"
#include "core/tensor.h"

namespace cohort::bench::ladder {

// C = A B^T with f32 accumulators, rounded to bf16 once. Both inputs are row-major with K
// innermost, as in a linear layer: a row of B gives a column of C. All sizes are multiples of 8.
struct Gemm {
  Tensor& c;        // [M, N] bf16
  const Tensor& a;  // [M, K] bf16
  const Tensor& b;  // [N, K] bf16

  // Sizes fit into 32 bits, offsets need 64. check() throws Error if the tensors are not as above.
  int m() const { return size(a, 0); }
  int n() const { return size(b, 0); }
  int k() const { return size(a, 1); }
  void check() const {
    for (const Tensor* t : {static_cast<const Tensor*>(&c), &a, &b})
      COHORT_CHECK(t->device().is_cuda() && t->dtype() == DType::kBF16 && t->rank() == 2 &&
                       t->is_contiguous() && t->dim(0) % 8 == 0 && t->dim(1) % 8 == 0,
                   "[ladder] expected a bf16 matrix of multiples of 8, got ", t->str());
    COHORT_CHECK(a.dim(1) == b.dim(1) && c.dim(0) == a.dim(0) && c.dim(1) == b.dim(0), "[ladder] ",
                 c.str(), " has not the shape of the product of ", a.str(), " and ", b.str());
  }

 private:
  static int size(const Tensor& t, int dim) { return static_cast<int>(t.dim(dim)); }
};
void matmul_naive(const Gemm& p);
void matmul_shared(const Gemm& p);
void matmul_registers(const Gemm& p);
void matmul_mma(const Gemm& p);
// Requires has_wgmma().
void matmul_wgmma(const Gemm& p);
bool has_wgmma(Device device);

// y[r, :] = e^(x[r, :] - max) / sum over rows of f32, a multiple of 4 columns.
struct Softmax {
  Tensor& y;        // [rows, cols]
  const Tensor& x;  // [rows, cols]

  void check() const {
    COHORT_CHECK(x.device().is_cuda() && x.dtype() == DType::kF32 && x.rank() == 2 &&
                     x.is_contiguous() && x.dim(1) % 4 == 0,
                 "[ladder] expected f32 rows of a multiple of 4 columns, got ", x.str());
    COHORT_CHECK(y.device() == x.device() && y.dtype() == x.dtype() && y.shape() == x.shape() &&
                     y.is_contiguous(),
                 "[ladder] ", y.str(), " for the softmax of ", x.str());
  }
};
void softmax_naive(const Softmax& p);
void softmax_online(const Softmax& p);
// Maximum numbers of columns, limited by registers.
inline constexpr int64_t kWarpColumns = 2048, kBlockColumns = 16384;
void softmax_warp(const Softmax& p);
void softmax_block(const Softmax& p);

}  // namespace cohort::bench::ladder
