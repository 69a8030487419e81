#include "core/config.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <set>
#include <sstream>

namespace cohort {
namespace {

using Kind = ConfigNode::Kind;

constexpr size_t kMaxYamlBytes = 1 << 20;  // of a configuration file
constexpr size_t kMaxYamlDepth = 64;

// Builds the value from the parser's events. In yaml-cpp's own nodes an alias may refer to itself,
// or make a small file large without end.
class Builder final : public YAML::EventHandler {
 public:
  explicit Builder(std::string file) : file_(std::move(file)) {}
  ConfigNode root;

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (documents_++ > 0) fail(mark, "expected one document, and nothing after it");
  }
  void OnDocumentEnd() override {}
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { refuse_anchors(mark); }
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    add(start(mark, anchor, Kind::kNull));
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    ConfigNode node = start(mark, anchor, Kind::kScalar);
    node.scalar = value;
    node.quoted = tag == "!";
    add(std::move(node));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(mark, start(mark, anchor, Kind::kList));
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(mark, start(mark, anchor, Kind::kMap));
  }
  void OnMapEnd() override { close(); }

 private:
  struct Container {
    ConfigNode node;
    std::set<std::string> keys;     // of a map
    std::optional<ConfigNode> key;  // whose value comes next
  };

  [[noreturn]] void fail(const YAML::Mark& mark, const std::string& what) const {
    throw InputError(str(file_, ":", mark.line + 1, ": ", what));
  }
  [[noreturn]] void refuse_anchors(const YAML::Mark& mark) const {
    fail(mark,
         "anchors and aliases (&name, *name) are not supported; hint: write the value out, or put "
         "quotes around text that begins with & or *");
  }
  ConfigNode start(const YAML::Mark& mark, YAML::anchor_t anchor, Kind kind) const {
    if (anchor != 0) refuse_anchors(mark);
    return {.kind = kind, .file = file_, .line = mark.line + 1};
  }
  void open(const YAML::Mark& mark, ConfigNode node) {
    if (open_.size() == kMaxYamlDepth)
      fail(mark, str("nested deeper than ", kMaxYamlDepth, " levels"));
    open_.push_back({.node = std::move(node)});
  }
  void close() {
    ConfigNode done = std::move(open_.back().node);
    open_.pop_back();
    add(std::move(done));
  }
  void add(ConfigNode node) {
    if (open_.empty()) {
      root = std::move(node);
    } else if (Container& top = open_.back(); top.node.kind == Kind::kList) {
      top.node.items.push_back(std::move(node));
    } else if (!top.key) {
      set_key(top, std::move(node));
    } else {
      node.line = top.key->line;
      top.node.entries.push_back({std::move(top.key->scalar), std::move(node)});
      top.key.reset();
    }
  }
  void set_key(Container& map, ConfigNode key) {
    if (key.kind != Kind::kScalar) throw InputError(key.where() + ": a key must be plain text");
    if (!map.keys.insert(key.scalar).second)
      throw InputError(str(key.where(), ": duplicate key '", key.scalar, "', first given at line ",
                           map.node.find(key.scalar)->line, "; hint: remove one of the two"));
    map.key = std::move(key);
  }

  std::string file_;
  int documents_ = 0;
  std::vector<Container> open_;  // those not yet complete, outermost first
};

// The one document of `text`. Throws InputError, also for syntax.
ConfigNode build_yaml(const std::string& text, const std::string& file) {
  if (text.size() > kMaxYamlBytes)
    throw InputError(str(file, ": expected at most ", kMaxYamlBytes,
                         " bytes of YAML; hint: is this the configuration file?"));
  Builder builder(file);
  try {
    std::istringstream in(text);
    YAML::Parser parser(in);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const YAML::Exception& e) {
    throw InputError(str(file, ":", e.mark.line + 1, ": not valid YAML: ", e.msg));
  }
  return std::move(builder.root);
}

