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
#include <optional>
#include <span>
#include <string>
#include <utility>
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

class ConfigVisitor {
 public:
  virtual ~ConfigVisitor() = default;

  virtual void field(const char* key, int64_t& value, const char* help, Range range = {}) = 0;
  virtual void field(const char* key, double& value, const char* help, Range range = {}) = 0;
  virtual void field(const char* key, std::optional<double>& value, const char* help,
                     Range range = {}) = 0;
  // A whole number, or "auto", which reads as nullopt.
  virtual void field(const char* key, std::optional<int64_t>& value, const char* help,
                     Range range = {}) = 0;
  virtual void field(const char* key, bool& value, const char* help) = 0;
  virtual void field(const char* key, std::string& value, const char* help) = 0;
  // A single text is a list of one element.
  virtual void field(const char* key, std::vector<std::string>& value, const char* help) = 0;
  virtual void field(const char* key, std::vector<int64_t>& value, const char* help,
                     Range range = {}) = 0;
  virtual void field(const char* key, std::vector<double>& value, const char* help,
                     Range range = {}) = 0;

  template <class E, size_t N>
  void choice(const char* key, E& value, const EnumName<E> (&names)[N], const char* help) {
    std::vector<std::string> texts;
    int index = 0;
    for (size_t i = 0; i < N; ++i) {
      texts.emplace_back(names[i].name);
      if (names[i].value == value) index = static_cast<int>(i);
    }
    choose(key, index, texts, help);
    value = names[index].value;
  }

  template <class S>
  void section(const char* key, S& value, const char* help) {
    if (!begin_section(key, help)) return;
    value.visit(*this);
    end_section();
  }

  // A list of sections; a list in the file replaces the default list.
  template <class S>
  void list(const char* key, std::vector<S>& values, const char* help) {
    S example;
    const int64_t n = begin_list(key, static_cast<int64_t>(values.size()), help,
                                 [&](ConfigVisitor& v) { example.visit(v); });
    if (n < 0) return;
    if (replaces_lists()) values.assign(static_cast<size_t>(n), S{});
    for (S& value : values) {
      begin_item();
      value.visit(*this);
      end_section();
    }
    end_list();
  }

 protected:
  virtual void choose(const char* key, int& index, const std::vector<std::string>& names,
                      const char* help) = 0;
  virtual bool begin_section(const char* key, const char* help) = 0;  // false: skip it
  virtual void end_section() = 0;
  // Returns the number of items to visit, or -1 to skip the list. `example` visits one default
  // item.
  virtual int64_t begin_list(const char* key, int64_t size, const char* help,
                             const std::function<void(ConfigVisitor&)>& example) = 0;
  virtual void begin_item() = 0;
  virtual void end_list() = 0;
  virtual bool replaces_lists() const { return false; }
};

using ConfigVisit = std::function<void(ConfigVisitor&)>;

// The type-erased engines behind the templates below.
void read_config_with(const ConfigVisit& visit, const ConfigNode& root,
                      std::span<const std::string> ignored_keys, const std::string& path);
std::string dump_config_with(const ConfigVisit& visit);
// Dotted keys as in overrides ("model.d_model", "rewards.0.name"), with values as dump_config()
// writes them.
using ConfigFields = std::vector<std::pair<std::string, std::string>>;
ConfigFields config_fields_with(const ConfigVisit& visit);
std::string config_help_with(const ConfigVisit& visit);

// Overwrites the keys of `config` that `root` has. `ignored_keys`: top-level keys that belong to
// another reader. `path`: path of `root` itself ("stages.1"), the prefix of keys in errors.
template <class S>
void read_config(S& config, const ConfigNode& root, std::span<const std::string> ignored_keys = {},
                 const std::string& path = "") {
  read_config_with([&](ConfigVisitor& v) { config.visit(v); }, root, ignored_keys, path);
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
