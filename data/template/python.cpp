// Printing, comparing, iterating and calculating as Python does.
#include "data/template/python.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "data/template/interpreter.h"
#include "data/template/natives.h"
#include "data/template/text.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

constexpr struct {
  Flavor flavor;
  std::string_view type, open, close;
} kFlavors[] = {
    {Flavor::kList, "list", "[", "]"},
    {Flavor::kTuple, "tuple", "(", ")"},
    {Flavor::kGroup, "tuple", "(", ")"},
    {Flavor::kRange, "range", "range(", ")"},
    {Flavor::kKeys, "dict_keys", "dict_keys([", "])"},
    {Flavor::kValues, "dict_values", "dict_values([", "])"},
    {Flavor::kItems, "dict_items", "dict_items([", "])"},
    {Flavor::kIterator, "generator", "<generator [", "]>"},
};

const auto& flavor_of(const Sequence& s) {
  return kFlavors[static_cast<size_t>(s.flavor)];
}

bool is_tuple(const Sequence& s) {
  return s.flavor == Flavor::kTuple || s.flavor == Flavor::kGroup;
}

void write_text(Budget& budget, std::string& out, std::string_view text) {
  const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string piece(1, quote);
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text, at);
    char code[12];
    if (c.code == static_cast<unsigned char>(quote) || c.code == '\\') {
      piece += '\\';
      piece += text[at];
    } else if (c.code == '\n' || c.code == '\r' || c.code == '\t') {
      piece += c.code == '\n' ? "\\n" : c.code == '\r' ? "\\r" : "\\t";
    } else if (is_printable(c.code)) {
      piece += text.substr(at, c.size);
    } else {
      const char* format = c.code < 0x100 ? "\\x%02x" : c.code < 0x10000 ? "\\u%04x" : "\\U%08x";
      std::snprintf(code, sizeof code, format, static_cast<unsigned>(c.code));
      piece += code;
    }
    at += std::max<size_t>(c.size, 1);
  }
  budget.append(out, piece + quote);
}

void write_repr(Budget& budget, std::string& out, const Value& value);

void write_entries(Budget& budget, std::string& out, const DictItems& items) {
  budget.append(out, "{");
  const char* separator = "";
  for (const auto& [key, item] : items) {
    budget.append(out, separator);
    write_repr(budget, out, key);
    budget.append(out, ": ");
    write_repr(budget, out, item);
    separator = ", ";
  }
  budget.append(out, "}");
}

void write_sequence(Budget& budget, std::string& out, const Sequence& s) {
  const auto& flavor = flavor_of(s);
  budget.append(out, flavor.open);
  if (s.flavor == Flavor::kRange) {
    const auto at = [&](size_t i) { return s.items[i].integer(); };
    const int64_t step = s.items.size() > 1 ? at(1) - at(0) : 1;
    budget.append(out, s.items.empty() ? "0, 0" : str(at(0), ", ", at(s.items.size() - 1) + step));
    if (step != 1) budget.append(out, str(", ", step));
  } else {
    const char* separator = "";
    for (const Value& item : s.items) {
      budget.append(out, separator);
      write_repr(budget, out, item);
      separator = ", ";
    }
    if (is_tuple(s) && s.items.size() == 1) budget.append(out, ",");
  }
  budget.append(out, flavor.close);
}

void write_repr(Budget& budget, std::string& out, const Value& value) {
  budget.work(1);
  if (const Text* text = value.text()) {
    if (text->markup) budget.append(out, "Markup(");
    write_text(budget, out, text->bytes);
    if (text->markup) budget.append(out, ")");
  } else if (const Sequence* s = value.sequence()) {
    write_sequence(budget, out, *s);
  } else if (const Dict* d = value.dict()) {
    write_entries(budget, out, d->items);
  } else if (value.is_undefined()) {
    budget.append(out, "Undefined");
  } else {
    budget.append(out, to_str(budget, value));
  }
}

[[noreturn]] void no_operator(const char* op, const Value& a, const Value& b) {
  for (const Value* v : {&a, &b})
    if (v->is_undefined()) throw Fault(v->why());
  throw Fault(str("'", op, "' is not defined for ", type_name(a), " and ", type_name(b)));
}

constexpr const char* kOpNames[] = {
    "+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", "in", "not in"};

}  // namespace

std::string type_name(const Value& value) {
  if (value.is_undefined()) return "Undefined";
  if (value.is_none()) return "None";
  if (value.is_bool()) return "bool";
  if (value.is_int()) return "int";
  if (value.is_float()) return "float";
  if (value.text() != nullptr) return "str";
  if (const Sequence* s = value.sequence()) return std::string(flavor_of(*s).type);
  if (value.dict() != nullptr) return "dict";
  if (value.ns() != nullptr) return "namespace";
  return value.loop() != nullptr ? "loop" : "function";
}

