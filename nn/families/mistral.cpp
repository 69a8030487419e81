// Mistral 7B (Jiang et al. 2023): Llama with a sliding window in every layer.
#include "nn/families/family.h"

namespace cohort {

static ModelConfig read_mistral(ConfigFile& file) {
  ModelConfig c = read_decoder(file, {.context = 4096 * 32});
  read_common_window(file, c, 4096);
  return c;
}

const Family kMistral = {"mistral", read_mistral};

}  // namespace cohort
