// Texts from values by Python's rules: `%`, format(), json.dumps() and strftime().
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <ctime>

#include "data/template/natives.h"
#include "data/template/python.h"
#include "data/template/text.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

constexpr int kMaxPrecision = 400;

// How one value is to be shown: the parts of a format specification that % and format() share.
struct Spec {
  std::string fill = " ";
  char align = 0;  // <, >, ^, or = (between sign and digits)
  char sign = 0;
  bool alternate = false, comma = false;
  int64_t width = 0;
  int precision = -1;
  char type = 0;
};

std::string with_commas(std::string digits) {
  const size_t end = std::min(digits.find_first_not_of("0123456789"), digits.size());
  for (size_t at = end; at > 3; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

// A number without its sign.
std::string digits_of(const Value& value, const Spec& spec) {
  const char type = spec.type;
  if (value.is_integral() && std::string_view("eEfFgG%").find(type) == std::string_view::npos) {
    const int base = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
    const int64_t n = value.integer();
    std::array<char, 72> buffer;
    const auto size = n < 0 ? 0 - static_cast<uint64_t>(n) : static_cast<uint64_t>(n);
    const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), size, base);
    std::string out(buffer.data(), end.ptr);
    if (type == 'X') out = upper(out);
    if (spec.alternate && base != 10) out = std::string("0") + type + out;
    return out;
  }
  const double size = std::abs(value.number()) * (type == '%' ? 100 : 1);
  if (!std::isfinite(size)) {
    const char* name = std::isnan(size) ? "nan" : "inf";
    return (type == 'E' || type == 'F' || type == 'G' ? upper(name) : name) +
           std::string(type == '%' ? "%" : "");
  }
  if (type == 0 && spec.precision < 0) return float_repr(size);
  const char lower_type = static_cast<char>(type | 32);
  const auto format = lower_type == 'e'                  ? std::chars_format::scientific
                      : lower_type == 'f' || type == '%' ? std::chars_format::fixed
                                                         : std::chars_format::general;
  std::array<char, 1024> buffer;
  const int precision = spec.precision < 0 ? 6 : spec.precision;
  const auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), size, format,
                    format == std::chars_format::general ? std::max(precision, 1) : precision);
  std::string out(buffer.data(), end.ptr);
  if (type == 0 && out.find_first_of(".e") == out.npos) out += ".0";
  if (type == 'E' || type == 'G') out = upper(out);
  return out + (type == '%' ? "%" : "");
}

// `prefix` (a sign) and `body` in their field.
void append_field(Budget& budget, std::string& out, const std::string& prefix,
                  const std::string& body, const Spec& spec) {
  const auto size = static_cast<int64_t>(decode(prefix).size() + decode(body).size());
  const int64_t missing = std::max<int64_t>(spec.width - size, 0);
  const int64_t left = spec.align == '<' ? 0 : spec.align == '^' ? missing / 2 : missing;
  const auto pad = [&](int64_t n) {
    for (; n > 0; --n) {
      budget.work(1);
      budget.append(out, spec.fill);
    }
  };
  if (spec.align == '=') budget.append(out, prefix);
  pad(left);
  if (spec.align != '=') budget.append(out, prefix);
  budget.append(out, body);
  pad(missing - left);
}

void append_value(Budget& budget, std::string& out, const Value& value, Spec spec) {
  const bool as_text = spec.type == 's' || (spec.type == 0 && !value.is_number()) ||
                       (spec.type == 0 && value.is_bool());
  if (as_text) {
    std::string text = to_str(budget, value);
    if (spec.precision >= 0)
      text = encode(decode(text).substr(0, static_cast<size_t>(spec.precision)));
    if (spec.align == 0) spec.align = '<';
    return append_field(budget, out, "", text, spec);
  }
  if (!value.is_number()) throw Fault(str("a ", type_name(value), " where a number is needed"));
  if (spec.type == 'c') {
    const Utf8Char c{static_cast<char32_t>(value.integer()), 1};
    if (value.integer() < 0 || value.integer() > 0x10ffff || (c.code >= 0xd800 && c.code < 0xe000))
      throw Fault("a number that stands for no character");
    return append_field(budget, out, "", encode_utf8(c.code), spec);
  }
  if (spec.align == 0) spec.align = '>';
  std::string body = digits_of(value, spec);
  if (spec.comma) body = with_commas(body);
  const double n = value.number();
  const bool negative = value.is_float() ? std::signbit(n) && !std::isnan(n) : value.integer() < 0;
  append_field(budget, out,
               negative                               ? "-"
               : spec.sign == '+' || spec.sign == ' ' ? std::string(1, spec.sign)
                                                      : "",
               body, spec);
}

