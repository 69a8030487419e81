// Model families in Hugging Face's format. A family is a file of this folder and its constant in
// the table of family.cpp: the meaning of its config.json and the names of its tensors. Models made
// here are saved as the family that computes the same, if there is one.
#pragma once

#include <functional>
#include <initializer_list>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "nn/model_config.h"
#include "text/tokenizers/json_fields.h"

namespace cohort {

// True for null, false, and empty text, lists and objects.
bool is_blank(const Json& value);
// The format that a config.json states in quantization_config: kNf4 (with double quantisation or
// without) or kInt8 of bitsandbytes; kModel without one. Throws InputError naming the method for
// others.
kernels::WeightFormat stored_format(const Json& config);
// The fields of a config.json that may change what the model computes, without blank ones.
Json model_fields(const Json& config);

// Reader of a config.json. It records the fields that were used, because an unknown field might
// change the model's maths. A null field counts as absent.
class ConfigFile {
 public:
  explicit ConfigFile(const Json& json) : json_(json) {}

  // These throw InputError naming the field if it is missing or of another type.
  int64_t integer(const char* field);
  int64_t integer(const char* field, int64_t otherwise) {
    return value_of(field, otherwise, &Json::as_int);
  }
  double number(const char* field, double otherwise) {
    return value_of(field, otherwise, &Json::as_double);
  }
  bool flag(const char* field, bool otherwise) {
    return value_of(field, otherwise, &Json::as_bool);
  }
  std::string text(const char* field, const std::string& otherwise) {
    return value_of(field, otherwise, &Json::as_string);
  }
  // Empty if the field is absent.
  std::vector<double> numbers(const char* field) {
    return list_of<double>(field, &Json::as_double);
  }
  std::vector<std::string> texts(const char* field) {
    return list_of<std::string>(field, &Json::as_string);
  }
  // True if the field is present, even if it is null.
  bool has(const char* field) const { return json_.find(field) != nullptr; }
  // Returns nullptr if the field is absent.
  const Json* find(const char* field);

  // Marks fields that do not affect the model's maths.
  void ignore(std::initializer_list<const char*> fields) {
    used_.insert(fields.begin(), fields.end());
  }
  // Throws InputError unless the field has this value or is absent.
  void expect(const char* field, const Json& value);
  [[noreturn]] void refuse(const char* field, const std::string& why) const;
  // Throws InputError naming a field that was not used, is not known to be harmless, and is not
  // null, false or empty.
  void check_all_used() const;

 private:
  template <class T, class Get>
  T value_of(const char* field, const T& otherwise, Get get) {
    const Json* value = find(field);
    return value == nullptr ? otherwise
                            : with_path(field, [&] { return T(std::invoke(get, value)); });
  }
  template <class T, class Get>
  std::vector<T> list_of(const char* field, Get get) {
    const Json* value = find(field);
    std::vector<T> all;
    if (value != nullptr)
      with_path(field, [&] {
        for (const Json& item : value->as_array()) all.push_back(std::invoke(get, item));
      });
    return all;
  }

