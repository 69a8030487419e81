// The evaluation of a template: its tree is walked. A Fault ends the rendering, so nothing is put
// back when one is thrown.
#include "data/template/interpreter.h"

#include <algorithm>

#include "data/utf8.h"

namespace cohort::jinja {

ChatTemplate::Rendered Interpreter::render(const Document& document, const Json& context) {
  enter(nullptr);
  for (const Native& native : globals_table())
    set(*scope_, native.names, make(Function{.native = &native}));
  for (const auto& [name, value] : context.as_object()) set(*scope_, name, from_json(value));
  run(document.body);
  return std::move(rendered_);
}

std::tm Interpreter::now() const {
  if (options_.now) return *options_.now;
  const std::time_t seconds = std::time(nullptr);
  std::tm local{};
  localtime_r(&seconds, &local);
  return local;
}

// Expressions.

Value Interpreter::eval(const Node& e) {
  return located([&] { return e.at; },
                 [&] {
                   const Nested nested(*this);
                   work(1);
                   return eval_node(e);
                 });
}

Value Interpreter::eval_node(const Node& e) {
  const auto kid = [&](size_t i) { return eval(e.kids[i]); };
  switch (e.kind) {
    case Kind::kConst:
      return e.value;
    case Kind::kName:
      return eval_name(e.name);
    case Kind::kTuple:
      return list(eval_all(e), Flavor::kTuple);
    case Kind::kList:
      return list(eval_all(e));
    case Kind::kDict: {
      Entries entries;
      for (size_t i = 0; i < e.kids.size(); i += 2) {
        const Value key = kid(i);
        set_entry(*this, entries, key, kid(i + 1));
      }
      return dict(std::move(entries));
    }
    case Kind::kIf:
      for (size_t i = 0; i + 1 < e.kids.size(); i += 2)
        if (truthy(kid(i))) return kid(i + 1);
      return kid(e.kids.size() - 1);
    case Kind::kNot:
      return !truthy(kid(0));
    case Kind::kChain:
      return eval_chain(e);
    case Kind::kSign:
      return operate(*this, Level::kProduct, "*", e.value, checked_number(kid(0)));
    case Kind::kAttribute:
      return attribute(kid(0), e.name);
    case Kind::kItem: {
      const Value object = kid(0);
      return item(object, kid(1));
    }
    case Kind::kSlice: {
      const std::vector<Value> parts = eval_all(e);
      return slice(*this, parts[0], {parts[1], parts[2], parts[3]});
    }
    case Kind::kCall: {
      const Value function = kid(0);
      return call(function, arguments(e));
    }
    case Kind::kFilter:
    case Kind::kTest: {
      const Value self = kid(0);
      if (e.native != nullptr) return call_native(*e.native, self, arguments(e));
      throw Fault(str("there is no ", e.kind == Kind::kTest ? "test '" : "filter '", e.name, "'"));
    }
    case Kind::kMacro:
      return make(Function{.macro = &e, .scope = scope_});
    case Kind::kCapture:
      return capture(e.kids[0]);
    case Kind::kBody:
      run(e);
      break;
    case Kind::kFor:
      run_for(e);
      break;
    case Kind::kSet:
      assign(e.kids[0], kid(1));
      break;
    case Kind::kGeneration:
      run_generation(e);
      break;
    default:  // kBreak and kContinue; kKeyword and kSpread are seen by arguments() only
      flow_ = e.kind == Kind::kBreak ? Flow::kBreak : Flow::kContinue;
  }
  return {};
}

std::vector<Value> Interpreter::eval_all(const Node& e) {
  std::vector<Value> values;
  for (const Node& kid : e.kids) values.push_back(eval(kid));
  return values;
}

Value Interpreter::eval_name(std::string_view name) {
  for (const Scope* scope = scope_; scope != nullptr; scope = scope->parent) {
    work(1);
    if (const auto found = scope->variables.find(name); found != scope->variables.end())
      return found->second;
  }
  return undefined(str("'", name, "' is undefined"));
}

// a + b - c, a or b, or a < b < c: there, whether all hold. Each operand is evaluated once at most,
// and none after one that decides.
Value Interpreter::eval_chain(const Node& e) {
  const Level level = e.op->level;
  Value left = eval(e.kids[0]), result = level == Level::kComparison ? true : left;
  for (size_t i = 1; i < e.kids.size(); ++i) {
    const Node& operand = e.kids[i];
    if (level < Level::kSum && truthy(result) == (level == Level::kOr)) break;
    const Value right = eval(operand.kids[0]);
    result = located([&] { return operand.at; },
                     [&] {
                       return operand.op->apply == nullptr ? right
                                                           : operand.op->apply(*this, left, right);
                     });
    left = level == Level::kComparison ? right : result;
  }
  return result;
}

Value Interpreter::attribute(const Value& object, std::string_view name) {
  if (object.is<Undefined>()) throw Fault(why_undefined(object));
  if (const Scope* ns = object.as<Scope*>())
    if (const auto found = ns->variables.find(name); found != ns->variables.end())
      return found->second;
  if (const Native* native = find_native(methods_of(object), name))
    return make(Function{.native = native, .self = object});
  if (const Loop* loop = object.as<Loop*>())
    if (const Value field = loop_field(*loop, name); !field.absent()) return field;
  if (object.dict() != nullptr)
    if (const auto found = find_item(*this, object, name)) return *found;
  return undefined(str("a ", type_name(object), " has no attribute '", name, "'"));
}

Value Interpreter::item(const Value& object, const Value& key) {
  if (object.is<Undefined>()) throw Fault(why_undefined(object));
  if (const auto value = find_item(*this, object, key)) return *value;
  if (key.is_text()) return attribute(object, key.text());
  std::string name;
  write(*this, name, key, {});
  return undefined(str("a ", type_name(object), " has no element ", name));
}

// Calls.

Args Interpreter::arguments(const Node& call) {
  Args args;
  for (size_t i = 1; i < call.kids.size(); ++i) {
    const Node& kid = call.kids[i];
    if (kid.kind == Kind::kKeyword) {
      args.keywords.emplace_back(kid.name, eval(kid.kids[0]));
    } else if (kid.kind == Kind::kSpread) {
      const auto& items = items_of(*this, eval(kid.kids[0]));
      args.values.insert(args.values.end(), items.begin(), items.end());
    } else {
      args.values.push_back(eval(kid));
    }
  }
  return args;
}

Value take(Keywords& keywords, std::string_view name) {
  const auto found = std::find_if(keywords.begin(), keywords.end(),
                                  [&](const auto& keyword) { return keyword.first == name; });
  if (found == keywords.end()) return {};
  const Value value = found->second;
  keywords.erase(found);
  return value;
}

void Args::expect_none(std::string_view callee) const {
  if (used < values.size() || !keywords.empty())
    throw Fault(str("'", callee, "' takes fewer arguments",
                    keywords.empty() ? "" : str(", and none is '", keywords[0].first, "'")));
}

Value Interpreter::call(const Value& value, Args args) {
  if (value.is<Undefined>()) throw Fault(why_undefined(value));
  const Function* function = value.as<const Function*>();
  if (function == nullptr) throw Fault(str("a ", type_name(value), " cannot be called"));
  if (function->macro != nullptr) return call_macro(*function, std::move(args));
  return call_native(*function->native, function->self, std::move(args));
}

Value Interpreter::call_native(const Native& native, const Value& self, Args args) {
  work(1 + self.text().size() / 64);
  Call call{*this, {self}};
  if (native.parameters == "...") {
    call.args.insert(call.args.end(), args.values.begin(), args.values.end());
    call.keywords = std::move(args.keywords);
    return native.apply(call);
  }
  for (std::string_view rest = native.parameters; !rest.empty();) {
    std::string_view name = take_word(rest);
    const bool optional = name[0] == '?';
    name.remove_prefix(optional ? 1 : 0);
    call.args.push_back(args.next(name));
    if (!optional && call.args.back().absent())
      throw Fault(str("'", native.names, "' needs the argument '", name, "'"));
  }
  args.expect_none(native.names);
  return native.apply(call);
}

Value Interpreter::call_macro(const Function& function, Args args) {
  const Node& macro = *function.macro;
  Scope* const outside = scope_;
  enter(function.scope);
  std::vector<const Node*> missing;
  for (const Node& parameter : std::span(macro.kids).first(macro.kids.size() - 1)) {
    Value value = args.next(parameter.name);
    if (value.absent() && !parameter.kids.empty()) missing.push_back(&parameter);
    if (value.absent()) value = undefined(str("'", parameter.name, "' was not given"));
    set(*scope_, parameter.name, value);
  }
  if (const Value caller = take(args.keywords, "caller"); !caller.absent())
    set(*scope_, "caller", caller);
  args.expect_none(macro.name);
  // Defaults may refer to other parameters.
  for (const Node* p : missing) set(*scope_, p->name, eval(p->kids[0]));
  const Value printed = capture(macro.kids.back());
  scope_ = outside;
  return printed;
}

// Statements.

// Leaves in flow_ how the body is left.
void Interpreter::run(const Node& body) {
  for (size_t i = 0; i < body.kids.size() && flow_ == Flow::kNext; ++i)
    print(*this, *out_, eval(body.kids[i]));
}

// What a body prints.
Value Interpreter::capture(const Node& body) {
  std::string printed;
  std::string* const outside = std::exchange(out_, &printed);
  ++captures_;
  run(body);
  --captures_;
  out_ = outside;
  return text(std::move(printed));
}

void Interpreter::run_for(const Node& s) {
  const Node &target = s.kids[0], &condition = s.kids[2];
  Scope* const outside = scope_;
  const std::vector<Value>* items = &items_of(*this, eval(s.kids[1]));
  if (condition.kind != Kind::kBody) {
    // `loop` counts the items that pass, so all of them are tested before the first pass.
    std::vector<Value> passed;
    for (const Value& item : *items) {
      enter(outside);
      assign(target, item);
      if (truthy(eval(condition))) passed.push_back(item);
    }
    items = &list(std::move(passed)).list()->items;
  }
  Loop* const loop = make(Loop{*items});
  bool completed = false;
  for (size_t i = 0; i < items->size(); ++i) {
    loop->index = i;
    enter(outside);
    set(*scope_, "loop", loop);
    assign(target, (*items)[i]);
    run(s.kids[3]);
    completed = completed || flow_ == Flow::kNext;
    if (std::exchange(flow_, Flow::kNext) == Flow::kBreak) break;
  }
  // As Jinja has it: also where the first pass was left by {% break %} or {% continue %}.
  if (!completed) {
    enter(outside);
    run(s.kids[4]);
  }
  scope_ = outside;
}

void Interpreter::run_generation(const Node& s) {
  Scope* const outside = scope_;
  enter(outside);
  const size_t begin = out_->size();
  run(s.kids[0]);
  if (captures_ == 0) rendered_.generation_spans.emplace_back(begin, out_->size());
  scope_ = outside;
}

void Interpreter::set(Scope& scope, std::string_view name, const Value& value) {
  work(6);  // an entry of the map takes some 90 bytes
  scope.variables[name] = value;
}

void Interpreter::assign(const Node& target, const Value& value) {
  if (target.kind == Kind::kName) {
    set(*scope_, target.name, value);
  } else if (target.kind == Kind::kAttribute) {
    const Value object = eval(target.kids[0]);
    Scope* const ns = object.as<Scope*>();
    if (ns == nullptr)
      throw Fault(
          str("cannot assign to a field of a ", type_name(object), ", only of a namespace"));
    set(*ns, target.name, value);
  } else {
    const auto& values = items_of(*this, value);
    if (values.size() != target.kids.size())
      throw Fault(str("expected ", target.kids.size(), " values, got ", values.size()));
    for (size_t i = 0; i < values.size(); ++i) assign(target.kids[i], values[i]);
  }
}

}  // namespace cohort::jinja