// Reads a number without sign.
int64_t take_number(std::string_view text, size_t& at) {
  int64_t n = 0;
  const char* begin = text.data() + at;
  if (at >= text.size() || !is_digit(static_cast<unsigned char>(*begin))) return -1;
  const auto result = std::from_chars(begin, text.data() + text.size(), n);
  if (result.ec != std::errc()) throw Fault("a number in a format is too large");
  at += static_cast<size_t>(result.ptr - begin);
  return n;
}

int checked_precision(int64_t precision) {
  if (precision > kMaxPrecision) throw Fault(str("a precision over ", kMaxPrecision));
  return static_cast<int>(precision);
}

// The values of `text % values`, one by one or by name.
class PercentValues {
 public:
  PercentValues(Budget& budget, const Value& values) : budget_(budget), values_(values) {
    const Sequence* s = values.sequence();
    tuple_ = s != nullptr && s->flavor == Flavor::kTuple ? s : nullptr;
  }
  Value next() {
    if (tuple_ == nullptr && used_++ == 0) return values_;
    if (tuple_ == nullptr || used_ >= tuple_->items.size())
      throw Fault("a format needs more values than there are");
    return tuple_->items[used_++];
  }
  Value named(const std::string& name) {
    used_ = 1;
    if (values_.dict() == nullptr) throw Fault("a format with names needs a dict");
    if (auto v = find_item(budget_, values_, make_text(budget_, name))) return *v;
    throw Fault("a format names a value that is missing: " + excerpt(name));
  }
  bool all_used() const {
    return tuple_ != nullptr ? used_ >= tuple_->items.size()
                             : used_ > 0 || values_.dict() != nullptr || values_.is_undefined() ||
                                   values_.sequence() != nullptr;
  }

 private:
  Budget& budget_;
  const Value& values_;
  const Sequence* tuple_;
  size_t used_ = 0;
};

int64_t star(PercentValues& values) {
  const Value v = values.next();
  if (!v.is_integral()) throw Fault("'*' in a format needs a whole number");
  return v.integer();
}

// Flags, width and precision of a "%...".
Spec take_percent_spec(std::string_view format, size_t& at, PercentValues& values) {
  Spec spec;
  bool zero = false;
  const auto peek = [&] { return at < format.size() ? format[at] : '\0'; };
  for (; std::string_view("-+ #0").find(peek()) != std::string_view::npos; ++at) {
    if (peek() == '-') spec.align = '<';
    if (peek() == '+' || (peek() == ' ' && spec.sign == 0)) spec.sign = peek();
    if (peek() == '#') spec.alternate = true;
    if (peek() == '0') zero = true;
  }
  if (peek() == '*') {
    ++at;
    spec.width = star(values);
    if (spec.width < 0) spec.align = '<';
    spec.width = std::abs(std::max<int64_t>(spec.width, -INT64_MAX));
  } else {
    spec.width = std::max<int64_t>(take_number(format, at), 0);
  }
  if (peek() == '.') {
    ++at;
    const int64_t precision = peek() == '*' ? (++at, star(values)) : take_number(format, at);
    spec.precision = checked_precision(std::max<int64_t>(precision, 0));
  }
  if (spec.align == 0) spec.align = zero ? '=' : '>';
  if (spec.align == '=') spec.fill = "0";
  return spec;
}

