// The parts of a decoder block: linear layer, norm, attention, MLP. Each is its parameters and one
// call; what they keep for the backward is in nn/memory.cpp.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "nn/model_config.h"
#include "nn/parameter.h"

namespace cohort {

// Where a block drops activations out.
enum class DropoutSite : uint8_t { kEmbedding, kAttention, kAttentionOut, kMlpOut };

// Whether dropout acts, and which bits it draws.
enum class Mode { kEval, kTrain };
struct ForwardOptions {
  Mode mode = Mode::kEval;
  uint64_t seed = 0;  // dropout bits; see kernels/dropout.h
  int64_t step = 0;
};

// A layer's attention, from what its heads are to rotating and attending.
struct AttendCall {
  int layer = 0;
  int64_t num_kv_heads = 0;
  kernels::AttentionDesc desc;
  Tensor rope_table;  // undefined: queries and keys are not rotated
  Variable qkv;       // [T, H + 2 Hkv, D]: a token's queries, keys and values; may be overwritten
};

// What the blocks of one forward share.
struct Pass {
  // -> [T, H, D]: over the packed batch, or over the cache.
  using Attend = std::function<Variable(AttendCall call)>;
  Tensor tokens, positions, sequences;
  ForwardOptions options;
  Attend attend;
  Tensor rope_table;  // undefined: no rotary positions
};

// The parameters of a module, where a checkpoint() needs to know them.
using Parameters = std::vector<Variable>;

struct Linear {
  enum class Bias { kNo, kYes };
  // One of the layers that share an input: weight [out, in], bias [out].
  struct Part {
    std::string name;
    int64_t out = 0;
  };
  Variable weight, bias;

  Linear() = default;
  // Weights start from N(0, std). Those of several parts are rows of one leaf, and so are the
  // biases: one product gives the parts' outputs side by side.
  Linear(const MakeParameter& make, std::initializer_list<Part> parts, int64_t in, double std,
         Bias has_bias);
  Variable operator()(const Variable& x) const { return linear(x, weight, bias); }
};

// RMSNorm or LayerNorm. With recompute: cheap its output is not kept.
class Norm {
 public:
  Norm() = default;
  Norm(const MakeParameter& make, const std::string& name, const ModelConfig& config);
  Variable operator()(const Variable& x) const;
  // a + b, and its norm.
  AddNorm add(const Variable& a, const Variable& b) const;
  void append_to(Parameters& all) const;

 private:
  Variable apply(std::span<const Variable> in) const;  // of x, weight, bias
  Variable keep(const Variable& y, const Variable& x) const;

  Variable weight_, bias_;
  NormType type_ = NormType::kRms;
  Recompute recompute_ = Recompute::kNone;
  double eps_ = 0, weight_offset_ = 0;
};

class SelfAttention {
 public:
  SelfAttention() = default;
  SelfAttention(const MakeParameter& make, const std::string& name, const ModelConfig& config,
                int layer);
  // [T, d_model] -> [T, d_model]
  Variable operator()(const Variable& x, const Pass& pass) const;
  void append_to(Parameters& all) const;

 private:
  int layer_ = 0;
  int64_t num_heads_ = 0, num_kv_heads_ = 0, head_dim_ = 0;
  int64_t window_ = 0;
  double dropout_ = 0, norm_eps_ = 0;
  bool rotary_ = false;
  Linear qkv_, o_;
  Variable q_norm_, k_norm_;  // undefined: none
};

class Mlp {
 public:
  Mlp() = default;
  Mlp(const MakeParameter& make, const std::string& name, const ModelConfig& config);
  // [T, d_model] -> [T, d_model]
  Variable operator()(const Variable& x) const;
  void append_to(Parameters& all) const;

 private:
  MlpType type_ = MlpType::kSwiGlu;
  Recompute recompute_ = Recompute::kNone;
  Linear up_, down_;  // up: of the gated types gate and up
};

// The stream of one dropout of the model; layer 0 is the embedding, block i is i + 1.
inline uint64_t dropout_stream(int64_t step, int64_t layer, DropoutSite site) {
  return rng_stream(kernels::kDropoutPurpose, static_cast<uint64_t>(step),
                    static_cast<uint64_t>(layer) << 8 | static_cast<uint64_t>(site));
}
// Of block `layer`; -1: the embedding.
kernels::DropoutSpec dropout_spec(double p, const Pass& pass, int layer, DropoutSite site);

// The standard deviation of initial output projections: 1 / sqrt(2 layers) of the others' (Radford
// et al. 2019).
double output_init_std(const ModelConfig& config);

}  // namespace cohort
