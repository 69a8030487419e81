// The tests of Jinja (`x is defined`), its global functions, and how natives read their arguments.
#include <algorithm>

#include "data/template/format.h"
#include "data/template/interpreter.h"
#include "data/template/natives.h"
#include "data/template/text.h"

namespace cohort::jinja {
namespace {

template <class T>
Value is_a(Call& c) {
  return c.self().is<T>();
}

template <int64_t rest>
Value is_modulo(Call& c) {
  const Value by = c.args.size() > 1 ? c.args[1] : Value(int64_t{2});
  return equals(c.in, find_operator(Level::kProduct, "%")->apply(c.in, c.self(), by), rest);
}

// `==` and the like as tests.
template <char name, char second = '='>
Value holds(Call& c) {
  constexpr char kName[] = {name, second};
  const std::string_view op(kName, second == ' ' ? 1 : 2);
  return find_operator(Level::kComparison, op)->apply(c.in, c.self(), c.args[1]);
}

// Whether there are letters, and `map` leaves all of them as they are.
template <std::string (*map)(std::string_view)>
Value is_cased(Call& c) {
  const std::string text = c.str(0);
  return map(text) == text && lower(text) != upper(text);
}

constexpr Native kTests[] = {
    {"!=", "other", holds<'!'>},
    {"<", "other", holds<'<', ' '>},
    {"<=", "other", holds<'<'>},
    {"==", "other", holds<'='>},
    {">", "other", holds<'>', ' '>},
    {">=", "other", holds<'>'>},
    {"boolean", "", is_a<bool>},
    {"callable", "", [](Call& c) { return Value(c.self().object<Function>() != nullptr); }},
    {"defined", "", [](Call& c) { return Value(!c.self().is<Undefined>()); }},
    {"divisibleby", "num", is_modulo<0>},
    {"eq", "other", holds<'='>},
    {"equalto", "other", holds<'='>},
    {"even", "", is_modulo<0>},
    {"false", "", [](Call& c) { return Value(c.self().same(false)); }},
    {"float", "", is_a<double>},
    {"ge", "other", holds<'>'>},
    {"greaterthan", "other", holds<'>', ' '>},
    {"gt", "other", holds<'>', ' '>},
    {"in", "seq", holds<'i', 'n'>},
    {"integer", "", is_a<int64_t>},
    {"iterable", "", [](Call& c) { return Value(is_iterable(c.self())); }},
    {"le", "other", holds<'<'>},
    {"lessthan", "other", holds<'<', ' '>},
    {"lower", "", is_cased<lower>},
    {"lt", "other", holds<'<', ' '>},
    {"mapping", "", [](Call& c) { return Value(c.self().dict() != nullptr); }},
    {"ne", "other", holds<'!'>},
    {"none", "", is_a<None>},
    {"number", "", [](Call& c) { return Value(c.self().is_number()); }},
    {"odd", "", is_modulo<1>},
    {"sameas", "other", [](Call& c) { return Value(c.self().same(c.args[1])); }},
    {"sequence", "", [](Call& c) { return Value(length(c.self()).has_value()); }},
    {"string", "", [](Call& c) { return Value(c.self().text() != nullptr); }},
    {"true", "", [](Call& c) { return Value(c.self().same(true)); }},
    {"undefined", "", is_a<Undefined>},
    {"upper", "", is_cased<upper>},
};

Value range(Call& c) {
  int64_t start = 0, stop = c.integer(1, 0), step = c.integer(3, 1);
  if (c.args[2].given()) start = stop, stop = c.integer(2, 0);
  if (step == 0) throw Fault("the step of range() cannot be 0");
  Charge charge(&c.in, 0);
  std::vector<Value> items;
  while (step > 0 ? start < stop : start > stop) {
    c.in.work(1);
    charge.add(2 * sizeof(Value));  // twice, as the vector doubles
    items.push_back(start);
    if (__builtin_add_overflow(start, step, &start)) break;
  }
  return c.in.list(std::move(items), Flavor::kRange);
}

// dict(...) and namespace(...): the entries of a dict, and keyword arguments.
Entries entries_of(Call& c) {
  Entries entries;
  for (const Value& value : c.rest.values) {
    if (value.dict() == nullptr) throw Fault("expected a dict, got " + type_name(value));
    for (const auto& [key, item] : value.dict()->entries) set_entry(c.in, entries, key, item);
  }
  for (const auto& [name, value] : c.rest.keywords)
    set_entry(c.in, entries, c.in.text(name), value);
  return entries;
}

Value make_namespace(Call& c) {
  const std::shared_ptr<Scope> made = c.in.make_namespace();
  for (const auto& [key, value] : entries_of(c)) made->set(to_str(c.in, key), value);
  return made;
}

// joiner(sep): a function that gives nothing the first time, and the separator from then on.
constexpr Native kJoin = {"joiner", "", [](Call& c) {
                            Scope& state = *c.self().object<Scope>();
                            Value now = state.variables.find("now")->second;
                            state.set("now", state.variables.find("sep")->second);
                            return now;
                          }};

Value joiner(Call& c) {
  const std::shared_ptr<Scope> state = c.in.make_namespace();
  state->set("now", c.in.text(""));
  state->set("sep", c.args[1].absent() ? c.in.text(", ") : c.args[1]);
  const auto function = std::make_shared<Function>();
  function->native = &kJoin;
  function->self = state;
  return function;
}

constexpr Native kGlobals[] = {
    {"dict", "...", [](Call& c) { return c.in.dict(entries_of(c)); }},
    {"joiner", "| sep", joiner},
    {"namespace", "...", make_namespace},
    {"raise_exception", "message", [](Call& c) -> Value { throw Fault(c.str(1)); }},
    {"range", "start | stop step", range},
    {"strftime_now", "format",
     [](Call& c) { return c.in.text(format_time(c.in.now(), c.text(1))); }},
};

}  // namespace

std::string Call::str(size_t i) const {
  return to_str(in, args[i]);
}

const std::string& Call::text(size_t i) const {
  if (args[i].is<Undefined>()) throw Fault(args[i].why());
  if (args[i].text() == nullptr) throw Fault("expected a text, got " + type_name(args[i]));
  return args[i].text()->bytes;
}

int64_t Call::integer(size_t i, int64_t otherwise) const {
  if (args[i].absent()) return otherwise;
  if (!args[i].is_integral()) throw Fault("expected a whole number, got " + type_name(args[i]));
  return args[i].integer();
}

Natives tests_table() {
  return kTests;
}

Natives globals_table() {
  return kGlobals;
}

const Native* find_native(Natives natives, std::string_view name) {
  const auto found = std::find_if(natives.begin(), natives.end(),
                                  [&](const Native& native) { return native.name == name; });
  return found == natives.end() ? nullptr : &*found;
}

}  // namespace cohort::jinja
