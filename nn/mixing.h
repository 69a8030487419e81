// The mixing of tokens in a forward: over a packed batch, or over the cache of open sequences.
#pragma once

#include "nn/kv_cache.h"
#include "nn/modules.h"

namespace cohort {

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
  CachedMixing(Tensor sequences, Tensor positions, KVCache& cache, CachedStep step)
      : sequences_(std::move(sequences)),
        positions_(std::move(positions)),
        cache_(cache),
        step_(step) {}
  Variable attention(AttentionCall call) const override;
  Variable gated_delta(const DeltaCall& call) const override;

 private:
  Tensor sequences_, positions_;
  KVCache& cache_;
  CachedStep step_;
};

}  // namespace cohort
