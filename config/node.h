// YAML values with their file locations, and command line overrides. Only config/node.cpp
// depends on yaml-cpp.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/check.h"

namespace cohort {

// A parsed YAML value with its location.
struct ConfigNode {
  struct Entry;
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  std::string scalar;
  bool quoted = false;            // a quoted scalar is always text
  std::vector<ConfigNode> items;  // kList
  std::vector<Entry> entries;     // kMap, in file order
  std::string file;
  int line = 0;                      // from 1; 0 for values given on the command line
  std::optional<std::string> typed;  // full text of an override's value

  // Location: "configs/demo.yaml:12" or "command line".
  std::string where() const;
  const ConfigNode* find(const std::string& key) const;
  ConfigNode* find(const std::string& key);
  // True for an empty value, null, none and ~.
  bool is_null() const;
  // Description for messages: "'12'", "a list".
  std::string describe() const;
  // Value as text; nullopt if it is not text.
  std::optional<std::string> text() const;
  // Adds a key or replaces its value.
  void set(const std::string& key, ConfigNode value);
};
struct ConfigNode::Entry {
  std::string key;
  ConfigNode value;
};

// Throw InputError for a file that cannot be read or has more than 1 MiB, bad syntax, a duplicate
// key, anchors and aliases, deep nesting, or a top level that is not a map.
ConfigNode parse_yaml(const std::string& text, const std::string& file_name);
ConfigNode parse_yaml_file(const std::string& path);
// Applies an override "a.b.c=value" from the command line. The type of the key decides how the
// value is read: a text key takes it verbatim, including "a: b #c"; lists and maps are YAML ("[1,
// 2]"). Quotes around the whole value are removed.
void apply_override(ConfigNode& root, const std::string& assignment);

}  // namespace cohort
