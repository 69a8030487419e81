#include "config/visitor.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

namespace cohort {
namespace {

using Kind = ConfigNode::Kind;

constexpr const char* kAuto = "auto";

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

std::string join(const std::vector<std::string>& words, const char* separator) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : separator) + word;
  return text;
}

class Reader final : public ConfigVisitor {
 public:
  Reader(const ConfigNode& root, std::span<const std::string> ignored, const std::string& path) {
    levels_.push_back({&root, {}, {ignored.begin(), ignored.end()}, 0, path});
  }
  void finish() { check_unknown(levels_.back()); }

  void field(const char* key, int64_t& value, const char*, Range range) override {
    if (const ConfigNode* node = take(key)) value = integer(key, *node, range);
  }
  void field(const char* key, double& value, const char*, Range range) override {
    if (const ConfigNode* node = take(key)) value = number(key, *node, range);
  }
  void field(const char* key, std::optional<double>& value, const char*, Range range) override {
    const ConfigNode* node = take(key);
    if (node == nullptr) return;
    if (node->is_null())
      value.reset();
    else
      value = number(key, *node, range);
  }
  void field(const char* key, std::optional<int64_t>& value, const char*, Range range) override {
    const ConfigNode* node = take(key);
    if (node == nullptr) return;
    if (node->kind == Kind::kScalar && !node->quoted && node->scalar == kAuto)
      value.reset();
    else
      value = integer(key, *node, range, "a whole number or auto");
  }
  void field(const char* key, bool& value, const char*) override {
    const ConfigNode* node = take(key);
    if (node == nullptr) return;
    std::string text = node->kind == Kind::kScalar && !node->quoted ? node->scalar : "";
    for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    const bool yes = text == "true" || text == "yes";
    if (!yes && text != "false" && text != "no") fail(key, *node, "true, false, yes or no");
    value = yes;
  }
  void field(const char* key, std::string& value, const char*) override {
    const ConfigNode* node = take(key);
    if (node == nullptr) return;
    const std::optional<std::string> text = node->text();
    if (!text) fail(key, *node, "text");
    value = *text;
  }
  void field(const char* key, std::vector<std::string>& value, const char*) override {
    const ConfigNode* node = take(key);
    constexpr const char* kExpected = "a text or a list of texts";
    const auto single = node == nullptr || node->kind == Kind::kList ? std::nullopt : node->text();
    if (single) value.assign(single->empty() ? 0 : 1, *single);
    if (single) return;
    read_list(key, node, value, kExpected, [&](const ConfigNode& item) {
      if (item.kind != Kind::kScalar && !item.typed) fail(key, item, kExpected);
      return item.kind == Kind::kScalar ? item.scalar : *item.typed;
    });
  }
  void field(const char* key, std::vector<int64_t>& value, const char*, Range range) override {
    read_list(key, take(key), value, "a list of whole numbers",
              [&](const ConfigNode& item) { return integer(key, item, range); });
  }
  void field(const char* key, std::vector<double>& value, const char*, Range range) override {
    read_list(key, take(key), value, "a list of numbers",
              [&](const ConfigNode& item) { return number(key, item, range); });
  }

 protected:
  void choose(const char* key, int& index, const std::vector<std::string>& names,
              const char*) override {
    const ConfigNode* node = take(key);
    if (node == nullptr) return;
    const auto it = std::find(names.begin(), names.end(), node->scalar);
    if (node->kind != Kind::kScalar || it == names.end()) {
      const std::string near = nearest_name(node->scalar, names);
      fail(key, *node, "one of " + join(names, ", "),
           near.empty() ? "" : "; did you mean '" + near + "'?");
    }
    index = static_cast<int>(it - names.begin());
  }
  bool begin_section(const char* key, const char*) override {
    const ConfigNode* node = take(key);
    if (node == nullptr || node->is_null()) return false;
    if (node->kind != Kind::kMap) fail(key, *node, "a map of keys");
    levels_.push_back({node, {}, {}, 0, path(key)});
    return true;
  }
  void end_section() override {
    check_unknown(levels_.back());
    levels_.pop_back();
  }
  int64_t begin_list(const char* key, int64_t, const char*,
                     const std::function<void(ConfigVisitor&)>&) override {
    const ConfigNode* node = take(key);
    if (node == nullptr) return -1;
    if (node->kind != Kind::kList && !node->is_null()) fail(key, *node, "a list");
    levels_.push_back({node, {}, {}, 0, path(key)});
    return static_cast<int64_t>(node->items.size());
  }
  void begin_item() override {
    Level& list = levels_.back();
    const std::string item_path = str(list.path, "[", list.next_item, "]");
    const ConfigNode& item = list.node->items[list.next_item++];
    if (item.kind != Kind::kMap) fail_at(list.path, item, "a list of maps");
    levels_.push_back({&item, {}, {}, 0, item_path});
  }
  void end_list() override { levels_.pop_back(); }
  bool replaces_lists() const override { return true; }

