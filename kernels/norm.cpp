#include "kernels/norm.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

void rms_norm_forward(const RmsNormForward& args) {
  ArgumentCheck check("rms_norm");
  check("strided [..., C] x, y; [C] w; accumulate [rows] rstd", args.x, args.y, args.w, args.rstd);
  on_device<cpu::rms_norm_forward, cuda::rms_norm_forward>(args.x.device(), args);
}

void rms_norm_backward(const RmsNormBackward& args) {
  ArgumentCheck check("rms_norm_backward");
  check("strided [..., C] x, dy, dx?; [C] w; accumulate [rows] rstd; accumulate [C] dw?", args.x,
        args.dy, args.dx, args.w, args.rstd, args.dw);
  on_device<cpu::rms_norm_backward, cuda::rms_norm_backward>(args.x.device(), args);
}

void layer_norm_forward(const LayerNormForward& args) {
  ArgumentCheck check("layer_norm");
  check("[..., C] x; strided [..., C] y; [C] w, b?; accumulate [rows] rstd, mean", args.x, args.y,
        args.w, args.b, args.rstd, args.mean);
  on_device<cpu::layer_norm_forward, cuda::layer_norm_forward>(args.x.device(), args);
}

void layer_norm_backward(const LayerNormBackward& args) {
  ArgumentCheck check("layer_norm_backward");
  check("[..., C] x, dy, dx?; [C] w; accumulate [rows] rstd, mean; accumulate [C] dw?, db?", args.x,
        args.dy, args.dx, args.w, args.rstd, args.mean, args.dw, args.db);
  on_device<cpu::layer_norm_backward, cuda::layer_norm_backward>(args.x.device(), args);
}

void add_rms_norm_forward(const AddRmsNormForward& args) {
  ArgumentCheck check("add_rms_norm");
  check("[..., C] a, b, sum; strided [..., C] y; [C] w; accumulate [rows] rstd", args.a, args.b,
        args.sum, args.y, args.w, args.rstd);
  on_device<cpu::add_rms_norm_forward, cuda::add_rms_norm_forward>(args.a.device(), args);
}

void add_layer_norm_forward(const AddLayerNormForward& args) {
  ArgumentCheck check("add_layer_norm");
  check("[..., C] a, b, sum; strided [..., C] y; [C] w, bias?; accumulate [rows] rstd, mean",
        args.a, args.b, args.sum, args.y, args.w, args.bias, args.rstd, args.mean);
  on_device<cpu::add_layer_norm_forward, cuda::add_layer_norm_forward>(args.a.device(), args);
}

}  // namespace cohort::kernels
