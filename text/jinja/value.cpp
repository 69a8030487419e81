// Construction, iteration, comparison and arithmetic of values with Python's semantics.
#include "text/jinja/value.h"

#include <algorithm>
#include <cmath>

#include "text/jinja/text.h"
#include "text/utf8.h"

namespace cohort::jinja {

// The heap.

void Heap::work(size_t steps) {
  if (steps > static_cast<size_t>(limits_.steps) ||
      (steps_ += static_cast<int64_t>(steps)) > limits_.steps)
    throw TemplateError(str("the template takes more than ", limits_.steps, " steps"));
}

void Heap::append(std::string& out, std::string_view piece, size_t times) {
  if (piece.empty()) return;
  if (out.size() > static_cast<size_t>(limits_.text_bytes) ||
      times > (static_cast<size_t>(limits_.text_bytes) - out.size()) / piece.size())
    throw TemplateError(str("a text is longer than ", limits_.text_bytes, " bytes"));
  work(times == 1 ? piece.size() / 16 : times * (1 + piece.size() / 16));
  for (; times > 0; --times) out += piece;
}

Value Heap::text(std::string bytes) {
  work(bytes.capacity() / 16);
  return std::string_view(*make(std::move(bytes)));
}

Value Heap::list(std::vector<Value> items, Flavor flavor) {
  work(items.capacity() * sizeof(Value) / 16);
  return static_cast<const List*>(make(List{std::move(items), flavor}));
}

Value Heap::dict(Entries entries) {
  work(entries.capacity() * 2 * sizeof(Value) / 16);
  return static_cast<const Dict*>(make(Dict{std::move(entries)}));
}

Value Heap::from_json(const Json& json) {
  if (json.is_null()) return None{};
  if (json.is_bool()) return json.as_bool();
  if (json.is_int()) return json.as_int();
  if (json.is_big()) return BigInteger{json.digits()};
  if (json.is_number()) return json.as_double();
  if (json.is_string()) return std::string_view(json.as_string());
  if (json.is_array()) {
    std::vector<Value> items;
    for (const Json& item : json.as_array()) items.push_back(from_json(item));
    return list(std::move(items));
  }
  Entries entries;
  for (const auto& [key, value] : json.as_object())
    entries.emplace_back(std::string_view(key), from_json(value));
  return dict(std::move(entries));
}

Nested::Nested(Heap& heap) : heap_(heap) {
  if (heap.depth_ >= heap.limits_.depth)
    throw TemplateError(str("nested deeper than ", heap.limits_.depth));
  ++heap.depth_;
}

// Properties of values.

Value* Scope::find(std::string_view name) {
  for (auto& [known, value] : variables)
    if (known == name) return &value;
  return nullptr;
}

namespace {

// Lists, tuples and ranges can be indexed.
bool is_sequence(const Value& value) {
  return value.list() != nullptr && value.list()->flavor <= Flavor::kRange;
}

bool are_alike(const Value& a, const Value& b) {
  return is_sequence(a) && is_sequence(b) && a.list()->flavor == b.list()->flavor;
}

[[noreturn]] void no_operator(std::string_view op, const Value& a, const Value& b) {
  check_defined(a);
  check_defined(b);
  throw TemplateError(str("'", op, "' is not defined for ", type_name(a), " and ", type_name(b)));
}

}  // namespace

std::string type_name(const Value& value) {
  constexpr const char* kTypes[] = {"Undefined", "None", "bool",     "int",
                                    "float",     "str",  "list",     "dict",
                                    "namespace", "loop", "function", "big int"};
  constexpr const char* kFlavors[] = {"list",        "tuple",      "range",    "dict_keys",
                                      "dict_values", "dict_items", "generator"};
  const List* list = value.list();
  return list != nullptr ? kFlavors[static_cast<size_t>(list->flavor)] : kTypes[value.index()];
}

void check_defined(const Value& value) {
  if (value.absent()) throw TemplateError("a value is undefined");
  if (value.is<Undefined>()) throw TemplateError(std::string(value.as<Undefined>().why));
}

const Value& checked(const Value& value, bool fits, const char* noun) {
  if (fits) return value;
  check_defined(value);
  throw TemplateError(str("expected ", noun, ", got ", type_name(value)));
}

bool truthy(const Value& value) {
  if (value.is<Undefined>() || value.is<None>()) return false;
  if (value.is_number()) return value.number() != 0;
  if (value.is_text()) return !value.text().empty();
  return length(value).value_or(1) != 0;
}

bool is_iterable(const Value& value) {
  return value.is<Undefined>() || value.is_text() || value.list() != nullptr ||
         value.dict() != nullptr;
}

std::optional<size_t> length(const Value& value) {
  if (value.is<Undefined>()) return 0;
  if (value.is_text()) return count_characters(value.text());
  if (value.dict() != nullptr) return value.dict()->entries.size();
  if (const List* list = value.list(); list != nullptr && list->flavor != Flavor::kGenerator)
    return list->items.size();
  return {};
}

const std::vector<Value>& items_of(Heap& heap, const Value& value) {
  checked(value, is_iterable(value), "something to iterate over");
  const List* list = value.list();
  if (list != nullptr && !list->exhausted) {
    list->exhausted = list->flavor == Flavor::kGenerator;
    heap.work(list->items.size());
    return list->items;
  }
  std::vector<Value> items;
  if (const Dict* dict = value.dict())
    for (const auto& [key, item] : dict->entries) items.push_back(key);
  const std::string_view text = value.text();
  heap.work(2 * text.size());
  for (size_t at = 0; at < text.size(); at += items.back().text().size())
    items.push_back(text.substr(at, next_utf8_boundary(text, at + 1) - at));
  return heap.list(std::move(items)).list()->items;
}

// Comparisons.

bool equals(Heap& heap, const Value& a, const Value& b) {
  const Nested nested(heap);
  heap.work(1 + std::min(a.text().size(), b.text().size()) / 256);
  if (a.is<double>() || b.is<double>())
    return a.is_number() && b.is_number() && a.number() == b.number();
  if (a.is_integral() && b.is_integral()) return a.integer() == b.integer();
  if (a == b) return true;
  if (are_alike(a, b)) {
    const auto &x = a.list()->items, &y = b.list()->items;
    return std::ranges::equal(x, y, [&](auto& v, auto& w) { return equals(heap, v, w); });
  }
  if (a.dict() == nullptr || b.dict() == nullptr) return false;
  const Entries &x = a.dict()->entries, &y = b.dict()->entries;
  return x.size() == y.size() && std::all_of(x.begin(), x.end(), [&](const auto& entry) {
           const auto other = find_item(heap, b, entry.first);
           return other && equals(heap, entry.second, *other);
         });
}

std::partial_ordering compare(Heap& heap, const Value& a, const Value& b) {
  const Nested nested(heap);
  heap.work(1 + std::min(a.text().size(), b.text().size()) / 256);
  if (a.is_integral() && b.is_integral()) return a.integer() <=> b.integer();
  if (a.is_number() && b.is_number()) return a.number() <=> b.number();
  // The order of UTF-8 bytes is that of the characters.
  if (a.is_text() && b.is_text()) return a.text() <=> b.text();
  if (!are_alike(a, b)) no_operator("<", a, b);
  const auto &x = a.list()->items, &y = b.list()->items;
  for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
    if (!equals(heap, x[i], y[i])) return compare(heap, x[i], y[i]);
  return x.size() <=> y.size();
}

void sort_entries(Heap& heap, Entries& entries) {
  std::stable_sort(entries.begin(), entries.end(), [&](const auto& a, const auto& b) {
    return compare(heap, a.first, b.first) < 0;
  });
}

// Containers.

namespace {

void check_key(const Value& key) {
  if (key.dict() != nullptr || (key.list() != nullptr && key.list()->flavor != Flavor::kTuple))
    throw TemplateError(str("a ", type_name(key), " cannot be the key of a dict"));
}

}  // namespace

bool contains(Heap& heap, const Value& container, const Value& item) {
  if (container.is_text()) {
    checked(item, item.is_text(), "a text");
    heap.work_for_search(container.text(), item.text());
    return container.text().find(item.text()) != std::string_view::npos;
  }
  if (container.dict() != nullptr) {
    check_key(item);
    return find_item(heap, container, item).has_value();
  }
  const auto& items = items_of(heap, container);
  return std::ranges::any_of(items, [&](const Value& other) { return equals(heap, other, item); });
}

std::optional<Value> find_item(Heap& heap, const Value& container, const Value& key) {
  if (const Dict* dict = container.dict()) {
    for (const auto& [name, item] : dict->entries)
      if (equals(heap, name, key)) return item;
    return {};
  }
  if (!(is_sequence(container) || container.is_text()) || !key.is_integral()) return {};
  heap.work(container.text().size() / 64);
  const auto size = static_cast<int64_t>(*length(container));
  const int64_t index = key.integer() < 0 ? key.integer() + size : key.integer();
  if (index < 0 || index >= size) return {};
  const auto i = static_cast<size_t>(index);
  if (container.list() != nullptr) return container.list()->items[i];
  const std::string_view rest = container.text().substr(byte_of(container.text(), i));
  return rest.substr(0, byte_of(rest, 1));
}

void set_entry(Heap& heap, Entries& entries, const Value& key, const Value& value) {
  check_key(key);
  for (auto& [name, item] : entries)
    if (equals(heap, name, key)) {
      item = value;
      return;
    }
  entries.emplace_back(key, value);
}

Value slice(Heap& heap, const Value& value, const Value (&bounds)[3]) {
  checked(value, value.is_text() || is_sequence(value), "a text or list");
  for (const Value& bound : bounds)
    checked(bound, bound.is<None>() || bound.is_integral(), "a whole number");
  const auto size = static_cast<int64_t>(*length(value));
  const int64_t step = bounds[2].is<None>() ? 1 : bounds[2].integer();
  if (step == 0) throw TemplateError("the step of a slice cannot be 0");
  // Clamps a bound to 0 .. size, or to -1 .. size - 1 for negative steps.
  const int64_t low = step < 0 ? -1 : 0, high = step < 0 ? size - 1 : size;
  const auto clamp = [&](const Value& bound, int64_t otherwise) {
    if (bound.is<None>()) return otherwise;
    const int64_t index = bound.integer() < 0 ? bound.integer() + size : bound.integer();
    return std::clamp(index, low, high);
  };
  const int64_t first = clamp(bounds[0], step < 0 ? high : low);
  const int64_t last = clamp(bounds[1], step < 0 ? low : high);
  if (value.is_text() && step == 1) {
    heap.work(value.text().size() / 64);
    const std::string_view rest =
        value.text().substr(byte_of(value.text(), static_cast<size_t>(first)));
    return rest.substr(0, byte_of(rest, static_cast<size_t>(std::max(last - first, int64_t{0}))));
  }
  const auto& all = items_of(heap, value);
  std::vector<Value> picked;
  if (step == 1) picked.reserve(static_cast<size_t>(std::max(last - first, int64_t{0})));
  for (int64_t i = first; step < 0 ? i > last : i < last;) {
    picked.push_back(all[static_cast<size_t>(i)]);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  if (!value.is_text()) return heap.list(std::move(picked), value.list()->flavor);
  std::string out;
  for (const Value& character : picked) heap.append(out, character.text());
  return heap.text(std::move(out));
}

// Operators.

namespace {

Value concatenate(Heap& heap, const Value& a, const Value& b) {
  std::string out;
  print(heap, out, a);
  print(heap, out, b);
  return heap.text(std::move(out));
}

// A text or list repeated `times` times.
Value repeated(Heap& heap, const Value& value, int64_t times) {
  const auto n = static_cast<size_t>(std::max<int64_t>(times, 0));
  std::string out;
  heap.append(out, value.text(), n);
  if (value.is_text()) return heap.text(std::move(out));
  const auto& source = value.list()->items;
  std::vector<Value> items;
  for (size_t i = 0; i < n && !source.empty(); ++i) {
    heap.work(4 * source.size());
    items.insert(items.end(), source.begin(), source.end());
  }
  return heap.list(std::move(items), value.list()->flavor);
}

// Python's operators: the remainder has the sign of the divisor. 'f' is '//'.
template <char op, class T>
T calculate(T a, T b, T rest) {
  if (op == '+') return a + b;
  if (op == '-') return a - b;
  if (op == '*') return a * b;
  if (op == '/') return a / b;
  if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
  return op == '%' ? rest : (a - rest) / b;
}

template <char op>
Value arithmetic(Heap&, const Value& a, const Value& b) {
  constexpr bool kDivides = op == '/' || op == 'f' || op == '%';
  if (!a.is_number() || !b.is_number()) no_operator(op == 'f' ? "//" : std::string(1, op), a, b);
  if (kDivides && b.number() == 0) throw TemplateError("division by zero");
  if (a.is<double>() || b.is<double>() || op == '/') {
    const double x = a.number(), y = b.number();
    const double out = calculate<op>(x, y, kDivides ? std::fmod(x, y) : 0);
    return op == 'f' ? std::round(out) : out;
  }
  __extension__ using Wide = __int128;  // holds every result
  const Wide x = a.integer(), y = b.integer(), out = calculate<op>(x, y, kDivides ? x % y : 0);
  if (out != static_cast<int64_t>(out)) throw TemplateError("a whole number overflows 64 bits");
  return static_cast<int64_t>(out);
}

Value plus(Heap& heap, const Value& a, const Value& b) {
  if (a.is_text() && b.is_text()) return concatenate(heap, a, b);
  if (a.is_number() && b.is_number()) return arithmetic<'+'>(heap, a, b);
  if (!are_alike(a, b)) no_operator("+", a, b);
  std::vector<Value> items = items_of(heap, a);
  const auto& more = items_of(heap, b);
  items.insert(items.end(), more.begin(), more.end());
  return heap.list(std::move(items), a.list()->flavor);
}

Value times(Heap& heap, const Value& a, const Value& b) {
  if (b.is_integral() && (a.is_text() || is_sequence(a))) return repeated(heap, a, b.integer());
  if (a.is_integral() && (b.is_text() || is_sequence(b))) return repeated(heap, b, a.integer());
  return arithmetic<'*'>(heap, a, b);
}

template <bool (*accepts)(std::partial_ordering)>
Value ordered(Heap& heap, const Value& a, const Value& b) {
  return accepts(compare(heap, a, b));
}

template <bool (*holds)(Heap&, const Value&, const Value&), bool wanted>
Value test_result(Heap& heap, const Value& a, const Value& b) {
  return holds(heap, a, b) == wanted;
}

bool is_in(Heap& heap, const Value& item, const Value& container) {
  return contains(heap, container, item);
}

constexpr Operator kOperators[] = {
    {"or", Level::kOr, nullptr},
    {"and", Level::kAnd, nullptr},
    {"==", Level::kComparison, test_result<equals, true>},
    {"!=", Level::kComparison, test_result<equals, false>},
    {"<", Level::kComparison, ordered<std::is_lt>},
    {"<=", Level::kComparison, ordered<std::is_lteq>},
    {">", Level::kComparison, ordered<std::is_gt>},
    {">=", Level::kComparison, ordered<std::is_gteq>},
    {"in", Level::kComparison, test_result<is_in, true>},
    {"not in", Level::kComparison, test_result<is_in, false>},
    {"+", Level::kSum, plus},
    {"-", Level::kSum, arithmetic<'-'>},
    {"~", Level::kConcat, concatenate},
    {"*", Level::kProduct, times},
    {"/", Level::kProduct, arithmetic<'/'>},
    {"//", Level::kProduct, arithmetic<'f'>},
    {"%", Level::kProduct, arithmetic<'%'>},
};

}  // namespace

const Operator* find_operator(Level level, std::string_view name) {
  const auto* found = std::ranges::find_if(
      kOperators, [&](const Operator& o) { return o.level == level && o.name == name; });
  return found == std::end(kOperators) ? nullptr : found;
}

Value operate(Heap& heap, Level level, std::string_view name, const Value& a, const Value& b) {
  return find_operator(level, name)->apply(heap, a, b);
}

}  // namespace cohort::jinja
