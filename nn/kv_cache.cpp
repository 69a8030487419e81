#include "nn/kv_cache.h"

#include <utility>

#include "core/allocator.h"
#include "kernels/decode.h"
#include "kernels/delta_inputs.h"

namespace cohort {
namespace {

Shape page_shape(const KVCacheConfig& c) {
  return {2 * c.num_layers, c.count_blocks(), c.block_tokens, c.num_kv_heads, c.head_dim};
}

struct StateTensor {
  Shape shape;  // [layers, states, ...]
  DType dtype;
};
// The tensors of KVCache::DeltaLayer, in order.
std::vector<StateTensor> state_tensors(const KVCacheConfig& c, DType dtype) {
  const auto [layers, key_heads, heads, dim] = c.state;
  const int64_t n = c.count_states(), channels = (2 * key_heads + heads) * dim;
  const DType statistic = accumulate_dtype(dtype);
  return {{{layers, n, heads, dim, dim}, statistic},
          {{layers, n, kernels::kDeltaChunk, key_heads, dim}, dtype},
          {{layers, n, kernels::kDeltaChunk, heads, dim}, dtype},
          {{layers, n, kernels::kDeltaChunk, heads}, statistic},
          {{layers, n, kernels::kDeltaRing, channels}, dtype}};
}

}  // namespace

Tensor KVCache::allocate(const Shape& shape, DType dtype, Device device) {
  const Tensor out = Tensor::empty(shape, dtype, device);
  if (out.numel() > 0) memory_.push_back({out});
  return out;
}

KVCache::KVCache(const KVCacheConfig& config, DType dtype, Device device)
    : BlockTable(config),
      pages_(allocate(page_shape(config), dtype, device)),
      block_table_(
          Tensor::full({config.num_sequences, config.blocks_per_row()}, -1, DType::kI32, device)),
      adapters_(Tensor::zeros({config.num_sequences}, DType::kI32, device)),
      row_states_(Tensor::full({config.num_sequences}, -1, DType::kI32, device)) {
  COHORT_CHECK(block_table_.numel() < int64_t{1} << 31, "[kv_cache] a block table of ",
               block_table_.str(), " has too many elements");
  for (int64_t i = 0; i < config.num_layers; ++i)
    layers_.push_back({pages_.select(0, 2 * i), pages_.select(0, 2 * i + 1), block_table_});
  if (!has_states()) return;
  for (const StateTensor& t : state_tensors(config, dtype))
    states_.push_back(allocate(t.shape, t.dtype, device));
  for (int64_t i = 0; i < config.state.layers; ++i) {
    const auto of_layer = [&](size_t t) { return states_[t].select(0, i); };
    delta_layers_.push_back({{of_layer(0), of_layer(1), of_layer(2), of_layer(3)}, of_layer(4)});
  }
}

void KVCache::upload() {
  const auto on_device = [&](const std::vector<int32_t>& values) {
    return Tensor::from(values).to(pages_.device());
  };
  const Changes changes = take_changes();
  if (!changes.at.empty())
    kernels::set_elements(
        {.t = block_table_, .at = on_device(changes.at), .values = on_device(changes.values)});
  if (!changes.from_to.empty() && pages_.numel() > 0)
    kernels::copy_blocks({.pages = pages_, .from_to = on_device(changes.from_to)});
  if (!changes.rows.empty())
    kernels::set_elements(
        {.t = row_states_, .at = on_device(changes.rows), .values = on_device(changes.states)});
  for (const std::vector<int32_t>& batch : changes.state_batches)
    for (Tensor& t : states_) kernels::copy_blocks({.pages = t, .from_to = on_device(batch)});
}

void KVCache::release_to_pool() {
  for (auto& [tensor, released] : memory_)
    if (!std::exchange(released, true)) allocator(tensor.device()).release_to_pool(tensor.raw());
}

bool KVCache::reclaim() {
  bool all = true;
  for (auto& [tensor, released] : memory_) {
    if (released) released = !allocator(tensor.device()).reclaim(tensor.raw());
    all = all && !released;
  }
  return all;
}

int64_t KVCache::bytes(const KVCacheConfig& c, DType dtype) {
  int64_t bytes = page_shape(c).numel() * static_cast<int64_t>(dtype_size(dtype));
  if (c.state.layers == 0) return bytes;
  for (const StateTensor& t : state_tensors(c, dtype))
    bytes += t.shape.numel() * static_cast<int64_t>(dtype_size(t.dtype));
  return bytes;
}

}  // namespace cohort
