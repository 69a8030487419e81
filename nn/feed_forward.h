// The feed-forward half of a decoder block: an MLP, as one differentiable op of two linear layers.
#pragma once

#include <string>

#include "nn/modules.h"

namespace cohort {

struct MlpDesc {
  kernels::Activation activation;
  // The activation's output is not kept, but recomputed in the backward with its gradient.
  bool recompute = false;
  AdapterUse adapters = {};
};
// down(f(up(x))) in one node, with the bits of the three ops: a kernel may fuse f with either
// layer's GEMM (kernels/activation.h). For a gated f `up` has the rows of gate, then those of up.
// A layer with an adapter has a frozen weight.
Variable mlp(const Variable& x, const Linear& up, const Linear& down, const MlpDesc& desc);

class Mlp {
 public:
  Mlp() = default;
  Mlp(ParameterSet& set, const std::string& name, const ModelConfig& config,
      const AdapterTargets& adapters);
  // [T, d_model] -> [T, d_model]
  Variable operator()(const Variable& x, const Pass& pass) const;
  std::span<const Linear> layers() const { return layers_; }

 private:
  enum { kUp, kDown };  // up of gated types: gate and up
  MlpDesc desc_ = {};
  std::array<Linear, 2> layers_;
};

}  // namespace cohort
