// Qwen3 (Yang et al. 2025): RMSNorm on each head's queries and keys, a head size of its own.
#include "nn/families/family.h"

namespace cohort {

static ModelConfig read_qwen3(ConfigFile& file) {
  ModelConfig c = read_decoder(file, {.context = 32768, .head_dim = 128});
  c.qk_norm = true;
  c.family.qkv_bias = c.family.o_bias = file.flag("attention_bias", false);
  read_optional_window(file, c, {.window = 4096, .first_layer = 28});
  return c;
}

static Json write_qwen3(const ModelConfig& c) {
  return write_decoder(c, "qwen3", "Qwen3ForCausalLM");
}

const Family kQwen3 = {"qwen3", read_qwen3, {}, write_qwen3};

}  // namespace cohort
