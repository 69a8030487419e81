// The paged key/value cache of a model (Kwon et al. 2023): fixed-size blocks of tokens, allocated
// to sequences as they grow, through one block table that all layers share. Beside it are the
// states of sequences in the delta layers.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/gated_delta/gated_delta.h"
#include "nn/block_table.h"

namespace cohort {

// The accounting of BlockTable, and the memory that it is about.
class KVCache : public BlockTable {
 public:
  KVCache(const KVCacheConfig& config, DType dtype, Device device = {});

  // Pages of a layer with attention, with the block table of the last upload(); i counts these.
  kernels::PagedKV& layer(int i) { return layers_[static_cast<size_t>(i)]; }
  // The states of a delta layer; i counts these.
  struct DeltaLayer {
    kernels::DeltaState state;
    Tensor ring;  // DeltaInputsCached::ring
  };
  DeltaLayer& delta_layer(int i) { return delta_layers_[static_cast<size_t>(i)]; }
  // [num_sequences] i32: the state of a row at the last upload(); -1: none.
  const Tensor& row_states() const { return row_states_; }
  // [num_sequences] i32: which of a model's adapters a row has; at first 0.
  const Tensor& adapters() const { return adapters_; }
  // Makes the changes of the block table on the device: updates the layers' block table and the
  // rows' states, and copies blocks and states, in stream order. Must be called after functions of
  // BlockTable and before kernels read the cache. Addresses do not change.
  void upload();
  // Between uses of the cache: makes its memory, whose contents are lost, available to other
  // allocations (Allocator::release_to_pool()), and reclaims it. reclaim() returns false while that
  // memory is in use. Repeated calls have no effect.
  void release_to_pool();
  [[nodiscard]] bool reclaim();
  // Bytes of keys, values and states.
  static int64_t bytes(const KVCacheConfig& config, DType dtype);

 private:
  struct Memory {
    Tensor tensor;
    bool released = false;
  };
  Tensor allocate(const Shape& shape, DType dtype, Device device);

  std::vector<Memory> memory_;  // all that has a size
  Tensor pages_;                // [2 layers, blocks, block_tokens, Hkv, D]
  std::vector<Tensor> states_;  // [delta layers, states, ...], as in DeltaLayer
  std::vector<DeltaLayer> delta_layers_;
  std::vector<kernels::PagedKV> layers_;
  Tensor block_table_;  // device copy of the block table at the last upload()
  Tensor adapters_, row_states_;
};

}  // namespace cohort