bool truthy(const Value& value) {
  if (value.is_undefined() || value.is_none()) return false;
  if (value.is_number()) return value.number() != 0;
  if (const Sequence* s = value.sequence())
    return s->flavor == Flavor::kIterator || !s->items.empty();
  if (Loop* loop = value.loop()) return loop->count() > 0;
  return length(value).value_or(1) != 0;
}

std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 64> buffer;
  const double size = std::abs(value);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 plain ? std::chars_format::fixed : std::chars_format::scientific);
  std::string out(buffer.data(), end.ptr);
  if (plain && out.find('.') == out.npos) out += ".0";
  return out;
}

std::string repr(Budget& budget, const Value& value) {
  std::string out;
  write_repr(budget, out, value);
  return out;
}

std::string to_str(Budget& budget, const Value& value) {
  if (value.is_undefined()) return "";
  if (value.is_none()) return "None";
  if (value.is_bool()) return value.integer() != 0 ? "True" : "False";
  if (value.is_int()) return std::to_string(value.integer());
  if (value.is_float()) return float_repr(value.number());
  if (const Text* text = value.text()) {
    budget.work(text->bytes.size() / 32);
    return text->bytes;
  }
  if (const Namespace* ns = value.ns()) {
    // A namespace may hold itself.
    std::string out;
    DictItems flat = ns->attributes;
    for (auto& [key, item] : flat)
      if (item.sequence() != nullptr || item.dict() != nullptr || item.ns() != nullptr)
        item = make_text(budget, "...");
    write_entries(budget, out, flat);
    return "<Namespace " + out + ">";
  }
  if (Loop* loop = value.loop())
    return str("<LoopContext ", loop->index0 + 1, "/", loop->count(), ">");
  if (value.callable() != nullptr) {
    const Callable& function = *value.callable();
    if (function.macro != nullptr && function.macro->kind == StmtKind::kMacro)
      return "<Macro '" + function.macro->text + "'>";
    return "<function>";
  }
  return repr(budget, value);
}

bool equals(Budget& budget, const Value& a, const Value& b) {
  budget.work(1);
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return a.number() == b.number();
    return a.integer() == b.integer();
  }
  if (a.text() != nullptr && b.text() != nullptr) {
    if (a.text()->bytes.size() != b.text()->bytes.size()) return false;
    budget.work(a.text()->bytes.size() / 256);
    return a.text()->bytes == b.text()->bytes;
  }
  if (a.is_undefined() && b.is_undefined()) return true;
  if (const Sequence* s = a.sequence(), *t = b.sequence(); s != nullptr && t != nullptr) {
    if (s == t) return true;
    if (flavor_of(*s).type != flavor_of(*t).type || s->flavor == Flavor::kIterator ||
        s->flavor == Flavor::kValues || s->items.size() != t->items.size())
      return false;
    for (size_t i = 0; i < s->items.size(); ++i)
      if (!equals(budget, s->items[i], t->items[i])) return false;
    return true;
  }
  if (const Dict* d = a.dict(), *e = b.dict(); d != nullptr && e != nullptr) {
    if (d == e) return true;
    if (d->items.size() != e->items.size()) return false;
    for (const auto& [key, item] : d->items) {
      const auto other = find_item(budget, b, key);
      if (!other || !equals(budget, item, *other)) return false;
    }
    return true;
  }
  return a.same(b);
}

std::partial_ordering compare(Budget& budget, const Value& a, const Value& b) {
  budget.work(1);
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return a.number() <=> b.number();
    return a.integer() <=> b.integer();
  }
  if (a.text() != nullptr && b.text() != nullptr) {
    budget.work(std::min(a.text()->bytes.size(), b.text()->bytes.size()) / 256);
    // The order of UTF-8 bytes is that of the characters.
    return a.text()->bytes.compare(b.text()->bytes) <=> 0;
  }
  const Sequence *s = a.sequence(), *t = b.sequence();
  if (s != nullptr && t != nullptr && flavor_of(*s).type == flavor_of(*t).type &&
      (s->flavor == Flavor::kList || is_tuple(*s))) {
    for (size_t i = 0; i < std::min(s->items.size(), t->items.size()); ++i)
      if (!equals(budget, s->items[i], t->items[i]))
        return compare(budget, s->items[i], t->items[i]);
    return s->items.size() <=> t->items.size();
  }
  no_operator("<", a, b);
}

