#include "nn/block_table.h"

#include <numeric>
#include <set>

#include "core/check.h"
#include "kernels/delta_inputs.h"
#include "kernels/gated_delta/gated_delta.h"

namespace cohort {

BlockTable::BlockTable(const KVCacheConfig& config)
    : config_(config),
      row_blocks_(static_cast<size_t>(config.num_sequences)),
      table_(static_cast<size_t>(config.num_sequences * config.blocks_per_row()), -1),
      free_rows_(static_cast<size_t>(config.num_sequences)),
      free_blocks_(static_cast<size_t>(config.count_blocks())),
      ref_counts_(free_blocks_.size(), 0),
      row_states_(free_rows_.size(), -1),
      free_states_(static_cast<size_t>(config.count_states())),
      state_refs_(free_states_.size(), 0) {
  // Stacks with the lowest number on top.
  std::iota(free_states_.rbegin(), free_states_.rend(), 0);
  std::iota(free_rows_.rbegin(), free_rows_.rend(), 0);
  std::iota(free_blocks_.rbegin(), free_blocks_.rend(), 0);
}

int32_t BlockTable::acquire() {
  COHORT_CHECK(!free_rows_.empty(), "[kv_cache] all ", config_.num_sequences,
               " sequences are in use");
  const int32_t row = free_rows_.back();
  free_rows_.pop_back();
  return row;
}

int32_t BlockTable::allocate_block() {
  const int32_t block = free_blocks_.back();
  free_blocks_.pop_back();
  ref_counts_[static_cast<size_t>(block)] = 1;
  return block;
}

int32_t BlockTable::allocate_state() {
  const int32_t state = free_states_.back();
  free_states_.pop_back();
  state_refs_[static_cast<size_t>(state)] = 1;
  return state;
}

void BlockTable::release_state(int32_t state) {
  if (state >= 0 && --state_refs_[static_cast<size_t>(state)] == 0) free_states_.push_back(state);
}

void BlockTable::set_state(int32_t row, int32_t state) {
  if (std::exchange(row_states_[static_cast<size_t>(row)], state) != state)
    state_changes_.push_back(row);
}

void BlockTable::set_table(int32_t row, int64_t index, int32_t block) {
  const int64_t at = row * config_.blocks_per_row() + index;
  table_[static_cast<size_t>(at)] = block;
  changes_.push_back(static_cast<int32_t>(at));
}

bool BlockTable::reserve(int32_t row, int64_t length) {
  COHORT_CHECK(length <= config_.max_length, "[kv_cache] a sequence of ", length,
               " tokens exceeds the maximum length of ", config_.max_length);
  Blocks& blocks = row_blocks_[static_cast<size_t>(row)];
  const int64_t missing = blocks_for(length) - static_cast<int64_t>(blocks.size());
  const bool needs_state = has_states() && row_states_[static_cast<size_t>(row)] < 0;
  if (missing > free_blocks() || (needs_state && lacks_state())) return false;
  if (needs_state) set_state(row, allocate_state());
  for (int64_t i = 0; i < missing; ++i) {
    set_table(row, static_cast<int64_t>(blocks.size()), free_blocks_.back());
    blocks.push_back(allocate_block());
  }
  return true;
}

void BlockTable::release(int32_t row) {
  Blocks& blocks = row_blocks_[static_cast<size_t>(row)];
  for (size_t i = 0; i < blocks.size(); ++i) set_table(row, static_cast<int64_t>(i), -1);
  release_blocks(blocks, 0);
  release_state(row_states_[static_cast<size_t>(row)]);
  set_state(row, -1);
  free_rows_.push_back(row);
}

BlockTable::Held BlockTable::hold(int32_t row, int64_t length) {
  const Blocks& all = row_blocks_[static_cast<size_t>(row)];
  const auto count = static_cast<size_t>(blocks_for(length));
  COHORT_CHECK(count <= all.size(), "[kv_cache] row ", row, " has no ", length, " tokens");
  Blocks blocks(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
  for (const int32_t block : blocks) ++ref_counts_[static_cast<size_t>(block)];
  const int32_t state = row_states_[static_cast<size_t>(row)];
  if (state >= 0) ++state_refs_[static_cast<size_t>(state)];
  return {std::move(blocks), state};
}

bool BlockTable::own_state(Held& held) {
  if (!has_states()) return true;
  if (free_states() <= free_rows()) return false;
  const int32_t from = std::exchange(held.state, allocate_state());
  release_state(from);
  state_copies_.emplace_back(from, held.state);
  return true;
}

void BlockTable::shorten(Held& held, int64_t length) {
  release_blocks(held.blocks, static_cast<size_t>(blocks_for(length)));
  if (length == 0) release_state(std::exchange(held.state, -1));
}

bool BlockTable::state_serves(int64_t tokens, int64_t length) const {
  constexpr int64_t kInputs = kernels::kDeltaRing - 3;  // a convolution reads three
  return !has_states() || tokens == length ||
         (length > 0 && tokens - length <= kInputs &&
          (tokens - 1) / kernels::kDeltaChunk == (length - 1) / kernels::kDeltaChunk);
}

// Frees the blocks but the first `kept` ones.
void BlockTable::release_blocks(Blocks& blocks, size_t kept) {
  // In reverse, so that the next sequence gets the lowest numbers first.
  for (; blocks.size() > kept; blocks.pop_back()) {
    const int32_t block = blocks.back();
    if (--ref_counts_[static_cast<size_t>(block)] > 0) continue;
    free_blocks_.push_back(block);
    std::erase_if(copies_, [&](const auto& copy) { return copy.second == block; });
  }
}

bool BlockTable::start_with(int32_t row, const Held& held, int64_t length) {
  const Blocks& blocks = held.blocks;
  Blocks& row_blocks = row_blocks_[static_cast<size_t>(row)];
  COHORT_CHECK(row_blocks.empty() && blocks_for(length) == static_cast<int64_t>(blocks.size()),
               "[kv_cache] expected an empty row and the blocks of ", length, " tokens");
  const bool partial = length % config_.block_tokens != 0;
  if ((partial && free_blocks_.empty()) || lacks_state()) return false;
  row_blocks = blocks;
  for (const int32_t block : blocks) ++ref_counts_[static_cast<size_t>(block)];
  if (partial) {
    const int32_t from = std::exchange(row_blocks.back(), allocate_block());
    --ref_counts_[static_cast<size_t>(from)];
    copies_.emplace_back(from, row_blocks.back());
  }
  if (has_states()) {
    set_state(row, allocate_state());
    state_copies_.emplace_back(held.state, row_states_[static_cast<size_t>(row)]);
  }
  set_row(row);
  return true;
}

void BlockTable::resume(int32_t row, Held held) {
  COHORT_CHECK(row_blocks_[static_cast<size_t>(row)].empty(), "[kv_cache] expected an empty row");
  row_blocks_[static_cast<size_t>(row)] = std::move(held.blocks);
  set_state(row, held.state);
  set_row(row);
}

// Sets the elements of the table for the blocks of a row.
void BlockTable::set_row(int32_t row) {
  const Blocks& blocks = row_blocks_[static_cast<size_t>(row)];
  for (size_t i = 0; i < blocks.size(); ++i) set_table(row, static_cast<int64_t>(i), blocks[i]);
}

BlockTable::Changes BlockTable::take_changes() {
  Changes out{.at = std::exchange(changes_, {})};
  for (const int32_t at : out.at) out.values.push_back(table_[static_cast<size_t>(at)]);
  for (const auto& [from, to] : copies_) out.from_to.insert(out.from_to.end(), {from, to});
  copies_.clear();
  for (const int32_t row : out.rows = std::exchange(state_changes_, {}))
    out.states.push_back(row_states_[static_cast<size_t>(row)]);
  std::set<int32_t> copied, written;  // by the last batch
  for (const auto& [from, to] : std::exchange(state_copies_, {})) {
    if (out.state_batches.empty() || written.contains(from) || written.contains(to) ||
        copied.contains(to)) {
      out.state_batches.emplace_back();
      copied.clear();
      written.clear();
    }
    out.state_batches.back().insert(out.state_batches.back().end(), {from, to});
    copied.insert(from);
    written.insert(to);
  }
  return out;
}

}  // namespace cohort
