// text/json.h on the JSON library: parse events build the value, printing converts to a copy.
#include "text/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/text.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// Limit of nesting while parsing: values are destroyed and printed recursively, so deeper input
// could overflow the stack.
constexpr size_t kMaxDepth = 256;
constexpr size_t kMaxReason = 200;

std::string type_name(const Json& json) {
  if (json.is_null()) return "null";
  if (json.is_bool()) return "true or false";
  if (json.is_int()) return "a whole number";
  if (json.is_number()) return "a number";
  if (json.is_string()) return "text";
  return json.is_array() ? "a list" : "an object";
}

// Receives the library's parse events and builds the value. A handler that returns false stops the
// parse with `reason` and `position` set.
class Builder final : public nlohmann::json_sax<nlohmann::ordered_json> {
 public:
  Json root;
  std::string reason;
  size_t position = 0;

  bool null() override { return add(Json()); }
  bool boolean(bool v) override { return add(v); }
  bool number_integer(number_integer_t v) override { return add(static_cast<int64_t>(v)); }
  bool number_unsigned(number_unsigned_t v) override {
    if (v > static_cast<number_unsigned_t>(INT64_MAX)) return add(static_cast<double>(v));
    return add(static_cast<int64_t>(v));
  }
  bool number_float(number_float_t v, const string_t&) override { return add(v); }
  bool string(string_t& v) override { return add(std::move(v)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open({.is_object = true}); }
  bool start_array(std::size_t) override { return open({.is_object = false}); }
  bool end_array() override { return close(Json(std::move(open_.back().array))); }
  bool key(string_t& name) override {
    keys_.push_back(std::move(name));
    return true;
  }
  bool end_object() override {
    std::vector<std::string_view> names;
    for (const auto& [name, value] : open_.back().object) names.push_back(name);
    std::sort(names.begin(), names.end());
    const auto duplicate = std::adjacent_find(names.begin(), names.end());
    if (duplicate == names.end()) return close(Json(std::move(open_.back().object)));
    reason = str("duplicate key '", *duplicate, "'");
    return false;
  }
  bool parse_error(std::size_t at, const std::string&,
                   const nlohmann::detail::exception& e) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while ..."
    std::string_view text = e.what();
    const auto skip = [&](std::string_view begin, std::string_view end) {
      const size_t at = text.find(end);
      if (text.starts_with(begin) && at != text.npos) text.remove_prefix(at + end.size());
    };
    skip("[json.exception", "] ");
    skip("parse error at", ": ");
    skip("syntax error while", " - ");
    reason = text;
    position = at;
    return false;
  }

 private:
  struct Container {
    bool is_object;
    Json::Object object;
    Json::Array array;
  };

  bool open(Container container) {
    if (open_.size() == kMaxDepth) {
      reason = str("nested deeper than ", kMaxDepth, " levels");
      return false;
    }
    open_.push_back(std::move(container));
    return true;
  }
  bool close(Json done) {
    open_.pop_back();
    return add(std::move(done));
  }
  bool add(Json value) {
    if (open_.empty()) {
      root = std::move(value);
    } else if (open_.back().is_object) {
      open_.back().object.emplace_back(std::move(keys_.back()), std::move(value));
      keys_.pop_back();
    } else {
      open_.back().array.push_back(std::move(value));
    }
    return true;
  }

  std::vector<Container> open_;    // containers not yet closed, outermost first
  std::vector<std::string> keys_;  // keys whose value is not complete, outermost first
};

nlohmann::ordered_json to_library(const Json& json) {
  if (json.is_bool()) return json.as_bool();
  if (json.is_int()) return json.as_int();
  if (json.is_number()) return json.as_double();
  if (json.is_string()) return json.as_string();
  if (json.is_array()) {
    auto out = nlohmann::ordered_json::array();
    for (const Json& item : json.as_array()) out.push_back(to_library(item));
    return out;
  }
  if (json.is_object()) {
    nlohmann::ordered_json::object_t out;
    out.reserve(json.as_object().size());
    for (const auto& [key, value] : json.as_object()) out.push_back({key, to_library(value)});
    return out;
  }
  return nullptr;
}

}  // namespace

void Json::throw_type(const std::string& expected) const {
  throw InputError(str("expected ", expected, ", got ", type_name(*this)));
}

const Json* Json::find(std::string_view key) const {
  if (!is_object()) return nullptr;
  for (const auto& [name, value] : as_object())
    if (name == key) return &value;
  return nullptr;
}

const Json& Json::at(std::string_view key) const {
  if (!is_object()) throw_type(str("an object with the key '", key, "'"));
  if (const Json* value = find(key)) return *value;
  std::vector<std::string> names;
  for (const auto& [name, value] : as_object()) names.push_back(name);
  const std::string near = nearest_name(std::string(key), names);
  throw InputError(
      str("missing key '", key, "'", near.empty() ? "" : "; did you mean '" + near + "'?"));
}

Json& Json::operator[](std::string_view key) {
  if (is_null()) value_ = Object{};
  COHORT_CHECK(is_object(), "[json] expected an object to set '", key, "' in, got ",
               type_name(*this));
  auto& object = std::get<Object>(value_);
  const auto entry =
      std::find_if(object.begin(), object.end(), [&](const auto& e) { return e.first == key; });
  return entry != object.end() ? entry->second : object.emplace_back(key, Json()).second;
}

Json& Json::set(std::string_view key, Json value) {
  (*this)[key] = std::move(value);
  return *this;
}

void Json::push_back(Json value) {
  if (is_null()) value_ = Array{};
  COHORT_CHECK(is_array(), "[json] expected a list to append to, got ", type_name(*this));
  std::get<Array>(value_).push_back(std::move(value));
}

std::string Json::dump(int indent) const {
  return to_library(*this).dump(indent, ' ', false,
                                nlohmann::ordered_json::error_handler_t::replace);
}

std::string Json::to_text() const {
  if (is_string()) return as_string();
  if (!is_array()) return dump();
  std::string text;
  const char* separator = "";
  for (const Json& item : as_array()) {
    text += separator + item.to_text();
    separator = ", ";
  }
  return text;
}

Json parse_json(std::string_view text, const std::string& where) {
  Builder builder;
  if (nlohmann::ordered_json::sax_parse(text.begin(), text.end(), &builder))
    return std::move(builder.root);
  // The reason quotes the text, so its length is unbounded.
  if (builder.reason.size() > kMaxReason) {
    builder.reason.resize(next_utf8_boundary(builder.reason, kMaxReason));
    builder.reason += "...";
  }
  throw InputError(str(where, ": not valid JSON: ", builder.reason,
                       builder.position > 0 ? str(", at byte ", builder.position) : ""));
}

double number_or_nan(const Json& json) {
  return json.is_null() ? std::numeric_limits<double>::quiet_NaN() : json.as_double();
}

}  // namespace cohort
