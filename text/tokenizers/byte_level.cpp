// Bytes that are printable in Latin-1 map to themselves, the others to U+0100 and the following.
#include "text/tokenizers/byte_level.h"

#include <array>
#include <cstdio>

#include "text/utf8.h"

namespace cohort {
namespace {

constexpr char32_t kFirstMoved = 0x100, kMoved = 68;

struct Alphabet {
  std::array<char32_t, 256> characters{};
  std::array<int, kFirstMoved + kMoved> bytes{};  // by character; -1: none
};

const Alphabet& alphabet() {
  static const Alphabet instance = [] {
    Alphabet a;
    a.bytes.fill(-1);
    char32_t moved = kFirstMoved;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
      const char32_t code = printable ? static_cast<char32_t>(byte) : moved++;
      a.characters[static_cast<size_t>(byte)] = code;
      a.bytes[code] = byte;
    }
    return a;
  }();
  return instance;
}

}  // namespace

std::string to_byte_characters(std::string_view text) {
  const Alphabet& a = alphabet();
  std::string out;
  out.reserve(text.size() + text.size() / 4);
  for (const char c : text) out += encode_utf8(a.characters[static_cast<uint8_t>(c)]);
  return out;
}

std::optional<std::string> from_byte_characters(std::string_view text) {
  const Alphabet& a = alphabet();
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text, at);
    if (c.size == 0 || c.code >= a.bytes.size() || a.bytes[c.code] < 0) return {};
    out += static_cast<char>(a.bytes[c.code]);
    at += c.size;
  }
  return out;
}

std::string byte_token(char byte) {
  char name[8];
  std::snprintf(name, sizeof name, "<0x%02X>", unsigned{static_cast<uint8_t>(byte)});
  return name;
}

}  // namespace cohort
