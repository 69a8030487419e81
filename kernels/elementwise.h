// Elementwise ops as data: one struct with the formula and its derivative and one list line give
// the CPU kernel (f64, f32), the CUDA kernel (f32, bf16), the differentiable op (autograd/ops.h),
// the gradient check and the bench row.
#pragma once

#include <cmath>

#include "kernels/common.h"
#include "kernels/vector_math.h"

namespace cohort::kernels {

// On CUDA with bf16 tensors a formula is evaluated in f32 and rounded once; if it accumulates,
// after the old value was added.

// y = f(x). All tensors of the unary and binary calls have one shape.
struct UnaryForward {
  Tensor& y;
  const Tensor& x;
};
// dx (+)= dy f'(x, y)
struct UnaryBackward {
  GradOut dx;
  const Tensor &dy, &x, &y;
};
// y = f(a, b)
struct BinaryForward {
  Tensor& y;
  const Tensor &a, &b;
};
// da (+)= dy df/da,  db (+)= dy df/db
struct BinaryBackward {
  GradOut da, db;
  const Tensor &dy, &a, &b;
};
// y[r, c] = f(x[r, c], x[r, F + c])
struct GatedForward {
  Tensor& y;        // [..., F]
  const Tensor& x;  // [..., 2 F]: gate | up
};
// dx[r, c] (+)= dy[r, c] df/dgate,  dx[r, F + c] (+)= dy[r, c] df/dup
struct GatedBackward {
  GradOut dx;
  const Tensor &dy, &x;
  Tensor y = {};  // output, may be undefined or dy: the forward's result, recomputed
};

// Formulas. The base of each names the arguments of its calls.
//
// Unary: y = forward(x), dy/dx = derivative(x, y); kUsesOutput says that derivative() reads y. All
// arguments of a call have one type.
struct UnaryOp {
  using ForwardArgs = UnaryForward;
  using BackwardArgs = UnaryBackward;
};
struct Neg : UnaryOp {
  COHORT_HD static auto forward(auto x) { return -x; }
  COHORT_HD static auto derivative(auto, auto) { return -1; }
};
struct Exp : UnaryOp {
  static constexpr bool kUsesOutput = true;
  COHORT_HD static auto forward(auto x) { return vexp(x); }
  COHORT_HD static auto derivative(auto, auto y) { return y; }
};
struct Log : UnaryOp {  // x > 0
  COHORT_HD static auto forward(auto x) { return vlog(x); }
  COHORT_HD static auto derivative(auto x, auto) { return 1 / x; }
};
struct Sqrt : UnaryOp {  // x > 0
  static constexpr bool kUsesOutput = true;
  COHORT_HD static auto forward(auto x) { return std::sqrt(x); }
  COHORT_HD static auto derivative(auto, auto y) { return decltype(y)(0.5) / y; }
};
struct Square : UnaryOp {
  COHORT_HD static auto forward(auto x) { return x * x; }
  COHORT_HD static auto derivative(auto x, auto) { return 2 * x; }
};
struct Tanh : UnaryOp {
  static constexpr bool kUsesOutput = true;
  COHORT_HD static auto forward(auto x) { return std::tanh(x); }
  COHORT_HD static auto derivative(auto, auto y) { return 1 - y * y; }
};
struct Sigmoid : UnaryOp {
  static constexpr bool kUsesOutput = true;
  COHORT_HD static auto forward(auto x) { return vsigmoid(x); }
  COHORT_HD static auto derivative(auto, auto y) { return y * (1 - y); }
};
struct Relu : UnaryOp {
  COHORT_HD static auto forward(auto x) { return x > 0 ? x : decltype(x)(0); }
  COHORT_HD static auto derivative(auto x, auto) { return decltype(x)(x > 0); }
};
struct Silu : UnaryOp {  // x sigmoid(x)
  COHORT_HD static auto forward(auto x) { return x * vsigmoid(x); }
  COHORT_HD static auto derivative(auto x, auto) {
    const auto s = vsigmoid(x);
    return s * (1 + x * (1 - s));
  }
};
struct Gelu : UnaryOp {  // x Phi(x), exact (Hendrycks and Gimpel 2016)
  COHORT_HD static auto forward(auto x) { return x * normal_cdf(x, vgauss(x)); }
  COHORT_HD static auto derivative(auto x, auto) {
    const auto e = vgauss(x);
    return normal_cdf(x, e) + x * decltype(x)(0.39894228040143267794) * e;
  }
};
// The tanh form of GPT-2: 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
struct GeluTanh : UnaryOp {
  COHORT_HD static auto forward(auto x) { return x * gate(x); }
  template <class T>
  COHORT_HD static T derivative(T x, T) {
    const T s = gate(x);
    const T slope = T(1.59576912160573071176) * (1 + T(3 * 0.044715) * x * x);
    return s + x * s * (1 - s) * slope;
  }
  template <class T>
  COHORT_HD static T gate(T x) {
    return vsigmoid(T(1.59576912160573071176) * (x + T(0.044715) * x * x * x));
  }
};

// Binary, equal shapes: y = forward(a, b), dy/da = da(a, b), dy/db = db(a, b).
struct BinaryOp {
  using ForwardArgs = BinaryForward;
  using BackwardArgs = BinaryBackward;
};
struct Add : BinaryOp {
  COHORT_HD static auto forward(auto a, auto b) { return a + b; }
  COHORT_HD static auto da(auto, auto) { return 1; }
  COHORT_HD static auto db(auto, auto) { return 1; }
};
struct Sub : BinaryOp {
  COHORT_HD static auto forward(auto a, auto b) { return a - b; }
  COHORT_HD static auto da(auto, auto) { return 1; }
  COHORT_HD static auto db(auto, auto) { return -1; }
};
struct Mul : BinaryOp {
  COHORT_HD static auto forward(auto a, auto b) { return a * b; }
  COHORT_HD static auto da(auto, auto b) { return b; }
  COHORT_HD static auto db(auto a, auto) { return a; }
};
struct Div : BinaryOp {
  COHORT_HD static auto forward(auto a, auto b) { return a / b; }
  COHORT_HD static auto da(auto, auto b) { return 1 / b; }
  COHORT_HD static auto db(auto a, auto b) { return -a / (b * b); }
};
struct SigmoidGate : BinaryOp {  // a sigmoid(b)
  COHORT_HD static auto forward(auto a, auto b) { return a * vsigmoid(b); }
  COHORT_HD static auto da(auto, auto b) { return vsigmoid(b); }
  COHORT_HD static auto db(auto a, auto b) {
    const auto s = vsigmoid(b);
    return a * s * (1 - s);
  }
};

// Gated: y = forward(gate, up) of the two halves of a row, which one GEMM computes side by side.
struct GatedOp {
  using ForwardArgs = GatedForward;
  using BackwardArgs = GatedBackward;
};
// y = f(gate) up with a unary f whose derivative does not use its output.
template <class Unary>
struct GatedUnary : GatedOp {
  COHORT_HD static auto forward(auto gate, auto up) { return Unary::forward(gate) * up; }
  COHORT_HD static auto da(auto gate, auto up) { return Unary::derivative(gate, gate) * up; }
  COHORT_HD static auto db(auto gate, auto) { return Unary::forward(gate); }
};
struct SwiGlu : GatedUnary<Silu> {};  // Shazeer 2020
struct GeGlu : GatedUnary<Gelu> {};
struct GeGluTanh : GatedUnary<GeluTanh> {};  // Gemma's

// clang-format off
#define COHORT_UNARY_OPS(X) \
  X(Neg, neg) X(Exp, exp) X(Log, log) X(Sqrt, sqrt) X(Square, square) X(Tanh, tanh) \
  X(Sigmoid, sigmoid) X(Relu, relu) X(Silu, silu) X(Gelu, gelu) X(GeluTanh, gelu_tanh)
#define COHORT_BINARY_OPS(X) \
  X(Add, add) X(Sub, sub) X(Mul, mul) X(Div, div) X(SigmoidGate, sigmoid_gate)
#define COHORT_GATED_OPS(X) X(SwiGlu, swiglu) X(GeGlu, geglu) X(GeGluTanh, geglu_tanh)
// clang-format on
#define COHORT_ELEMENTWISE_OPS(X) COHORT_UNARY_OPS(X) COHORT_BINARY_OPS(X) COHORT_GATED_OPS(X)

// exp_forward(const UnaryForward&), add_backward(const BinaryBackward&), ...
#define COHORT_DECLARE(Op, name)                                   \
  COHORT_KERNEL(void name##_forward(const Op::ForwardArgs& args)); \
  COHORT_KERNEL(void name##_backward(const Op::BackwardArgs& args));
COHORT_ELEMENTWISE_OPS(COHORT_DECLARE)
#undef COHORT_DECLARE

// y (+)= factor x. On CUDA one may be bf16 and the other f32, to add a bf16 gradient to an f32 one.
struct Scale {
  Tensor& y;  // may be x when overwriting
  const Tensor& x;
  double factor;
  Grad mode = Grad::kOverwrite;
};
COHORT_KERNEL(void scale(const Scale& args));

// Scale with a factor that is read on the tensors' device.
struct ScaleBy {
  Tensor& y;
  const Tensor& x;
  const Tensor& factor;  // one element of accumulate_dtype(x)
  Grad mode = Grad::kOverwrite;
};
COHORT_KERNEL(void scale_by(const ScaleBy& args));

// y[0] (+)= sum of x, in a fixed order: blocks of elements in x's arithmetic, summed up in f64.
struct Sum {
  Tensor& y;  // [1] or [], accumulate_dtype(x)
  const Tensor& x;
  Grad mode = Grad::kOverwrite;
};
COHORT_KERNEL(void sum(const Sum& args));

// x (+)= value[0] everywhere.
struct BroadcastScalar {
  Tensor& x;
  const Tensor& value;  // one element of accumulate_dtype(x)
  Grad mode = Grad::kOverwrite;
};
COHORT_KERNEL(void broadcast_scalar(const BroadcastScalar& args));

}  // namespace cohort::kernels
