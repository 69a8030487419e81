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
  const bool has_dense = dense_.weight.value().defined();
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
  Tensor tokens = Tensor::empty({rows}, DType::kI32, device);
  Tensor statistics = Tensor::empty({4, rows}, accumulate_dtype(x.dtype()), device);
  const kernels::Logits logits{x, head.weight.value(), head.bias.value()};
  const int64_t chunk = kernels::head_chunk_tokens(head.weight.value().dim(0), 0, device);
  kernels::for_logit_chunks(logits, chunk, [&](int64_t begin, const Tensor& values) {
    const int64_t n = values.dim(0);
    const auto part = [&](int i) { return statistics.select(0, i).narrow(0, begin, n); };
    kernels::Samples out{tokens.narrow(0, begin, n), part(0), part(1), part(2), part(3)};
    kernels::sample_logits({.out = out,
                            .state = state,
                            .logits = values,
                            .slots = Tensor::zeros({n}, DType::kI32, device),
                            .rng_index = Tensor::zeros({n}, DType::kI64, device)});
  });
  return tokens;
}

}  // namespace cohort
