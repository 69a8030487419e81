// A JSON value. Only text/json.cpp includes the JSON library.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/check.h"

namespace cohort {

class Json;

// An error of an accessor of `value`; with_location() adds where it is.
class JsonError : public InputError {
 public:
  JsonError(const std::string& message, const Json* value) : InputError(message), value(value) {}
  const Json* value;
};

// Objects preserve the order of their keys. Accessors throw JsonError naming the actual type.
class Json {
 public:
  // A number that is no int64_t. `spelling`: as it was read; empty: it was not.
  struct Number {
    double value;
    std::string spelling;
  };
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;

  Json() = default;  // null
  Json(bool v) : value_(v) {}
  Json(int v) : value_(int64_t{v}) {}
  Json(int64_t v) : value_(v) {}
  Json(double v) : value_(Number{v, {}}) {}
  Json(const char* v) : value_(std::string(v)) {}
  Json(std::string v) : value_(std::move(v)) {}
  Json(Number v) : value_(std::move(v)) {}
  Json(Array v) : value_(std::move(v)) {}
  Json(Object v) : value_(std::move(v)) {}

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_bool() const { return std::holds_alternative<bool>(value_); }
  bool is_int() const { return std::holds_alternative<int64_t>(value_); }
  bool is_big() const;  // a whole number of more than 64 bits, which keeps its digits
  bool is_number() const { return is_int() || std::holds_alternative<Number>(value_); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }

  bool as_bool() const { return get<bool>("true or false"); }
  int64_t as_int() const { return get<int64_t>("a whole number"); }
  double as_double() const;                                                       // any number
  const std::string& digits() const { return get<Number>("a number").spelling; }  // if is_big()
  const std::string& as_string() const { return get<std::string>("text"); }
  const Array& as_array() const { return get<Array>("a list"); }
  const Object& as_object() const { return get<Object>("an object"); }

  // nullptr if this is not an object or has no such key.
  const Json* find(std::string_view key) const;
  // nullptr if this is not an object or has no text under the key.
  const std::string* find_text(std::string_view key) const {
    const Json* found = find(key);
    return found == nullptr ? nullptr : std::get_if<std::string>(&found->value_);
  }
  // Null if this is not an object or has no such key.
  const Json& get_or_null(std::string_view key) const;
  // Throws JsonError naming the key if it is missing.
  const Json& at(std::string_view key) const;
  // Adds or replaces a key of an object (null becomes an object). Returns *this, for chaining.
  Json& set(std::string_view key, Json value);
  // The value of a key of an object, added as null if missing (null becomes an object).
  Json& operator[](std::string_view key);
  void push_back(Json value);  // null becomes an array

  // Compact text, or indented by `indent` spaces. Doubles round-trip exactly, or with kAsRead are
  // spelled as they were read: 1e5, 0.10. NaN and Inf print as null.
  static constexpr int kAsRead = -2;
  std::string dump(int indent = -1) const;
  // "a.b[2]: " for a value inside this one, and "" for any other one.
  std::string location_of(const Json* value) const;
  // Text form for prompt templates: text unquoted, a list as its items separated by ", ", anything
  // else as it was read.
  std::string to_text() const;

 private:
  template <class T>
  const T& get(const char* expected) const {
    if (const T* value = std::get_if<T>(&value_)) return *value;
    throw_type(expected);
  }
  [[noreturn]] void throw_type(const std::string& expected) const;
  std::string type_name() const;
  void write(std::string& out, int indent, size_t level) const;

  class Builder;
  friend Json parse_json(std::string_view text, const std::string& where);

  std::variant<std::monostate, bool, int64_t, Number, std::string, Array, Object> value_;
};

// Throws InputError("WHERE: not valid JSON: REASON, at byte N"), N from 1.
Json parse_json(std::string_view text, const std::string& where);

// Calls read(). The error of an accessor of a value inside `root` names the file and the field:
// InputError("WHERE: a.b[2]: expected ...").
template <class Read>
auto with_location(const Json& root, const std::string& where, const Read& read) {
  try {
    return read();
  } catch (const JsonError& e) {
    throw InputError(str(where, ": ", root.location_of(e.value), e.what()));
  }
}

// A saved number; NaN for null, which means not measured.
double number_or_nan(const Json& json);

}  // namespace cohort
