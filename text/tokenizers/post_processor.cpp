// Every supported post-processor is a template of fixed ids around a text or a pair of texts.
#include <algorithm>

#include "text/tokenizers/json_fields.h"
#include "text/tokenizers/pipeline.h"

namespace cohort {
namespace {

// A template can repeat a list of ids any number of times.
constexpr size_t kMaxSurrounding = 1000;

int32_t id_of(const Json& json) {
  const int64_t id = json.as_int();
  if (id < 0 || id > INT32_MAX) throw InputError(str("the id ", id, " is out of range"));
  return static_cast<int32_t>(id);
}

// Each text occurs at most once.
std::vector<TemplatePart> read_parts(const Json& json, const char* key) {
  std::vector<TemplatePart> out;
  const Json& list = json.get_or_null(key);
  if (list.is_null()) return out;
  for (const Json& item : list.as_array()) {
    const Json* sequence = item.find("Sequence");
    const Json& part = sequence != nullptr ? *sequence : item.at("SpecialToken");
    const std::string& name = part.at("id").as_string();
    const Json& type = part.get_or_null("type_id");
    const auto add = [&](int32_t id) {
      out.push_back({id, type.is_null() ? 0 : id_of(type)});
      if (out.size() > kMaxSurrounding)
        throw InputError(str("more than ", kMaxSurrounding, " special tokens around a text"));
    };
    if (sequence == nullptr) {
      for (const Json& id : json.at("special_tokens").at(name).at("ids").as_array()) add(id_of(id));
      continue;
    }
    const int32_t text = name == "A" ? TemplatePart::kFirst : TemplatePart::kSecond;
    if ((name != "A" && name != "B") || std::ranges::count(out, text, &TemplatePart::id) > 0)
      throw InputError(
          str("'", key, "' must have the sequences A and B at most once and no other"));
    add(text);
  }
  return out;
}

TextTemplates read_template(const Json& json) {
  TextTemplates out{read_parts(json, "single"), read_parts(json, "pair")};
  const auto is_text = [](const TemplatePart& part) { return part.id < 0; };
  if (std::ranges::count_if(out.single, is_text) != 1 ||
      std::ranges::find_if(out.single, is_text)->id != TemplatePart::kFirst)
    throw InputError("'single' must have the sequence A once and no other");
  return out;
}

// "cls" and "sep" are pairs of a token and its id.
int32_t id_in(const Json& json, const char* key) {
  const Json::Array& pair = json.at(key).as_array();
  if (pair.size() != 2) throw InputError(str(key, ": expected a token and its id"));
  return id_of(pair[1]);
}

TextTemplates read_bert(const Json& json) {
  const int32_t cls = id_in(json, "cls"), sep = id_in(json, "sep");
  const std::vector<TemplatePart> single{{cls}, {TemplatePart::kFirst}, {sep}};
  return {single, {{cls}, {TemplatePart::kFirst}, {sep}, {TemplatePart::kSecond, 1}, {sep, 1}}};
}

// RoBERTa has no types.
TextTemplates read_roberta(const Json& json) {
  const int32_t cls = id_in(json, "cls"), sep = id_in(json, "sep");
  const std::vector<TemplatePart> single{{cls}, {TemplatePart::kFirst}, {sep}};
  return {single, {{cls}, {TemplatePart::kFirst}, {sep}, {sep}, {TemplatePart::kSecond}, {sep}}};
}

TextTemplates read_sequence(const Json& json) {
  const Json::Array& list = json.at("processors").as_array();
  check_steps(list.size());
  TextTemplates all;
  for (const Json& item : list) {
    TextTemplates outer = read_post_processor(item);
    if (outer.pair != TextTemplates().pair)  // two templates of a pair have no common meaning
      all.pair = all.pair == TextTemplates().pair ? outer.pair : std::vector<TemplatePart>();
    if (outer.single == TextTemplates().single) continue;
    if (all.single != TextTemplates().single) {
      auto text = std::ranges::find(outer.single, TemplatePart::kFirst, &TemplatePart::id);
      text = outer.single.erase(text);
      outer.single.insert(text, all.single.begin(), all.single.end());
    }
    all.single = std::move(outer.single);
  }
  return all;
}

constexpr Component<TextTemplates(const Json&)> kPostProcessors[] = {
    {"TemplateProcessing", read_template},
    {"ByteLevel", [](const Json&) { return TextTemplates(); }},
    {"RobertaProcessing", read_roberta},
    {"BertProcessing", read_bert},
    {"Sequence", read_sequence},
};

}  // namespace

TextTemplates read_post_processor(const Json& json) {
  if (json.is_null()) return {};
  return find_component(json, "post_processor", kPostProcessors)(json);
}

}  // namespace cohort
