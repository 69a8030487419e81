// The head of a language model: the matrix of its logits.
#pragma once

#include "nn/embedding.h"

namespace cohort {

class Head {
 public:
  // The embedding's table if the configuration ties them.
  Head(ParameterSet& set, const ModelConfig& config, const Embedding& embedding)
      : weight_(config.tie_embeddings
                    ? embedding.tokens()
                    : add_vocabulary_table(set, config, "lm_head.weight", config.vocab_size,
                                           ParameterUse::kMatmul)) {}
  // [vocab, d_model]
  const Variable& weight() const { return weight_; }

 private:
  Variable weight_;
};

}  // namespace cohort
