// What a template is compiled to, and one rendering of it.
#pragma once

#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/template/natives.h"
#include "data/template/value.h"

namespace cohort::jinja {

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
  Value make_macro(const Macro& macro) { return make(Function{.macro = &macro, .scope = scope_}); }
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

}  // namespace cohort::jinja
