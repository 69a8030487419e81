// Text for messages and files: UTF-8, escapes, suggestions for mistyped names, and numbers.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

// The character that starts at a byte of a text; size 0 if no well-formed character does (a stray
// or missing continuation byte, an overlong form, a surrogate, a value over U+10FFFF).
struct Utf8Char {
  char32_t code = 0;
  size_t size = 0;
};
Utf8Char decode_utf8(std::string_view text, size_t at);

// True for the second and later bytes of a character.
constexpr bool continues_utf8(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0) == 0x80;
}

// Makes text safe to show: control characters except newline and tab, bytes that are not UTF-8, and
// invisible characters that reorder or hide text become visible escapes (\x1b, \u202e). Joiners and
// variation selectors, which emoji and many scripts need, stay. The pieces of a text that is split
// between characters can be escaped one by one.
std::string escape_controls(std::string_view text);

// The text with its middle omitted, for messages that quote input of any length, if it has more
// than 6,000 bytes.
std::string omit_middle(const std::string& text);

// The candidate with the smallest edit distance to `word`; nullptr if `word` is a typo of none.
const std::string* nearest(const std::string& word, std::span<const std::string> candidates);
// Returns "; did you mean 'NAME'?" for the candidate with the smallest edit distance to `word`, or
// `otherwise` if `word` is a typo of none.
std::string did_you_mean(const std::string& word, std::span<const std::string> candidates,
                         const std::string& otherwise = "");
std::string join(const std::vector<std::string>& words, const std::string& separator);
// Shortest decimal text that parses to the same double ("0.001", "1e-08").
std::string format_double(double value);
// With at least `digits` digits, so that names of files are in the order of their numbers.
std::string padded(long long number, int digits);
// The time of day as in RFC 3339, to the millisecond: "2026-11-22T09:30:00.123Z".
std::string utc_now();

}  // namespace cohort
