#include "nn/feed_forward.h"

#include <utility>

#include "kernels/matmul.h"

namespace cohort {
namespace {

struct MlpBackward {
  enum { kX, kUp, kUpBias, kDown, kDownBias, kUpA, kUpB, kDownA, kDownB };  // inputs of the node
  SavedTensor x;
  Tensor u, f;  // u = up(x); f(u), or undefined if it is not kept
  LayerWeight up, down;
  LoraBackward up_adapter, down_adapter;
  kernels::Activation op;

  // Frees u, f and their gradients after their last use: a step's memory is at its peak here.
  void operator()(const Tensor& dy, Gradients& g) {
    const bool needs_du =
        g.needed(kX) || g.needed(kUp) || g.needed(kUpBias) || up_adapter.defined();
    const bool needs_f = (g.needed(kDown) || down_adapter.defined()) && !f.defined();
    linear_bias_gradient(dy, g.weight_slot(kDownBias));
    Tensor dh;
    if (down_adapter.defined()) dh = down_adapter.output_gradients(dy, g.weight_slot(kDownB));
    const auto down_gradients = [&](const Tensor& value) {
      const SavedTensor input{Variable(value)};
      linear_weight_gradient(dy, input, g.weight_slot(kDown));
      if (dh.defined()) down_adapter.input_gradient(dh, input, g.weight_slot(kDownA));
    };
    if (f.defined()) down_gradients(std::exchange(f, {}));
    if (needs_f) f = empty_rows(u, down.leaf.shape()[1]);
    Tensor du;
    if (needs_du) {
      du = Tensor::empty_like(u);
      kernels::linear_activation_backward({.du = du,
                                           .dbias = g.weight_slot(kUpBias),
                                           .dy = dy,
                                           .w = down.values(),
                                           .u = u,
                                           .op = op,
                                           .y = f,
                                           .dh = dh,
                                           .a = dh.defined() ? down_adapter.a() : Tensor()});
    } else if (needs_f) {
      kernels::activation_forward({.y = f, .u = u, .op = op});
    }
    u = {};
    if (needs_f) down_gradients(std::exchange(f, {}));
    if (!needs_du) return;
    const GradSlot dx = g.slot(kX);
    linear_input_gradient(du, up.values(), dx);
    linear_weight_gradient(du, x, g.weight_slot(kUp));
    if (!up_adapter.defined()) return;
    dh = up_adapter.output_gradients(du, g.weight_slot(kUpB));
    up_adapter.input_gradient(dh, x, g.weight_slot(kUpA));
    linear_input_gradient(dh, up_adapter.a(), {dx.tensor, kernels::Grad::kAccumulate});
  }
};

}  // namespace

Variable mlp(const Variable& x, const Linear& up, const Linear& down, const MlpDesc& desc) {
  const bool on = desc.adapters.state == Adapters::kOn;
  const Lora up_lora = on ? up.lora : Lora(), down_lora = on ? down.lora : Lora();
  const Variable inputs[] = {x,         up.weight.leaf, up.bias,     down.weight.leaf, down.bias,
                             up_lora.a, up_lora.b,      down_lora.a, down_lora.b};
  const bool kept = needs_gradient(inputs);
  const int64_t rows = x.value().rows(), up_rows = up.weight.leaf.shape()[0];
  Tensor w = up.weight.for_rows(rows, up.bias.defined());
  Tensor u = kept || !w.defined() ? empty_rows(x.value(), up_rows) : Tensor();
  Tensor f = empty_rows(x.value(), down.weight.leaf.shape()[1], down.input_padding());
  LoraInputs in = lora_inputs(x.value(), up.lora, desc.adapters, kept);
  if (w.defined()) {
    kernels::linear_activation({.y = f,
                                .x = in.xh,
                                .w = w,
                                .bias = up.bias.value(),
                                .op = desc.activation,
                                .u = u,
                                .tail = up.input_padding()});
  } else {
    kernels::quantized_linear({u, in.xh, up.weight.quantized, up.weight.adapter, up.bias.value()});
    Tensor value = f.is_contiguous() ? f : Tensor::empty(f.shape(), f.dtype(), f.device());
    kernels::activation_forward({.y = value, .u = u, .op = desc.activation});
    if (!f.is_contiguous()) f.copy_(value);
  }
  LoraBackward up_adapter{up_lora, in.h, up.weight.adapter_columns()};
  w = {};  // not two of them at a time
  w = down.weight.for_rows(rows, down.bias.defined());
  in = lora_inputs(f, down.lora, desc.adapters, kept);
  Tensor y = empty_rows(x.value(), down.weight.leaf.shape()[0]);
  if (w.defined())
    kernels::linear_forward(
        {.y = y, .x = in.xh, .w = w, .bias = down.bias.value(), .tail = down.input_padding()});
  else
    kernels::quantized_linear(
        {y, in.xh, down.weight.quantized, down.weight.adapter, down.bias.value()});
  return make_node("mlp", y, inputs,
                   MlpBackward{.x = SavedTensor(x),
                               .u = u,
                               .f = desc.recompute ? Tensor() : f,
                               .up = up.weight,
                               .down = down.weight,
                               .up_adapter = std::move(up_adapter),
                               .down_adapter = {down_lora, in.h, down.weight.adapter_columns()},
                               .op = desc.activation});
}

Mlp::Mlp(ParameterSet& set, const std::string& name, const ModelConfig& c,
         const AdapterTargets& adapters)
    : desc_{.activation = c.mlp, .recompute = c.recompute == Recompute::kCheap} {
  const Linear::Bias bias{c.bias || c.family.mlp_bias};
  const Linear::Part gate{name + ".gate_proj", c.d_ff}, up{name + ".up_proj", c.d_ff};
  layers_[kUp] = is_gated(c.mlp)
                     ? Linear::make(set, {gate, up}, c.d_model, c.init_std, bias, adapters)
                     : Linear::make(set, {up}, c.d_model, c.init_std, bias, adapters);
  layers_[kDown] = Linear::make(set, {{name + ".down_proj", c.d_model}}, c.d_ff, output_init_std(c),
                                bias, adapters);
}

Variable Mlp::operator()(const Variable& x, const Pass& pass) const {
  MlpDesc desc = desc_;
  desc.adapters = pass.options.adapters;
  return mlp(x, layers_[kUp], layers_[kDown], desc);
}

}  // namespace cohort
