#include "nn/transformer.h"

#include <cmath>

#include "core/parallel.h"
#include "core/rng.h"
#include "kernels/rope.h"

namespace cohort {

// Creates parameters in their fixed order; the order numbers the initialisation streams and the
// gradient buckets.
class Transformer::Builder {
 public:
  Builder(Transformer& model, std::optional<uint64_t> seed) : model_(model), seed_(seed) {}

  Variable normal(const std::string& name, const Shape& shape, double std) {
    if (!seed_)
      return add(name, Tensor::empty(shape, model_.dtype_, model_.device_), shape.rank() > 1);
    const uint64_t stream = rng_stream(kInitPurpose, model_.parameters_.size());
    Tensor values = Tensor::empty(shape, DType::kF64);
    double* p = values.data<double>();
    parallel_for(values.numel(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += 2) {
        const auto pair = normal_pair(*seed_, stream, static_cast<uint64_t>(i / 2));
        p[i] = std * pair[0];
        if (i + 1 < end) p[i + 1] = std * pair[1];
      }
    });
    return add(name, values, shape.rank() > 1);
  }
  Variable constant(const std::string& name, int64_t size, double value) {
    return add(name, Tensor::full({size}, value, model_.dtype_), false);
  }
  Linear linear(const std::string& name, int64_t out, int64_t in, double std) {
    Linear layer;
    layer.weight = normal(name + ".weight", {out, in}, std);
    if (model_.config_.bias) layer.bias = constant(name + ".bias", out, 0);
    return layer;
  }
  Norm norm(const std::string& name) {
    const ModelConfig& c = model_.config_;
    Norm n;
    n.weight = constant(name + ".weight", c.d_model, 1);
    if (c.norm == NormType::kLayer && c.bias) n.bias = constant(name + ".bias", c.d_model, 0);
    return n;
  }

 private:
  Variable add(const std::string& name, const Tensor& value, bool decay) {
    Variable v = Variable::parameter(value.to(model_.dtype_).to(model_.device_), name);
    model_.parameters_.push_back({name, v, decay});
    return v;
  }
  Transformer& model_;
  std::optional<uint64_t> seed_;
};

Transformer::Transformer(const ModelConfig& config, DType dtype, std::optional<uint64_t> seed,
                         Device device)
    : config_(config), dtype_(dtype), device_(device) {
  COHORT_CHECK(config.vocab_size > 0 && config.head_dim > 0 && config.d_ff > 0,
               "[transformer] expected a resolved configuration");
  config.check_device(device);
  Builder build(*this, seed);
  const ModelConfig& c = config_;
  const double std = c.init_std,
               out_std = c.init_std / std::sqrt(2.0 * static_cast<double>(c.num_layers));
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  embedding_ = build.normal("model.embed_tokens.weight", {c.vocab_size, c.d_model}, std);
  if (c.position == PositionType::kLearned)
    position_embedding_ = build.normal("model.embed_positions.weight", {c.context, c.d_model}, std);
  else
    rope_table_ = kernels::rope_table(c.context, c.head_dim, c.rope_theta, accumulate_dtype(dtype))
                      .to(device);
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string prefix = str("model.layers.", i, ".");
    Layer& layer = layers_.emplace_back();
    layer.attention_norm = build.norm(prefix + "input_layernorm");
    layer.q = build.linear(prefix + "self_attn.q_proj", q, c.d_model, std);
    layer.k = build.linear(prefix + "self_attn.k_proj", kv, c.d_model, std);
    layer.v = build.linear(prefix + "self_attn.v_proj", kv, c.d_model, std);
    layer.o = build.linear(prefix + "self_attn.o_proj", c.d_model, q, out_std);
    if (c.qk_norm) {
      layer.q_norm = build.constant(prefix + "self_attn.q_norm.weight", c.head_dim, 1);
      layer.k_norm = build.constant(prefix + "self_attn.k_norm.weight", c.head_dim, 1);
    }
    layer.mlp_norm = build.norm(prefix + "post_attention_layernorm");
    if (c.mlp == MlpType::kSwiGlu)
      layer.gate = build.linear(prefix + "mlp.gate_proj", c.d_ff, c.d_model, std);
    layer.up = build.linear(prefix + "mlp.up_proj", c.d_ff, c.d_model, std);
    layer.down = build.linear(prefix + "mlp.down_proj", c.d_model, c.d_ff, out_std);
  }
  final_norm_ = build.norm("model.norm");
  head_ = c.tie_embeddings ? embedding_
                           : build.normal("lm_head.weight", {c.vocab_size, c.d_model}, std);
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
  const Attend attend = [this, cu_seqlens = batch.cu_seqlens](const Pass& pass, int layer,
                                                              const Variable& q, const Variable& k,
                                                              const Variable& v) {
    kernels::AttentionDesc desc;
    desc.dropout = dropout_spec(pass, layer, DropoutSite::kAttention);
    return attention(q, k, v, cu_seqlens, desc);
  };
  return run({batch.tokens, batch.positions, batch.sequences, options, attend});
}

Tensor Transformer::forward_cached(const Tensor& tokens, const Tensor& sequences,
                                   const Tensor& positions, KVCache& cache) const {
  NoGradGuard no_grad;
  const Attend attend = [&](const Pass&, int layer, const Variable& q, const Variable& k,
                            const Variable& v) {
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
                              .desc = {}});
    return Variable(o);
  };
  return run({tokens, positions, {}, {}, attend}).value();
}

