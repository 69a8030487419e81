#include "nn/adapter_folder.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <set>

#include "core/dry_run.h"
#include "core/log.h"
#include "nn/families/family.h"
#include "nn/model_folder.h"
#include "sys/files.h"
#include "sys/input_file.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr const char *kConfig = "adapter_config.json", *kWeights = "adapter_model.safetensors";
constexpr std::string_view kPrefix = "base_model.model.", kA = ".lora_A.weight",
                           kB = ".lora_B.weight";

// Fields that are read, and those that do not change what a trained adapter computes.
constexpr std::string_view kKnownFields =
    "peft_type r lora_alpha use_rslora base_model_name_or_path task_type bias "
    "init_lora_weights target_modules exclude_modules fan_in_fan_out inference_mode "
    "lora_dropout revision peft_version auto_mapping layers_pattern megatron_core "
    "qalora_group_size eva_config corda_config loftq_config lora_ga_config runtime_config";

// Fields that are refused unless they are null, false or empty, and what they ask for.
constexpr std::pair<const char*, const char*> kUnsupported[] = {
    {"use_dora", "DoRA"},
    {"lora_bias", "a bias behind B"},
    {"modules_to_save", "modules that are trained as a whole"},
    {"rank_pattern", "ranks that differ between modules"},
    {"alpha_pattern", "scales that differ between modules"},
    {"layers_to_transform", "adapters of some layers only"},
    {"layer_replication", "layers that are repeated"},
    {"target_parameters", "adapters of parameters that are no linear layer"},
    {"trainable_token_indices", "trained rows of the embedding table"},
    {"use_qalora", "QA-LoRA"},
    {"use_bdlora", "BD-LoRA"},
    {"alora_invocation_tokens", "an adapter that begins at a token"},
    {"arrow_config", "Arrow routing"},
    {"kasa_config", "KaSA"},
    {"velora_config", "VeLoRA"},
    {"monteclora_config", "MonteCLoRA"},
    {"ensure_weight_tying", "adapters of tied embeddings"},
    {"megatron_config", "Megatron's layers"}};

