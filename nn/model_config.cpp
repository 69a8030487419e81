// The model's configuration: keys, derived sizes, conversion to and from config.json.
#include "nn/model_config.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "core/cuda_backend.h"
#include "core/dry_run.h"
#include "core/gpu.h"
#include "core/sizes.h"
#include "core/with_cuda.h"
#include "data/data_check.h"
#include "kernels/attention/attention.h"
#include "kernels/gated_delta/gated_delta.h"
#include "nn/families/family.h"

namespace cohort {
namespace {

// Limit of num_heads * head_dim. With the keys' limits it keeps all parameter and byte counts
// within 64 bits.
constexpr int64_t kMaxWidth = 1 << 22;
// The model_type of Cohort's own models.
constexpr const char* kCohortType = "cohort";

template <class E, size_t N>
const char* name_of(const EnumName<E> (&names)[N], E value) {
  for (const auto& entry : names)
    if (entry.value == value) return entry.name;
  return "";
}

template <class E, size_t N>
E value_of(const EnumName<E> (&names)[N], const Json& json, const char* key,
           const char* removed = nullptr) {
  const std::string& text = json.at(key).as_string();
  std::vector<std::string> known;
  for (const auto& entry : names) {
    if (text == entry.name) return entry.value;
    known.emplace_back(entry.name);
  }
  throw InputError(str(key, ": unknown value '", text, "'",
                       removed != nullptr && text == removed ? ", which was removed" : "",
                       "; expected one of ", join(known, ", ")));
}

ConfigFields optional_fields(ModelConfig c) {
  return config_fields_with([&](ConfigVisitor& v) { c.visit_optional(v); });
}

// Adds the optional keys that are not the defaults; those of a section are an object.
void write_optional(Json& json, const ModelConfig& config) {
  const ConfigFields own = optional_fields(config), defaults = optional_fields({});
  for (size_t i = 0; i < own.size(); ++i) {
    const auto& [key, value] = own[i];
    if (value == defaults[i].second) continue;
    const size_t dot = key.find('.');
    const bool is_name = std::isalpha(static_cast<unsigned char>(value[0])) != 0 &&
                         value != "true" && value != "false";
    const Json number = is_name ? Json(value) : parse_json(value, key);
    if (dot == std::string::npos) {
      json.set(key, number);
      continue;
    }
    const std::string section = key.substr(0, dot);
    const Json* const found = json.find(section);
    Json object = found == nullptr ? Json() : *found;
    json.set(section, object.set(key.substr(dot + 1), number));
  }
}

void read_optional(const Json& json, ModelConfig& config) {
  Json found = Json::Object();
  for (const auto& [key, value] : optional_fields({})) {
    const std::string top = key.substr(0, key.find('.'));
    if (const Json* const set = json.find(top)) found.set(top, *set);
  }
  ConfigNode keys = parse_yaml(found.dump(), "model");
  for (auto& [key, value] : keys.entries) value.line = 0;  // errors name no line
  read_config_with([&](ConfigVisitor& v) { config.visit_optional(v); }, keys, "");
}

// Values from config.json must be within the limits of the configuration's keys.
void check_ranges(const ModelConfig& config) {
  ConfigNode keys = parse_yaml(dump_config(config), "model");
  for (auto& [key, value] : keys.entries) value.line = 0;  // errors name no line
  ModelConfig checked;
  read_config(checked, keys);
  if (config.context < (config.has_images() ? 0 : 1))
    throw InputError(str("model: context: expected a number from 1, got '", config.context, "'"));
  if (config.vocab_size < (config.has_images() ? 0 : 1) || config.vocab_size > INT32_MAX)
    throw InputError(str("vocab_size: expected a number from 1 to ", INT32_MAX, ", got '",
                         config.vocab_size, "'"));
}

}  // namespace

double ExposbConfig::gain(int64_t position, int64_t channel, int64_t head_dim) const {
  const auto dim = static_cast<double>(head_dim);
  const double offset = (static_cast<double>(channel) / dim - channel_center) / channel_width;
  return (1 + position_gain * std::exp(-static_cast<double>(position) / position_decay)) *
         (channel_base + channel_gain * std::exp(-offset * offset / 2));
}

double ModelConfig::max_rotary_gain() const {
  if (position != PositionType::kExposb) return std::max(1.0, family.rope_scale);
  return (1 + exposb.position_gain) * (exposb.channel_base + exposb.channel_gain);
}

ContextLimit ModelConfig::context_limit() const {
  return may_extend() || context < position_rows ? ContextLimit::kMayGrow
                                                 : ContextLimit::kWholeModel;
}

void ModelConfig::require_decoder() const {
  if (is_encoder())
    throw InputError(
        "the model is an encoder, which does not generate text; hint: cohort fill-mask, classify "
        "or embed");
}

void ModelConfig::set_head(HeadType type, std::vector<std::string> names) {
  if (type == HeadType::kClasses && names.size() < 2)
    throw InputError(str("classes: expected at least two labels, got ", names.size()));
  head = type;
  labels = std::move(names);
  // BERT's masked tokens have the embedding table as their matrix.
  if (type == HeadType::kMaskedToken && !file.is_null()) {
    tie_embeddings = true;
    file.set("tie_word_embeddings", true);
  }
  if (!file.is_null()) write_head(file, *this);
}

namespace {

void require(bool ok, const std::string& message) {
  if (!ok) throw InputError("model." + message);
}

// Checks the keys of encoders, and sets the context of images: a class token, then the patches.
void resolve_encoder(ModelConfig& c) {
  require(c.is_encoder() || c.head == HeadType::kNextToken,
          "mask: masked tokens and classes need the mask full, for a token to see those after it");
  require(!c.is_encoder() || c.window == 0, "window: a full mask has none");
  require(!c.is_encoder() || c.position != PositionType::kT5 || c.position_buckets >= 4,
          "position_buckets: expected at least 4 for both sides of a full mask");
  require(c.has_images() == (c.patch_size > 0), "patch_size: goes with image_size");
  if (!c.has_images()) return;
  require(c.is_encoder(), "mask: images need the mask full");
  require(c.image_size % c.patch_size == 0,
          str("patch_size: ", c.patch_size, " does not divide image_size ", c.image_size));
  require(c.channels != 2, "channels: expected 1 or 3");
  require(c.token_types == 0, "token_types: images have none");
  const int64_t length = c.num_patches() + 1;
  require(c.context == 0 || c.context == length,
          str("context: images of this size have ", length, " positions, got ", c.context));
  c.context = length;
}

void check_delta(const ModelConfig& c) {
  if (!c.has_delta()) return;
  const DeltaConfig& d = c.delta;
  require(d.full_every > 1, "delta.full_every: 1 has no delta layers; hint: 0");
  require(d.value_heads % d.key_heads == 0,
          str("delta.value_heads: ", d.value_heads, " is no multiple of key_heads, ", d.key_heads));
  require(d.key_dim == d.value_dim,
          str("delta.value_dim: ", d.value_dim, " is not key_dim, ", d.key_dim,
              "; hint: both are in config.json of a model, and have one value"));
  require(!c.is_encoder(), "mask: delta layers need causal");
}

}  // namespace

void ModelConfig::resolve() {
  resolve_encoder(*this);
  check_delta(*this);
  if (context == 0) context = 256;
  if (num_kv_heads == 0) num_kv_heads = num_heads;
  if (head_dim == 0) {
    require(d_model % num_heads == 0, str("num_heads: ", num_heads, " does not divide d_model ",
                                          d_model, "; hint: give head_dim"));
    head_dim = d_model / num_heads;
  }
  if (d_ff == 0) d_ff = is_gated(mlp) ? round_up(d_model * 8 / 3, 16) : 4 * d_model;
  require(num_heads * head_dim <= kMaxWidth,
          str("head_dim: num_heads times head_dim is ", num_heads * head_dim, ", expected at most ",
              kMaxWidth));
  require(num_heads % num_kv_heads == 0,
          str("num_kv_heads: ", num_kv_heads, " does not divide num_heads ", num_heads));
  require(!is_rotated() || head_dim % 2 == 0,
          str("head_dim: rotary positions need an even number, got ", head_dim));
  require(rotary_fraction == 1 || position == PositionType::kRope,
          "rotary_fraction: goes with position: rope");
  require(rotary_fraction == 1 || (rotary_dim() > 0 && rotary_dim() % 2 == 0),
          str("rotary_fraction: of the ", head_dim, " elements of a head, ", rotary_dim(),
              " would be rotated; expected an even number over 0"));
  require(position != PositionType::kExposb ||
              (family.rope_frequencies.empty() && family.rope_scale == 1),
          "position: exposb has the frequencies of rope_theta, and the model has its own");
  // Vaswani et al. 2017, section 3.4: sines have amplitude 1, embeddings init_std.
  if (position == PositionType::kSinusoidal)
    family.embedding_scale = std::sqrt(static_cast<double>(d_model));
  if (attention_gate && norm == NormType::kRms) family.norm_offset = 1;
  const bool t5 = position == PositionType::kT5;
  require(!t5 || position_buckets % 2 == 0,
          str("position_buckets: expected an even number, got ", position_buckets));
  require(!t5 || position_max_distance > position_buckets / 2,
          str("position_max_distance: expected more than half of position_buckets, ",
              position_buckets / 2, ", got ", position_max_distance));
}

void ModelConfig::check_device(Device device, DType dtype) const {
  if (has_delta() && (precision.is_quantized() || precision.rounds_keys()))
    throw InputError(
        "model.delta: there is no base in fewer bits (precision.base) yet and there are no rounded "
        "keys (precision.cache, precision.attention); hint: leave them out");
  if (device.is_cuda() && has_delta() && !kernels::is_gpu_delta_dim(delta.key_dim))
    throw InputError(str("model.delta.key_dim: expected 64 or 128 on a GPU, got ", delta.key_dim,
                         "; hint: these, or device: cpu"));
  if (device.is_cuda() && head_dim > kernels::kMaxCudaHeadDim)
    throw InputError(str("model.head_dim: expected at most ", kernels::kMaxCudaHeadDim,
                         " on a GPU, got ", head_dim, "; hint: more heads, or device: cpu"));
  if (!device.is_cuda() || !precision.rounds_queries()) return;
  if (dtype != DType::kBF16)
    throw InputError(str("precision.attention: fp8 on a GPU needs dtype: bf16, got ",
                         dtype_name(dtype), "; hint: dtype: bf16, or device: cpu"));
}

void ModelConfig::check_gpu(Device device, DType dtype) const {
  if (device.is_cuda() && device.index < cuda_device_count() && !is_dry_run())
    check_gpu(on_device<[](Device) { return 0; }, cuda::compute_capability>(device, device), dtype);
}

void ModelConfig::check_gpu(int compute_capability, DType dtype) const {
  const int64_t memory = shared_memory_of(compute_capability);
  if (has_delta() && dtype == DType::kF32 && memory < kernels::kDeltaF32SharedMemory)
    throw InputError(str("dtype: f32 with model.delta needs a GPU with ",
                         kernels::kDeltaF32SharedMemory >> 10,
                         " KiB of shared memory per block (such as A100 or H100), got ",
                         memory >> 10, " KiB; hint: dtype: bf16"));
  if (precision.rounds_queries() && compute_capability != 90)
    throw InputError(
        str("precision.attention: fp8 needs a GPU of compute capability 9.0 (H100, "
            "H200), got ",
            compute_capability / 10, ".", compute_capability % 10,
            "; hint: device: cpu, or for a new run precision: {cache: fp8} alone"));
}

Json ModelConfig::to_json() const {
  if (!file.is_null()) return file;
  Json json = family_config(*this);
  if (!json.is_null()) return json;
  json.set("model_type", kCohortType);
  if (is_encoder()) write_head(json, *this);
  json.set("hidden_size", d_model).set("num_hidden_layers", num_layers);
  json.set("num_attention_heads", num_heads).set("num_key_value_heads", num_kv_heads);
  json.set("head_dim", head_dim).set("intermediate_size", d_ff);
  json.set("max_position_embeddings", std::max(context, position_rows));
  json.set("vocab_size", vocab_size);
  json.set("norm_type", name_of(kNormNames, norm)).set("rms_norm_eps", norm_eps);
  json.set("position_type", name_of(kPositionNames, position)).set("rope_theta", rope_theta);
  json.set("hidden_act", name_of(kMlpNames, mlp)).set("attention_bias", bias);
  json.set("tie_word_embeddings", tie_embeddings);
  json.set("qk_norm", qk_norm).set("dropout", dropout).set("initializer_range", init_std);
  write_optional(json, *this);
  return json;
}

namespace {

ModelConfig read_cohort(const Json& json) {
  ModelConfig c;
  c.d_model = json.at("hidden_size").as_int();
  c.num_layers = json.at("num_hidden_layers").as_int();
  c.num_heads = json.at("num_attention_heads").as_int();
  c.num_kv_heads = json.at("num_key_value_heads").as_int();
  c.head_dim = json.at("head_dim").as_int();
  c.d_ff = json.at("intermediate_size").as_int();
  c.context = json.at("max_position_embeddings").as_int();
  c.vocab_size = json.at("vocab_size").as_int();
  c.norm = value_of(kNormNames, json, "norm_type");
  c.norm_eps = json.at("rms_norm_eps").as_double();
  c.position = value_of(kPositionNames, json, "position_type", kRemovedPosition);
  c.rope_theta = json.at("rope_theta").as_double();
  c.mlp = value_of(kMlpNames, json, "hidden_act");
  c.bias = json.at("attention_bias").as_bool();
  c.tie_embeddings = json.at("tie_word_embeddings").as_bool();
  c.qk_norm = json.at("qk_norm").as_bool();
  c.dropout = json.at("dropout").as_double();
  c.init_std = json.at("initializer_range").as_double();
  read_optional(json, c);
  if (c.is_encoder()) {
    ConfigFile fields(json);
    read_head(fields, c);
  }
  return c;
}

}  // namespace

ModelConfig ModelConfig::from_json(const Json& json) {
  const std::string& model_type = json.at("model_type").as_string();
  ModelConfig c = model_type == kCohortType ? read_cohort(json) : read_family(json);
  check_ranges(c);
  return c;
}

}  // namespace cohort
