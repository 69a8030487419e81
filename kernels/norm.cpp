#include "kernels/norm.h"

#include "core/with_cuda.h"

namespace cohort::kernels {
namespace {

// Type of check_tensor() and check_rows().
using Check = void(const Tensor& t, const Shape& shape, DType dtype, const char* op,
                   const char* name, Device device);

// Checks common to all forwards.
void check_forward(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& w,
                   const char* op, Check* check = check_tensor) {
  const Device device = x.device();
  check(x, x.shape(), x.dtype(), op, "x", device);
  check_tensor(w, {x.cols()}, x.dtype(), op, "w", device);
  check_rows(y, x.shape(), x.dtype(), op, "y", device);
  check_tensor(rstd, {x.rows()}, accumulate_dtype(x.dtype()), op, "rstd", device);
}
// Further checks for layer norms.
void check_mean_and_bias(const Tensor& mean, const Tensor& x, const Tensor& b, const char* op) {
  if (b.defined()) check_tensor(b, {x.cols()}, x.dtype(), op, "b", x.device());
  check_tensor(mean, {x.rows()}, accumulate_dtype(x.dtype()), op, "mean", x.device());
}
// Further checks for the fused residual step.
void check_sum(const Tensor& sum, const Tensor& a, const Tensor& b, const char* op) {
  check_tensor(b, a.shape(), a.dtype(), op, "b", a.device());
  check_tensor(sum, a.shape(), a.dtype(), op, "sum", a.device());
}

// Checks common to all backwards.
template <class Args>
void check_backward(const Args& args, const char* op, Check* check = check_tensor) {
  const Shape &shape = args.x.shape(), columns = {args.x.cols()};
  const Device device = args.x.device();
  const DType dtype = args.x.dtype(), accumulate = accumulate_dtype(dtype);
  check(args.x, shape, dtype, op, "x", device);
  check(args.dy, shape, dtype, op, "dy", device);
  check_tensor(args.w, columns, dtype, op, "w", device);
  check_tensor(args.rstd, {args.x.rows()}, accumulate, op, "rstd", device);
  if (args.dx.wanted()) check(args.dx.tensor, shape, dtype, op, "dx", device);
  check_grad(args.dw, columns, accumulate, op, "dw", device);
}

}  // namespace

void rms_norm_forward(const RmsNormForward& args) {
  check_forward(args.y, args.rstd, args.x, args.w, "rms_norm", check_rows);
  on_device<cpu::rms_norm_forward, cuda::rms_norm_forward>(args.x.device(), args);
}

void rms_norm_backward(const RmsNormBackward& args) {
  check_backward(args, "rms_norm_backward", check_rows);
  on_device<cpu::rms_norm_backward, cuda::rms_norm_backward>(args.x.device(), args);
}

void layer_norm_forward(const LayerNormForward& args) {
  check_forward(args.y, args.rstd, args.x, args.w, "layer_norm");
  check_mean_and_bias(args.mean, args.x, args.b, "layer_norm");
  on_device<cpu::layer_norm_forward, cuda::layer_norm_forward>(args.x.device(), args);
}

void layer_norm_backward(const LayerNormBackward& args) {
  constexpr const char* kOp = "layer_norm_backward";
  const DType accumulate = accumulate_dtype(args.x.dtype());
  check_backward(args, kOp);
  check_tensor(args.mean, {args.x.rows()}, accumulate, kOp, "mean", args.x.device());
  check_grad(args.db, {args.x.cols()}, accumulate, kOp, "db", args.x.device());
  on_device<cpu::layer_norm_backward, cuda::layer_norm_backward>(args.x.device(), args);
}

void add_rms_norm_forward(const AddRmsNormForward& args) {
  check_sum(args.sum, args.a, args.b, "add_rms_norm");
  check_forward(args.y, args.rstd, args.a, args.w, "add_rms_norm");
  on_device<cpu::add_rms_norm_forward, cuda::add_rms_norm_forward>(args.a.device(), args);
}

void add_layer_norm_forward(const AddLayerNormForward& args) {
  constexpr const char* kOp = "add_layer_norm";
  check_sum(args.sum, args.a, args.b, kOp);
  check_forward(args.y, args.rstd, args.a, args.w, kOp);
  check_mean_and_bias(args.mean, args.a, args.bias, kOp);
  on_device<cpu::add_layer_norm_forward, cuda::add_layer_norm_forward>(args.a.device(), args);
}

}  // namespace cohort::kernels