std::string merge_hint(const std::string& dir) {
  return str(
      "; hint: merge it into a whole model in Python: "
      "peft.AutoPeftModelForCausalLM.from_pretrained('",
      dir, "').merge_and_unload().save_pretrained('NEW'), and copy the tokenizer");
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

void check_fields(const Json& json, const std::string& dir) {
  for (const auto& [field, value] : json.as_object()) {
    if (is_blank(value)) continue;
    const auto* refused = std::ranges::find(kUnsupported, field, [](auto& e) { return e.first; });
    if (refused != std::end(kUnsupported))
      throw InputError(str("the field ", field, " is ", value.dump(), ": ", refused->second,
                           " is not supported", merge_hint(dir)));
    if (!has_word(kKnownFields, field))
      throw InputError(str("the field ", field, " is ", value.dump(),
                           ", which is not known and might change what the adapter computes",
                           merge_hint(dir),
                           ", or remove the field if it changes nothing after training"));
  }
}

// Initial values that PEFT subtracts from the base model's weights.
void check_initial_values(const Json& json, const std::string& dir) {
  const std::string* name = json.find_text("init_lora_weights");
  if (name == nullptr) return;
  for (const char* harmless : {"true", "gaussian", "eva", "orthogonal"})
    if (lower(*name) == harmless) return;
  throw InputError(str("the field init_lora_weights is '", *name,
                       "', which may change the base model's weights as well", merge_hint(dir)));
}

LoraConfig read_lora(const Json& json, const std::string& dir) {
  constexpr int64_t kMaxRank = 4096;
  constexpr double kMinAlpha = 1e-6, kMaxAlpha = 1e6;  // as the keys of the configuration
  ConfigFile file(json);
  if (file.find("peft_type") == nullptr) file.refuse("peft_type", "only LORA is supported");
  file.expect("peft_type", "LORA");
  if (file.find("task_type") != nullptr) file.expect("task_type", "CAUSAL_LM");
  if (file.find("bias") != nullptr && file.text("bias", "") != "none")
    file.refuse("bias", "trained biases are not supported" + merge_hint(dir));
  check_fields(json, dir);
  check_initial_values(json, dir);
  LoraConfig lora;
  lora.rank = file.integer("r");
  if (lora.rank < 1 || lora.rank > kMaxRank)
    file.refuse("r", str("expected a rank from 1 to ", kMaxRank));
  if (file.find("lora_alpha") == nullptr) file.refuse("lora_alpha", "the scale is not known");
  lora.alpha = file.number("lora_alpha", 0);
  if (!(lora.alpha >= kMinAlpha && lora.alpha <= kMaxAlpha))
    file.refuse("lora_alpha", str("expected a number from ", kMinAlpha, " to ", kMaxAlpha));
  lora.rslora = file.flag("use_rslora", false);
  return lora;
}

// A module's name of one part is not enough for GPT-2, where attention and MLP have a c_proj, and
// for encoders, where the name of the MLP's dense layer is the end of attention's.
std::string target_of(const std::string& module, const std::vector<std::string>& ambiguous) {
  const std::string last = module.substr(module.rfind('.') + 1);
  if (last == "dense") return module;
  if (std::find(ambiguous.begin(), ambiguous.end(), last) == ambiguous.end()) return last;
  return module.substr(module.find('*') + 2);
}

// The module of a tensor's name, and whether it is A.
struct TensorName {
  std::string module;
  bool is_a = false;
};
TensorName parse_name(const std::string& name) {
  const bool is_a = name.ends_with(kA);
  const bool known = name.starts_with(kPrefix) && (is_a || name.ends_with(kB)) &&
                     name.size() > kPrefix.size() + kA.size();
  TensorName out{known ? name.substr(kPrefix.size(), name.size() - kPrefix.size() - kA.size()) : "",
                 is_a};
  const auto [pattern, layer] = split_layer_name(out.module);
  if (layer >= 0 && layer_name(pattern, layer) == out.module) return out;
  const bool is_table = name.find("embed") != name.npos || name.find("lm_head") != name.npos ||
                        name.find(".wte.") != name.npos;
  throw InputError(str("the tensor '", name, "' is ",
                       is_table ? "of an embedding table or a head, which have no adapters here"
                                : "no adapter of a linear layer of a block"));
}

// Throws InputError unless the tensors are an A and a B, of the rank, for each module.
void read_modules(const SafetensorsFile& file, AdapterConfig& adapter) {
  std::set<std::string> modules;
  const int64_t rank = adapter.lora.rank;
  for (const std::string& name : file.names()) {
    const auto [module, is_a] = parse_name(name);
    const std::string other = str(kPrefix, module, is_a ? kB : kA);
    if (!file.contains(other))
      throw InputError(str("there is a tensor '", name, "', but no '", other, "'"));
    const Shape shape = file.shape(name);
    if (shape.rank() != 2 || shape[is_a ? 0 : 1] != rank)
      throw InputError(str(name, ": expected ", is_a ? "[r, in]" : "[out, r]", " with the r of ",
                           kConfig, ", ", rank, ", found ", shape.str()));
    const auto [pattern, layer] = split_layer_name(module);
    modules.insert(pattern);
    adapter.num_layers = std::max(adapter.num_layers, layer + 1);
  }
  if (modules.empty()) throw InputError("it holds no tensors");
  adapter.modules.assign(modules.begin(), modules.end());
}

std::string weights_path(const std::string& dir) {
  const std::string path = dir + "/" + kWeights;
  if (!path_exists(path) && path_exists(dir + "/adapter_model.bin"))
    throw InputError(
        str(dir,
            ": adapter_model.bin is a pickle file, which can run programs and is not read; "
            "hint: convert it in Python: peft.AutoPeftModelForCausalLM.from_pretrained('",
            dir, "').save_pretrained('NEW', safe_serialization=True), and copy the tokenizer"));
  return path;
}

// Names and shapes of the adapters of a model.
std::vector<std::pair<std::string, Shape>> adapter_shapes(const ModelConfig& config) {
  std::vector<std::pair<std::string, Shape>> out;
  const DryRun run({});
  const Transformer model(config, DType::kF32, std::nullopt);
  for (const NamedParameter& p : model.parameters())
    if (p.role == ParameterRole::kAdapter) out.emplace_back(str(kPrefix, p.name), p.value.shape());
  return out;
}

// Throws InputError naming the tensor that the model lacks, or the file, or that has another shape.
void check_tensors(const SafetensorsFile& file, const ModelConfig& config) {
  std::set<std::string> expected;
  for (const auto& [name, shape] : adapter_shapes(config)) {
    expected.insert(name);
    if (!file.contains(name))
      throw InputError(
          str("there is no tensor '", name,
              "', and modules must have adapters in all layers that have them, or in none"));
    if (file.shape(name) != shape)
      throw InputError(str(name, ": expected shape ", shape.str(), ", found ",
                           file.shape(name).str(), "; hint: is it an adapter of this base model?"));
    if (!is_float(file.dtype(name)))
      throw InputError(
          str(name, ": expected floating point numbers, found ", file.stored_dtype(name)));
  }
  for (const std::string& name : file.names())
    if (!expected.contains(name))
      throw InputError(str("the base model has no tensor '", name,
                           "'; hint: is it an adapter of this base model?"));
}

// True if the family stores the blocks' linear layers as [in, out].
bool stores_transposed(const ModelConfig& config) {
  return std::ranges::count(tensor_rules(config), TensorRule::Layout::kTransposed,
                            &TensorRule::layout) > 0;
}

// Ends of the names of the modules with adapters, which no other module shares. PEFT adapts all
// modules whose name ends with one of them. Heads of encoders share them: a regular expression of
// the whole names.
Json target_modules(const ModelConfig& config) {
  const std::vector<AdapterTarget> chosen = AdapterTargets(config).modules;
  std::string names;
  for (const AdapterTarget& module : chosen)
    for (const char c : (names.empty() ? "" : "|") + module.name)
      names += c == '.' ? "\\." : c == '*' ? "\\d+" : std::string(1, c);
  if (config.is_encoder()) return names;
  std::map<std::string, size_t> ends, chosen_ends;
  const auto last = [](const AdapterTarget& module) {
    return module.name.substr(module.name.rfind('.') + 1);
  };
  for (const AdapterTarget& module : linear_modules(config)) ++ends[last(module)];
  for (const AdapterTarget& module : chosen) ++chosen_ends[last(module)];
  std::vector<std::string> ambiguous;
  for (const auto& [name, count] : chosen_ends)
    if (ends[name] != count) ambiguous.push_back(name);
  Json out = Json::Array{};
  std::set<std::string> seen;
  for (const AdapterTarget& module : chosen)
    if (const std::string target = target_of(module.name, ambiguous); seen.insert(target).second)
      out.push_back(target);
  return out;
}

std::vector<TensorSource> sources_of(const Transformer& model, const std::vector<Tensor>& values) {
  std::vector<TensorSource> out;
  for (const NamedParameter& p : model.parameters())
    if (p.role == ParameterRole::kAdapter) {
      const Tensor& value = values.at(out.size());
      out.push_back({str(kPrefix, p.name), value.shape(), stored_name(value.dtype()),
                     [value] { return value; }});
    }
  return out;
}

}  // namespace

