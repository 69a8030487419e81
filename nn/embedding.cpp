#include "nn/embedding.h"

#include <algorithm>

#include "kernels/head.h"
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

Embedding::Embedding(ParameterSet& set, const ModelConfig& c)
    : config_(c),
      tokens_(
          add_vocabulary_table(set, c, "model.embed_tokens.weight", c.vocab_size,
                               c.tie_embeddings ? ParameterUse::kMatmul : ParameterUse::kLookup)) {
  if (c.position == PositionType::kLearned)
    positions_ = add_vocabulary_table(set, c, "model.embed_positions.weight",
                                      std::max(c.context, c.position_rows), ParameterUse::kLookup);
  if (c.position == PositionType::kSinusoidal)
    positions_ = Variable(sinusoidal_table(c.context, c.d_model).to(set.dtype()).to(set.device()));
}

Variable Embedding::operator()(const Pass& pass) const {
  Variable x = embedding(tokens_, pass.tokens);
  if (config_.family.embedding_scale != 1) x = scale(x, config_.family.embedding_scale);
  if (positions_.defined()) x = add(x, embedding(positions_, pass.positions));
  return dropout(x, dropout_spec(config_.dropout, pass, -1, DropoutSite::kEmbedding));
}

}  // namespace cohort
