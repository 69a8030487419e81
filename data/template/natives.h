// What templates can call: filters, tests, methods of values, global functions.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "data/template/interpreter.h"
#include "data/template/value.h"

namespace cohort::jinja {

// nullptr if there is none of that name.
const Native* find_filter(std::string_view name);
const Native* find_test(std::string_view name);
const Native* find_global(std::string_view name);
// Of the type of `self`.
const Native* find_method(const Value& self, std::string_view name);

// Python's `text % values` and text.format(...).
std::string format_percent(Interpreter& in, const std::string& format, const Value& values);
std::string format_braces(Interpreter& in, const std::string& format, const Args& args);

struct JsonStyle {
  std::optional<std::string> indent;  // of one level; nothing: all on one line
  std::string item_separator, key_separator;
  bool ascii = false, sort_keys = false;
};
// Python's json.dumps().
std::string to_json(Interpreter& in, const Value& value, const JsonStyle& style);

// Python's time.strftime(), in English.
std::string format_time(Budget& budget, const std::tm& time, const std::string& format);

// Reading arguments; Fault where one has the wrong type.
const std::string& text_argument(const Args& args, size_t index, const char* what);
int64_t int_argument(const Args& args, size_t index, int64_t otherwise);

}  // namespace cohort::jinja
