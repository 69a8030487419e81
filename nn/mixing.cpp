#include "nn/mixing.h"

#include "kernels/decode.h"

namespace cohort {

KVCacheConfig cache_config(const ModelConfig& c, int64_t num_sequences, int64_t num_blocks) {
  const auto layers = static_cast<int>(c.num_layers);
  int delta = 0;
  for (int i = 0; i < layers; ++i) delta += c.is_delta(i) ? 1 : 0;
  return {.num_layers = layers - delta,
          .num_kv_heads = c.num_kv_heads,
          .head_dim = c.head_dim,
          .num_sequences = num_sequences,
          .max_length = c.context,
          .num_blocks = num_blocks,
          .state = {delta, c.delta.key_heads, c.delta.value_heads, c.delta.value_dim}};
}

Variable PackedMixing::attention(AttentionCall call) const {
  Variable& qkv = call.qkv;
  call.desc.prefixes = batch_.prefixes;
  if (call.rope_table.defined() || call.kv_scales.defined())
    qkv =
        rope(std::move(qkv), batch_.positions, call.rope_table, call.num_kv_heads, call.kv_scales);
  return cohort::attention(qkv, call.num_kv_heads, batch_.cu_seqlens, call.desc, call.padding,
                           call.terms);
}

Variable PackedMixing::gated_delta(const DeltaCall& call) const {
  return cohort::gated_delta(call.in, call.dims, batch_.cu_seqlens, {.prefixes = batch_.prefixes});
}

int64_t block_bytes(const ModelConfig& model, DType dtype) {
  return KVCache::bytes(cache_config(model, 0, 1), dtype);
}

int64_t state_bytes(const ModelConfig& model, DType dtype) {
  return KVCache::bytes(cache_config(model, 1, 1), dtype) - block_bytes(model, dtype);
}

int64_t state_bytes_read(const ModelConfig& model, DType dtype, int64_t position) {
  const auto [layers, key_heads, heads, dim] = cache_config(model, 1, 1).state;
  const auto size = static_cast<int64_t>(dtype_size(dtype)),
             statistic = static_cast<int64_t>(dtype_size(accumulate_dtype(dtype)));
  const int64_t inputs = std::min<int64_t>(position, 3) * (2 * key_heads + heads) * dim * size,
                rows = (position - 1) % kernels::kDeltaChunk + 1,
                row = (key_heads + heads) * dim * size + heads * statistic,
                element = position <= kernels::kDeltaChunk ? 0
                          : rows == kernels::kDeltaChunk   ? statistic
                                                           : size;
  return layers * (inputs + rows * row + heads * dim * dim * element);
}

CachedMixing::CachedMixing(Tensor sequences, Tensor positions, KVCache& cache, CachedStep step)
    : sequences_(std::move(sequences)),
      positions_(std::move(positions)),
      cache_(cache),
      step_(step) {
  if (!cache.has_states()) return;
  states_ = Tensor::empty_like(sequences_);
  kernels::row_states({.states = states_, .rows = sequences_, .table = cache.row_states()});
}

Variable CachedMixing::attention(AttentionCall call) const {
  kernels::PagedKV pages = cache_.layer(call.layer);
  pages.scales = call.kv_scales;
  const kernels::AttentionDesc desc = call.terms.added_to(call.desc);
  Tensor& qkv = call.qkv.value();
  const Tensor q = qkv.narrow(1, 0, qkv.dim(1) - 2 * call.num_kv_heads);
  const Tensor rows = empty_rows(q.select(1, 0), q.dim(1) * q.dim(2), call.padding);
  Tensor o = rows.reshape(q.shape());
  const Tensor& table = call.rope_table;
  if (step_ == CachedStep::kDecode) {
    kernels::attention_decode({o, pages, qkv, sequences_, positions_, table, desc});
  } else {
    kernels::rope_kv_write({pages, qkv, sequences_, positions_, table});
    kernels::attention_paged({o, q, pages, sequences_, positions_, desc});
  }
  return Variable(rows);
}

Variable CachedMixing::gated_delta(const DeltaCall& call) const {
  auto& [state, ring] = cache_.delta_layer(call.layer);
  const kernels::DeltaSources in = call.in.values();
  kernels::DeltaTensors t = empty_delta_tensors(in.x, call.dims);
  const bool is_decode = step_ == CachedStep::kDecode;
  kernels::delta_inputs_cached({ring, t, in, states_, positions_, is_decode});
  Tensor o = Tensor::empty_like(t.v);
  kernels::gated_delta_cached({.o = o,
                               .state = state,
                               .in = t,
                               .states = states_,
                               .positions = positions_,
                               .is_decode = is_decode});
  return Variable(o);
}

}  // namespace cohort
