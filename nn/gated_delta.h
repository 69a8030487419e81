// A gated delta rule layer (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464; Qwen3.5): a mixer
// with a matrix for each head in place of the keys and values of all tokens before.
#pragma once

#include "nn/modules.h"

namespace cohort {

// With rows = W x, of which the columns are qkv | z | b | a, and o = gated_delta(qkv, b, a):
//
//   y = W_out (w RMSNorm(o) silu(z)), the norm of each head
//
// The names of parameters are those of Qwen3.5 in transformers. A new layer has decays exp(-A dt)
// with A from U(0, 16) and dt from [0.001, 0.1], uniform in its logarithm (Gu and Dao 2023), and
// convolutions from U(-0.5, 0.5).
class GatedDelta {
 public:
  // Refers to `config`, the model's.
  GatedDelta(ParameterSet& set, const std::string& name, const ModelConfig& config,
             const AdapterTargets& adapters, int layer);
  // [T, d_model] -> [T, d_model]
  Variable operator()(const Variable& x, const Pass& pass) const;
  std::span<const Linear> layers() const { return layers_; }

 private:
  const ModelConfig* config_;
  int layer_;
  enum { kIn, kOut };
  std::array<Linear, 2> layers_;
  Variable conv_, a_log_, dt_bias_, norm_;
};

}  // namespace cohort
