// text/json.h on the JSON library: its parse events build the value, and it prints texts and
// numbers.
#include "text/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/text.h"
#include "text/utf8.h"

namespace cohort {
namespace {

using nlohmann::ordered_json;

// Limit of nesting while parsing: values are destroyed and printed recursively, so deeper input
// could overflow the stack.
constexpr size_t kMaxDepth = 256;
constexpr size_t kMaxReason = 200;

}  // namespace

// Receives the library's parse events and builds the value in place. The library's own document is
// no alternative: it takes time quadratic in the keys of an object, such as a vocabulary, and
// accepts duplicate keys. A handler that returns false stops the parse with `reason` and `position`
// set.
class Json::Builder {
 public:
  Json root;
  std::string reason;
  size_t position = 0;

  bool null() { return add(Json()); }
  bool boolean(bool v) { return add(v); }
  bool number_integer(int64_t v) { return add(v); }
  bool number_unsigned(uint64_t v) {
    if (v <= INT64_MAX) return add(static_cast<int64_t>(v));
    return add(Number{static_cast<double>(v), std::to_string(v)});
  }
  // Called for whole numbers that do not fit into 64 bits, too.
  bool number_float(double v, const std::string& digits) { return add(Number{v, digits}); }
  bool string(std::string& v) { return add(std::move(v)); }
  bool binary(ordered_json::binary_t&) { return false; }
  bool start_object(size_t) { return open(Object()); }
  bool start_array(size_t) { return open(Array()); }
  bool key(std::string& name) {
    std::get<Object>(open_.back()->value_).emplace_back(std::move(name), Json());
    return true;
  }
  bool end_array() {
    open_.pop_back();
    return true;
  }
  bool end_object() {
    std::vector<std::string_view> names;
    for (const auto& [name, value] : open_.back()->as_object()) names.push_back(name);
    std::sort(names.begin(), names.end());
    const auto duplicate = std::adjacent_find(names.begin(), names.end());
    if (duplicate != names.end()) reason = str("duplicate key '", *duplicate, "'");
    open_.pop_back();
    return reason.empty();
  }
  bool parse_error(size_t at, const std::string&, const ordered_json::exception& e) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while parsing
    // value - ..." or "[json.exception.out_of_range.406] ..."
    const std::string_view text = e.what(), last = e.id == 101 ? " - " : "] ";
    reason = text.substr(text.find(last) + last.size());
    position = at;
    return false;
  }

 private:
  // Storage of the next value.
  Json& next_value() {
    if (open_.empty()) return root;
    if (auto* array = std::get_if<Array>(&open_.back()->value_)) return array->emplace_back();
    return std::get<Object>(open_.back()->value_).back().second;
  }
  bool add(Json value) {
    next_value() = std::move(value);
    return true;
  }
  bool open(Json container) {
    if (open_.size() == kMaxDepth) {
      reason = str("nested deeper than ", kMaxDepth, " levels");
      return false;
    }
    open_.push_back(&(next_value() = std::move(container)));
    return true;
  }

  // Containers not yet closed, outermost first. They stay in place, since no container grows before
  // the one inside it is closed.
  std::vector<Json*> open_;
};

void Json::write(std::string& out, int indent, size_t level) const {
  const auto line = [&](size_t depth) {
    if (indent >= 0) (out += '\n').append(depth * static_cast<size_t>(indent), ' ');
  };
  const auto all = [&](char open, char close, const auto& items, auto write_item) {
    out += open;
    for (const auto& item : items) {
      if (&item != &items[0]) out += ',';
      line(level + 1);
      write_item(item);
    }
    if (!items.empty()) line(level);
    out += close;
  };
  const auto append = [&](const ordered_json& scalar) {
    out += scalar.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  };
  if (is_null()) out += "null";
  if (is_bool()) out += as_bool() ? "true" : "false";
  if (is_int()) out += std::to_string(as_int());
  if (const auto* number = std::get_if<Number>(&value_)) {
    if (is_big() || (indent == kAsRead && !number->spelling.empty()))
      out += number->spelling;
    else
      append(number->value);
  }
  if (is_string()) append(as_string());
  if (is_array())
    all('[', ']', as_array(), [&](const Json& item) { item.write(out, indent, level + 1); });
  if (is_object())
    all('{', '}', as_object(), [&](const auto& entry) {
      append(entry.first);
      out += indent >= 0 ? ": " : ":";
      entry.second.write(out, indent, level + 1);
    });
}