Variable Transformer::run(const Pass& pass) const {
  Variable x = embedding(embedding_, pass.tokens);
  if (position_embedding_.defined()) x = add(x, embedding(position_embedding_, pass.positions));
  x = dropout(x, dropout_spec(pass, -1, DropoutSite::kEmbedding));
  for (int i = 0; i < static_cast<int>(layers_.size()); ++i) {
    if (config_.recompute == Recompute::kBlock && grad_enabled()) {
      // The closure outlives this call: it needs its own pass, and an attend that refers to nothing
      // on this stack.
      x = checkpoint(
          [this, i, pass](std::span<const Variable> in) { return block(i, in[0], pass); }, {&x, 1},
          block_parameters(layers_[static_cast<size_t>(i)]));
    } else {
      x = block(i, x, pass);
    }
  }
  return norm(x, final_norm_);
}

Variable Transformer::block(int index, const Variable& x, const Pass& pass) const {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const int64_t tokens = x.value().rows(), d = config_.head_dim;
  const auto heads = [&](const Variable& h, const Linear& projection, const Variable& head_norm,
                         int64_t count) {
    Variable y = reshape(linear(h, projection.weight, projection.bias), {tokens, count, d});
    return head_norm.defined() ? rms_norm(y, head_norm, config_.norm_eps) : y;
  };
  const Variable h = norm(x, layer.attention_norm);
  Variable q = heads(h, layer.q, layer.q_norm, config_.num_heads);
  Variable k = heads(h, layer.k, layer.k_norm, config_.num_kv_heads);
  const Variable v = heads(h, layer.v, {}, config_.num_kv_heads);
  if (rope_table_.defined()) {
    q = rope(q, pass.positions, rope_table_);
    k = rope(k, pass.positions, rope_table_);
  }
  const Variable o = reshape(pass.attend(pass, index, q, k, v), {tokens, config_.num_heads * d});
  const Variable attended = dropout(linear(o, layer.o.weight, layer.o.bias),
                                    dropout_spec(pass, index, DropoutSite::kAttentionOut));
  const AddNorm y = add_norm(x, attended, layer.mlp_norm);
  return add(y.sum, dropout(mlp(layer, y.normed), dropout_spec(pass, index, DropoutSite::kMlpOut)));
}

AddNorm Transformer::add_norm(const Variable& a, const Variable& b, const Norm& n) const {
  const double eps = config_.norm_eps;
  const AddNorm y = config_.norm == NormType::kRms ? add_rms_norm(a, b, n.weight, eps)
                                                   : add_layer_norm(a, b, n.weight, n.bias, eps);
  return {y.sum, recomputable(y.normed, norm_op(), {y.sum, n.weight, n.bias})};
}

// Keeps y, or with recompute: cheap what it is made of.
Variable Transformer::recomputable(const Variable& y, const Op& op,
                                   std::initializer_list<Variable> inputs) const {
  if (config_.recompute != Recompute::kCheap) return y;
  return cohort::recomputable(y, op, std::span<const Variable>(inputs.begin(), inputs.size()));
}

Transformer::Op Transformer::norm_op() const {
  return [eps = config_.norm_eps, type = config_.norm](std::span<const Variable> in) {
    return type == NormType::kRms ? rms_norm(in[0], in[1], eps)
                                  : layer_norm(in[0], in[1], in[2], eps);
  };
}

Variable Transformer::norm(const Variable& x, const Norm& n) const {
  const Op op = norm_op();
  const std::initializer_list<Variable> inputs = {x, n.weight, n.bias};
  return recomputable(op(std::span<const Variable>(inputs.begin(), inputs.size())), op, inputs);
}

Variable Transformer::mlp(const Layer& layer, const Variable& x) const {
  const Variable up = linear(x, layer.up.weight, layer.up.bias);
  const Variable gate =
      config_.mlp == MlpType::kSwiGlu ? linear(x, layer.gate.weight, layer.gate.bias) : Variable();
  const auto activation = [type = config_.mlp](std::span<const Variable> in) {
    switch (type) {
      case MlpType::kGelu:
        return gelu(in[0]);
      case MlpType::kGeluTanh:
        return gelu_tanh(in[0]);
      default:
        return swiglu(in[1], in[0]);
    }
  };
  const std::initializer_list<Variable> inputs = {up, gate};
  const Variable h = recomputable(
      activation(std::span<const Variable>(inputs.begin(), inputs.size())), activation, inputs);
  return linear(h, layer.down.weight, layer.down.bias);
}

kernels::DropoutSpec Transformer::dropout_spec(const Pass& pass, int layer,
                                               DropoutSite site) const {
  kernels::DropoutSpec spec;
  if (pass.options.mode == Mode::kEval || config_.dropout == 0) return spec;
  spec.p = config_.dropout;
  spec.seed = pass.options.seed;
  spec.stream = dropout_stream(pass.options.step, layer + 1, site);
  spec.sequences = pass.sequences;
  spec.positions = pass.positions;
  return spec;
}

std::vector<Variable> Transformer::block_parameters(const Layer& layer) const {
  std::vector<Variable> all;
  for (const Variable* v :
       {&layer.attention_norm.weight, &layer.attention_norm.bias, &layer.mlp_norm.weight,
        &layer.mlp_norm.bias, &layer.q_norm, &layer.k_norm})
    if (v->defined()) all.push_back(*v);
  for (const Linear* l :
       {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down})
    for (const Variable* v : {&l->weight, &l->bias})
      if (v->defined()) all.push_back(*v);
  return all;
}

void Transformer::copy_from(const Transformer& source) {
  COHORT_CHECK(parameters_.size() == source.parameters_.size(), "[copy_from] models differ");
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].variable.value().copy_(source.parameters_[i].variable.value());
}

}  // namespace cohort