// One "%..." from behind its percent sign.
void append_percent(Interpreter& in, std::string& out, std::string_view format, size_t& at,
                    PercentValues& values) {
  std::optional<Value> value;
  const auto peek = [&] { return at < format.size() ? format[at] : '\0'; };
  if (peek() == '(') {
    const size_t end = format.find(')', at);
    if (end == format.npos) throw Fault("a format has '%(' without ')'");
    value = values.named(std::string(format.substr(at + 1, end - at - 1)));
    at = end + 1;
  }
  Spec spec = take_percent_spec(format, at, values);
  while (peek() == 'l' || peek() == 'h' || peek() == 'L') ++at;
  spec.type = peek();
  ++at;
  if (spec.type == '%') return in.budget.append(out, "%");
  const bool known = spec.type != 0 &&
                     std::string_view("sradiuxXoeEfFgGc").find(spec.type) != std::string_view::npos;
  if (!known) throw Fault("a format has an unknown conversion after '%'");
  if (!value) value = values.next();
  if (spec.type == 'r' || spec.type == 'a') value = in.text(repr(in.budget, *value));
  if (spec.type == 'c' && value->text() != nullptr && value->text()->length != 1)
    throw Fault("%c needs one character");
  const bool text = spec.type == 's' || spec.type == 'r' || spec.type == 'a' ||
                    (spec.type == 'c' && value->text() != nullptr);
  if (text) spec.type = 's';
  if (spec.type == 'd' || spec.type == 'i' || spec.type == 'u') {
    if (value->is_float()) {
      if (!(std::abs(value->number()) < 9.2e18)) throw Fault("%d of a number that is too large");
      value = Value(static_cast<int64_t>(value->number()));
    }
    spec.type = 'd';
  } else if (!text && value->is_float() &&
             std::string_view("xXoc").find(spec.type) != std::string_view::npos) {
    throw Fault("a float where a format needs a whole number");
  }
  if (text && spec.align == '=') spec.align = '>', spec.fill = " ";
  if (value->is_integral() && !text && spec.precision >= 0 && spec.type == 'd') {
    const std::string digits = digits_of(*value, spec);
    if (static_cast<int>(digits.size()) < spec.precision)
      value =
          in.text((value->integer() < 0 ? "-" : "") +
                  std::string(static_cast<size_t>(spec.precision) - digits.size(), '0') + digits);
    if (value->text() != nullptr) spec.type = 's', spec.precision = -1;
  }
  append_value(in.budget, out, *value, spec);
}

// The part of a format() specification behind the colon.
Spec parse_spec(std::string_view text) {
  Spec spec;
  size_t at = 0;
  const auto peek = [&] { return at < text.size() ? text[at] : '\0'; };
  const auto is_align = [](char c) { return c == '<' || c == '>' || c == '^' || c == '='; };
  const size_t first = decode_utf8(text, 0).size;
  if (first > 0 && first < text.size() && is_align(text[first])) {
    spec.fill = text.substr(0, first);
    spec.align = text[first];
    at = first + 1;
  } else if (is_align(peek())) {
    spec.align = text[at++];
  }
  if (peek() == '+' || peek() == '-' || peek() == ' ') spec.sign = text[at++];
  if (peek() == '#') spec.alternate = true, ++at;
  if (peek() == '0' && spec.align == 0) spec.align = '=', spec.fill = "0";
  spec.width = std::max<int64_t>(take_number(text, at), 0);
  if (peek() == ',') spec.comma = true, ++at;
  if (peek() == '.') {
    ++at;
    const int64_t precision = take_number(text, at);
    if (precision < 0) throw Fault("a format has a '.' without a precision");
    spec.precision = checked_precision(precision);
  }
  spec.type = peek();
  if (spec.type != 0) ++at;
  if (at < text.size() || (spec.type != 0 && std::string_view("sdxXobceEfFgG%").find(spec.type) ==
                                                 std::string_view::npos))
    throw Fault("an unknown format specification " + excerpt(text));
  return spec;
}

// "name.attribute[key]" of a replacement field.
Value field_value(Interpreter& in, std::string_view field, const Args& args, size_t& automatic) {
  size_t at = std::min(field.find_first_of(".["), field.size());
  const std::string first(field.substr(0, at));
  size_t digits = 0;
  const int64_t number = take_number(first, digits);
  std::optional<Value> value;
  if (first.empty() || (number >= 0 && digits == first.size())) {
    const size_t index = first.empty() ? automatic++ : static_cast<size_t>(number);
    if (index + 1 < args.values.size()) value = args.values[index + 1];
  } else {
    for (const auto& [name, v] : args.keywords)
      if (name == first) value = v;
  }
  if (!value) throw Fault("format() has no value for " + excerpt(first));
  while (at < field.size()) {
    const bool is_attribute = field[at] == '.';
    const size_t end = is_attribute ? std::min(field.find_first_of(".[", at + 1), field.size())
                                    : field.find(']', at);
    if (end == field.npos || (field[at] != '.' && field[at] != '['))
      throw Fault("a field of format() that cannot be read: " + excerpt(field));
    const std::string name(field.substr(at + 1, end - at - 1));
    size_t used = 0;
    const int64_t index = take_number(name, used);
    value = is_attribute                        ? in.attribute(*value, name)
            : index >= 0 && used == name.size() ? in.item(*value, Value(index))
                                                : in.item(*value, in.text(name));
    at = is_attribute ? end : end + 1;
  }
  return *value;
}

}  // namespace

