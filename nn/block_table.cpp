#include "nn/block_table.h"

#include <numeric>

#include "core/check.h"

namespace cohort {

BlockTable::BlockTable(const KVCacheConfig& config)
    : config_(config),
      row_blocks_(static_cast<size_t>(config.num_sequences)),
      table_(static_cast<size_t>(config.num_sequences * config.blocks_per_row()), -1),
      free_rows_(static_cast<size_t>(config.num_sequences)),
      free_blocks_(static_cast<size_t>(config.count_blocks())),
      ref_counts_(free_blocks_.size(), 0) {
  // Stacks with the lowest number on top.
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
  if (missing > free_blocks()) return false;
  for (int64_t i = 0; i < missing; ++i) {
    set_table(row, static_cast<int64_t>(blocks.size()), free_blocks_.back());
    blocks.push_back(allocate_block());
  }
  return true;
}

void BlockTable::release(int32_t row) {
  Blocks& blocks = row_blocks_[static_cast<size_t>(row)];
  release_blocks(blocks);
  for (size_t i = 0; i < blocks.size(); ++i) set_table(row, static_cast<int64_t>(i), -1);
  blocks.clear();
  free_rows_.push_back(row);
}

BlockTable::Blocks BlockTable::hold(int32_t row, int64_t length) {
  const Blocks& all = row_blocks_[static_cast<size_t>(row)];
  const auto count = static_cast<size_t>(blocks_for(length));
  COHORT_CHECK(count <= all.size(), "[kv_cache] row ", row, " has no ", length, " tokens");
  Blocks blocks(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
  for (const int32_t block : blocks) ++ref_counts_[static_cast<size_t>(block)];
  return blocks;
}

void BlockTable::release_blocks(const Blocks& blocks) {
  // In reverse, so that the next sequence gets the lowest numbers first.
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    if (--ref_counts_[static_cast<size_t>(*block)] > 0) continue;
    free_blocks_.push_back(*block);
    std::erase_if(copies_, [&](const auto& copy) { return copy.second == *block; });
  }
}

bool BlockTable::start_with(int32_t row, const Blocks& blocks, int64_t length) {
  Blocks& row_blocks = row_blocks_[static_cast<size_t>(row)];
  COHORT_CHECK(row_blocks.empty() && blocks_for(length) == static_cast<int64_t>(blocks.size()),
               "[kv_cache] expected an empty row and the blocks of ", length, " tokens");
  const bool partial = length % config_.block_tokens != 0;
  if (partial && free_blocks_.empty()) return false;
  row_blocks = blocks;
  for (const int32_t block : blocks) ++ref_counts_[static_cast<size_t>(block)];
  if (partial) {
    const int32_t from = std::exchange(row_blocks.back(), allocate_block());
    --ref_counts_[static_cast<size_t>(from)];
    copies_.emplace_back(from, row_blocks.back());
  }
  set_row(row);
  return true;
}

void BlockTable::resume(int32_t row, Blocks blocks) {
  COHORT_CHECK(row_blocks_[static_cast<size_t>(row)].empty(), "[kv_cache] expected an empty row");
  row_blocks_[static_cast<size_t>(row)] = std::move(blocks);
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
  return out;
}

}  // namespace cohort
