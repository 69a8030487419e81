#include "nn/kv_cache.h"

#include <utility>

#include "core/allocator.h"
#include "kernels/decode.h"

namespace cohort {
namespace {

Shape page_shape(const KVCacheConfig& c) {
  return {2 * c.num_layers, c.count_blocks(), c.block_tokens, c.num_kv_heads, c.head_dim};
}

}  // namespace

KVCache::KVCache(const KVCacheConfig& config, DType dtype, Device device)
    : BlockTable(config),
      pages_(Tensor::empty(page_shape(config), dtype, device)),
      block_table_(
          Tensor::full({config.num_sequences, config.blocks_per_row()}, -1, DType::kI32, device)),
      adapters_(Tensor::zeros({config.num_sequences}, DType::kI32, device)) {
  COHORT_CHECK(block_table_.numel() < int64_t{1} << 31, "[kv_cache] a block table of ",
               block_table_.str(), " has too many elements");
  for (int64_t i = 0; i < config.num_layers; ++i)
    layers_.push_back({pages_.select(0, 2 * i), pages_.select(0, 2 * i + 1), block_table_});
}

void KVCache::upload() {
  const auto on_device = [&](const std::vector<int32_t>& values) {
    return Tensor::from(values).to(pages_.device());
  };
  const Changes changes = take_changes();
  if (!changes.at.empty())
    kernels::set_elements(
        {.t = block_table_, .at = on_device(changes.at), .values = on_device(changes.values)});
  if (!changes.from_to.empty())
    kernels::copy_blocks({.pages = pages_, .from_to = on_device(changes.from_to)});
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
