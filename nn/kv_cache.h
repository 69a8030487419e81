// The paged key/value cache of a model (Kwon et al. 2023): fixed-size blocks of tokens, allocated
// to sequences as they grow, through one block table that all layers share. Rows of the table are
// sequences. Blocks are reference counted: completions share the blocks of their prompt.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention.h"

namespace cohort {

struct KVCacheConfig {
  int64_t num_layers = 0, num_kv_heads = 0, head_dim = 0;
  int64_t num_sequences = 0;  // rows of the block table
  int64_t max_length = 0;     // tokens a row can hold
  int64_t num_blocks = 0;     // 0: enough for all rows at max_length
  int64_t block_tokens = 16;
};

class KVCache {
 public:
  using Blocks = std::vector<int32_t>;

  KVCache(const KVCacheConfig& config, DType dtype, Device device = {});

  // Allocates a row. Throws Error if all are in use.
  int32_t acquire();
  // Allocates blocks for tokens 0 .. length - 1 of a row. Returns false and changes nothing if
  // there are not enough free blocks. Throws Error over max_length.
  [[nodiscard]] bool reserve(int32_t row, int64_t length);
  // Frees the row, and the blocks that have no other holder.
  void release(int32_t row);

  // The blocks of a row's tokens 0 .. length - 1, held until release_blocks().
  Blocks hold(int32_t row, int64_t length);
  void release_blocks(const Blocks& blocks);
  // Starts an empty row with the `length` tokens of held blocks. It shares the full blocks and gets
  // a copy of a partial last one, made by the next upload(). Returns false and changes nothing if
  // there is no free block for the copy.
  [[nodiscard]] bool start_with(int32_t row, const Blocks& blocks, int64_t length);

  int64_t free_rows() const { return static_cast<int64_t>(free_rows_.size()); }
  int64_t free_blocks() const { return static_cast<int64_t>(free_blocks_.size()); }
  int64_t num_blocks() const { return static_cast<int64_t>(ref_counts_.size()); }
  // Number of blocks that hold this many tokens.
  int64_t blocks_for(int64_t tokens) const;
  const KVCacheConfig& config() const { return config_; }
  // Pages of one layer, with the block table of the last upload().
  kernels::PagedKV& layer(int i) { return layers_[static_cast<size_t>(i)]; }
  // Updates the layers' block table and copies blocks, in stream order. Must be called after the
  // functions above and before kernels read the cache. Addresses do not change.
  void upload();
  // Between uses of the cache: makes the memory of keys and values, whose contents are lost,
  // available to other allocations (Allocator::release_to_pool()), and reclaims it. reclaim()
  // returns false while that memory is in use. Repeated calls have no effect.
  void release_to_pool();
  [[nodiscard]] bool reclaim();
  // Bytes of keys and values.
  static int64_t bytes(const KVCacheConfig& config, DType dtype);

 private:
  struct Copy {
    int32_t from, to;
  };
  int32_t allocate_block();
  void set_table(int32_t row, int64_t index, int32_t block);

  KVCacheConfig config_;
  bool released_ = false;
  Tensor pages_;  // [2 layers, blocks, block_tokens, Hkv, D]
  std::vector<kernels::PagedKV> layers_;
  std::vector<Blocks> row_blocks_;
  std::vector<int32_t> table_;    // [rows, blocks per row], -1: none
  Tensor block_table_;            // device copy of table_ at the last upload()
  std::vector<int32_t> changes_;  // indices into table_ changed since then
  std::vector<Copy> copies_;      // pending block copies
  std::vector<int32_t> free_rows_, free_blocks_;
  std::vector<int32_t> ref_counts_;  // per block: rows and hold()s
};

}  // namespace cohort
