// Evaluation of expressions and statements.
#include "data/template/interpreter.h"

#include <algorithm>

#include "data/template/natives.h"
#include "data/template/python.h"
#include "data/utf8.h"

namespace cohort::jinja {

// Counts nested evaluations.
class Interpreter::Nested {
 public:
  explicit Nested(Interpreter& in) : in_(in) {
    if (++in_.depth_ > in_.options_.limits.depth)
      throw Fault(str("evaluation is nested deeper than ", in_.options_.limits.depth));
  }
  ~Nested() { --in_.depth_; }
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;

 private:
  Interpreter& in_;
};

// Evaluates inside a new scope while it lives.
class Interpreter::Inside {
 public:
  Inside(Interpreter& in, ScopePtr parent) : in_(in), outside_(in.scope_) {
    in_.scope_ = std::make_shared<Scope>();
    in_.scope_->parent = std::move(parent);
  }
  ~Inside() {
    if (in_.scope_.use_count() > 1) in_.scopes_.push_back(in_.scope_);
    in_.scope_ = outside_;
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Interpreter& in_;
  ScopePtr outside_;
};

Interpreter::~Interpreter() {
  scope_.reset();
  for (const ScopePtr& scope : scopes_) scope->variables.clear();
  for (const auto& ns : namespaces_) ns->attributes.clear();
  for (const auto& loop : loops_) *loop = Loop{};
}

ChatTemplate::Rendered Interpreter::render(const Json& context) {
  scope_ = std::make_shared<Scope>();
  scopes_.push_back(scope_);
  for (const auto& [name, value] : context.as_object())
    scope_->variables.insert_or_assign(name, from_json(value));
  out_ = &rendered_.text;
  run(document_.body);
  return std::move(rendered_);
}

std::tm Interpreter::now() const {
  if (options_.now) return *options_.now;
  const std::time_t seconds = std::time(nullptr);
  std::tm local{};
  localtime_r(&seconds, &local);
  return local;
}

Value Interpreter::make_namespace(DictItems attributes) {
  budget.take(sizeof(Namespace) + attributes.size() * sizeof(attributes[0]));
  namespaces_.push_back(std::make_shared<Namespace>(Namespace{std::move(attributes)}));
  return Value(namespaces_.back());
}

// Expressions.

Value Interpreter::eval(const Expr& e) {
  const Nested nested(*this);
  budget.work(1);
  at_ = e.at;
  switch (e.kind) {
    case ExprKind::kConst:
      return e.value;
    case ExprKind::kName:
      return eval_name(e);
    case ExprKind::kTuple:
      return list(eval_all(e.kids), Flavor::kTuple);
    case ExprKind::kList:
      return list(eval_all(e.kids));
    case ExprKind::kDict:
      return eval_dict(e);
    case ExprKind::kConditional:
      if (truthy(eval(e.kids[1]))) return eval(e.kids[0]);
      if (e.kids.size() > 2) return eval(e.kids[2]);
      return Value::undefined("an inline if without else was false");
    case ExprKind::kOr:
    case ExprKind::kAnd: {
      Value left = eval(e.kids[0]);
      return truthy(left) == (e.kind == ExprKind::kOr) ? left : eval(e.kids[1]);
    }
    case ExprKind::kNot:
      return Value(!truthy(eval(e.kids[0])));
    case ExprKind::kCompare:
      return eval_compare(e);
    case ExprKind::kBinary: {
      const Value left = eval(e.kids[0]), right = eval(e.kids[1]);
      at_ = e.at;
      return binary(*this, e.op, left, right);
    }
    case ExprKind::kUnary: {
      const Value operand = eval(e.kids[0]);
      at_ = e.at;
      return unary(e.op, operand);
    }
    case ExprKind::kConcat:
      return eval_concat(e);
    case ExprKind::kAttribute: {
      const Value object = eval(e.kids[0]);
      at_ = e.at;
      return attribute(object, e.name);
    }
    case ExprKind::kItem:
      return eval_item(e);
    case ExprKind::kCall:
      return eval_call(e);
    case ExprKind::kFilter:
    case ExprKind::kTest:
      return eval_native(e);
    default:
      throw Fault("this expression cannot stand here");
  }
}

Value Interpreter::eval_name(const Expr& e) {
  for (const Scope* scope = scope_.get(); scope != nullptr; scope = scope->parent.get())
    if (const auto found = scope->variables.find(e.name); found != scope->variables.end())
      return found->second;
  if (const Native* global = find_global(e.name))
    return Value(std::make_shared<const Callable>(Callable{.native = global}));
  return Value::undefined("'" + e.name + "' is undefined");
}

std::vector<Value> Interpreter::eval_all(const std::vector<Expr>& kids) {
  std::vector<Value> values;
  values.reserve(kids.size());
  for (const Expr& kid : kids) values.push_back(eval(kid));
  return values;
}

Value Interpreter::eval_dict(const Expr& e) {
  DictItems items;
  for (size_t i = 0; i < e.kids.size(); i += 2) {
    Value key = eval(e.kids[i]), value = eval(e.kids[i + 1]);
    at_ = e.at;
    set_entry(budget, items, std::move(key), std::move(value));
  }
  return make_dict(budget, std::move(items));
}

Value Interpreter::eval_compare(const Expr& e) {
  Value left = eval(e.kids[0]);
  for (size_t i = 1; i < e.kids.size(); ++i) {
    Value right = eval(e.kids[i].kids[0]);
    at_ = e.kids[i].at;
    if (!compare(*this, e.kids[i].op, left, right)) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

Value Interpreter::eval_concat(const Expr& e) {
  const std::vector<Value> parts = eval_all(e.kids);
  at_ = e.at;
  std::string out;
  for (const Value& part : parts) budget.append(out, to_str(budget, part));
  return text(std::move(out));
}

Value Interpreter::eval_item(const Expr& e) {
  const Value object = eval(e.kids[0]);
  const Expr& key = e.kids[1];
  if (key.kind == ExprKind::kSlice) {
    const std::vector<Value> parts = eval_all(key.kids);
    at_ = e.at;
    return slice(budget, object, parts[0], parts[1], parts[2]);
  }
  const Value index = eval(key);
  at_ = e.at;
  return item(object, index);
}

Args Interpreter::eval_arguments(const Expr& e) {
  Args args;
  for (size_t i = 1; i < e.kids.size(); ++i) {
    const Expr& kid = e.kids[i];
    if (kid.kind == ExprKind::kKeyword) {
      args.keywords.emplace_back(kid.name, eval(kid.kids[0]));
    } else if (kid.kind == ExprKind::kSpread) {
      for (Value& value : iterate(budget, eval(kid.kids[0]))) args.values.push_back(value);
    } else if (kid.kind == ExprKind::kSpreadKeywords) {
      const Value value = eval(kid.kids[0]);
      if (value.dict() == nullptr) throw Fault("** needs a dict, got " + type_name(value));
      for (const auto& [key, v] : value.dict()->items) {
        if (key.text() == nullptr) throw Fault("the names of keyword arguments are texts");
        args.keywords.emplace_back(key.text()->bytes, v);
      }
    } else {
      args.values.push_back(eval(kid));
    }
  }
  std::vector<std::string_view> names;
  for (const auto& [name, value] : args.keywords) names.push_back(name);
  std::sort(names.begin(), names.end());
  const auto twin = std::adjacent_find(names.begin(), names.end());
  if (twin != names.end()) throw Fault(str("the argument '", *twin, "' is given twice"));
  return args;
}

Value Interpreter::eval_call(const Expr& e) {
  const Value function = eval(e.kids[0]);
  Args args = eval_arguments(e);
  at_ = e.at;
  return call(function, std::move(args));
}

Value Interpreter::eval_native(const Expr& e) {
  const Value self = eval(e.kids[0]);
  Args args = eval_arguments(e);
  at_ = e.at;
  if (e.native == nullptr)
    throw Fault(
        str("there is no ", e.kind == ExprKind::kTest ? "test " : "filter ", "'", e.name, "'"));
  return call_native(*e.native, self, std::move(args));
}

namespace {

std::optional<Value> loop_attribute(Loop& loop, std::string_view name) {
  const int64_t index = loop.index0;
  const auto neighbour = [](const std::optional<Value>& v, const char* missing) {
    return v ? *v : Value::undefined(missing);
  };
  if (name == "index0") return Value(index);
  if (name == "index") return Value(index + 1);
  if (name == "first") return Value(index == 0);
  if (name == "last") return Value(!loop.peek());
  if (name == "length") return Value(loop.count());
  if (name == "revindex") return Value(loop.count() - index);
  if (name == "revindex0") return Value(loop.count() - index - 1);
  if (name == "depth") return Value(loop.depth0 + 1);
  if (name == "depth0") return Value(loop.depth0);
  if (name == "previtem") return neighbour(loop.before, "there is no previous item");
  if (name == "nextitem") return neighbour(loop.peek(), "there is no next item");
  return {};
}

std::optional<Value> own_attribute(const Value& object, std::string_view name) {
  if (Loop* loop = object.loop())
    if (auto value = loop_attribute(*loop, name)) return value;
  if (const Namespace* ns = object.ns())
    for (const auto& [key, value] : ns->attributes)
      if (key.text()->bytes == name) return value;
  if (const Sequence* s = object.sequence(); s != nullptr && s->flavor == Flavor::kGroup) {
    if (name == "grouper") return s->items[0];
    if (name == "list") return s->items[1];
  }
  if (const Native* method = find_method(object, name))
    return Value(std::make_shared<const Callable>(Callable{.native = method, .self = object}));
  return {};
}

}  // namespace

Value Interpreter::attribute(const Value& object, std::string_view name) {
  if (object.is_undefined()) throw Fault(object.why());
  if (auto value = own_attribute(object, name)) return *value;
  if (const Dict* d = object.dict()) {
    budget.work(d->items.size());
    for (const auto& [key, value] : d->items)
      if (key.text() != nullptr && key.text()->bytes == name) return value;
  }
  return Value::undefined(str("a ", type_name(object), " has no attribute '", name, "'"));
}

Value Interpreter::item(const Value& object, const Value& key) {
  if (object.is_undefined()) throw Fault(object.why());
  if (auto value = find_item(budget, object, key)) return *value;
  const std::string name = key.text() != nullptr ? key.text()->bytes : "";
  if (!name.empty())
    if (auto value = own_attribute(object, name)) return *value;
  return Value::undefined(str("a ", type_name(object), " has no element ", repr(budget, key)));
}

// Calls.

Value Interpreter::call(const Value& function, Args args) {
  if (function.is_undefined()) throw Fault(function.why());
  if (Loop* loop = function.loop()) return call_loop(*loop, args);
  const Callable* callable = function.callable();
  if (callable == nullptr) throw Fault(str("a ", type_name(function), " cannot be called"));
  if (callable->native != nullptr)
    return call_native(*callable->native, callable->self, std::move(args));
  return call_macro(*callable, std::move(args));
}

// The arguments in the order of the parameters, after `self`.
std::vector<Value> Interpreter::bind(const Native& native, const Value& self, Args args) {
  std::vector<Value> bound{self};
  size_t given = 0, required = 0;
  bool optional = false;
  std::string_view rest = native.parameters;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(' '), rest.size());
    const std::string_view name = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (name == "|") {
      optional = true;
      continue;
    }
    required += optional ? 0 : 1;
    const auto keyword = std::find_if(args.keywords.begin(), args.keywords.end(),
                                      [&](const auto& k) { return k.first == name; });
    if (given < args.values.size()) {
      bound.push_back(std::move(args.values[given++]));
    } else if (keyword != args.keywords.end()) {
      bound.push_back(std::move(keyword->second));
      args.keywords.erase(keyword);
    } else if (!optional) {
      throw Fault(str("'", native.name, "' needs the argument '", name, "'"));
    } else {
      bound.emplace_back();
    }
  }
  if (!args.keywords.empty())
    throw Fault(str("'", native.name, "' takes no argument '", args.keywords[0].first, "'"));
  if (given < args.values.size()) throw Fault(str("'", native.name, "' takes fewer arguments"));
  return bound;
}

Value Interpreter::call_native(const Native& native, const Value& self, Args args) {
  budget.work(1);
  if (native.parameters == "...")
    args.values.insert(args.values.begin(), self);
  else
    args = {.values = bind(native, self, std::move(args)), .keywords = {}};
  return native.call(*this, args);
}

Value Interpreter::make_macro(const Stmt& s) {
  budget.take(sizeof(Callable) + sizeof(Scope));
  return Value(std::make_shared<const Callable>(Callable{.macro = &s, .scope = scope_}));
}

Value Interpreter::call_macro(const Callable& macro, Args args) {
  const Nested nested(*this);
  const Stmt& s = *macro.macro;
  const Inside inside(*this, macro.scope);
  auto& variables = scope_->variables;
  const auto take_keyword = [&](std::string_view name) {
    const auto found = std::find_if(args.keywords.begin(), args.keywords.end(),
                                    [&](const auto& k) { return k.first == name; });
    if (found == args.keywords.end()) return std::optional<Value>();
    std::optional<Value> value = std::move(found->second);
    args.keywords.erase(found);
    return value;
  };
  const auto is_parameter = [&](std::string_view name) {
    return std::any_of(s.exprs.begin(), s.exprs.end(),
                       [&](const Expr& p) { return p.kind == ExprKind::kName && p.name == name; });
  };
  size_t used = 0;
  std::vector<const Expr*> missing;
  for (const Expr& parameter : s.exprs) {
    if (parameter.kind != ExprKind::kName) continue;  // the call of a {% call %}
    if (used < args.values.size())
      variables[parameter.name] = std::move(args.values[used++]);
    else if (auto value = take_keyword(parameter.name))
      variables[parameter.name] = std::move(*value);
    else
      missing.push_back(&parameter);
  }
  if ((s.mentions & kCaller) && !is_parameter("caller"))
    variables["caller"] = take_keyword("caller").value_or(Value::undefined("No caller defined"));
  if ((s.mentions & kKwargs) && !is_parameter("kwargs")) {
    DictItems items;
    for (auto& [name, value] : args.keywords) items.emplace_back(text(name), std::move(value));
    variables["kwargs"] = make_dict(budget, std::move(items));
  } else if (!args.keywords.empty()) {
    throw Fault(str("the macro '", s.text, "' takes no argument '", args.keywords[0].first, "'"));
  }
  if ((s.mentions & kVarargs) && !is_parameter("varargs"))
    variables["varargs"] =
        list({args.values.begin() + static_cast<std::ptrdiff_t>(used), args.values.end()},
             Flavor::kTuple);
  else if (used < args.values.size())
    throw Fault(str("the macro '", s.text, "' takes at most ", used, " arguments"));
  for (const Expr* p : missing)
    variables[p->name] = p->kids.empty()
                             ? Value::undefined(str("parameter '", p->name, "' was not provided"))
                             : eval(p->kids[0]);
  std::string out;
  capture(s.bodies[0], out);
  return text(std::move(out));
}

// loop(items) of a recursive {% for %}.
Value Interpreter::call_loop(Loop& loop, const Args& args) {
  const Nested nested(*this);
  if (loop.recursive == nullptr) throw Fault("only a {% for ... recursive %} can be called");
  if (args.values.size() != 1 || !args.keywords.empty()) throw Fault("loop() takes one argument");
  const Stmt& s = *loop.recursive;
  const ScopePtr inside = std::exchange(scope_, loop.scope);
  std::string out, *const before = std::exchange(out_, &out);
  ++captures_;
  run_for(s, iterate(budget, args.values[0]), loop.depth0 + 1);
  --captures_;
  out_ = before;
  scope_ = inside;
  budget.give_back(out.size());
  return text(std::move(out));
}

// Statements.

void Interpreter::emit(std::string_view piece) {
  budget.take(piece.size());
  budget.append(*out_, piece);
}

// What a body prints.
Interpreter::Flow Interpreter::capture(const Body& body, std::string& text) {
  std::string* const outside = std::exchange(out_, &text);
  ++captures_;
  const Flow flow = run(body);
  --captures_;
  out_ = outside;
  budget.give_back(text.size());
  return flow;
}

Interpreter::Flow Interpreter::run(const Body& body) {
  const Nested nested(*this);
  for (const Stmt& s : body)
    if (const Flow flow = run(s); flow != Flow::kNext) return flow;
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run(const Stmt& s) {
  budget.work(1);
  at_ = s.at;
  switch (s.kind) {
    case StmtKind::kText:
      emit(s.text);
      return Flow::kNext;
    case StmtKind::kOutput:
      for (const Expr& e : s.exprs) {
        const Value value = eval(e);
        emit(value.text() != nullptr ? value.text()->bytes : to_str(budget, value));
      }
      return Flow::kNext;
    case StmtKind::kIf:
      return run_if(s);
    case StmtKind::kFor:
      if (s.recursive) {
        std::string out;
        Loop first;
        first.recursive = &s;
        first.scope = scope_;
        first.depth0 = -1;
        emit(call_loop(first, {.values = {eval(s.exprs[1])}, .keywords = {}}).text()->bytes);
        return Flow::kNext;
      }
      return run_for(s, iterate(budget, eval(s.exprs[1])), 0);
    case StmtKind::kSet:
      assign(s.exprs[0], eval(s.exprs[1]));
      return Flow::kNext;
    case StmtKind::kSetBlock:
      return run_set_block(s);
    case StmtKind::kFilterBlock:
      return run_filter_block(s);
    case StmtKind::kMacro:
      scope_->variables[s.text] = make_macro(s);
      return Flow::kNext;
    case StmtKind::kCallBlock:
      run_call_block(s);
      return Flow::kNext;
    case StmtKind::kWith:
      return run_with(s);
    case StmtKind::kScope: {
      const Inside inside(*this, scope_);
      return run(s.bodies[0]);
    }
    case StmtKind::kGeneration:
      run_generation(s);
      return Flow::kNext;
    case StmtKind::kBreak:
      return Flow::kBreak;
    case StmtKind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run_if(const Stmt& s) {
  for (size_t i = 0; i < s.exprs.size(); ++i)
    if (truthy(eval(s.exprs[i]))) return run(s.bodies[i]);
  return s.bodies.size() > s.exprs.size() ? run(s.bodies.back()) : Flow::kNext;
}

Interpreter::Flow Interpreter::run_for(const Stmt& s, std::vector<Value> items, int64_t depth0) {
  const ScopePtr outside = scope_;
  const auto loop = std::make_shared<Loop>();
  loop->charge = std::make_unique<Charge>(&budget, sizeof(Loop) + items.size() * sizeof(Value));
  loop->items = std::move(items);
  loop->depth0 = depth0;
  if (s.recursive) {
    loop->recursive = &s;
    loop->scope = outside;
  }
  if (s.exprs.size() > 2)
    loop->accept = [this, &s, outside](const Value& item) {
      const ScopePtr inside = std::exchange(scope_, outside);
      bool accepted = false;
      {
        const Inside test(*this, outside);
        assign(s.exprs[0], item);
        accepted = truthy(eval(s.exprs[2]));
      }
      scope_ = inside;
      return accepted;
    };
  // The loop may outlive its statement, in a namespace: see loops_.
  struct Keeper {
    Interpreter& in;
    const std::shared_ptr<Loop>& loop;
    ~Keeper() {
      if (loop.use_count() > 1) in.loops_.push_back(loop);
    }
  } const keeper{*this, loop};

  bool completed = false;
  while (loop->advance()) {
    const Inside inside(*this, outside);
    if (s.mentions & kLoop) scope_->variables["loop"] = Value(loop);
    assign(s.exprs[0], *loop->current);
    const Flow flow = run(s.bodies[0]);
    if (flow == Flow::kBreak) break;
    completed = completed || flow == Flow::kNext;
  }
  // As Jinja has it: also where the first pass was left by {% break %} or {% continue %}.
  if (completed || s.bodies.size() < 2) return Flow::kNext;
  const Inside inside(*this, outside);
  return run(s.bodies[1]);
}

Interpreter::Flow Interpreter::run_set_block(const Stmt& s) {
  Value value;
  {
    const Inside inside(*this, scope_);
    std::string out;
    if (const Flow flow = capture(s.bodies[0], out); flow != Flow::kNext) return flow;
    value = text(std::move(out));
    if (s.exprs.size() > 1) {
      scope_->variables[kCaptured] = value;
      value = eval(s.exprs[1]);
    }
  }
  assign(s.exprs[0], value);
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run_filter_block(const Stmt& s) {
  const Inside inside(*this, scope_);
  std::string out;
  if (const Flow flow = capture(s.bodies[0], out); flow != Flow::kNext) return flow;
  scope_->variables[kCaptured] = text(std::move(out));
  emit(to_str(budget, eval(s.exprs[0])));
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run_with(const Stmt& s) {
  std::vector<Value> values;
  for (size_t i = 1; i < s.exprs.size(); i += 2) values.push_back(eval(s.exprs[i]));
  const Inside inside(*this, scope_);
  for (size_t i = 0; i < values.size(); ++i) assign(s.exprs[2 * i], values[i]);
  return run(s.bodies[0]);
}

void Interpreter::run_call_block(const Stmt& s) {
  const Expr& e = s.exprs[0];
  const Value function = eval(e.kids[0]);
  Args args = eval_arguments(e);
  args.keywords.emplace_back("caller", make_macro(s));
  at_ = e.at;
  emit(to_str(budget, call(function, std::move(args))));
}

void Interpreter::run_generation(const Stmt& s) {
  const Inside inside(*this, scope_);
  const size_t begin = out_->size();
  run(s.bodies[0]);
  if (captures_ == 0) rendered_.generation_spans.emplace_back(begin, out_->size());
}

void Interpreter::assign(const Expr& target, const Value& value) {
  if (target.kind == ExprKind::kName) {
    scope_->variables[target.name] = value;
  } else if (target.kind == ExprKind::kNamespaceField) {
    const Value object = eval(target.kids[0]);
    at_ = target.at;
    if (object.ns() == nullptr)
      throw Fault(
          str("cannot assign to an attribute of a ", type_name(object), ", which is no namespace"));
    set_entry(budget, object.ns()->attributes, text(target.name), value);
  } else {
    const std::vector<Value> values = iterate(budget, value);
    at_ = target.at;
    if (values.size() != target.kids.size())
      throw Fault(str("expected ", target.kids.size(), " values, got ", values.size()));
    for (size_t i = 0; i < values.size(); ++i) assign(target.kids[i], values[i]);
  }
}

}  // namespace cohort::jinja
