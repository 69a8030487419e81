// The mixing of tokens in a forward: over a packed batch, or over the cache of open sequences.
#pragma once

#include "nn/kv_cache.h"
#include "nn/modules.h"

namespace cohort {

// The cache of a model.
KVCacheConfig cache_config(const ModelConfig& model, int64_t num_sequences, int64_t num_blocks);
// Bytes of a block of it, and of the states of a sequence.
int64_t block_bytes(const ModelConfig& model, DType dtype);
int64_t state_bytes(const ModelConfig& model, DType dtype);
// Bytes of these that decoding the token at `position`, at least 1, reads: inputs of convolutions,
// the rows of the chunk of the token before, and the matrices at its start, of which bf16 reads the
// high plane, but all to fold them.
int64_t state_bytes_read(const ModelConfig& model, DType dtype, int64_t position);

// Tokens of forward_cached(): any (prefill), or one per cache row (decode).
enum class CachedStep { kPrefill, kDecode };

class PackedMixing : public Mixing {
 public:
  explicit PackedMixing(PackedBatch batch) : batch_(std::move(batch)) {}
  Variable attention(AttentionCall call) const override;
  Variable gated_delta(const DeltaCall& call) const override;

 private:
  PackedBatch batch_;
};

// Token t is that of cache row sequences[t] at positions[t]. Refers to `cache`.
class CachedMixing : public Mixing {
 public:
  CachedMixing(Tensor sequences, Tensor positions, KVCache& cache, CachedStep step);
  Variable attention(AttentionCall call) const override;
  Variable gated_delta(const DeltaCall& call) const override;

 private:
  Tensor sequences_, positions_;
  Tensor states_;  // the sequences' in the cache; undefined: it has none
  KVCache& cache_;
  CachedStep step_;
};

}  // namespace cohort
