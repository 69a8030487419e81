// The tests of Jinja (`x is defined`), and the functions that every template has.
#include <algorithm>

#include "data/template/natives.h"
#include "data/template/python.h"
#include "data/template/text.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

const Value& self(const Args& a) {
  return a.values[0];
}

template <Op op>
Value compared(Interpreter& in, const Args& a) {
  return Value(compare(in, op, a.values[0], a.values[1]));
}

// self % n == rest
Value has_rest(Interpreter& in, const Value& value, const Value& n, int64_t rest) {
  return Value(equals(in.budget, binary(in, Op::kMod, value, n), Value(rest)));
}

// Whether all letters are of one case, and there is one.
template <char32_t (*map)(char32_t), char32_t (*other)(char32_t)>
bool all_cased(std::string_view text) {
  bool any = false;
  for (const char32_t c : decode(text)) {
    if (map(c) != c) return false;
    any = any || other(c) != c;
  }
  return any;
}

bool is_sequence(const Value& v) {
  return length(v).has_value() && v.loop() == nullptr &&
         (v.sequence() == nullptr || v.sequence()->flavor == Flavor::kList ||
          v.sequence()->flavor == Flavor::kTuple || v.sequence()->flavor == Flavor::kGroup ||
          v.sequence()->flavor == Flavor::kRange);
}

template <bool (*holds)(const Value&)>
Value check(Interpreter&, const Args& a) {
  return Value(holds(self(a)));
}

bool is_defined(const Value& v) {
  return !v.is_undefined();
}
bool is_undefined(const Value& v) {
  return v.is_undefined();
}
bool is_none(const Value& v) {
  return v.is_none();
}
bool is_boolean(const Value& v) {
  return v.is_bool();
}
bool is_true(const Value& v) {
  return v.is_bool() && v.integer() == 1;
}
bool is_false(const Value& v) {
  return v.is_bool() && v.integer() == 0;
}
bool is_integer(const Value& v) {
  return v.is_int();
}
bool is_float(const Value& v) {
  return v.is_float();
}
bool is_number(const Value& v) {
  return v.is_number();
}
bool is_string(const Value& v) {
  return v.text() != nullptr;
}
bool is_mapping(const Value& v) {
  return v.dict() != nullptr;
}
bool is_escaped(const Value& v) {
  return v.text() != nullptr && v.text()->markup;
}
bool is_callable(const Value& v) {
  return v.callable() != nullptr || v.loop() != nullptr || v.is_undefined();
}

constexpr Native kTests[] = {
    {"!=", "other", compared<Op::kNotEqual>},
    {"<", "other", compared<Op::kLess>},
    {"<=", "other", compared<Op::kLessEqual>},
    {"==", "other", compared<Op::kEqual>},
    {">", "other", compared<Op::kGreater>},
    {">=", "other", compared<Op::kGreaterEqual>},
    {"boolean", "", check<is_boolean>},
    {"callable", "", check<is_callable>},
    {"defined", "", check<is_defined>},
    {"divisibleby", "num",
     [](Interpreter& in, const Args& a) { return has_rest(in, a.values[0], a.values[1], 0); }},
    {"eq", "other", compared<Op::kEqual>},
    {"equalto", "other", compared<Op::kEqual>},
    {"escaped", "", check<is_escaped>},
    {"even", "",
     [](Interpreter& in, const Args& a) { return has_rest(in, self(a), Value(int64_t{2}), 0); }},
    {"false", "", check<is_false>},
    {"filter", "",
     [](Interpreter&, const Args& a) {
       return Value(self(a).text() != nullptr && find_filter(self(a).text()->bytes) != nullptr);
     }},
    {"float", "", check<is_float>},
    {"ge", "other", compared<Op::kGreaterEqual>},
    {"greaterthan", "other", compared<Op::kGreater>},
    {"gt", "other", compared<Op::kGreater>},
    {"in", "seq", compared<Op::kIn>},
    {"integer", "", check<is_integer>},
    {"iterable", "", check<is_iterable>},
    {"le", "other", compared<Op::kLessEqual>},
    {"lessthan", "other", compared<Op::kLess>},
    {"lower", "",
     [](Interpreter& in, const Args& a) {
       return Value(all_cased<to_lower, to_upper>(to_str(in.budget, self(a))));
     }},
    {"lt", "other", compared<Op::kLess>},
    {"mapping", "", check<is_mapping>},
    {"ne", "other", compared<Op::kNotEqual>},
    {"none", "", check<is_none>},
    {"number", "", check<is_number>},
    {"odd", "",
     [](Interpreter& in, const Args& a) { return has_rest(in, self(a), Value(int64_t{2}), 1); }},
    {"sameas", "other",
     [](Interpreter&, const Args& a) { return Value(a.values[0].same(a.values[1])); }},
    {"sequence", "", check<is_sequence>},
    {"string", "", check<is_string>},
    {"test", "",
     [](Interpreter&, const Args& a) {
       return Value(self(a).text() != nullptr && find_test(self(a).text()->bytes) != nullptr);
     }},
    {"true", "", check<is_true>},
    {"undefined", "", check<is_undefined>},
    {"upper", "",
     [](Interpreter& in, const Args& a) {
       return Value(all_cased<to_upper, to_lower>(to_str(in.budget, self(a))));
     }},
};

