#include "autograd/lora.h"

#include "kernels/matmul.h"

namespace cohort {

using kernels::Grad;
using kernels::Transpose;

LoraInputs lora_inputs(const Tensor& x, const Lora& lora, const AdapterUse& use, bool keeps_h) {
  if (!lora.defined()) return {x, {}};
  const int64_t cols = x.cols(), columns = lora.columns();
  Tensor xh = x.with_padding();
  if (xh.cols() != cols + columns) {
    xh = Tensor::empty({x.rows(), cols + columns}, x.dtype(), x.device());
    xh.narrow(1, 0, cols).copy_(x.is_contiguous() ? x.reshape({x.rows(), cols}) : x);
  }
  Tensor tail = xh.narrow(1, cols, columns), h;
  if (use.state == Adapters::kOff) {
    tail.zero_();
    return {xh, h};
  }
  if (keeps_h) h = Tensor::empty({x.rows(), columns}, x.dtype(), x.device());
  kernels::lora_input(
      {.h = tail, .x = xh.narrow(1, 0, cols), .a = lora.a.value().with_padding(), .copy = h});
  COHORT_CHECK(lora.slots == 1 || !keeps_h, "[lora] several adapters have no gradients");
  if (lora.slots > 1) kernels::select_adapters({tail, columns / lora.slots, use.rows, use.table});
  return {xh, h};
}

Tensor LoraBackward::output_gradients(const Tensor& dy, GradSlot db) const {
  const int64_t columns = lora.columns();
  Tensor dh = Tensor::empty({dy.rows(), columns}, dy.dtype(), dy.device());
  kernels::lora_output_gradients({.dh = dh,
                                  .db = db,
                                  .dy = dy,
                                  .h = h,
                                  .sb = sb,
                                  .modules = lora.modules,
                                  .scale = lora.scale});
  return dh;
}

void LoraBackward::input_gradient(const Tensor& dh, const SavedTensor& x, GradSlot da) const {
  if (!da.tensor.defined()) return;
  kernels::matmul({.c = da.tensor,
                   .a = dh.narrow(1, 0, da.tensor.dim(0)),
                   .b = x.get(),
                   .desc = {.a = Transpose::kYes, .out = da.mode}});
}

Tensor LayerWeight::values() const {
  if (!is_quantized()) return leaf.value();
  const Tensor& shape = leaf.value();
  Tensor w = Tensor::empty(shape.shape(), shape.dtype(), shape.device());
  kernels::dequantize_weight({w, quantized});
  return w;
}

Tensor LayerWeight::with_adapter() const {
  if (!is_quantized()) return leaf.value().with_padding();
  if (!adapter.defined()) return values();
  const int64_t columns = quantized.columns, tail = adapter.dim(1);
  const Tensor all =
      Tensor::empty({adapter.dim(0), columns + tail}, adapter.dtype(), adapter.device());
  Tensor w = all.narrow(1, 0, columns);
  kernels::dequantize_weight({w, quantized});
  all.narrow(1, columns, tail).copy_(adapter);
  return all;
}

Tensor LayerWeight::adapter_columns() const {
  if (is_quantized()) return adapter;
  const Tensor all = leaf.value().with_padding();
  const int64_t columns = leaf.value().dim(1);
  return all.narrow(1, columns, all.dim(1) - columns);
}

Tensor LayerWeight::for_rows(int64_t rows, bool with_bias) const {
  const int64_t tail = adapter.defined() ? adapter.dim(1) : 0;
  const bool is_read =
      is_quantized() &&
      kernels::reads_quantized(rows, quantized, leaf.value().dtype(), tail, with_bias);
  return is_read ? Tensor() : with_adapter();
}

Variable lora_linear(const Variable& x, const LayerWeight& w, const Variable& bias,
                     const Lora& lora, const AdapterUse& use) {
  COHORT_CHECK(!w.leaf.requires_grad() && !bias.requires_grad(),
               "[lora] expected a frozen weight and bias");
  const Lora used = use.state == Adapters::kOn ? lora : Lora();
  const Variable inputs[] = {x, used.a, used.b};
  const Tensor weight = w.for_rows(x.value().rows(), bias.defined());
  const LoraInputs in = lora_inputs(x.value(), lora, use, needs_gradient(inputs));
  Tensor y = empty_rows(x.value(), w.leaf.shape()[0]);
  if (weight.defined())
    kernels::linear_forward(
        {.y = y, .x = in.xh, .w = weight, .bias = bias.value(), .tail = lora.columns()});
  else
    kernels::quantized_linear({y, in.xh, w.quantized, w.adapter, bias.value()});
  return make_node("lora_linear", y, inputs,
                   [x = SavedTensor(x), w, adapter = LoraBackward{used, in.h, w.adapter_columns()}](
                       const Tensor& dy, Gradients& g) {
                     const GradSlot dx = g.slot(0);
                     linear_input_gradient(dy, w.values(), dx);
                     if (!adapter.defined()) return;
                     const Tensor dh = adapter.output_gradients(dy, g.weight_slot(2));
                     adapter.input_gradient(dh, x, g.weight_slot(1));
                     linear_input_gradient(dh, adapter.a(), {dx.tensor, Grad::kAccumulate});
                   });
}

}  // namespace cohort
