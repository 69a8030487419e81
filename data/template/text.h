// Python's str methods need to know of characters: kinds, upper and lower case, positions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "data/template/value.h"

namespace cohort::jinja {

// What str.isspace(), isalpha() and isprintable() say. Letters and printable characters beyond
// Latin are told by their blocks.
bool is_space(char32_t c);
bool is_alpha(char32_t c);
bool is_printable(char32_t c);
inline bool is_digit(char32_t c) {
  return c >= '0' && c <= '9';
}

// Simple case mappings of the scripts that have cases (Latin, Greek, Cyrillic, Armenian).
char32_t to_upper(char32_t c);
char32_t to_lower(char32_t c);

std::u32string decode(std::string_view text);
std::string encode(std::u32string_view text);

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);

enum class Side { kLeft = 1, kRight = 2, kBoth = 3 };
// Without the characters of `chars` (nullptr: white space) at its ends.
std::string_view strip(std::string_view text, Side side, const std::string* chars = nullptr);

// The byte where a character starts; the end for an index beyond.
size_t byte_of(const Text& text, size_t index);
// The lines of a text, without their ends.
std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends = false);

}  // namespace cohort::jinja
