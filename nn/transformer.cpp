#include "nn/transformer.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "kernels/head.h"
#include "nn/positions.h"

namespace cohort {

static std::optional<uint64_t> adapter_seed(const ModelConfig& config) {
  return config.lora.rank > 0 ? std::optional(config.lora.seed) : std::nullopt;
}

Transformer::Transformer(const ModelConfig& config, DType dtype, std::optional<uint64_t> seed,
                         Device device)
    : config_(config), parameters_(dtype, device, seed, adapter_seed(config)) {
  config.check_device(device);
  build();
  build_positions();
}

void Transformer::build_positions() {
  const ModelConfig& c = config_;
  const DType statistics = accumulate_dtype(dtype());
  if (c.is_rotated()) rope_table_ = rotary_table(c, statistics).to(device());
  if (c.position == PositionType::kSinusoidal)
    position_embedding_ = Variable(sinusoidal_table(c.context, c.d_model).to(dtype()).to(device()));
  if (c.position == PositionType::kAlibi)
    slopes_ = alibi_slopes(c.num_heads).to(statistics).to(device());
  if (c.position == PositionType::kT5)
    buckets_ = t5_buckets(c.position_buckets, c.position_max_distance).to(device());
}

PositionTerms Transformer::position_terms() const {
  PositionTerms terms{.rope_table = rope_table_, .slopes = slopes_};
  if (bias_table_.defined()) terms.bias = relative_bias(bias_table_, buckets_);
  return terms;
}

void Transformer::build() {
  using Use = ParameterUse;
  const ModelConfig& c = config_;
  ParameterSet& set = parameters_;
  COHORT_CHECK(c.vocab_size > 0 && c.head_dim > 0 && c.d_ff > 0,
               "[transformer] expected a resolved configuration");
  const auto table = [&](const char* name, int64_t rows, Use use) {
    // A table that is the head's matrix has the rows that its matmuls want.
    const int64_t leaf_rows = use == Use::kMatmul ? kernels::head_rows(rows, device()) : rows;
    return set.add({.name = name,
                    .shape = {rows, c.d_model},
                    .use = use,
                    .init = c.init_std,
                    .leaf_rows = leaf_rows});
  };
  // A tied table is also the head's matrix.
  embedding_ = table("model.embed_tokens.weight", c.vocab_size,
                     c.tie_embeddings ? Use::kMatmul : Use::kLookup);
  if (c.position == PositionType::kLearned)
    position_embedding_ =
        table("model.embed_positions.weight", std::max(c.context, c.position_rows), Use::kLookup);
  if (c.position == PositionType::kT5)
    bias_table_ = set.add({.name = "model.relative_attention_bias.weight",
                           .shape = {c.position_buckets, c.num_heads},
                           .use = Use::kLookup,
                           .init = c.init_std});
  const AdapterTargets adapters(c);
  for (int i = 0; i < c.num_layers; ++i) {
    const std::string prefix = str("model.layers.", i, ".");
    // Each norm precedes or follows its sub-layer; the names are Hugging Face's.
    Block& block = blocks_.emplace_back();
    set.begin_unit();
    if (!c.family.norm_after) block.attention_norm = Norm(set, prefix + "input_layernorm", c);
    block.attention = SelfAttention(set, prefix + "self_attn", c, adapters, i);
    if (c.family.norm_after)
      block.attention_norm = Norm(set, prefix + "post_attention_layernorm", c);
    if (!c.family.norm_after) block.mlp_norm = Norm(set, prefix + "post_attention_layernorm", c);
    block.mlp = Mlp(set, prefix + "mlp", c, adapters);
    if (c.family.norm_after) block.mlp_norm = Norm(set, prefix + "post_feedforward_layernorm", c);
    if (c.family.norm_after) continue;
    block.attention_norm.set_padding(block.attention.layers()[0].input_padding());
    block.mlp_norm.set_padding(block.mlp.layers()[0].input_padding());
  }
  int64_t largest = 0;  // elements of a layer's B
  for (const Block& block : blocks_)
    for (const auto& layers : {block.attention.layers(), block.mlp.layers()})
      for (const Linear& layer : layers) {
        if (!layer.lora.defined()) continue;
        adapted_.push_back(&layer);
        largest = std::max(largest, layer.lora.b.value().numel());
      }
  if (largest > 0) lora_workspace_ = Tensor::empty({largest}, dtype(), device());
  set.begin_unit();
  final_norm_ = Norm(set, "model.norm", c);
  head_ = c.tie_embeddings ? embedding_ : table("lm_head.weight", c.vocab_size, Use::kMatmul);
}

PackedBatch Transformer::to_device(const PackedBatch& batch) const {
  if (device().is_cuda() && batch.tokens.device().is_cpu()) {
    const auto check = [](const char* name, const Tensor& values, int64_t low, int64_t end) {
      const int32_t* value = values.data<int32_t>();
      for (int64_t t = 0; t < values.numel(); ++t)
        COHORT_CHECK(value[t] >= low && value[t] < end, "[transformer] ", name, " ", value[t],
                     " at index ", t, " of the batch, expected ", low, " to ", end - 1);
    };
    check("token", batch.tokens, 0, config_.vocab_size);
    check("position", batch.positions, 0, config_.context);
    check("target position", batch.target_positions, 0, batch.size());
    check("target", batch.targets, 0, config_.vocab_size);
  }
  return batch.to(device());
}

Variable Transformer::forward(const PackedBatch& batch, const ForwardOptions& options) const {
  const auto packed_attention = [cu_seqlens = batch.cu_seqlens, prefixes = batch.prefixes,
                                 positions = batch.positions](AttentionCall call) {
    Variable& qkv = call.qkv;
    call.desc.prefixes = prefixes;
    if (call.rope_table.defined())
      qkv = rope(std::move(qkv), positions, call.rope_table, call.num_kv_heads);
    return attention(qkv, call.num_kv_heads, cu_seqlens, call.desc, call.padding, call.terms);
  };
  return run({batch.tokens, batch.positions, batch.sequences, options, packed_attention,
              position_terms()});
}

Variable Transformer::hidden_at_targets(const PackedBatch& batch,
                                        const ForwardOptions& options) const {
  return select_rows(forward(batch, options), batch.target_positions);
}

// COHORT_PREFETCH=0 turns prefetching off, to find out whether wrong results come from it.
static bool allows_prefetch() {
  const char* const setting = std::getenv("COHORT_PREFETCH");
  return setting == nullptr || std::string_view(setting) != "0";
}

Tensor Transformer::forward_cached(const Tensor& tokens, const Tensor& sequences,
                                   const Tensor& positions, KVCache& cache, CachedStep step) const {
  NoGradGuard no_grad;
  Stream stream = current_stream(device());
  stream.may_prefetch = allows_prefetch();  // run() begins with the embedding
  const StreamGuard guard(stream);
  const auto cached_attention = [&](AttentionCall call) {
    kernels::PagedKV& pages = cache.layer(call.layer);
    const kernels::AttentionDesc desc = call.terms.added_to(call.desc);
    Tensor& qkv = call.qkv.value();
    const Tensor q = qkv.narrow(1, 0, qkv.dim(1) - 2 * call.num_kv_heads);
    const Tensor rows = empty_rows(q.select(1, 0), q.dim(1) * q.dim(2), call.padding);
    Tensor o = rows.reshape(q.shape());
    if (step == CachedStep::kDecode) {
      kernels::attention_decode({.o = o,
                                 .cache = pages,
                                 .qkv = qkv,
                                 .sequences = sequences,
                                 .positions = positions,
                                 .table = call.rope_table,
                                 .desc = desc});
      return Variable(rows);
    }
    kernels::rope_kv_write({.cache = pages,
                            .qkv = qkv,
                            .sequences = sequences,
                            .positions = positions,
                            .table = call.rope_table});
    kernels::attention_paged({.o = o,
                              .q = q,
                              .cache = pages,
                              .sequences = sequences,
                              .positions = positions,
                              .desc = desc});
    return Variable(rows);
  };
  return run({tokens, positions, {}, {}, cached_attention, position_terms()}).value();
}

Variable Transformer::apply_dropout(const Variable& x, const Pass& pass, int index,
                                    DropoutSite site) const {
  return dropout(x, dropout_spec(config_.dropout, pass, index, site));
}

Variable Transformer::run(const Pass& pass) const {
  Variable x = embedding(embedding_, pass.tokens);
  if (config_.family.embedding_scale != 1) x = scale(x, config_.family.embedding_scale);
  if (position_embedding_.defined()) x = add(x, embedding(position_embedding_, pass.positions));
  x = apply_dropout(x, pass, -1, DropoutSite::kEmbedding);
  const auto num_blocks = static_cast<int>(blocks_.size());
  if (config_.recompute == Recompute::kBlock && grad_enabled()) {
    for (int i = 0; i < num_blocks; ++i) x = recomputed_block(i, x, pass);
    return final_norm_(x);
  }
  Variable normed = first_norm(0, x);
  for (int i = 0; i < num_blocks; ++i) {
    const Residual end = block(i, x, normed, pass);
    const bool last = i + 1 == num_blocks;
    if (!last && config_.family.norm_after) {
      x = add(end.x, end.branch);
      continue;
    }
    // One kernel computes the sum and the next norm, the following block's or the final one.
    const Norm& next = last ? final_norm_ : blocks_[static_cast<size_t>(i) + 1].attention_norm;
    const AddNorm y = next.add(end.x, end.branch);
    x = y.sum;
    normed = y.normed;
  }
  return normed;
}

Variable Transformer::first_norm(int index, const Variable& x) const {
  return config_.family.norm_after ? Variable()
                                   : blocks_[static_cast<size_t>(index)].attention_norm(x);
}

Transformer::Residual Transformer::block(int index, const Variable& x, const Variable& normed,
                                         const Pass& pass) const {
  const Block& b = blocks_[static_cast<size_t>(index)];
  if (config_.family.norm_after) {
    const Variable y = add(x, apply_dropout(b.attention_norm(b.attention(x, pass)), pass, index,
                                            DropoutSite::kAttentionOut));
    return {y, apply_dropout(b.mlp_norm(b.mlp(y, pass)), pass, index, DropoutSite::kMlpOut)};
  }
  const Variable attention_out =
      apply_dropout(b.attention(normed, pass), pass, index, DropoutSite::kAttentionOut);
  const AddNorm y = b.mlp_norm.add(x, attention_out);
  return {y.sum, apply_dropout(b.mlp(y.normed, pass), pass, index, DropoutSite::kMlpOut)};
}

Variable Transformer::recomputed_block(int index, const Variable& x, const Pass& pass) const {
  const ParameterUnit& unit = parameters_.units()[static_cast<size_t>(index) + 1];
  // The closure outlives this call: it copies the pass, whose `attention` must not refer to this
  // stack.
  const Variable inputs[] = {x, pass.position_terms.bias};
  return checkpoint(
      [this, index, pass](std::span<const Variable> in) {
        Pass inner = pass;
        inner.position_terms.bias = in[1];
        const Residual end = block(index, in[0], first_norm(index, in[0]), inner);
        return add(end.x, end.branch);
      },
      inputs,
      std::span(parameters_.trained()).subspan(unit.first_leaf, unit.end_leaf - unit.first_leaf));
}

void Transformer::copy_from(const Transformer& source) {
  COHORT_CHECK(parameters_.size() == source.parameters_.size(), "[copy_from] models differ");
  for (size_t i = 0; i < parameters_.size(); ++i)
    Tensor(parameters_[i].value).copy_(source.parameters_[i].value);
  write_lora_columns();
}

std::vector<Tensor> Transformer::adapters() const {
  std::vector<Tensor> out;
  for (const NamedParameter& p : parameters_)
    if (p.role == ParameterRole::kAdapter) out.push_back(p.value.clone());
  return out;
}

void Transformer::set_adapters(std::span<const Tensor> values) {
  std::vector<Tensor> own;
  for (const NamedParameter& p : parameters_)
    if (p.role == ParameterRole::kAdapter) own.push_back(p.value);
  COHORT_CHECK(own.size() == values.size(), "[transformer] expected ", own.size(),
               " tensors of adapters, got ", values.size());
  for (size_t i = 0; i < own.size(); ++i) own[i].copy_(values[i]);
  write_lora_columns();
}

void Transformer::write_lora_columns() {
  for (const Linear* layer : adapted_)
    cohort::write_lora_columns(layer->lora, layer->weight, lora_workspace_);
}

}  // namespace cohort
