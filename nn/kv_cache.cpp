#include "nn/kv_cache.h"

#include <numeric>
#include <utility>

#include "core/allocator.h"
#include "core/sizes.h"
#include "kernels/decode.h"

namespace cohort {
namespace {

int64_t blocks_per_row(const KVCacheConfig& c) {
  return ceil_div(c.max_length, c.block_tokens);
}

int64_t count_blocks(const KVCacheConfig& c) {
  return c.num_blocks > 0 ? c.num_blocks : blocks_per_row(c) * c.num_sequences;
}

Shape page_shape(const KVCacheConfig& c) {
  return {2 * c.num_layers, count_blocks(c), c.block_tokens, c.num_kv_heads, c.head_dim};
}

}  // namespace

KVCache::KVCache(const KVCacheConfig& config, DType dtype, Device device)
    : config_(config),
      pages_(Tensor::empty(page_shape(config), dtype, device)),
      row_blocks_(static_cast<size_t>(config.num_sequences)),
      table_(static_cast<size_t>(config.num_sequences * blocks_per_row(config)), -1),
      block_table_(
          Tensor::full({config.num_sequences, blocks_per_row(config)}, -1, DType::kI32, device)),
      free_rows_(static_cast<size_t>(config.num_sequences)),
      free_blocks_(static_cast<size_t>(count_blocks(config))),
      ref_counts_(free_blocks_.size(), 0) {
  COHORT_CHECK(block_table_.numel() < int64_t{1} << 31, "[kv_cache] a block table of ",
               block_table_.str(), " has too many elements");
  for (int64_t i = 0; i < config.num_layers; ++i)
    layers_.push_back({pages_.select(0, 2 * i), pages_.select(0, 2 * i + 1), block_table_});
  // Stacks with the lowest number on top.
  std::iota(free_rows_.rbegin(), free_rows_.rend(), 0);
  std::iota(free_blocks_.rbegin(), free_blocks_.rend(), 0);
}

int64_t KVCache::blocks_for(int64_t tokens) const {
  return ceil_div(tokens, config_.block_tokens);
}

int32_t KVCache::acquire() {
  COHORT_CHECK(!free_rows_.empty(), "[kv_cache] all ", config_.num_sequences,
               " sequences are in use");
  const int32_t row = free_rows_.back();
  free_rows_.pop_back();
  return row;
}

int32_t KVCache::allocate_block() {
  const int32_t block = free_blocks_.back();
  free_blocks_.pop_back();
  ref_counts_[static_cast<size_t>(block)] = 1;
  return block;
}

void KVCache::set_table(int32_t row, int64_t index, int32_t block) {
  const int64_t at = row * block_table_.dim(1) + index;
  table_[static_cast<size_t>(at)] = block;
  changes_.push_back(static_cast<int32_t>(at));
}

bool KVCache::reserve(int32_t row, int64_t length) {
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

void KVCache::release(int32_t row) {
  Blocks& blocks = row_blocks_[static_cast<size_t>(row)];
  release_blocks(blocks);
  for (size_t i = 0; i < blocks.size(); ++i) set_table(row, static_cast<int64_t>(i), -1);
  blocks.clear();
  free_rows_.push_back(row);
}

KVCache::Blocks KVCache::hold(int32_t row, int64_t length) {
  const Blocks& all = row_blocks_[static_cast<size_t>(row)];
  const auto count = static_cast<size_t>(blocks_for(length));
  COHORT_CHECK(count <= all.size(), "[kv_cache] row ", row, " has no ", length, " tokens");
  Blocks blocks(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
  for (const int32_t block : blocks) ++ref_counts_[static_cast<size_t>(block)];
  return blocks;
}

void KVCache::release_blocks(const Blocks& blocks) {
  // In reverse, so that the next sequence gets the lowest numbers first.
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    if (--ref_counts_[static_cast<size_t>(*block)] > 0) continue;
    free_blocks_.push_back(*block);
    std::erase_if(copies_, [&](const Copy& copy) { return copy.to == *block; });
  }
}

bool KVCache::start_with(int32_t row, const Blocks& blocks, int64_t length) {
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
    copies_.push_back({from, row_blocks.back()});
  }
  for (size_t i = 0; i < row_blocks.size(); ++i)
    set_table(row, static_cast<int64_t>(i), row_blocks[i]);
  return true;
}

void KVCache::upload() {
  const auto on_device = [&](const std::vector<int32_t>& values) {
    return Tensor::from(values).to(pages_.device());
  };
  if (!changes_.empty()) {
    std::vector<int32_t> values;
    for (const int32_t at : changes_) values.push_back(table_[static_cast<size_t>(at)]);
    kernels::set_elements(
        {.t = block_table_, .at = on_device(changes_), .values = on_device(values)});
  }
  if (!copies_.empty()) {
    std::vector<int32_t> from_to;
    for (const Copy& copy : copies_) from_to.insert(from_to.end(), {copy.from, copy.to});
    kernels::copy_blocks({.pages = pages_, .from_to = on_device(from_to)});
  }
  changes_.clear();
  copies_.clear();
}

void KVCache::release_to_pool() {
  if (!std::exchange(released_, true)) allocator(pages_.device()).release_to_pool(pages_.raw());
}

bool KVCache::reclaim() {
  if (released_) released_ = !allocator(pages_.device()).reclaim(pages_.raw());
  return !released_;
}

int64_t KVCache::bytes(const KVCacheConfig& c, DType dtype) {
  return page_shape(c).numel() * static_cast<int64_t>(dtype_size(dtype));
}

}  // namespace cohort
