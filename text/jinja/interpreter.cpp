// Rendering of a template by its compiled code. A TemplateError ends the rendering, so state is not
// restored when one is thrown.
#include "text/jinja/interpreter.h"

#include <algorithm>

#include "text/utf8.h"

namespace cohort::jinja {

ChatTemplate::Rendered Interpreter::render(const Document& document, const Json& context) {
  enter(nullptr);
  for (const Native& native : kGlobalTable) set(native.names, make(Function{.native = &native}));
  for (const auto& [name, value] : context.as_object()) set(name, from_json(value));
  document.body(*this);
  return std::move(rendered_);
}

std::tm Interpreter::now() const {
  if (options_.now) return *options_.now;
  const std::time_t seconds = std::time(nullptr);
  std::tm local{};
  localtime_r(&seconds, &local);
  return local;
}

Value Code::operator()(Interpreter& in, const Value& left) const {
  try {
    const Nested nested(in);
    in.work(1);
    return (*function_)(in, left);
  } catch (TemplateError& error) {
    if (error.at == TemplateError::kUnknown) error.at = at_;
    throw;
  }
}

// Variables.

Value Interpreter::variable(std::string_view name) {
  for (Scope* scope = scope_; scope != nullptr; scope = scope->parent) {
    work(1 + scope->variables.size() / 16);
    if (const Value* value = scope->find(name)) return *value;
  }
  return undefined(str("'", name, "' is undefined"));
}

Value Interpreter::set(Scope& scope, std::string_view name, const Value& value) {
  auto& variables = scope.variables;
  work(1 + variables.size() / 16);
  if (Value* const known = scope.find(name)) {
    *known = value;
  } else {
    if (variables.size() == variables.capacity()) work(8 + 6 * variables.size());  // doubling
    variables.emplace_back(name, value);
  }
  return {};
}

Value Interpreter::set_field(const Value& object, std::string_view name, const Value& value) {
  if (!object.is<Scope*>())
    throw TemplateError(
        str("cannot assign to a field of a ", type_name(object), ", only of a namespace"));
  return set(*object.as<Scope*>(), name, value);
}

Value Interpreter::attribute(const Value& object, std::string_view name) {
  check_defined(object);
  if (Scope* const ns = object.as<Scope*>())
    if (const Value* field = ns->find(name)) return *field;
  if (const Native* native = find_native(methods_of(object), name))
    return make(Function{.native = native, .self = object});
  if (const Loop* loop = object.as<Loop*>())
    if (const Value field = loop_field(*loop, name); !field.absent()) return field;
  if (object.dict() != nullptr)
    if (const auto found = find_item(*this, object, name)) return *found;
  return undefined(str("a ", type_name(object), " has no attribute '", name, "'"));
}

Value Interpreter::item(const Value& object, const Value& key) {
  check_defined(object);
  if (const auto value = find_item(*this, object, key)) return *value;
  if (key.is_text()) return attribute(object, key.text());
  std::string name;
  write(*this, name, key, {});
  return undefined(str("a ", type_name(object), " has no element ", name));
}

// Calls.

namespace {

// Removes and returns the first of `words`, which are separated by single spaces.
std::string_view take_word(std::string_view& words) {
  const std::string_view word = words.substr(0, words.find(' '));
  words.remove_prefix(std::min(word.size() + 1, words.size()));
  return word;
}

}  // namespace

const Native* find_native(Natives natives, std::string_view name) {
  for (const Native& native : natives)
    for (std::string_view names = native.names; !names.empty();)
      if (take_word(names) == name) return &native;
  return nullptr;
}

Args Interpreter::evaluate(const Arguments& arguments) {
  Args args;
  for (const Argument& argument : arguments) {
    const Value value = argument.value(*this);
    if (!argument.name.empty()) {
      args.keywords.emplace_back(argument.name, value);
    } else if (argument.spread) {
      const auto& items = items_of(*this, value);
      args.values.insert(args.values.end(), items.begin(), items.end());
    } else {
      args.values.push_back(value);
    }
  }
  return args;
}

Value take(Keywords& keywords, std::string_view name) {
  const auto found = std::ranges::find(keywords, name, &Keywords::value_type::first);
  if (found == keywords.end()) return {};
  const Value value = found->second;
  keywords.erase(found);
  return value;
}

void Args::expect_none(std::string_view callee) const {
  if (num_used < values.size() || !keywords.empty())
    throw TemplateError(
        str("'", callee, "' got too many arguments",
            keywords.empty() ? "" : str(", or an unknown one: '", keywords[0].first, "'")));
}

Value Interpreter::call(const Value& value, Args args) {
  check_defined(value);
  const Function* function = value.as<const Function*>();
  if (function == nullptr) throw TemplateError(str("a ", type_name(value), " cannot be called"));
  if (function->macro != nullptr) return call_macro(*function, std::move(args));
  return call_native(*function->native, function->self, std::move(args));
}

Value Interpreter::call_native(const Native& native, const Value& self, Args args) {
  const Nested nested(*this);
  work(1 + 4 * (args.values.size() + args.keywords.size()));  // for the copies
  Call call{*this, {self}};
  if (native.parameters == "...") {
    call.args.insert(call.args.end(), args.values.begin(), args.values.end());
    call.keywords = std::exchange(args.keywords, {});
    args.num_used = args.values.size();
  }
  for (std::string_view rest = native.parameters; !rest.empty() && rest != "...";) {
    std::string_view name = take_word(rest);
    const bool optional = name[0] == '?';
    name.remove_prefix(optional ? 1 : 0);
    call.args.push_back(args.next(name));
    if (!optional && call.args.back().absent())
      throw TemplateError(str("'", native.names, "' needs the argument '", name, "'"));
  }
  args.expect_none(native.names);
  // Natives read their texts, and may sort the characters of the arguments after `self`.
  work(self.text().size() / 64);
  for (size_t i = 1; i < call.args.size(); ++i) work(call.args[i].text().size() / 8);
  return native.apply(call);
}

Value Interpreter::make_macro(const Macro& macro) {
  for (Scope* scope = scope_; scope != nullptr; scope = scope->parent) scope->is_shared = true;
  return make(Function{.macro = &macro, .scope = scope_});
}

Value Interpreter::call_macro(const Function& function, Args args) {
  const Macro& macro = *function.macro;
  Scope* const outside = scope_;
  enter(function.scope);
  std::vector<const Argument*> missing;
  for (const Argument& parameter : macro.parameters) {
    Value value = args.next(parameter.name);
    if (value.absent() && parameter.value) missing.push_back(&parameter);
    if (value.absent()) value = undefined(str("'", parameter.name, "' was not given"));
    set(parameter.name, value);
  }
  if (const Value caller = take(args.keywords, "caller"); !caller.absent()) set("caller", caller);
  args.expect_none(macro.name);
  // Defaults may refer to other parameters.
  for (const Argument* parameter : missing) set(parameter->name, parameter->value(*this));
  const Value printed = capture(macro.body);
  scope_ = outside;
  return printed;
}

// Statements.

Value Interpreter::run(const std::vector<Code>& statements) {
  for (size_t i = 0; i < statements.size() && flow_ == Flow::kNext; ++i)
    print(*this, *out_, statements[i](*this));
  return {};
}

Value Interpreter::capture(const Code& body) {
  std::string printed;
  std::string* const outside = std::exchange(out_, &printed);
  ++captures_;
  body(*this);
  --captures_;
  out_ = outside;
  return text(std::move(printed));
}

Value Interpreter::run_for(const For& code) {
  Scope* const outside = scope_;
  const std::vector<Value>* items = &items_of(*this, code.list(*this));
  if (code.condition && code.uses_loop) {
    // loop.length counts the items that pass, so all are tested before the first iteration.
    std::vector<Value> passed;
    enter(outside);
    for (const Value& item : *items) {
      scope_->variables.clear();
      code.target(*this, item);
      if (truthy(code.condition(*this))) passed.push_back(item);
    }
    items = &list(std::move(passed)).list()->items;
  }
  Loop* const loop = make(Loop{*items});
  bool completed = false;
  Scope* inside = nullptr;
  for (size_t i = 0; i < items->size(); ++i) {
    loop->index = i;
    // An iteration reuses the scope of the one before, unless a macro captured it.
    if (inside == nullptr || inside->is_shared) inside = make(Scope{outside});
    inside->variables.clear();
    scope_ = inside;
    if (code.uses_loop) set("loop", loop);
    code.target(*this, (*items)[i]);
    if (code.condition && !code.uses_loop && !truthy(code.condition(*this))) continue;
    code.body(*this);
    completed = completed || flow_ == Flow::kNext;
    if (std::exchange(flow_, Flow::kNext) == Flow::kBreak) break;
  }
  // As in Jinja, `else` also runs if {% break %} or {% continue %} left every iteration.
  if (!completed && code.otherwise) {
    enter(outside);
    code.otherwise(*this);
  }
  scope_ = outside;
  return {};
}

Value Interpreter::run_generation(const Code& body) {
  Scope* const outside = scope_;
  enter(outside);
  const size_t begin = out_->size();
  body(*this);
  if (captures_ == 0) rendered_.generation_spans.emplace_back(begin, out_->size());
  scope_ = outside;
  return {};
}

}  // namespace cohort::jinja
