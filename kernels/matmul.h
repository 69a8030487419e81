// Matrix multiplication: Eigen on the CPU (cpu/matmul.cpp), cuBLASLt on CUDA (cuda/matmul.cpp).
#pragma once

#include "kernels/elementwise.h"

namespace cohort::kernels {

enum class Transpose { kNo, kYes };
// Permission for split-K, which adds partial sums over K at the end. It is faster for few rows, but
// the bits of a row then depend on the number of rows.
enum class SplitK { kNever, kAllowed };
struct MatmulDesc {
  Transpose a = Transpose::kNo, b = Transpose::kNo;
  Grad out = Grad::kOverwrite;
  SplitK split_k = SplitK::kNever;  // if a is not transposed; otherwise the device decides
  double scale = 1;
};

// c (+)= scale op(a) op(b). With bf16 inputs (CUDA) c is bf16 or f32: accumulators are f32 and
// rounded once; if they are added to a bf16 c, cuBLAS may also round them before. On CUDA a tensor
// must be aligned to the largest power of two, up to 16, that divides the bytes of its rows and of
// their stride; an allocation always is. With a not transposed and K not split, the bits of a row
// of c depend only on that row of a and on b.
struct Matmul {
  Tensor& c;        // [M, N]
  const Tensor& a;  // op(a): [M, K]; inputs of higher rank are viewed as [rows, cols]
  const Tensor& b;  // op(b): [K, N]; both may be columns of a wider matrix
  MatmulDesc desc = {};
};
COHORT_KERNEL(void matmul(const Matmul& args));

// The linear layer, y = x w^T + bias. The bias is added before the one rounding. The sum over the
// last `tail` columns continues the sum over those before: if x or w has zeros there, y has the
// bits of the layer without them (of zeros, the sign may differ). On CUDA the tail of x must have
// been written by the kernel right before this one, lora_input() or a copy, and its other columns
// by earlier kernels: a skinny GEMM begins while that kernel runs.
struct LinearForward {
  Tensor& y;           // [T, N]
  const Tensor& x;     // [T, K]
  const Tensor& w;     // [N, K]
  const Tensor& bias;  // [N]; may be undefined
  int64_t tail = 0;    // number of columns
};
COHORT_KERNEL(void linear_forward(const LinearForward& args));

// dbias (+)= column sums of dy, in a fixed order.
struct BiasBackward {
  GradOut dbias;     // [N], a weight gradient
  const Tensor& dy;  // [T, N]
};
COHORT_KERNEL(void bias_backward(const BiasBackward& args));

}  // namespace cohort::kernels
