// Matrix products: by Eigen on the CPU (cpu/matmul.cpp), by cuBLASLt on CUDA (cuda/matmul.cpp).
#pragma once

#include "kernels/elementwise.h"

namespace cohort::kernels {

enum class Transpose { kNo, kYes };
// Whether split-K is allowed: a long sum over K in parts, which are added at the end. It is faster
// for few rows, but the bits of a row depend on how many there are.
enum class SplitK { kNever, kAllowed };
struct MatmulDesc {
  Transpose a = Transpose::kNo, b = Transpose::kNo;
  Grad out = Grad::kOverwrite;
  SplitK split_k = SplitK::kNever;  // for a not transposed; else it is the device's choice
};

// c (+)= op(a) op(b). With bf16 inputs (CUDA) c is bf16 or f32: sums are f32, rounded once, and
// where they are added to a bf16 c cuBLAS may round them before, too. On CUDA a tensor whose rows
// are multiples of 16 bytes has to start at such a multiple, as a tensor of its own does; in
// general, at a multiple of the largest power of two that divides the rows' bytes. With a not
// transposed and K not split, the bits of a row of c depend only on that row of a and on b.
struct Matmul {
  Tensor& c;        // [M, N]
  const Tensor& a;  // op(a): [M, K]; inputs of higher rank are seen as [rows, cols]
  const Tensor& b;  // op(b): [K, N]
  MatmulDesc desc = {};
};
void matmul(const Matmul& args);

// The linear layer, y = x w^T + bias. The bias is added before the one rounding.
struct LinearForward {
  Tensor& y;           // [T, N]
  const Tensor& x;     // [T, K]
  const Tensor& w;     // [N, K]
  const Tensor& bias;  // [N]; may be undefined
};
void linear_forward(const LinearForward& args);

// dbias (+)= column sums of dy, in a fixed order.
struct BiasBackward {
  GradOut dbias;     // [N], a weight gradient
  const Tensor& dy;  // [T, N]
};
void bias_backward(const BiasBackward& args);

namespace cpu {
void matmul(const Matmul& args);
void linear_forward(const LinearForward& args);
void bias_backward(const BiasBackward& args);
}  // namespace cpu

namespace cuda {
void matmul(const Matmul& args);
void linear_forward(const LinearForward& args);
void bias_backward(const BiasBackward& args);
}  // namespace cuda

}  // namespace cohort::kernels
