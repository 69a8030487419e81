// Natives of the template language, the compiled form of a template, and its interpreter.
#pragma once

#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/text.h"
#include "text/jinja/value.h"

namespace cohort::jinja {

class Interpreter;

// Natives: filters, tests, methods of values and global functions, as tables.

using Keywords = std::vector<std::pair<std::string_view, Value>>;
// Removes a keyword argument; absent if it was not given.
Value take(Keywords& keywords, std::string_view name);

// The arguments of a call, consumed by the callee.
struct Args {
  std::vector<Value> values;
  Keywords keywords;
  size_t num_used = 0;  // positional values consumed

  // The next positional argument, else the keyword argument of that name; absent if neither exists.
  Value next(std::string_view name) {
    return num_used < values.size() ? values[num_used++] : take(keywords, name);
  }
  // Throws TemplateError if arguments remain.
  void expect_none(std::string_view callee) const;
};

struct Call;
struct Native {
  std::string_view names;
  std::string_view parameters;  // names, optional ones with '?'; "...": any arguments
  Value (*apply)(Call& call);
};

using Natives = std::span<const Native>;
extern const Natives kFilterTable, kTestTable, kGlobalTable;
Natives methods_of(const Value& self);
// nullptr if there is none of that name.
const Native* find_native(Natives natives, std::string_view name);

// loop.name; absent if there is no such field.
Value loop_field(const Loop& loop, std::string_view name);

// Templates.

// A compiled piece of a template. `left` is the operand of a filter, an operator or an assignment.
// An expression returns a value; a statement prints, and returns an undefined value. Copies share
// the function.
class Code {
 public:
  using Function = std::function<Value(Interpreter& in, const Value& left)>;
  Code() = default;
  Code(size_t at, Function function)
      : at_(at), function_(std::make_shared<const Function>(std::move(function))) {}

  explicit operator bool() const { return function_ != nullptr; }
  // Throws TemplateError with its position.
  Value operator()(Interpreter& in, const Value& left = {}) const;

 private:
  size_t at_ = 0;  // byte offset in the source
  std::shared_ptr<const Function> function_;
};

struct Argument {
  Code value;
  std::string_view name = {};  // empty: positional
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
  bool uses_loop = false;                         // the body uses the name `loop`
};

struct Document {
  std::string source;                          // line breaks are \n; none at the end
  Heap constants{RenderLimits{.depth = 150}};  // nesting of expressions and blocks
  Code body;                                   // refers to the source and the constants
  bool has_generation_blocks = false;
};
// Compiles document.source into the other members. Throws TemplateError with its position.
void parse(Document& document, TemplateOptions options);

class Interpreter : public Heap {
 public:
  explicit Interpreter(const RenderOptions& options) : Heap(options.limits), options_(options) {}

  // Must be called once only. Throws TemplateError with its position.
  ChatTemplate::Rendered render(const Document& document, const Json& context);

  // For natives.
  Value attribute(const Value& object, std::string_view name);  // object.name
  Value item(const Value& object, const Value& key);            // object[key]
  Value call_native(const Native& native, const Value& self, Args args);
  std::tm now() const;

  // For compiled code. Functions without a value of their own return an undefined one.
  Value variable(std::string_view name);
  Value set(std::string_view name, const Value& value) { return set(*scope_, name, value); }
  Value set_field(const Value& object, std::string_view name, const Value& value);
  Args evaluate(const Arguments& arguments);
  Value call(const Value& function, Args args);
  Value make_macro(const Macro& macro);
  Value run(const std::vector<Code>& statements);  // prints the values
  Value capture(const Code& body);                 // returns the output as a text
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
  Flow flow_ = Flow::kNext;  // control flow after the current statement
  ChatTemplate::Rendered rendered_;
  std::string* out_ = &rendered_.text;
  Scope* scope_ = nullptr;
};

// The call of a native. args[0] is the filtered or tested value, or the object of a method; the
// others are in the order of the parameters, absent where omitted.
struct Call {
  Interpreter& in;
  std::vector<Value> args;
  Keywords keywords = {};  // only for the parameters "..."

  const Value& self() const { return args[0]; }
  bool flag(size_t i) const { return truthy(args[i]); }
  std::string_view str(size_t i) const { return to_str(in, args[i]); }
  const std::vector<Value>& items(size_t i) const { return items_of(in, args[i]); }
  // Throws TemplateError for another type.
  std::string_view text(size_t i) const {
    return checked(args[i], args[i].is_text(), "a text").text();
  }
  const Value& number(size_t i) const { return checked(args[i], args[i].is_number(), "a number"); }
  const Dict& dict(size_t i) const {
    return *checked(args[i], args[i].is<const Dict*>(), "a dict").dict();
  }
  int64_t integer(size_t i, int64_t otherwise) const {  // `otherwise` if omitted
    if (args[i].absent()) return otherwise;
    return checked(args[i], args[i].is_integral(), "a whole number").integer();
  }
  std::optional<std::string_view> optional_text(size_t i) const {  // nullopt for None too
    return args[i].given() ? std::optional(text(i)) : std::nullopt;
  }
};

// A native from a function on texts.
template <std::string (*function)(std::string_view)>
Value of_text(Call& c) {
  return c.in.text(function(c.str(0)));
}

}  // namespace cohort::jinja
