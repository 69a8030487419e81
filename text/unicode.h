// Properties of Unicode characters, and normal forms. Only text/unicode.cpp includes the Unicode
// library.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace cohort {

// Bits of a character's classes: general categories, White_Space, and word characters of regular
// expressions (\w of UTS #18: Alphabetic, marks, decimal numbers, connectors, joiners).
enum CharClass : uint16_t {
  kLetter = 1,           // L*
  kNumber = 2,           // N*
  kWhiteSpace = 4,       // White_Space; excludes U+180E
  kPunctuation = 8,      // P*
  kMark = 16,            // M*
  kNonspacingMark = 32,  // Mn
  kOtherCharacter = 64,  // C*
  kWordCharacter = 128,
  kUnassigned = 256,  // Cn
};

// The CharClass bits for each code point below 0x110000.
const uint16_t* char_classes();
inline bool has_class(char32_t code, int classes) {
  return (char_classes()[code] & classes) != 0;
}

inline bool is_white_space(char32_t code) {
  return has_class(code, kWhiteSpace);
}

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };
// `text` must be UTF-8. The time is linear in its length, whatever marks it contains.
std::string to_normal_form(std::string_view text, NormalForm form);

// Unicode's mapping of a single character: U+0130 and U+00DF become two.
std::string to_lower_case(char32_t code);
std::string to_upper_case(char32_t code);

}  // namespace cohort