bool compare(Interpreter& in, Op op, const Value& a, const Value& b) {
  switch (op) {
    case Op::kEqual:
      return equals(in.budget, a, b);
    case Op::kNotEqual:
      return !equals(in.budget, a, b);
    case Op::kIn:
      return contains(in.budget, b, a);
    case Op::kNotIn:
      return !contains(in.budget, b, a);
    case Op::kLess:
      return compare(in.budget, a, b) < 0;
    case Op::kLessEqual:
      return compare(in.budget, a, b) <= 0;
    case Op::kGreater:
      return compare(in.budget, a, b) > 0;
    default:
      return compare(in.budget, a, b) >= 0;
  }
}

bool is_iterable(const Value& value) {
  return value.is_undefined() || value.text() != nullptr || value.sequence() != nullptr ||
         value.dict() != nullptr || value.loop() != nullptr;
}

std::vector<Value> iterate(Budget& budget, const Value& value) {
  std::vector<Value> items;
  if (value.is_undefined()) return items;
  if (const Sequence* s = value.sequence()) {
    if (s->used_up) return items;
    s->used_up = s->flavor == Flavor::kIterator;
    budget.work(s->items.size());
    return s->items;
  }
  if (const Dict* d = value.dict()) {
    budget.work(d->items.size());
    for (const auto& [key, item] : d->items) items.push_back(key);
    return items;
  }
  if (const Text* text = value.text()) {
    budget.work(text->length);
    for (size_t at = 0; at < text->bytes.size();) {
      const size_t next = next_utf8_boundary(text->bytes, at + 1);
      items.push_back(make_text(budget, text->bytes.substr(at, next - at)));
      at = next;
    }
    return items;
  }
  throw Fault(str("a value of type ", type_name(value), " cannot be iterated over"));
}

std::optional<int64_t> length(const Value& value) {
  const auto size = [](size_t n) { return static_cast<int64_t>(n); };
  if (value.is_undefined()) return 0;
  if (const Text* text = value.text()) return size(text->length);
  if (const Dict* d = value.dict()) return size(d->items.size());
  if (Loop* loop = value.loop()) return loop->count();
  if (const Sequence* s = value.sequence(); s != nullptr && s->flavor != Flavor::kIterator)
    return size(s->items.size());
  return {};
}

bool contains(Budget& budget, const Value& container, const Value& item) {
  if (const Text* text = container.text()) {
    if (item.text() == nullptr) throw Fault(str("'in' a text needs a text, got ", type_name(item)));
    budget.work(text->bytes.size() / 32);
    return text->bytes.find(item.text()->bytes) != std::string::npos;
  }
  if (container.dict() != nullptr) {
    if (item.dict() != nullptr || (item.sequence() != nullptr && !is_tuple(*item.sequence())))
      throw Fault(str("a ", type_name(item), " is no key of a dict"));
    return find_item(budget, container, item).has_value();
  }
  const std::vector<Value> items = iterate(budget, container);
  return std::any_of(items.begin(), items.end(),
                     [&](const Value& i) { return equals(budget, i, item); });
}

std::optional<Value> find_item(Budget& budget, const Value& container, const Value& key) {
  if (const Dict* d = container.dict()) {
    for (const auto& [name, item] : d->items)
      if (equals(budget, name, key)) return item;
    return {};
  }
  const Sequence* s = container.sequence();
  const Text* text = container.text();
  const bool indexed =
      text != nullptr ||
      (s != nullptr && (s->flavor == Flavor::kList || is_tuple(*s) || s->flavor == Flavor::kRange));
  if (!indexed || !key.is_integral()) return {};
  const int64_t size = *length(container);
  const int64_t index = key.integer() < 0 ? key.integer() + size : key.integer();
  if (index < 0 || index >= size) return {};
  const auto i = static_cast<size_t>(index);
  if (s != nullptr) return s->items[i];
  budget.work(text->bytes.size() / 32);
  const size_t begin = byte_of(*text, i);
  return make_text(budget,
                   text->bytes.substr(begin, next_utf8_boundary(text->bytes, begin + 1) - begin),
                   text->markup);
}