bool is_adapter_folder(const std::string& dir) {
  return path_exists(dir + "/" + kConfig);
}

AdapterConfig load_adapter_config(const std::string& dir) {
  AdapterConfig adapter;
  const std::string path = dir + "/" + kConfig;
  with_path(path, [&] {
    const Json json = parse_json(read_input_file(path), path);
    with_location(json, path, [&] {
      adapter.lora = read_lora(json, dir);
      adapter.base = ConfigFile(json).text("base_model_name_or_path", "");
    });
  });
  const SafetensorsFile file(weights_path(dir));
  with_path(dir + "/" + kWeights, [&] { read_modules(file, adapter); });
  for (const std::string& module : adapter.modules)
    adapter.lora.targets.push_back(target_of(module, {"c_proj"}));
  return adapter;
}

ModelConfig with_adapter(ModelConfig base, const AdapterConfig& adapter, const std::string& dir) {
  const std::string path = dir + "/" + kWeights;
  const std::vector<AdapterTarget> known = linear_modules(base);
  int64_t num_layers = 0;  // up to the last with one of the modules
  for (const std::string& module : adapter.modules) {
    for (int64_t layer = 0; layer < base.num_layers; ++layer)
      if (has_module(base, module, layer)) num_layers = std::max(num_layers, layer + 1);
    if (std::ranges::count(known, module, &AdapterTarget::name) == 0)
      throw InputError(str(path, ": '", layer_name(module, 0),
                           "' is no linear layer of the base model's blocks, as '",
                           layer_name(known[0].name, 0), "' is; hint: ",
                           module.starts_with("model.language_model.")
                               ? "it is one of a model with an image encoder: rename the tensors' "
                                 "'model.language_model.' to 'model.'"
                               : "is it an adapter of this base model?"));
  }
  if (adapter.num_layers != num_layers)
    throw InputError(str(path, ": adapters of ", adapter.num_layers,
                         " layers, and the base model has ", num_layers,
                         "; hint: is it an adapter of this base model?"));
  base.lora = adapter.lora;
  base.lora.targets.clear();
  for (const AdapterTarget& entry : known)
    if (adapter.modules.size() < known.size() &&
        std::ranges::count(adapter.modules, entry.name) > 0)
      base.lora.targets.push_back(target_of(entry.name, {"c_proj"}));
  const SafetensorsFile file(path);
  with_path(path, [&] { check_tensors(file, base); });
  return base;
}

