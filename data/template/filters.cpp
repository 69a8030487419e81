// The filters of Jinja, and tojson as transformers defines it.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "data/template/natives.h"
#include "data/template/python.h"
#include "data/template/text.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

const Value& self(const Args& a) {
  return a.values[0];
}

// What most filters of texts do first: str(), which keeps a text as it is.
std::string str_of(Interpreter& in, const Value& v) {
  return to_str(in.budget, v);
}
bool is_markup(const Value& v) {
  return v.text() != nullptr && v.text()->markup;
}
bool flag(const Args& a, size_t i) {
  return truthy(a.values[i]);
}

// Whoever gets one value of a list may go on with an attribute of it: "a.b.0".
class Getter {
 public:
  Getter(Interpreter& in, const Value& attribute) : in_(in) {
    if (attribute.absent() || attribute.is_none()) return;
    if (attribute.text() == nullptr) {
      parts_.push_back(attribute);
      return;
    }
    std::string_view rest = attribute.text()->bytes;
    while (true) {
      const size_t dot = std::min(rest.find('.'), rest.size());
      const std::string_view part = rest.substr(0, dot);
      int64_t index = 0;
      const auto end = std::from_chars(part.data(), part.data() + part.size(), index);
      const bool number = !part.empty() && is_digit(static_cast<unsigned char>(part[0])) &&
                          end.ptr == part.data() + part.size() && end.ec == std::errc();
      parts_.push_back(number ? Value(index) : in.text(std::string(part)));
      if (dot == rest.size()) return;
      rest.remove_prefix(dot + 1);
    }
  }
  // Texts in lower case, so that cases do not count.
  Getter& ignore_case(bool ignore) {
    ignore_case_ = ignore;
    return *this;
  }
  Getter& otherwise(const Value& value) {
    otherwise_ = value;
    return *this;
  }

  Value operator()(Value value) const {
    for (const Value& part : parts_) {
      value = in_.item(value, part);
      if (value.is_undefined() && !otherwise_.absent() && !otherwise_.is_none()) value = otherwise_;
    }
    if (ignore_case_ && value.text() != nullptr) return in_.text(lower(value.text()->bytes));
    return value;
  }

 private:
  Interpreter& in_;
  std::vector<Value> parts_;
  Value otherwise_;
  bool ignore_case_ = false;
};

// Items by their keys, both orders keeping equal ones as they are.
std::vector<Value> sorted(Interpreter& in, const std::vector<Value>& items, bool reverse,
                          const std::function<Value(const Value&)>& key) {
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : items) keyed.emplace_back(key(item), item);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? compare(in.budget, b.first, a.first) < 0
                   : compare(in.budget, a.first, b.first) < 0;
  });
  std::vector<Value> out;
  for (auto& [k, item] : keyed) out.push_back(std::move(item));
  return out;
}

Value sort(Interpreter& in, const Args& a) {
  std::vector<Value> attributes{a.values[3]};
  if (const Text* names = a.values[3].text()) {
    attributes.clear();
    for (size_t begin = 0, comma = 0; comma != std::string::npos; begin = comma + 1) {
      comma = names->bytes.find(',', begin);
      attributes.push_back(in.text(names->bytes.substr(begin, comma - begin)));
    }
  }
  std::vector<Getter> getters;
  for (const Value& attribute : attributes)
    getters.push_back(Getter(in, attribute).ignore_case(!flag(a, 2)));
  return in.list(sorted(in, iterate(in.budget, self(a)), flag(a, 1), [&](const Value& item) {
    std::vector<Value> key;
    for (const Getter& getter : getters) key.push_back(getter(item));
    return in.list(std::move(key));
  }));
}

