// What templates can call: filters, tests, methods of values, global functions, as tables.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "data/template/format.h"
#include "data/template/value.h"

namespace cohort::jinja {

class Interpreter;

using Keywords = std::vector<std::pair<std::string_view, Value>>;
// Removes a keyword argument; absent if it was not given.
Value take(Keywords& keywords, std::string_view name);

// The arguments of a call, as its callee takes them.
struct Args {
  std::vector<Value> values;
  Keywords keywords;
  size_t used = 0;  // of the values

  // The next one, or the one of that name; absent if neither was given.
  Value next(std::string_view name) {
    return used < values.size() ? values[used++] : take(keywords, name);
  }
  // Throws Fault if some are left.
  void expect_none(std::string_view callee) const;
};

// A call as a native sees it. args[0] is the value that is filtered or tested, or whose method it
// is; the others are in the order of the parameters, and what was not given is absent.
struct Call {
  Interpreter& in;
  std::vector<Value> args;
  Keywords keywords = {};  // of a native with the parameters "..."

  const Value& self() const { return args[0]; }
  bool flag(size_t i) const { return truthy(args[i]); }
  std::string_view str(size_t i) const;  // Python's str()
  const std::vector<Value>& items(size_t i) const;
  // Fault for another type.
  std::string_view text(size_t i) const;
  std::optional<std::string_view> optional_text(size_t i) const;  // nothing for None too
  const Value& number(size_t i) const;
  int64_t integer(size_t i, int64_t otherwise) const;  // `otherwise` if it was not given
};

struct Native {
  std::string_view names;
  std::string_view parameters;  // names; those with '?' may be left out; "...": any arguments
  Value (*apply)(Call& call);
};

// Removes the first of words with single spaces between them.
inline std::string_view take_word(std::string_view& words) {
  const std::string_view word = words.substr(0, words.find(' '));
  words.remove_prefix(std::min(word.size() + 1, words.size()));
  return word;
}

using Natives = std::span<const Native>;
Natives filters_table();
Natives tests_table();
Natives globals_table();
Natives methods_of(const Value& self);
// nullptr if there is none of that name.
const Native* find_native(Natives natives, std::string_view name);

// loop.name; absent if there is no such field.
Value loop_field(const Loop& loop, std::string_view name);

}  // namespace cohort::jinja
