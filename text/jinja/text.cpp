// Characters, repr, JSON and strftime with Python's semantics.
#include "text/jinja/text.h"

#include <algorithm>
#include <charconv>
#include <clocale>
#include <cmath>

#include "text/unicode.h"

namespace cohort::jinja {

// Characters.

namespace {

std::string mapped(std::string_view text, std::string (*map)(char32_t)) {
  std::string out;
  for (const char32_t c : decode(text)) out += map(c);
  return out;
}

// The first character of each word in upper case, the others in lower case.
std::string titled(std::string_view text, bool (*in_word)(char32_t)) {
  std::string out;
  bool inside = false;
  for (const char32_t c : decode(text)) {
    out += inside ? to_lower_case(c) : to_upper_case(c);
    inside = in_word(c);
  }
  return out;
}

}  // namespace

bool is_space(char32_t c) {
  return is_white_space(c) || (c >= 0x1c && c <= 0x1f);
}

std::u32string decode(std::string_view text) {
  std::u32string out;
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text, at);
    out += c.code;
    at += std::max<size_t>(c.size, 1);
  }
  return out;
}

size_t byte_of(std::string_view text, size_t characters) {
  size_t at = 0;
  for (; characters > 0 && at < text.size(); --characters) at = next_utf8_boundary(text, at + 1);
  return at;
}

std::string upper(std::string_view text) {
  return mapped(text, to_upper_case);
}

std::string lower(std::string_view text) {
  return mapped(text, to_lower_case);
}

std::string capitalize(std::string_view text) {
  const size_t first = byte_of(text, 1);
  return upper(text.substr(0, first)) + lower(text.substr(first));
}

std::string title(std::string_view text) {
  return titled(text, [](char32_t c) { return has_class(c, kLetter); });
}

std::string title_words(std::string_view text) {
  return titled(text, [](char32_t c) {
    return !is_space(c) && std::u32string_view(U"-({[<").find(c) == std::u32string_view::npos;
  });
}

std::string_view strip(std::string_view text, Side side, std::optional<std::string_view> chars) {
  std::u32string set = decode(chars.value_or(""));
  std::sort(set.begin(), set.end());
  return strip_if(text, side, [&](char32_t c) {
    return chars ? std::binary_search(set.begin(), set.end(), c) : is_space(c);
  });
}

// Formats.

namespace {

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

// Formats a value that is neither a text nor a container.
std::string scalar(const Value& value, bool json) {
  if (value.is<None>()) return json ? "null" : "None";
  if (value.is<bool>() && json) return value.as<bool>() ? "true" : "false";
  if (value.is<bool>()) return value.as<bool>() ? "True" : "False";
  if (value.is<int64_t>()) return std::to_string(value.integer());
  if (value.is_big()) return std::string(value.as<BigInteger>().digits);
  if (value.is<double>()) {
    if (!json || std::isfinite(value.number())) return float_repr(value.number());
    return std::isnan(value.number()) ? "NaN" : value.number() > 0 ? "Infinity" : "-Infinity";
  }
  checked(value, !json, "a value with a JSON form");
  return value.is<Undefined>() ? "Undefined" : str("<", type_name(value), ">");
}

bool is_printable(char32_t c) {
  return c == ' ' || !has_class(c, kOtherCharacter | kWhiteSpace);
}

std::string escaped(char32_t c, bool json) {
  const auto code = static_cast<unsigned>(c), beyond = code - 0x10000;
  char out[16];
  if (json && code >= 0x10000)
    std::snprintf(out, sizeof out, "\\u%04x\\u%04x", 0xd800 + (beyond >> 10),
                  0xdc00 + (beyond & 0x3ff));
  else
    std::snprintf(out, sizeof out,
                  code >= 0x10000         ? "\\U%08x"
                  : json || code >= 0x100 ? "\\u%04x"
                                          : "\\x%02x",
                  code);
  return out;
}

void write_text(Heap& heap, std::string& out, std::string_view text, const Style& style) {
  constexpr std::string_view kControls = "\n\r\t\b\f", kLetters = "nrtbf";
  const bool single = text.find('\'') == text.npos || text.find('"') != text.npos;
  const char quote = style.json || !single ? '"' : '\'';
  heap.work(text.size() / 4);
  heap.append(out, {&quote, 1});
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text, at);
    const std::string_view character = text.substr(at, std::max<size_t>(c.size, 1));
    at += character.size();
    const size_t known = kControls.substr(0, style.json ? 5 : 3).find(character);
    if (known != kControls.npos)
      heap.append(out, std::string{'\\', kLetters[known]});
    else if (character == "\\" || character[0] == quote)
      heap.append(out, std::string{'\\', character[0]});
    else if (style.json ? c.code >= 0x20 && (!style.ascii || c.code < 0x7f) : is_printable(c.code))
      heap.append(out, character);
    else
      heap.append(out, escaped(c.code, style.json));
  }
  heap.append(out, {&quote, 1});
}

}  // namespace