Value slice(Budget& budget, const Value& value, const Value& start, const Value& stop,
            const Value& step) {
  const Sequence* s = value.sequence();
  const Text* text = value.text();
  if (value.is_undefined()) throw Fault(value.why());
  if (text == nullptr && (s == nullptr || !(s->flavor == Flavor::kList || is_tuple(*s) ||
                                            s->flavor == Flavor::kRange)))
    throw Fault(str("a ", type_name(value), " cannot be sliced"));
  for (const Value* part : {&start, &stop, &step})
    if (!part->is_none() && !part->is_integral())
      throw Fault(str("a slice needs whole numbers, got ", type_name(*part)));
  const int64_t size = *length(value), by = step.is_none() ? 1 : step.integer();
  if (by == 0) throw Fault("the step of a slice cannot be 0");
  // Where a bound lies among -1 (by < 0 only) .. size.
  const auto bound = [&](const Value& v, int64_t otherwise) {
    if (v.is_none()) return otherwise;
    const int64_t low = by < 0 ? -1 : 0, high = by < 0 ? size - 1 : size;
    const int64_t index = v.integer() < 0 ? v.integer() + size : v.integer();
    return std::clamp(index, low, std::max(low, high));
  };
  const int64_t first = bound(start, by < 0 ? size - 1 : 0), last = bound(stop, by < 0 ? -1 : size);
  std::vector<size_t> indices;
  if (by == 1 && text != nullptr) {
    budget.work(text->bytes.size() / 32);
    const size_t begin = byte_of(*text, static_cast<size_t>(first));
    const size_t end = byte_of(*text, static_cast<size_t>(std::max(first, last)));
    return make_text(budget, text->bytes.substr(begin, end - begin), text->markup);
  }
  budget.work(static_cast<size_t>(size));
  for (int64_t i = first; by < 0 ? i > last : i < last;) {
    indices.push_back(static_cast<size_t>(i));
    if (__builtin_add_overflow(i, by, &i)) break;
  }
  if (text != nullptr) {
    const std::u32string characters = decode(text->bytes);
    std::u32string out;
    for (const size_t i : indices) out += characters[i];
    return make_text(budget, encode(out), text->markup);
  }
  std::vector<Value> items;
  for (const size_t i : indices) items.push_back(s->items[i]);
  return make_list(budget, std::move(items), is_tuple(*s) ? Flavor::kTuple : s->flavor);
}

void set_entry(Budget& budget, DictItems& items, Value key, Value value) {
  if (key.dict() != nullptr || (key.sequence() != nullptr && !is_tuple(*key.sequence())))
    throw Fault(str("a ", type_name(key), " cannot be the key of a dict"));
  for (auto& [name, item] : items)
    if (equals(budget, name, key)) {
      item = std::move(value);
      return;
    }
  items.emplace_back(std::move(key), std::move(value));
}

std::string escape_html(Budget& budget, std::string_view text) {
  constexpr std::string_view kFrom = "&<>'\"";
  constexpr std::string_view kTo[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t next = std::min(text.find_first_of(kFrom, at), text.size());
    budget.append(out, text.substr(at, next - at));
    if (next < text.size()) budget.append(out, kTo[kFrom.find(text[next])]);
    at = next + 1;
  }
  return out;
}

