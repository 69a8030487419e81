// The blocks of a transformer with its last norm, on whatever embedding.
//
// Backbone::block is the only definition of a block. Training passes it packed flash-attention,
// sampling passes it attention over the paged cache, and both run the same row ops: therefore their
// log-probs agree to the bit.
#pragma once

#include <functional>
#include <utility>
#include <variant>
#include <vector>

#include "nn/feed_forward.h"
#include "nn/gated_delta.h"
#include "nn/positions.h"

namespace cohort {

// The residual stream x + branch, not yet added: one kernel computes the sum and the next norm.
struct Residual {
  Variable x, branch;  // branch may be undefined
};

// The norm of a sub-layer f, and its place.
struct SubLayerNorm {
  Norm norm;
  NormPlace place = NormPlace::kBefore;
  // The sum of the residual stream, and the input of f.
  AddNorm enter(Residual in) const;
  // The stream x after f, whose output is `out`.
  Residual leave(const Variable& x, const Variable& out, const kernels::DropoutSpec& dropout) const;
};

class Backbone {
 public:
  // The block of index i is the set's unit i + 1. Refers to both, the model's.
  Backbone(ParameterSet& set, const ModelConfig& config);
  // Hidden states after the last norm, which kAfter has in each block, [T, d_model] ->
  // [T, d_model]. pass.position_terms are
  // those of position_terms().
  Variable operator()(Variable x, const Pass& pass) const;
  PositionTerms position_terms() const { return positions_.terms(); }
  // Writes the scales of keys and values, if those are rounded.
  void write_kv_scales() const;
  // The layers that have adapters.
  std::vector<const Linear*> adapted() const;
  // `hook` is called with a block's unit before each use of its weights: in a forward, a
  // recomputation and a backward.
  void before_block(std::function<void(size_t unit)> hook) { before_block_ = std::move(hook); }

 private:
  struct Block {
    SubLayerNorm mixer_norm, mlp_norm;
    std::variant<SelfAttention, GatedDelta> mixer;
    Mlp mlp;
    std::span<const Linear> mixer_layers() const {
      return std::visit([](const auto& m) { return m.layers(); }, mixer);
    }
  };
  Block make_block(int index, const AdapterTargets& adapters);
  Residual block(int index, Residual in, const Pass& pass) const;
  Variable recomputed_block(int index, const Variable& x, const Pass& pass) const;

  ParameterSet& set_;
  const ModelConfig& config_;
  PositionScheme positions_;
  std::vector<Block> blocks_;
  SubLayerNorm final_norm_;
  std::function<void(size_t unit)> before_block_;
};

}  // namespace cohort
