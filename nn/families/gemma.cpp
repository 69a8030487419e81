// Gemma 1 (Mesnard et al. 2024): GeGLU, embeddings times sqrt(d_model), norms with weights 1 + w.
#include <cmath>

#include "nn/families/family.h"

namespace cohort {

static ModelConfig read_gemma(ConfigFile& file) {
  ModelConfig c = read_decoder(file, {.context = 8192,
                                      .tie_embeddings = true,
                                      .activation = "gelu_pytorch_tanh",
                                      .head_dim = 256});
  // Early releases have "gelu" in hidden_act but use the tanh form, later named by
  // hidden_activation.
  file.expect("hidden_activation", "gelu_pytorch_tanh");
  if (c.mlp == MlpType::kGeGlu) c.mlp = MlpType::kGeGluTanh;
  c.family.qkv_bias = c.family.o_bias = file.flag("attention_bias", false);
  c.family.norm_offset = 1;
  c.family.embedding_scale = std::sqrt(static_cast<double>(c.d_model));
  file.expect("use_bidirectional_attention", false);
  return c;
}

const Family kGemma = {"gemma", read_gemma};

}  // namespace cohort