Value dictsort(Interpreter& in, const Args& a) {
  if (self(a).is_undefined()) throw Fault(self(a).why());
  if (self(a).dict() == nullptr) throw Fault("'dictsort' needs a dict, got " + type_name(self(a)));
  const std::string by = a.values[2].absent() ? "key" : text_argument(a, 2, "by");
  if (by != "key" && by != "value") throw Fault("'dictsort' sorts by 'key' or 'value'");
  const Getter key = Getter(in, Value()).ignore_case(!flag(a, 1));
  std::vector<Value> items;
  for (const auto& [name, value] : self(a).dict()->items)
    items.push_back(in.list({name, value}, Flavor::kTuple));
  return in.list(sorted(in, items, flag(a, 3), [&](const Value& item) {
    return key(item.sequence()->items[by == "key" ? 0 : 1]);
  }));
}

Value groupby(Interpreter& in, const Args& a) {
  Getter key(in, a.values[1]);
  key.otherwise(a.values[2]).ignore_case(!flag(a, 3));
  Getter shown(in, a.values[1]);
  shown.otherwise(a.values[2]);
  const std::vector<Value> items = sorted(in, iterate(in.budget, self(a)), false, key);
  std::vector<Value> groups;
  for (size_t begin = 0, end = 0; begin < items.size(); begin = end) {
    const Value first = key(items[begin]);
    while (end < items.size() && equals(in.budget, key(items[end]), first)) ++end;
    if (end == begin) ++end;  // a NaN equals nothing
    std::vector<Value> group(items.begin() + static_cast<std::ptrdiff_t>(begin),
                             items.begin() + static_cast<std::ptrdiff_t>(end));
    groups.push_back(in.list({shown(items[begin]), in.list(std::move(group))}, Flavor::kGroup));
  }
  return in.list(std::move(groups));
}

Value unique(Interpreter& in, const Args& a) {
  Getter key(in, a.values[2]);
  key.ignore_case(!flag(a, 1));
  DictItems seen;
  std::vector<Value> out;
  for (const Value& item : iterate(in.budget, self(a))) {
    const size_t before = seen.size();
    set_entry(in.budget, seen, key(item), Value::none());
    if (seen.size() > before) out.push_back(item);
  }
  return in.list(std::move(out), Flavor::kIterator);
}

template <int sign>
Value extreme(Interpreter& in, const Args& a) {
  Getter key(in, a.values[2]);
  key.ignore_case(!flag(a, 1));
  const std::vector<Value> items = iterate(in.budget, self(a));
  if (items.empty()) return Value::undefined("the list was empty");
  Value best = items[0], best_key = key(best);
  for (size_t i = 1; i < items.size(); ++i) {
    Value other = key(items[i]);
    const auto order = compare(in.budget, other, best_key);
    if (sign > 0 ? order > 0 : order < 0) best = items[i], best_key = std::move(other);
  }
  return best;
}

Value sum(Interpreter& in, const Args& a) {
  const Getter get(in, a.values[1]);
  Value total = a.values[2].absent() ? Value(int64_t{0}) : a.values[2];
  if (total.text() != nullptr) throw Fault("'sum' adds no texts; hint: use 'join'");
  for (const Value& item : iterate(in.budget, self(a)))
    total = binary(in, Op::kAdd, total, get(item));
  return total;
}

Value join(Interpreter& in, const Args& a) {
  const Getter get(in, a.values[2]);
  const std::string separator = str_of(in, a.values[1]);
  std::string out;
  bool first = true;
  for (const Value& item : iterate(in.budget, self(a))) {
    if (!first) in.budget.append(out, separator);
    in.budget.append(out, str_of(in, get(item)));
    first = false;
  }
  return in.text(std::move(out));
}

Value map(Interpreter& in, const Args& a) {
  Args rest = a;
  std::vector<Value> out;
  if (!truthy(self(a))) return in.list({}, Flavor::kIterator);
  if (a.values.size() == 1) {
    Value attribute, otherwise;
    for (const auto& [name, value] : a.keywords)
      if (name == "attribute")
        attribute = value;
      else if (name == "default")
        otherwise = value;
      else
        throw Fault("'map' takes no argument '" + name + "'");
    if (attribute.absent()) throw Fault("'map' needs a filter or attribute=");
    Getter get(in, attribute);
    get.otherwise(otherwise);
    for (const Value& item : iterate(in.budget, self(a))) out.push_back(get(item));
    return in.list(std::move(out), Flavor::kIterator);
  }
  const std::string& name = text_argument(a, 1, "the name of a filter");
  const Native* filter = find_filter(name);
  if (filter == nullptr) throw Fault("there is no filter " + excerpt(name));
  rest.values.erase(rest.values.begin(), rest.values.begin() + 2);
  for (const Value& item : iterate(in.budget, self(a)))
    out.push_back(in.call_native(*filter, item, rest));
  return in.list(std::move(out), Flavor::kIterator);
}

