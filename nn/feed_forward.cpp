#include "nn/feed_forward.h"

#include <utility>

#include "kernels/matmul.h"

namespace cohort {
namespace {

struct MlpBackward {
  enum { kX, kUp, kUpBias, kDown, kDownBias };  // inputs of the node
  SavedTensor x;
  Tensor u, f;  // u = up(x); f(u), or undefined if it is not kept
  Tensor up, down;
  kernels::Activation op;

  // Frees u, f and their gradients after their last use: a step's memory is at its peak here.
  void operator()(const Tensor& dy, Gradients& g) {
    const bool needs_du = g.needed(kX) || g.needed(kUp) || g.needed(kUpBias);
    const bool needs_f = g.needed(kDown) && !f.defined();
    const auto down_gradient = [&](const Tensor& value) {
      linear_weight_gradient(dy, SavedTensor(Variable(value)), g.weight_slot(kDown));
    };
    linear_bias_gradient(dy, g.weight_slot(kDownBias));
    if (f.defined()) down_gradient(std::exchange(f, {}));
    if (needs_f) f = empty_rows(u, down.dim(1));
    Tensor du;
    if (needs_du) {
      du = Tensor::empty_like(u);
      kernels::linear_activation_backward({.du = du,
                                           .dbias = g.weight_slot(kUpBias),
                                           .dy = dy,
                                           .w = down,
                                           .u = u,
                                           .op = op,
                                           .y = f});
    } else if (needs_f) {
      kernels::activation_forward({.y = f, .u = u, .op = op});
    }
    u = {};
    if (needs_f) down_gradient(std::exchange(f, {}));
    if (!needs_du) return;
    linear_input_gradient(du, up, g.slot(kX));
    linear_weight_gradient(du, x, g.weight_slot(kUp));
  }
};

}  // namespace

Variable mlp(const Variable& x, const Linear& up, const Linear& down, const MlpDesc& desc) {
  const Tensor &w_up = up.weight.value(), &w_down = down.weight.value();
  const Variable inputs[] = {x, up.weight, up.bias, down.weight, down.bias};
  Tensor u = needs_gradient(inputs) ? empty_rows(x.value(), w_up.dim(0)) : Tensor();
  Tensor f = empty_rows(x.value(), w_down.dim(1));
  kernels::linear_activation(
      {.y = f, .x = x.value(), .w = w_up, .bias = up.bias.value(), .op = desc.activation, .u = u});
  Tensor y = empty_rows(x.value(), w_down.dim(0));
  kernels::linear_forward({.y = y, .x = f, .w = w_down, .bias = down.bias.value()});
  return make_node("mlp", y, inputs,
                   MlpBackward{.x = SavedTensor(x),
                               .u = u,
                               .f = desc.recompute ? Tensor() : f,
                               .up = w_up,
                               .down = w_down,
                               .op = desc.activation});
}

Mlp::Mlp(ParameterSet& set, const std::string& name, const ModelConfig& c)
    : desc_{.activation = c.mlp, .recompute = c.recompute == Recompute::kCheap} {
  const auto bias = c.bias || c.mlp_bias ? Linear::Bias::kYes : Linear::Bias::kNo;
  const Linear::Part gate{name + ".gate_proj", c.d_ff}, up{name + ".up_proj", c.d_ff};
  up_ = is_gated(c.mlp) ? Linear::make(set, {gate, up}, c.d_model, c.init_std, bias)
                        : Linear::make(set, {up}, c.d_model, c.init_std, bias);
  down_ = Linear::make(set, {{name + ".down_proj", c.d_model}}, c.d_ff, output_init_std(c), bias);
}

Variable Mlp::operator()(const Variable& x) const {
  return mlp(x, up_, down_, desc_);
}

}  // namespace cohort
