// The evaluation of a template: its tree is walked, statement by statement.
#include "data/template/interpreter.h"

#include <algorithm>

#include "data/utf8.h"

namespace cohort::jinja {

// Counts evaluations inside each other, which are recursive here too.
class Interpreter::Nested {
 public:
  explicit Nested(Interpreter& in) : in_(in) {
    if (in_.depth_ >= in_.options_.limits.depth)
      throw Fault(str("evaluations are nested deeper than ", in_.options_.limits.depth));
    ++in_.depth_;
  }
  ~Nested() { --in_.depth_; }
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;

 private:
  Interpreter& in_;
};

// Who makes an object that values may go on to refer to.
template <class T>
struct Interpreter::Owner {
  ~Owner() {
    if (object.use_count() > 1) in.kept_.push_back(std::move(object));
  }
  Interpreter& in;
  std::shared_ptr<T> object;
};

// A scope of its own for as long as the object lives.
class Interpreter::Inside {
 public:
  Inside(Interpreter& in, std::shared_ptr<Scope> parent)
      : owner_{in, std::make_shared<Scope>(&in, std::move(parent))},
        outside_(std::exchange(in.scope_, owner_.object)) {}
  ~Inside() { owner_.in.scope_ = std::move(outside_); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Owner<Scope> owner_;
  std::shared_ptr<Scope> outside_;
};

Interpreter::~Interpreter() {
  for (const auto& object : kept_) object->clear();
}

ChatTemplate::Rendered Interpreter::render(const Document& document, const Json& context) {
  const Inside inside(*this, nullptr);
  for (const auto& [name, value] : context.as_object()) scope_->set(name, from_json(value));
  run(document.body);
  return std::move(rendered_);
}

std::shared_ptr<Scope> Interpreter::make_namespace() {
  auto made = std::make_shared<Scope>(this, nullptr);
  kept_.push_back(made);
  return made;
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
  try {
    const Nested nested(*this);
    const Charge charge(this, e.kids.size() * sizeof(Args));  // what is evaluated and not yet used
    work(1);
    return eval_node(e);
  } catch (Fault& fault) {
    if (fault.at == Fault::kNowhere) fault.at = e.at;
    throw;
  }
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
      const std::vector<Value> values = eval_all(e);
      Entries entries;
      for (size_t i = 0; i < values.size(); i += 2)
        set_entry(*this, entries, values[i], values[i + 1]);
      return dict(std::move(entries));
    }
    case Kind::kConditional:
      return kid(truthy(kid(1)) ? 0 : 2);
    case Kind::kOr:
    case Kind::kAnd: {
      Value first = kid(0);
      return truthy(first) == (e.kind == Kind::kOr) ? first : kid(1);
    }
    case Kind::kNot:
      return !truthy(kid(0));
    case Kind::kCompare:
      return eval_compare(e);
    case Kind::kBinary: {
      const Value left = kid(0);
      return e.op->apply(*this, left, kid(1));
    }
    case Kind::kSign:
      return find_operator(Level::kProduct, "*")->apply(*this, e.value, checked_number(kid(0)));
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
    case Kind::kTest:
      return eval_native(e);
    default:
      run_statement(e);
      return {};
  }
}

std::vector<Value> Interpreter::eval_all(const Node& e) {
  std::vector<Value> values;
  for (const Node& kid : e.kids) values.push_back(eval(kid));
  return values;
}

Value Interpreter::eval_name(std::string_view name) {
  for (const Scope* scope = scope_.get(); scope != nullptr; scope = scope->parent.get()) {
    work(1);
    if (const auto found = scope->variables.find(name); found != scope->variables.end())
      return found->second;
  }
  const auto function = std::make_shared<Function>();
  function->native = find_native(globals_table(), name);
  if (function->native != nullptr) return function;
  return Value::undefined(str("'", name, "' is undefined"));
}

// a < b < c: whether all hold, each operand being evaluated once, and none after one that fails.
Value Interpreter::eval_compare(const Node& e) {
  Value left = eval(e.kids[0]), result;
  for (size_t i = 1; i < e.kids.size(); ++i) {
    Value right = eval(e.kids[i].kids[0]);
    result = e.kids[i].op->apply(*this, left, right);
    if (!truthy(result)) break;
    left = std::move(right);
  }
  return result;
}

Value Interpreter::eval_native(const Node& e) {
  const Value self = eval(e.kids[0]);
  if (e.native == nullptr)
    throw Fault(str("there is no ", e.kind == Kind::kTest ? "test '" : "filter '", e.name, "'"));
  return call_native(*e.native, self, arguments(e));
}

