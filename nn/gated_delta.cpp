#include "nn/gated_delta.h"

namespace cohort {

GatedDelta::GatedDelta(ParameterSet& set, const std::string& name, const ModelConfig& c,
                       const AdapterTargets& adapters, int layer)
    : config_(&c), layer_(layer) {
  const DeltaConfig& d = c.delta;
  layers_[kIn] = Linear::make(set,
                              {{name + ".in_proj_qkv", d.channels()},
                               {name + ".in_proj_z", d.values()},
                               {name + ".in_proj_b", d.value_heads},
                               {name + ".in_proj_a", d.value_heads}},
                              c.d_model, c.init_std, Linear::Bias::kNo, adapters);
  const auto vector = [&](const char* part, const Shape& shape, double init, InitialValues values,
                          ParameterDType dtype = ParameterDType::kStatistic) {
    return set.add({.name = name + part,
                    .shape = shape,
                    .use = ParameterUse::kVector,
                    .init = init,
                    .values = values,
                    .dtype = dtype});
  };
  conv_ = vector(".conv1d.weight", {d.channels(), 4}, 0.5, InitialValues::kUniform,
                 ParameterDType::kOfSet);
  dt_bias_ = vector(".dt_bias", {d.value_heads}, 0, InitialValues::kTimeStep);
  a_log_ = vector(".A_log", {d.value_heads}, 16, InitialValues::kLogUniform);
  norm_ = vector(".norm.weight", {d.value_dim}, 1, InitialValues::kOfUse);
  layers_[kOut] = Linear::make(set, {{name + ".out_proj", c.d_model}}, d.values(),
                               output_init_std(c), Linear::Bias::kNo, adapters);
}

Variable GatedDelta::operator()(const Variable& x, const Pass& pass) const {
  const DeltaConfig& d = config_->delta;
  const int64_t tokens = x.value().rows(), z = d.channels(), b = z + d.values();
  const Variable rows = layers_[kIn](x, pass.options.adapters);
  const DeltaVariables in{columns(rows, 0, z),
                          columns(rows, b, d.value_heads),
                          columns(rows, b + d.value_heads, d.value_heads),
                          conv_,
                          a_log_,
                          dt_bias_};
  const Variable o = pass.mixing->gated_delta({.layer = config_->layer_of_kind(layer_),
                                               .in = in,
                                               .dims = {d.key_heads, d.value_heads, d.value_dim}});
  const Variable gate = reshape(silu(columns(rows, z, d.values())), o.shape()),
                 y = mul(rms_norm(o, norm_, {config_->norm_eps}), gate);
  return layers_[kOut](reshape(y, {tokens, d.values()}), pass.options.adapters);
}

}  // namespace cohort
