// Values as texts in the formats of Python's libraries.
#pragma once

#include <ctime>
#include <optional>
#include <string>
#include <string_view>

#include "data/template/value.h"

namespace cohort::jinja {

enum class Syntax : bool { kPython, kJson };
struct Style {
  Syntax syntax = Syntax::kPython;
  bool ascii = false, sort_keys = false;
  std::optional<std::string> indent;  // of one level; nothing: all on one line
  std::string_view item_separator = ", ", key_separator = ": ";
};
// Appends repr(), or json.dumps(). Throws Fault for what JSON does not have.
void write(Heap& heap, std::string& out, const Value& value, const Style& style, size_t level = 0);

// Appends str(). Nothing for an undefined value.
void print(Heap& heap, std::string& out, const Value& value);
std::string_view to_str(Heap& heap, const Value& value);

// time.strftime(), in English.
std::string format_time(std::tm time, std::string_view format);

}  // namespace cohort::jinja
