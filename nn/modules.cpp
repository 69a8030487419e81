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
  spec.sequences = pass.batch.sequences;
  spec.positions = pass.batch.positions;
  return spec;
}

Linear Linear::make(ParameterSet& set, std::initializer_list<Part> parts, int64_t in, double std,
                    Bias has_bias, const AdapterTargets& adapters) {
  const bool biased = has_bias == Bias::kYes;
  const std::string& name = parts.begin()->name;
  const std::span<const Part> all(parts.begin(), parts.size());
  int64_t rows = 0, first = 0;
  for (const Part& part : parts) rows += part.rows;
  const ParameterLeaf weight = set.add_leaf({.name = name + ".weight",
                                             .shape = {rows, in},
                                             .use = ParameterUse::kMatmul,
                                             .init = std,
                                             .format = set.base_format(),
                                             .padding = lora_columns(adapters, all)});
  const bool is_frozen = set.base_format() != kernels::WeightFormat::kModel;
  const ParameterLeaf bias =
      biased ? set.add_leaf({.name = name + ".bias",
                             .shape = {rows},
                             .role = is_frozen ? ParameterRole::kFrozen : ParameterRole::kTrained})
             : ParameterLeaf();
  for (const Part& part : parts) {
    set.add_rows(weight, part.name + ".weight", first, part.rows);
    if (biased) set.add_rows(bias, part.name + ".bias", first, part.rows);
    first += part.rows;
  }
  LayerWeight layer(weight.variable);
  layer.quantized = weight.quantized;
  if (const int64_t columns = lora_columns(adapters, all); layer.is_quantized() && columns > 0)
    layer.adapter = Tensor::zeros({rows, columns}, set.dtype(), set.device());
  return {layer, bias.variable, add_lora(set, adapters, all, in)};
}

Variable Linear::operator()(const Variable& x, const AdapterUse& adapters) const {
  if (!lora.defined() && !weight.is_quantized()) return linear(x, weight.leaf, bias);
  return lora_linear(x, weight, bias, lora, adapters);
}

Norm::Norm(ParameterSet& set, const std::string& name, const ModelConfig& c)
    : type_(c.norm),
      recompute_(c.recompute),
      eps_(c.norm_eps),
      weight_offset_(c.family.norm_offset) {
  // The sum of weight and offset starts from 1.
  weight_ =
      set.add({name + ".weight", {c.d_model}, ParameterUse::kVector, 1 - c.family.norm_offset});
  if (c.norm == NormType::kLayer && c.bias) bias_ = set.add({name + ".bias", {c.d_model}});
}

Variable Norm::apply(std::span<const Variable> in, int64_t padding) const {
  return type_ == NormType::kRms ? rms_norm(in[0], in[1], {eps_, weight_offset_, padding})
                                 : layer_norm(in[0], in[1], in[2], {eps_, padding});
}

Variable Norm::keep(const Variable& y, const Variable& x) const {
  if (recompute_ != Recompute::kCheap) return y;
  const Variable inputs[] = {x, weight_, bias_};
  return recomputable(
      y, [norm = *this](std::span<const Variable> in) { return norm.apply(in, 0); }, inputs);
}

Variable Norm::operator()(const Variable& x) const {
  const Variable inputs[] = {x, weight_, bias_};
  return keep(apply(inputs, padding_), x);
}

kernels::KvScales Norm::kv_scales(Tensor& scales, const Tensor& w, const Tensor& bias) const {
  return {.scales = scales,
          .w = w,
          .bias = bias,
          .norm = weight_.value(),
          .norm_bias = bias_.value(),
          .norm_offset = weight_offset_};
}

AddNorm Norm::add(const Variable& a, const Variable& b) const {
  const AddNorm y = type_ == NormType::kRms
                        ? add_rms_norm(a, b, weight_, {eps_, weight_offset_, padding_})
                        : add_layer_norm(a, b, weight_, bias_, {eps_, padding_});
  return {y.sum, keep(y.normed, y.sum)};
}

