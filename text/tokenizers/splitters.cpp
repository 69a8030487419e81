// Each function tries the alternatives of its pattern in order. Backtracking is needed only to the
// last white space of a run.
#include "text/tokenizers/splitters.h"

#include <cstdint>
#include <vector>

#include "text/unicode.h"

namespace cohort {

const char* const kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const char* const kQwenPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";
const char* const kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";
const char* const kQwen35Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|)"
    R"( ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

namespace {

constexpr int kClasses = kLetter | kNumber | kWhiteSpace;

// char_classes(), with marks as letters.
const uint16_t* classes_with_marks() {
  static const std::vector<uint16_t> all = [] {
    std::vector<uint16_t> classes(char_classes(), char_classes() + 0x110000);
    for (uint16_t& c : classes)
      if ((c & kMark) != 0) c |= kLetter;
    return classes;
  }();
  return all.data();
}

// Reads text that is valid UTF-8.
class Reader {
 public:
  explicit Reader(std::string_view text, const uint16_t* classes = char_classes())
      : text_(text), classes_(classes) {}

  size_t size() const { return text_.size(); }
  uint8_t byte(size_t at) const { return at < size() ? static_cast<uint8_t>(text_[at]) : 0; }
  // The class of a character (letter, number, white space or 0), and the offset of the next one.
  struct Char {
    int kind;
    size_t end;
  };
  Char at(size_t at) const {
    const auto b = [&](size_t i) { return static_cast<char32_t>(byte(at + i)); };
    const char32_t lead = b(0);
    if (lead < 0x80) return {classes_[lead] & kClasses, at + 1};
    if (lead < 0xe0) return {classes_[(lead & 0x1f) << 6 | (b(1) & 0x3f)] & kClasses, at + 2};
    if (lead < 0xf0)
      return {classes_[(lead & 0x0f) << 12 | (b(1) & 0x3f) << 6 | (b(2) & 0x3f)] & kClasses,
              at + 3};
    return {
        classes_[((lead & 0x07) << 18 | (b(1) & 0x3f) << 12 | (b(2) & 0x3f) << 6 | (b(3) & 0x3f)) %
                 0x110000] &
            kClasses,
        at + 4};
  }
  // The end of a run of characters of one kind.
  size_t run_end(size_t at, int kind) const {
    while (at < size()) {
      const Char c = this->at(at);
      if (c.kind != kind) break;
      at = c.end;
    }
    return at;
  }

 private:
  std::string_view text_;
  const uint16_t* classes_;
};

// \s+(?!\S)|\s+ at white space: a run without its last character, which belongs to the next word.
size_t end_of_spaces(const Reader& in, size_t at) {
  size_t last = at, end = at;
  while (end < in.size()) {
    const Reader::Char c = in.at(end);
    if (c.kind != kWhiteSpace) break;
    last = end;
    end = c.end;
  }
  return end == in.size() || last == at ? end : last;
}

// Matches 's 't 'm 'd 're 've 'll at an apostrophe; returns `at` without a match. `fold` is 0x20 to
// ignore case, which makes U+017F an s.
size_t end_of_contraction(const Reader& in, size_t at, uint8_t fold) {
  const auto lower = [&](size_t i) {
    const uint8_t byte = in.byte(i);
    return byte >= 'A' && byte <= 'Z' ? static_cast<uint8_t>(byte | fold) : byte;
  };
  const uint8_t a = lower(at + 1), b = lower(at + 2);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return at + 2;
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return at + 3;
  if (fold != 0 && a == 0xc5 && in.byte(at + 2) == 0xbf) return at + 3;
  return at;
}

size_t end_of_gpt2_word(std::string_view text, size_t at) {
  const Reader in(text);
  const uint8_t byte = in.byte(at);
  if (byte == '\'')
    if (const size_t end = end_of_contraction(in, at, 0); end > at) return end;
  Reader::Char c = in.at(at);
  if (byte == ' ' && c.end < in.size()) {
    const Reader::Char next = in.at(c.end);
    if (next.kind != kWhiteSpace) c = next;
  }
  return c.kind == kWhiteSpace ? end_of_spaces(in, at) : in.run_end(c.end, c.kind);
}

// The patterns of cl100k, Llama 3 and Qwen, which differ in the largest number of digits per word
// and in the classes of marks.
template <int kMaxDigits, const uint16_t* (*kClassTable)() = char_classes>
size_t end_of_cl100k_word(std::string_view text, size_t at) {
  const Reader in(text, kClassTable());
  const uint8_t byte = in.byte(at);
  if (byte == '\'')
    if (const size_t end = end_of_contraction(in, at, 0x20); end > at) return end;
  const Reader::Char c = in.at(at);
  if (c.kind == kLetter) return in.run_end(c.end, kLetter);
  if (c.kind == kNumber) {
    size_t end = c.end;
    for (int digits = 1; digits < kMaxDigits && end < in.size(); ++digits) {
      const Reader::Char digit = in.at(end);
      if (digit.kind != kNumber) break;
      end = digit.end;
    }
    return end;
  }
  const bool line_break = byte == '\r' || byte == '\n';
  const Reader::Char next = c.end < in.size() ? in.at(c.end) : Reader::Char{kWhiteSpace, c.end};
  if (!line_break && next.kind == kLetter) return in.run_end(next.end, kLetter);
  if (c.kind == 0 || (byte == ' ' && next.kind == 0)) {
    size_t end = in.run_end(c.end, 0);
    while (in.byte(end) == '\r' || in.byte(end) == '\n') ++end;
    return end;
  }
  size_t line_end = at;
  const size_t end = in.run_end(at, kWhiteSpace);
  for (size_t i = end; i > at && line_end == at; --i)
    if (in.byte(i - 1) == '\r' || in.byte(i - 1) == '\n') line_end = i;
  return line_end > at ? line_end : end_of_spaces(in, at);
}

}  // namespace

Splitter find_splitter(std::string_view pattern) {
  if (pattern == kGpt2Pattern) return end_of_gpt2_word;
  if (pattern == kQwenPattern) return end_of_cl100k_word<1>;
  if (pattern == kQwen35Pattern) return end_of_cl100k_word<1, classes_with_marks>;
  return pattern == kLlama3Pattern ? end_of_cl100k_word<3> : nullptr;
}

}  // namespace cohort
