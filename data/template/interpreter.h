// One rendering of a template.
#pragma once

#include <ctime>
#include <memory>
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
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  // Throws Fault with its place. To be called once.
  ChatTemplate::Rendered render(const Document& document, const Json& context);

  // For natives.
  Value attribute(const Value& object, std::string_view name);  // object.name
  Value item(const Value& object, const Value& key);            // object[key]
  Value call_native(const Native& native, const Value& self, Args args);
  std::shared_ptr<Scope> make_namespace();
  std::tm now() const;

 private:
  enum class Flow { kNext, kBreak, kContinue };
  class Nested;
  class Inside;
  template <class T>
  struct Owner;

  Value eval(const Node& e);
  Value eval_node(const Node& e);
  Value eval_name(std::string_view name);
  Value eval_compare(const Node& e);
  Value eval_native(const Node& e);
  std::vector<Value> eval_all(const Node& e);
  Args arguments(const Node& call);
  Value call(const Value& function, Args args);
  Value call_macro(const Node& macro, const std::shared_ptr<Scope>& outside, Args args);
  Value make_macro(const Node& s);

  void run(const Node& body);
  void run_statement(const Node& s);
  void run_for(const Node& s);
  Value run_block(const Node& body, const Node& filters);
  Value capture(const Node& body);
  void emit(std::string_view piece);
  void assign(const Node& target, const Value& value);

  const RenderOptions& options_;
  int depth_ = 0, captures_ = 0;
  Flow flow_ = Flow::kNext;
  ChatTemplate::Rendered rendered_;
  std::string* out_ = &rendered_.text;
  std::shared_ptr<Scope> scope_;
  std::vector<std::shared_ptr<Object>> kept_;  // to be cleared at the end: see Object
};

// A macro with the scope that it was defined in, or a native with the value whose method it is.
struct Function : Object {
  const Native* native = nullptr;
  Value self;
  const Node* macro = nullptr;
  std::shared_ptr<Scope> scope;
};

}  // namespace cohort::jinja
