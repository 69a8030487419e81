#include "nn/embedding.h"

#include <algorithm>

#include "kernels/head.h"
#include "kernels/patches.h"
#include "nn/positions.h"

namespace cohort {

Variable add_vocabulary_table(ParameterSet& set, const ModelConfig& config, const char* name,
                              int64_t rows, ParameterUse use) {
  return set.add(
      {.name = name,
       .shape = {rows, config.d_model},
       .use = use,
       .init = config.init_std,
       .leaf_rows = use == ParameterUse::kMatmul ? kernels::head_rows(rows, set.device()) : rows});
}

// Tables come first, in the order in which models of tokens had them before there were others.
Embedding::Embedding(ParameterSet& set, const ModelConfig& c) : config_(c), dtype_(set.dtype()) {
  const auto table = [&](const char* name, int64_t rows, ParameterUse use) {
    return add_vocabulary_table(set, c, name, rows, use);
  };
  if (c.has_images())
    class_ = table("model.embed_class.weight", 1, ParameterUse::kLookup);
  else
    tokens_ = table("model.embed_tokens.weight", c.vocab_size,
                    c.is_tied() ? ParameterUse::kMatmul : ParameterUse::kLookup);
  if (c.position == PositionType::kLearned)
    positions_ = table("model.embed_positions.weight",
                       std::max(c.context, c.position_rows) + c.family.first_position,
                       ParameterUse::kLookup);
  if (c.position == PositionType::kSinusoidal)
    positions_ = Variable(sinusoidal_table(c.context, c.d_model).to(set.dtype()).to(set.device()));
  if (c.token_types > 0)
    types_ = table("model.embed_types.weight", c.token_types, ParameterUse::kLookup);
  if (c.embedding_norm) norm_.emplace(set, "model.embed_norm", c);
  if (c.has_images())
    patch_projection_ = Linear::make(set, {{"model.embed_patches", c.d_model}},
                                     c.channels * c.patch_size * c.patch_size, c.init_std,
                                     Linear::Bias{c.bias}, AdapterTargets(c));
}

// The sums have PyTorch's order: tokens, types, positions.
Variable Embedding::operator()(const Pass& pass) const {
  const Tensor &tokens = pass.batch.tokens, &types = pass.batch.types,
               &positions = pass.batch.positions;
  Variable x = config_.has_images() ? patches(pass) : embedding(tokens_, tokens);
  if (config_.family.embedding_scale != 1) x = scale(x, config_.family.embedding_scale);
  if (types_.defined())
    x = add(x, embedding(types_, types.defined() ? types
                                                 : Tensor::zeros(tokens.shape(), DType::kI32,
                                                                 tokens.device())));
  if (positions_.defined())
    x = add(x, embedding(positions_, positions, config_.family.first_position));
  if (norm_) x = (*norm_)(x);
  return dropout(x, dropout_spec(config_.dropout, pass, -1, DropoutSite::kEmbedding));
}

Variable Embedding::patches(const Pass& pass) const {
  const Tensor& pixels = pass.batch.pixels;
  const int64_t n = config_.num_patches(), p = config_.patch_size, side = config_.image_size,
                images = pixels.dim(0);
  Tensor rows = Tensor::empty({images * n, config_.channels * p * p}, dtype_, pixels.device());
  kernels::patches({.y = rows,
                    .pixels = pixels.reshape({images, side, side, config_.channels}),
                    .values = pass.batch.pixel_values.to(accumulate_dtype(dtype_)),
                    .size = p});
  return prepend_row(class_, patch_projection_(Variable(rows)), n);
}

}  // namespace cohort
