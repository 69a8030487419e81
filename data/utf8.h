// Strict UTF-8: what counts as a character wherever text is cut, counted or named in a message.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace cohort {

// The character that starts at a byte of a text; size 0 if no well-formed character does (a stray
// or missing continuation byte, an overlong form, a surrogate, a value over U+10FFFF).
struct Utf8Char {
  char32_t code = 0;
  size_t size = 0;
};
Utf8Char decode_utf8(std::string_view text, size_t at);

// `code` must be a Unicode scalar value.
std::string encode_utf8(char32_t code);

// The first byte at or after `at` that is not a continuation byte.
size_t next_utf8_boundary(std::string_view text, size_t at);

// A text in quotes on one line, fit for a message: without its middle if it is long, and with '?'
// for control characters and for bytes that are no UTF-8.
std::string excerpt(std::string_view text);

// "'e' (U+0065)"; control characters by number only.
std::string describe_character(char32_t code);

}  // namespace cohort