std::string format_percent(Interpreter& in, const std::string& format, const Value& values) {
  PercentValues left(in.budget, values);
  std::string out;
  for (size_t at = 0; at < format.size();) {
    const size_t percent = std::min(format.find('%', at), format.size());
    in.budget.work(1);
    in.budget.append(out, std::string_view(format).substr(at, percent - at));
    at = percent + 1;
    if (percent < format.size()) append_percent(in, out, format, at, left);
  }
  if (!left.all_used()) throw Fault("a format does not use all its values");
  return out;
}

std::string format_braces(Interpreter& in, const std::string& format, const Args& args) {
  std::string out;
  size_t automatic = 0;
  const std::string_view text = format;
  for (size_t at = 0; at < text.size();) {
    const size_t brace = std::min(text.find_first_of("{}", at), text.size());
    in.budget.work(1);
    in.budget.append(out, text.substr(at, brace - at));
    if (brace == text.size()) break;
    at = brace + 1;
    if (at < text.size() && text[at] == text[brace]) {
      in.budget.append(out, text.substr(brace, 1));
      ++at;
      continue;
    }
    const size_t end = text.find('}', at);
    if (text[brace] == '}' || end == text.npos) throw Fault("a single brace in format()");
    std::string_view field = text.substr(at, end - at), spec;
    if (field.find('{') != field.npos) throw Fault("format() with fields inside fields");
    at = end + 1;
    if (const size_t colon = field.find(':'); colon != field.npos) {
      spec = field.substr(colon + 1);
      field = field.substr(0, colon);
    }
    char conversion = 0;
    if (const size_t mark = field.find('!'); mark != field.npos) {
      conversion = field.size() == mark + 2 ? field.back() : '?';
      field = field.substr(0, mark);
    }
    Value value = field_value(in, field, args, automatic);
    if (conversion != 0 && conversion != 's' && conversion != 'r' && conversion != 'a')
      throw Fault("an unknown conversion in format()");
    if (conversion != 0)
      value = in.text(conversion == 's' ? to_str(in.budget, value) : repr(in.budget, value));
    const Spec parsed = parse_spec(spec);
    if (!spec.empty() && value.is_bool()) value = Value(value.integer());
    if (!spec.empty() && !value.is_number() &&
        (value.text() == nullptr || parsed.sign != 0 || parsed.align == '=' || parsed.comma))
      throw Fault(str("a ", type_name(value), " takes no such format specification"));
    append_value(in.budget, out, value, parsed);
  }
  return out;
}

namespace {

void append_json_text(Budget& budget, std::string& out, std::string_view text, bool ascii) {
  std::string piece = "\"";
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text, at);
    constexpr std::string_view kFrom = "\"\\\n\r\t\f\b", kTo = "\"\\nrtfb";
    const auto escape = [&](unsigned code) {
      char buffer[16];
      std::snprintf(buffer, sizeof buffer, "\\u%04x", code);
      piece += buffer;
    };
    if (const size_t known = c.code < 0x80 ? kFrom.find(static_cast<char>(c.code)) : kFrom.npos;
        known != kFrom.npos) {
      piece += '\\';
      piece += kTo[known];
    } else if (c.code < 0x20 || (ascii && c.code >= 0x80 && c.code < 0x10000)) {
      escape(c.code);
    } else if (ascii && c.code >= 0x10000) {
      escape(0xd800 + ((c.code - 0x10000) >> 10));
      escape(0xdc00 + ((c.code - 0x10000) & 0x3ff));
    } else {
      piece += text.substr(at, c.size);
    }
    at += std::max<size_t>(c.size, 1);
  }
  budget.append(out, piece + "\"");
}

std::string json_key(Interpreter& in, const Value& key) {
  if (key.text() != nullptr) return key.text()->bytes;
  if (key.is_bool()) return key.integer() != 0 ? "true" : "false";
  if (key.is_none()) return "null";
  if (key.is_number()) return to_str(in.budget, key);
  throw Fault(str("a ", type_name(key), " cannot be a key in JSON"));
}

