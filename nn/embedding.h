// The input of a transformer's blocks: the embeddings of tokens and of their positions.
#pragma once

#include "nn/modules.h"

namespace cohort {

// A parameter [rows, d_model]. A matrix of the head has the rows that its matmuls want.
Variable add_vocabulary_table(ParameterSet& set, const ModelConfig& config, const char* name,
                              int64_t rows, ParameterUse use);

class Embedding {
 public:
  // Refers to `config`, the model's.
  Embedding(ParameterSet& set, const ModelConfig& config);
  // [T, d_model] of pass.tokens at pass.positions
  Variable operator()(const Pass& pass) const;
  // [vocab, d_model]
  const Variable& tokens() const { return tokens_; }

 private:
  const ModelConfig& config_;
  Variable tokens_;
  Variable positions_;  // a constant if they are sinusoidal; undefined: none are added
};

}  // namespace cohort
