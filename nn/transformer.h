// A decoder-only transformer described by its configuration: Llama-like by default (RMSNorm, rotary
// positions, SwiGLU, grouped-query attention), GPT-2-like with LayerNorm, learned positions, GELU
// and biases.
//
// Transformer::block is the only definition of a block. Training passes it packed flash-attention,
// sampling passes it attention over the paged cache, and both run the same row ops: therefore their
// log-probs agree to the bit.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/non_copyable.h"
#include "data/packing.h"
#include "nn/kv_cache.h"
#include "nn/modules.h"

namespace cohort {

// The purpose of rng_stream() for initial weights.
inline constexpr uint64_t kInitPurpose = 1;

// Tokens of forward_cached(): any (prefill), or one per cache row (decode).
enum class CachedStep { kPrefill, kDecode };

class Transformer : NonCopyable {
 public:
  // Initialises every parameter from (seed, its index): N(0, init_std), output projections scaled
  // by 1 / sqrt(2 layers) (Radford et al. 2019), norms 1, biases 0: the same values on every
  // device, rounded to `dtype`. Without a seed matrices are left uninitialised, to be loaded or
  // copied. `config` must be resolved.
  Transformer(const ModelConfig& config, DType dtype, std::optional<uint64_t> seed,
              Device device = {});

  // Copies a batch to the model's device. Before a copy to a GPU, whose kernels do not check ids,
  // throws Error for a sequence over the context or a token outside the vocabulary.
  PackedBatch to_device(const PackedBatch& batch) const;

  // Hidden states after the last norm, [T, d_model], of packed sequences on the model's device. On
  // the CPU throws Error as to_device() does.
  Variable forward(const PackedBatch& batch, const ForwardOptions& options = {}) const;
  // Hidden states at the target positions, [L, d_model].
  Variable hidden_at_targets(const PackedBatch& batch, const ForwardOptions& options = {}) const;

  // Hidden states computed with the cache, without a tape: token t belongs to cache row
  // sequences[t] at positions[t] (both [T] i32). Writes keys and values to the cache, whose rows
  // must be reserved (KVCache::reserve()).
  Tensor forward_cached(const Tensor& tokens, const Tensor& sequences, const Tensor& positions,
                        KVCache& cache, CachedStep step = CachedStep::kPrefill) const;

  // The head's matrix [vocab, d_model] (the embedding table when tied).
  const Variable& head() const { return head_; }
  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  // The tensors that hold the parameters; one may hold several as rows (nn/parameter.h).
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
    size_t first_leaf = 0, end_leaf = 0;  // its parameters are leaves [first_leaf, end_leaf)
  };
  // Creates the parameters and modules in order.
  void build(const MakeParameter& make);
  Variable make_parameter(const ParameterSpec& spec, std::optional<uint64_t> seed);
  Variable run(const Pass& pass) const;
  // The residual stream after a block: x + branch, not yet added.
  struct Residual {
    Variable x, branch;
  };
  // x: the residual stream. normed: first_norm(index, x).
  Residual block(int index, const Variable& x, const Variable& normed, const Pass& pass) const;
  // Output of a block's first norm; undefined if norms follow the sub-layers.
  Variable first_norm(int index, const Variable& x) const;
  Variable recomputed_block(int index, const Variable& x, const Pass& pass) const;
  Variable apply_dropout(const Variable& x, const Pass& pass, int index, DropoutSite site) const;

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

// Parameters of a model with this configuration, in order, without their tensors.
std::vector<ParameterSpec> describe_parameters(const ModelConfig& config);

}  // namespace cohort
