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

void check_unary_backward(const UnaryBackward& args, const char* op) {
  const Tensor& x = args.x;
  check_like(x, {{x, "x"}, {args.y, "y"}, {args.dy, "dy"}, {args.dx.tensor, "dx"}}, op);
}
void check_binary_backward(const BinaryBackward& args, const char* op) {
  const Tensor& a = args.a;
  check_like(a, {{a, "a"}, {args.b, "b"}, {args.dy, "dy"}}, op);
  check_grad(args.da, a.shape(), a.dtype(), op, "da", a.device());
  check_grad(args.db, a.shape(), a.dtype(), op, "db", a.device());
}
// x has the halves of each row of y, or of its gradient.
void check_gated(const Tensor& y, const Tensor& x, const char* op, const char* name) {
  COHORT_CHECK(x.rank() >= 1 && x.dim(-1) % 2 == 0, "[", op,
               "] expected x with rows of two halves, got ", x.str());
  Shape half = x.shape();
  half[-1] /= 2;
  check_tensor(x, x.shape(), x.dtype(), op, "x", x.device());
  check_tensor(y, half, x.dtype(), op, name, x.device());
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

#define COHORT_DEFINE_UNARY(Op, name)                                              \
  void name##_forward(const UnaryForward& args) {                                  \
    check_like(args.x, {{args.x, "x"}, {args.y, "y"}}, #name);                     \
    on_device<cpu::name##_forward, cuda::name##_forward>(args.x.device(), args);   \
  }                                                                                \
  void name##_backward(const UnaryBackward& args) {                                \
    check_unary_backward(args, #name "_backward");                                 \
    on_device<cpu::name##_backward, cuda::name##_backward>(args.x.device(), args); \
  }
COHORT_UNARY_OPS(COHORT_DEFINE_UNARY)
#undef COHORT_DEFINE_UNARY

#define COHORT_DEFINE_BINARY(Op, name)                                             \
  void name##_forward(const BinaryForward& args) {                                 \
    check_like(args.a, {{args.a, "a"}, {args.b, "b"}, {args.y, "y"}}, #name);      \
    on_device<cpu::name##_forward, cuda::name##_forward>(args.a.device(), args);   \
  }                                                                                \
  void name##_backward(const BinaryBackward& args) {                               \
    check_binary_backward(args, #name "_backward");                                \
    on_device<cpu::name##_backward, cuda::name##_backward>(args.a.device(), args); \
  }
COHORT_BINARY_OPS(COHORT_DEFINE_BINARY)
#undef COHORT_DEFINE_BINARY

#define COHORT_DEFINE_GATED(Op, name)                                                        \
  void name##_forward(const GatedForward& args) {                                            \
    check_gated(args.y, args.x, #name, "y");                                                 \
    on_device<cpu::name##_forward, cuda::name##_forward>(args.x.device(), args);             \
  }                                                                                          \
  void name##_backward(const GatedBackward& args) {                                          \
    const Tensor& x = args.x;                                                                \
    check_gated(args.dy, x, #name "_backward", "dy");                                        \
    check_tensor(args.dx.tensor, x.shape(), x.dtype(), #name "_backward", "dx", x.device()); \
    if (args.y.defined()) check_gated(args.y, x, #name "_backward", "y");                    \
    on_device<cpu::name##_backward, cuda::name##_backward>(x.device(), args);                \
  }
COHORT_GATED_OPS(COHORT_DEFINE_GATED)
#undef COHORT_DEFINE_GATED

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
