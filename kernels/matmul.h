// Matrix product: by Eigen on the CPU (kernels/matmul_cpu.cpp), by cuBLASLt on CUDA
// (kernels/matmul_cuda.cpp).
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

enum class Transpose { kNo, kYes };
// May a device cut a long sum over K into parts? Then it is faster for few rows, but the bits of a
// row depend on how many there are.
enum class SplitK { kNever, kAllowed };
struct MatmulDesc {
  Transpose a = Transpose::kNo, b = Transpose::kNo;
  Grad out = Grad::kOverwrite;
  SplitK split_k = SplitK::kNever;  // for a not transposed; else it is the device's choice
};

// c[M, N] (+)= op(a)[M, K] op(b)[K, N]. Inputs of higher rank are seen as [rows, cols]. With bf16
// inputs (CUDA) c is bf16 or f32: sums are f32, rounded once, and where they are added to a bf16 c
// cuBLAS may round them before, too. On CUDA a tensor whose rows are multiples of 16 bytes has to
// start at such a multiple, as a tensor of its own does; in general, at a multiple of the largest
// power of two that divides the rows' bytes.
// With a not transposed and K not split, the bits of a row of c depend only on that row of a and on
// b.
void matmul(Tensor& c, const Tensor& a, const Tensor& b, const MatmulDesc& desc = {});

// The linear layer: y[T, N] = x[T, K] w[N, K]^T + bias[N] (bias may be undefined). The bias is
// added before the one rounding.
void linear_forward(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias);
// dbias[N] (+)= column sums of dy[T, N], in a fixed order.
void bias_backward(Tensor& dbias, const Tensor& dy, Grad mode);

// The same products on raw row-major memory, for kernels that work in tiles. Runs in the calling
// thread. c[m, n] (+)= op(a) op(b), leading dimensions in elements.
template <class T>
struct GemmTile {
  int64_t m, n, k;
  const T* a;
  int64_t lda;
  Transpose trans_a;
  const T* b;
  int64_t ldb;
  Transpose trans_b;
  T* c;
  int64_t ldc;
  Grad out;
};
template <class T>
void gemm_tile(const GemmTile<T>& tile);
extern template void gemm_tile<float>(const GemmTile<float>&);
extern template void gemm_tile<double>(const GemmTile<double>&);

}  // namespace cohort::kernels
