// Qwen2 and Qwen2.5 (Yang et al. 2024): biases on queries, keys and values only.
#include "nn/families/family.h"

namespace cohort {

static ModelConfig read_qwen2(ConfigFile& file) {
  ModelConfig c = read_decoder(file, {.context = 32768});
  c.family.qkv_bias = true;
  read_optional_window(file, c, {.window = 4096, .first_layer = 28});
  return c;
}

const Family kQwen2 = {"qwen2", read_qwen2};

}  // namespace cohort
