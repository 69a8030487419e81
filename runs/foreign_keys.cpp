#include "runs/foreign_keys.h"

#include <algorithm>
#include <cctype>
#include <sstream>
#include <string_view>

#include "core/check.h"
#include "data/tasks/tasks.h"

extern const char* const kForeignKeyTable;  // runs/foreign_keys.txt

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

enum class Rows { kOfItsKey, kOfAnyKey };
// The text of the first row of a value that fits: one of this key, or also one of any key.
std::string value_text(const std::string& path, std::string value, Rows rows) {
  for (char& c : value) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const std::string assignment = str(path, "=", value);
  for (const ForeignKey& key : foreign_keys()) {
    const size_t equals = key.theirs.find('=');
    if (equals == key.theirs.npos || (equals == 0 && rows == Rows::kOfItsKey) ||
        !fits(assignment, key.theirs))
      continue;
    if (key.ours.empty()) return "; " + key.remark;
    const size_t comma = std::min(key.remark.find(','), key.remark.size());
    return str("; it is '", key.ours, ": ", key.remark.substr(0, comma), "' here",
               key.remark.substr(comma));
  }
  return "";
}

}  // namespace

const std::vector<ForeignKey>& foreign_keys() {
  static const std::vector<ForeignKey> keys = parse_table();
  return keys;
}

std::string foreign_value_text(const std::string& path, const std::string& value) {
  return value_text(path, value, Rows::kOfAnyKey);
}

std::string foreign_key_text(const std::string& path, const std::string& value) {
  if (std::string text = value_text(path, value, Rows::kOfItsKey); !text.empty()) return text;
  std::string_view rest = path;
  const std::vector<ForeignKey>& keys = foreign_keys();
  const auto find = [&](bool is_section) {
    return std::find_if(keys.begin(), keys.end(), [&](const ForeignKey& key) {
      return (!is_section || key.ours.empty()) && fits(rest, key.theirs);
    });
  };
  auto found = find(false);
  // A section without an equivalent explains its keys: peft_config.r.
  while (found == keys.end() && rest.rfind('.') != rest.npos) {
    rest = rest.substr(0, rest.rfind('.'));
    found = find(true);
  }
  if (found == keys.end()) return "";
  if (found->ours.empty()) return "; " + found->remark;
  return str("; it is '", found->ours, "' here", found->remark.empty() ? "" : ": ", found->remark);
}

}  // namespace cohort
