// Qwen3.5 (Qwen Team 2026), its text model: layers with the gated delta rule, and every n-th with
// gated attention, of whose heads a part is rotated; norms with weights 1 + w.
#include "nn/families/family.h"

namespace cohort {
namespace {

constexpr const char* kFullLayer = "full_attention";
constexpr const char* kDeltaLayer = "linear_attention";

// delta.full_every by layer_types, with an entry for each layer, else by full_attention_interval.
int64_t read_interval(ConfigFile& file, int64_t layers) {
  const int64_t interval = file.integer("full_attention_interval", 4);
  if (interval < 1) file.refuse("full_attention_interval", "expected a number from 1");
  const std::vector<std::string> types = file.texts("layer_types");
  if (types.empty()) return interval == 1 ? 0 : interval;
  if (std::ssize(types) != layers) file.refuse("layer_types", str("expected ", layers, " entries"));
  int64_t every = 0;  // the first layer with attention has this number; 0: none
  for (int64_t i = 0; i < layers; ++i) {
    const std::string& type = types[static_cast<size_t>(i)];
    if (type != kFullLayer && type != kDeltaLayer)
      file.refuse("layer_types", str("known: ", kDeltaLayer, ", ", kFullLayer));
    if (type == kFullLayer && every == 0) every = i + 1;
    if ((type == kFullLayer) != (every > 0 && (i + 1) % every == 0))
      file.refuse("layer_types", str(kFullLayer, " is supported in every n-th layer, or in none"));
  }
  if (every == 0) return std::max(interval, layers + 1);
  return every == 1 ? 0 : every;
}

ModelConfig read_qwen3_5(ConfigFile& file) {
  ModelConfig c = read_decoder(file, {.context = 32768, .head_dim = 256, .rotary_fraction = 0.25});
  file.expect("hidden_act", "silu");
  file.expect("attn_output_gate", true);
  file.expect("linear_conv_kernel_dim", int64_t{4});
  file.ignore({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"});
  // The gates of the norms in delta layers; swish is SiLU.
  if (const std::string gate = file.text("output_gate_type", "silu");
      gate != "silu" && gate != "swish")
    file.refuse("output_gate_type", "only silu, also named swish, is supported");
  c.qk_norm = c.attention_gate = true;
  c.family.norm_offset = 1;
  c.family.qkv_bias = c.family.o_bias = file.flag("attention_bias", false);
  c.delta = {.full_every = read_interval(file, c.num_layers),
             .key_heads = file.integer("linear_num_key_heads", 16),
             .value_heads = file.integer("linear_num_value_heads", 32),
             .key_dim = file.integer("linear_key_head_dim", 128),
             .value_dim = file.integer("linear_value_head_dim", 128)};
  return c;
}

std::vector<TensorRule> qwen3_5_rules(const ModelConfig& c) {
  const std::string conv = "model.layers.*.linear_attn.conv1d.weight";
  return {{conv, {conv}, TensorRule::Layout::kSame, {c.delta.channels(), 1, 4}}};
}

Json write_qwen3_5(const ModelConfig& c) {
  if (!c.attention_gate) return {};
  const Json decoder = write_decoder(c, "qwen3_5_text", "Qwen3_5ForCausalLM");
  Json json;
  for (const auto& [field, value] : decoder.as_object())
    if (field != "rope_theta") json.set(field, value);
  json.set("rope_parameters", Json::Object{{"rope_type", "default"},
                                           {"rope_theta", c.rope_theta},
                                           {"partial_rotary_factor", c.rotary_fraction}});
  Json types = Json::Array{};
  for (int i = 0; i < c.num_layers; ++i) types.push_back(c.is_delta(i) ? kDeltaLayer : kFullLayer);
  json.set("layer_types", types);
  json.set("full_attention_interval", c.has_delta() ? c.delta.full_every : 1);
  json.set("linear_num_key_heads", c.delta.key_heads);
  json.set("linear_num_value_heads", c.delta.value_heads);
  json.set("linear_key_head_dim", c.delta.key_dim).set("linear_value_head_dim", c.delta.value_dim);
  return json.set("linear_conv_kernel_dim", 4).set("attn_output_gate", true);
}

}  // namespace

Json qwen3_5_text(const Json& whole) {
  const Json* const text = whole.find("text_config");
  if (text == nullptr || !text->is_object())
    throw InputError(
        "the field text_config of model_type qwen3_5 is no object; hint: it has the fields of the "
        "text model");
  ConfigFile file(whole);
  file.ignore({"text_config", "vision_config", "tie_word_embeddings", "quantization_config",
               "quantization", "image_token_id", "video_token_id", "vision_start_token_id",
               "vision_end_token_id", "language_model_only"});
  file.check_all_used();
  Json json = *text;
  json.set("architectures", Json::Array{"Qwen3_5ForCausalLM"});
  for (const char* field : {"tie_word_embeddings", "quantization_config", "quantization", "dtype"})
    if (const Json* const value = whole.find(field)) json.set(field, *value);
  return json;
}

const Family kQwen3_5 = {
    "qwen3_5_text", read_qwen3_5, qwen3_5_rules, write_qwen3_5, {"model.visual.", "mtp."}};

}  // namespace cohort
