// Encoders: the fields and names that BERT, RoBERTa and ViT have in common, and their heads, which
// `architectures` names.
#include <algorithm>
#include <charconv>
#include <set>

#include "nn/families/family.h"

namespace cohort {
namespace {

// The prefixes of architectures' names: BertForMaskedLM.
constexpr std::pair<const char*, const char*> kPrefixes[] = {
    {"bert", "Bert"}, {"roberta", "Roberta"}, {"vit", "ViT"}, {"cohort", "Cohort"}};

std::string architecture(const std::string& model_type, HeadType head, bool images) {
  const auto* const prefix =
      std::ranges::find(kPrefixes, model_type, [](auto& p) { return p.first; });
  const char* const type = head == HeadType::kNextToken     ? "ForCausalLM"
                           : head == HeadType::kMaskedToken ? "ForMaskedLM"
                           : head == HeadType::kPooler      ? "Model"
                           : images                         ? "ForImageClassification"
                                                            : "ForSequenceClassification";
  return str(prefix->second, type);
}

std::vector<std::string> read_labels(ConfigFile& file) {
  file.expect("problem_type", "single_label_classification");
  const Json* const names = file.find("id2label");
  if (names == nullptr) return {"LABEL_0", "LABEL_1"};  // as transformers has it
  if (!names->is_object()) file.refuse("id2label", "expected an object of labels by number");
  const Json::Object& entries = names->as_object();
  if (entries.size() < 2)
    file.refuse("id2label", "models with fewer than two labels (regression) are not supported");
  std::vector<std::string> labels(entries.size());
  std::vector<bool> found(entries.size());
  std::set<std::string> texts;
  for (const auto& [key, label] : entries) {
    if (label.is_number())
      file.refuse("id2label", str("the label ", label.to_text(), " is a number; hint: write it as ",
                                  "a text: \"", label.to_text(), "\""));
    size_t i = entries.size();
    const char* const end = key.data() + key.size();
    if (std::from_chars(key.data(), end, i).ptr != end || i >= entries.size() || found[i] ||
        !label.is_string() || !texts.insert(label.as_string()).second)
      file.refuse("id2label", str("expected other texts under the numbers 0 to ",
                                  entries.size() - 1, ", found '", key, "'"));
    found[i] = true;
    labels[i] = label.as_string();
  }
  return labels;
}

}  // namespace

void read_head(ConfigFile& file, ModelConfig& c) {
  const std::string type = file.text("model_type", "");
  const std::vector<std::string> names = file.texts("architectures");
  std::string known;
  for (const HeadType head :
       {HeadType::kPooler, HeadType::kMaskedToken, HeadType::kClasses, HeadType::kNextToken}) {
    if (c.has_images() && head == HeadType::kMaskedToken) continue;
    if (head == HeadType::kNextToken && type != "cohort") continue;
    const std::string name = architecture(type, head, c.has_images());
    known += (known.empty() ? "" : ", ") + name;
    if (names.empty() ? head != HeadType::kPooler : names[0] != name) continue;
    c.head = head;
    if (head == HeadType::kClasses) c.labels = read_labels(file);
    return;
  }
  file.refuse("architectures", "known: " + known);
}

void write_head(Json& json, const ModelConfig& c) {
  json.set("architectures",
           Json::Array{architecture(json.at("model_type").as_string(), c.head, c.has_images())});
  if (c.head != HeadType::kClasses) return;
  Json::Object ids, names;
  for (size_t i = 0; i < c.labels.size(); ++i) {
    names.emplace_back(std::to_string(i), c.labels[i]);
    ids.emplace_back(c.labels[i], static_cast<int64_t>(i));
  }
  json.set("id2label", names).set("label2id", ids);
}

ModelConfig read_encoder(ConfigFile& file) {
  ModelConfig c;
  c.d_model = file.integer("hidden_size", 768);
  c.num_layers = file.integer("num_hidden_layers", 12);
  c.num_heads = c.num_kv_heads = file.integer("num_attention_heads", 12);
  c.d_ff = file.integer("intermediate_size", 3072);
  c.norm_eps = file.number("layer_norm_eps", 1e-12);
  c.init_std = file.number("initializer_range", c.init_std);
  c.mlp = read_plain_mlp(file, "hidden_act", "gelu");
  c.mask = MaskType::kFull;
  c.norm = NormType::kLayer;
  c.position = PositionType::kLearned;
  c.bias = true;
  file.expect("is_decoder", false);
  file.expect("add_cross_attention", false);
  file.ignore({"attention_probs_dropout_prob", "classifier_dropout"});
  return c;
}

Json write_encoder(const ModelConfig& c, const char* model_type) {
  Json json = Json::Object{{"model_type", model_type}};
  write_head(json, c);
  json.set("hidden_size", c.d_model).set("num_hidden_layers", c.num_layers);
  json.set("num_attention_heads", c.num_heads).set("intermediate_size", c.d_ff);
  json.set("hidden_act", c.mlp == MlpType::kGelu ? "gelu" : "gelu_new");
  json.set("layer_norm_eps", c.norm_eps).set("initializer_range", c.init_std);
  return json.set("hidden_dropout_prob", c.dropout).set("attention_probs_dropout_prob", c.dropout);
}

std::vector<TensorRule> encoder_rules(
    const ModelConfig& c, const char* base,
    std::span<const std::pair<const char*, const char*>> modules) {
  std::vector<TensorRule> rules;
  for (const auto& [stored, ours] : modules)
    for (const char* part : {".weight", ".bias"}) {
      std::string name = stored;
      if (name[0] == '~') name.replace(0, 1, c.head == HeadType::kPooler ? "" : base);
      rules.push_back({name + part, {str(ours, part)}});
    }
  return rules;
}

}  // namespace cohort
