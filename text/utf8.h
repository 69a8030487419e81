// Strict UTF-8: the definition of a character wherever text is split, counted or quoted.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "core/check.h"
#include "core/text.h"  // decode_utf8()

namespace cohort {

// `code` must be a Unicode scalar value.
std::string encode_utf8(char32_t code);

// The first byte at or after `at` that is not a continuation byte.
size_t next_utf8_boundary(std::string_view text, size_t at);
// The first byte of the character that ends at `end` > 0.
size_t last_utf8_begin(std::string_view text, size_t end);
// Number of characters, for UTF-8.
size_t count_characters(std::string_view text);

// The first byte that is not part of well-formed UTF-8; text.size() if there is none.
size_t utf8_prefix(std::string_view text);
inline bool is_utf8(std::string_view text) {
  return utf8_prefix(text) == text.size();
}

// Calls use(character, at) for the characters of a text, which must be UTF-8, and their offsets.
template <class Use>
void for_characters(std::string_view text, const Use& use) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text, at);
    COHORT_CHECK(c.size > 0, "[utf8] byte ", at, " is not UTF-8");
    use(c, at);
    at += c.size;
  }
}

enum class Side { kLeft, kRight, kBoth };
// The text without the characters at its ends for which is_stripped(code) holds.
template <class Predicate>
std::string_view strip_if(std::string_view text, Side side, const Predicate& is_stripped) {
  while (side != Side::kRight && !text.empty() && is_stripped(decode_utf8(text, 0).code))
    text.remove_prefix(next_utf8_boundary(text, 1));
  while (side != Side::kLeft && !text.empty()) {
    const size_t last = last_utf8_begin(text, text.size());
    if (!is_stripped(decode_utf8(text, last).code)) break;
    text.remove_suffix(text.size() - last);
  }
  return text;
}
// The text with each occurrence of `from`, which is not empty, replaced.
std::string replaced(std::string_view text, std::string_view from, std::string_view to);

// True for one of `words`, which are separated by single spaces.
bool has_word(std::string_view words, std::string_view word);

// The number of bytes at the end of a text (0 to 3) that begin a character which more bytes could
// complete.
size_t unfinished_utf8(std::string_view text);

// Converts a stream of bytes to text: a character is held back until its last byte arrives. Bytes
// held back at discard() become part of the output only if later bytes complete their character.
class Utf8Stream {
 public:
  // Returns the bytes that are complete now.
  std::string push(std::string_view bytes);
  // The bytes held back so far. The stream is unchanged.
  std::string held() const { return held_.substr(discarded_); }
  void discard() { discarded_ = held_.size(); }

 private:
  std::string held_;      // the beginning of a character
  size_t discarded_ = 0;  // bytes of held_
};

// Replaces each ill-formed maximal subpart by U+FFFD, as the Unicode standard recommends (section
// 3.9).
std::string repair_utf8(std::string_view text);

// Quotes a text for a message, on one line: the middle is omitted beyond about `head` + `tail`
// bytes, and control characters and invalid UTF-8 become '?'.
std::string excerpt(std::string_view text, size_t head = 40, size_t tail = 20);

// "'e' (U+0065)"; control characters by number only.
std::string describe_character(char32_t code);

}  // namespace cohort