// select, reject and their -attr variants.
template <bool wanted, bool by_attribute>
Value select(Interpreter& in, const Args& a) {
  constexpr size_t kTest = by_attribute ? 2 : 1;
  if (!truthy(self(a))) return in.list({}, Flavor::kIterator);
  if (a.values.size() < kTest) throw Fault("'selectattr' and 'rejectattr' need an attribute");
  const Getter get(in, by_attribute ? a.values[1] : Value());
  const Native* test = nullptr;
  Args rest = a;
  if (a.values.size() > kTest) {
    const std::string& name = text_argument(a, kTest, "the name of a test");
    test = find_test(name);
    if (test == nullptr) throw Fault("there is no test " + excerpt(name));
    rest.values.erase(rest.values.begin(), rest.values.begin() + kTest + 1);
  }
  std::vector<Value> out;
  for (const Value& item : iterate(in.budget, self(a))) {
    const Value value = get(item);
    if (truthy(test != nullptr ? in.call_native(*test, value, rest) : value) == wanted)
      out.push_back(item);
  }
  return in.list(std::move(out), Flavor::kIterator);
}

Value batch(Interpreter& in, const Args& a) {
  const int64_t size = int_argument(a, 1, 0);
  std::vector<Value> out, row;
  const auto full = [&] { return static_cast<int64_t>(row.size()) == size; };
  for (const Value& item : iterate(in.budget, self(a))) {
    if (full()) out.push_back(in.list(std::exchange(row, {})));
    row.push_back(item);
  }
  if (row.empty()) return in.list(std::move(out), Flavor::kIterator);
  if (!a.values[2].absent() && !a.values[2].is_none())
    while (static_cast<int64_t>(row.size()) < size) {
      in.budget.work(1);
      row.push_back(a.values[2]);
    }
  out.push_back(in.list(std::move(row)));
  return in.list(std::move(out), Flavor::kIterator);
}

Value slice_into(Interpreter& in, const Args& a) {
  const std::vector<Value> items = iterate(in.budget, self(a));
  const int64_t n = int_argument(a, 1, 0);
  if (n == 0) throw Fault("division by zero");
  std::vector<Value> out;
  const auto size = static_cast<int64_t>(items.size());
  auto at = items.begin();
  for (int64_t i = 0; i < n; ++i) {
    const bool longer = i < size % n;
    std::vector<Value> part(at, at + size / n + (longer ? 1 : 0));
    at += static_cast<std::ptrdiff_t>(part.size());
    if (!longer && !a.values[2].absent() && !a.values[2].is_none()) part.push_back(a.values[2]);
    out.push_back(in.list(std::move(part)));
  }
  return in.list(std::move(out), Flavor::kIterator);
}

Value first(Interpreter& in, const Args& a) {
  const std::vector<Value> items = iterate(in.budget, self(a));
  return items.empty() ? Value::undefined("the list was empty") : items[0];
}

void need_reversible(const Value& v) {
  if (!length(v) && v.sequence() == nullptr)
    throw Fault(str("a ", type_name(v), " cannot be reversed"));
}

Value last(Interpreter& in, const Args& a) {
  if (!length(self(a))) throw Fault(str("a ", type_name(self(a)), " has no last item"));
  const std::vector<Value> items = iterate(in.budget, self(a));
  return items.empty() ? Value::undefined("the list was empty") : items.back();
}