NamedTensors read_adapter_tensors(const std::string& path, const ModelConfig& config, DType dtype) {
  const SafetensorsFile file(path);
  return with_path(path, [&] {
    check_tensors(file, config);
    NamedTensors out;
    std::string rounded;
    for (const auto& [name, shape] : adapter_shapes(config)) {
      if (loses_bits(file.stored_dtype(name), dtype)) rounded = file.stored_dtype(name);
      out.emplace_back(name, file.read(name).to(dtype));
      const std::vector<double> values = out.back().second.to_vector<double>();
      for (size_t i = 0; i < values.size(); ++i)
        if (!std::isfinite(values[i]))
          throw InputError(str(name, ": element ", i, " is ", values[i], ", as a ",
                               dtype_name(dtype),
                               "; hint: the training that wrote it diverged, use an earlier one"));
    }
    if (!rounded.empty())
      logging::info("the adapters of ", path, " are ", rounded, " and are rounded to ",
                    dtype_name(dtype));
    return out;
  });
}

std::vector<Tensor> load_adapter_tensors(const Transformer& model, const std::string& path) {
  std::vector<Tensor> out;
  for (const auto& [name, value] : read_adapter_tensors(path, model.config(), model.dtype()))
    out.push_back(value.to(model.device()));
  return out;
}

void load_adapter(Transformer& model, const std::string& dir, int64_t slot, double scale) {
  const std::vector<Tensor> values = load_adapter_tensors(model, weights_path(dir));
  if (slot == 0)
    model.set_adapters(values);
  else
    model.set_adapter_slot(slot, values, scale);
}

void save_adapter_tensors(const Transformer& model, const std::vector<Tensor>& values,
                          const std::string& path) {
  write_sources(path, sources_of(model, values));
}

std::vector<std::string> write_adapter(const ModelConfig& config,
                                       const std::vector<TensorSource>& tensors,
                                       const std::string& dir, const std::string& base) {
  write_sources(dir + "/" + kWeights, tensors);
  Json json;
  json.set("peft_type", "LORA").set("task_type", config.is_encoder() ? Json() : "CAUSAL_LM");
  json.set("base_model_name_or_path", base).set("revision", Json());
  // Programs that read such files expect a whole number where it is one.
  const double alpha = config.lora.alpha;
  const auto whole = static_cast<int64_t>(alpha);
  json.set("r", config.lora.rank);
  json.set("lora_alpha", static_cast<double>(whole) == alpha ? Json(whole) : Json(alpha));
  json.set("use_rslora", config.lora.rslora).set("target_modules", target_modules(config));
  json.set("bias", "none").set("fan_in_fan_out", stores_transposed(config));
  json.set("lora_dropout", 0.0).set("init_lora_weights", true).set("inference_mode", true);
  json.set("modules_to_save", Json());
  write_file_durable(dir + "/" + kConfig, json.dump(2) + "\n");
  return {kWeights, kConfig};
}

std::vector<std::string> save_adapter(const Transformer& model, const std::string& dir,
                                      const std::string& base, const std::string& dtype) {
  std::vector<TensorSource> sources = sources_of(model, model.adapters());
  if (!dtype.empty())
    for (TensorSource& source : sources) source.type = stored_type(dtype);
  return write_adapter(model.config(), sources, dir, base);
}

std::string quantized_base_hint(const std::string& base) {
  const std::string name = lower(base);
  for (const char* mark : {"-unsloth-bnb-4bit", "-bnb-4bit", "-bnb-8bit", "-gptq", "-awq"}) {
    const size_t at = name.rfind(mark);
    if (at == name.npos || at == 0 || name.find('/', at) != name.npos) continue;
    return str(" is quantized, which is not supported; hint: --base DIR of the 16-bit model (",
               base.substr(0, at), ")");
  }
  return "";
}

}  // namespace cohort
