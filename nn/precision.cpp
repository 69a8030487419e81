#include "nn/precision.h"

#include "nn/model_config.h"
#include "sys/files.h"
#include "sys/input_file.h"

namespace cohort {
namespace {

void require_fp8(bool ok, const std::string& message) {
  if (!ok) throw InputError("precision.cache: fp8 " + message);
}

}  // namespace

void check_resumed(const PrecisionConfig& asked, const PrecisionConfig& saved,
                   const std::string& checkpoint) {
  if (asked == saved) return;
  const auto name = [](const PrecisionConfig& precision) {
    return precision.rounds_keys() ? "fp8" : "bf16";
  };
  throw InputError(str("precision.cache: ", name(asked), " was asked for, but ", checkpoint,
                       " was trained with ", name(saved), "; hint: precision.cache=", name(saved),
                       ", or a new run with init_from=", checkpoint));
}

void check_precision(const ModelConfig& config, DType dtype) {
  if (!config.precision.rounds_keys()) return;
  require_fp8(!config.is_encoder(),
              "is for models that generate text, and the model is an encoder");
  require_fp8(config.norm_place == NormPlace::kBefore && !config.family.qk_norm_whole,
              "needs a norm before keys and values, whose bound is known from the weights; hint: "
              "precision.cache=bf16");
  const int64_t dim = config.head_dim;
  require_fp8(dim % 2 == 0, str("needs an even head_dim, got ", dim));
  require_fp8(dtype != DType::kBF16 || dim == 64 || dim == 128 || dim == 256,
              str("supports a head_dim of 64, 128 or 256 in bf16, got ", dim,
                  "; hint: precision.cache=bf16"));
}

DType cache_dtype(const ModelConfig& config, DType dtype) {
  return config.precision.rounds_keys() && dtype == DType::kBF16 ? DType::kE4M3 : dtype;
}

PrecisionConfig load_precision(const std::string& dir) {
  PrecisionConfig out;
  const std::string path = dir + "/" + kPrecisionFile;
  if (path_exists(path)) read_config(out, parse_yaml(read_input_file(path), path));
  return out;
}

bool save_precision(const PrecisionConfig& precision, const std::string& dir) {
  if (precision == PrecisionConfig()) return false;
  write_file_durable(dir + "/" + kPrecisionFile, "{\"cache\": \"fp8\"}\n");
  return true;
}

}  // namespace cohort
