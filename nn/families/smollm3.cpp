// SmolLM3 (Bakouch et al. 2025): Llama, with layers that have no rotary positions.
#include "nn/families/family.h"

namespace cohort {

static ModelConfig read_smollm3(ConfigFile& file) {
  ModelConfig c =
      read_decoder(file, {.rope_theta = 2000000, .context = 32768, .tie_embeddings = true});
  c.family.qkv_bias = c.family.o_bias = file.flag("attention_bias", false);
  c.family.mlp_bias = file.flag("mlp_bias", false);
  const std::vector<double> rotary = file.numbers("no_rope_layers");  // 1: rotary
  const int64_t interval = file.integer("no_rope_layer_interval", 4);
  if (!rotary.empty() && static_cast<int64_t>(rotary.size()) != c.num_layers)
    file.refuse("no_rope_layers", str("expected ", c.num_layers, " entries"));
  if (rotary.empty() && interval < 1) file.refuse("no_rope_layer_interval", "expected 1 or more");
  for (int64_t i = 0; i < c.num_layers; ++i)
    c.family.rotary.push_back(rotary.empty() ? (i + 1) % interval != 0
                                             : rotary[static_cast<size_t>(i)] != 0);
  read_optional_window(file, c, {});
  // Without layer_types, layers with rotary positions have full attention.
  if (file.find("layer_types") == nullptr)
    for (size_t i = 0; i < c.family.windowed.size(); ++i)
      c.family.windowed[i] = !c.family.rotary[i];
  return c;
}

const Family kSmolLm3 = {"smollm3", read_smollm3};

}  // namespace cohort
