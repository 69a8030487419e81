// JSON and strftime as Python has them.
#include "data/template/format.h"

#include <algorithm>
#include <charconv>
#include <clocale>
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
      const Entries& entries = value.dict()->entries;
      std::vector<Value> keys;
      for (const auto& [key, item] : entries)
        keys.push_back(style_.sort_keys ? key : make_int(keys.size()));
      put_all("{}", sorted_places(heap_, keys, Order::kUp), [&](size_t i) {
        const Text* key = entries[i].first.text();
        put_text(key != nullptr ? key->bytes : scalar(entries[i].first));
        put(style_.key_separator);
        write(entries[i].second);
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
