// Characters of texts, on top of data/unicode.h.
#include "data/template/text.h"

#include <algorithm>

#include "data/unicode.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

std::string mapped(std::string_view text, std::string (*map)(char32_t)) {
  std::string out;
  for (const char32_t c : decode(text)) out += map(c);
  return out;
}

// The first of the characters that belong together in upper case, the others in lower case.
std::string titled(std::string_view text, bool (*belongs)(char32_t)) {
  std::string out;
  bool inside = false;
  for (const char32_t c : decode(text)) {
    out += inside ? to_lower_case(c) : to_upper_case(c);
    inside = belongs(c);
  }
  return out;
}

}  // namespace

bool is_space(char32_t c) {
  return has_class(c, kWhiteSpace) || (c >= 0x1c && c <= 0x1f);
}

bool is_printable(char32_t c) {
  return c == ' ' || !has_class(c, kOtherCharacter | kWhiteSpace);
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

size_t count_characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
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
  const auto goes = [&](size_t at) {
    const char32_t c = decode_utf8(text, at).code;
    return chars ? std::binary_search(set.begin(), set.end(), c) : is_space(c);
  };
  if (side != Side::kRight)
    while (!text.empty() && goes(0)) text.remove_prefix(byte_of(text, 1));
  while (side != Side::kLeft && !text.empty()) {
    size_t last = text.size() - 1;
    while (last > 0 && (text[last] & 0xc0) == 0x80) --last;
    if (!goes(last)) break;
    text.remove_suffix(text.size() - last);
  }
  return text;
}

}  // namespace cohort::jinja