Value reverse(Interpreter& in, const Args& a) {
  if (const Text* t = self(a).text()) {
    std::u32string characters = decode(t->bytes);
    std::reverse(characters.begin(), characters.end());
    return in.text(encode(characters), t->markup);
  }
  need_reversible(self(a));
  std::vector<Value> items = iterate(in.budget, self(a));
  std::reverse(items.begin(), items.end());
  const bool once =
      !(self(a).sequence() != nullptr && self(a).sequence()->flavor == Flavor::kIterator);
  return in.list(std::move(items), once ? Flavor::kIterator : Flavor::kList);
}

Value replace(Interpreter& in, const Args& a) {
  Args rest{.values = {in.text(str_of(in, a.values[1])), in.text(str_of(in, a.values[2]))},
            .keywords = {}};
  if (!a.values[3].absent() && !a.values[3].is_none()) rest.values.push_back(a.values[3]);
  const Value text = in.text(str_of(in, self(a)));
  return in.call_native(*find_method(text, "replace"), text, rest);
}

Value indent(Interpreter& in, const Args& a) {
  if (self(a).text() == nullptr)
    throw Fault(self(a).is_undefined() ? self(a).why() : "'indent' needs a text");
  std::string indention;
  if (a.values[1].text() != nullptr)
    indention = a.values[1].text()->bytes;
  else
    in.budget.append(indention, static_cast<size_t>(std::max<int64_t>(int_argument(a, 1, 4), 0)),
                     ' ');
  const std::string text = self(a).text()->bytes + "\n";
  std::string out;
  if (flag(a, 2)) in.budget.append(out, indention);
  bool first = true;
  for (const std::string_view line : split_lines(text)) {
    if (!first) in.budget.append(out, "\n");
    if (!first && (flag(a, 3) || !line.empty())) in.budget.append(out, indention);
    in.budget.append(out, line);
    first = false;
  }
  return in.text(std::move(out), is_markup(self(a)));
}

bool is_title_break(char32_t c) {
  return is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
}

Value title(Interpreter& in, const Args& a) {
  const std::u32string text = decode(str_of(in, self(a)));
  std::string out;
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    while (end < text.size() && is_title_break(text[end]) == is_title_break(text[begin])) ++end;
    in.budget.append(out, capitalize(encode(text.substr(begin, end - begin))));
  }
  return in.text(std::move(out));
}

Value truncate(Interpreter& in, const Args& a) {
  if (self(a).text() == nullptr) throw Fault("'truncate' needs a text");
  const int64_t size = int_argument(a, 1, 255), leeway = int_argument(a, 4, 5);
  const std::string end = a.values[3].absent() ? "..." : text_argument(a, 3, "end");
  const Text& text = *self(a).text();
  const int64_t keep = size - static_cast<int64_t>(decode(end).size());
  if (keep < 0 || leeway < 0) throw Fault("'truncate' to less than nothing");
  if (static_cast<int64_t>(text.length) <= size + leeway) return self(a);
  std::string out = text.bytes.substr(0, byte_of(text, static_cast<size_t>(keep)));
  if (!flag(a, 2)) out = out.substr(0, out.rfind(' '));
  return in.text(out + end);
}

Value wordcount(Interpreter& in, const Args& a) {
  int64_t words = 0;
  bool inside = false;
  for (const char32_t c : decode(str_of(in, self(a)))) {
    const bool word = is_alpha(c) || is_digit(c) || c == '_';
    words += word && !inside;
    inside = word;
  }
  return Value(words);
}

Value urlencode(Interpreter& in, const Args& a) {
  const auto quote = [&](const Value& v, std::string_view safe) {
    std::string out;
    for (const char c : str_of(in, v)) {
      const auto byte = static_cast<unsigned char>(c);
      if ((byte < 0x80 && (is_alpha(byte) || is_digit(byte))) ||
          std::string_view("_.-~").find(c) != std::string_view::npos || safe.find(c) != safe.npos) {
        out += c;
      } else if (c == ' ' && safe.empty()) {
        out += '+';
      } else {
        constexpr char kHex[] = "0123456789ABCDEF";
        out += {'%', kHex[byte >> 4], kHex[byte & 15]};
      }
    }
    return out;
  };
  if (self(a).text() != nullptr || !is_iterable(self(a))) return in.text(quote(self(a), "/"));
  std::string out;
  const auto append = [&](const Value& key, const Value& value) {
    in.budget.append(out, (out.empty() ? "" : "&") + quote(key, "") + "=" + quote(value, ""));
  };
  if (const Dict* d = self(a).dict()) {
    for (const auto& [key, value] : d->items) append(key, value);
  } else {
    for (const Value& pair : iterate(in.budget, self(a))) {
      const std::vector<Value> parts = iterate(in.budget, pair);
      if (parts.size() != 2) throw Fault("'urlencode' needs pairs");
      append(parts[0], parts[1]);
    }
  }
  return in.text(std::move(out));
}

