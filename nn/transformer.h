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

#include "data/packing.h"
#include "nn/kv_cache.h"
#include "nn/modules.h"

namespace cohort {

// The purpose of rng_stream() for initial weights.
inline constexpr uint64_t kInitPurpose = 1;

// What the tokens of forward_cached() are: any, or one of each of several cache rows.
enum class CachedStep { kPrefill, kDecode };

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
  // Those of the tokens that are learned: [L, d_model].
  Variable forward_learned(const PackedBatch& batch, const ForwardOptions& options = {}) const;

  // The same through the cache, without a tape: token t belongs to cache row sequences[t] at
  // positions[t] (both [T] i32). Keys and values are written to the cache, whose rows must have
  // room.
  Tensor forward_cached(const Tensor& tokens, const Tensor& sequences, const Tensor& positions,
                        KVCache& cache, CachedStep step = CachedStep::kPrefill) const;

  // The head's matrix [vocab, d_model] (the embedding table when tied).
  const Variable& head() const { return head_; }
  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  // The tensors that hold them, each whole: some parameters are rows of one (nn/parameter.h).
  const std::vector<Variable>& leaves() const { return leaves_; }
  const ModelConfig& config() const { return config_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }

  // Copies the values of `source`, which must have the same configuration.
  void copy_from(const Transformer& source);

 private:
  struct Block {
    Norm attention_norm, mlp_norm;
    SelfAttention attention;
    Mlp mlp;
    Parameters parameters() const;
  };
  // The parameters and the modules that are made of them, in order.
  void build(const MakeParameter& make);
  Variable make_parameter(const ParameterSpec& spec, std::optional<uint64_t> seed);
  Variable run(const Pass& pass) const;
  // The residual stream after a block, as the summands of its last step.
  struct Sum {
    Variable x, branch;
  };
  // x: the residual stream. normed: first_norm() of it.
  Sum block(int index, const Variable& x, const Variable& normed, const Pass& pass) const;
  // What a block's first norm makes of the residual stream; undefined where norms come after.
  Variable first_norm(int index, const Variable& x) const;
  Variable recomputed_block(int index, const Variable& x, const Pass& pass) const;
  // What a sub-layer adds, after dropout.
  Variable drop(const Variable& x, const Pass& pass, int index, DropoutSite site) const;

  // A model that only lists its parameters.
  Transformer(const ModelConfig& config, const MakeParameter& make);
  friend std::vector<ParameterSpec> describe_parameters(const ModelConfig& config);

  ModelConfig config_;
  DType dtype_ = DType::kF32;
  Device device_;
  Variable embedding_, position_embedding_, head_;
  Norm final_norm_;
  std::vector<Block> blocks_;
  std::vector<NamedParameter> parameters_;
  std::vector<Variable> leaves_;
  Tensor rope_table_;
};

// The parameters that a model of this configuration would have, in order, without their tensors.
std::vector<ParameterSpec> describe_parameters(const ModelConfig& config);

}  // namespace cohort
