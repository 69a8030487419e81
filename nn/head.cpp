#include "nn/head.h"

#include <utility>

#include "kernels/head.h"
#include "kernels/sampling.h"

namespace cohort {

// f of the MLP's activation, whose gate it would be applied to.
static Variable activated(const Variable& x, MlpType type) {
  if (type == MlpType::kSwiGlu) return silu(x);
  return type == MlpType::kGelu || type == MlpType::kGeGlu ? gelu(x) : gelu_tanh(x);
}

Head::Head(ParameterSet& set, const ModelConfig& c, const Embedding& embedding) : config_(&c) {
  const bool next = c.head == HeadType::kNextToken, masked = c.head == HeadType::kMaskedToken;
  if (masked || c.head == HeadType::kPooler || (c.head == HeadType::kClasses && !c.has_images()))
    dense_ = Linear::make(set, {{"head.dense", c.d_model}}, c.d_model, c.init_std,
                          Linear::Bias{c.bias}, AdapterTargets(c));
  if (masked) norm_.emplace(set, "head.norm", c);
  const int64_t rows = c.num_logits();
  if (rows == 0) return;
  weights_.weight =
      c.is_tied() ? embedding.tokens()
                  : add_vocabulary_table(set, c, next || masked ? "lm_head.weight" : "head.weight",
                                         rows, ParameterUse::kMatmul);
  if (!next && c.bias)
    weights_.bias = set.add({.name = "head.bias",
                             .shape = {rows},
                             .leaf_rows = kernels::head_rows(rows, set.device())});
}

Variable Head::operator()(Variable x, const Pass& pass) const {
  const HeadType type = config_->head;
  if (type == HeadType::kNextToken) return x;
  const bool has_dense = dense_.weight.leaf.value().defined();
  if (has_dense) x = dense_(x);
  if (type == HeadType::kMaskedToken) return (*norm_)(activated(x, config_->mlp));
  if (has_dense) x = tanh(x);
  if (type == HeadType::kPooler) return x;
  return dropout(x, dropout_spec(config_->dropout, pass, -1, DropoutSite::kHead));
}

Tensor most_likely(const Tensor& x, const HeadWeights& head) {
  const int64_t rows = x.dim(0);
  const Device device = x.device();
  const kernels::SamplingParams greedy[] = {{.temperature = 0}};
  kernels::SamplingState state{.params = kernels::pack_params(greedy).to(device)};
  const Tensor statistics = Tensor::empty({4, rows}, accumulate_dtype(x.dtype()), device);
  kernels::Samples out{Tensor::empty({rows}, DType::kI32, device), statistics.select(0, 0),
                       statistics.select(0, 1), statistics.select(0, 2), statistics.select(0, 3)};
  kernels::head_sample({.out = out,
                        .state = state,
                        .x = x,
                        .w = head.weight.value(),
                        .slots = Tensor::zeros({rows}, DType::kI32, device),
                        .rng_index = Tensor::zeros({rows}, DType::kI64, device),
                        .bias = head.bias.value()});
  return out.tokens;
}

}  // namespace cohort
