// The paged key/value cache of a model: fixed blocks of tokens, handed to sequences through one
// block table that all layers share. Rows of the table are sequences; a released row's blocks serve
// the next one.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention.h"

namespace cohort {

struct KVCacheConfig {
  int64_t num_layers = 0, num_kv_heads = 0, head_dim = 0;
  int64_t num_sequences = 0;  // rows of the block table
  int64_t max_length = 0;     // tokens a row can hold
  int64_t block_tokens = 16;
};

class KVCache {
 public:
  // Enough blocks for every row at max_length.
  KVCache(const KVCacheConfig& config, DType dtype, Device device = {});

  // A free row. Throws Error if all are taken.
  int32_t acquire();
  // Makes room for tokens 0 .. length - 1 of a row. Throws Error over max_length.
  void reserve(int32_t row, int64_t length);
  // Gives the row and its blocks back.
  void release(int32_t row);

  int64_t free_rows() const { return static_cast<int64_t>(free_rows_.size()); }
  // One layer's pages. On CUDA their block table is that of the last upload().
  kernels::PagedKV& layer(int i) { return layers_[static_cast<size_t>(i)]; }
  // Brings the device's block table up to date; call it after acquire, reserve and release, before
  // kernels read the cache. The table's address stays. Nothing on the CPU.
  void upload();
  // Bytes of keys and values.
  static int64_t bytes(const KVCacheConfig& config, DType dtype);

 private:
  KVCacheConfig config_;
  std::vector<kernels::PagedKV> layers_;
  Tensor block_table_;          // on the host
  Tensor device_table_;         // what the layers see: the same tensor on the CPU
  bool table_changed_ = false;  // since the last upload()
  std::vector<int32_t> free_rows_, free_blocks_;
  std::vector<int64_t> blocks_of_;  // blocks each row holds
};

}  // namespace cohort