void write(Heap& heap, std::string& out, const Value& value, const Style& style, size_t level) {
  const Nested nested(heap);
  heap.work(1);
  const auto line = [&](size_t depth) {
    if (!style.indent) return;
    heap.append(out, "\n");
    heap.append(out, *style.indent, depth);
  };
  // Items between brackets.
  const auto all = [&](std::string_view open, std::string_view close, const auto& items,
                       auto write_item) {
    heap.append(out, open);
    for (const auto& item : items) {
      if (&item != &items[0]) heap.append(out, style.item_separator);
      line(level + 1);
      write_item(item);
    }
    if (!items.empty()) line(level);
    heap.append(out, close);
  };
  if (value.is_text()) {
    write_text(heap, out, value.text(), style);
  } else if (const Dict* dict = value.dict()) {
    Entries entries = dict->entries;
    if (style.sort_keys) sort_entries(heap, entries);
    all("{", "}", entries, [&](const auto& entry) {
      if (style.json && !entry.first.is_text())
        write_text(heap, out, scalar(entry.first, true), style);
      else
        write(heap, out, entry.first, style, level + 1);
      heap.append(out, style.key_separator);
      write(heap, out, entry.second, style, level + 1);
    });
  } else if (const List* list = value.list();
             list != nullptr && (!style.json || list->flavor <= Flavor::kTuple)) {
    constexpr std::string_view kBrackets[][2] = {{"[", "]"},
                                                 {"(", ")"},
                                                 {"range(", ")"},
                                                 {"dict_keys([", "])"},
                                                 {"dict_values([", "])"},
                                                 {"dict_items([", "])"},
                                                 {"<generator [", "]>"}};
    const auto& [open, close] = kBrackets[style.json ? 0 : static_cast<size_t>(list->flavor)];
    const bool alone = open == "(" && list->items.size() == 1;
    all(open, alone ? ",)" : close, list->items,
        [&](const Value& item) { write(heap, out, item, style, level + 1); });
  } else {
    heap.append(out, scalar(value, style.json));
  }
}

void print(Heap& heap, std::string& out, const Value& value) {
  if (value.is_text())
    heap.append(out, value.text());
  else if (!value.is<Undefined>())
    write(heap, out, value, {});
}

std::string_view to_str(Heap& heap, const Value& value) {
  if (value.is_text() || value.is<Undefined>()) return value.text();
  std::string out;
  print(heap, out, value);
  return heap.text(std::move(out)).text();
}

std::string format_time(std::tm time, std::string_view format) {
  static const locale_t kEnglish = newlocale(LC_ALL_MASK, "C", nullptr);
  time.tm_isdst = -1;  // no time zone, as Python's datetime.now()
  std::string out(4096, '\0');
  out.resize(strftime_l(out.data(), out.size(), std::string(format).c_str(), &time, kEnglish));
  if (out.empty() && !format.empty())
    throw TemplateError("strftime_now(): the result is empty or longer than 4095 bytes");
  return out;
}

}  // namespace cohort::jinja
