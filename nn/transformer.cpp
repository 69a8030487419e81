#include "nn/transformer.h"

#include <algorithm>

#include "core/parallel.h"
#include "core/rng.h"
#include "kernels/rope.h"

namespace cohort {

namespace {

// N(0, std), computed in f64 on the CPU: the same values for every device.
Tensor normal_values(const Shape& shape, double std, uint64_t seed, uint64_t stream) {
  Tensor value = Tensor::empty(shape, DType::kF64);
  double* p = value.data<double>();
  parallel_for(value.numel(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 2) {
      const auto pair = normal_pair(seed, stream, static_cast<uint64_t>(i / 2));
      p[i] = std * pair[0];
      if (i + 1 < end) p[i + 1] = std * pair[1];
    }
  });
  return value;
}

}  // namespace

Variable Transformer::make_parameter(const ParameterSpec& spec, std::optional<uint64_t> seed) {
  Variable leaf = spec.leaf;
  if (spec.first_row == 0) {
    Shape shape = spec.shape;
    shape[0] = std::max(shape[0], spec.leaf_rows);
    leaf =
        leaves_.emplace_back(Variable::parameter(Tensor::empty(shape, dtype_, device_), spec.name));
  }
  Tensor value = leaf.value().narrow(0, spec.first_row, spec.shape[0]);
  const bool vector = spec.use == ParameterSpec::Use::kVector;
  if (vector)
    value.fill_(spec.init);
  else if (seed)
    value.copy_(
        normal_values(spec.shape, spec.init, *seed, rng_stream(kInitPurpose, parameters_.size()))
            .to(dtype_));
  parameters_.push_back({spec.name, value, leaf, spec.first_row, !vector});
  return leaf;
}

Transformer::Transformer(const ModelConfig& config, DType dtype, std::optional<uint64_t> seed,
                         Device device)
    : config_(config), dtype_(dtype), device_(device) {
  config.check_device(device);
  build([&](const ParameterSpec& spec) { return make_parameter(spec, seed); });
  if (config.position != PositionType::kRope) return;
  const std::vector<double> frequencies =
      config.rope_frequencies.empty()
          ? kernels::rope_frequencies(config.head_dim, config.rope_theta)
          : config.rope_frequencies;
  rope_table_ =
      kernels::rope_table(config.context, frequencies, config.rope_scale, accumulate_dtype(dtype))
          .to(device);
}

Transformer::Transformer(const ModelConfig& config, const MakeParameter& make) : config_(config) {
  build(make);
}

void Transformer::build(const MakeParameter& make) {
  using Use = ParameterSpec::Use;
  const ModelConfig& c = config_;
  COHORT_CHECK(c.vocab_size > 0 && c.head_dim > 0 && c.d_ff > 0,
               "[transformer] expected a resolved configuration");
  const auto table = [&](const char* name, int64_t rows, Use use) {
    return make({name, {rows, c.d_model}, use, c.init_std});
  };
  // A tied table is also the head's matrix.
  embedding_ = table("model.embed_tokens.weight", c.vocab_size,
                     c.tie_embeddings ? Use::kMatmul : Use::kLookup);
  if (c.position == PositionType::kLearned)
    position_embedding_ =
        table("model.embed_positions.weight", std::max(c.context, c.position_rows), Use::kLookup);
  for (int i = 0; i < c.num_layers; ++i) {
    const std::string prefix = str("model.layers.", i, ".");
    // Each norm precedes or follows its sub-layer; the names are Hugging Face's.
    Block& block = blocks_.emplace_back();
    block.first_leaf = leaves_.size();
    if (!c.norm_after) block.attention_norm = Norm(make, prefix + "input_layernorm", c);
    block.attention = SelfAttention(make, prefix + "self_attn", c, i);
    if (c.norm_after) block.attention_norm = Norm(make, prefix + "post_attention_layernorm", c);
    if (!c.norm_after) block.mlp_norm = Norm(make, prefix + "post_attention_layernorm", c);
    block.mlp = Mlp(make, prefix + "mlp", c);
    if (c.norm_after) block.mlp_norm = Norm(make, prefix + "post_feedforward_layernorm", c);
    block.end_leaf = leaves_.size();
  }
  final_norm_ = Norm(make, "model.norm", c);
  head_ = c.tie_embeddings ? embedding_ : table("lm_head.weight", c.vocab_size, Use::kMatmul);
}

std::vector<ParameterSpec> describe_parameters(const ModelConfig& config) {
  std::vector<ParameterSpec> specs;
  Transformer(config, [&](const ParameterSpec& spec) {
    specs.push_back(spec);
    return Variable();
  });
  return specs;
}

