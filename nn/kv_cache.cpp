#include "nn/kv_cache.h"

#include <numeric>

#include "core/sizes.h"

namespace cohort {
namespace {

int64_t blocks_per_row(const KVCacheConfig& c) {
  return ceil_div(c.max_length, c.block_tokens);
}

}  // namespace

KVCache::KVCache(const KVCacheConfig& config, DType dtype, Device device)
    : config_(config), blocks_of_(static_cast<size_t>(config.num_sequences), 0) {
  const int64_t per_row = blocks_per_row(config), blocks = per_row * config.num_sequences;
  block_table_ = Tensor::full({config.num_sequences, per_row}, -1, DType::kI32);
  device_table_ = block_table_.to(device);
  const Shape shape{blocks, config.block_tokens, config.num_kv_heads, config.head_dim};
  for (int64_t i = 0; i < config.num_layers; ++i)
    layers_.push_back(
        {Tensor::empty(shape, dtype, device), Tensor::empty(shape, dtype, device), device_table_});
  // Stacks with the lowest number on top.
  free_rows_.resize(static_cast<size_t>(config.num_sequences));
  std::iota(free_rows_.rbegin(), free_rows_.rend(), 0);
  free_blocks_.resize(static_cast<size_t>(blocks));
  std::iota(free_blocks_.rbegin(), free_blocks_.rend(), 0);
}

int32_t KVCache::acquire() {
  COHORT_CHECK(!free_rows_.empty(), "[kv_cache] all ", config_.num_sequences,
               " sequences are in use");
  const int32_t row = free_rows_.back();
  free_rows_.pop_back();
  return row;
}

void KVCache::reserve(int32_t row, int64_t length) {
  COHORT_CHECK(length <= config_.max_length, "[kv_cache] a sequence of ", length,
               " tokens, room for ", config_.max_length);
  int64_t& held = blocks_of_[static_cast<size_t>(row)];
  int32_t* table = block_table_.data<int32_t>() + row * block_table_.dim(1);
  while (held * config_.block_tokens < length) {
    table[held++] = free_blocks_.back();
    free_blocks_.pop_back();
    table_changed_ = true;
  }
}

void KVCache::release(int32_t row) {
  int64_t& held = blocks_of_[static_cast<size_t>(row)];
  int32_t* table = block_table_.data<int32_t>() + row * block_table_.dim(1);
  while (held > 0) {
    free_blocks_.push_back(table[--held]);
    table[held] = -1;
    table_changed_ = true;
  }
  free_rows_.push_back(row);
}

void KVCache::upload() {
  if (table_changed_ && device_table_.device().is_cuda()) device_table_.copy_(block_table_);
  table_changed_ = false;
}

int64_t KVCache::bytes(const KVCacheConfig& c, DType dtype) {
  return 2 * c.num_layers * c.num_sequences * blocks_per_row(c) * c.block_tokens * c.num_kv_heads *
         c.head_dim * static_cast<int64_t>(dtype_size(dtype));
}

}  // namespace cohort
