// Kinds and cases of characters, from tables of ranges.
#include "data/template/text.h"

#include <algorithm>

#include "data/utf8.h"

namespace cohort::jinja {
namespace {

struct Range {
  char32_t first, last;
};

// Every `stride`-th character from `first` to `last` is small; its capital is `delta` away.
struct CaseRange {
  char32_t first, last;
  int delta, stride;
};
constexpr CaseRange kCases[] = {
    {'a', 'z', -32, 1},      {0xe0, 0xf6, -32, 1},     {0xf8, 0xfe, -32, 1},
    {0xff, 0xff, 121, 1},    {0x101, 0x12f, -1, 2},    {0x133, 0x137, -1, 2},
    {0x13a, 0x148, -1, 2},   {0x14b, 0x177, -1, 2},    {0x17a, 0x17e, -1, 2},
    {0x1ce, 0x1dc, -1, 2},   {0x1df, 0x1ef, -1, 2},    {0x1f9, 0x21f, -1, 2},
    {0x223, 0x233, -1, 2},   {0x3ac, 0x3ac, -38, 1},   {0x3ad, 0x3af, -37, 1},
    {0x3b1, 0x3c1, -32, 1},  {0x3c3, 0x3cb, -32, 1},   {0x3cc, 0x3cc, -64, 1},
    {0x3cd, 0x3ce, -63, 1},  {0x430, 0x44f, -32, 1},   {0x450, 0x45f, -80, 1},
    {0x461, 0x481, -1, 2},   {0x48b, 0x4bf, -1, 2},    {0x4c2, 0x4ce, -1, 2},
    {0x4d1, 0x52f, -1, 2},   {0x561, 0x586, -48, 1},   {0x1e01, 0x1e95, -1, 2},
    {0x1ea1, 0x1eff, -1, 2}, {0xff41, 0xff5a, -32, 1},
};

// Beyond U+00BF: characters that are neither letters nor digits.
constexpr Range kNoLetters[] = {
    {0xd7, 0xd7},     {0xf7, 0xf7},     {0x2c2, 0x2c5},   {0x300, 0x36f},     {0x37e, 0x37e},
    {0x387, 0x387},   {0x589, 0x5cf},   {0x600, 0x61f},   {0x64b, 0x66d},     {0x6d4, 0x6d4},
    {0x964, 0x96f},   {0x2000, 0x2070}, {0x2072, 0x207e}, {0x2080, 0x208f},   {0x20a0, 0x2101},
    {0x2190, 0x2bff}, {0x2e00, 0x3004}, {0x3007, 0x3030}, {0x303d, 0x3040},   {0x3099, 0x309c},
    {0x30a0, 0x30a0}, {0x30fb, 0x30fb}, {0xe000, 0xf8ff}, {0xfe00, 0xfe6f},   {0xfeff, 0xff20},
    {0xff3b, 0xff40}, {0xff5b, 0xff65}, {0xfff0, 0xffff}, {0x1f000, 0x1ffff}, {0xe0000, 0x10ffff}};

constexpr Range kNotPrintable[] = {
    {0, 0x1f},        {0x7f, 0xa0},     {0xad, 0xad},       {0x600, 0x605},     {0x61c, 0x61c},
    {0x6dd, 0x6dd},   {0x70f, 0x70f},   {0x1680, 0x1680},   {0x180e, 0x180e},   {0x2000, 0x200f},
    {0x2028, 0x202f}, {0x205f, 0x206f}, {0x3000, 0x3000},   {0xe000, 0xf8ff},   {0xfeff, 0xfeff},
    {0xfff0, 0xfffb}, {0xfffe, 0xffff}, {0xe0000, 0xe00ff}, {0xe01f0, 0x10ffff}};

template <size_t n>
bool in_ranges(const Range (&ranges)[n], char32_t c) {
  const auto* range = std::lower_bound(std::begin(ranges), std::end(ranges), c,
                                       [](const Range& r, char32_t c) { return r.last < c; });
  return range != std::end(ranges) && c >= range->first;
}

bool is_line_end(char32_t c) {
  return (c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

Utf8Char last_char(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (text[at] & 0xc0) == 0x80) --at;
  return decode_utf8(text, at);
}

template <class Map>
std::string map_characters(std::string_view text, Map map) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text, at);
    map(out, c.code);
    at += std::max<size_t>(c.size, 1);
  }
  return out;
}

void append_upper(std::string& out, char32_t c) {
  out += c == 0xdf ? "SS" : encode_utf8(to_upper(c));
}

}  // namespace

bool is_space(char32_t c) {
  return c == ' ' || (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x1f) || c == 0x85 ||
         c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
         c == 0x202f || c == 0x205f || c == 0x3000;
}

bool is_alpha(char32_t c) {
  if (c < 0xc0) return (c | 32) - 'a' < 26u || c == 0xaa || c == 0xb5 || c == 0xba;
  return !in_ranges(kNoLetters, c) && !is_space(c);
}

bool is_printable(char32_t c) {
  return !in_ranges(kNotPrintable, c);
}

char32_t to_upper(char32_t c) {
  for (const CaseRange& r : kCases)
    if (c >= r.first && c <= r.last && (c - r.first) % r.stride == 0) return c + r.delta;
  return c;
}

char32_t to_lower(char32_t c) {
  for (const CaseRange& r : kCases) {
    const char32_t small = c - r.delta;
    if (small >= r.first && small <= r.last && (small - r.first) % r.stride == 0) return small;
  }
  return c;
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

std::string encode(std::u32string_view text) {
  std::string out;
  for (const char32_t c : text) out += encode_utf8(c);
  return out;
}

std::string upper(std::string_view text) {
  return map_characters(text, append_upper);
}

std::string lower(std::string_view text) {
  return map_characters(text,
                        [](std::string& out, char32_t c) { out += encode_utf8(to_lower(c)); });
}

std::string capitalize(std::string_view text) {
  const size_t first = decode_utf8(text, 0).size;
  return upper(text.substr(0, first)) + lower(text.substr(first));
}

std::string_view strip(std::string_view text, Side side, const std::string* chars) {
  const std::u32string set = chars != nullptr ? decode(*chars) : std::u32string();
  const auto goes = [&](char32_t c) {
    return chars != nullptr ? set.find(c) != set.npos : is_space(c);
  };
  const auto has = [&](Side s) { return (static_cast<int>(side) & static_cast<int>(s)) != 0; };
  while (has(Side::kLeft) && !text.empty()) {
    const Utf8Char c = decode_utf8(text, 0);
    if (!goes(c.code)) break;
    text.remove_prefix(c.size);
  }
  while (has(Side::kRight) && !text.empty()) {
    const Utf8Char c = last_char(text);
    if (!goes(c.code)) break;
    text.remove_suffix(c.size);
  }
  return text;
}

size_t byte_of(const Text& text, size_t index) {
  if (index >= text.length) return text.bytes.size();
  if (text.length == text.bytes.size()) return index;
  size_t at = 0;
  for (; index > 0; --index) at = next_utf8_boundary(text.bytes, at + 1);
  return at;
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  for (size_t begin = 0, at = 0; begin < text.size(); begin = at) {
    size_t end = begin;
    for (at = begin; at < text.size();) {
      const Utf8Char c = decode_utf8(text, at);
      end = at;
      at += std::max<size_t>(c.size, 1);
      if (is_line_end(c.code)) {
        if (c.code == '\r' && at < text.size() && text[at] == '\n') ++at;
        break;
      }
      end = at;
    }
    lines.push_back(text.substr(begin, (keep_ends ? at : end) - begin));
  }
  return lines;
}

}  // namespace cohort::jinja