namespace {

Value add(Interpreter& in, const Value& a, const Value& b) {
  const Sequence *s = a.sequence(), *t = b.sequence();
  if (a.text() != nullptr && b.text() != nullptr) {
    const bool markup = a.text()->markup || b.text()->markup;
    std::string out;
    for (const Text* part : {a.text(), b.text()})
      in.budget.append(out,
                       markup && !part->markup ? escape_html(in.budget, part->bytes) : part->bytes);
    return in.text(std::move(out), markup);
  }
  if (s == nullptr || t == nullptr || flavor_of(*s).type != flavor_of(*t).type ||
      !(s->flavor == Flavor::kList || is_tuple(*s)))
    no_operator("+", a, b);
  in.budget.work(s->items.size() + t->items.size());
  std::vector<Value> items = s->items;
  items.insert(items.end(), t->items.begin(), t->items.end());
  return in.list(std::move(items), is_tuple(*s) ? Flavor::kTuple : Flavor::kList);
}

// A text or list so many times.
Value repeat(Interpreter& in, const Value& value, int64_t times) {
  const auto n = static_cast<size_t>(std::max<int64_t>(times, 0));
  const Sequence* s = value.sequence();
  const size_t size = s != nullptr ? s->items.size() : value.text()->bytes.size();
  if (size == 0 || n == 0)
    return s != nullptr ? in.list({}, is_tuple(*s) ? Flavor::kTuple : s->flavor) : in.text("");
  if (s == nullptr) {
    std::string out;
    for (size_t i = 0; i < n; ++i) {
      in.budget.work(1);
      in.budget.append(out, value.text()->bytes);
    }
    return in.text(std::move(out), value.text()->markup);
  }
  std::vector<Value> items;
  for (size_t i = 0; i < n; ++i) {
    in.budget.work(size);
    items.insert(items.end(), s->items.begin(), s->items.end());
  }
  return in.list(std::move(items), is_tuple(*s) ? Flavor::kTuple : s->flavor);
}

double floor_mod(double a, double b) {
  const double rest = std::fmod(a, b);
  if (rest != 0) return (rest < 0) != (b < 0) ? rest + b : rest;
  return std::copysign(0.0, b);
}

// As Python: the floor of the exact quotient, not of the rounded one.
double floor_div(double a, double b) {
  const double quotient = (a - floor_mod(a, b)) / b;
  if (quotient == 0) return std::copysign(0.0, a / b);
  const double whole = std::floor(quotient);
  return quotient - whole > 0.5 ? whole + 1 : whole;
}

Value float_arithmetic(Op op, double a, double b) {
  if (b == 0 && (op == Op::kDiv || op == Op::kFloorDiv || op == Op::kMod))
    throw Fault("division by zero");
  switch (op) {
    case Op::kAdd:
      return Value(a + b);
    case Op::kSub:
      return Value(a - b);
    case Op::kMul:
      return Value(a * b);
    case Op::kDiv:
      return Value(a / b);
    case Op::kFloorDiv:
      return Value(floor_div(a, b));
    case Op::kMod:
      return Value(floor_mod(a, b));
    default:
      break;
  }
  if ((a == 0 && b < 0) || (a < 0 && std::isfinite(b) && b != std::floor(b)))
    throw Fault("a power that is no real number");
  const double power = std::pow(a, b);
  if (std::isinf(power) && std::isfinite(a) && std::isfinite(b))
    throw Fault("a power is too large");
  return Value(power);
}

Value int_arithmetic(Op op, int64_t a, int64_t b) {
  int64_t out = 0;
  bool overflow = false;
  switch (op) {
    case Op::kAdd:
      overflow = __builtin_add_overflow(a, b, &out);
      break;
    case Op::kSub:
      overflow = __builtin_sub_overflow(a, b, &out);
      break;
    case Op::kMul:
      overflow = __builtin_mul_overflow(a, b, &out);
      break;
    case Op::kFloorDiv:
    case Op::kMod: {
      if (b == 0) throw Fault("division by zero");
      if (b == -1) return op == Op::kMod ? Value(int64_t{0}) : int_arithmetic(Op::kSub, 0, a);
      const int64_t rest = a % b;
      const bool below = rest != 0 && (rest < 0) != (b < 0);
      out = op == Op::kMod ? rest + (below ? b : 0) : a / b - (below ? 1 : 0);
      break;
    }
    case Op::kPow: {
      if (b < 0) return float_arithmetic(op, static_cast<double>(a), static_cast<double>(b));
      out = 1;
      if (a == 0 || a == 1 || a == -1) {
        out = b == 0 ? 1 : a == -1 && b % 2 == 0 ? 1 : a;
        break;
      }
      for (; b > 0 && !overflow; --b) overflow = __builtin_mul_overflow(out, a, &out);
      break;
    }
    default:
      return float_arithmetic(op, static_cast<double>(a), static_cast<double>(b));
  }
  if (overflow) throw Fault("a whole number leaves 64 bits");
  return Value(out);
}

}  // namespace

Value binary(Interpreter& in, Op op, const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return float_arithmetic(op, a.number(), b.number());
    return int_arithmetic(op, a.integer(), b.integer());
  }
  const auto repeatable = [](const Value& v) {
    const Sequence* s = v.sequence();
    return v.text() != nullptr || (s != nullptr && (s->flavor == Flavor::kList || is_tuple(*s)));
  };
  if (op == Op::kAdd) return add(in, a, b);
  if (op == Op::kMul && repeatable(a) && b.is_integral()) return repeat(in, a, b.integer());
  if (op == Op::kMul && repeatable(b) && a.is_integral()) return repeat(in, b, a.integer());
  if (op == Op::kMod && a.text() != nullptr)
    return in.text(format_percent(in, a.text()->bytes, b), a.text()->markup);
  no_operator(kOpNames[static_cast<size_t>(op)], a, b);
}

Value unary(Op op, const Value& value) {
  if (value.is_undefined()) throw Fault(value.why());
  if (!value.is_number()) throw Fault(str("a sign before a ", type_name(value)));
  if (value.is_float()) return Value(op == Op::kSub ? -value.number() : value.number());
  return op == Op::kSub ? int_arithmetic(Op::kSub, 0, value.integer()) : Value(value.integer());
}

}  // namespace cohort::jinja
