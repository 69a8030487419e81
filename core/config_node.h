// YAML values with the places they came from, and overrides of them. core/config_node.cpp is the
// only file that knows yaml-cpp.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/check.h"

namespace cohort {

// A parsed YAML value with the place it came from.
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
  std::optional<std::string> typed;  // of an override's value: all of its text

  // "configs/demo.yaml:12", or "command line".
  std::string where() const;
  const ConfigNode* find(const std::string& key) const;
  ConfigNode* find(const std::string& key);
  // Nothing, null, none or ~.
  bool is_null() const;
  // What it is, for messages: "'12'", "a list".
  std::string describe() const;
  // What a text key reads from it; nothing if that is no text.
  std::optional<std::string> text() const;
  // Adds a key or replaces its value.
  void set(const std::string& key, ConfigNode value);
};
struct ConfigNode::Entry {
  std::string key;
  ConfigNode value;
};

// Throw InputError for a file that cannot be read or has more than 1 MiB, bad syntax, a duplicate
// key, anchors and aliases, deep nesting, or a top level that is no map.
ConfigNode parse_yaml(const std::string& text, const std::string& file_name);
ConfigNode parse_yaml_file(const std::string& path);
// Sets "a.b.c=value" as given on the command line. The key that reads the value decides what it is:
// for a text key it is the text as typed, also "a: b #c"; lists and maps are YAML ("[1, 2]").
// Quotes around the whole value are no part of it.
void apply_override(ConfigNode& root, const std::string& assignment);

}  // namespace cohort