bool Json::is_big() const {
  const auto* number = std::get_if<Number>(&value_);
  return number != nullptr && !number->spelling.empty() &&
         number->spelling.find_first_of(".eE") == std::string::npos;
}

double Json::as_double() const {
  return is_int() ? static_cast<double>(as_int()) : get<Number>("a number").value;
}

std::string Json::type_name() const {
  constexpr const char* kNames[] = {"null", "true or false", "a whole number", "a number",
                                    "text", "a list",        "an object"};
  return is_big() ? digits() + ", which is beyond 64 bits" : kNames[value_.index()];
}

void Json::throw_type(const std::string& expected) const {
  throw JsonError(str("expected ", expected, ", got ", type_name()), this);
}

const Json* Json::find(std::string_view key) const {
  if (!is_object()) return nullptr;
  for (const auto& [name, value] : as_object())
    if (name == key) return &value;
  return nullptr;
}

const Json& Json::get_or_null(std::string_view key) const {
  static const Json null;
  const Json* found = find(key);
  return found == nullptr ? null : *found;
}

const Json& Json::at(std::string_view key) const {
  if (!is_object()) throw_type(str("an object with the key '", key, "'"));
  if (const Json* value = find(key)) return *value;
  std::vector<std::string> names;
  for (const auto& [name, value] : as_object()) names.push_back(name);
  throw JsonError(str("missing key '", key, "'", did_you_mean(std::string(key), names)), this);
}

Json& Json::operator[](std::string_view key) {
  if (is_null()) value_ = Object{};
  COHORT_CHECK(is_object(), "[json] expected an object to set '", key, "' in, got ", type_name());
  auto& object = std::get<Object>(value_);
  const auto entry = std::ranges::find(object, key, &Object::value_type::first);
  return entry != object.end() ? entry->second : object.emplace_back(key, Json()).second;
}

Json& Json::set(std::string_view key, Json value) {
  (*this)[key] = std::move(value);
  return *this;
}

void Json::push_back(Json value) {
  if (is_null()) value_ = Array{};
  COHORT_CHECK(is_array(), "[json] expected a list to append to, got ", type_name());
  std::get<Array>(value_).push_back(std::move(value));
}

std::string Json::dump(int indent) const {
  std::string out;
  write(out, indent, 0);
  return out;
}

std::string Json::to_text() const {
  if (is_string()) return as_string();
  if (!is_array()) return dump(kAsRead);
  std::string text;
  const char* separator = "";
  for (const Json& item : as_array()) {
    text += separator + item.to_text();
    separator = ", ";
  }
  return text;
}

Json parse_json(std::string_view text, const std::string& where) {
  // The library takes a zero byte for the end of the text.
  if (const size_t zero = text.find('\0'); zero != text.npos)
    throw InputError(str(where, ": not valid JSON: a zero byte, at byte ", zero + 1));
  Json::Builder builder;
  if (ordered_json::sax_parse(text.begin(), text.end(), &builder)) return std::move(builder.root);
  // The reason quotes the text, so its length is unbounded.
  if (builder.reason.size() > kMaxReason) {
    builder.reason.resize(next_utf8_boundary(builder.reason, kMaxReason));
    builder.reason += "...";
  }
  throw InputError(str(where, ": not valid JSON: ", builder.reason,
                       builder.position > 0 ? str(", at byte ", builder.position) : ""));
}

namespace {

// Puts the way from `root` to `value` in front of `location`. False if there is none.
bool find_location(const Json& root, const Json* value, std::string& location) {
  if (&root == value) return true;
  if (root.is_array())
    for (const Json& item : root.as_array())
      if (find_location(item, value, location)) {
        location.insert(0, str("[", &item - root.as_array().data(), "]"));
        return true;
      }
  if (root.is_object())
    for (const auto& [name, item] : root.as_object())
      if (find_location(item, value, location)) {
        location.insert(0, str(".", name.substr(0, kMaxReason)));
        return true;
      }
  return false;
}

}  // namespace

std::string Json::location_of(const Json* value) const {
  std::string location;
  if (!find_location(*this, value, location) || location.empty()) return "";
  return location.substr(location[0] == '.' ? 1 : 0) + ": ";
}

double number_or_nan(const Json& json) {
  return json.is_null() ? std::numeric_limits<double>::quiet_NaN() : json.as_double();
}

}  // namespace cohort
