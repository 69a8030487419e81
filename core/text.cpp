#include "core/text.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <numeric>
#include <utility>

#include "core/check.h"

namespace cohort {
namespace {

// Insertions, deletions, substitutions and exchanges of neighbours.
int64_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<int64_t> two_above, above, row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    two_above = std::move(above);
    above = row;
    row[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], two_above[j - 2] + 1);
    }
  }
  return row[b.size()];
}

// First and last code points that escape_controls() escapes: C0 and C1 controls, DEL, and
// characters of Unicode's category Cf that show nothing.
constexpr std::pair<char32_t, char32_t> kEscaped[] = {
    {0x00, 0x08},     {0x0b, 0x1f},     {0x7f, 0x9f},       {0xad, 0xad},       {0x61c, 0x61c},
    {0x180e, 0x180e}, {0x200b, 0x200b}, {0x200e, 0x200f},   {0x2028, 0x202e},   {0x2060, 0x206f},
    {0xfeff, 0xfeff}, {0xfff9, 0xfffb}, {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0xe007f}};

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
    if (!continues_utf8(text[at + i])) return {};
    code = code << 6 | (static_cast<uint8_t>(text[at + i]) & 0x3f);
  }
  if (code < smallest || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return {};
  return {code, size};
}

std::string escape_controls(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text, at);
    const auto contains = [&](const auto& range) {
      return c.code >= range.first && c.code <= range.second;
    };
    if (c.size > 0 && std::none_of(std::begin(kEscaped), std::end(kEscaped), contains)) {
      out += text.substr(at, c.size);
    } else {
      const char* form = c.size <= 1 ? "\\x%02x" : c.code < 0x10000 ? "\\u%04x" : "\\U%08x";
      const char32_t code = c.size > 0 ? c.code : static_cast<unsigned char>(text[at]);
      char escape[16];
      std::snprintf(escape, sizeof escape, form, static_cast<unsigned>(code));
      out += escape;
    }
    at += std::max<size_t>(1, c.size);
  }
  return out;
}

std::string omit_middle(const std::string& text) {
  constexpr size_t kBegin = 4000, kEnd = 2000;
  if (text.size() <= kBegin + kEnd) return text;
  const auto boundary = [&](size_t at) {
    for (int i = 0; i < 3 && continues_utf8(text[at]); ++i) ++at;
    return at;
  };
  const size_t from = boundary(kBegin), to = boundary(text.size() - kEnd);
  return str(text.substr(0, from), " [... ", to - from, " bytes ...] ", text.substr(to));
}

const std::string* nearest(const std::string& word, std::span<const std::string> candidates) {
  constexpr size_t kMaxWord = 100;  // bytes; the distance takes quadratic time
  const std::string* best = nullptr;
  if (word.size() > kMaxWord) return best;
  // A short word of which half is changed is another word.
  const size_t most = word.size() < 5 ? 1 : std::max<size_t>(2, word.size() / 3);
  int64_t best_distance = static_cast<int64_t>(most) + 1;
  for (const std::string& candidate : candidates) {
    const int64_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = &candidate;
    }
  }
  return best;
}

std::string did_you_mean(const std::string& word, std::span<const std::string> candidates,
                         const std::string& otherwise) {
  const std::string* best = nearest(word, candidates);
  return best == nullptr ? otherwise : "; did you mean '" + *best + "'?";
}

std::string join(const std::vector<std::string>& words, const std::string& separator) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : separator) + word;
  return text;
}

std::string format_double(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value);
  return error == std::errc() ? std::string(buffer, end) : "nan";
}

std::string padded(long long number, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%0*lld", digits, number);
  return text;
}

std::string utc_now() {
  using namespace std::chrono;
  const auto now = floor<milliseconds>(system_clock::now());
  const std::time_t seconds = system_clock::to_time_t(floor<std::chrono::seconds>(now));
  std::tm parts;
  gmtime_r(&seconds, &parts);
  char date[40], fraction[16];
  std::strftime(date, sizeof date, "%FT%T", &parts);
  std::snprintf(fraction, sizeof fraction, ".%03dZ",
                static_cast<int>(now.time_since_epoch().count() % 1000));
  return std::string(date) + fraction;
}

}  // namespace cohort
