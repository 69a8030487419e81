// Seed-OSS (ByteDance Seed 2025): Llama, with a head size of its own, biases on queries, keys and
// values, and an optional one on attention's output.
#include "nn/families/family.h"

namespace cohort {

ModelConfig read_seed_oss(ConfigFile& file) {
  ModelConfig c = read_decoder(file, {.context = 524288, .head_dim = 128});
  c.qkv_bias = file.flag("attention_bias", true);
  c.o_bias = file.flag("attention_out_bias", false);
  c.mlp_bias = file.flag("mlp_bias", false);
  file.ignore({"residual_dropout"});
  return c;
}

}  // namespace cohort
