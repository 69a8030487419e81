#include "job/foreign_keys.h"

#include <cctype>
#include <span>
#include <sstream>
#include <string_view>

#include "core/check.h"
#include "data/tasks/tasks.h"
#include "rl/reward.h"

extern const char* const kForeignKeyTable;  // job/foreign_keys.txt

namespace cohort {
namespace {

std::vector<ForeignKey> parse_table() {
  std::vector<ForeignKey> keys;
  std::istringstream table(kForeignKeyTable);
  for (std::string line; std::getline(table, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream cells(line);
    std::string names, ours, remark;
    for (std::string* cell : {&names, &ours, &remark}) std::getline(cells, *cell, '|');
    std::istringstream each(names);
    for (std::string name; each >> name;)
      keys.push_back({name, std::string(trimmed(ours)), std::string(trimmed(remark))});
  }
  return keys;
}

// True if the dotted path is `name` or ends in it; for "vllm_": if its last key begins with it.
bool fits(std::string_view path, std::string_view name) {
  if (name.starts_with('=')) return path.ends_with(name);
  if (name.ends_with('_')) return path.substr(path.rfind('.') + 1).starts_with(name);
  return path.ends_with(name) &&
         (path.size() == name.size() || path[path.size() - name.size() - 1] == '.');
}

bool has_value(const ForeignKey& key) {
  return key.theirs.find('=') != key.theirs.npos;
}

// "loss_type=cispo", in lower case.
std::string assignment(std::string text, const std::string& value) {
  text += "=" + value;
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// The text of the first row that fits and is wanted; "" if there is none.
template <class Wanted>
std::string row_text(std::string_view text, const Wanted& wanted) {
  for (const ForeignKey& key : foreign_keys()) {
    if (!wanted(key) || !fits(text, key.theirs)) continue;
    if (key.ours.empty()) return "; " + key.remark;
    return str("; it is '", key.ours, "' here", key.remark.empty() ? "" : ": ", key.remark);
  }
  return "";
}

}  // namespace

const std::vector<ForeignKey>& foreign_keys() {
  static const std::vector<ForeignKey> keys = parse_table();
  return keys;
}

std::string foreign_value_text(const std::string& path, const std::string& value) {
  return row_text(assignment(path, value), has_value);
}

std::string foreign_key_text(const std::string& path, const std::string& value) {
  std::string text = row_text(assignment(path, value), [](const ForeignKey& key) {
    return has_value(key) && !key.theirs.starts_with('=');
  });
  if (text.empty()) text = row_text(path, [](const ForeignKey&) { return true; });
  // A section without an equivalent explains its keys: peft_config.r.
  std::string_view rest = path;
  while (text.empty() && rest.rfind('.') != rest.npos) {
    rest = rest.substr(0, rest.rfind('.'));
    text = row_text(rest, [](const ForeignKey& key) { return key.ours.empty(); });
  }
  return text;
}

void refuse_reward_texts(const ConfigNode& root) {
  using Kind = ConfigNode::Kind;
  if (const ConfigNode* stages = root.find("stages"))
    for (const ConfigNode& stage : stages->items) refuse_reward_texts(stage);
  const ConfigNode* rewards = root.find("rewards");
  if (rewards == nullptr || rewards->is_null()) return;
  const std::span items =
      rewards->kind == Kind::kList ? std::span(rewards->items) : std::span(rewards, 1);
  for (const ConfigNode& item : items)
    if (const std::string& name = item.scalar; item.kind == Kind::kScalar)
      throw InputError(
          str(item.where(), ": rewards: expected a list of maps, got ", item.describe(),
              "; hint: rewards: [",
              name.ends_with(".py") ? function_reward(name) : str("{name: ", name, "}"), "]"));
}

}  // namespace cohort
