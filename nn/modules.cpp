#include "nn/modules.h"

#include <cmath>

namespace cohort {
namespace {

// Keeps y, or with recompute: cheap what it is made of.
template <class Op>
Variable keep_or_recompute(Recompute recompute, const Variable& y, const Op& op,
                           std::initializer_list<Variable> inputs) {
  if (recompute != Recompute::kCheap) return y;
  return recomputable(y, op, std::span<const Variable>(inputs.begin(), inputs.size()));
}

void append(Parameters& all, std::initializer_list<const Linear*> layers) {
  for (const Linear* layer : layers)
    for (const Variable* v : {&layer->weight, &layer->bias})
      if (v->defined()) all.push_back(*v);
}

}  // namespace

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

Linear::Linear(const MakeParameter& make, const std::string& name, int64_t out, int64_t in,
               double std, Bias has_bias)
    : weight(make({name + ".weight", {out, in}, ParameterSpec::Use::kProduct, std})) {
  if (has_bias == Bias::kYes) bias = make({name + ".bias", {out}, ParameterSpec::Use::kVector, 0});
}

Norm::Norm(const MakeParameter& make, const std::string& name, const ModelConfig& c)
    : type_(c.norm), recompute_(c.recompute), eps_(c.norm_eps), weight_offset_(c.norm_offset) {
  // Weight and offset together start from 1.
  weight_ = make({name + ".weight", {c.d_model}, ParameterSpec::Use::kVector, 1 - c.norm_offset});
  if (c.norm == NormType::kLayer && c.bias)
    bias_ = make({name + ".bias", {c.d_model}, ParameterSpec::Use::kVector, 0});
}

Norm Norm::rms(const MakeParameter& make, const std::string& name, const ModelConfig& c,
               int64_t size) {
  Norm norm;
  norm.eps_ = c.norm_eps;
  norm.weight_ = make({name + ".weight", {size}, ParameterSpec::Use::kVector, 1});
  return norm;
}

Variable Norm::apply(std::span<const Variable> in) const {
  return type_ == NormType::kRms ? rms_norm(in[0], in[1], eps_, weight_offset_)
                                 : layer_norm(in[0], in[1], in[2], eps_);
}

Variable Norm::keep(const Variable& y, const Variable& x) const {
  return keep_or_recompute(recompute_, y,
                           [norm = *this](std::span<const Variable> in) { return norm.apply(in); },
                           {x, weight_, bias_});
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

void Norm::append_to(Parameters& all) const {
  for (const Variable* v : {&weight_, &bias_})
    if (v->defined()) all.push_back(*v);
}

SelfAttention::SelfAttention(const MakeParameter& make, const std::string& name,
                             const ModelConfig& c, int layer)
    : layer_(layer),
      num_heads_(c.num_heads),
      num_kv_heads_(c.num_kv_heads),
      head_dim_(c.head_dim),
      window_(c.window_of(layer)),
      dropout_(c.dropout),
      rotary_(c.is_rotary(layer)),
      norm_each_head_(c.qk_norm) {
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  const auto bias = c.bias || c.qkv_bias ? Linear::Bias::kYes : Linear::Bias::kNo;
  q_ = Linear(make, name + ".q_proj", q, c.d_model, c.init_std, bias);
  k_ = Linear(make, name + ".k_proj", kv, c.d_model, c.init_std, bias);
  v_ = Linear(make, name + ".v_proj", kv, c.d_model, c.init_std, bias);
  o_ = Linear(make, name + ".o_proj", c.d_model, q, output_init_std(c),
              c.bias || c.o_bias ? Linear::Bias::kYes : Linear::Bias::kNo);
  if (c.qk_norm || c.qk_norm_whole) {
    q_norm_ = Norm::rms(make, name + ".q_norm", c, c.qk_norm ? c.head_dim : q);
    k_norm_ = Norm::rms(make, name + ".k_norm", c, c.qk_norm ? c.head_dim : kv);
  }
}

// [T, count, D], normalised head by head, all heads of a token together, or not at all.
Variable SelfAttention::heads(const Variable& x, const Linear& projection, const Norm& norm,
                              int64_t count) const {
  Variable y = projection(x);
  if (norm.defined() && !norm_each_head_) y = norm(y);
  y = reshape(y, {x.value().rows(), count, head_dim_});
  return norm.defined() && norm_each_head_ ? norm(y) : y;
}

Variable SelfAttention::operator()(const Variable& x, const Pass& pass) const {
  Variable q = heads(x, q_, q_norm_, num_heads_), k = heads(x, k_, k_norm_, num_kv_heads_);
  const Variable v = heads(x, v_, {}, num_kv_heads_);
  if (rotary_) {
    q = rope(q, pass.positions, pass.rope_table);
    k = rope(k, pass.positions, pass.rope_table);
  }
  kernels::AttentionDesc desc;
  desc.window = window_;
  desc.dropout = dropout_spec(dropout_, pass, layer_, DropoutSite::kAttention);
  const Variable o = pass.attend(layer_, desc, q, k, v);
  return o_(reshape(o, {x.value().rows(), num_heads_ * head_dim_}));
}

void SelfAttention::append_to(Parameters& all) const {
  append(all, {&q_, &k_, &v_, &o_});
  for (const Norm* norm : {&q_norm_, &k_norm_}) norm->append_to(all);
}

Mlp::Mlp(const MakeParameter& make, const std::string& name, const ModelConfig& c)
    : type_(c.mlp), recompute_(c.recompute) {
  const auto bias = c.bias || c.mlp_bias ? Linear::Bias::kYes : Linear::Bias::kNo;
  if (is_gated(c.mlp))
    gate_ = Linear(make, name + ".gate_proj", c.d_ff, c.d_model, c.init_std, bias);
  up_ = Linear(make, name + ".up_proj", c.d_ff, c.d_model, c.init_std, bias);
  down_ = Linear(make, name + ".down_proj", c.d_model, c.d_ff, output_init_std(c), bias);
}

Variable Mlp::operator()(const Variable& x) const {
  const Variable up = up_(x), gate = is_gated(type_) ? gate_(x) : Variable();
  const auto activation = [type = type_](std::span<const Variable> in) {
    switch (type) {
      case MlpType::kGelu:
        return gelu(in[0]);
      case MlpType::kGeluTanh:
        return gelu_tanh(in[0]);
      case MlpType::kGeGlu:
        return geglu(in[1], in[0]);
      case MlpType::kGeGluTanh:
        return geglu_tanh(in[1], in[0]);
      default:
        return swiglu(in[1], in[0]);
    }
  };
  const Variable inputs[] = {up, gate};
  return down_(keep_or_recompute(recompute_, activation(inputs), activation, {up, gate}));
}

void Mlp::append_to(Parameters& all) const {
  append(all, {&gate_, &up_, &down_});
}

}  // namespace cohort
