// Printing, comparing, iterating and calculating as Python does.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "data/template/format.h"
#include "data/template/text.h"
#include "data/template/value.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

struct FlavorNames {
  std::string_view type, open, close;
};
constexpr FlavorNames kFlavors[] = {{"list", "[", "]"},
                                    {"tuple", "(", ")"},
                                    {"range", "range(", ")"},
                                    {"dict_keys", "dict_keys([", "])"},
                                    {"dict_values", "dict_values([", "])"},
                                    {"dict_items", "dict_items([", "])"},
                                    {"generator", "<generator [", "]>"}};

const FlavorNames& names_of(const List& list) {
  return kFlavors[static_cast<size_t>(list.flavor)];
}

// Lists, tuples and ranges: what can be indexed.
bool is_sequence(const Value& value) {
  return value.list() != nullptr && value.list()->flavor <= Flavor::kRange;
}

bool are_alike(const Value& a, const Value& b) {
  return is_sequence(a) && is_sequence(b) && names_of(*a.list()).type == names_of(*b.list()).type;
}

std::string quoted(std::string_view text) {
  const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, quote);
  for (const char32_t c : decode(text)) {
    constexpr std::string_view kFrom = "\n\r\t\\", kTo = "nrt\\";
    char code[16];
    if (const size_t known = c < 0x80 ? kFrom.find(static_cast<char>(c)) : kFrom.npos;
        known != kFrom.npos) {
      out += {'\\', kTo[known]};
    } else if (c == static_cast<unsigned char>(quote)) {
      out += {'\\', quote};
    } else if (is_printable(c)) {
      out += encode_utf8(c);
    } else {
      const char* format = c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x";
      std::snprintf(code, sizeof code, format, static_cast<unsigned>(c));
      out += code;
    }
  }
  return out + quote;
}

void write_repr(Heap& heap, std::string& out, const Value& value) {
  heap.work(1);
  if (const Text* text = value.text()) {
    const bool markup = text->markup == Markup::kYes;
    heap.append(out, markup ? "Markup(" + quoted(text->bytes) + ")" : quoted(text->bytes));
  } else if (const List* list = value.list()) {
    heap.append(out, names_of(*list).open);
    for (size_t i = 0; i < list->items.size(); ++i) {
      if (i > 0) heap.append(out, ", ");
      write_repr(heap, out, list->items[i]);
    }
    if (value.is_tuple() && list->items.size() == 1) heap.append(out, ",");
    heap.append(out, names_of(*list).close);
  } else if (const Dict* dict = value.dict()) {
    heap.append(out, "{");
    for (const auto& entry : dict->entries) {
      if (&entry != &dict->entries[0]) heap.append(out, ", ");
      write_repr(heap, out, entry.first);
      heap.append(out, ": ");
      write_repr(heap, out, entry.second);
    }
    heap.append(out, "}");
  } else {
    heap.append(out, value.is<Undefined>() ? "Undefined" : to_str(heap, value));
  }
}

[[noreturn]] void no_operator(std::string_view op, const Value& a, const Value& b) {
  for (const Value* v : {&a, &b})
    if (v->is<Undefined>()) throw Fault(v->why());
  throw Fault(str("'", op, "' is not defined for ", type_name(a), " and ", type_name(b)));
}

}  // namespace

std::string type_name(const Value& value) {
  if (value.is<Undefined>()) return "Undefined";
  if (value.is<None>()) return "None";
  if (value.is<bool>()) return "bool";
  if (value.is<int64_t>()) return "int";
  if (value.is<double>()) return "float";
  if (value.text() != nullptr) return "str";
  if (value.list() != nullptr) return std::string(names_of(*value.list()).type);
  if (value.dict() != nullptr) return "dict";
  if (value.object<Scope>() != nullptr) return "namespace";
  return value.object<Loop>() != nullptr ? "loop" : "function";
}

