#include "config/visitor.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <type_traits>

namespace cohort {
namespace {

using Kind = ConfigNode::Kind;

constexpr const char* kAuto = "auto";
// Names of the types of ConfigValue, except sections and their lists.
constexpr const char* kTypeNames[] = {"int",   "float", "float",  "int or auto",  "bool",  "text",
                                      "texts", "ints",  "floats", "map of texts", "choice"};

template <class T>
bool parse_number(const ConfigNode& node, T& value) {
  if (node.kind != Kind::kScalar || node.quoted) return false;
  std::string_view text = node.scalar;
  if (!text.empty() && text[0] == '+') text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

std::string range_text(const Range& range) {
  const auto text = [](double v) {
    const bool whole = v == std::floor(v) && std::abs(v) < 1e15;
    return whole ? std::to_string(static_cast<int64_t>(v)) : format_double(v);
  };
  const bool lo = std::isfinite(range.min), hi = std::isfinite(range.max);
  if (lo && hi) return "from " + text(range.min) + " to " + text(range.max);
  if (lo) return "at least " + text(range.min);
  if (hi) return "at most " + text(range.max);
  return "";
}

// Reads the value of the key `path` from `node`. Throws InputError.
struct Reader {
  const ConfigNode& node;
  std::string path;
  Range range;

  void operator()(int64_t* value) const { read_number(*value, "a whole number"); }
  void operator()(double* value) const { read_number(*value, "a number"); }
  template <class T>
  void operator()(std::optional<T>* value) const {
    constexpr bool kIsDouble = std::is_same_v<T, double>;
    const bool absent = kIsDouble ? node.is_null() : plain_text() == kAuto;
    *value = absent ? std::nullopt : std::optional<T>(0);
    if (*value) read_number(**value, kIsDouble ? "a number" : "a whole number or auto");
  }
  void operator()(bool* value) const {
    std::string text = plain_text();
    for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    *value = text == "true" || text == "yes";
    if (!*value && text != "false" && text != "no") fail("true, false, yes or no", quotes());
  }
  void operator()(std::string* value) const { *value = text_or_fail(node.text(), "text"); }
  void operator()(std::vector<std::string>* values) const {
    constexpr const char* kExpected = "a text or a list of texts";
    values->clear();
    if (node.kind != Kind::kList) {
      const std::string text = text_or_fail(node.text(), kExpected);
      if (!text.empty()) values->push_back(text);
    }
    for (const ConfigNode& item : node.items)
      values->push_back(at(item).text_or_fail(
          item.kind == Kind::kScalar ? std::optional(item.scalar) : item.typed, kExpected));
  }
  template <class T>
  void operator()(std::vector<T>* values) const {
    values->clear();
    expect_list(std::is_same_v<T, double> ? "a list of numbers" : "a list of whole numbers");
    for (const ConfigNode& item : node.items) at(item)(&values->emplace_back());
  }
  void operator()(ConfigTexts* texts) const {
    texts->clear();
    if (node.kind != Kind::kMap && !node.is_null()) fail("a map of texts");
    for (const ConfigNode::Entry& entry : node.entries)
      Reader{entry.value, str(path, ".", entry.key), range}(&(*texts)[entry.key]);
  }
  void operator()(ConfigChoice* choice) const {
    const std::vector<std::string>& names = choice->names;
    const auto it = std::find(names.begin(), names.end(), node.scalar);
    if (node.kind != Kind::kScalar || it == names.end())
      fail("one of " + join(names, ", "),
           choice->removed != nullptr && node.scalar == choice->removed
               ? ", which was removed"
               : did_you_mean(node.scalar, names));
    choice->index = static_cast<size_t>(it - names.begin());
  }
  void operator()(const ConfigVisit& section) const {
    if (node.is_null()) return;
    if (node.kind != Kind::kMap) fail("a map of keys", main_key(section));
    read_config_with(section, node, path);
  }
  void operator()(const ConfigList& list) const {
    expect_list("a list");
    list.assign(node.items.size());
    for (size_t i = 0; i < node.items.size(); ++i) {
      const ConfigNode& item = node.items[i];
      if (item.kind != Kind::kMap) at(item).fail("a list of maps");
      read_config_with(list.section(i), item, str(path, "[", i, "]"));
    }
  }

 private:
  std::string plain_text() const {
    return node.kind == Kind::kScalar && !node.quoted ? node.scalar : "";
  }
  // The key of a section that its value alone most likely means, such as model.path; "": none.
  std::string main_key(const ConfigVisit& section) const {
    for (const std::string& key : config_keys_with(section))
      if (key == "path" || key == "jsonl.path" || key == "name" || key == "rank")
        return str("; hint: the key is ", path, ".", key);
    return "";
  }
  const char* quotes() const { return node.quoted ? " in quotes" : ""; }
  Reader at(const ConfigNode& item) const { return {item, path, range}; }
  [[noreturn]] void fail(const std::string& expected, const std::string& hint = "") const {
    throw InputError(
        str(node.where(), ": ", path, ": expected ", expected, ", got ", node.describe(), hint));
  }
  template <class T>
  void read_number(T& value, const char* expected) const {
    if (!parse_number(node, value) || !std::isfinite(static_cast<double>(value)))
      fail(expected, quotes());
    const double number = static_cast<double>(value);
    if (number < range.min || number > range.max) fail("a number " + range_text(range));
  }
  std::string text_or_fail(const std::optional<std::string>& text, const char* expected) const {
    if (!text) fail(expected);
    return *text;
  }
  void expect_list(const char* expected) const {
    if (node.kind != Kind::kList && !node.is_null()) fail(expected);
  }
};

// Quotes text that YAML would parse as another type.
std::string text_of(const std::string& text) {
  ConfigNode probe{.kind = Kind::kScalar, .scalar = text};
  double number = 0;
  bool plain = !text.empty() && !parse_number(probe, number) && !probe.is_null() &&
               text != "true" && text != "false";
  for (const char c : text)
    plain &=
        std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '/' || c == '.' || c == '-';
  if (plain && text[0] != '-') return text;
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr char kHex[] = "0123456789abcdef";
      out += "\\x";
      out += kHex[static_cast<unsigned char>(c) >> 4];
      out += kHex[c & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string text_of(int64_t value) {
  return std::to_string(value);
}
std::string text_of(double value) {
  return format_double(value);
}
std::string text_of(bool value) {
  return value ? "true" : "false";
}
std::string text_of(const ConfigChoice& choice) {
  return choice.names[choice.index];
}
std::string text_of(const ConfigTexts& texts) {
  std::vector<std::string> items;
  for (const auto& [name, text] : texts) items.push_back(text_of(name) + ": " + text_of(text));
  return str("{", join(items, ", "), "}");
}
template <class T>
std::string text_of(const std::optional<T>& value) {
  return value ? text_of(*value) : std::is_same_v<T, double> ? "none" : kAuto;
}
template <class T>
std::string text_of(const std::vector<T>& values) {
  std::vector<std::string> items;
  for (const T& value : values) items.push_back(text_of(value));
  if (std::is_same_v<T, std::string> && items.size() == 1) return items[0];
  return str("[", join(items, ", "), "]");
}

// True for a key that is neither a section nor a list of sections.
bool is_leaf(const ConfigField& field) {
  return field.value.index() < std::size(kTypeNames);
}

// Value of such a key.
std::string value_text(const ConfigValue& value) {
  const auto text = [](const auto& v) -> std::string {
    if constexpr (std::is_pointer_v<std::decay_t<decltype(v)>>) return text_of(*v);
    return "";
  };
  return std::visit(text, value);
}

std::string begin_of(const std::string& text) {
  size_t end = 100;
  if (text.size() <= end) return text;
  while (end > 0 && continues_utf8(text[end])) --end;
  return text.substr(0, end) + "...";
}

std::string leaf_of(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}
// Empty for a key at top level.
std::string section_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == path.npos ? "" : path.substr(0, dot);
}

// Adds the values below an unknown key, or below a key whose value is no map.
void add_unknown(const ConfigNode& node, const std::string& path,
                 const std::vector<std::string>& siblings, UnknownKeys& out) {
  constexpr size_t kListed = 20, kLongest = 1000;
  if (node.kind == Kind::kMap && !node.entries.empty() && path.size() < kLongest) {
    for (const auto& [key, value] : node.entries) add_unknown(value, str(path, ".", key), {}, out);
  } else if (out.count++ < kListed) {
    out.first.push_back({path, node.where(), siblings, node.scalar});
  }
}

// "; did you mean 'KEY'?": the nearest key of the same section, else of any; "" if there is none.
std::string suggestion(const UnknownKeys::Key& unknown, std::span<const std::string> all_keys) {
  const std::string leaf = leaf_of(unknown.path);
  if (std::string text = did_you_mean(leaf, unknown.siblings); !text.empty()) return text;
  // Keys inside the section come first, since the first of equally near ones is taken.
  const std::string section = leaf_of(section_of(unknown.path)) + ".";
  std::vector<std::string> keys(all_keys.begin(), all_keys.end()), leaves;
  std::stable_partition(keys.begin(), keys.end(),
                        [&](const std::string& key) { return key.starts_with(section); });
  for (const std::string& key : keys) leaves.push_back(leaf_of(key));
  const std::string* found = nearest(leaf, leaves);
  if (found == nullptr || (std::min(leaf.size(), found->size()) < 3 && *found != leaf)) return "";
  const std::string& key = keys[static_cast<size_t>(found - leaves.data())];
  const std::string key_section = section_of(key);
  if (!key_section.empty() && ("." + unknown.path).ends_with("." + key))
    return str("; in a file it is ", key_section, ": {", leaf, ": ...}");
  return str("; did you mean '", key, "'", key_section.empty() ? " at top level?" : "?");
}

enum class Items { kPresent, kOneDefault };

// Calls use(dotted key, field) for each key, before the keys below it: those of the items of a list
// as in overrides ("rewards.0.name"), or of one default item without an index ("rewards.name").
template <class Use>
void walk(const ConfigVisit& visit, Items items, const Use& use, const std::string& prefix = "") {
  ConfigVisitor v([&](const ConfigField& field) {
    const std::string key = prefix + field.key;
    use(key, field);
    if (const auto* section = std::get_if<ConfigVisit>(&field.value))
      walk(*section, items, use, key + ".");
    const auto* list = std::get_if<ConfigList>(&field.value);
    if (list == nullptr) return;
    if (items == Items::kOneDefault) {
      list->assign(1);
      walk(list->section(0), items, use, key + ".");
    } else {
      for (size_t i = 0; i < list->size; ++i)
        walk(list->section(i), items, use, str(key, ".", i, "."));
    }
  });
  visit(v);
}

}  // namespace

void expect_known(const UnknownKeys& unknown, std::span<const std::string> all_keys,
                  const ExplainKey& explain, const std::string& hint) {
  if (unknown.count == 0) return;
  const bool single = unknown.count == 1;
  bool all_explained = true;
  std::string text = single ? "" : str(unknown.count, " unknown keys:");
  for (const UnknownKeys::Key& key : unknown.first) {
    std::string reason = explain ? explain(key.path, key.value) : "";
    if (reason.empty()) reason = suggestion(key, all_keys);
    all_explained = all_explained && !reason.empty();
    text += str(single ? "" : "\n  ", key.where, ": ", single ? "unknown key " : "", "'",
                begin_of(key.path), "'", reason);
  }
  if (unknown.count > unknown.first.size())
    text += str("\n  and ", unknown.count - unknown.first.size(), " more");
  throw InputError(text + (all_explained || hint.empty() ? "" : (single ? "; " : "\n") + hint));
}

void find_unknown_keys_with(const ConfigVisit& visit, const ConfigNode& root,
                            std::span<const std::string> ignored_keys, const std::string& path,
                            UnknownKeys& out) {
  const auto key_of = [&](const std::string& name) {
    return path.empty() ? name : str(path, ".", name);
  };
  std::vector<std::string> known(ignored_keys.begin(), ignored_keys.end());
  std::vector<ConfigField> fields;
  ConfigVisitor v([&](const ConfigField& field) {
    known.emplace_back(field.key);
    fields.push_back(field);
    const auto* choice = std::get_if<ConfigChoice*>(&field.value);
    const ConfigNode* node = choice == nullptr ? nullptr : root.find(field.key);
    if (node != nullptr && node->kind == Kind::kScalar &&
        std::ranges::find((*choice)->names, node->scalar) == (*choice)->names.end())
      out.choices.push_back({key_of(field.key), node->where(), (*choice)->names, node->scalar});
  });
  visit(v);
  for (const auto& [name, node] : root.entries) {
    const std::string key = key_of(name);
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&name = name](const auto& f) { return f.key == name; });
    if (field == fields.end()) {
      if (std::find(known.begin(), known.end(), name) == known.end())
        add_unknown(node, key, known, out);
    } else if (const auto* section = std::get_if<ConfigVisit>(&field->value)) {
      find_unknown_keys_with(*section, node, {}, key, out);
    } else if (const auto* list = std::get_if<ConfigList>(&field->value)) {
      list->assign(1);
      for (size_t i = 0; i < node.items.size(); ++i)
        find_unknown_keys_with(list->section(0), node.items[i], {}, str(key, "[", i, "]"), out);
    } else if (node.kind == Kind::kMap && !node.typed &&
               !std::holds_alternative<ConfigTexts*>(field->value)) {
      add_unknown(node, key, {}, out);
    }
  }
}

std::vector<std::string> config_keys_with(const ConfigVisit& visit) {
  std::vector<std::string> keys;
  walk(visit, Items::kOneDefault, [&](const auto& key, const auto&) { keys.push_back(key); });
  return keys;
}

void read_config_with(const ConfigVisit& visit, const ConfigNode& root, const std::string& path) {
  const std::string prefix = path.empty() ? "" : path + ".";
  ConfigVisitor v([&](const ConfigField& field) {
    if (const ConfigNode* node = root.find(field.key))
      std::visit(Reader{*node, prefix + field.key, field.range}, field.value);
  });
  visit(v);
}

std::string dump_config_with(const ConfigVisit& visit, const std::string& indent,
                             std::string begin) {
  std::string out;
  ConfigVisitor v([&](const ConfigField& field) {
    out += begin + field.key + ":";
    begin = indent;
    if (const auto* section = std::get_if<ConfigVisit>(&field.value)) {
      out += str("\n", dump_config_with(*section, indent + "  ", indent + "  "));
    } else if (const auto* list = std::get_if<ConfigList>(&field.value)) {
      out += list->size == 0 ? " []\n" : "\n";
      for (size_t i = 0; i < list->size; ++i)
        out += dump_config_with(list->section(i), indent + "    ", indent + "  - ");
    } else {
      out += str(" ", value_text(field.value), "\n");
    }
  });
  visit(v);
  return out;
}

ConfigFields config_fields_with(const ConfigVisit& visit) {
  ConfigFields out;
  walk(visit, Items::kPresent, [&](const std::string& key, const ConfigField& field) {
    if (is_leaf(field)) out.emplace_back(key, value_text(field.value));
  });
  return out;
}

std::string config_help_with(const ConfigVisit& visit) {
  std::string out;
  walk(visit, Items::kOneDefault, [&](const std::string& key, const auto& field) {
    const auto depth = static_cast<size_t>(std::count(key.begin(), key.end(), '.'));
    std::string name = std::string(2 * depth, ' ') + field.key;
    if (!is_leaf(field)) {
      const bool is_list = std::holds_alternative<ConfigList>(field.value);
      out += str(name, ":  ", field.help, is_list ? " (a list of)\n" : "\n");
      return;
    }
    const auto* choice = std::get_if<ConfigChoice*>(&field.value);
    const std::string limits = choice ? join((*choice)->names, " | ") : range_text(field.range);
    name.resize(std::max<size_t>(name.size(), 30), ' ');
    out += str(name, ' ', field.help, " (", kTypeNames[field.value.index()],
               limits.empty() ? "" : ", ", limits, "; default ", value_text(field.value), ")\n");
  });
  return out;
}

}  // namespace cohort
