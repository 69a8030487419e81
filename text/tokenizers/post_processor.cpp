// Every supported post-processor adds fixed ids before and after the ids of a text.
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

SurroundingTokens read_template(const Json& json) {
  SurroundingTokens out;
  bool seen = false;
  for (const Json& item : json.at("single").as_array()) {
    if (const Json* sequence = item.find("Sequence")) {
      if (seen || sequence->at("id").as_string() != "A")
        throw InputError("'single' must have the sequence A once and no other");
      seen = true;
      continue;
    }
    const std::string& name = item.at("SpecialToken").at("id").as_string();
    std::vector<int32_t>& ids = seen ? out.after : out.before;
    for (const Json& id : json.at("special_tokens").at(name).at("ids").as_array()) {
      ids.push_back(id_of(id));
      if (ids.size() > kMaxSurrounding)
        throw InputError(str("more than ", kMaxSurrounding, " special tokens around a text"));
    }
  }
  if (!seen) throw InputError("'single' must have the sequence A");
  return out;
}

// "cls" and "sep" are pairs of a token and its id.
SurroundingTokens read_pairs(const Json& json) {
  const auto id_in = [&](const char* key) {
    const Json::Array& pair = json.at(key).as_array();
    if (pair.size() != 2) throw InputError(str(key, ": expected a token and its id"));
    return id_of(pair[1]);
  };
  return {{id_in("cls")}, {id_in("sep")}};
}

SurroundingTokens read_sequence(const Json& json) {
  const Json::Array& list = json.at("processors").as_array();
  check_steps(list.size());
  SurroundingTokens all;
  for (const Json& item : list) {
    const SurroundingTokens outer = read_post_processor(item);
    all.before.insert(all.before.begin(), outer.before.begin(), outer.before.end());
    all.after.insert(all.after.end(), outer.after.begin(), outer.after.end());
  }
  return all;
}

constexpr Component<SurroundingTokens(const Json&)> kPostProcessors[] = {
    {"TemplateProcessing", read_template},
    {"ByteLevel", [](const Json&) { return SurroundingTokens(); }},
    {"RobertaProcessing", read_pairs},
    {"BertProcessing", read_pairs},
    {"Sequence", read_sequence},
};

}  // namespace

SurroundingTokens read_post_processor(const Json& json) {
  if (json.is_null()) return {};
  return find_component(json, "post_processor", kPostProcessors)(json);
}

}  // namespace cohort
