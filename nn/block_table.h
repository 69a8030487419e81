// The block accounting of a paged key/value cache, without its memory (nn/kv_cache.h): which blocks
// of tokens each row has. Rows are sequences. Blocks are reference counted: completions share the
// blocks of their prompt.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/sizes.h"

namespace cohort {

struct KVCacheConfig {
  int64_t num_layers = 0, num_kv_heads = 0, head_dim = 0;
  int64_t num_sequences = 0;  // rows of the block table
  int64_t max_length = 0;     // tokens a row can hold
  int64_t num_blocks = 0;     // 0: enough for all rows at max_length
  static constexpr int64_t kBlockTokens = 16;
  int64_t block_tokens = kBlockTokens;
  int64_t blocks_per_row() const { return ceil_div(max_length, block_tokens); }
  int64_t count_blocks() const {
    return num_blocks > 0 ? num_blocks : blocks_per_row() * num_sequences;
  }
};

class BlockTable {
 public:
  using Blocks = std::vector<int32_t>;
  // Changes that memory on a device has not followed yet.
  struct Changes {
    std::vector<int32_t> at, values;  // elements of the table [rows, blocks per row]; -1: no block
    std::vector<int32_t> from_to;     // pairs of a block and the block that becomes its copy
  };

  explicit BlockTable(const KVCacheConfig& config);

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
  // a copy of a partial last one. Returns false and changes nothing if there is no free block for
  // the copy.
  [[nodiscard]] bool start_with(int32_t row, const Blocks& blocks, int64_t length);

  // Gives an empty row held blocks, whose holder it becomes.
  void resume(int32_t row, Blocks blocks);

  int64_t free_rows() const { return static_cast<int64_t>(free_rows_.size()); }
  int64_t free_blocks() const { return static_cast<int64_t>(free_blocks_.size()); }
  int64_t num_blocks() const { return static_cast<int64_t>(ref_counts_.size()); }
  // Number of blocks that hold this many tokens.
  int64_t blocks_for(int64_t tokens) const { return ceil_div(tokens, config_.block_tokens); }
  const KVCacheConfig& config() const { return config_; }
  // Returns the changes since the last call. They must be made, in stream order, after the writes
  // to the cache that preceded this call and before its next use.
  Changes take_changes();

 private:
  int32_t allocate_block();
  void set_table(int32_t row, int64_t index, int32_t block);
  void set_row(int32_t row);

  const KVCacheConfig config_;
  std::vector<Blocks> row_blocks_;
  std::vector<int32_t> table_;                       // [rows, blocks per row], -1: none
  std::vector<int32_t> changes_;                     // indices into table_
  std::vector<std::pair<int32_t, int32_t>> copies_;  // from one block to another
  std::vector<int32_t> free_rows_, free_blocks_;
  std::vector<int32_t> ref_counts_;  // per block: rows and hold()s
};

}  // namespace cohort
