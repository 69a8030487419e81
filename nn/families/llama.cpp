// Llama 1 to 3 (Touvron et al. 2023, Grattafiori et al. 2024) and models of the same architecture:
// SmolLM, TinyLlama, Yi, ...
#include "nn/families/family.h"

namespace cohort {

static ModelConfig read_llama(ConfigFile& file) {
  ModelConfig c = read_decoder(file, {});
  c.family.qkv_bias = c.family.o_bias = file.flag("attention_bias", false);
  c.family.mlp_bias = file.flag("mlp_bias", false);
  return c;
}

static Json write_llama(const ModelConfig& c) {
  return write_decoder(c, "llama", "LlamaForCausalLM").set("mlp_bias", c.bias);
}

const Family kLlama = {"llama", read_llama, {}, write_llama};

}  // namespace cohort
