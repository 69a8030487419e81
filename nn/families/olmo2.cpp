// OLMo 2 (Walsh et al. 2024): norms after the sub-layers, RMSNorm on whole queries and keys.
#include "nn/families/family.h"

namespace cohort {

static ModelConfig read_olmo2(ConfigFile& file) {
  ModelConfig c = read_decoder(file, {.norm_eps = 1e-5});
  c.family.qkv_bias = c.family.o_bias = file.flag("attention_bias", false);
  c.norm_place = NormPlace::kBranch;
  c.family.qk_norm_whole = true;
  return c;
}

const Family kOlmo2 = {"olmo2", read_olmo2};

}  // namespace cohort
