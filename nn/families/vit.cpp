// ViT (Dosovitskiy et al. 2021): patches of an image behind a class token, norms before the
// sub-layers.
#include "nn/families/family.h"

namespace cohort {

static ModelConfig read_vit(ConfigFile& file) {
  ModelConfig c = read_encoder(file);
  c.image_size = file.integer("image_size", 224);
  c.patch_size = file.integer("patch_size", 16);
  c.channels = file.integer("num_channels", 3);
  if (c.image_size < 1) file.refuse("image_size", "expected a number from 1");
  c.family.no_qkv_bias = !file.flag("qkv_bias", true);
  file.expect("pooler_act", "tanh");
  file.expect("pooler_output_size", c.d_model);
  file.ignore({"encoder_stride"});
  read_head(file, c);
  return c;
}

static std::vector<TensorRule> vit_rules(const ModelConfig& c) {
  static constexpr std::pair<const char*, const char*> kModules[] = {
      {"~encoder.layer.*.attention.attention.query", "model.layers.*.self_attn.q_proj"},
      {"~encoder.layer.*.attention.attention.key", "model.layers.*.self_attn.k_proj"},
      {"~encoder.layer.*.attention.attention.value", "model.layers.*.self_attn.v_proj"},
      {"~encoder.layer.*.attention.output.dense", "model.layers.*.self_attn.o_proj"},
      {"~encoder.layer.*.layernorm_before", "model.layers.*.input_layernorm"},
      {"~encoder.layer.*.layernorm_after", "model.layers.*.post_attention_layernorm"},
      {"~encoder.layer.*.intermediate.dense", "model.layers.*.mlp.up_proj"},
      {"~encoder.layer.*.output.dense", "model.layers.*.mlp.down_proj"},
      {"~embeddings.patch_embeddings.projection", "model.embed_patches"},
      {"~layernorm", "model.norm"},
      {"~pooler.dense", "head.dense"},
      {"classifier", "head"}};
  std::vector<TensorRule> rules = encoder_rules(c, "vit.", kModules);
  const std::string base = c.head == HeadType::kPooler ? "" : "vit.";
  for (TensorRule& rule : rules)
    if (rule.parameters[0] == "model.embed_patches.weight")
      rule.stored_shape = {c.d_model, c.channels, c.patch_size, c.patch_size};
  rules.push_back({.stored = base + "embeddings.cls_token",
                   .parameters = {"model.embed_class.weight"},
                   .stored_shape = {1, 1, c.d_model}});
  rules.push_back({.stored = base + "embeddings.position_embeddings",
                   .parameters = {"model.embed_positions.weight"},
                   .stored_shape = {1, c.context, c.d_model}});
  return rules;
}

static Json write_vit(const ModelConfig& c) {
  if (!c.has_images()) return {};
  Json json = write_encoder(c, "vit");
  json.set("image_size", c.image_size).set("patch_size", c.patch_size);
  return json.set("num_channels", c.channels).set("qkv_bias", !c.family.no_qkv_bias);
}

const Family kVit = {"vit", read_vit, vit_rules, write_vit};

}  // namespace cohort