class JsonWriter {
 public:
  JsonWriter(Interpreter& in, const JsonStyle& style) : in_(in), style_(style) {}
  std::string take(const Value& value) {
    write(value);
    return std::move(out_);
  }

 private:
  void put(std::string_view piece) { in_.budget.append(out_, piece); }
  void line() {
    if (!style_.indent) return;
    put("\n");
    for (int i = 0; i < depth_; ++i) put(*style_.indent);
  }
  // Items between brackets.
  template <class Items, class Write>
  void container(std::string_view brackets, const Items& items, Write write_item) {
    if (items.empty()) return put(brackets);
    put(brackets.substr(0, 1));
    ++depth_;
    bool first = true;
    for (const auto& item : items) {
      if (!first) put(style_.item_separator);
      line();
      write_item(item);
      first = false;
    }
    --depth_;
    line();
    put(brackets.substr(1));
  }

  void write(const Value& value) {
    in_.budget.work(1);
    const Sequence* s = value.sequence();
    if (value.is_none()) {
      put("null");
    } else if (value.is_bool()) {
      put(value.integer() != 0 ? "true" : "false");
    } else if (value.is_float() && !std::isfinite(value.number())) {
      put(std::isnan(value.number()) ? "NaN" : value.number() > 0 ? "Infinity" : "-Infinity");
    } else if (value.is_number()) {
      put(to_str(in_.budget, value));
    } else if (value.text() != nullptr) {
      append_json_text(in_.budget, out_, value.text()->bytes, style_.ascii);
    } else if (s != nullptr && (s->flavor == Flavor::kList || s->flavor == Flavor::kTuple ||
                                s->flavor == Flavor::kGroup)) {
      container("[]", s->items, [&](const Value& item) { write(item); });
    } else if (value.dict() != nullptr) {
      write_dict(value.dict()->items);
    } else {
      throw Fault(value.is_undefined() ? "undefined in JSON: " + value.why()
                                       : str("a ", type_name(value), " cannot be JSON"));
    }
  }

  void write_dict(DictItems items) {
    if (style_.sort_keys)
      std::stable_sort(items.begin(), items.end(), [&](const auto& a, const auto& b) {
        return compare(in_.budget, a.first, b.first) < 0;
      });
    container("{}", items, [&](const auto& item) {
      append_json_text(in_.budget, out_, json_key(in_, item.first), style_.ascii);
      put(style_.key_separator);
      write(item.second);
    });
  }

  Interpreter& in_;
  const JsonStyle& style_;
  std::string out_;
  int depth_ = 0;
};

constexpr std::string_view kDays[] = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                      "Thursday", "Friday", "Saturday"};
constexpr std::string_view kMonths[] = {"January",   "February", "March",    "April",
                                        "May",       "June",     "July",     "August",
                                        "September", "October",  "November", "December"};

// Year and week of ISO 8601: weeks begin on Mondays, and belong to the year of their Thursday.
std::pair<int, int> iso_week(const std::tm& t) {
  const int weekday = (t.tm_wday + 6) % 7;
  int year = t.tm_year + 1900, thursday = t.tm_yday + 3 - weekday;
  const auto days = [](int y) { return 365 + (y % 4 == 0 && (y % 100 != 0 || y % 400 == 0)); };
  if (thursday < 0)
    thursday += days(--year);
  else if (thursday >= days(year))
    thursday -= days(year++);
  return {year, thursday / 7 + 1};
}

