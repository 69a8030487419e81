#include "nn/transformer.h"

#include "core/parallel.h"
#include "core/rng.h"
#include "kernels/rope.h"

namespace cohort {

Variable Transformer::make_parameter(const ParameterSpec& spec, std::optional<uint64_t> seed) {
  const bool vector = spec.use == ParameterSpec::Use::kVector;
  Tensor value;
  if (vector) {
    value = Tensor::full(spec.shape, spec.init, dtype_);
  } else if (!seed) {
    value = Tensor::empty(spec.shape, dtype_, device_);
  } else {
    const uint64_t stream = rng_stream(kInitPurpose, parameters_.size());
    value = Tensor::empty(spec.shape, DType::kF64);
    double* p = value.data<double>();
    parallel_for(value.numel(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += 2) {
        const auto pair = normal_pair(*seed, stream, static_cast<uint64_t>(i / 2));
        p[i] = spec.init * pair[0];
        if (i + 1 < end) p[i + 1] = spec.init * pair[1];
      }
    });
  }
  const Variable v = Variable::parameter(value.to(dtype_).to(device_), spec.name);
  parameters_.push_back({spec.name, v, !vector});
  return v;
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
  // A tied table is the head's matrix too.
  embedding_ = table("model.embed_tokens.weight", c.vocab_size,
                     c.tie_embeddings ? Use::kProduct : Use::kLookup);
  if (c.position == PositionType::kLearned)
    position_embedding_ = table("model.embed_positions.weight", c.context, Use::kLookup);
  for (int i = 0; i < c.num_layers; ++i) {
    const std::string prefix = str("model.layers.", i, ".");
    // Each block's norms come before or after what they belong to; the names are Hugging Face's.
    Block& block = blocks_.emplace_back();
    if (!c.norm_after) block.attention_norm = Norm(make, prefix + "input_layernorm", c);
    block.attention = SelfAttention(make, prefix + "self_attn", c, i);
    if (c.norm_after) block.attention_norm = Norm(make, prefix + "post_attention_layernorm", c);
    if (!c.norm_after) block.mlp_norm = Norm(make, prefix + "post_attention_layernorm", c);
    block.mlp = Mlp(make, prefix + "mlp", c);
    if (c.norm_after) block.mlp_norm = Norm(make, prefix + "post_feedforward_layernorm", c);
  }
  final_norm_ = Norm(make, "model.norm", c);
  head_ = c.tie_embeddings ? embedding_ : table("lm_head.weight", c.vocab_size, Use::kProduct);
}

std::vector<ParameterSpec> describe_parameters(const ModelConfig& config) {
  std::vector<ParameterSpec> specs;
  Transformer(config, [&](const ParameterSpec& spec) {
    specs.push_back(spec);
    return Variable();
  });
  return specs;
}

PackedBatch Transformer::place(const PackedBatch& batch) const {
  if (device_.is_cuda() && batch.tokens.device().is_cpu()) {
    const auto check = [](const char* what, const Tensor& values, int64_t low, int64_t end) {
      const int32_t* value = values.data<int32_t>();
      for (int64_t t = 0; t < values.numel(); ++t)
        COHORT_CHECK(value[t] >= low && value[t] < end, "[transformer] ", what, " ", value[t],
                     " at index ", t, " of the batch, expected ", low, " to ", end - 1);
    };
    check("token", batch.tokens, 0, config_.vocab_size);
    check("target", batch.targets, -1, config_.vocab_size);
    check("position", batch.positions, 0, config_.context);
  }
  return batch.to(device_);
}

Variable Transformer::forward(const PackedBatch& batch, const ForwardOptions& options) const {
  const auto attend = [cu_seqlens = batch.cu_seqlens](int, const kernels::AttentionDesc& desc,
                                                      const Variable& q, const Variable& k,
                                                      const Variable& v) {
    return attention(q, k, v, cu_seqlens, desc);
  };
  return run({batch.tokens, batch.positions, batch.sequences, options, attend, rope_table_});
}

Tensor Transformer::forward_cached(const Tensor& tokens, const Tensor& sequences,
                                   const Tensor& positions, KVCache& cache) const {
  NoGradGuard no_grad;
  const auto attend = [&](int layer, const kernels::AttentionDesc& desc, const Variable& q,
                          const Variable& k, const Variable& v) {
    kernels::PagedKV& pages = cache.layer(layer);
    kernels::paged_kv_write({.cache = pages,
                             .k = k.value(),
                             .v = v.value(),
                             .sequences = sequences,
                             .positions = positions});
    Tensor o = Tensor::empty_like(q.value());
    kernels::attention_paged({.o = o,
                              .q = q.value(),
                              .cache = pages,
                              .sequences = sequences,
                              .positions = positions,
                              .desc = desc});
    return Variable(o);
  };
  return run({tokens, positions, {}, {}, attend, rope_table_}).value();
}

Variable Transformer::drop(const Variable& x, const Pass& pass, int index, DropoutSite site) const {
  return dropout(x, dropout_spec(config_.dropout, pass, index, site));
}

Variable Transformer::run(const Pass& pass) const {
  Variable x = embedding(embedding_, pass.tokens);
  if (config_.embedding_scale != 1) x = scale(x, config_.embedding_scale);
  if (position_embedding_.defined()) x = add(x, embedding(position_embedding_, pass.positions));
  x = drop(x, pass, -1, DropoutSite::kEmbedding);
  for (int i = 0; i < static_cast<int>(blocks_.size()); ++i) {
    if (config_.recompute == Recompute::kBlock && grad_enabled()) {
      // The closure outlives this call: it needs its own pass, and an attend that refers to nothing
      // on this stack.
      x = checkpoint(
          [this, i, pass](std::span<const Variable> in) { return block(i, in[0], pass); }, {&x, 1},
          blocks_[static_cast<size_t>(i)].parameters());
    } else {
      x = block(i, x, pass);
    }
  }
  return final_norm_(x);
}

Variable Transformer::block(int index, const Variable& x, const Pass& pass) const {
  const Block& b = blocks_[static_cast<size_t>(index)];
  if (config_.norm_after) {
    const Variable y = add(
        x, drop(b.attention_norm(b.attention(x, pass)), pass, index, DropoutSite::kAttentionOut));
    return add(y, drop(b.mlp_norm(b.mlp(y)), pass, index, DropoutSite::kMlpOut));
  }
  const Variable attended =
      drop(b.attention(b.attention_norm(x), pass), pass, index, DropoutSite::kAttentionOut);
  const AddNorm y = b.mlp_norm.add(x, attended);
  return add(y.sum, drop(b.mlp(y.normed), pass, index, DropoutSite::kMlpOut));
}

Parameters Transformer::Block::parameters() const {
  Parameters all;
  attention_norm.append_to(all);
  mlp_norm.append_to(all);
  attention.append_to(all);
  mlp.append_to(all);
  return all;
}

void Transformer::copy_from(const Transformer& source) {
  COHORT_CHECK(parameters_.size() == source.parameters_.size(), "[copy_from] models differ");
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].variable.value().copy_(source.parameters_[i].variable.value());
}

}  // namespace cohort