PackedBatch Transformer::to_device(const PackedBatch& batch) const {
  if (device_.is_cuda() && batch.tokens.device().is_cpu()) {
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
  return batch.to(device_);
}

Variable Transformer::forward(const PackedBatch& batch, const ForwardOptions& options) const {
  const auto packed_attention = [cu_seqlens = batch.cu_seqlens, prefixes = batch.prefixes,
                                 positions = batch.positions](AttentionCall call) {
    Variable& qkv = call.qkv;
    call.desc.prefixes = prefixes;
    if (call.rope_table.defined())
      qkv = rope(std::move(qkv), positions, call.rope_table, call.num_kv_heads);
    return attention(qkv, call.num_kv_heads, cu_seqlens, call.desc);
  };
  return run(
      {batch.tokens, batch.positions, batch.sequences, options, packed_attention, rope_table_});
}

Variable Transformer::hidden_at_targets(const PackedBatch& batch,
                                        const ForwardOptions& options) const {
  return select_rows(forward(batch, options), batch.target_positions);
}

Tensor Transformer::forward_cached(const Tensor& tokens, const Tensor& sequences,
                                   const Tensor& positions, KVCache& cache, CachedStep step) const {
  NoGradGuard no_grad;
  Stream stream = current_stream(device_);
  stream.may_prefetch = true;  // run() begins with the embedding
  const StreamGuard guard(stream);
  const auto cached_attention = [&](AttentionCall call) {
    kernels::PagedKV& pages = cache.layer(call.layer);
    Tensor& qkv = call.qkv.value();
    const Tensor q = qkv.narrow(1, 0, qkv.dim(1) - 2 * call.num_kv_heads);
    Tensor o = Tensor::empty(q.shape(), q.dtype(), q.device());
    if (step == CachedStep::kDecode) {
      kernels::attention_decode({.o = o,
                                 .cache = pages,
                                 .qkv = qkv,
                                 .sequences = sequences,
                                 .positions = positions,
                                 .table = call.rope_table,
                                 .desc = call.desc});
      return Variable(o);
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
                              .desc = call.desc});
    return Variable(o);
  };
  return run({tokens, positions, {}, {}, cached_attention, rope_table_}).value();
}

Variable Transformer::apply_dropout(const Variable& x, const Pass& pass, int index,
                                    DropoutSite site) const {
  return dropout(x, dropout_spec(config_.dropout, pass, index, site));
}

Variable Transformer::run(const Pass& pass) const {
  Variable x = embedding(embedding_, pass.tokens);
  if (config_.embedding_scale != 1) x = scale(x, config_.embedding_scale);
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
    if (!last && config_.norm_after) {
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
  return config_.norm_after ? Variable() : blocks_[static_cast<size_t>(index)].attention_norm(x);
}

Transformer::Residual Transformer::block(int index, const Variable& x, const Variable& normed,
                                         const Pass& pass) const {
  const Block& b = blocks_[static_cast<size_t>(index)];
  if (config_.norm_after) {
    const Variable y = add(x, apply_dropout(b.attention_norm(b.attention(x, pass)), pass, index,
                                            DropoutSite::kAttentionOut));
    return {y, apply_dropout(b.mlp_norm(b.mlp(y)), pass, index, DropoutSite::kMlpOut)};
  }
  const Variable attention_out =
      apply_dropout(b.attention(normed, pass), pass, index, DropoutSite::kAttentionOut);
  const AddNorm y = b.mlp_norm.add(x, attention_out);
  return {y.sum, apply_dropout(b.mlp(y.normed), pass, index, DropoutSite::kMlpOut)};
}

Variable Transformer::recomputed_block(int index, const Variable& x, const Pass& pass) const {
  const Block& b = blocks_[static_cast<size_t>(index)];
  // The closure outlives this call: it copies the pass, whose `attention` must not refer to this
  // stack.
  return checkpoint(
      [this, index, pass](std::span<const Variable> in) {
        const Residual end = block(index, in[0], first_norm(index, in[0]), pass);
        return add(end.x, end.branch);
      },
      {&x, 1}, std::span(leaves_).subspan(b.first_leaf, b.end_leaf - b.first_leaf));
}

void Transformer::copy_from(const Transformer& source) {
  COHORT_CHECK(parameters_.size() == source.parameters_.size(), "[copy_from] models differ");
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].value.copy_(source.parameters_[i].value);
}

}  // namespace cohort