// Whether the quote that `text` begins with is closed by its last character.
bool is_quoted(std::string_view text) {
  if (text.empty() || (text[0] != '"' && text[0] != '\'')) return false;
  for (size_t i = 1; i < text.size(); ++i) {
    if (text[0] == '"' && text[i] == '\\')
      ++i;
    else if (text[i] == text[0] && text[0] == '\'' && text.substr(i + 1, 1) == "'")
      ++i;
    else if (text[i] == text[0])
      return i + 1 == text.size();
  }
  return false;
}

// The value of an override. Only lists, maps and quotes around all of it are read as YAML: a scalar
// is the text itself.
ConfigNode override_value(const std::string& text) {
  ConfigNode value{.kind = text.empty() ? Kind::kNull : Kind::kScalar, .scalar = text};
  try {
    ConfigNode yaml = build_yaml(text, "command line");
    const bool nested = yaml.kind == Kind::kList || yaml.kind == Kind::kMap;
    if (nested || (yaml.quoted && is_quoted(text))) value = std::move(yaml);
  } catch (const InputError&) {
    // Text, then; a key that is no text says what it expected.
  }
  const std::function<void(ConfigNode&)> clear_lines = [&](ConfigNode& node) {
    node.file = "command line";
    node.line = 0;
    for (ConfigNode& item : node.items) clear_lines(item);
    for (auto& entry : node.entries) clear_lines(entry.value);
  };
  clear_lines(value);
  value.typed = text;
  return value;
}

