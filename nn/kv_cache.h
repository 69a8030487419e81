// The paged key/value cache of a model (Kwon et al. 2023): fixed-size blocks of tokens, allocated
// to sequences as they grow, through one block table that all layers share.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention.h"
#include "nn/block_table.h"

namespace cohort {

// The accounting of BlockTable, and the memory that it is about.
class KVCache : public BlockTable {
 public:
  KVCache(const KVCacheConfig& config, DType dtype, Device device = {});

  // Pages of one layer, with the block table of the last upload().
  kernels::PagedKV& layer(int i) { return layers_[static_cast<size_t>(i)]; }
  // [num_sequences] i32: which of a model's adapters a row has; at first 0.
  const Tensor& adapters() const { return adapters_; }
  // Makes the changes of the block table on the device: updates the layers' block table and copies
  // blocks, in stream order. Must be called after functions of BlockTable and before kernels read
  // the cache. Addresses do not change.
  void upload();
  // Between uses of the cache: makes the memory of keys and values, whose contents are lost,
  // available to other allocations (Allocator::release_to_pool()), and reclaims it. reclaim()
  // returns false while that memory is in use. Repeated calls have no effect.
  void release_to_pool();
  [[nodiscard]] bool reclaim();
  // Bytes of keys and values.
  static int64_t bytes(const KVCacheConfig& config, DType dtype);

 private:
  bool released_ = false;
  Tensor pages_;  // [2 layers, blocks, block_tokens, Hkv, D]
  std::vector<kernels::PagedKV> layers_;
  Tensor block_table_;  // device copy of the block table at the last upload()
  Tensor adapters_;
};

}  // namespace cohort
