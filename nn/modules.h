// Modules of a block: linear layer, norm, attention. Each consists of its parameters and
// one call; nn/memory.cpp measures what they keep for the backward.
#pragma once

#include <array>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "data/packing.h"
#include "kernels/kv_scales.h"
#include "nn/lora.h"
#include "nn/model_config.h"
#include "nn/parameter_set.h"

namespace cohort {

// Positions of dropout in a model.
enum class DropoutSite : uint8_t { kEmbedding, kAttention, kAttentionOut, kMlpOut, kHead };

// kTrain enables dropout; ForwardOptions address its random bits.
enum class Mode { kEval, kTrain };
struct ForwardOptions {
  Mode mode = Mode::kEval;
  AdapterUse adapters = {};  // kOff: the base model
  uint64_t seed = 0;         // dropout bits; see kernels/dropout.h
  int64_t step = 0;
};

// One layer's attention: rotary positions and attention of its heads.
struct AttentionCall {
  int layer = 0;  // among those with attention
  int64_t num_kv_heads = 0;
  kernels::AttentionDesc desc;
  AttentionTerms terms;
  Tensor rope_table;    // undefined: queries and keys are not rotated
  Tensor kv_scales;     // f32, of the last heads of qkv, which are rounded; undefined: none are
  Variable qkv;         // [T, H + 2 Hkv, D]: a token's queries, keys and values; may be overwritten
  int64_t padding = 0;  // columns behind each row of the output
};

// One layer's gated delta rule.
struct DeltaCall {
  int layer = 0;  // among the delta layers
  DeltaVariables in;
  DeltaDims dims;
};

// A scheme of positions in attention; each member may be undefined.
struct PositionTerms {
  Tensor rope_table, slopes;
  Variable bias;
};

// The mixing of tokens in a forward (nn/mixing.h).
class Mixing {
 public:
  virtual ~Mixing() = default;
  virtual Variable attention(AttentionCall call) const = 0;       // [T, H D]
  virtual Variable gated_delta(const DeltaCall& call) const = 0;  // [T, Hv, D]
};

// Inputs shared by the blocks of one forward.
struct Pass {
  PackedBatch batch;  // its inputs
  ForwardOptions options;
  std::shared_ptr<const Mixing> mixing;
  PositionTerms position_terms;
};

// The only way in which a module uses the weight of a matmul.
struct Linear {
  enum class Bias : bool { kNo, kYes };
  // One of the layers that share an input: weight [out, in], bias [out].
  using Part = LinearPart;
  LayerWeight weight;
  Variable bias;  // may be undefined
  Lora lora;      // undefined: none

  // Weights start from N(0, std). The weights of all parts are rows of one leaf, and so are the
  // biases: one matmul gives the parts' outputs side by side. `adapters`: the whole model's.
  // They are in the set's base format.
  static Linear make(ParameterSet& set, std::initializer_list<Part> parts, int64_t in, double std,
                     Bias has_bias, const AdapterTargets& adapters);
  Variable operator()(const Variable& x, const AdapterUse& adapters = {}) const;
  // Columns that the rows of an input should have behind them as padding.
  int64_t input_padding() const { return lora.columns(); }
};

// RMSNorm or LayerNorm. With recompute: cheap its output is recomputed in the backward.
class Norm {
 public:
  Norm() = default;
  Norm(ParameterSet& set, const std::string& name, const ModelConfig& config);
  Variable operator()(const Variable& x) const;
  // a + b and the norm of the sum.
  AddNorm add(const Variable& a, const Variable& b) const;
  // Adds what kernels::kv_scales() needs to know of the layer that reads the output.
  kernels::KvScales kv_scales(Tensor& scales, const Tensor& w, const Tensor& bias) const;
  // The output's rows have `columns` columns behind them, for the layer that reads them.
  void set_padding(int64_t columns) { padding_ = columns; }

 private:
  Variable apply(std::span<const Variable> in, int64_t padding) const;  // in: x, weight, bias
  Variable keep(const Variable& y, const Variable& x) const;

  Variable weight_, bias_;
  NormType type_ = NormType::kRms;
  Recompute recompute_ = Recompute::kNone;
  double eps_ = 0, weight_offset_ = 0;
  int64_t padding_ = 0;
};

class SelfAttention {
 public:
  SelfAttention() = default;
  // Refers to `config`, the model's.
  SelfAttention(ParameterSet& set, const std::string& name, const ModelConfig& config,
                const AdapterTargets& adapters, int layer);
  // [T, d_model] -> [T, d_model]
  Variable operator()(const Variable& x, const Pass& pass) const;
  std::span<const Linear> layers() const { return layers_; }
  // Writes the scales of what is rounded of queries, keys and values: to be called whenever
  // parameters have changed. `norm`: that of the input.
  void write_kv_scales(const Norm& norm) const;

 private:
  const ModelConfig* config_ = nullptr;
  int layer_ = 0;
  enum { kQkv, kOut };
  std::array<Linear, 2> layers_;
  Variable q_norm_, k_norm_, sinks_;  // undefined: none
  Tensor kv_scales_;                  // [2 Hkv] or [H + 2 Hkv] f32; undefined: nothing is rounded
};

// RNG stream of one dropout of the model; layer 0 is the embedding, layer i + 1 is block i.
inline uint64_t dropout_stream(int64_t step, int64_t layer, DropoutSite site) {
  return rng_stream(kernels::kDropoutPurpose, static_cast<uint64_t>(step),
                    static_cast<uint64_t>(layer) << 8 | static_cast<uint64_t>(site));
}
// Dropout of block `layer`; -1: the embedding.
kernels::DropoutSpec dropout_spec(double p, const Pass& pass, int layer, DropoutSite site);

// Standard deviation of initial output projections: init_std / sqrt(2 layers) (Radford et al.
// 2019).
double output_init_std(const ModelConfig& config);

}  // namespace cohort