SelfAttention::SelfAttention(ParameterSet& set, const std::string& name, const ModelConfig& c,
                             const AdapterTargets& adapters, int layer)
    : config_(&c), layer_(layer) {
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  layers_[kQkv] =
      Linear::make(set,
                   {{name + ".q_proj", c.attention_gate ? 2 * q : q},
                    {name + ".k_proj", kv},
                    {name + ".v_proj", kv}},
                   c.d_model, c.init_std,
                   Linear::Bias{(c.bias && !c.family.no_qkv_bias) || c.family.qkv_bias}, adapters);
  layers_[kOut] = Linear::make(set, {{name + ".o_proj", c.d_model}}, q, output_init_std(c),
                               Linear::Bias{c.bias || c.family.o_bias}, adapters);
  if (c.qk_norm || c.family.qk_norm_whole) {
    const auto weight = [&](const char* norm, int64_t size) {
      return set.add({name + norm, {size}, ParameterUse::kVector, 1 - c.family.norm_offset});
    };
    q_norm_ = weight(".q_norm.weight", c.qk_norm ? c.head_dim : q);
    k_norm_ = weight(".k_norm.weight", c.qk_norm ? c.head_dim : kv);
  }
  if (c.precision.rounds_keys())
    kv_scales_ =
        Tensor::full({(c.precision.rounds_queries() ? c.num_heads : 0) + 2 * c.num_kv_heads}, 1,
                     DType::kF32, set.device());
  if (c.attention_sinks) sinks_ = set.add({name + ".sinks", {c.num_heads}});
}

void SelfAttention::write_kv_scales(const Norm& norm) const {
  if (!kv_scales_.defined()) return;
  const ModelConfig& c = *config_;
  const Linear& qkv = layers_[kQkv];
  const int64_t rows = kv_scales_.numel() * c.head_dim,
                first = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim - rows;
  const auto rows_of = [&](const Tensor& t) { return t.defined() ? t.narrow(0, first, rows) : t; };
  Tensor scales = kv_scales_;
  const Tensor w = rows_of(qkv.weight.values()), bias = rows_of(qkv.bias.value());
  kernels::KvScales call = norm.kv_scales(scales, w, bias);
  call.kv_heads = c.num_kv_heads;
  call.q_norm = q_norm_.value();
  call.k_norm = k_norm_.value();
  if (c.is_rotary(layer_)) call.rotary_gain = c.max_rotary_gain();
  if (qkv.lora.defined()) {
    call.a = qkv.lora.a.value().with_padding();
    call.sb = rows_of(qkv.weight.adapter_columns());
  }
  kernels::kv_scales(call);
}

Variable SelfAttention::operator()(const Variable& x, const Pass& pass) const {
  const ModelConfig& c = *config_;
  const int64_t tokens = x.value().rows();
  AttentionCall call{.layer = c.layer_of_kind(layer_),
                     .num_kv_heads = c.num_kv_heads,
                     .padding = layers_[kOut].input_padding()};
  call.desc.mask = c.mask;
  call.desc.window = c.window_of(layer_);
  call.desc.soft_cap = c.soft_cap;
  if (c.position == PositionType::kExposb)
    call.desc.distance = {c.exposb.distance_floor, c.exposb.distance_rate};
  call.desc.slopes = pass.position_terms.slopes;
  call.terms = {pass.position_terms.bias, sinks_};
  call.desc.dropout = dropout_spec(c.dropout, pass, layer_, DropoutSite::kAttention);
  call.kv_scales = kv_scales_;
  if (c.precision.rounds_queries()) call.desc.fp8_scales = kv_scales_;
  if (c.is_rotary(layer_)) call.rope_table = pass.position_terms.rope_table;
  call.qkv = layers_[kQkv](x, pass.options.adapters);
  Variable gates;
  if (c.attention_gate) {
    GatedQkv split = split_gates(call.qkv, c.num_heads, c.head_dim);
    call.qkv = std::move(split.qkv);
    gates = std::move(split.gates);
    call.padding = 0;  // the rows of the product have none
  } else {
    call.qkv = reshape(call.qkv, {tokens, c.num_heads + 2 * c.num_kv_heads, c.head_dim});
  }
  if (q_norm_.defined())
    call.qkv = qk_norm(std::move(call.qkv), {q_norm_, k_norm_}, c.num_kv_heads, c.norm_eps,
                       c.family.norm_offset);
  Variable out = pass.mixing->attention(std::move(call));
  if (gates.defined()) out = sigmoid_gate(out, gates);
  return layers_[kOut](out, pass.options.adapters);
}

}  // namespace cohort
