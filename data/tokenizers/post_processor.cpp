// Every known post-processor puts fixed ids before and after the ids of a text.
#include "data/tokenizers/post_processor.h"

#include "data/tokenizers/json_fields.h"

namespace cohort {
namespace {

// A template may name a list of ids again and again.
constexpr size_t kMaxAround = 1000;

int32_t id_of(const Json& json) {
  const int64_t id = json.as_int();
  if (id < 0 || id > INT32_MAX) throw InputError(str("the id ", id, " is out of range"));
  return static_cast<int32_t>(id);
}

AroundText read_template(const Json& json) {
  AroundText around;
  bool seen = false;
  for (const Json& item : json.at("single").as_array()) {
    if (const Json* sequence = item.find("Sequence")) {
      if (seen || sequence->at("id").as_string() != "A")
        throw InputError("'single' must have the sequence A once and no other");
      seen = true;
      continue;
    }
    const std::string& name = item.at("SpecialToken").at("id").as_string();
    std::vector<int32_t>& ids = seen ? around.after : around.before;
    for (const Json& id : json.at("special_tokens").at(name).at("ids").as_array()) {
      ids.push_back(id_of(id));
      if (ids.size() > kMaxAround)
        throw InputError(str("more than ", kMaxAround, " special tokens around a text"));
    }
  }
  if (!seen) throw InputError("'single' must have the sequence A");
  return around;
}

// "cls" and "sep" are pairs of a token and its id.
AroundText read_pairs(const Json& json) {
  const auto id_in = [&](const char* key) {
    const Json::Array& pair = json.at(key).as_array();
    if (pair.size() != 2) throw InputError(str(key, ": expected a token and its id"));
    return id_of(pair[1]);
  };
  return {{id_in("cls")}, {id_in("sep")}};
}

AroundText read_sequence(const Json& json) {
  const Json::Array& list = json.at("processors").as_array();
  check_steps(list.size());
  AroundText all;
  for (const Json& item : list) {
    const AroundText around = read_post_processor(item);
    all.before.insert(all.before.begin(), around.before.begin(), around.before.end());
    all.after.insert(all.after.end(), around.after.begin(), around.after.end());
  }
  return all;
}

struct Entry {
  const char* type;
  AroundText (*read)(const Json& json);
};
constexpr Entry kPostProcessors[] = {
    {"TemplateProcessing", read_template}, {"ByteLevel", [](const Json&) { return AroundText(); }},
    {"RobertaProcessing", read_pairs},     {"BertProcessing", read_pairs},
    {"Sequence", read_sequence},
};

}  // namespace

AroundText read_post_processor(const Json& json) {
  if (json.is_null()) return {};
  return find_component(json, "post_processor", kPostProcessors).read(json);
}

}  // namespace cohort