int64_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<int64_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int64_t>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int64_t diagonal = row[0];
    row[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int64_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

bool is_null(const ConfigNode& node) {
  return node.kind == Kind::kNull ||
         (node.kind == Kind::kScalar && !node.quoted &&
          (node.scalar == "null" || node.scalar == "Null" || node.scalar == "NULL" ||
           node.scalar == "none" || node.scalar == "~"));
}

std::string describe(const ConfigNode& node) {
  if (node.typed && !node.typed->empty()) return "'" + *node.typed + "'";
  switch (node.kind) {
    case Kind::kNull:
      return "nothing";
    case Kind::kScalar:
      return "'" + node.scalar + "'";
    case Kind::kList:
      return "a list";
    default:
      return "a map";
  }
}

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
    if (is_null(*node))
      value.reset();
    else
      value = number(key, *node, range);
  }
  void field(const char* key, bool& value, const char*) override {
    const ConfigNode* node = take(key);
    if (node == nullptr) return;
    if (node->kind != Kind::kScalar || node->quoted ||
        (node->scalar != "true" && node->scalar != "false"))
      fail(key, *node, "true or false");
    value = node->scalar == "true";
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
    const auto one = node == nullptr || node->kind == Kind::kList ? std::nullopt : node->text();
    if (one) value.assign(one->empty() ? 0 : 1, *one);
    if (one) return;
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
    if (node == nullptr || is_null(*node)) return false;
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
    if (node->kind != Kind::kList && !is_null(*node)) fail(key, *node, "a list");
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
        str(node.where(), ": ", path, ": expected ", expected, ", got ", describe(node), hint));
  }
  void check_range(const char* key, const ConfigNode& node, double value,
                   const Range& range) const {
    if (!(value >= range.min && value <= range.max))
      fail(key, node, "a number " + range_text(range));
  }
  int64_t integer(const char* key, const ConfigNode& node, const Range& range) const {
    int64_t value = 0;
    if (!parse_number(node, value)) fail(key, node, "a whole number");
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
    if (node->kind != Kind::kList && !is_null(*node)) fail(key, *node, expected);
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

// Quotes text that YAML would read as something else.
std::string yaml_text(const std::string& text) {
  ConfigNode probe{.kind = Kind::kScalar, .scalar = text};
  double number = 0;
  bool plain = !text.empty() && !parse_number(probe, number) && !is_null(probe) && text != "true" &&
               text != "false";
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

// Dump and help walk the same tree; a writer turns each key into lines.
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
    return "[" + join(items, ", ") + "]";
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
    fields.emplace_back(path_.back() + key, value);
  }
  bool begin_section(const char* key, const char*) override {
    path_.push_back(path_.back() + key + ".");
    return true;
  }
  void end_section() override { path_.pop_back(); }
  int64_t begin_list(const char* key, int64_t size, const char*,
                     const std::function<void(ConfigVisitor&)>&) override {
    path_.push_back(path_.back() + key + ".");
    next_item_ = 0;
    return size;
  }
  void begin_item() override { path_.push_back(str(path_.back(), next_item_++, ".")); }
  void end_list() override { path_.pop_back(); }

 private:
  std::vector<std::string> path_{""};  // of the open sections, each with what is before it
  int64_t next_item_ = 0;              // of the open list
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

std::string ConfigNode::where() const {
  return line > 0 ? str(file, ":", line) : file.empty() ? "configuration" : file;
}

const ConfigNode* ConfigNode::find(const std::string& key) const {
  for (const auto& [name, value] : entries)
    if (name == key) return &value;
  return nullptr;
}

ConfigNode* ConfigNode::find(const std::string& key) {
  return const_cast<ConfigNode*>(std::as_const(*this).find(key));
}

std::optional<std::string> ConfigNode::text() const {
  if (is_null(*this)) return "";
  if (kind == Kind::kScalar) return scalar;
  return typed;
}

void ConfigNode::set(const std::string& key, ConfigNode value) {
  kind = Kind::kMap;
  for (auto& [name, existing] : entries) {
    if (name == key) {
      existing = std::move(value);
      return;
    }
  }
  entries.push_back({key, std::move(value)});
}

ConfigNode parse_yaml(const std::string& text, const std::string& file_name) {
  ConfigNode root = build_yaml(text, file_name);
  if (root.kind == Kind::kNull) root.kind = Kind::kMap;
  if (root.kind != Kind::kMap)
    throw InputError(
        str(file_name, ": expected keys and values at the top level, got ", describe(root)));
  return root;
}

ConfigNode parse_yaml_file(const std::string& path) {
  const auto fail = [&](int error) {
    throw InputError(str("cannot read the configuration file '", path, "': ", std::strerror(error),
                         "; hint: check the path"));
  };
  std::FILE* file = std::fopen(path.c_str(), "rbe");
  if (file == nullptr) fail(errno);
  std::string text(kMaxYamlBytes + 1, '\0');  // one byte more than there may be
  text.resize(std::fread(text.data(), 1, text.size(), file));
  const int error = std::ferror(file) != 0 ? errno : 0;
  std::fclose(file);
  if (error != 0) fail(error);
  return parse_yaml(text, path);
}

void apply_override(ConfigNode& root, const std::string& assignment) {
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0)
    throw InputError(str("command line: expected key=value, got '", assignment, "'"));
  const std::string key = assignment.substr(0, equals);
  ConfigNode value = override_value(assignment.substr(equals + 1));
  ConfigNode* node = &root;
  size_t begin = 0;
  const auto list_item = [&](const std::string& part) -> ConfigNode& {
    size_t index = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), index);
    if (error != std::errc() || end != part.data() + part.size() || index >= node->items.size())
      throw InputError(str("command line: ", key, ": '", part, "' is no index of a list with ",
                           node->items.size(), " items"));
    return node->items[index];
  };
  for (size_t dot = key.find('.'); dot != std::string::npos; dot = key.find('.', begin)) {
    const std::string part = key.substr(begin, dot - begin);
    begin = dot + 1;
    if (node->kind == Kind::kList) {
      node = &list_item(part);
      continue;
    }
    const ConfigNode* existing = node->find(part);
    if (existing == nullptr || (existing->kind != Kind::kMap && existing->kind != Kind::kList)) {
      node->set(part, {.kind = Kind::kMap, .file = "command line"});
    }
    node = node->find(part);
  }
  if (node->kind == Kind::kList)
    list_item(key.substr(begin)) = std::move(value);
  else
    node->set(key.substr(begin), std::move(value));
}

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

std::string nearest_name(const std::string& word, std::span<const std::string> candidates) {
  std::string best;
  int64_t best_distance = static_cast<int64_t>(std::max<size_t>(2, word.size() / 3)) + 1;
  for (const std::string& candidate : candidates) {
    const int64_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string format_double(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value);
  return error == std::errc() ? std::string(buffer, end) : "nan";
}

}  // namespace cohort
