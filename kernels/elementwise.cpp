#include "kernels/elementwise.h"

#include <initializer_list>

#include "core/with_cuda.h"

namespace cohort::kernels {
namespace {

struct Named {
  const Tensor& tensor;
  const char* name;
};
// Throws unless all have the shape, dtype and device of x.
void check_like(const Tensor& x, std::initializer_list<Named> tensors, const char* op) {
  for (const Named& t : tensors)
    check_tensor(t.tensor, x.shape(), x.dtype(), op, t.name, x.device());
}

void check(const UnaryForward& args, const char* op) {
  check_like(args.x, {{args.x, "x"}, {args.y, "y"}}, op);
}
void check(const UnaryBackward& args, const char* op) {
  const Tensor& x = args.x;
  check_like(x, {{x, "x"}, {args.y, "y"}, {args.dy, "dy"}, {args.dx.tensor, "dx"}}, op);
}
void check(const BinaryForward& args, const char* op) {
  check_like(args.a, {{args.a, "a"}, {args.b, "b"}, {args.y, "y"}}, op);
}
void check(const BinaryBackward& args, const char* op) {
  const Tensor& a = args.a;
  check_like(a, {{a, "a"}, {args.b, "b"}, {args.dy, "dy"}}, op);
  check_grad(args.da, a.shape(), a.dtype(), op, "da", a.device());
  check_grad(args.db, a.shape(), a.dtype(), op, "db", a.device());
}
// x has the halves of each row of y, or of its gradient.
void check_halves(const Tensor& y, const Tensor& x, const char* op, const char* name) {
  COHORT_CHECK(x.rank() >= 1 && x.dim(-1) % 2 == 0, "[", op,
               "] expected x with rows of two halves, got ", x.str());
  Shape half = x.shape();
  half[-1] /= 2;
  check_tensor(x, x.shape(), x.dtype(), op, "x", x.device());
  check_tensor(y, half, x.dtype(), op, name, x.device());
}
void check(const GatedForward& args, const char* op) {
  check_halves(args.y, args.x, op, "y");
}
void check(const GatedBackward& args, const char* op) {
  check_halves(args.dy, args.x, op, "dy");
  check_like(args.x, {{args.dx.tensor, "dx"}}, op);
  if (args.y.defined()) check_halves(args.y, args.x, op, "y");
}
void check_scalar(const Tensor& value, const Tensor& x, const char* op, const char* name) {
  COHORT_CHECK(value.numel() == 1, "[", op, "] expected ", name, " of one element, got ",
               value.str());
  check_tensor(value, value.shape(), accumulate_dtype(x.dtype()), op, name, x.device());
}
// On CUDA y may have another float dtype than x.
void check_scale(const Tensor& y, const Tensor& x, const char* op) {
  check_tensor(x, x.shape(), x.dtype(), op, "x", x.device());
  const bool mixed = x.device().is_cuda() && is_float(y.dtype());
  check_tensor(y, x.shape(), mixed ? y.dtype() : x.dtype(), op, "y", x.device());
}

}  // namespace

#define COHORT_DEFINE(Op, name)                                                     \
  void name##_forward(const Op::ForwardArgs& args) {                                \
    check(args, #name);                                                             \
    on_device<cpu::name##_forward, cuda::name##_forward>(args.y.device(), args);    \
  }                                                                                 \
  void name##_backward(const Op::BackwardArgs& args) {                              \
    check(args, #name "_backward");                                                 \
    on_device<cpu::name##_backward, cuda::name##_backward>(args.dy.device(), args); \
  }
COHORT_ELEMENTWISE_OPS(COHORT_DEFINE)
#undef COHORT_DEFINE

void scale(const Scale& args) {
  check_scale(args.y, args.x, "scale");
  on_device<cpu::scale, cuda::scale>(args.x.device(), args);
}

void scale_by(const ScaleBy& args) {
  check_scale(args.y, args.x, "scale_by");
  check_scalar(args.factor, args.x, "scale_by", "factor");
  on_device<cpu::scale_by, cuda::scale_by>(args.x.device(), args);
}

void sum(const Sum& args) {
  const auto& [y, x, mode] = args;
  COHORT_CHECK(y.numel() == 1 && y.rank() <= 1, "[sum] expected y of one element, got ", y.str());
  check_tensor(x, x.shape(), x.dtype(), "sum", "x", x.device());
  check_scalar(y, x, "sum", "y");
  on_device<cpu::sum, cuda::sum>(x.device(), args);
}

void broadcast_scalar(const BroadcastScalar& args) {
  const Tensor& x = args.x;
  check_tensor(x, x.shape(), x.dtype(), "broadcast_scalar", "x", x.device());
  check_scalar(args.value, x, "broadcast_scalar", "value");
  on_device<cpu::broadcast_scalar, cuda::broadcast_scalar>(x.device(), args);
}

}  // namespace cohort::kernels