struct TimeNumber {
  char code;
  int width;
  char fill;
  int (*value)(const std::tm&);
};
constexpr TimeNumber kTimeNumbers[] = {
    {'d', 2, '0', [](const std::tm& t) { return t.tm_mday; }},
    {'e', 2, ' ', [](const std::tm& t) { return t.tm_mday; }},
    {'m', 2, '0', [](const std::tm& t) { return t.tm_mon + 1; }},
    {'y', 2, '0', [](const std::tm& t) { return (t.tm_year + 1900) % 100; }},
    {'Y', 1, '0', [](const std::tm& t) { return t.tm_year + 1900; }},
    {'C', 2, '0', [](const std::tm& t) { return (t.tm_year + 1900) / 100; }},
    {'H', 2, '0', [](const std::tm& t) { return t.tm_hour; }},
    {'k', 2, ' ', [](const std::tm& t) { return t.tm_hour; }},
    {'I', 2, '0', [](const std::tm& t) { return (t.tm_hour + 11) % 12 + 1; }},
    {'l', 2, ' ', [](const std::tm& t) { return (t.tm_hour + 11) % 12 + 1; }},
    {'M', 2, '0', [](const std::tm& t) { return t.tm_min; }},
    {'S', 2, '0', [](const std::tm& t) { return t.tm_sec; }},
    {'j', 3, '0', [](const std::tm& t) { return t.tm_yday + 1; }},
    {'w', 1, '0', [](const std::tm& t) { return t.tm_wday; }},
    {'u', 1, '0', [](const std::tm& t) { return (t.tm_wday + 6) % 7 + 1; }},
    {'U', 2, '0', [](const std::tm& t) { return (t.tm_yday + 7 - t.tm_wday) / 7; }},
    {'W', 2, '0', [](const std::tm& t) { return (t.tm_yday + 7 - (t.tm_wday + 6) % 7) / 7; }},
    {'V', 2, '0', [](const std::tm& t) { return iso_week(t).second; }},
    {'G', 1, '0', [](const std::tm& t) { return iso_week(t).first; }},
    {'f', 6, '0', [](const std::tm&) { return 0; }},
};
constexpr std::pair<char, std::string_view> kTimeFormats[] = {{'c', "%a %b %e %H:%M:%S %Y"},
                                                              {'D', "%m/%d/%y"},
                                                              {'F', "%Y-%m-%d"},
                                                              {'R', "%H:%M"},
                                                              {'r', "%I:%M:%S %p"},
                                                              {'T', "%H:%M:%S"},
                                                              {'x', "%m/%d/%y"},
                                                              {'X', "%H:%M:%S"},
                                                              {'n', "\n"},
                                                              {'t', "\t"},
                                                              {'Z', ""},
                                                              {'z', ""}};

}  // namespace

std::string to_json(Interpreter& in, const Value& value, const JsonStyle& style) {
  return JsonWriter(in, style).take(value);
}

std::string format_time(Budget& budget, const std::tm& t, const std::string& format) {
  std::string out;
  for (size_t at = 0; at < format.size();) {
    const size_t percent = std::min(format.find('%', at), format.size());
    budget.work(1);
    budget.append(out, std::string_view(format).substr(at, percent - at));
    size_t next = percent + 1;
    // glibc's flags: no padding, padding with spaces or zeros, upper case.
    const char mark = next < format.size() ? format[next] : '\0';
    const bool flagged = mark == '-' || mark == '_' || mark == '0' || mark == '^';
    const char code = next + flagged < format.size() ? format[next + flagged] : '\0';
    at = std::min(next + flagged + 1, format.size());
    if (percent == format.size()) break;
    std::string piece;
    const auto* number = std::find_if(std::begin(kTimeNumbers), std::end(kTimeNumbers),
                                      [&](const TimeNumber& n) { return n.code == code; });
    const auto* longer = std::find_if(std::begin(kTimeFormats), std::end(kTimeFormats),
                                      [&](const auto& f) { return f.first == code; });
    if (number != std::end(kTimeNumbers)) {
      piece = std::to_string(number->value(t));
      const char fill = mark == '_' ? ' ' : mark == '0' ? '0' : number->fill;
      if (mark != '-' && static_cast<int>(piece.size()) < number->width)
        piece.insert(0, static_cast<size_t>(number->width) - piece.size(), fill);
    } else if (code == 'A' || code == 'a') {
      piece = kDays[t.tm_wday].substr(0, code == 'a' ? 3 : 99);
    } else if (code == 'B' || code == 'b' || code == 'h') {
      piece = kMonths[t.tm_mon].substr(0, code == 'B' ? 99 : 3);
    } else if (code == 'p' || code == 'P') {
      piece = t.tm_hour < 12 ? (code == 'p' ? "AM" : "am") : (code == 'p' ? "PM" : "pm");
    } else if (code == '%') {
      piece = "%";
    } else if (longer != std::end(kTimeFormats)) {
      piece = format_time(budget, t, std::string(longer->second));
    } else {
      piece = format.substr(percent, at - percent);
    }
    budget.append(out, mark == '^' ? upper(piece) : piece);
  }
  return out;
}

}  // namespace cohort::jinja
