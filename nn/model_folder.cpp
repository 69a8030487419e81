#include "nn/model_folder.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/log.h"
#include "data/safetensors.h"
#include "nn/families/family.h"
#include "sys/files.h"
#include "sys/input_file.h"

namespace cohort {
namespace {

// A tensor of a file and the parameters that form its rows.
struct StoredTensor {
  std::string name;
  TensorRule::Layout layout = TensorRule::Layout::kSame;
  std::vector<const NamedParameter*> parameters;

  int64_t rows() const {
    int64_t n = 0;
    for (const NamedParameter* p : parameters) n += p->value.shape()[0];
    return n;
  }
  Shape shape() const {
    Shape shape = parameters[0]->value.shape();
    shape[0] = rows();
    if (layout == TensorRule::Layout::kTransposed) std::swap(shape[0], shape[1]);
    return shape;
  }
};

std::string with_layer(std::string pattern, int64_t layer) {
  const size_t star = pattern.find('*');
  return star == pattern.npos ? pattern : pattern.replace(star, 1, std::to_string(layer));
}

// Stored tensors in the order of their first parameters.
std::vector<StoredTensor> stored_tensors(const Transformer& model) {
  const ModelConfig& config = model.config();
  std::map<std::string, const NamedParameter*> by_name;
  for (const NamedParameter& p : model.parameters()) by_name[p.name] = &p;
  std::map<std::string, StoredTensor> by_first_parameter;
  std::set<std::string> covered;
  if (!config.file.is_null())
    for (const TensorRule& rule : find_family(config.file.at("model_type").as_string()).rules)
      for (int64_t layer = 0; layer < config.num_layers; ++layer) {
        StoredTensor stored{with_layer(rule.stored, layer), rule.layout, {}};
        for (const std::string& pattern : rule.parameters) {
          const std::string name = with_layer(pattern, layer);
          stored.parameters.push_back(by_name.at(name));
          covered.insert(name);
        }
        by_first_parameter[stored.parameters[0]->name] = std::move(stored);
      }
  std::vector<StoredTensor> all;
  for (const NamedParameter& p : model.parameters()) {
    const auto merged = by_first_parameter.find(p.name);
    if (merged != by_first_parameter.end())
      all.push_back(merged->second);
    else if (!covered.contains(p.name))
      all.push_back({p.name, TensorRule::Layout::kSame, {&p}});
  }
  return all;
}

// The name without the base model's prefix "model." or "transformer.", as in folders that were
// saved without the head.
std::string base_name(const std::string& name) {
  return name.substr(name.find('.') + 1);
}

// True for tensors that follow from the configuration or from parameters: masks, tables, and the
// head's matrix if it is tied to the embedding table.
bool is_derived(const std::string& name, const ModelConfig& config) {
  for (const char* end : {".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"})
    if (name.ends_with(end)) return true;
  return config.tie_embeddings && name == "lm_head.weight";
}

void load(const StoredTensor& stored, const SafetensorsFile& file, const std::string& name) {
  const bool transposed = stored.layout == TensorRule::Layout::kTransposed;
  const Tensor all = transposed ? file.read(name).transpose(0, 1).contiguous() : Tensor();
  int64_t first = 0;
  for (const NamedParameter* p : stored.parameters) {
    Tensor value = p->value;
    if (transposed)
      value.copy_(all.narrow(0, first, value.dim(0)).contiguous());
    else
      file.read_rows(name, first, value);
    first += value.dim(0);
  }
}

// The stored tensor, on the host unless it is a single unchanged parameter.
Tensor assemble(const StoredTensor& stored) {
  const Tensor first = stored.parameters[0]->value;
  if (stored.parameters.size() == 1 && stored.layout == TensorRule::Layout::kSame) return first;
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

const char* torch_name(DType dtype) {
  if (dtype == DType::kF64) return "float64";
  return dtype == DType::kF32 ? "float32" : "bfloat16";
}

bool loses_bits(const std::string& stored, DType dtype) {
  if (stored == "F64") return dtype != DType::kF64;
  return dtype == DType::kBF16 && stored != "BF16";
}

}  // namespace

bool is_model_folder(const std::string& dir) {
  return SafetensorsFolder::exists(dir, "model") && path_exists(dir + "/config.json");
}

ModelConfig load_config(const std::string& dir) {
  const std::string path = dir + "/config.json";
  try {
    const Json json = parse_json(read_input_file(path), path);
    ModelConfig config = with_places(json, path, [&] { return ModelConfig::from_json(json); });
    config.resolve();
    return config;
  } catch (const InputError& e) {
    const std::string message = e.what();
    throw InputError(message.starts_with(path) ? message : str(path, ": ", message));
  }
}

void load_weights(Transformer& model, const std::string& dir, const std::string& stem) {
  const SafetensorsFolder folder(dir, stem);
  std::set<std::string> used;
  std::string rounded;
  for (const StoredTensor& stored : stored_tensors(model)) {
    const bool full = folder.find(stored.name) != nullptr;
    const std::string name = full ? stored.name : base_name(stored.name);
    const SafetensorsFile* file = folder.find(name);
    if (file == nullptr)
      throw InputError(str(folder.path(), ": there is no tensor '", stored.name,
                           "'; hint: do config.json and the file belong together?"));
    if (file->shape(name) != stored.shape())
      throw InputError(str(folder.path(), ": ", name, ": expected shape ", stored.shape().str(),
                           ", found ", file->shape(name).str()));
    if (!is_float(file->dtype(name)))
      throw InputError(str(folder.path(), ": ", name, ": expected floating point numbers, found ",
                           file->stored_dtype(name)));
    if (loses_bits(file->stored_dtype(name), model.dtype())) rounded = file->stored_dtype(name);
    load(stored, *file, name);
    used.insert(name);
  }
  for (const std::string& name : folder.names())
    if (!used.contains(name) && !is_derived(name, model.config()))
      throw InputError(str(folder.path(), ": the model has no tensor '", name,
                           "'; hint: do config.json and the file belong together?"));
  if (!rounded.empty())
    logging::info("the weights of ", folder.path(), " are ", rounded, " and are rounded to ",
                  dtype_name(model.dtype()));
}

std::vector<std::string> save_weights(const Transformer& model, const std::string& dir,
                                      const std::string& stem) {
  NamedTensors tensors;
  for (const StoredTensor& stored : stored_tensors(model))
    tensors.emplace_back(stored.name, assemble(stored));
  return write_sharded(dir, stem, tensors);
}

Json saved_config(const Transformer& model) {
  Json json = model.config().to_json();
  if (model.config().file.is_null()) return json;
  const char* key = json.find("dtype") != nullptr ? "dtype" : "torch_dtype";
  return json.set(key, torch_name(model.dtype()));
}

}  // namespace cohort