 private:
  struct Level {
    const ConfigNode* node;
    std::vector<std::string> known;
    std::vector<std::string> ignored;
    size_t next_item;
    std::string path;
  };

  std::string path(const char* key) const {
    const std::string& base = levels_.back().path;
    return base.empty() ? key : base + "." + key;
  }
  const ConfigNode* take(const char* key) {
    levels_.back().known.emplace_back(key);
    return levels_.back().node->find(key);
  }
  [[noreturn]] void fail(const char* key, const ConfigNode& node, const std::string& expected,
                         const std::string& hint = "") const {
    fail_at(path(key), node, expected, hint);
  }
  [[noreturn]] static void fail_at(const std::string& path, const ConfigNode& node,
                                   const std::string& expected, const std::string& hint = "") {
    throw InputError(
        str(node.where(), ": ", path, ": expected ", expected, ", got ", node.describe(), hint));
  }
  void check_range(const char* key, const ConfigNode& node, double value,
                   const Range& range) const {
    if (!(value >= range.min && value <= range.max))
      fail(key, node, "a number " + range_text(range));
  }
  int64_t integer(const char* key, const ConfigNode& node, const Range& range,
                  const char* expected = "a whole number") const {
    int64_t value = 0;
    if (!parse_number(node, value)) fail(key, node, expected);
    check_range(key, node, static_cast<double>(value), range);
    return value;
  }
  double number(const char* key, const ConfigNode& node, const Range& range) const {
    double value = 0;
    if (!parse_number(node, value) || !std::isfinite(value)) fail(key, node, "a number");
    check_range(key, node, value, range);
    return value;
  }
  template <class T, class F>
  void read_list(const char* key, const ConfigNode* node, std::vector<T>& values,
                 const char* expected, F&& read) {
    if (node == nullptr) return;
    values.clear();
    if (node->kind != Kind::kList && !node->is_null()) fail(key, *node, expected);
    for (const ConfigNode& item : node->items) values.push_back(read(item));
  }
  void check_unknown(const Level& level) const {
    for (const auto& [key, value] : level.node->entries) {
      const auto in = [&key = key](const std::vector<std::string>& names) {
        return std::find(names.begin(), names.end(), key) != names.end();
      };
      if (in(level.known) || in(level.ignored)) continue;
      const std::string near = nearest_name(key, level.known);
      throw InputError(str(value.where(), ": unknown key '",
                           level.path.empty() ? "" : level.path + ".", key, "'",
                           near.empty() ? "; known keys: " + join(level.known, ", ")
                                        : "; did you mean '" + near + "'?"));
    }
  }

  std::vector<Level> levels_;
};