// Numbers.

std::optional<double> parse_float(std::string_view text) {
  std::string digits(strip(text, Side::kBoth));
  std::erase(digits, '_');
  if (digits.starts_with('+') && !digits.starts_with("+-")) digits.erase(0, 1);
  double value = 0;
  const char* end = digits.data() + digits.size();
  const auto result = std::from_chars(digits.data(), end, value);
  if (result.ptr != end || digits.empty()) return {};
  if (result.ec == std::errc::result_out_of_range) return {};
  return value;
}

std::optional<int64_t> parse_int(std::string_view text, int base) {
  std::string digits(strip(text, Side::kBoth));
  std::erase(digits, '_');
  const bool negative = digits.starts_with('-');
  if (negative || digits.starts_with('+')) digits.erase(0, 1);
  constexpr std::pair<int, char> kPrefixes[] = {{16, 'x'}, {8, 'o'}, {2, 'b'}};
  for (const auto& [of, letter] : kPrefixes)
    if ((base == of || base == 0) && digits.size() > 2 && digits[0] == '0' &&
        (digits[1] | 32) == letter) {
      digits.erase(0, 2);
      base = of;
    }
  if (digits.empty() || digits[0] == '-') return {};
  uint64_t value = 0;
  const char* end = digits.data() + digits.size();
  const auto result = std::from_chars(digits.data(), end, value, base == 0 ? 10 : base);
  if (result.ptr != end || result.ec == std::errc::invalid_argument) return {};
  const uint64_t limit = uint64_t{INT64_MAX} + (negative ? 1 : 0);
  if (result.ec != std::errc() || value > limit) throw Fault("a whole number leaves 64 bits");
  return static_cast<int64_t>(negative ? -value : value);
}

Value whole(double value) {
  if (!(std::abs(value) < 9.2e18)) throw Fault("a number is too large for a whole number");
  return Value(static_cast<int64_t>(value));
}

Value to_int(Interpreter&, const Args& a) {
  const Value& v = self(a);
  const Value otherwise = a.values[1].absent() ? Value(int64_t{0}) : a.values[1];
  if (v.is_undefined()) throw Fault(v.why());
  if (v.is_integral()) return Value(v.integer());
  if (v.is_float()) return std::isnan(v.number()) ? otherwise : whole(v.number());
  if (v.text() == nullptr) return otherwise;
  const int64_t base = int_argument(a, 2, 10);
  if (base == 0 || (base >= 2 && base <= 36))
    if (const auto value = parse_int(v.text()->bytes, static_cast<int>(base))) return Value(*value);
  const auto value = parse_float(v.text()->bytes);
  return value && std::isfinite(*value) ? whole(*value) : otherwise;
}

Value to_float(Interpreter&, const Args& a) {
  const Value& v = self(a);
  if (v.is_undefined()) throw Fault(v.why());
  if (v.is_number()) return Value(v.number());
  if (v.text() != nullptr)
    if (const auto value = parse_float(v.text()->bytes)) return Value(*value);
  return a.values[1].absent() ? Value(0.0) : a.values[1];
}

Value absolute(Interpreter&, const Args& a) {
  if (!self(a).is_number()) throw Fault("'abs' needs a number, got " + type_name(self(a)));
  if (self(a).is_float()) return Value(std::abs(self(a).number()));
  return self(a).integer() < 0 ? unary(Op::kSub, self(a)) : Value(self(a).integer());
}

