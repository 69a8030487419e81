#include "nn/precision.h"

#include <filesystem>

#include "nn/model_config.h"
#include "sys/files.h"
#include "sys/input_file.h"

namespace cohort {

namespace fs = std::filesystem;

std::string precision_change(const PrecisionConfig& asked, const PrecisionConfig& saved,
                             const std::string& source) {
  const auto line = [&](const char* key, bool asks_fp8, const char* other) {
    return str("precision.", key, ": the run has ", asks_fp8 ? "fp8" : "bf16",
               ", but the model of ", source, " was trained ", asks_fp8 ? other : "with fp8");
  };
  if (asked.rounds_keys() != saved.rounds_keys())
    return line("cache", asked.rounds_keys(), "without rounded keys");
  if (asked.rounds_queries() != saved.rounds_queries())
    return line("attention", asked.rounds_queries(), "with attention in bf16");
  if (asked.base != saved.base)
    return str("precision.base: the run has ", entry_of(kBaseNames, asked.base).name,
               ", but the model of ", source, " was trained on a base in ",
               entry_of(kBaseNames, saved.base).name);
  return "";
}

void check_precision(const ModelConfig& config, DType dtype, const std::string& file) {
  if (config.precision.is_quantized() && config.is_encoder())
    throw InputError(str(file.empty() ? "precision." : file + ": ",
                         "base: ", entry_of(kBaseNames, config.precision.base).name,
                         " is for models that generate text, and the model is an encoder; hint: "
                         "leave it out"));
  using kernels::WeightFormat;
  const WeightFormat base = config.precision.base, found = config.stored_format;
  if (base != WeightFormat::kModel && found != WeightFormat::kModel &&
      (base == WeightFormat::kInt8) != (found == WeightFormat::kInt8))
    throw InputError(
        str(file.empty() ? "precision." : file + ": ", "base: ", entry_of(kBaseNames, base).name,
            " would round weights again that the model has in ", entry_of(kBaseNames, found).name,
            "; hint: ", entry_of(kBaseNames, found).name, ", or bf16"));
  if (!config.precision.rounds_keys()) return;
  const auto require = [&](bool ok, const std::string& message) {
    if (ok) return;
    const char* const key = config.precision.rounds_queries() ? "attention" : "cache";
    throw InputError(file.empty() ? str("precision.", key, ": fp8 ", message,
                                        "; hint: remove the key precision.", key)
                                  : str(file, ": ", key, ": fp8 ", message,
                                        "; hint: remove the file to compute in the model's dtype "
                                        "(of a checkpoint: in its export)"));
  };
  require(!config.is_encoder(), "is for models that generate text, and the model is an encoder");
  require(config.norm_place == NormPlace::kBefore && !config.family.qk_norm_whole,
          "needs a norm before keys and values, whose bound is known from the weights");
  require(!config.attention_gate && config.rotary_fraction == 1,
          "does not support gates of attention (model.attention_gate) or rotations of a part of a "
          "head (model.rotary_fraction)");
  const int64_t dim = config.head_dim;
  require(dim % 2 == 0, str("needs an even head_dim, got ", dim));
  require(dtype != DType::kBF16 || dim == 64 || dim == 128 || dim == 256,
          str("supports a head_dim of 64, 128 or 256 in bf16, got ", dim));
  require(!config.precision.rounds_queries() || config.dropout == 0,
          str("needs dropout: 0, got ", config.dropout));
}

DType cache_dtype(const ModelConfig& config, DType dtype) {
  return config.precision.rounds_keys() && dtype == DType::kBF16 ? DType::kE4M3 : dtype;
}

PrecisionConfig load_precision(const std::string& dir) {
  PrecisionConfig out;
  const std::string path = dir + "/" + kPrecisionFile;
  std::error_code error;  // a link to nothing is an entry too
  if (fs::symlink_status(path, error).type() == fs::file_type::not_found) return out;
  const ConfigNode file = parse_yaml(read_input_file(path), path);
  const auto has = [&](const char* key) {
    const ConfigNode* node = file.find(key);
    return node != nullptr && !node->is_null();
  };
  if (!has("cache") && !has("base"))
    throw InputError(path + ": expected {\"cache\": \"fp8\"} or {\"base\": \"nf4\"}");
  read_config(out, file);
  return out;
}

bool save_precision(const PrecisionConfig& precision, const std::string& dir) {
  std::string fields;
  const auto add = [&](const char* key, const char* value) {
    fields += str(fields.empty() ? "" : ", ", "\"", key, "\": \"", value, "\"");
  };
  if (precision.rounds_keys()) add("cache", "fp8");
  if (precision.rounds_queries()) add("attention", "fp8");
  if (precision.is_quantized()) add("base", entry_of(kBaseNames, precision.base).name);
  if (fields.empty()) return false;
  write_file_durable(dir + "/" + kPrecisionFile, str("{", fields, "}\n"));
  return true;
}

}  // namespace cohort