Args Interpreter::arguments(const Node& call) {
  Args args;
  for (size_t i = 1; i < call.kids.size(); ++i) {
    const Node& kid = call.kids[i];
    if (kid.kind == Kind::kKeyword) {
      args.keywords.emplace_back(kid.name, eval(kid.kids[0]));
    } else if (kid.kind == Kind::kSpread) {
      const Items items(*this, eval(kid.kids[0]));
      args.values.insert(args.values.end(), items.begin(), items.end());
    } else {
      args.values.push_back(eval(kid));
    }
  }
  return args;
}

Value Interpreter::attribute(const Value& object, std::string_view name) {
  if (object.is<Undefined>()) throw Fault(object.why());
  if (const Scope* ns = object.object<Scope>())
    if (const auto found = ns->variables.find(name); found != ns->variables.end())
      return found->second;
  if (const Native* native = find_native(methods_of(object), name)) {
    // What is no method is a property: it has no parentheses.
    if (native->parameters == "property") return call_native(*native, object, {});
    const auto method = std::make_shared<Function>();
    method->native = native;
    method->self = object;
    method->depth = object.depth() + 1;
    return method;
  }
  if (const Dict* d = object.dict()) {
    work(d->entries.size());
    for (const auto& [key, value] : d->entries)
      if (key.text() != nullptr && key.text()->bytes == name) return value;
  }
  return Value::undefined(str("a ", type_name(object), " has no attribute '", name, "'"));
}

Value Interpreter::item(const Value& object, const Value& key) {
  if (object.is<Undefined>()) throw Fault(object.why());
  if (auto value = find_item(*this, object, key)) return *value;
  if (key.text() != nullptr) return attribute(object, key.text()->bytes);
  return Value::undefined(str("a ", type_name(object), " has no element ", repr(*this, key)));
}

// Calls.

Value Args::take(std::string_view name) {
  const auto found = std::find_if(keywords.begin(), keywords.end(),
                                  [&](const auto& keyword) { return keyword.first == name; });
  if (found == keywords.end()) return {};
  Value value = std::move(found->second);
  keywords.erase(found);
  return value;
}

Value Interpreter::call(const Value& value, Args args) {
  if (value.is<Undefined>()) throw Fault(value.why());
  const Function* function = value.object<Function>();
  if (function == nullptr) throw Fault(str("a ", type_name(value), " cannot be called"));
  if (function->native != nullptr)
    return call_native(*function->native, function->self, std::move(args));
  return call_macro(*function->macro, function->scope, std::move(args));
}

Value Interpreter::call_native(const Native& native, const Value& self, Args args) {
  work(1);
  Call call{*this, {self}, {}};
  if (native.parameters == "...") {
    call.rest = std::move(args);
    return native.apply(call);
  }
  size_t used = 0;
  bool optional = false;
  for (std::string_view rest = native.parameters; !rest.empty();) {
    const std::string_view name = rest.substr(0, rest.find(' '));
    rest.remove_prefix(std::min(name.size() + 1, rest.size()));
    if (name == "|") {
      optional = true;
      continue;
    }
    call.args.push_back(used < args.values.size() ? args.values[used++] : args.take(name));
    if (!optional && call.args.back().absent() && name != "property")
      throw Fault(str("'", native.name, "' needs the argument '", name, "'"));
  }
  if (used < args.values.size() || !args.keywords.empty())
    throw Fault(str("'", native.name, "' takes fewer arguments",
                    args.keywords.empty() ? "" : ", and none is '" + args.keywords[0].first + "'"));
  return native.apply(call);
}

Value Interpreter::make_macro(const Node& s) {
  const auto function = std::make_shared<Function>();
  function->macro = &s;
  function->scope = scope_;
  return function;
}

Value Interpreter::call_macro(const Node& macro, const std::shared_ptr<Scope>& outside, Args args) {
  const Inside inside(*this, outside);
  const std::span parameters = std::span(macro.kids).first(macro.kids.size() - 1);
  size_t used = 0;
  std::vector<const Node*> missing;
  for (const Node& parameter : parameters) {
    Value value = used < args.values.size() ? args.values[used++] : args.take(parameter.name);
    if (value.absent() && !parameter.kids.empty()) missing.push_back(&parameter);
    if (value.absent()) value = Value::undefined(str("'", parameter.name, "' was not given"));
    scope_->set(parameter.name, std::move(value));
  }
  if (const Value caller = args.take("caller"); !caller.absent()) scope_->set("caller", caller);
  if (used < args.values.size() || !args.keywords.empty())
    throw Fault(str("the macro '", macro.name, "' does not take all these arguments"));
  // Defaults may refer to other parameters.
  for (const Node* p : missing) scope_->set(p->name, eval(p->kids[0]));
  const Value printed = capture(macro.kids.back());
  flow_ = Flow::kNext;
  return printed;
}

// Statements.

void Interpreter::emit(std::string_view piece) {
  take(piece.size());
  append(*out_, piece);
}

