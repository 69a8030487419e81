// What templates can call: filters, tests, methods of values, global functions, as tables.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/template/value.h"

namespace cohort::jinja {

class Interpreter;

struct Args {
  std::vector<Value> values;
  std::vector<std::pair<std::string, Value>> keywords;

  // Removes a keyword argument; absent if it was not given.
  Value take(std::string_view name);
};

// A call as a native sees it. args[0] is the value that is filtered or tested, or whose method it
// is; the others are in the order of the parameters, and what was not given is absent.
struct Call {
  Interpreter& in;
  std::vector<Value> args;
  Args rest;  // of a native with the parameters "...": whatever was given

  const Value& self() const { return args[0]; }
  bool flag(size_t i) const { return truthy(args[i]); }
  std::string str(size_t i) const;  // Python's str()
  // Fault for another type.
  const std::string& text(size_t i) const;
  int64_t integer(size_t i, int64_t otherwise) const;  // `otherwise` if it was not given
};

struct Native {
  std::string_view name;
  std::string_view parameters;  // names; those after '|' may be left out
  Value (*apply)(Call& call);
};

using Natives = std::span<const Native>;
Natives filters_table();
Natives tests_table();
Natives globals_table();
Natives methods_of(const Value& self);
// nullptr if there is none of that name.
const Native* find_native(Natives natives, std::string_view name);

}  // namespace cohort::jinja
