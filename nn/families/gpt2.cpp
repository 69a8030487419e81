// GPT-2 (Radford et al. 2019): LayerNorm, learned positions, biases. Its weights are stored as
// [in, out], with q, k and v in one tensor.
#include <algorithm>

#include "nn/families/family.h"

namespace cohort {

static ModelConfig read_gpt2(ConfigFile& file) {
  ModelConfig c;
  c.d_model = file.integer("n_embd");
  c.num_layers = file.integer("n_layer");
  c.num_heads = c.num_kv_heads = file.integer("n_head");
  c.d_ff = file.integer("n_inner", 4 * c.d_model);
  c.vocab_size = file.integer("vocab_size");
  c.context = file.integer("n_positions", 1024);
  c.norm_eps = file.number("layer_norm_epsilon", 1e-5);
  c.tie_embeddings = file.flag("tie_word_embeddings", true);
  c.init_std = file.number("initializer_range", c.init_std);
  c.norm = NormType::kLayer;
  c.position = PositionType::kLearned;
  c.bias = true;
  c.mlp = read_plain_mlp(file, "activation_function", "gelu_new");
  file.expect("scale_attn_weights", true);
  file.expect("scale_attn_by_inverse_layer_idx", false);
  file.expect("add_cross_attention", false);
  file.ignore({"n_ctx", "reorder_and_upcast_attn"});
  return c;
}

static Json write_gpt2(const ModelConfig& c) {
  if (c.num_heads * c.head_dim != c.d_model) return {};
  Json json = start_config("gpt2", "GPT2LMHeadModel", c);
  json.set("n_embd", c.d_model).set("n_layer", c.num_layers).set("n_head", c.num_heads);
  json.set("n_inner", c.d_ff).set("n_positions", std::max(c.context, c.position_rows));
  json.set("activation_function", c.mlp == MlpType::kGelu ? "gelu" : "gelu_new");
  json.set("layer_norm_epsilon", c.norm_eps);
  for (const char* rate : {"embd_pdrop", "attn_pdrop", "resid_pdrop"}) json.set(rate, c.dropout);
  return json;
}

static std::vector<TensorRule> gpt2_rules(const ModelConfig&) {
  constexpr auto kTransposed = TensorRule::Layout::kTransposed;
  const std::string ours = "model.layers.*.", theirs = "transformer.h.*.";
  std::vector<TensorRule> rules = {
      {"transformer.wte.weight", {"model.embed_tokens.weight"}},
      {"transformer.wpe.weight", {"model.embed_positions.weight"}},
      {"transformer.ln_f.weight", {"model.norm.weight"}},
      {"transformer.ln_f.bias", {"model.norm.bias"}},
  };
  for (const std::string part : {".weight", ".bias"}) {
    const auto layout = part == ".weight" ? kTransposed : TensorRule::Layout::kSame;
    const auto name = [&](const char* module) { return ours + module + part; };
    rules.push_back({theirs + "ln_1" + part, {name("input_layernorm")}});
    rules.push_back({theirs + "attn.c_attn" + part,
                     {name("self_attn.q_proj"), name("self_attn.k_proj"), name("self_attn.v_proj")},
                     layout});
    rules.push_back({theirs + "attn.c_proj" + part, {name("self_attn.o_proj")}, layout});
    rules.push_back({theirs + "ln_2" + part, {name("post_attention_layernorm")}});
    rules.push_back({theirs + "mlp.c_fc" + part, {name("mlp.up_proj")}, layout});
    rules.push_back({theirs + "mlp.c_proj" + part, {name("mlp.down_proj")}, layout});
  }
  return rules;
}

const Family kGpt2 = {"gpt2", read_gpt2, gpt2_rules, write_gpt2};

}  // namespace cohort