// The entries that dict(...) and namespace(...) are made of.
DictItems entries(Interpreter& in, const Args& a) {
  DictItems items;
  if (a.values.size() > 2) throw Fault("expected at most one dict");
  if (a.values.size() == 2 && a.values[1].dict() != nullptr) {
    items = a.values[1].dict()->items;
  } else if (a.values.size() == 2) {
    for (const Value& pair : iterate(in.budget, a.values[1])) {
      const std::vector<Value> parts = iterate(in.budget, pair);
      if (parts.size() != 2) throw Fault("a dict is made of pairs");
      set_entry(in.budget, items, parts[0], parts[1]);
    }
  }
  for (const auto& [name, value] : a.keywords) set_entry(in.budget, items, in.text(name), value);
  return items;
}

Value make_space(Interpreter& in, const Args& a) {
  DictItems items = entries(in, a);
  for (const auto& [key, value] : items)
    if (key.text() == nullptr) throw Fault("the names in a namespace are texts");
  return in.make_namespace(std::move(items));
}

Value range(Interpreter& in, const Args& a) {
  constexpr int64_t kMaxItems = 100'000;  // as in Jinja's sandbox
  for (size_t i = 1; i < a.values.size(); ++i)
    if (!a.values[i].is_integral() && !a.values[i].absent())
      throw Fault("range() needs whole numbers, got " + type_name(a.values[i]));
  const bool one = a.values[2].absent();
  const int64_t start = one ? 0 : a.values[1].integer();
  const int64_t stop = one ? a.values[1].integer() : a.values[2].integer();
  const int64_t step = int_argument(a, 3, 1);
  if (step == 0) throw Fault("the step of range() cannot be 0");
  std::vector<Value> items;
  for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
    if (static_cast<int64_t>(items.size()) == kMaxItems)
      throw Fault(str("range() of more than ", kMaxItems, " numbers"));
    items.emplace_back(Value(i));
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return in.list(std::move(items), Flavor::kRange);
}

Value raise_exception(Interpreter& in, const Args& a) {
  throw Fault(to_str(in.budget, a.values[1]));
}

Value strftime_now(Interpreter& in, const Args& a) {
  return in.text(format_time(in.budget, in.now(), text_argument(a, 1, "format")));
}

// joiner(): nothing at its first call, its separator at all others. `self` says which it is.
Value joined(Interpreter& in, const Args& a) {
  auto& attributes = self(a).ns()->attributes;
  if (truthy(attributes[1].second)) return attributes[0].second;
  attributes[1].second = Value(true);
  return in.text("");
}
constexpr Native kJoined = {"joiner", "", joined};

Value joiner(Interpreter& in, const Args& a) {
  const Value separator = a.values[1].absent() ? in.text(", ") : a.values[1];
  const Value state =
      in.make_namespace({{in.text("separator"), separator}, {in.text("used"), Value(false)}});
  return Value(std::make_shared<const Callable>(Callable{.native = &kJoined, .self = state}));
}

constexpr Native kGlobals[] = {
    {"dict", "...",
     [](Interpreter& in, const Args& a) { return make_dict(in.budget, entries(in, a)); }},
    {"joiner", "| sep", joiner},
    {"namespace", "...", make_space},
    {"raise_exception", "message", raise_exception},
    {"range", "start | stop step", range},
    {"strftime_now", "format", strftime_now},
};

template <size_t n>
const Native* find(const Native (&table)[n], std::string_view name) {
  const auto* found = std::find_if(std::begin(table), std::end(table),
                                   [&](const Native& t) { return t.name == name; });
  return found == std::end(table) ? nullptr : found;
}

}  // namespace

const Native* find_test(std::string_view name) {
  return find(kTests, name);
}
const Native* find_global(std::string_view name) {
  return find(kGlobals, name);
}

const std::string& text_argument(const Args& args, size_t index, const char* what) {
  const Value& value = args.values[index];
  if (value.text() == nullptr)
    throw Fault(str("expected a text for ", what, ", got ", type_name(value)));
  return value.text()->bytes;
}

int64_t int_argument(const Args& args, size_t index, int64_t otherwise) {
  const Value& value = args.values[index];
  if (value.absent()) return otherwise;
  if (!value.is_integral()) throw Fault("expected a whole number, got " + type_name(value));
  return value.integer();
}

}  // namespace cohort::jinja