const Value& checked_number(const Value& value) {
  if (value.is<Undefined>()) throw Fault(value.why());
  if (!value.is_number()) throw Fault("expected a number, got " + type_name(value));
  return value;
}

bool truthy(const Value& value) {
  if (value.is<Undefined>() || value.is<None>()) return false;
  if (value.is_number()) return value.number() != 0;
  return length(value).value_or(1) != 0;
}

std::string repr(Heap& heap, const Value& value) {
  std::string out;
  write_repr(heap, out, value);
  return out;
}

std::string to_str(Heap& heap, const Value& value) {
  if (value.is<Undefined>()) return "";
  if (value.is<None>()) return "None";
  if (value.is<bool>()) return value.integer() != 0 ? "True" : "False";
  if (value.is<int64_t>()) return std::to_string(value.integer());
  if (value.is<double>()) return float_repr(value.number());
  if (value.text() != nullptr) {
    heap.work(value.text()->bytes.size() / 32);
    return value.text()->bytes;
  }
  if (value.list() == nullptr && value.dict() == nullptr) return str("<", type_name(value), ">");
  return repr(heap, value);
}

bool equals(Heap& heap, const Value& a, const Value& b) {
  heap.work(1);
  if (a.is_number() && b.is_number()) {
    if (a.is<double>() || b.is<double>()) return a.number() == b.number();
    return a.integer() == b.integer();
  }
  if (a.text() != nullptr && b.text() != nullptr) {
    if (a.text()->length != b.text()->length) return false;
    heap.work(a.text()->bytes.size() / 256);
    return a.text()->bytes == b.text()->bytes;
  }
  if (a.is<Undefined>() && b.is<Undefined>()) return true;
  if (a.same(b)) return true;
  if (are_alike(a, b)) {
    const auto &x = a.list()->items, &y = b.list()->items;
    return std::equal(x.begin(), x.end(), y.begin(), y.end(),
                      [&](const Value& v, const Value& w) { return equals(heap, v, w); });
  }
  if (a.dict() == nullptr || b.dict() == nullptr) return false;
  const Entries &x = a.dict()->entries, &y = b.dict()->entries;
  return x.size() == y.size() && std::all_of(x.begin(), x.end(), [&](const auto& entry) {
           const auto other = find_item(heap, b, entry.first);
           return other && equals(heap, entry.second, *other);
         });
}

std::partial_ordering compare(Heap& heap, const Value& a, const Value& b) {
  heap.work(1);
  if (a.is_number() && b.is_number()) {
    if (a.is<double>() || b.is<double>()) return a.number() <=> b.number();
    return a.integer() <=> b.integer();
  }
  if (a.text() != nullptr && b.text() != nullptr) {
    heap.work(std::min(a.text()->bytes.size(), b.text()->bytes.size()) / 256);
    // The order of UTF-8 bytes is that of the characters.
    return a.text()->bytes.compare(b.text()->bytes) <=> 0;
  }
  if (!are_alike(a, b) || a.list()->flavor == Flavor::kRange) no_operator("<", a, b);
  const auto &x = a.list()->items, &y = b.list()->items;
  for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
    if (!equals(heap, x[i], y[i])) return compare(heap, x[i], y[i]);
  return x.size() <=> y.size();
}

std::vector<size_t> sorted_places(Heap& heap, const std::vector<Value>& keys, Order order) {
  std::vector<size_t> places(keys.size());
  std::iota(places.begin(), places.end(), size_t{0});
  std::stable_sort(places.begin(), places.end(), [&](size_t a, size_t b) {
    if (order == Order::kDown) std::swap(a, b);
    return compare(heap, keys[a], keys[b]) < 0;
  });
  return places;
}

bool is_iterable(const Value& value) {
  return value.is<Undefined>() || value.text() != nullptr || value.list() != nullptr ||
         value.dict() != nullptr;
}