// Quotes text that YAML would parse as another type.
std::string yaml_text(const std::string& text) {
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

// Base of dump and help, which visit the same tree: a writer formats each key as lines.
class Writer : public ConfigVisitor {
 public:
  std::string text() { return std::move(out_).str(); }

  void field(const char* key, int64_t& value, const char* help, Range range) override {
    line(key, "int", std::to_string(value), help, range_text(range));
  }
  void field(const char* key, double& value, const char* help, Range range) override {
    line(key, "float", format_double(value), help, range_text(range));
  }
  void field(const char* key, std::optional<double>& value, const char* help,
             Range range) override {
    line(key, "float", value ? format_double(*value) : "none", help, range_text(range));
  }
  void field(const char* key, std::optional<int64_t>& value, const char* help,
             Range range) override {
    line(key, "int or auto", value ? std::to_string(*value) : kAuto, help, range_text(range));
  }
  void field(const char* key, bool& value, const char* help) override {
    line(key, "bool", value ? "true" : "false", help, "");
  }
  void field(const char* key, std::string& value, const char* help) override {
    line(key, "text", yaml_text(value), help, "");
  }
  void field(const char* key, std::vector<std::string>& value, const char* help) override {
    line(key, "texts", value.size() == 1 ? yaml_text(value[0]) : list_text(value, yaml_text), help,
         "");
  }
  void field(const char* key, std::vector<int64_t>& value, const char* help, Range range) override {
    const auto text = [](int64_t item) { return std::to_string(item); };
    line(key, "ints", list_text(value, text), help, range_text(range));
  }
  void field(const char* key, std::vector<double>& value, const char* help, Range range) override {
    line(key, "floats", list_text(value, format_double), help, range_text(range));
  }

 protected:
  virtual void line(const char* key, const char* type, const std::string& value, const char* help,
                    const std::string& limits) = 0;
  void choose(const char* key, int& index, const std::vector<std::string>& names,
              const char* help) override {
    line(key, "choice", names[static_cast<size_t>(index)], help, join(names, " | "));
  }
  template <class T, class F>
  static std::string list_text(const std::vector<T>& values, F&& text) {
    std::vector<std::string> items;
    for (const T& value : values) items.push_back(text(value));
    return str("[", join(items, ", "), "]");
  }
  std::string indent() const { return std::string(static_cast<size_t>(2 * depth_), ' '); }

  std::ostringstream out_;
  int depth_ = 0;
};

class Dumper final : public Writer {
 protected:
  void line(const char* key, const char*, const std::string& value, const char*,
            const std::string&) override {
    out_ << prefix() << key << ": " << value << '\n';
  }
  bool begin_section(const char* key, const char*) override {
    out_ << prefix() << key << ":\n";
    ++depth_;
    return true;
  }
  void end_section() override {
    --depth_;
    item_ = false;
  }
  int64_t begin_list(const char* key, int64_t size, const char*,
                     const std::function<void(ConfigVisitor&)>&) override {
    out_ << prefix() << key << (size == 0 ? ": []\n" : ":\n");
    ++depth_;
    return size;
  }
  void begin_item() override {
    ++depth_;
    item_ = true;
  }
  void end_list() override { --depth_; }

 private:
  std::string prefix() {
    std::string text = indent();
    if (item_) text.replace(text.size() - 2, 2, "- ");
    item_ = false;
    return text;
  }
  bool item_ = false;
};

class Lister final : public Writer {
 public:
  ConfigFields fields;

 protected:
  void line(const char* key, const char*, const std::string& value, const char*,
            const std::string&) override {
    fields.emplace_back(prefixes_.back() + key, value);
  }
  bool begin_section(const char* key, const char*) override {
    prefixes_.push_back(prefixes_.back() + key + ".");
    return true;
  }
  void end_section() override { prefixes_.pop_back(); }
  int64_t begin_list(const char* key, int64_t size, const char*,
                     const std::function<void(ConfigVisitor&)>&) override {
    prefixes_.push_back(prefixes_.back() + key + ".");
    next_item_ = 0;
    return size;
  }
  void begin_item() override { prefixes_.push_back(str(prefixes_.back(), next_item_++, ".")); }
  void end_list() override { prefixes_.pop_back(); }

 private:
  std::vector<std::string> prefixes_{""};  // full key prefix of each open section
  int64_t next_item_ = 0;                  // index in the open list
};

class Helper final : public Writer {
 protected:
  void line(const char* key, const char* type, const std::string& value, const char* help,
            const std::string& limits) override {
    std::string name = indent() + key;
    name.resize(std::max<size_t>(name.size(), 30), ' ');
    out_ << name << ' ' << help << " (" << type << (limits.empty() ? "" : ", ") << limits
         << "; default " << value << ")\n";
  }
  bool begin_section(const char* key, const char* help) override {
    out_ << indent() << key << ":  " << help << '\n';
    ++depth_;
    return true;
  }
  void end_section() override { --depth_; }
  int64_t begin_list(const char* key, int64_t, const char* help,
                     const std::function<void(ConfigVisitor&)>& example) override {
    out_ << indent() << key << ":  " << help << " (a list of)\n";
    ++depth_;
    example(*this);
    --depth_;
    return -1;
  }
  void begin_item() override {}
  void end_list() override {}
};

}  // namespace

void read_config_with(const ConfigVisit& visit, const ConfigNode& root,
                      std::span<const std::string> ignored_keys, const std::string& path) {
  Reader reader(root, ignored_keys, path);
  visit(reader);
  reader.finish();
}

std::string dump_config_with(const ConfigVisit& visit) {
  Dumper dumper;
  visit(dumper);
  return dumper.text();
}

ConfigFields config_fields_with(const ConfigVisit& visit) {
  Lister lister;
  visit(lister);
  return std::move(lister.fields);
}

std::string config_help_with(const ConfigVisit& visit) {
  Helper helper;
  visit(helper);
  return helper.text();
}

}  // namespace cohort
