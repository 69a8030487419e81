// Typed configuration. A section is a plain struct with one method
//
//   void visit(ConfigVisitor& v) {
//     v.field("learning_rate", learning_rate, "peak learning rate", {.min = 0});
//     v.choice("loss_type", loss_type, kLossTypes, "how token losses are averaged");
//     v.section("model", model, "the transformer");
//   }
//
// which serves parsing, validation, `--help` and the dump. Unknown and duplicate keys, wrong types
// and values out of range throw InputError with file, line and the nearest known key.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "config/node.h"
#include "core/text.h"

namespace cohort {

struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
};

template <class E>
struct EnumName {
  E value;
  const char* name;
};

// The entry of a value in a table of entries with a `value`.
template <class Entry, size_t N>
const Entry& entry_of(const Entry (&table)[N], decltype(Entry::value) value) {
  for (const Entry& entry : table)
    if (entry.value == value) return entry;
  throw Error("[entry_of] expected a value of the table");
}

class ConfigVisitor;
// Declares the keys of a section to a visitor.
using ConfigVisit = std::function<void(ConfigVisitor&)>;

struct ConfigChoice {
  std::vector<std::string> names;
  size_t index = 0;
  const char* removed = nullptr;  // a former name, which the error says was removed
};
// A list of sections.
struct ConfigList {
  size_t size = 0;
  std::function<void(size_t)> assign;  // replaces the list by so many default sections
  std::function<ConfigVisit(size_t)> section;
};
// Texts by names of the user's choice.
using ConfigTexts = std::map<std::string, std::string>;
// The value of a key: a member, a choice, a section or a list of sections. An optional whole number
// may be "auto", which reads as nullopt. A single text is a list of one element.
using ConfigValue =
    std::variant<int64_t*, double*, std::optional<double>*, std::optional<int64_t>*, bool*,
                 std::string*, std::vector<std::string>*, std::vector<int64_t>*,
                 std::vector<double>*, ConfigTexts*, ConfigChoice*, ConfigVisit, ConfigList>;

// A key as visit() declares it.
struct ConfigField {
  const char* key;
  ConfigValue value;
  const char* help;
  Range range = {};
};

// Passes each key of a section to a function, in the order of the declarations.
class ConfigVisitor {
 public:
  explicit ConfigVisitor(std::function<void(const ConfigField&)> on_field)
      : on_field_(std::move(on_field)) {}

  template <class T>
  void field(const char* key, T& value, const char* help, Range range = {}) {
    on_field_({key, &value, help, range});
  }

  // `names`: entries with `value` and `name`, as in EnumName.
  template <class E, class Entry, size_t N>
  void choice(const char* key, E& value, const Entry (&names)[N], const char* help,
              const char* removed = nullptr) {
    ConfigChoice choice{.removed = removed};
    for (size_t i = 0; i < N; ++i) {
      choice.names.emplace_back(names[i].name);
      if (names[i].value == value) choice.index = i;
    }
    on_field_({key, &choice, help});
    value = names[choice.index].value;
  }

  template <class S>
  void section(const char* key, S& value, const char* help) {
    on_field_({key, ConfigVisit([&](ConfigVisitor& v) { value.visit(v); }), help});
  }

  // A list of sections; a list in the file replaces the default list.
  template <class S>
  void list(const char* key, std::vector<S>& values, const char* help) {
    const auto section = [&](size_t i) {
      return [&values, i](ConfigVisitor& v) { values[i].visit(v); };
    };
    const auto assign = [&](size_t n) { values.assign(n, S{}); };
    on_field_({key, ConfigList{values.size(), assign, section}, help});
  }

 private:
  std::function<void(const ConfigField&)> on_field_;
};

// Keys that no section declares.
struct UnknownKeys {
  struct Key {
    std::string path;                   // "stages.1.rewards[0].nam"
    std::string where;                  // "run.yaml:4", "command line"
    std::vector<std::string> siblings;  // keys of its section; empty: the section is unknown too
    std::string value = "";             // its scalar, if it has one
  };
  std::vector<Key> first;  // as many as a message lists
  size_t count = 0;
  std::vector<Key> choices;  // known keys whose value is none of their names, which are `siblings`
};
// Throws InputError with all unknown keys and, for each, what explain(path, value) says or the
// nearest of its siblings and of `all_keys`. `hint` is for keys that have none.
using ExplainKey = std::function<std::string(const std::string& path, const std::string& value)>;
void expect_known(const UnknownKeys& unknown, std::span<const std::string> all_keys,
                  const ExplainKey& explain = {}, const std::string& hint = "");

// The type-erased engines behind the templates below.
void read_config_with(const ConfigVisit& visit, const ConfigNode& root, const std::string& path);
void find_unknown_keys_with(const ConfigVisit& visit, const ConfigNode& root,
                            std::span<const std::string> ignored_keys, const std::string& path,
                            UnknownKeys& out);
// Dotted keys, those of sections too; items of lists without an index ("rewards.name").
std::vector<std::string> config_keys_with(const ConfigVisit& visit);
// `begin`: indentation of the first line, which may begin an item of a list.
std::string dump_config_with(const ConfigVisit& visit, const std::string& indent = "",
                             std::string begin = "");
// Dotted keys as in overrides ("model.d_model", "rewards.0.name"), with values as dump_config()
// writes them.
using ConfigFields = std::vector<std::pair<std::string, std::string>>;
ConfigFields config_fields_with(const ConfigVisit& visit);
// Replaces each list by one default section, which it describes.
std::string config_help_with(const ConfigVisit& visit);

// Adds the keys below `root` that S does not declare. `ignored_keys`: top-level keys that belong to
// another reader. `path`: path of `root` itself ("stages.1"), the prefix of keys in errors.
template <class S>
void find_unknown_keys(const ConfigNode& root, std::span<const std::string> ignored_keys,
                       const std::string& path, UnknownKeys& out) {
  S scratch;
  find_unknown_keys_with([&](ConfigVisitor& v) { scratch.visit(v); }, root, ignored_keys, path,
                         out);
}
template <class S>
std::vector<std::string> config_keys() {
  S scratch;
  return config_keys_with([&](ConfigVisitor& v) { scratch.visit(v); });
}
// Overwrites the keys of `config` that `root` has; throws InputError for unknown ones.
template <class S>
void read_config(S& config, const ConfigNode& root, std::span<const std::string> ignored_keys = {},
                 const std::string& path = "") {
  UnknownKeys unknown;
  find_unknown_keys<S>(root, ignored_keys, path, unknown);
  expect_known(unknown, {});
  read_config_with([&](ConfigVisitor& v) { config.visit(v); }, root, path);
}
// YAML that read_config() turns back into the same values.
template <class S>
std::string dump_config(S config) {
  return dump_config_with([&](ConfigVisitor& v) { config.visit(v); });
}
template <class S>
ConfigFields config_fields(S config) {
  return config_fields_with([&](ConfigVisitor& v) { config.visit(v); });
}
// One line per key: name, type, default, range or choices, help.
template <class S>
std::string config_help(S config = {}) {
  return config_help_with([&](ConfigVisitor& v) { config.visit(v); });
}

}  // namespace cohort