Items::Items(Heap& heap, const Value& value) {
  if (!is_iterable(value))
    throw Fault(str("a value of type ", type_name(value), " cannot be iterated over"));
  const List* list = value.list();
  if (list != nullptr && !list->used_up) {
    list->used_up = list->flavor == Flavor::kGenerator;
    heap.work(list->items.size());
    list_ = value.shared_list();
    return;
  }
  std::vector<Value> items;
  if (const Dict* dict = value.dict()) {
    for (const auto& [key, item] : dict->entries) items.push_back(key);
  } else if (const Text* text = value.text()) {
    for (size_t at = 0; at < text->bytes.size();) {
      const size_t next = next_utf8_boundary(text->bytes, at + 1);
      items.push_back(heap.text(text->bytes.substr(at, next - at)));
      at = next;
    }
  }
  list_ = heap.list(std::move(items)).shared_list();
}

std::optional<size_t> length(const Value& value) {
  if (value.is<Undefined>()) return 0;
  if (value.text() != nullptr) return value.text()->length;
  if (value.dict() != nullptr) return value.dict()->entries.size();
  if (const List* list = value.list(); list != nullptr && list->flavor != Flavor::kGenerator)
    return list->items.size();
  return {};
}

namespace {

void check_key(const Value& key) {
  if (key.dict() != nullptr || (key.list() != nullptr && !key.is_tuple()))
    throw Fault(str("a ", type_name(key), " cannot be the key of a dict"));
}

}  // namespace

bool contains(Heap& heap, const Value& container, const Value& item) {
  if (const Text* text = container.text()) {
    if (item.text() == nullptr) throw Fault(str("'in' a text needs a text, got ", type_name(item)));
    heap.work(text->bytes.size() / 32);
    return text->bytes.find(item.text()->bytes) != std::string::npos;
  }
  if (container.dict() != nullptr) {
    check_key(item);
    return find_item(heap, container, item).has_value();
  }
  const Items items(heap, container);
  return std::any_of(items.begin(), items.end(),
                     [&](const Value& other) { return equals(heap, other, item); });
}

std::optional<Value> find_item(Heap& heap, const Value& container, const Value& key) {
  if (const Dict* dict = container.dict()) {
    for (const auto& [name, item] : dict->entries)
      if (equals(heap, name, key)) return item;
    return {};
  }
  if (!(is_sequence(container) || container.text() != nullptr) || !key.is_integral()) return {};
  const auto size = static_cast<int64_t>(*length(container));
  const int64_t index = key.integer() < 0 ? key.integer() + size : key.integer();
  if (index < 0 || index >= size) return {};
  const auto i = static_cast<size_t>(index);
  if (container.list() != nullptr) return container.list()->items[i];
  const Text& text = *container.text();
  heap.work(text.bytes.size() / 32);
  const size_t begin = byte_of(text.bytes, i);
  const size_t end = next_utf8_boundary(text.bytes, begin + 1);
  return heap.text(text.bytes.substr(begin, end - begin), text.markup);
}

void set_entry(Heap& heap, Entries& entries, Value key, Value value) {
  check_key(key);
  for (auto& [name, item] : entries)
    if (equals(heap, name, key)) {
      item = std::move(value);
      return;
    }
  entries.emplace_back(std::move(key), std::move(value));
}