Value round(Interpreter&, const Args& a) {
  if (!self(a).is_number()) throw Fault("'round' needs a number, got " + type_name(self(a)));
  const int64_t digits = std::clamp<int64_t>(int_argument(a, 1, 0), -400, 400);
  const std::string method = a.values[2].absent() ? "common" : text_argument(a, 2, "method");
  const double value = self(a).number(), scale = std::pow(10.0, static_cast<double>(digits));
  if (method == "ceil") return Value(std::ceil(value * scale) / scale);
  if (method == "floor") return Value(std::floor(value * scale) / scale);
  if (method != "common") throw Fault("'round' has the methods common, ceil and floor");
  if (self(a).is_integral() && digits >= 0) return Value(self(a).integer());
  if (!std::isfinite(value)) return self(a);
  if (digits < 0) {
    const double tens = std::pow(10.0, static_cast<double>(-digits));
    const double rounded = std::nearbyint(value / tens) * tens;
    return self(a).is_float() ? Value(std::isfinite(rounded) ? rounded : 0.0)
                              : Value(std::isfinite(rounded) ? static_cast<int64_t>(rounded) : 0);
  }
  // The decimal digits of the exact value, rounded half to even.
  char buffer[1024];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed,
                                 static_cast<int>(digits));
  double rounded = 0;
  std::from_chars(buffer, end.ptr, rounded);
  return Value(rounded);
}

Value tojson(Interpreter& in, const Args& a) {
  JsonStyle style;
  style.ascii = flag(a, 1);
  const Value& indent = a.values[2];
  if (indent.text() != nullptr) {
    style.indent = indent.text()->bytes;
  } else if (!indent.absent() && !indent.is_none()) {
    style.indent.emplace();
    in.budget.append(*style.indent,
                     static_cast<size_t>(std::max<int64_t>(int_argument(a, 2, 0), 0)), ' ');
  }
  style.item_separator = style.indent ? "," : ", ";
  style.key_separator = ": ";
  if (!a.values[3].absent() && !a.values[3].is_none()) {
    const std::vector<Value> separators = iterate(in.budget, a.values[3]);
    if (separators.size() != 2 || separators[0].text() == nullptr ||
        separators[1].text() == nullptr)
      throw Fault("'tojson' needs two texts as separators");
    style.item_separator = separators[0].text()->bytes;
    style.key_separator = separators[1].text()->bytes;
  }
  style.sort_keys = flag(a, 4);
  return in.text(to_json(in, self(a), style));
}

Value format(Interpreter& in, const Args& a) {
  const std::vector<Value> values(a.values.begin() + 1, a.values.end());
  if (!values.empty() && !a.keywords.empty())
    throw Fault("'format' takes positional or keyword arguments, not both");
  DictItems named;
  for (const auto& [name, value] : a.keywords) named.emplace_back(in.text(name), value);
  return in.text(format_percent(
      in, str_of(in, self(a)),
      named.empty() ? in.list(values, Flavor::kTuple) : make_dict(in.budget, std::move(named))));
}

Value items(Interpreter& in, const Args& a) {
  std::vector<Value> out;
  if (self(a).is_undefined()) return in.list({}, Flavor::kIterator);
  if (self(a).dict() == nullptr) throw Fault("'items' needs a dict, got " + type_name(self(a)));
  for (const auto& [key, value] : self(a).dict()->items)
    out.push_back(in.list({key, value}, Flavor::kTuple));
  return in.list(std::move(out), Flavor::kIterator);
}

Value count(Interpreter&, const Args& a) {
  if (const auto n = length(self(a))) return Value(*n);
  throw Fault(str("a ", type_name(self(a)), " has no length"));
}

// A filter that is a function of the text.
template <std::string (*function)(std::string_view)>
Value of_text(Interpreter& in, const Args& a) {
  return in.text(function(str_of(in, self(a))), is_markup(self(a)));
}

