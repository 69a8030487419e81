#include "nn/families/family.h"

#include <algorithm>

namespace cohort {
namespace {

const std::vector<Family>& families() {
  static const std::vector<Family> kFamilies = {
      {"gemma", read_gemma},     {"gpt2", read_gpt2, gpt2_rules()},
      {"llama", read_llama},     {"mistral", read_mistral},
      {"olmo2", read_olmo2},     {"phi3", read_phi3, phi3_rules()},
      {"qwen2", read_qwen2},     {"qwen3", read_qwen3},
      {"smollm3", read_smollm3},
  };
  return kFamilies;
}

MlpType gated_mlp(ConfigFile& file, const std::string& activation) {
  if (activation == "silu" || activation == "swish") return MlpType::kSwiGlu;
  if (activation == "gelu") return MlpType::kGeGlu;
  if (activation == "gelu_pytorch_tanh" || activation == "gelu_new") return MlpType::kGeGluTanh;
  file.refuse("hidden_act", "known: silu, gelu, gelu_pytorch_tanh");
}

}  // namespace

const Family& find_family(const std::string& model_type) {
  std::string known;
  for (const Family& family : families()) {
    if (model_type == family.model_type) return family;
    known += str(known.empty() ? "" : ", ", family.model_type);
  }
  throw InputError(str("model_type: '", model_type, "' is not supported; known: ", known));
}

ModelConfig read_decoder(ConfigFile& file, const DecoderDefaults& defaults) {
  ModelConfig c;
  c.d_model = file.integer("hidden_size");
  c.num_layers = file.integer("num_hidden_layers");
  c.num_heads = file.integer("num_attention_heads");
  c.num_kv_heads = file.integer("num_key_value_heads", c.num_heads);
  c.head_dim = file.integer("head_dim", defaults.head_dim);
  c.d_ff = file.integer("intermediate_size");
  c.vocab_size = file.integer("vocab_size");
  c.context = file.integer("max_position_embeddings", defaults.context);
  c.norm_eps = file.number("rms_norm_eps", defaults.norm_eps);
  c.tie_embeddings = file.flag("tie_word_embeddings", defaults.tie_embeddings);
  c.init_std = file.number("initializer_range", c.init_std);
  c.mlp = gated_mlp(file, file.text("hidden_act", defaults.activation));
  // Limits the tables built below per layer and head dim, before the keys' ranges are checked.
  if (c.num_layers < 1 || c.num_layers > 1000)
    file.refuse("num_hidden_layers", "expected a number from 1 to 1000");
  if (c.head_dim == 0 && c.num_heads > 0 && c.d_model % c.num_heads == 0)
    c.head_dim = c.d_model / c.num_heads;
  read_rope(file, c, defaults.rope_theta);
  return c;
}

void read_window(ConfigFile& file, ModelConfig& c, const WindowDefaults& defaults) {
  const bool used = file.flag("use_sliding_window", true);
  const int64_t window =
      file.integer("sliding_window", file.has("sliding_window") ? 0 : defaults.window);
  const int64_t first = file.integer("max_window_layers", defaults.first_layer);
  const std::vector<std::string> types = file.texts("layer_types");
  if (!types.empty() && static_cast<int64_t>(types.size()) != c.num_layers)
    file.refuse("layer_types", str("expected ", c.num_layers, " entries"));
  for (const std::string& type : types)
    if (type != "full_attention" && type != "sliding_attention")
      file.refuse("layer_types", "known: full_attention, sliding_attention");
  if (window < 0) file.refuse("sliding_window", "expected a number from 1");
  if (!used || window == 0) return;
  c.window = window;
  for (int64_t i = 0; i < c.num_layers; ++i)
    c.windowed.push_back(types.empty() ? i >= first
                                       : types[static_cast<size_t>(i)] == "sliding_attention");
}

void read_optional_window(ConfigFile& file, ModelConfig& c, const WindowDefaults& defaults) {
  if (file.flag("use_sliding_window", false))
    read_window(file, c, defaults);
  else
    file.ignore({"sliding_window", "max_window_layers", "layer_types"});
}

}  // namespace cohort
