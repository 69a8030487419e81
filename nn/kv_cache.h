// The paged key/value cache of a model (Kwon et al. 2023): fixed blocks of tokens, handed to
// sequences as they grow through one block table that all layers share. Rows of the table are
// sequences. A block may be held several times: completions of one prompt share its blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention.h"

namespace cohort {

struct KVCacheConfig {
  int64_t num_layers = 0, num_kv_heads = 0, head_dim = 0;
  int64_t num_sequences = 0;  // rows of the block table
  int64_t max_length = 0;     // tokens a row can hold
  int64_t num_blocks = 0;     // of all rows; 0: enough for each at max_length
  int64_t block_tokens = 16;
};

class KVCache {
 public:
  using Blocks = std::vector<int32_t>;

  KVCache(const KVCacheConfig& config, DType dtype, Device device = {});

  // A free row. Throws Error if all are taken.
  int32_t acquire();
  // Makes room for tokens 0 .. length - 1 of a row. False if there are not enough free blocks; then
  // nothing has changed. Throws Error over max_length.
  [[nodiscard]] bool reserve(int32_t row, int64_t length);
  // Gives the row back, and what blocks nobody else holds.
  void release(int32_t row);

  // The blocks of a row's tokens 0 .. length - 1, held until drop() is called on them.
  Blocks hold(int32_t row, int64_t length);
  void drop(const Blocks& blocks);
  // Lets an empty row start with the `length` tokens of held blocks. It shares the full ones and
  // gets a copy of the last where that is not full, made by the next upload(). False if there is no
  // free block for the copy; then nothing has changed.
  [[nodiscard]] bool start_with(int32_t row, const Blocks& blocks, int64_t length);

  int64_t free_rows() const { return static_cast<int64_t>(free_rows_.size()); }
  int64_t free_blocks() const { return static_cast<int64_t>(free_blocks_.size()); }
  int64_t num_blocks() const { return static_cast<int64_t>(holders_.size()); }
  // Blocks of so many tokens.
  int64_t blocks_for(int64_t tokens) const;
  const KVCacheConfig& config() const { return config_; }
  // One layer's pages. Their block table is that of the last upload().
  kernels::PagedKV& layer(int i) { return layers_[static_cast<size_t>(i)]; }
  // Brings the layers' block table up to date and copies blocks, in the order of the device's
  // stream; call it after the functions above, before kernels read the cache. Addresses stay.
  void upload();
  // While nobody uses the cache: lends the memory of keys and values to whatever asks for some, and
  // takes it back. False while that is not possible. Without effect where it is done already.
  void lend();
  [[nodiscard]] bool take_back();
  // Bytes of keys and values.
  static int64_t bytes(const KVCacheConfig& config, DType dtype);

 private:
  struct Copy {
    int32_t from, to;
  };
  int32_t take_block();
  void set_table(int32_t row, int64_t index, int32_t block);

  KVCacheConfig config_;
  bool lent_ = false;
  Tensor pages_;  // [2 layers, blocks, block_tokens, Hkv, D]
  std::vector<kernels::PagedKV> layers_;
  std::vector<Blocks> blocks_of_;  // of each row
  std::vector<int32_t> table_;     // of rows and their blocks, -1 where there is none
  Tensor block_table_;             // what the layers see: the same as of the last upload()
  std::vector<int32_t> changes_;   // elements of the table since then
  std::vector<Copy> copies_;       // since then
  std::vector<int32_t> free_rows_, free_blocks_;
  std::vector<int32_t> holders_;  // of each block: rows and hold()s
};

}  // namespace cohort
