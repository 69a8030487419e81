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
#include <span>
#include <vector>

#include "core/non_copyable.h"
#include "data/packing.h"
#include "nn/feed_forward.h"
#include "nn/kv_cache.h"
#include "nn/modules.h"

namespace cohort {

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
  const ParameterSet& parameters() const { return parameters_; }
  const ModelConfig& config() const { return config_; }
  DType dtype() const { return parameters_.dtype(); }
  Device device() const { return parameters_.device(); }

  // Copies the values of `source`, which must have the same configuration.
  void copy_from(const Transformer& source);
  // To be called whenever adapters have changed: writes s B behind the weights (nn/lora.h).
  void write_lora_columns();
  // Copies of the adapters' parameters, in order; empty if there are none. set_adapters() copies
  // such values to them, and allocates no memory of the device.
  std::vector<Tensor> adapters() const;
  void set_adapters(std::span<const Tensor> values);

 private:
  struct Block {
    Norm attention_norm, mlp_norm;
    SelfAttention attention;
    Mlp mlp;
  };
  // Creates the parameters and modules in order: the tables are unit 0, block i is unit i + 1.
  void build();
  // Creates the constants of the scheme of positions; after build().
  void build_positions();
  PositionTerms position_terms() const;
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

  ModelConfig config_;
  ParameterSet parameters_;
  // The table of positions is a constant if they are sinusoidal.
  Variable embedding_, position_embedding_, head_;
  Variable bias_table_;  // T5's, [position_buckets, H]; undefined: none
  Norm final_norm_;
  std::vector<Block> blocks_;
  std::vector<const Linear*> adapted_;  // the layers with adapters, in blocks_
  Tensor lora_workspace_;  // for write_lora_columns(), which must not run out of memory
  Tensor rope_table_, slopes_, buckets_;
};

}  // namespace cohort
