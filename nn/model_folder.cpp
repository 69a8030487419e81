#include "nn/model_folder.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "core/log.h"
#include "core/sizes.h"
#include "nn/families/family.h"
#include "nn/lora.h"
#include "nn/quantized_folder.h"
#include "sys/files.h"
#include "sys/input_file.h"

namespace cohort {
namespace {

constexpr const char* kHead = "lm_head.weight";

// A tensor of a file and the parameters that form its rows.
struct StoredTensor {
  std::string name;
  TensorRule::Layout layout = TensorRule::Layout::kSame;
  std::vector<const NamedParameter*> parameters;
  Shape stored_shape = {};  // as in TensorRule

  int64_t rows() const {
    int64_t n = 0;
    for (const NamedParameter* p : parameters) n += p->value.shape()[0];
    return n;
  }
  // The shape of the parameters' rows, one below the other.
  Shape weight_shape() const {
    Shape shape = parameters[0]->value.shape();
    shape[0] = rows();
    return shape;
  }
  Shape shape() const {
    if (stored_shape.rank() > 0) return stored_shape;
    Shape shape = weight_shape();
    if (layout == TensorRule::Layout::kTransposed) std::swap(shape[0], shape[1]);
    return shape;
  }
};

// Stored tensors in the order of their first parameters, without those of adapters, which have
// files of their own (nn/adapter_folder.h).
std::vector<StoredTensor> stored_tensors(const Transformer& model,
                                         const std::vector<TensorRule>& rules) {
  const ModelConfig& config = model.config();
  std::map<std::string, const NamedParameter*> by_name;
  for (const NamedParameter& p : model.parameters()) by_name[p.name] = &p;
  std::map<std::string, StoredTensor> by_first_parameter;
  std::set<std::string> covered;
  for (const TensorRule& rule : rules)
    for (int64_t layer = 0; layer < config.num_layers; ++layer) {
      if (!by_name.contains(layer_name(rule.parameters[0], layer))) continue;
      StoredTensor stored{layer_name(rule.stored, layer), rule.layout, {}, rule.stored_shape};
      for (const std::string& pattern : rule.parameters) {
        const std::string name = layer_name(pattern, layer);
        stored.parameters.push_back(by_name.at(name));
        covered.insert(name);
      }
      by_first_parameter[stored.parameters[0]->name] = std::move(stored);
    }
  std::vector<StoredTensor> all;
  for (const NamedParameter& p : model.parameters()) {
    if (p.role == ParameterRole::kAdapter) continue;
    const auto merged = by_first_parameter.find(p.name);
    if (merged != by_first_parameter.end())
      all.push_back(merged->second);
    else if (!covered.contains(p.name))
      all.push_back({p.name, TensorRule::Layout::kSame, {&p}});
  }
  return all;
}

// True if two tensors differ; NaN equals NaN.
bool differ(const SafetensorsFile& a, const std::string& a_name, const SafetensorsFile& b,
            const std::string& b_name) {
  constexpr int64_t kRows = 1024;
  const Shape shape = a.shape(a_name);
  if (shape != b.shape(b_name) || shape.rank() == 0) return true;
  for (int64_t row = 0; row < shape[0]; row += kRows) {
    Shape part = shape;
    part[0] = std::min(kRows, shape[0] - row);
    Tensor x = Tensor::empty(part, DType::kF64), y = Tensor::empty_like(x);
    a.read_rows(a_name, row, x);
    b.read_rows(b_name, row, y);
    const auto equal = [](double v, double w) { return v == w || (v != v && w != w); };
    if (!std::equal(x.data<double>(), x.data<double>() + x.numel(), y.data<double>(), equal))
      return true;
  }
  return false;
}

// Throws InputError if a copy of the embedding table or the bias for the head of an encoder differs
// from it.
void check_tied(const SafetensorsFolder& folder, const std::string& copy,
                const std::string& original) {
  const auto [file, name] = find_weight(folder, original);
  if (differ(*folder.find(copy), copy, *file, name))
    throw InputError(str(folder.path(), ": ", copy, " differs from ", name,
                         ": heads of BERT that are not tied to it are not supported"));
}

// Logs a message about a folder or a file in it, once for each.
void log_once(const std::string& path, const std::string& message) {
  static std::mutex mutex;
  static std::set<std::string> reported;
  const std::lock_guard lock(mutex);
  if (reported.insert(std::filesystem::canonical(path).string()).second) logging::info(message);
}

// True if the folder's weights have a head that differs from their embedding table, which is logged
// once per folder.
bool has_own_head(const std::string& dir) {
  if (!SafetensorsFolder::exists(dir, "model")) return false;
  const SafetensorsFolder folder(dir, "model");
  const SafetensorsFile* head = folder.find(kHead);
  auto [table, name] = find_weight(folder, "model.embed_tokens.weight");
  if (table == nullptr) std::tie(table, name) = find_weight(folder, "transformer.wte.weight");
  if (head == nullptr || table == nullptr || !differ(*head, kHead, *table, name)) return false;
  log_once(dir, str("config.json of ", dir, " ties the head to the embedding table, but ", kHead,
                    " differs from it: the head is not tied"));
  return true;
}

// True for tensors that follow from the configuration or from parameters: masks, tables, and the
// head's matrix if it is tied to the embedding table.
bool is_derived(const std::string& name, const ModelConfig& config) {
  for (const char* end :
       {".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "embeddings.position_ids"})
    if (name.ends_with(end)) return true;
  return config.tie_embeddings && name == kHead;
}

// Duplicates of the table and the bias in the heads of BERT and RoBERTa.
bool is_tied_duplicate(const std::string& name) {
  return name.starts_with("cls.predictions.decoder.") || name.starts_with("lm_head.decoder.");
}

// The bias of which lm_head.decoder.bias is a duplicate.
std::string bias_of(std::string duplicate) {
  return duplicate.erase(duplicate.rfind("decoder."), std::size("decoder.") - 1);
}

// True for tensors of heads of encoders, the poolers among them.
bool is_of_head(const std::string& name) {
  for (const char* part : {"cls.", "lm_head.", "classifier.", "pooler.", "head."})
    if (name.starts_with(part) || name.find(str(".", part)) != name.npos) return true;
  return false;
}

void load(const StoredTensor& stored, const SafetensorsFile& file, const std::string& name) {
  const bool transposed = stored.layout == TensorRule::Layout::kTransposed;
  if (stored.stored_shape.rank() > 0) {
    Tensor value = stored.parameters[0]->value;
    value.copy_(file.read(name).reshape(value.shape()));
    return;
  }
  const Tensor all = transposed ? file.read(name).transpose(0, 1).contiguous() : Tensor();
  int64_t first = 0;
  for (const NamedParameter* p : stored.parameters) {
    Tensor value = p->value;
    // Weights with an adapter are strided: behind each row is the adapter's s B.
    Tensor rows = value.is_contiguous() ? value : Tensor::empty_like(value);
    if (transposed)
      rows.copy_(all.narrow(0, first, rows.dim(0)).contiguous());
    else
      file.read_rows(name, first, rows);
    if (!value.is_contiguous()) value.copy_(rows);
    first += value.dim(0);
  }
}

// Puts the rows of a weight on the host into the parameters: in 8 or 4 bits, or as numbers.
void put(const StoredTensor& stored, const kernels::QuantizedWeight& w) {
  int64_t first = 0;
  for (const NamedParameter* p : stored.parameters) {
    const kernels::QuantizedWeight rows = w.rows(first, p->value.dim(0));
    first += p->value.dim(0);
    if (p->quantized.defined()) {
      kernels::QuantizedWeight(p->quantized).copy_(rows);
      continue;
    }
    Tensor value = p->value, numbers = Tensor::empty(value.shape(), DType::kF32);
    kernels::dequantize_weight({numbers, rows});
    value.copy_(numbers);
  }
}

// Reads the weights of a folder into a model, and remembers how they change.
class WeightReader {
 public:
  WeightReader(const Transformer& model, const SafetensorsFolder& folder,
               std::set<std::string>& used)
      : folder_(folder),
        used_(used),
        format_(model.config().precision.base),
        found_(model.config().stored_format),
        dtype_(model.dtype()) {}
  void read(const StoredTensor& stored, const SafetensorsFile& file, const std::string& name) {
    const bool in_base = stored.parameters[0]->quantized.defined();
    if (const kernels::QuantizedWeight w =
            read_quantized(folder_, name, stored.weight_shape(), used_);
        w.defined()) {
      if (in_base && w.is_nf4() != stored.parameters[0]->quantized.is_nf4())
        throw InputError(str(folder_.path(), ": ", name, " is in ", w.is_nf4() ? "nf4" : "int8",
                             ", which precision.base: ", name_of_base(),
                             " would round again; hint: do config.json and the file belong "
                             "together?"));
      put(stored, w);
      expanded_ |= !in_base;
      return;
    }
    check(stored, file, name);
    if (in_base) return quantize(stored, file, name);
    const DType dtype = stored.parameters[0]->value.dtype();
    if (loses_bits(file.stored_dtype(name), dtype)) rounded_ = file.stored_dtype(name);
    load(stored, file, name);
  }
  void log_changes() const {
    if (expanded_)
      logging::info("the weights of ", folder_.path(),
                    " are in 8 or 4 bits and are expanded; precision.base keeps them so");
    if (!rounded_.empty())
      logging::info("the weights of ", folder_.path(), " are ", rounded_, " and are rounded to ",
                    dtype_name(dtype_));
  }

 private:
  using WeightFormat = kernels::WeightFormat;

  const char* name_of_base() const { return entry_of(kBaseNames, format_).name; }
  void check(const StoredTensor& stored, const SafetensorsFile& file,
             const std::string& name) const {
    if (file.shape(name) != stored.shape())
      throw InputError(str(folder_.path(), ": ", name, ": expected shape ", stored.shape().str(),
                           ", found ", file.shape(name).str()));
    if (!is_float(file.dtype(name)))
      throw InputError(str(folder_.path(), ": ", name, ": expected floating point numbers, found ",
                           file.stored_dtype(name)));
  }
  void quantize(const StoredTensor& stored, const SafetensorsFile& file,
                const std::string& name) const {
    if (found_ != WeightFormat::kModel)
      throw InputError(str(folder_.path(), ": ", name, " is ", file.stored_dtype(name),
                           " among weights in 8 or 4 bits, and precision.base: ", name_of_base(),
                           " would round it; hint: precision.base=bf16, or --weights bf16, which "
                           "expands the others"));
    Tensor numbers = Tensor::empty(file.shape(name), DType::kF32);
    file.read_rows(name, 0, numbers);
    if (stored.layout == TensorRule::Layout::kTransposed)
      numbers = numbers.transpose(0, 1).contiguous();
    const float* const x = numbers.data<float>();
    if (!std::all_of(x, x + numbers.numel(), [](float v) { return std::isfinite(v); }))
      throw InputError(str(folder_.path(), ": ", name,
                           " has a number that is not finite, which precision.base: ",
                           name_of_base(), " cannot hold"));
    put(stored, kernels::quantize_weight(numbers, format_));
  }

  const SafetensorsFolder& folder_;
  std::set<std::string>& used_;
  const WeightFormat format_;  // the base of the model
  const WeightFormat found_;   // in the folder
  DType dtype_;
  bool expanded_ = false;
  std::string rounded_;  // the dtype of some weights that are rounded
};

// The stored tensor, contiguous, on the host unless it is a single unchanged parameter.
Tensor assemble(const StoredTensor& stored) {
  const Tensor first = stored.parameters[0]->value;
  if (stored.parameters.size() == 1 && stored.layout == TensorRule::Layout::kSame)
    return first.contiguous().reshape(stored.shape());
  Shape shape = first.shape();
  shape[0] = stored.rows();
  Tensor all = Tensor::empty(shape, first.dtype());
  int64_t row = 0;
  for (const NamedParameter* p : stored.parameters) {
    Tensor part = all.narrow(0, row, p->value.shape()[0]);
    part.copy_(p->value.to(Device{}));
    row += part.dim(0);
  }
  return stored.layout == TensorRule::Layout::kTransposed ? all.transpose(0, 1).contiguous() : all;
}

// Names of a type in safetensors and in config.json, and the DType that holds its numbers.
struct FloatType {
  const char *stored, *torch;
  DType dtype;
};
constexpr FloatType kFloatTypes[] = {{"F64", "float64", DType::kF64},
                                     {"F32", "float32", DType::kF32},
                                     {"BF16", "bfloat16", DType::kBF16},
                                     {"F16", "float16", DType::kF32}};

const FloatType& type_named(const std::string& torch) {
  for (const FloatType& type : kFloatTypes)
    if (torch == type.torch) return type;
  throw InputError(
      str("dtype: '", torch, "' is not known; known: float64, float32, bfloat16, float16"));
}

// Sets config.json's eos_token_id, a number or a list, unless the tokenizer has none.
void set_eos(Json& json, const Tokenizer& tokenizer) {
  const std::vector<int32_t> ids = stop_ids_of(tokenizer);
  if (ids.size() == 1)
    json.set("eos_token_id", ids[0]);
  else if (!ids.empty())
    json.set("eos_token_id", Json::Array(ids.begin(), ids.end()));
}

// Sets config.json's dtype under each of its two names that the file has.
void set_dtype(Json& config, const std::string& dtype) {
  const bool has_new_name = config.find("dtype") != nullptr;
  if (has_new_name) config.set("dtype", dtype);
  if (!has_new_name || config.find("torch_dtype") != nullptr) config.set("torch_dtype", dtype);
}

}  // namespace

bool loses_bits(const std::string& stored, DType dtype) {
  if (stored == "F64") return dtype != DType::kF64;
  return dtype == DType::kBF16 && stored != "BF16";
}

bool is_model_folder(const std::string& dir) {
  return SafetensorsFolder::exists(dir, "model") && path_exists(dir + "/config.json");
}

std::string hub_hint(const std::string& name, const std::string& path) {
  const auto is_plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.' || c == '/';
  };
  constexpr std::string_view kUrl = "https://";
  if (const size_t end = name.find('/', kUrl.size()); name.starts_with(kUrl) && end != name.npos)
    return hub_hint(name.substr(end + 1), "");
  const size_t slash = name.find('/');
  const bool plain = !name.empty() && std::isalnum(static_cast<unsigned char>(name[0])) != 0 &&
                     std::all_of(name.begin(), name.end(), is_plain);
  // OWNER/MODEL or MODEL. A path whose folder exists is a path.
  if (!plain || name.find('/', slash + 1) != name.npos || slash == name.size() - 1 ||
      (slash != name.npos && path_exists(path.substr(0, path.rfind('/')))))
    return "";
  return str(
      "; hint: nothing is downloaded from the Hugging Face Hub; if this is a name there: hf "
      "download ",
      name, " --local-dir ", name.substr(slash + 1),
      " (or huggingface-cli download), then give that folder");
}

std::string explain_no_model(const std::string& path) {
  if (!path_exists(path)) return hub_hint(path, path);
  std::vector<std::string> names = list_directory(path);
  std::string dir = path;
  if (names.empty() && path_exists(path + "/.")) return "";
  if (names.empty()) {  // a file
    const size_t slash = path.rfind('/');
    dir = slash == path.npos ? "." : path.substr(0, slash);
    names = {path.substr(slash + 1)};
  }
  const auto find = [&](std::string_view begin, std::string_view end) {
    for (const std::string& name : names)
      if (name.starts_with(begin) && name.ends_with(end)) return name;
    return std::string();
  };
  const auto convert = [&](const char* options, const std::string& name) {
    return str("; hint: convert it in Python: transformers.AutoModelForCausalLM.from_pretrained('",
               dir, "'", options, name, name.empty() ? "" : "'",
               ").save_pretrained('NEW', safe_serialization=True), and AutoTokenizer likewise");
  };
  if (const std::string name = find("adapter_", ""); path != dir && !name.empty())
    return ": it is a file of an adapter (LoRA); hint: give its folder";
  if (const std::string name = find("adapter_model", ""); !name.empty())
    return str(": it has ", name,
               " of an adapter (LoRA) and no adapter_config.json; hint: is the download complete?");
  if (const std::string name = find("", ".gguf"); !name.empty())
    return str(": ", name, " is in llama.cpp's format, which is not read",
               convert(", gguf_file='", name));
  for (const auto& [begin, end] : {std::pair("", ".bin"), {"consolidated", ".pth"}})
    if (const std::string name = find(begin, end); !name.empty() && name != "training_args.bin")
      return str(": ", name, " is a pickle file, which can run programs and is not read",
                 convert("", ""));
  if (path != dir)
    return ": it is a file, and a model is a folder; hint: give the folder of its config.json";
  if (!find("snapshots", "").empty())
    return ": it is an entry of the Hugging Face cache; hint: give a folder in its snapshots/";
  const std::string weights = find("", ".safetensors"), config = find("config.json", "");
  if (is_model_folder(path)) return "";
  if (const std::string name = find("checkpoint-", ""); weights.empty() && !name.empty())
    return str(": it is the output of transformers or TRL; hint: give a checkpoint in it, like ",
               dir, "/", name);
  if (weights.empty() && config.empty()) return "";
  return str(": it has ", config.empty() ? weights : config, " and ",
             config.empty()    ? "no config.json"
             : weights.empty() ? "no model.safetensors"
                               : weights,
             "; hint: a model is config.json with model.safetensors, or shards and "
             "model.safetensors.index.json; is the download complete?");
}

ModelConfig load_config(const std::string& dir) {
  const std::string path = dir + "/config.json";
  ModelConfig config;
  with_path(path, [&] {
    const Json json = parse_json(read_input_file(path), path);
    config = with_location(json, path, [&] { return ModelConfig::from_json(json); });
    config.resolve();
  });
  if (!config.tie_embeddings || !has_own_head(dir)) return config;
  config.tie_embeddings = false;
  if (!config.file.is_null()) config.file.set("tie_word_embeddings", false);
  return config;
}

void load_weights(Transformer& model, const std::string& dir, const std::string& stem,
                  NewHead new_head) {
  const SafetensorsFolder folder(dir, stem);
  // Version 0.1.0 saved all models made here under the names of their parameters.
  const bool own_names =
      model.config().file.is_null() && folder.find(model.parameters()[0].name) != nullptr;
  const auto rules = own_names ? std::vector<TensorRule>() : tensor_rules(model.config());
  std::set<std::string> used;
  WeightReader reader(model, folder, used);
  const std::vector<std::string> unused = unused_tensors(model.config());
  std::string fresh, others;
  int64_t unused_bytes = 0;
  for (const StoredTensor& stored : stored_tensors(model, rules)) {
    const auto [file, name] = find_weight(folder, stored.name);
    const std::string& ours = stored.parameters[0]->name;
    const bool is_logits = ours == "head.weight" || ours == "head.bias" || ours == kHead;
    if (new_head == NewHead::kYes &&
        (is_logits || (file == nullptr && ours.starts_with("head.")))) {
      fresh += (fresh.empty() ? "" : ", ") + stored.name;
      continue;
    }
    if (file == nullptr)
      throw InputError(str(folder.path(), ": there is no tensor '", stored.name,
                           "'; hint: do config.json and the file belong together?"));
    reader.read(stored, *file, name);
    used.insert(name);
  }
  for (const std::string& name : folder.names()) {
    if (used.contains(name) || is_derived(name, model.config())) continue;
    if (std::ranges::any_of(unused, [&](const auto& begin) { return name.starts_with(begin); })) {
      unused_bytes += folder.find(name)->bytes(name);
      continue;
    }
    if (!model.config().is_encoder() || !is_of_head(name))
      throw InputError(str(folder.path(), ": the model has no tensor '", name,
                           "'; hint: do config.json and the file belong together?"));
    if (!is_tied_duplicate(name))
      others += (others.empty() ? "" : ", ") + name;
    else if (!rules.empty() && model.config().is_tied())
      check_tied(folder, name, name.ends_with(".weight") ? rules[0].stored : bias_of(name));
  }
  if (!others.empty())
    logging::info("the tensors of other heads in ", folder.path(), " are left out: ", others);
  if (unused_bytes > 0)
    log_once(folder.path(), str("the tensors ", join(unused, "*, "), "* in ", folder.path(), ", ",
                                mib(unused_bytes),
                                ", are left out: what is read and saved is the text model alone"));
  if (!fresh.empty())
    logging::info("the head is new, and ", folder.path(), " does not give it: ", fresh);
  reader.log_changes();
  model.update_derived();
}

std::string type_in_files(const NamedParameter& p, const std::string& type) {
  const bool is_kept = p.dtype == ParameterDType::kStatistic && (type == "BF16" || type == "F16");
  return is_kept ? "F32" : type;
}

std::vector<TensorSource> weight_sources(const Transformer& model, const std::string& type) {
  std::vector<TensorSource> out;
  for (StoredTensor& stored : stored_tensors(model, tensor_rules(model.config()))) {
    const std::string name = stored.name;
    const Shape shape = stored.shape();
    const std::string own = type_in_files(*stored.parameters[0], type);
    out.push_back({name, shape, own, [stored = std::move(stored)] { return assemble(stored); }});
  }
  return out;
}

std::pair<const SafetensorsFile*, std::string> find_weight(const SafetensorsFolder& folder,
                                                           const std::string& name) {
  // Older files of BERT have the names of TensorFlow's LayerNorm.
  std::string old_name = name;
  for (const auto& [end, old] :
       {std::pair("LayerNorm.weight", "gamma"), {"LayerNorm.bias", "beta"}})
    if (name.ends_with(end)) old_name = name.substr(0, name.rfind('.') + 1) + old;
  for (const std::string& whole : {name, old_name})
    for (const std::string& rest = whole.substr(whole.find('.') + 1);
         const std::string& n : {whole, rest, "model.language_model." + rest})
      if (const SafetensorsFile* file = folder.find(n)) return {file, n};
  return {nullptr, name};
}

std::vector<std::string> save_weights(const Transformer& model, const std::string& dir,
                                      const std::string& stem) {
  return write_sharded(dir, stem, weight_sources(model, stored_name(model.dtype())));
}

Json saved_config(const Transformer& model, const Tokenizer* tokenizer) {
  Json json = model.config().to_json();
  if (model.config().file.is_null() && tokenizer != nullptr) set_eos(json, *tokenizer);
  const std::string_view stored = stored_name(model.dtype());
  set_dtype(json, std::ranges::find(kFloatTypes, stored, &FloatType::stored)->torch);
  return json;
}

std::vector<int32_t> stop_ids_of(const Tokenizer& tokenizer) {
  try {
    return tokenizer.stop_ids();
  } catch (const InputError&) {
    return {};
  }
}

std::string stored_dtype(const std::string& dir, const std::string& stem) {
  const SafetensorsFolder folder(dir, stem);
  std::set<std::string> found;
  // Without what belongs to quantised weights, and what is F32 among weights of any type.
  const auto is_other = [](const std::string& name) {
    for (const char* end :
         {".SCB", "linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"})
      if (name.ends_with(end)) return true;
    return name.find(".weight.") != name.npos;
  };
  for (const std::string& name : folder.names())
    if (!is_other(name)) found.insert(folder.find(name)->stored_dtype(name));
  std::vector<const char*> all;
  for (const FloatType& type : kFloatTypes)
    if (found.contains(type.stored)) all.push_back(type.torch);
  // Neither of the two types of 16 bits holds the other; the first ones of the table hold all.
  if (all.empty() || (found.contains("BF16") && found.contains("F16") && all.size() == 2))
    return "float32";
  return all[0];
}

const char* stored_type(const std::string& name) {
  return type_named(name).stored;
}

DType dtype_holding(const std::string& name) {
  return type_named(name).dtype;
}

void export_model(const Transformer& model, const Tokenizer& tokenizer, const std::string& dir,
                  const std::string& dtype, const std::function<void()>& before_tensor) {
  std::vector<TensorSource> weights = weight_sources(model, type_named(dtype).stored);
  for (TensorSource& weight : weights)
    weight.make = [before_tensor, weight] {
      before_tensor();
      return stored_values(weight.make(), weight.type, weight.name);
    };
  write_sharded(dir, "model", weights);
  Json config = saved_config(model, &tokenizer);
  set_dtype(config, dtype);
  write_file_durable(dir + "/config.json", config.dump(2) + "\n");
  save_precision(model.config().precision, dir);
  for (const auto& [file, content] : tokenizer.files())
    write_file_durable(dir + "/" + file, content);
}

}  // namespace cohort
