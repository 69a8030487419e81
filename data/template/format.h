// Values as texts in the formats of Python's libraries.
#pragma once

#include <ctime>
#include <optional>
#include <string>

#include "data/template/value.h"

namespace cohort::jinja {

std::string float_repr(double value);

struct JsonStyle {
  std::optional<std::string> indent;  // of one level; nothing: all on one line
  std::string item_separator, key_separator;
  bool ascii = false, sort_keys = false;
};
// json.dumps().
std::string to_json(Heap& heap, const Value& value, const JsonStyle& style);

// time.strftime(), in English.
std::string format_time(std::tm time, const std::string& format);

}  // namespace cohort::jinja