// What a body prints.
Value Interpreter::capture(const Node& body) {
  std::string printed;
  std::string* const outside = std::exchange(out_, &printed);
  ++captures_;
  run(body);
  --captures_;
  out_ = outside;
  give_back(printed.size());
  return text(printed);
}

// Leaves in flow_ how the body is left.
void Interpreter::run(const Node& body) {
  flow_ = Flow::kNext;
  for (size_t i = 0; i < body.kids.size() && flow_ == Flow::kNext; ++i) eval(body.kids[i]);
}

void Interpreter::run_statement(const Node& s) {
  const auto& kids = s.kids;
  switch (s.kind) {
    case Kind::kText:
      return emit(s.name);
    case Kind::kOutput:
      return emit(to_str(*this, eval(kids[0])));
    case Kind::kIf:
      for (size_t i = 0; i + 1 < kids.size(); i += 2)
        if (truthy(eval(kids[i]))) return run(kids[i + 1]);
      return run(kids.back());
    case Kind::kFor:
      return run_for(s);
    case Kind::kSet:
      return assign(kids[0], eval(kids[1]));
    case Kind::kSetBlock:
    case Kind::kFilterBlock: {
      const Value value = run_block(kids[1], kids[2]);
      if (flow_ != Flow::kNext) return;
      return s.kind == Kind::kSetBlock ? assign(kids[0], value) : emit(to_str(*this, value));
    }
    case Kind::kMacro:
      return scope_->set(s.name, make_macro(s));
    case Kind::kCallBlock: {
      const Value function = eval(kids[0].kids[0]);
      Args args = arguments(kids[0]);
      args.keywords.emplace_back("caller", make_macro(kids[1]));
      return emit(to_str(*this, call(function, std::move(args))));
    }
    case Kind::kGeneration: {
      const Inside inside(*this, scope_);
      const size_t begin = out_->size();
      run(kids[0]);
      if (captures_ == 0) rendered_.generation_spans.emplace_back(begin, out_->size());
      return;
    }
    default:  // kBreak and kContinue
      flow_ = s.kind == Kind::kBreak ? Flow::kBreak : Flow::kContinue;
  }
}

void Interpreter::run_for(const Node& s) {
  const Node &target = s.kids[0], &condition = s.kids[2];
  const std::shared_ptr<Scope> outside = scope_;
  const Owner<Loop> owner{*this, std::make_shared<Loop>()};
  Loop& loop = *owner.object;
  loop.list = Items(*this, eval(s.kids[1])).list();
  const bool tells_loop = s.mentions_loop;
  const bool filters = condition.kind != Kind::kConst || !condition.value.absent();
  if (filters && tells_loop) {
    // `loop` counts the items that pass, so all of them are tested before the first pass.
    std::vector<Value> passed;
    for (const Value& item : loop.list->items) {
      const Inside inside(*this, outside);
      assign(target, item);
      if (truthy(eval(condition))) passed.push_back(item);
    }
    loop.list = list(std::move(passed)).shared_list();
  }
  loop.depth = loop.list->depth + 1;
  bool completed = false;
  for (size_t i = 0; i < loop.list->items.size(); ++i) {
    loop.index = i;
    const Inside inside(*this, outside);
    if (tells_loop) scope_->set("loop", owner.object);
    assign(target, loop.list->items[i]);
    if (filters && !tells_loop && !truthy(eval(condition))) continue;
    run(s.kids[3]);
    completed = completed || flow_ == Flow::kNext;
    if (std::exchange(flow_, Flow::kNext) == Flow::kBreak) break;
  }
  // As Jinja has it: also where the first pass was left by {% break %} or {% continue %}.
  if (completed) return;
  const Inside inside(*this, outside);
  run(s.kids[4]);
}

// What a body prints, through filters.
Value Interpreter::run_block(const Node& body, const Node& filters) {
  const Inside inside(*this, scope_);
  scope_->set(kCaptured, capture(body));
  return flow_ == Flow::kNext ? eval(filters) : Value();
}

void Interpreter::assign(const Node& target, const Value& value) {
  if (target.kind == Kind::kName) {
    scope_->set(target.name, value);
  } else if (target.kind == Kind::kField) {
    const Value object = eval(target.kids[0]);
    Scope* const ns = object.object<Scope>();
    if (ns == nullptr)
      throw Fault(
          str("cannot assign to a field of a ", type_name(object), ", only of a namespace"));
    ns->set(target.name, value);
  } else {
    const Items values(*this, value);
    if (values.size() != target.kids.size())
      throw Fault(str("expected ", target.kids.size(), " values, got ", values.size()));
    for (size_t i = 0; i < values.size(); ++i) assign(target.kids[i], values[i]);
  }
}

}  // namespace cohort::jinja
