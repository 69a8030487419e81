// A transformer described by its configuration: Llama-like by default (RMSNorm, rotary positions,
// SwiGLU, grouped-query attention), GPT-2-like with LayerNorm, learned positions, GELU and biases,
// or an encoder, as BERT and ViT.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "core/non_copyable.h"
#include "data/packing.h"
#include "nn/backbone.h"
#include "nn/head.h"
#include "nn/mixing.h"

namespace cohort {

class Transformer : NonCopyable {
 public:
  // Initialises every parameter from (seed, its index): N(0, init_std), output projections scaled
  // by 1 / sqrt(2 layers) (Radford et al. 2019), norms 1, biases 0: the same values on every
  // device, rounded to `dtype`. Without a seed matrices are left uninitialised, to be loaded or
  // copied. `config` must be resolved.
  Transformer(const ModelConfig& config, DType dtype, std::optional<uint64_t> seed,
              Device device = {});

  // Copies a batch to the model's device. Before a copy to a GPU, whose kernels do not check ids,
  // throws Error for a sequence over the context, a token, type or target out of range, or images
  // of another size.
  PackedBatch to_device(const PackedBatch& batch) const;

  // Hidden states after the last norm, [T, d_model], of packed sequences on the model's device. On
  // the CPU throws Error as to_device() does.
  Variable forward(const PackedBatch& batch, const ForwardOptions& options = {}) const;
  // The head's input at the target positions, or the output of a pooler, [L, d_model].
  Variable hidden_at_targets(const PackedBatch& batch, const ForwardOptions& options = {}) const;

  // Hidden states computed with the cache, without a tape: token t belongs to cache row
  // sequences[t] at positions[t] (both [T] i32). Writes keys and values to the cache, whose rows
  // must be reserved (KVCache::reserve()).
  Tensor forward_cached(const Tensor& tokens, const Tensor& sequences, const Tensor& positions,
                        KVCache& cache, CachedStep step = CachedStep::kPrefill) const;

  // The weights of the logits: [vocab, d_model], the embedding table when tied; of classes [labels,
  // d_model].
  const HeadWeights& head() const { return head_.weights(); }
  const ParameterSet& parameters() const { return parameters_; }
  const ModelConfig& config() const { return config_; }
  DType dtype() const { return parameters_.dtype(); }
  Device device() const { return parameters_.device(); }
  DType cache_dtype() const { return cohort::cache_dtype(config_, dtype()); }

  // Copies the values of `source`, which must have the same configuration.
  void copy_from(const Transformer& source);
  // See Backbone::before_block().
  void before_block(std::function<void(size_t unit)> hook) {
    backbone_.before_block(std::move(hook));
  }
  // To be called whenever parameters have changed: writes what follows from them, s B of adapters
  // behind the weights (nn/lora.h) and the scales of keys and values.
  void update_derived();
  // Copies of the adapters' parameters, in order; empty if there are none. set_adapters() copies
  // such values to them, and allocates no memory of the device.
  std::vector<Tensor> adapters() const;
  void set_adapters(std::span<const Tensor> values);
  // Sets the adapter `slot`, from 1 on, of config().lora.slots, which have one rank and the same
  // modules. forward() has the first one; forward_cached() that of each row of the cache.
  void set_adapter_slot(int64_t slot, std::span<const Tensor> values, double scale);

 private:
  Variable run(const Pass& pass) const { return backbone_(embedding_(pass), pass); }

  ModelConfig config_;
  ParameterSet parameters_;
  // Their parameters in order: the tables are unit 0, block i is unit i + 1, the end the last one.
  Embedding embedding_;
  Backbone backbone_;
  Head head_;
  std::vector<const Linear*> adapted_;  // the layers with adapters
  Tensor lora_workspace_;               // for update_derived(), which must not run out of memory
};

}  // namespace cohort
