#include "config/node.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

namespace cohort {
namespace {

using Kind = ConfigNode::Kind;

constexpr size_t kMaxYamlBytes = 1 << 20;
constexpr size_t kMaxYamlDepth = 64;
constexpr const char* kCommandLine = "command line";

enum class Lines { kKeep, kOmit };

// Builds the value from the parser's events. yaml-cpp's own nodes allow an alias to refer to itself
// or to expand a small file exponentially.
class Builder final : public YAML::EventHandler {
 public:
  Builder(std::string file, Lines lines) : file_(std::move(file)), lines_(lines) {}
  ConfigNode root;

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (documents_++ > 0) fail(mark, "expected one document, and nothing after it");
  }
  void OnDocumentEnd() override {}
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { reject_anchors(mark); }
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
    std::set<std::string> map_keys;
    std::optional<ConfigNode> pending_key;  // waiting for its value
  };

  [[noreturn]] void fail(const YAML::Mark& mark, const std::string& message) const {
    throw InputError(str(file_, ":", mark.line + 1, ": ", message));
  }
  [[noreturn]] void reject_anchors(const YAML::Mark& mark) const {
    fail(mark,
         "anchors and aliases (&name, *name) are not supported; hint: write the value out, or put "
         "quotes around text that begins with & or *");
  }
  ConfigNode start(const YAML::Mark& mark, YAML::anchor_t anchor, Kind kind) const {
    if (anchor != 0) reject_anchors(mark);
    return {.kind = kind, .file = file_, .line = lines_ == Lines::kKeep ? mark.line + 1 : 0};
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
    } else if (!top.pending_key) {
      set_key(top, std::move(node));
    } else {
      node.line = top.pending_key->line;
      top.node.entries.push_back({std::move(top.pending_key->scalar), std::move(node)});
      top.pending_key.reset();
    }
  }
  void set_key(Container& map, ConfigNode key) {
    if (key.kind != Kind::kScalar) throw InputError(key.where() + ": a key must be plain text");
    if (!map.map_keys.insert(key.scalar).second)
      throw InputError(str(key.where(), ": duplicate key '", key.scalar, "', first given at line ",
                           map.node.find(key.scalar)->line, "; hint: remove one of the two"));
    map.pending_key = std::move(key);
  }

  std::string file_;
  Lines lines_;
  int documents_ = 0;
  std::vector<Container> open_;  // incomplete containers, outermost first
};

// Parses the single document in `text`. Throws InputError.
ConfigNode build_yaml(const std::string& text, const std::string& file, Lines lines) {
  if (text.size() > kMaxYamlBytes)
    throw InputError(str(file, ": expected at most ", kMaxYamlBytes,
                         " bytes of YAML; hint: is this the configuration file?"));
  Builder builder(file, lines);
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

// True if `text` begins with a quote that its last character closes.
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

// Value of an override. Only lists, maps and fully quoted text are parsed as YAML; any other text
// is a scalar.
ConfigNode override_value(const std::string& text) {
  ConfigNode value{
      .kind = text.empty() ? Kind::kNull : Kind::kScalar, .scalar = text, .file = kCommandLine};
  try {
    ConfigNode yaml = build_yaml(text, kCommandLine, Lines::kOmit);
    const bool nested = yaml.kind == Kind::kList || yaml.kind == Kind::kMap;
    if (nested || (yaml.quoted && is_quoted(text))) value = std::move(yaml);
  } catch (const InputError&) {
    // Not YAML: plain text. A key of another type reports what it expects.
  }
  value.typed = text;
  return value;
}

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

bool ConfigNode::is_null() const {
  return kind == Kind::kNull || (kind == Kind::kScalar && !quoted &&
                                 (scalar == "null" || scalar == "Null" || scalar == "NULL" ||
                                  scalar == "none" || scalar == "~"));
}

std::string ConfigNode::describe() const {
  if (typed && !typed->empty()) return "'" + *typed + "'";
  if (kind == Kind::kScalar) return "'" + scalar + "'";
  return kind == Kind::kNull ? "nothing" : kind == Kind::kList ? "a list" : "a map";
}

std::optional<std::string> ConfigNode::text() const {
  if (is_null()) return "";
  if (kind == Kind::kScalar) return scalar;
  return typed;
}

void ConfigNode::set(const std::string& key, ConfigNode value) {
  kind = Kind::kMap;
  if (ConfigNode* existing = find(key))
    *existing = std::move(value);
  else
    entries.push_back({key, std::move(value)});
}

ConfigNode parse_yaml(const std::string& text, const std::string& file_name) {
  ConfigNode root = build_yaml(text, file_name, Lines::kKeep);
  if (root.kind == Kind::kNull) root.kind = Kind::kMap;
  if (root.kind != Kind::kMap)
    throw InputError(
        str(file_name, ": expected keys and values at the top level, got ", root.describe()));
  return root;
}

ConfigNode parse_yaml_file(const std::string& path) {
  const auto fail = [&](int error) {
    throw InputError(str("cannot read the configuration file '", path, "': ", std::strerror(error),
                         "; hint: check the path"));
  };
  std::FILE* file = std::fopen(path.c_str(), "rbe");
  if (file == nullptr) fail(errno);
  std::string text(kMaxYamlBytes + 1, '\0');  // one byte above the limit
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
  ConfigNode* node = &root;
  for (size_t begin = 0, dot = 0; dot < key.size(); begin = dot + 1) {
    dot = std::min(key.find('.', begin), key.size());
    const std::string part = key.substr(begin, dot - begin);
    if (node->kind == Kind::kList) {
      size_t index = 0;
      const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), index);
      if (error != std::errc() || end != part.data() + part.size() || index >= node->items.size())
        throw InputError(str("command line: ", key, ": '", part, "' is no index of a list with ",
                             node->items.size(), " items"));
      node = &node->items[index];
      continue;
    }
    if (node->find(part) == nullptr) node->set(part, {});
    node = node->find(part);
    if (dot < key.size() && node->kind != Kind::kMap && node->kind != Kind::kList)
      *node = {.kind = Kind::kMap, .file = kCommandLine};
  }
  *node = override_value(assignment.substr(equals + 1));
}

}  // namespace cohort
