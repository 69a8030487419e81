#include "nn/modules.h"

#include <cmath>

namespace cohort {

double output_init_std(const ModelConfig& config) {
  return config.init_std / std::sqrt(2.0 * static_cast<double>(config.num_layers));
}

kernels::DropoutSpec dropout_spec(double p, const Pass& pass, int layer, DropoutSite site) {
  kernels::DropoutSpec spec;
  if (pass.options.mode == Mode::kEval || p == 0) return spec;
  spec.p = p;
  spec.seed = pass.options.seed;
  spec.stream = dropout_stream(pass.options.step, layer + 1, site);
  spec.sequences = pass.sequences;
  spec.positions = pass.positions;
  return spec;
}

Linear::Linear(const MakeParameter& make, std::initializer_list<Part> parts, int64_t in, double std,
               Bias has_bias) {
  using Use = ParameterSpec::Use;
  int64_t rows = 0, first = 0;
  for (const Part& part : parts) rows += part.out;
  for (const Part& part : parts) {
    weight = make({.name = part.name + ".weight",
                   .shape = {part.out, in},
                   .use = Use::kMatmul,
                   .init = std,
                   .leaf = weight,
                   .first_row = first,
                   .leaf_rows = rows});
    if (has_bias == Bias::kYes)
      bias = make({.name = part.name + ".bias",
                   .shape = {part.out},
                   .use = Use::kVector,
                   .leaf = bias,
                   .first_row = first,
                   .leaf_rows = rows});
    first += part.out;
  }
}

Norm::Norm(const MakeParameter& make, const std::string& name, const ModelConfig& c)
    : type_(c.norm), recompute_(c.recompute), eps_(c.norm_eps), weight_offset_(c.norm_offset) {
  // The sum of weight and offset starts from 1.
  weight_ = make({name + ".weight", {c.d_model}, ParameterSpec::Use::kVector, 1 - c.norm_offset});
  if (c.norm == NormType::kLayer && c.bias)
    bias_ = make({name + ".bias", {c.d_model}, ParameterSpec::Use::kVector, 0});
}

Variable Norm::apply(std::span<const Variable> in) const {
  return type_ == NormType::kRms ? rms_norm(in[0], in[1], eps_, weight_offset_)
                                 : layer_norm(in[0], in[1], in[2], eps_);
}

Variable Norm::keep(const Variable& y, const Variable& x) const {
  if (recompute_ != Recompute::kCheap) return y;
  const Variable inputs[] = {x, weight_, bias_};
  return recomputable(
      y, [norm = *this](std::span<const Variable> in) { return norm.apply(in); }, inputs);
}

Variable Norm::operator()(const Variable& x) const {
  const Variable inputs[] = {x, weight_, bias_};
  return keep(apply(inputs), x);
}

AddNorm Norm::add(const Variable& a, const Variable& b) const {
  const AddNorm y = type_ == NormType::kRms ? add_rms_norm(a, b, weight_, eps_, weight_offset_)
                                            : add_layer_norm(a, b, weight_, bias_, eps_);
  return {y.sum, keep(y.normed, y.sum)};
}

SelfAttention::SelfAttention(const MakeParameter& make, const std::string& name,
                             const ModelConfig& c, int layer)
    : layer_(layer),
      num_heads_(c.num_heads),
      num_kv_heads_(c.num_kv_heads),
      head_dim_(c.head_dim),
      window_(c.window_of(layer)),
      dropout_(c.dropout),
      norm_eps_(c.norm_eps),
      rotary_(c.is_rotary(layer)) {
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  qkv_ =
      Linear(make, {{name + ".q_proj", q}, {name + ".k_proj", kv}, {name + ".v_proj", kv}},
             c.d_model, c.init_std, c.bias || c.qkv_bias ? Linear::Bias::kYes : Linear::Bias::kNo);
  o_ = Linear(make, {{name + ".o_proj", c.d_model}}, q, output_init_std(c),
              c.bias || c.o_bias ? Linear::Bias::kYes : Linear::Bias::kNo);
  if (c.qk_norm || c.qk_norm_whole) {
    const auto weight = [&](const char* norm, int64_t size) {
      return make({name + norm, {size}, ParameterSpec::Use::kVector, 1});
    };
    q_norm_ = weight(".q_norm.weight", c.qk_norm ? c.head_dim : q);
    k_norm_ = weight(".k_norm.weight", c.qk_norm ? c.head_dim : kv);
  }
}

Variable SelfAttention::operator()(const Variable& x, const Pass& pass) const {
  const int64_t tokens = x.value().rows();
  AttentionCall call{.layer = layer_, .num_kv_heads = num_kv_heads_};
  call.desc.window = window_;
  call.desc.dropout = dropout_spec(dropout_, pass, layer_, DropoutSite::kAttention);
  if (rotary_) call.rope_table = pass.rope_table;
  call.qkv = reshape(qkv_(x), {tokens, num_heads_ + 2 * num_kv_heads_, head_dim_});
  if (q_norm_.defined())
    call.qkv = qk_norm(std::move(call.qkv), {q_norm_, k_norm_}, num_kv_heads_, norm_eps_);
  const Variable o = pass.attention(std::move(call));
  return o_(reshape(o, {tokens, num_heads_ * head_dim_}));
}

Mlp::Mlp(const MakeParameter& make, const std::string& name, const ModelConfig& c)
    : type_(c.mlp), recompute_(c.recompute) {
  const auto bias = c.bias || c.mlp_bias ? Linear::Bias::kYes : Linear::Bias::kNo;
  const Linear::Part gate{name + ".gate_proj", c.d_ff}, up{name + ".up_proj", c.d_ff};
  up_ = is_gated(c.mlp) ? Linear(make, {gate, up}, c.d_model, c.init_std, bias)
                        : Linear(make, {up}, c.d_model, c.init_std, bias);
  down_ = Linear(make, {{name + ".down_proj", c.d_model}}, c.d_ff, output_init_std(c), bias);
}

Variable Mlp::operator()(const Variable& x) const {
  return mlp(x, {up_.weight, up_.bias, down_.weight, down_.bias},
             {.activation = type_, .recompute = recompute_ == Recompute::kCheap});
}

}  // namespace cohort
