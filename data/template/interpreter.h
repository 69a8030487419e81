// One rendering of a template.
#pragma once

#include <ctime>
#include <string>
#include <string_view>
#include <vector>

#include "data/template/natives.h"
#include "data/template/parser.h"
#include "data/template/value.h"

namespace cohort::jinja {

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

 private:
  enum class Flow { kNext, kBreak, kContinue };

  Value eval(const Node& e);
  Value eval_node(const Node& e);
  std::vector<Value> eval_all(const Node& e);
  Value eval_name(std::string_view name);
  Value eval_chain(const Node& e);
  Args arguments(const Node& call);
  Value call(const Value& function, Args args);
  Value call_macro(const Function& function, Args args);

  void run(const Node& body);
  void run_for(const Node& s);
  void run_generation(const Node& s);
  Value capture(const Node& body);
  void enter(Scope* parent) { scope_ = make(Scope{parent}); }
  void set(Scope& scope, std::string_view name, const Value& value);
  void assign(const Node& target, const Value& value);

  const RenderOptions& options_;
  int captures_ = 0;
  Flow flow_ = Flow::kNext;
  ChatTemplate::Rendered rendered_;
  std::string* out_ = &rendered_.text;
  Scope* scope_ = nullptr;
};

}  // namespace cohort::jinja
