// The families of models that Hugging Face folders hold. A family is a file of this folder and a
// line of the table in family.cpp: what its config.json means, and how its tensors are named.
#pragma once

#include <initializer_list>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "nn/model_config.h"

namespace cohort {

// A config.json that is being read. It remembers which fields were used: one that nobody knows
// might change the model's maths. A field that is null counts as absent.
class ConfigFile {
 public:
  explicit ConfigFile(const Json& json) : json_(json) {}

  // Throw InputError naming the field if it is missing, or is of another type.
  int64_t integer(const char* field);
  int64_t integer(const char* field, int64_t otherwise);
  double number(const char* field, double otherwise);
  bool flag(const char* field, bool otherwise);
  std::string text(const char* field, const std::string& otherwise);
  std::vector<double> numbers(const char* field);  // empty: absent
  std::vector<std::string> texts(const char* field);
  // Whether it is there, be it null.
  bool has(const char* field) const { return json_.find(field) != nullptr; }
  // nullptr: absent.
  const Json* find(const char* field);

  // Fields that say nothing about the model's maths.
  void ignore(std::initializer_list<const char*> fields) {
    used_.insert(fields.begin(), fields.end());
  }
  // Throws InputError unless the field has this value, or is absent.
  void expect(const char* field, const Json& value);
  [[noreturn]] void refuse(const char* field, const std::string& why) const;
  // Throws InputError naming a field that was not used, is not known to be harmless, and is not
  // null, false or empty.
  void check_all_used() const;

 private:
  const Json& json_;
  std::set<std::string, std::less<>> used_;
};

// A stored tensor whose name or layout differs from Cohort's. '*' is the number of a layer.
struct TensorRule {
  enum class Layout { kSame, kTransposed };
  std::string stored;
  // The parameters whose rows it holds, one after the other.
  std::vector<std::string> parameters;
  Layout layout = Layout::kSame;
};

struct Family {
  const char* model_type;  // in config.json
  ModelConfig (*read)(ConfigFile& file);
  // What differs from Llama's names, which are Cohort's.
  std::vector<TensorRule> rules = {};
};

// Of a config.json's model_type. Throws InputError naming it and the known ones.
const Family& find_family(const std::string& model_type);

ModelConfig read_gemma(ConfigFile& file);
ModelConfig read_gpt2(ConfigFile& file);
ModelConfig read_llama(ConfigFile& file);
ModelConfig read_mistral(ConfigFile& file);
ModelConfig read_olmo2(ConfigFile& file);
ModelConfig read_phi3(ConfigFile& file);
ModelConfig read_qwen2(ConfigFile& file);
ModelConfig read_qwen3(ConfigFile& file);
ModelConfig read_smollm3(ConfigFile& file);
std::vector<TensorRule> gpt2_rules();
std::vector<TensorRule> phi3_rules();

// What most families share: sizes, RMS norms, gated MLP, rotary positions with their scaling.
struct DecoderDefaults {
  double norm_eps = 1e-6, rope_theta = 10000;
  int64_t context = 2048;
  bool tie_embeddings = false;
  const char* activation = "silu";  // of the gate
  int64_t head_dim = 0;             // 0: hidden_size / num_attention_heads
};
ModelConfig read_decoder(ConfigFile& file, const DecoderDefaults& defaults);
// rope_parameters, or rope_theta and rope_scaling: fills rope_theta, rope_frequencies and
// rope_scale, and shortens the context where angles would depend on the length of the text.
void read_rope(ConfigFile& file, ModelConfig& config, double default_theta);
// sliding_window, use_sliding_window, max_window_layers, layer_types; and what the first and the
// third are where the file has no such field (null is no window).
struct WindowDefaults {
  int64_t window = 0, first_layer = 0;
};
void read_window(ConfigFile& file, ModelConfig& config, const WindowDefaults& defaults);
// The same for families whose window is off unless use_sliding_window says otherwise.
void read_optional_window(ConfigFile& file, ModelConfig& config, const WindowDefaults& defaults);

}  // namespace cohort
