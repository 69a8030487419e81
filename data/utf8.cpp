// Decoding and encoding of UTF-8 by its bit patterns (RFC 3629).
#include "data/utf8.h"

#include <cstdint>
#include <cstdio>

#include "core/check.h"

namespace cohort {
namespace {

bool is_scalar_value(char32_t code) {
  return code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
}

bool is_continuation(char byte) {
  return (static_cast<uint8_t>(byte) & 0xc0) == 0x80;
}

}  // namespace

Utf8Char decode_utf8(std::string_view text, size_t at) {
  if (at >= text.size()) return {};
  const uint8_t lead = static_cast<uint8_t>(text[at]);
  if (lead < 0x80) return {lead, 1};
  size_t size = 0;
  char32_t code = 0, smallest = 0;
  if ((lead & 0xe0) == 0xc0) {
    size = 2, code = lead & 0x1f, smallest = 0x80;
  } else if ((lead & 0xf0) == 0xe0) {
    size = 3, code = lead & 0x0f, smallest = 0x800;
  } else if ((lead & 0xf8) == 0xf0) {
    size = 4, code = lead & 0x07, smallest = 0x10000;
  } else {
    return {};
  }
  if (text.size() - at < size) return {};
  for (size_t i = 1; i < size; ++i) {
    if (!is_continuation(text[at + i])) return {};
    code = code << 6 | (static_cast<uint8_t>(text[at + i]) & 0x3f);
  }
  if (code < smallest || !is_scalar_value(code)) return {};
  return {code, size};
}

std::string encode_utf8(char32_t code) {
  COHORT_CHECK(is_scalar_value(code), "[utf8] ", static_cast<uint32_t>(code),
               " is not a Unicode scalar value");
  const auto continuation = [code](int shift) {
    return static_cast<char>(0x80 | ((code >> shift) & 0x3f));
  };
  if (code < 0x80) return {static_cast<char>(code)};
  if (code < 0x800) return {static_cast<char>(0xc0 | code >> 6), continuation(0)};
  if (code < 0x10000)
    return {static_cast<char>(0xe0 | code >> 12), continuation(6), continuation(0)};
  return {static_cast<char>(0xf0 | code >> 18), continuation(12), continuation(6), continuation(0)};
}

size_t next_utf8_boundary(std::string_view text, size_t at) {
  while (at < text.size() && is_continuation(text[at])) ++at;
  return at < text.size() ? at : text.size();
}

std::string excerpt(std::string_view text) {
  constexpr size_t kHead = 40, kTail = 20;
  std::string part(text), out;
  if (text.size() > kHead + kTail + 10) {
    part.assign(text.substr(0, next_utf8_boundary(text, kHead)));
    part.append("...").append(text.substr(next_utf8_boundary(text, text.size() - kTail)));
  }
  for (size_t at = 0; at < part.size();) {
    const Utf8Char c = decode_utf8(part, at);
    const bool shown = c.size > 0 && c.code >= 0x20 && c.code != 0x7f;
    if (shown)
      out.append(part, at, c.size);
    else
      out += part[at] == '\n' ? "\\n" : "?";
    at += c.size > 0 ? c.size : 1;
  }
  return "'" + out + "'";
}

std::string describe_character(char32_t code) {
  char number[16];
  std::snprintf(number, sizeof number, "U+%04X", static_cast<unsigned>(code));
  if (code < 0x20 || (code >= 0x7f && code < 0xa0)) return number;
  return str("'", encode_utf8(code), "' (", number, ")");
}

}  // namespace cohort