Value trim(Interpreter& in, const Args& a) {
  const bool spaces = a.values[1].absent() || a.values[1].is_none();
  const std::string text = str_of(in, self(a));
  const std::string* chars = spaces ? nullptr : &text_argument(a, 1, "chars");
  return in.text(std::string(strip(text, Side::kBoth, chars)), is_markup(self(a)));
}

Value otherwise(Interpreter& in, const Args& a) {
  if (!self(a).is_undefined() && !(flag(a, 2) && !truthy(self(a)))) return self(a);
  return a.values[1].absent() ? in.text("") : a.values[1];
}

Value escape(Interpreter& in, const Args& a) {
  return is_markup(self(a)) ? self(a) : in.text(escape_html(in.budget, str_of(in, self(a))), true);
}

Value attr(Interpreter& in, const Args& a) {
  const Value name = in.text(text_argument(a, 1, "name"));
  return self(a).dict() != nullptr && find_method(self(a), name.text()->bytes) == nullptr
             ? Value::undefined("a dict has no attribute " + excerpt(name.text()->bytes))
             : in.attribute(self(a), name.text()->bytes);
}

Value center(Interpreter& in, const Args& a) {
  const Value text = in.text(str_of(in, self(a)), is_markup(self(a)));
  return in.call_native(*find_method(text, "center"), text,
                        {.values = {Value(int_argument(a, 1, 80))}, .keywords = {}});
}

constexpr Native kFilters[] = {
    {"abs", "", absolute},
    {"attr", "name", attr},
    {"batch", "linecount | fill_with", batch},
    {"capitalize", "", of_text<capitalize>},
    {"center", "| width", center},
    {"count", "", count},
    {"d", "| default_value boolean", otherwise},
    {"default", "| default_value boolean", otherwise},
    {"dictsort", "| case_sensitive by reverse", dictsort},
    {"e", "", escape},
    {"escape", "", escape},
    {"first", "", first},
    {"float", "| default", to_float},
    {"forceescape", "",
     [](Interpreter& in, const Args& a) {
       return in.text(escape_html(in.budget, str_of(in, self(a))), true);
     }},
    {"format", "...", format},
    {"groupby", "attribute | default case_sensitive", groupby},
    {"indent", "| width first blank", indent},
    {"int", "| default base", to_int},
    {"items", "", items},
    {"join", "| d attribute", join},
    {"last", "", last},
    {"length", "", count},
    {"list", "",
     [](Interpreter& in, const Args& a) { return in.list(iterate(in.budget, self(a))); }},
    {"lower", "", of_text<lower>},
    {"map", "...", map},
    {"max", "| case_sensitive attribute", extreme<1>},
    {"min", "| case_sensitive attribute", extreme<-1>},
    {"reject", "...", select<false, false>},
    {"rejectattr", "...", select<false, true>},
    {"replace", "old new | count", replace},
    {"reverse", "", reverse},
    {"round", "| precision method", round},
    {"safe", "", [](Interpreter& in, const Args& a) { return in.text(str_of(in, self(a)), true); }},
    {"select", "...", select<true, false>},
    {"selectattr", "...", select<true, true>},
    {"slice", "slices | fill_with", slice_into},
    {"sort", "| reverse case_sensitive attribute", sort},
    {"string", "",
     [](Interpreter& in, const Args& a) {
       return self(a).text() != nullptr ? self(a) : in.text(str_of(in, self(a)));
     }},
    {"sum", "| attribute start", sum},
    {"title", "", title},
    {"tojson", "| ensure_ascii indent separators sort_keys", tojson},
    {"trim", "| chars", trim},
    {"truncate", "| length killwords end leeway", truncate},
    {"unique", "| case_sensitive attribute", unique},
    {"upper", "", of_text<upper>},
    {"urlencode", "", urlencode},
    {"wordcount", "", wordcount},
};

}  // namespace

const Native* find_filter(std::string_view name) {
  const auto* found = std::find_if(std::begin(kFilters), std::end(kFilters),
                                   [&](const Native& n) { return n.name == name; });
  return found == std::end(kFilters) ? nullptr : found;
}

}  // namespace cohort::jinja
