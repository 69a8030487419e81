// The head on the hidden states (HeadType).
#pragma once

#include "nn/embedding.h"

namespace cohort {

class Head {
 public:
  Head() = default;
  // Its matrix is the embedding's table if the configuration ties them. Refers to `config`, the
  // model's.
  Head(ParameterSet& set, const ModelConfig& config, const Embedding& embedding);
  // The input of the logits' matmul, or the pooler's output, of hidden states [L, d_model] at the
  // positions of the targets; pass.batch.sequences and positions, of these rows, address dropout.
  Variable operator()(Variable x, const Pass& pass) const;
  // Weights of the logits; undefined for a pooler.
  const HeadWeights& weights() const { return weights_; }

 private:
  const ModelConfig* config_ = nullptr;
  Linear dense_;
  std::optional<Norm> norm_;
  HeadWeights weights_;
};

// [L] i32: the most likely token or label of each row of the head's input x [L, d_model], the
// lowest among equals.
Tensor most_likely(const Tensor& x, const HeadWeights& head);

}  // namespace cohort
