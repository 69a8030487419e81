#include "nn/backbone.h"

#include <utility>

namespace cohort {

AddNorm SubLayerNorm::enter(Residual in) const {
  const bool is_sum = !in.branch.defined();
  if (place == NormPlace::kBefore)
    return is_sum ? AddNorm{in.x, norm(in.x)} : norm.add(in.x, in.branch);
  const Variable sum = is_sum ? in.x : add(in.x, in.branch);
  return {sum, sum};
}

Residual SubLayerNorm::leave(const Variable& x, const Variable& out,
                             const kernels::DropoutSpec& dropout) const {
  if (place == NormPlace::kBranch) return {x, cohort::dropout(norm(out), dropout)};
  const Variable branch = cohort::dropout(out, dropout);
  if (place == NormPlace::kAfter) return {norm.add(x, branch).normed, {}};
  return {x, branch};
}

Backbone::Backbone(ParameterSet& set, const ModelConfig& c)
    : set_(set), config_(c), positions_(set, c) {
  const AdapterTargets adapters(c);
  for (int i = 0; i < c.num_layers; ++i) blocks_.push_back(make_block(i, adapters));
  set.begin_unit();
  if (c.norm_place == NormPlace::kAfter)
    final_norm_.place = c.norm_place;
  else
    final_norm_ = {Norm(set, "model.norm", c)};
}

// The names of norms are Hugging Face's.
Backbone::Block Backbone::make_block(int index, const AdapterTargets& adapters) {
  const std::string prefix = str("model.layers.", index, ".");
  const NormPlace place = config_.norm_place;
  const bool before = place == NormPlace::kBefore;
  const auto norm = [&](const char* name) {
    return SubLayerNorm{Norm(set_, prefix + name, config_), place};
  };
  Block b;
  set_.begin_unit();
  if (before) b.mixer_norm = norm("input_layernorm");
  if (config_.is_delta(index))
    b.mixer = GatedDelta(set_, prefix + "linear_attn", config_, adapters, index);
  else
    b.mixer = SelfAttention(set_, prefix + "self_attn", config_, adapters, index);
  (before ? b.mlp_norm : b.mixer_norm) = norm("post_attention_layernorm");
  b.mlp = Mlp(set_, prefix + "mlp", config_, adapters);
  if (!before) b.mlp_norm = norm("post_feedforward_layernorm");
  if (before) {
    b.mixer_norm.norm.set_padding(b.mixer_layers()[0].input_padding());
    b.mlp_norm.norm.set_padding(b.mlp.layers()[0].input_padding());
  }
  return b;
}

void Backbone::write_kv_scales() const {
  for (const Block& block : blocks_)
    if (const auto* const attention = std::get_if<SelfAttention>(&block.mixer))
      attention->write_kv_scales(block.mixer_norm.norm);
}

std::vector<const Linear*> Backbone::adapted() const {
  std::vector<const Linear*> out;
  for (const Block& block : blocks_)
    for (const auto& layers : {block.mixer_layers(), block.mlp.layers()})
      for (const Linear& layer : layers)
        if (layer.lora.defined()) out.push_back(&layer);
  return out;
}

Variable Backbone::operator()(Variable x, const Pass& pass) const {
  const bool recomputes = config_.recompute == Recompute::kBlock && grad_enabled();
  Residual stream{std::move(x), {}};  // not kept longer than its first use
  for (int i = 0; i < std::ssize(blocks_); ++i)
    stream = recomputes ? Residual{recomputed_block(i, stream.x, pass), {}}
                        : block(i, std::move(stream), pass);
  return final_norm_.enter(std::move(stream)).normed;
}

Residual Backbone::block(int index, Residual in, const Pass& pass) const {
  const Block& b = blocks_[static_cast<size_t>(index)];
  const auto spec = [&](DropoutSite site) {
    return dropout_spec(config_.dropout, pass, index, site);
  };
  const size_t unit = static_cast<size_t>(index) + 1;
  if (before_block_) before_block_(unit);
  const AddNorm a = b.mixer_norm.enter(std::move(in));
  const Variable mixed =
      std::visit([&](const auto& mixer) { return mixer(a.normed, pass); }, b.mixer);
  const AddNorm m =
      b.mlp_norm.enter(b.mixer_norm.leave(a.sum, mixed, spec(DropoutSite::kAttentionOut)));
  Residual out = b.mlp_norm.leave(m.sum, b.mlp(m.normed, pass), spec(DropoutSite::kMlpOut));
  if (!before_block_) return out;
  // The block's last node, whose backward comes first.
  Variable& last = out.branch.defined() ? out.branch : out.x;
  Tensor value = last.value();
  last = make_node("before_block", std::move(value), {std::move(last)},
                   [hook = before_block_, unit](const Tensor& dy, Gradients& gradients) {
                     hook(unit);
                     gradients.pass(0, dy);
                   });
  return out;
}

Variable Backbone::recomputed_block(int index, const Variable& x, const Pass& pass) const {
  const ParameterUnit& unit = set_.units()[static_cast<size_t>(index) + 1];
  // The closure outlives this call: it copies the pass.
  const Variable inputs[] = {x, pass.position_terms.bias};
  return checkpoint(
      [this, index, pass](std::span<const Variable> in) {
        Pass inner = pass;
        inner.position_terms.bias = in[1];
        const Residual end = block(index, {in[0], {}}, inner);
        return end.branch.defined() ? add(end.x, end.branch) : end.x;
      },
      inputs, std::span(set_.trained()).subspan(unit.first_leaf, unit.end_leaf - unit.first_leaf));
}

}  // namespace cohort
