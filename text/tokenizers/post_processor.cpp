// Every supported post-processor is a template of fixed ids around a text or a pair of texts.
#include "text/tokenizers/json_fields.h"
#include "text/tokenizers/pipeline.h"

namespace cohort {
namespace {

// A template can repeat a list of ids any number of times.
constexpr size_t kMaxSurrounding = 1000;
constexpr int32_t kA = TextTemplates::kFirst, kB = TextTemplates::kSecond;

int32_t id_of(const Json& json) {
  const int64_t id = json.as_int();
  if (id < 0 || id > INT32_MAX) throw InputError(str("the id ", id, " is out of range"));
  return static_cast<int32_t>(id);
}

EncodedText read_parts(const Json& json, const char* key) {
  EncodedText out;
  const Json& list = json.get_or_null(key);
  if (list.is_null()) return out;
  for (const Json& item : list.as_array()) {
    const Json* sequence = item.find("Sequence");
    const Json& part = sequence != nullptr ? *sequence : item.at("SpecialToken");
    const std::string& name = part.at("id").as_string();
    if (sequence != nullptr)
      out.ids.push_back(name == "A" ? kA : kB);
    else
      for (const Json& id : json.at("special_tokens").at(name).at("ids").as_array())
        out.ids.push_back(id_of(id));
    if (out.ids.size() > kMaxSurrounding)
      throw InputError(str("more than ", kMaxSurrounding, " special tokens around a text"));
    out.types.resize(out.ids.size(), id_of(part.at("type_id")));
  }
  return out;
}

TextTemplates read_template(const Json& json) {
  TextTemplates out{read_parts(json, "single"), read_parts(json, "pair")};
  const auto count = [](const EncodedText& parts, int32_t id) {
    return std::ranges::count(parts.ids, id);
  };
  if (count(out.single, kA) != 1 || count(out.single, kB) != 0)
    throw InputError("'single' must have the sequence A once and no other");
  if (count(out.pair, kA) != 1 || count(out.pair, kB) != 1) out.pair = {};
  return out;
}

// "cls" and "sep" are pairs of a token and its id. RoBERTa has no types.
TextTemplates read_pairs(const Json& json) {
  const auto id_in = [&](const char* key) {
    const Json::Array& pair = json.at(key).as_array();
    if (pair.size() != 2) throw InputError(str(key, ": expected a token and its id"));
    return id_of(pair[1]);
  };
  const int32_t cls = id_in("cls"), sep = id_in("sep");
  const EncodedText single{{cls, kA, sep}, {0, 0, 0}};
  if (json.at("type").as_string() == "BertProcessing")
    return {single, {{cls, kA, sep, kB, sep}, {0, 0, 0, 1, 1}}};
  return {single, {{cls, kA, sep, sep, kB, sep}, {0, 0, 0, 0, 0, 0}}};
}

TextTemplates read_sequence(const Json& json) {
  const Json::Array& list = json.at("processors").as_array();
  check_steps(list.size());
  std::optional<TextTemplates> out;
  for (const Json& item : list) {
    if (item.at("type").as_string() == "ByteLevel") continue;  // adds nothing
    if (out) throw InputError("a sequence may have one step that adds tokens, it has two");
    out = read_post_processor(item);
  }
  return out.value_or(TextTemplates());
}

constexpr Component<TextTemplates(const Json&)> kPostProcessors[] = {
    {"TemplateProcessing", read_template},
    {"ByteLevel", [](const Json&) { return TextTemplates(); }},
    {"RobertaProcessing", read_pairs},
    {"BertProcessing", read_pairs},
    {"Sequence", read_sequence},
};

}  // namespace

TextTemplates read_post_processor(const Json& json) {
  if (json.is_null()) return {};
  return find_component(json, "post_processor", kPostProcessors)(json);
}

}  // namespace cohort