Value slice(Heap& heap, const Value& value, const Value (&bounds)[3]) {
  if (value.is<Undefined>()) throw Fault(value.why());
  if (value.text() == nullptr && !is_sequence(value))
    throw Fault(str("a ", type_name(value), " cannot be sliced"));
  for (const Value& bound : bounds)
    if (!bound.is<None>() && !bound.is_integral())
      throw Fault(str("a slice needs whole numbers, got ", type_name(bound)));
  const auto size = static_cast<int64_t>(*length(value));
  const int64_t step = bounds[2].is<None>() ? 1 : bounds[2].integer();
  if (step == 0) throw Fault("the step of a slice cannot be 0");
  // Where a bound lies in 0 .. size, or one less for steps backwards.
  const int64_t low = step < 0 ? -1 : 0, high = step < 0 ? size - 1 : size;
  const auto place = [&](const Value& bound, int64_t otherwise) {
    if (bound.is<None>()) return otherwise;
    const int64_t index = bound.integer() < 0 ? bound.integer() + size : bound.integer();
    return std::clamp(index, low, high);
  };
  const int64_t first = place(bounds[0], step < 0 ? high : low);
  const int64_t last = place(bounds[1], step < 0 ? low : high);
  const Text* text = value.text();
  const std::u32string characters = text != nullptr ? decode(text->bytes) : U"";
  heap.work(static_cast<size_t>(size) / (text != nullptr ? 4 : 1));
  std::u32string picked;
  std::vector<Value> items;
  for (int64_t i = first; step < 0 ? i > last : i < last;) {
    if (text != nullptr)
      picked += characters[static_cast<size_t>(i)];
    else
      items.push_back(value.list()->items[static_cast<size_t>(i)]);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  if (text != nullptr) return heap.text(encode(picked), text->markup);
  return heap.list(std::move(items), value.is_tuple() ? Flavor::kTuple : value.list()->flavor);
}

std::string escape_html(Heap& heap, std::string_view text) {
  constexpr std::string_view kFrom = "&<>'\"";
  constexpr std::string_view kTo[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t next = std::min(text.find_first_of(kFrom, at), text.size());
    heap.append(out, text.substr(at, next - at));
    if (next < text.size()) heap.append(out, kTo[kFrom.find(text[next])]);
    at = next + 1;
  }
  return out;
}

namespace {

Value joined(Heap& heap, const Value& a, const Value& b) {
  std::string out = to_str(heap, a);
  heap.append(out, to_str(heap, b));
  return heap.text(out);
}

Value add(Heap& heap, const Value& a, const Value& b) {
  if (a.text() != nullptr && b.text() != nullptr) {
    if (a.text()->markup == b.text()->markup)
      return heap.text(joined(heap, a, b).text()->bytes, a.text()->markup);
    // One is escaped already, so the other one has to be.
    const auto escaped = [&](const Text& text) {
      return text.markup == Markup::kYes ? text.bytes : escape_html(heap, text.bytes);
    };
    return heap.text(escaped(*a.text()) + escaped(*b.text()), Markup::kYes);
  }
  if (!are_alike(a, b) || a.list()->flavor == Flavor::kRange) no_operator("+", a, b);
  std::vector<Value> items = a.list()->items;
  items.insert(items.end(), b.list()->items.begin(), b.list()->items.end());
  return heap.list(std::move(items), a.is_tuple() ? Flavor::kTuple : Flavor::kList);
}

// A text or list so many times.
Value repeated(Heap& heap, const Value& value, int64_t times) {
  const auto n = static_cast<size_t>(std::max<int64_t>(times, 0));
  if (const Text* text = value.text()) {
    std::string out;
    heap.append(out, text->bytes, n);
    return heap.text(out, text->markup);
  }
  const auto& source = value.list()->items;
  Charge charge(&heap, 0);
  std::vector<Value> items;
  for (size_t i = 0; i < n && !source.empty(); ++i) {
    heap.work(source.size());
    charge.add(2 * source.size() * sizeof(Value));  // twice, as the vector doubles
    items.insert(items.end(), source.begin(), source.end());
  }
  return heap.list(std::move(items), value.is_tuple() ? Flavor::kTuple : Flavor::kList);
}

// Whether the result fits into 64 bits. Quotients are rounded down, and remainders have the sign of
// the divisor, as Python has it; `b` is not 0 there.
bool of_ints(char op, int64_t a, int64_t b, int64_t* out) {
  if (op == '+') return !__builtin_add_overflow(a, b, out);
  if (op == '-' || (op == 'f' && b == -1))
    return !__builtin_sub_overflow(op == '-' ? a : 0, op == '-' ? b : a, out);
  if (op == '*') return !__builtin_mul_overflow(a, b, out);
  const int64_t rest = b == -1 ? 0 : a % b;
  const bool below = rest != 0 && (rest < 0) != (b < 0);
  *out = op == '%' ? rest + (below ? b : 0) : a / b - (below ? 1 : 0);
  return true;
}

double of_floats(char op, double a, double b) {
  if (op == '+') return a + b;
  if (op == '-') return a - b;
  if (op == '*') return a * b;
  if (op == '/') return a / b;
  const double rest = std::fmod(a, b), below = rest != 0 && (rest < 0) != (b < 0) ? 1 : 0;
  return op == '%' ? rest + below * b : std::round((a - rest) / b) - below;
}

// 'f' is '//'.
template <char op>
Value arithmetic(Heap&, const Value& a, const Value& b) {
  if (!a.is_number() || !b.is_number()) no_operator(op == 'f' ? "//" : std::string(1, op), a, b);
  if (b.number() == 0 && (op == '/' || op == 'f' || op == '%')) throw Fault("division by zero");
  int64_t out = 0;
  if (a.is<double>() || b.is<double>() || op == '/') return of_floats(op, a.number(), b.number());
  if (!of_ints(op, a.integer(), b.integer(), &out)) throw Fault("a whole number leaves 64 bits");
  return out;
}

Value plus(Heap& heap, const Value& a, const Value& b) {
  return a.is_number() && b.is_number() ? arithmetic<'+'>(heap, a, b) : add(heap, a, b);
}

Value times(Heap& heap, const Value& a, const Value& b) {
  const auto repeats = [](const Value& v) {
    return v.text() != nullptr || (is_sequence(v) && v.list()->flavor != Flavor::kRange);
  };
  if (repeats(a) && b.is_integral()) return repeated(heap, a, b.integer());
  if (repeats(b) && a.is_integral()) return repeated(heap, b, a.integer());
  return arithmetic<'*'>(heap, a, b);
}

template <bool (*accepts)(std::partial_ordering)>
Value ordered(Heap& heap, const Value& a, const Value& b) {
  return accepts(compare(heap, a, b));
}

constexpr Operator kOperators[] = {
    {"==", Level::kComparison,
     [](Heap& heap, const Value& a, const Value& b) { return Value(equals(heap, a, b)); }},
    {"!=", Level::kComparison,
     [](Heap& heap, const Value& a, const Value& b) { return Value(!equals(heap, a, b)); }},
    {"<", Level::kComparison, ordered<std::is_lt>},
    {"<=", Level::kComparison, ordered<std::is_lteq>},
    {">", Level::kComparison, ordered<std::is_gt>},
    {">=", Level::kComparison, ordered<std::is_gteq>},
    {"in", Level::kComparison,
     [](Heap& heap, const Value& a, const Value& b) { return Value(contains(heap, b, a)); }},
    {"not in", Level::kComparison,
     [](Heap& heap, const Value& a, const Value& b) { return Value(!contains(heap, b, a)); }},
    {"+", Level::kSum, plus},
    {"-", Level::kSum, arithmetic<'-'>},
    {"~", Level::kConcat, joined},
    {"*", Level::kProduct, times},
    {"/", Level::kProduct, arithmetic<'/'>},
    {"//", Level::kProduct, arithmetic<'f'>},
    {"%", Level::kProduct, arithmetic<'%'>},
};

}  // namespace

const Operator* find_operator(Level level, std::string_view name) {
  const auto* found =
      std::find_if(std::begin(kOperators), std::end(kOperators),
                   [&](const Operator& o) { return o.level == level && o.name == name; });
  return found == std::end(kOperators) ? nullptr : found;
}

}  // namespace cohort::jinja
