// The block accounting of a paged key/value cache, without its memory (nn/kv_cache.h): which blocks
// of tokens each row has. Rows are sequences. Blocks are reference counted: completions share the
// blocks of their prompt.
//
// In a model with delta layers a row with tokens also has a state (kernels/gated_delta), from a
// pool of an eighth more than rows. States are not shared by rows, but copied.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/sizes.h"

namespace cohort {

// A sequence's states in the delta layers.
struct StateConfig {
  int64_t layers = 0, key_heads = 0, value_heads = 0, dim = 0;  // layers: 0: there are no states
};

struct KVCacheConfig {
  int64_t num_layers = 0, num_kv_heads = 0, head_dim = 0;  // layers with keys and values
  int64_t num_sequences = 0;                               // rows of the block table
  int64_t max_length = 0;                                  // tokens a row can hold
  int64_t num_blocks = 0;                                  // 0: enough for all rows at max_length
  static constexpr int64_t kBlockTokens = 16;
  int64_t block_tokens = kBlockTokens;
  StateConfig state = {};
  static constexpr double kStatesPerRow = 1.125;
  int64_t count_states() const { return state.layers > 0 ? num_sequences + num_sequences / 8 : 0; }
  int64_t blocks_per_row() const { return ceil_div(max_length, block_tokens); }
  int64_t count_blocks() const {
    return num_blocks > 0 ? num_blocks : blocks_per_row() * num_sequences;
  }
};

class BlockTable {
 public:
  using Blocks = std::vector<int32_t>;
  // Blocks of the first tokens of a sequence, and its state (-1: there are none).
  struct Held {
    Blocks blocks;
    int32_t state = -1;
    bool empty() const { return blocks.empty(); }
  };
  // Changes that memory on a device has not followed yet.
  struct Changes {
    std::vector<int32_t> at, values;  // elements of the table [rows, blocks per row]; -1: no block
    std::vector<int32_t> from_to;     // pairs of a block and the block that becomes its copy
    std::vector<int32_t> rows, states;  // the state of a row; -1: none
    // Pairs of states, to be copied batch by batch. In a batch no copied state is a copy.
    std::vector<std::vector<int32_t>> state_batches;
  };

  explicit BlockTable(const KVCacheConfig& config);

  // Allocates a row. Throws Error if all are in use.
  int32_t acquire();
  // Allocates blocks for tokens 0 .. length - 1 of a row, and a state if it has none. Returns false
  // and changes nothing if there are not enough free ones. Throws Error over max_length.
  [[nodiscard]] bool reserve(int32_t row, int64_t length);
  // Frees the row, and what it has that has no other holder.
  void release(int32_t row);

  // The blocks of a row's tokens 0 .. length - 1, and its state, which must not advance before the
  // row is released or own_state() is called. Held until shorten() to length 0.
  Held hold(int32_t row, int64_t length);
  // Makes the state of `held`, which is a row's, a copy in a spare state. Returns false and changes
  // nothing if no state is free besides one for each free row.
  [[nodiscard]] bool own_state(Held& held);
  // Frees what is held besides the first `length` tokens; with length 0 also the state.
  void shorten(Held& held, int64_t length);
  // Starts an empty row with the `length` tokens that are held. It shares the full blocks and gets
  // a copy of a partial last one, and of the state. Returns false and changes nothing if nothing is
  // free for the copies.
  [[nodiscard]] bool start_with(int32_t row, const Held& held, int64_t length);
  // Gives an empty row what is held, whose holder it becomes.
  void resume(int32_t row, Held held);
  // True if the state after `tokens` tokens serves as that after the first `length` of them: in the
  // chunk of the last one, and inputs of the convolution are kept (kernels/delta_inputs.h).
  bool state_serves(int64_t tokens, int64_t length) const;

  int64_t free_rows() const { return static_cast<int64_t>(free_rows_.size()); }
  int64_t free_blocks() const { return static_cast<int64_t>(free_blocks_.size()); }
  int64_t free_states() const { return static_cast<int64_t>(free_states_.size()); }
  bool has_states() const { return config_.state.layers > 0; }
  // True if a row without a state cannot get one.
  bool lacks_state() const { return has_states() && free_states_.empty(); }
  int64_t num_blocks() const { return static_cast<int64_t>(ref_counts_.size()); }
  // Number of blocks that hold this many tokens.
  int64_t blocks_for(int64_t tokens) const { return ceil_div(tokens, config_.block_tokens); }
  const KVCacheConfig& config() const { return config_; }
  // Returns the changes since the last call. They must be made, in stream order, after the writes
  // to the cache that preceded this call and before its next use.
  Changes take_changes();

 private:
  int32_t allocate_block();
  int32_t allocate_state();
  void release_blocks(Blocks& blocks, size_t kept);
  void release_state(int32_t state);
  void set_state(int32_t row, int32_t state);
  void set_table(int32_t row, int64_t index, int32_t block);
  void set_row(int32_t row);

  const KVCacheConfig config_;
  std::vector<Blocks> row_blocks_;
  std::vector<int32_t> table_;                       // [rows, blocks per row], -1: none
  std::vector<int32_t> changes_;                     // indices into table_
  std::vector<std::pair<int32_t, int32_t>> copies_;  // from one block to another
  std::vector<int32_t> free_rows_, free_blocks_;
  std::vector<int32_t> ref_counts_;  // per block: rows and hold()s
  std::vector<int32_t> row_states_;  // -1: none
  std::vector<int32_t> free_states_, state_refs_;
  std::vector<int32_t> state_changes_;                     // rows
  std::vector<std::pair<int32_t, int32_t>> state_copies_;  // in order
};

}  // namespace cohort
