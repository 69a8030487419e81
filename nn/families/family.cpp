#include "nn/families/family.h"

#include <algorithm>
#include <utility>

namespace cohort {
namespace {

const Family* const kFamilies[] = {&kBert,    &kGemma,   &kGpt2,  &kLlama, &kMistral,
                                   &kOlmo2,   &kPhi3,    &kQwen2, &kQwen3, &kQwen3_5,
                                   &kRoberta, &kSmolLm3, &kVit};

// Relatives of a family that are not supported, by the beginning of their model_type.
constexpr std::pair<const char*, const char*> kRelatives[] = {
    {"qwen3_5_moe", "a model of Qwen3.5 with experts; hint: the dense ones of 0.8B to 27B"},
    {"qwen3_5_vision", "the image encoder of Qwen3.5 alone; hint: the folder of the whole model"},
    {"qwen3_next", "a model with experts; hint: the dense models of Qwen3.5"}};

// Throws InputError naming the type and the known ones.
const Family& find_family(const std::string& model_type) {
  for (const Family* family : kFamilies)
    if (model_type == family->model_type) return *family;
  for (const auto& [begin, what] : kRelatives)
    if (model_type.starts_with(begin))
      throw InputError(str("model_type: '", model_type, "' is not supported: it is ", what));
  throw InputError(
      str("model_type: '", model_type, "' is not supported; known: ", join(family_types(), ", ")));
}

// Activations of gates by their names in config.json; the first of several is written.
constexpr std::pair<const char*, MlpType> kGates[] = {{"silu", MlpType::kSwiGlu},
                                                      {"swish", MlpType::kSwiGlu},
                                                      {"gelu", MlpType::kGeGlu},
                                                      {"gelu_pytorch_tanh", MlpType::kGeGluTanh},
                                                      {"gelu_new", MlpType::kGeGluTanh}};

MlpType gated_mlp(ConfigFile& file, const std::string& activation) {
  for (const auto& [name, type] : kGates)
    if (activation == name) return type;
  file.refuse("hidden_act", "known: silu, gelu, gelu_pytorch_tanh");
}

const char* gate_name(MlpType type) {
  for (const auto& [name, gate] : kGates)
    if (gate == type) return name;
  return kGates[0].first;
}

// True if both resolved configurations have the same keys, except those that config.json does not
// have, and compute the same.
bool is_equal(const ModelConfig& a, ModelConfig b) {
  b.path = a.path;
  b.context = a.context;  // each is the number of positions, or fewer that a run uses
  b.dropout = a.dropout;
  b.recompute = a.recompute;
  return config_fields(a) == config_fields(b) && a.vocab_size == b.vocab_size &&
         a.family == b.family && a.head == b.head && a.labels == b.labels;
}

}  // namespace

std::vector<std::string> family_types() {
  std::vector<std::string> out;
  for (const Family* family : kFamilies) out.emplace_back(family->model_type);
  return out;
}

ModelConfig read_family(const Json& file_json) {
  const bool has_images = file_json.at("model_type").as_string() == "qwen3_5";
  const Json whole = has_images ? qwen3_5_text(file_json) : file_json;
  const kernels::WeightFormat stored = stored_format(whole);
  Json json = Json::Object{};  // as of the weights in 16 bits
  for (const auto& [field, value] : whole.as_object())
    if (field != "quantization_config") json.set(field, value);
  ConfigFile file(json);
  ModelConfig c = find_family(json.at("model_type").as_string()).read(file);
  // False in decoders that became encoders: it is not blank.
  if (!c.is_encoder()) file.expect("is_causal", true);
  file.check_all_used();
  if (c.has_delta() && stored != kernels::WeightFormat::kModel)
    throw InputError(
        "the field quantization_config: weights in 8 or 4 bits are not supported in models with "
        "delta layers; hint: use the folder of the 16-bit model");
  // The key `bias` of models made here means all of them; RMS norms have none.
  if (c.norm == NormType::kRms && c.family.qkv_bias && c.family.o_bias && c.family.mlp_bias) {
    c.bias = true;
    c.family.qkv_bias = c.family.o_bias = c.family.mlp_bias = false;
  }
  c.file = json;
  c.stored_format = stored;
  return c;
}

Json family_config(const ModelConfig& config) {
  for (const Family* family : kFamilies) {
    Json json = family->write == nullptr ? Json() : family->write(config);
    if (json.is_null()) continue;
    ModelConfig back = read_family(json);
    if (back.head_dim == 0) back.head_dim = back.d_model / back.num_heads;
    if (is_equal(config, back)) return json;
  }
  return {};
}

std::vector<std::string> unused_tensors(const ModelConfig& config) {
  if (config.file.is_null()) return {};
  return find_family(config.file.at("model_type").as_string()).unused;
}

std::vector<TensorRule> tensor_rules(const ModelConfig& config) {
  const Json json = config.file.is_null() ? family_config(config) : config.file;
  if (json.is_null()) return {};
  const auto rules = find_family(json.at("model_type").as_string()).rules;
  return rules == nullptr ? std::vector<TensorRule>() : rules(config);
}

MlpType read_plain_mlp(ConfigFile& file, const char* field, const char* otherwise) {
  const std::string activation = file.text(field, otherwise);
  if (activation == "gelu") return MlpType::kGelu;
  if (activation == "gelu_new" || activation == "gelu_pytorch_tanh") return MlpType::kGeluTanh;
  file.refuse(field, "known: gelu, gelu_new, gelu_pytorch_tanh");
}

ModelConfig read_decoder(ConfigFile& file, const DecoderDefaults& defaults) {
  ModelConfig c;
  c.d_model = file.integer("hidden_size");
  c.num_layers = file.integer("num_hidden_layers");
  c.num_heads = file.integer("num_attention_heads");
  c.num_kv_heads = file.integer("num_key_value_heads", c.num_heads);
  c.head_dim = file.integer("head_dim", defaults.head_dim);
  c.rotary_fraction = defaults.rotary_fraction;
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

Json start_config(const char* model_type, const char* architecture, const ModelConfig& c) {
  return Json::Object{{"architectures", Json::Array{architecture}},
                      {"model_type", model_type},
                      {"bos_token_id", Json()},
                      {"vocab_size", c.vocab_size},
                      {"tie_word_embeddings", c.tie_embeddings},
                      {"initializer_range", c.init_std}};
}

Json write_decoder(const ModelConfig& c, const char* model_type, const char* architecture) {
  Json json = start_config(model_type, architecture, c);
  json.set("hidden_size", c.d_model).set("num_hidden_layers", c.num_layers);
  json.set("num_attention_heads", c.num_heads).set("num_key_value_heads", c.num_kv_heads);
  json.set("head_dim", c.head_dim).set("intermediate_size", c.d_ff);
  json.set("hidden_act", gate_name(c.mlp)).set("attention_bias", c.bias);
  json.set("max_position_embeddings", std::max(c.context, c.position_rows));
  return json.set("rms_norm_eps", c.norm_eps).set("rope_theta", c.rope_theta);
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
    c.family.windowed.push_back(
        types.empty() ? i >= first : types[static_cast<size_t>(i)] == "sliding_attention");
}

void read_optional_window(ConfigFile& file, ModelConfig& c, const WindowDefaults& defaults) {
  if (file.flag("use_sliding_window", false))
    read_window(file, c, defaults);
  else
    file.ignore({"sliding_window", "max_window_layers"});
  if (c.window > 0) return;
  for (const std::string& type : file.texts("layer_types"))
    if (type != "full_attention")
      file.refuse("layer_types", "without use_sliding_window only full_attention is supported");
}

void read_common_window(ConfigFile& file, ModelConfig& c, int64_t otherwise) {
  read_window(file, c, {.window = otherwise});
  for (const char* field : {"layer_types", "max_window_layers"})
    if (std::ranges::count(c.family.windowed, false) > 0 && file.find(field) != nullptr)
      file.refuse(field, "layers without the sliding_window are not supported in this family");
  if (file.integer("sliding_window", file.has("sliding_window") ? 0 : otherwise) > 0)
    file.expect("use_sliding_window", true);
}

}  // namespace cohort
