// The input of a transformer's blocks: the embeddings of tokens, or of patches of images behind a
// class token, and of their positions.
#pragma once

#include <optional>

#include "nn/modules.h"

namespace cohort {

// A parameter [rows, d_model]. A matrix of the head has the rows that its matmuls want.
Variable add_vocabulary_table(ParameterSet& set, const ModelConfig& config, const char* name,
                              int64_t rows, ParameterUse use);

class Embedding {
 public:
  // Refers to `config`, the model's.
  Embedding(ParameterSet& set, const ModelConfig& config);
  // [T, d_model] of pass.batch.tokens or pass.batch.pixels at pass.batch.positions
  Variable operator()(const Pass& pass) const;
  // [vocab, d_model]; undefined for images
  const Variable& tokens() const { return tokens_; }

 private:
  Variable patches(const Pass& pass) const;

  const ModelConfig& config_;
  DType dtype_;
  Variable tokens_, types_;
  Variable class_;      // [1, d_model], the class token of images
  Variable positions_;  // a constant if they are sinusoidal; undefined: none are added
  std::optional<Norm> norm_;
  Linear patch_projection_;
};

}  // namespace cohort
