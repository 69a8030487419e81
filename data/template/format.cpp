// JSON, `%` and strftime as Python has them.
#include "data/template/format.h"

#include <locale.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "data/template/text.h"

namespace cohort::jinja {
namespace {

class JsonWriter {
 public:
  JsonWriter(Heap& heap, const JsonStyle& style) : heap_(heap), style_(style) {}
  std::string take(const Value& value) {
    write(value);
    return std::move(out_);
  }

 private:
  void put(std::string_view piece) { heap_.append(out_, piece); }
  void put_line() {
    if (!style_.indent) return;
    put("\n");
    heap_.append(out_, *style_.indent, depth_);
  }

  // Items between brackets.
  template <class Items, class Write>
  void put_all(std::string_view brackets, const Items& items, Write write_item) {
    if (items.empty()) return put(brackets);
    put(brackets.substr(0, 1));
    ++depth_;
    for (const auto& item : items) {
      if (&item != &items[0]) put(style_.item_separator);
      put_line();
      write_item(item);
    }
    --depth_;
    put_line();
    put(brackets.substr(1));
  }

  void put_text(const std::string& text) {
    const std::string quoted = Json(text).dump();
    if (!style_.ascii) return put(quoted);
    for (const char32_t c : decode(quoted)) {
      const char32_t beyond = c - 0x10000;
      char code[16] = {static_cast<char>(c)};
      if (c >= 0x10000)
        std::snprintf(code, sizeof code, "\\u%04x\\u%04x",
                      static_cast<unsigned>(0xd800 + (beyond >> 10)),
                      static_cast<unsigned>(0xdc00 + (beyond & 0x3ff)));
      else if (c >= 0x7f)
        std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      put(code);
    }
  }

  // A number or a constant.
  std::string scalar(const Value& value) {
    if (value.is<None>()) return "null";
    if (value.is<bool>()) return value.integer() != 0 ? "true" : "false";
    if (value.is<Undefined>()) throw Fault("undefined in JSON: " + value.why());
    if (!value.is_number()) throw Fault(str("a ", type_name(value), " cannot be JSON"));
    if (std::isfinite(value.number())) return to_str(heap_, value);
    return std::isnan(value.number()) ? "NaN" : value.number() > 0 ? "Infinity" : "-Infinity";
  }

  void write(const Value& value) {
    heap_.work(1);
    if (value.text() != nullptr) {
      put_text(value.text()->bytes);
    } else if (value.list() != nullptr &&
               (value.is_tuple() || value.list()->flavor == Flavor::kList)) {
      put_all("[]", value.list()->items, [&](const Value& item) { write(item); });
    } else if (value.dict() != nullptr) {
      Entries entries = value.dict()->entries;
      if (style_.sort_keys)
        std::stable_sort(entries.begin(), entries.end(), [&](const auto& a, const auto& b) {
          return compare(heap_, a.first, b.first) < 0;
        });
      put_all("{}", entries, [&](const auto& entry) {
        const Text* key = entry.first.text();
        put_text(key != nullptr ? key->bytes : scalar(entry.first));
        put(style_.key_separator);
        write(entry.second);
      });
    } else {
      put(scalar(value));
    }
  }

  Heap& heap_;
  const JsonStyle& style_;
  std::string out_;
  size_t depth_ = 0;
};

// Digits of a format; -1 if there are none.
int take_number(std::string_view text, size_t& at) {
  int number = -1;
  const auto result = std::from_chars(text.data() + at, text.data() + text.size(), number);
  if (result.ec == std::errc::result_out_of_range || number > 1000)
    throw Fault("a width of more than 1000 in a format");
  at = static_cast<size_t>(result.ptr - text.data());
  return number;
}

// A value as one conversion prints it, but for its width.
std::string converted(Heap& heap, char type, int precision, const Value& value) {
  if (type == 's' || type == 'r') {
    const std::string text = type == 's' ? to_str(heap, value) : repr(heap, value);
    return precision < 0 ? text : text.substr(0, byte_of(text, static_cast<size_t>(precision)));
  }
  const bool is_float = type == 'f' || type == 'e' || type == 'g';
  if (std::string_view("dixfeg").find(type) == std::string_view::npos)
    throw Fault(str("an unknown conversion '%", type, "' in a format"));
  if (!value.is_number() || (type == 'x' && value.is<double>()))
    throw Fault(str("'%", type, "' needs a number, got ", type_name(value)));
  if (!is_float && (!std::isfinite(value.number()) || std::abs(value.number()) >= 9.2e18))
    throw Fault("a number is too large for a whole number");
  char buffer[1500];
  std::to_chars_result end{};
  if (is_float)
    end = std::to_chars(buffer, std::end(buffer), value.number(),
                        type == 'f'   ? std::chars_format::fixed
                        : type == 'e' ? std::chars_format::scientific
                                      : std::chars_format::general,
                        precision < 0 ? 6 : precision);
  else
    end = std::to_chars(buffer, std::end(buffer),
                        value.is<double>() ? static_cast<int64_t>(value.number()) : value.integer(),
                        type == 'x' ? 16 : 10);
  return {buffer, end.ptr};
}

}  // namespace

std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const double size = std::abs(value);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto end = std::to_chars(buffer, std::end(buffer), value,
                                 plain ? std::chars_format::fixed : std::chars_format::scientific);
  const std::string out(buffer, end.ptr);
  return plain && out.find('.') == out.npos ? out + ".0" : out;
}

std::string to_json(Heap& heap, const Value& value, const JsonStyle& style) {
  return JsonWriter(heap, style).take(value);
}

std::string format_percent(Heap& heap, const std::string& format, const Value& values) {
  const Items items(heap, values.is_tuple() ? values : heap.list({values}));
  std::string out;
  size_t used = 0;
  for (size_t at = 0; at < format.size();) {
    const size_t percent = std::min(format.find('%', at), format.size());
    heap.append(out, std::string_view(format).substr(at, percent - at));
    if (percent == format.size()) break;
    const size_t flags = percent + 1;
    at = std::min(format.find_first_not_of("-0", flags), format.size());
    const std::string_view given = std::string_view(format).substr(flags, at - flags);
    const auto width = static_cast<size_t>(std::max(take_number(format, at), 0));
    int precision = -1;
    if (at < format.size() && format[at] == '.') precision = std::max(take_number(format, ++at), 0);
    const char type = at < format.size() ? format[at++] : '\0';
    if (type == '%') {
      heap.append(out, "%");
      continue;
    }
    if (used == items.size()) throw Fault("a format has fewer values than conversions");
    std::string text = converted(heap, type, precision, items[used++]);
    const bool left = given.find('-') != given.npos;
    const bool zeros = !left && !given.empty() && type != 's' && type != 'r';
    const size_t length = decode(text).size(), missing = width > length ? width - length : 0;
    text.insert(left ? text.size() : zeros && text[0] == '-' ? 1 : 0, missing, zeros ? '0' : ' ');
    heap.append(out, text);
  }
  if (used < items.size() && values.dict() == nullptr)
    throw Fault("a format does not use all its values");
  return out;
}

std::string format_time(std::tm time, const std::string& format) {
  static const locale_t kEnglish = newlocale(LC_ALL_MASK, "C", nullptr);
  time.tm_isdst = -1;  // no time zone, as Python's datetime.now()
  std::string out(4096, '\0');
  out.resize(strftime_l(out.data(), out.size(), format.c_str(), &time, kEnglish));
  if (out.empty() && !format.empty())
    throw Fault("a format of strftime_now() gives nothing, or more than 4095 bytes");
  return out;
}

}  // namespace cohort::jinja
