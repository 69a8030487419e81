// Decoding and encoding of UTF-8 by its bit patterns (RFC 3629).
#include "text/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "core/check.h"

namespace cohort {
namespace {

bool is_scalar_value(char32_t code) {
  return code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
}

// True if `part`, which is not empty, begins a character that more bytes complete.
bool is_unfinished(std::string_view part) {
  const auto lead = static_cast<uint8_t>(part[0]);
  if (part.size() == 1) return lead >= 0xc2 && lead <= 0xf4;
  // Only the second byte has a range of its own: any continuation bytes may follow it.
  return decode_utf8(std::string(part) + "\x80\x80", 0).size > part.size();
}

}  // namespace

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
  while (at < text.size() && continues_utf8(text[at])) ++at;
  return at < text.size() ? at : text.size();
}

size_t last_utf8_begin(std::string_view text, size_t end) {
  do --end;
  while (end > 0 && continues_utf8(text[end]));
  return end;
}

size_t count_characters(std::string_view text) {
  return text.size() - static_cast<size_t>(std::count_if(text.begin(), text.end(), continues_utf8));
}

size_t utf8_prefix(std::string_view text) {
  constexpr uint64_t kHighBits = 0x8080808080808080u;
  size_t at = 0;
  while (at < text.size()) {
    uint64_t eight;
    if (text.size() - at >= sizeof eight) {
      std::memcpy(&eight, text.data() + at, sizeof eight);
      if ((eight & kHighBits) == 0) {
        at += sizeof eight;
        continue;
      }
    }
    const Utf8Char c = decode_utf8(text, at);
    if (c.size == 0) break;
    at += c.size;
  }
  return at;
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t begin = 0;
  for (size_t at; (at = text.find(from, begin)) != text.npos; begin = at + from.size())
    out.append(text.substr(begin, at - begin)).append(to);
  return out.append(text.substr(begin));
}

bool has_word(std::string_view words, std::string_view word) {
  return word.find(' ') == word.npos &&
         str(' ', words, ' ').find(str(' ', word, ' ')) != std::string::npos;
}

size_t unfinished_utf8(std::string_view text) {
  for (size_t size = 1; size <= 3 && size <= text.size(); ++size) {
    const std::string_view part = text.substr(text.size() - size);
    if (!continues_utf8(part[0])) return is_unfinished(part) ? size : 0;
  }
  return 0;
}

std::string Utf8Stream::push(std::string_view bytes) {
  held_ += bytes;
  if (discarded_ > 0) {
    const bool finished = decode_utf8(held_, 0).size > discarded_;
    if (!finished && unfinished_utf8(held_) == held_.size()) return "";
    if (!finished) held_.erase(0, discarded_);
    discarded_ = 0;
  }
  std::string ready = held_.substr(0, held_.size() - unfinished_utf8(held_));
  held_.erase(0, ready.size());
  return ready;
}

std::string repair_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    size_t size = decode_utf8(text, at).size;
    out += size > 0 ? text.substr(at, size) : "\xef\xbf\xbd";
    if (size == 0)
      for (size = 1; at + size < text.size() && is_unfinished(text.substr(at, size + 1));) ++size;
    at += size;
  }
  return out;
}

std::string excerpt(std::string_view text, size_t head, size_t tail) {
  constexpr size_t kMinOmitted = 10;
  std::string part(text), out;
  if (text.size() > head + tail + kMinOmitted) {
    part.assign(text.substr(0, next_utf8_boundary(text, head)));
    part.append("...").append(text.substr(next_utf8_boundary(text, text.size() - tail)));
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
