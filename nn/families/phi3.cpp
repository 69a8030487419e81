// Phi-3 (Abdin et al. 2024): Llama with q, k and v in one stored tensor, gate and up in another.
#include "nn/families/family.h"

namespace cohort {

static ModelConfig read_phi3(ConfigFile& file) {
  ModelConfig c = read_decoder(file, {.norm_eps = 1e-5, .context = 4096});
  read_common_window(file, c, 0);
  return c;
}

static std::vector<TensorRule> phi3_rules(const ModelConfig&) {
  const std::string layer = "model.layers.*.", attention = layer + "self_attn.";
  return {
      {attention + "qkv_proj.weight",
       {attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight"}},
      {layer + "mlp.gate_up_proj.weight",
       {layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight"}},
  };
}

const Family kPhi3 = {"phi3", read_phi3, phi3_rules};

}  // namespace cohort