  const Json& json_;
  std::set<std::string, std::less<>> used_;
};

// A stored tensor whose name or layout differs from Cohort's. '*' stands for the layer's number.
struct TensorRule {
  enum class Layout { kSame, kTransposed };
  std::string stored;
  // Parameters whose rows it holds, in order. The rule is for models that have the first one.
  std::vector<std::string> parameters;
  Layout layout = Layout::kSame;
  Shape stored_shape = {};  // if it has more dimensions
};

struct Family {
  const char* model_type;  // in config.json
  ModelConfig (*read)(ConfigFile& file);
  // Differences from Llama's names, which are also Cohort's; nullptr: none.
  std::vector<TensorRule> (*rules)(const ModelConfig& config) = nullptr;
  // The config.json that comes closest to a resolved configuration; null if none is close. nullptr:
  // models made here are never saved as this family.
  Json (*write)(const ModelConfig& config) = nullptr;
  // Beginnings of the names of tensors that the text model does not use.
  std::vector<std::string> unused = {};
};

// The model_type of each family.
std::vector<std::string> family_types();
// Meaning of a family's config.json, kept in `file`. Throws InputError naming a field that is
// missing or not supported, or the model_type and the known ones.
ModelConfig read_family(const Json& json);
// config.json of the family that computes the same as a resolved configuration without `file`;
// null if no family does.
Json family_config(const ModelConfig& config);
// Rules of the family that the model is saved as; empty if it is saved as none.
std::vector<TensorRule> tensor_rules(const ModelConfig& config);

// Family::unused of the family whose config.json the model has.
std::vector<std::string> unused_tensors(const ModelConfig& config);

// The head and the labels of an encoder's config.json, by its architecture and id2label. Throws
// InputError naming an architecture that is not supported, and the known ones.
void read_head(ConfigFile& file, ModelConfig& config);
// Sets them in a config.json with a model_type.
void write_head(Json& json, const ModelConfig& config);

extern const Family kBert, kGemma, kGpt2, kLlama, kMistral, kOlmo2, kPhi3, kQwen2, kQwen3, kQwen3_5,
    kRoberta, kSmolLm3, kVit;

// Common to most families: sizes, RMS norms, gated MLP, rotary positions with their scaling.
struct DecoderDefaults {
  double norm_eps = 1e-6, rope_theta = 10000;
  int64_t context = 2048;
  bool tie_embeddings = false;
  const char* activation = "silu";  // gate activation
  int64_t head_dim = 0;             // 0: hidden_size / num_attention_heads
  double rotary_fraction = 1;       // partial_rotary_factor; 1: the family has no other
};
ModelConfig read_decoder(ConfigFile& file, const DecoderDefaults& defaults);
// The fields that read_decoder() reads, with biases in attention, for models with rotary positions.
Json write_decoder(const ModelConfig& config, const char* model_type, const char* architecture);
// The start of a config.json, without a bos token: if the field were absent, transformers would
// take the one of the family's first model.
Json start_config(const char* model_type, const char* architecture, const ModelConfig& config);
// The activation of MLPs without a gate, gelu or gelu_new.
MlpType read_plain_mlp(ConfigFile& file, const char* field, const char* otherwise);
// The fields that encoders have in common.
ModelConfig read_encoder(ConfigFile& file);
Json write_encoder(const ModelConfig& config, const char* model_type);
// Rules for weights and biases of modules: names in files, and Cohort's. '~' stands for `base`, the
// prefix of the model without its head ("bert."), which files of models with a pooler do not have.
std::vector<TensorRule> encoder_rules(const ModelConfig& config, const char* base,
                                      std::span<const std::pair<const char*, const char*>> modules);
// The config.json of the text model in one of model_type qwen3_5, which has an image encoder too.
// Throws InputError naming a field that is missing or not known.
Json qwen3_5_text(const Json& whole);
// Reads rope_parameters, or rope_theta and rope_scaling, into rope_theta, rope_frequencies,
// rope_scale and, if it is not 1 before, rotary_fraction; limits the context if angles would depend
// on the length of the text.
void read_rope(ConfigFile& file, ModelConfig& config, double default_theta);
// Reads sliding_window, use_sliding_window, max_window_layers and layer_types. The defaults of the
// first and the third apply to absent fields; a null field means no window.
struct WindowDefaults {
  int64_t window = 0, first_layer = 0;
};
void read_window(ConfigFile& file, ModelConfig& config, const WindowDefaults& defaults);
// Variant for families whose layers all have the window: transformers reads sliding_window alone,
// and fields that say otherwise are refused.
void read_common_window(ConfigFile& file, ModelConfig& config, int64_t otherwise);
// Variant of read_window() for families whose use_sliding_window defaults to false. Layers with a
// window are refused then: SmolLM3 of transformers has it nonetheless.
void read_optional_window(ConfigFile& file, ModelConfig& config, const WindowDefaults& defaults);

}  // namespace cohort
