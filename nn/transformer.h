// A decoder-only transformer described by its configuration: Llama-like by default (RMSNorm, rotary
// positions, SwiGLU, grouped-query attention), GPT-2-like with LayerNorm, learned positions, GELU
// and biases.
//
// One function holds a block's maths (Transformer::block). Training passes it packed
// flash-attention, sampling passes it attention over the paged cache, and both run the same row
// ops: that is why their log-probs agree to the bit.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "data/packing.h"
#include "nn/kv_cache.h"
#include "nn/model_config.h"

namespace cohort {

// Where a block drops activations out.
enum class DropoutSite : uint8_t { kEmbedding, kAttention, kAttentionOut, kMlpOut };

// The purpose of rng_stream() for initial weights.
inline constexpr uint64_t kInitPurpose = 1;
// The stream of one dropout of the model; layer 0 is the embedding, block i is i + 1.
inline uint64_t dropout_stream(int64_t step, int64_t layer, DropoutSite site) {
  return rng_stream(kernels::kDropoutPurpose, static_cast<uint64_t>(step),
                    static_cast<uint64_t>(layer) << 8 | static_cast<uint64_t>(site));
}

struct NamedParameter {
  std::string name;  // Hugging Face Llama's names: model.layers.0.self_attn.q_proj.weight
  Variable variable;
  bool decay = false;  // weight decay applies: matrices, not norms or biases
};

// Whether dropout acts, and which bits it draws.
enum class Mode { kEval, kTrain };
struct ForwardOptions {
  Mode mode = Mode::kEval;
  uint64_t seed = 0;  // dropout bits; see kernels/dropout.h
  int64_t step = 0;
};

class Transformer {
 public:
  // Initialises every parameter from (seed, its index): N(0, init_std), output projections scaled
  // by 1 / sqrt(2 layers) (Radford et al. 2019), norms 1, biases 0: the same values on every
  // device, rounded to `dtype`. Without a seed matrices are not initialised: they will be loaded or
  // copied. `config` must be resolved.
  Transformer(const ModelConfig& config, DType dtype, std::optional<uint64_t> seed,
              Device device = {});
  Transformer(const Transformer&) = delete;
  Transformer& operator=(const Transformer&) = delete;

  // The batch on the model's device. What the device cannot refuse is checked on the way: throws
  // Error for a sequence over the context or a token outside the vocabulary.
  PackedBatch place(const PackedBatch& batch) const;

  // Hidden states after the last norm, [T, d_model], of packed sequences on the model's device.
  // Throws Error as place() does on the CPU.
  Variable forward(const PackedBatch& batch, const ForwardOptions& options = {}) const;

  // The same through the cache, without a tape: token t belongs to cache row sequences[t] at
  // positions[t] (both [T] i32). Keys and values are written to the cache, whose rows must have
  // room.
  Tensor forward_cached(const Tensor& tokens, const Tensor& sequences, const Tensor& positions,
                        KVCache& cache) const;

  // The head's matrix [vocab, d_model] (the embedding table when tied).
  const Variable& head() const { return head_; }
  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  const ModelConfig& config() const { return config_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }

  // Copies the values of `source`, which must have the same configuration.
  void copy_from(const Transformer& source);

 private:
  struct Linear {
    Variable weight, bias;
  };
  struct Norm {
    Variable weight, bias;
  };
  struct Layer {
    Norm attention_norm, mlp_norm;
    Linear q, k, v, o, gate, up, down;
    Variable q_norm, k_norm;
  };
  struct Pass;
  // Queries [T, H, D], keys and values [T, Hkv, D] -> [T, H, D].
  using Attend = std::function<Variable(const Pass& pass, int layer, const Variable& q,
                                        const Variable& k, const Variable& v)>;
  struct Pass {
    Tensor tokens, positions, sequences;
    ForwardOptions options;
    Attend attend;
  };

  class Builder;
  Variable run(const Pass& pass) const;
  Variable block(int layer, const Variable& x, const Pass& pass) const;
  Variable norm(const Variable& x, const Norm& norm) const;
  // a + b, and its norm.
  AddNorm add_norm(const Variable& a, const Variable& b, const Norm& norm) const;
  // A norm or an activation of its inputs.
  using Op = std::function<Variable(std::span<const Variable>)>;
  Op norm_op() const;
  Variable recomputable(const Variable& y, const Op& op,
                        std::initializer_list<Variable> inputs) const;
  Variable mlp(const Layer& layer, const Variable& x) const;
  kernels::DropoutSpec dropout_spec(const Pass& pass, int layer, DropoutSite site) const;
  std::vector<Variable> block_parameters(const Layer& layer) const;

  ModelConfig config_;
  DType dtype_;
  Device device_;
  Variable embedding_, position_embedding_, head_;
  Norm final_norm_;
  std::vector<Layer> layers_;
  std::vector<NamedParameter> parameters_;
  Tensor rope_table_;
};

}  // namespace cohort
