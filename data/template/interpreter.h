// What templates can call, what a template is compiled to, and one rendering of it.
#pragma once

#include <algorithm>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/template/text.h"
#include "data/template/value.h"

namespace cohort::jinja {

class Interpreter;

// Natives: filters, tests, methods of values and global functions, as tables.

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

struct Call;
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

// Templates.

// A compiled piece of a template. `left` is the value that a filter, an operator or an assignment
// is for. An expression has a value; a statement prints, and its value is undefined. Copies share
// what they do.
class Code {
 public:
  using Function = std::function<Value(Interpreter& in, const Value& left)>;
  Code() = default;
  Code(size_t at, Function function)
      : at_(at), function_(std::make_shared<const Function>(std::move(function))) {}

  explicit operator bool() const { return function_ != nullptr; }
  // Throws Fault with its place.
  Value operator()(Interpreter& in, const Value& left = {}) const;

 private:
  size_t at_ = 0;  // byte of the source
  std::shared_ptr<const Function> function_;
};

struct Argument {
  Code value;
  std::string_view name = {};  // empty: it is known by its place
  bool spread = false;         // *value
};
using Arguments = std::vector<Argument>;

struct Macro {
  std::string_view name;
  std::vector<Argument> parameters;  // with their default values, which may be empty
  Code body;
};

struct For {
  Code target, list, condition, body, otherwise;  // `condition` and `otherwise` may be empty
  bool tells_loop = false;                        // the body has the name `loop`
};

struct Document {
  std::string source;  // with \n for line breaks, and without one at the end
  Heap constants{RenderLimits{.depth = 150}};  // how deep expressions and blocks may be nested
  Code body;                                   // refers to the source and the constants
  bool has_generation_blocks = false;
};

class Interpreter : public Heap {
 public:
  explicit Interpreter(const RenderOptions& options) : Heap(options.limits), options_(options) {}

  // Throws Fault with its place. To be called once.
  ChatTemplate::Rendered render(const Document& document, const Json& context);

  // For natives.
  Value attribute(const Value& object, std::string_view name);  // object.name
  Value item(const Value& object, const Value& key);            // object[key]
  Value call_native(const Native& native, const Value& self, Args args);
  std::tm now() const;

  // For compiled code. What has no value of its own returns an undefined one.
  Value variable(std::string_view name);
  Value set(std::string_view name, const Value& value) { return set(*scope_, name, value); }
  Value set_field(const Value& object, std::string_view name, const Value& value);
  Args evaluate(const Arguments& arguments);
  Value call(const Value& function, Args args);
  Value make_macro(const Macro& macro);
  Value run(const std::vector<Code>& statements);  // prints the values
  Value capture(const Code& body);                 // what it prints
  Value run_for(const For& loop);
  Value run_generation(const Code& body);

  enum class Flow { kNext, kBreak, kContinue };
  Value leave(Flow flow) {
    flow_ = flow;
    return {};
  }

 private:
  Value call_macro(const Function& function, Args args);
  void enter(Scope* parent) { scope_ = make(Scope{parent}); }
  Value set(Scope& scope, std::string_view name, const Value& value);

  const RenderOptions& options_;
  int captures_ = 0;
  Flow flow_ = Flow::kNext;  // how the statements at hand are left
  ChatTemplate::Rendered rendered_;
  std::string* out_ = &rendered_.text;
  Scope* scope_ = nullptr;
};

// A call as a native sees it. args[0] is the value that is filtered or tested, or whose method it
// is; the others are in the order of the parameters, and what was not given is absent.
struct Call {
  Interpreter& in;
  std::vector<Value> args;
  Keywords keywords = {};  // of a native with the parameters "..."

  const Value& self() const { return args[0]; }
  bool flag(size_t i) const { return truthy(args[i]); }
  std::string_view str(size_t i) const { return to_str(in, args[i]); }
  const std::vector<Value>& items(size_t i) const { return items_of(in, args[i]); }
  // Fault for another type.
  std::string_view text(size_t i) const {
    return checked(args[i], args[i].is_text(), "a text").text();
  }
  const Value& number(size_t i) const { return checked(args[i], args[i].is_number(), "a number"); }
  const Dict& dict(size_t i) const {
    return *checked(args[i], args[i].is<const Dict*>(), "a dict").dict();
  }
  int64_t integer(size_t i, int64_t otherwise) const {  // `otherwise` if it was not given
    if (args[i].absent()) return otherwise;
    return checked(args[i], args[i].is_integral(), "a whole number").integer();
  }
  std::optional<std::string_view> optional_text(size_t i) const {  // nothing for None too
    return args[i].given() ? std::optional(text(i)) : std::nullopt;
  }
};

// A native that is a function of the text.
template <std::string (*function)(std::string_view)>
Value of_text(Call& c) {
  return c.in.text(function(c.str(0)));
}

}  // namespace cohort::jinja
