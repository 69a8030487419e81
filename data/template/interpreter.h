// One rendering of a template.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/template/ast.h"
#include "data/template/value.h"

namespace cohort::jinja {

class Interpreter {
 public:
  Interpreter(const Document& document, const RenderOptions& options)
      : budget(options.limits), options_(options), document_(document) {}
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  // Throws Fault; place() then says where.
  ChatTemplate::Rendered render(const Json& context);
  size_t place() const { return at_; }

  // For natives.
  Budget budget;
  Value text(std::string bytes, bool markup = false) {
    return make_text(budget, std::move(bytes), markup);
  }
  Value list(std::vector<Value> items, Flavor flavor = Flavor::kList) {
    return make_list(budget, std::move(items), flavor);
  }
  Value attribute(const Value& object, std::string_view name);  // object.name
  Value item(const Value& object, const Value& key);            // object[key]
  Value call(const Value& function, Args args);
  Value call_native(const Native& native, const Value& self, Args args);
  Value make_namespace(DictItems attributes);
  std::tm now() const;

 private:
  enum class Flow { kNext, kBreak, kContinue };
  using ScopePtr = std::shared_ptr<Scope>;
  class Nested;
  class Inside;

  Value eval(const Expr& e);
  Value eval_name(const Expr& e);
  Value eval_dict(const Expr& e);
  Value eval_compare(const Expr& e);
  Value eval_concat(const Expr& e);
  Value eval_call(const Expr& e);
  Value eval_native(const Expr& e);
  Value eval_item(const Expr& e);
  std::vector<Value> eval_all(const std::vector<Expr>& kids);
  Args eval_arguments(const Expr& e);

  Value call_macro(const Callable& macro, Args args);
  Value call_loop(Loop& loop, const Args& args);
  Value make_macro(const Stmt& s);
  std::vector<Value> bind(const Native& native, const Value& self, Args args);

  Flow run(const Body& body);
  Flow run(const Stmt& s);
  Flow run_if(const Stmt& s);
  Flow run_for(const Stmt& s, std::vector<Value> items, int64_t depth0);
  Flow run_set_block(const Stmt& s);
  Flow run_filter_block(const Stmt& s);
  Flow run_with(const Stmt& s);
  void run_call_block(const Stmt& s);
  void run_generation(const Stmt& s);
  Flow capture(const Body& body, std::string& text);
  void emit(std::string_view piece);
  void assign(const Expr& target, const Value& value);

  const RenderOptions& options_;
  const Document& document_;
  size_t at_ = 0;  // of the node that is being evaluated
  int depth_ = 0, captures_ = 0;
  std::string* out_ = nullptr;
  ChatTemplate::Rendered rendered_;
  ScopePtr scope_;
  // Whatever may refer to itself, or to a chain of others of its kind: emptied one by one at the
  // end, so that they neither stay alive nor are destroyed recursively.
  std::vector<ScopePtr> scopes_;
  std::vector<std::shared_ptr<Namespace>> namespaces_;
  std::vector<std::shared_ptr<Loop>> loops_;
};

}  // namespace cohort::jinja
