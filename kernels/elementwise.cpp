#include "kernels/elementwise.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {
namespace {

void check(const UnaryForward& args, ArgumentCheck check) {
  check("[...] x, y", args.x, args.y);
}
void check(const UnaryBackward& args, ArgumentCheck check) {
  check("[...] x, y, dy, dx", args.x, args.y, args.dy, args.dx);
}
void check(const BinaryForward& args, ArgumentCheck check) {
  check("[...] a, b, y", args.a, args.b, args.y);
}
void check(const BinaryBackward& args, ArgumentCheck check) {
  check("[...] a, b, dy, da?, db?", args.a, args.b, args.dy, args.da, args.db);
}
void check(const GatedForward& args, ArgumentCheck check) {
  check("[..., 2 F] x; [..., F] y", args.x, args.y);
}
void check(const GatedBackward& args, ArgumentCheck check) {
  check("[..., 2 F] x, dx; [..., F] dy, y?", args.x, args.dx, args.dy, args.y);
}

// On CUDA y may have another float dtype than x.
ArgumentCheck check_scale(const char* op, const Tensor& y, const Tensor& x) {
  ArgumentCheck check(op);
  check("[...] x", x);
  if (x.device().is_cuda() && is_float(y.dtype()))
    check("any [...] y", y);
  else
    check("[...] y", y);
  return check;
}

}  // namespace

#define COHORT_DEFINE(Op, name)                                                     \
  void name##_forward(const Op::ForwardArgs& args) {                                \
    check(args, ArgumentCheck(#name));                                              \
    on_device<cpu::name##_forward, cuda::name##_forward>(args.y.device(), args);    \
  }                                                                                 \
  void name##_backward(const Op::BackwardArgs& args) {                              \
    check(args, ArgumentCheck(#name "_backward"));                                  \
    on_device<cpu::name##_backward, cuda::name##_backward>(args.dy.device(), args); \
  }
COHORT_ELEMENTWISE_OPS(COHORT_DEFINE)
#undef COHORT_DEFINE

void scale(const Scale& args) {
  check_scale("scale", args.y, args.x);
  on_device<cpu::scale, cuda::scale>(args.x.device(), args);
}

void scale_by(const ScaleBy& args) {
  check_scale("scale_by", args.y, args.x)("accumulate (1, 1) factor", args.factor);
  on_device<cpu::scale_by, cuda::scale_by>(args.x.device(), args);
}

void sum(const Sum& args) {
  ArgumentCheck("sum")("[...] x; accumulate (1, 1) y", args.x, args.y);
  on_device<cpu::sum, cuda::sum>(args.x.device(), args);
}

void broadcast_scalar(const BroadcastScalar& args) {
  ArgumentCheck("broadcast_scalar")("[...] x; accumulate (1, 1) value", args.x, args.value);
  on_device<cpu::broadcast_scalar, cuda::broadcast_scalar>(args.x.device(), args);
}

}  // namespace cohort::kernels
