// Categories, lower case and normal forms from utf8proc's tables. Canonical ordering is implemented
// here, as the library sorts marks in quadratic time, and inert characters skip the library.
#include "text/unicode.h"

#include <utf8proc.h>

#include <algorithm>

#include "core/check.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr char32_t kCodePoints = 0x110000;

struct Range {
  char32_t first, last;
  bool contains(char32_t code) const { return code >= first && code <= last; }
};
constexpr Range kWhiteSpaces[] = {
    {0x09, 0x0d},     {0x20, 0x20},     {0x85, 0x85},     {0xa0, 0xa0},     {0x1680, 0x1680},
    {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}};
// Further word characters: joiners, and circled and squared letters, which are Alphabetic.
constexpr Range kWordSymbols[] = {
    {0x200c, 0x200d}, {0x24b6, 0x24e9}, {0x1f130, 0x1f149}, {0x1f150, 0x1f169}, {0x1f170, 0x1f189}};

// Classes of a general category, such as "Lu".
int classes_of(std::string_view category) {
  switch (category[0]) {
    case 'L':
      return kLetter | kWordCharacter;
    case 'M':
      return kMark | kWordCharacter | (category == "Mn" ? kNonspacingMark : 0);
    case 'N':
      return kNumber | (category == "No" ? 0 : kWordCharacter);
    case 'P':
      return kPunctuation | (category == "Pc" ? kWordCharacter : 0);
    case 'C':
      return kOtherCharacter | (category == "Cn" ? kUnassigned : 0);
    default:
      return 0;
  }
}

std::vector<uint16_t> make_classes() {
  std::vector<uint16_t> classes(kCodePoints);
  for (char32_t code = 0; code < kCodePoints; ++code)
    classes[code] = static_cast<uint16_t>(
        classes_of(utf8proc_category_string(static_cast<utf8proc_int32_t>(code))));
  for (const Range& range : kWhiteSpaces)
    for (char32_t code = range.first; code <= range.last; ++code) classes[code] |= kWhiteSpace;
  for (const Range& range : kWordSymbols)
    for (char32_t code = range.first; code <= range.last; ++code) classes[code] |= kWordCharacter;
  return classes;
}

using Codes = std::vector<utf8proc_int32_t>;

constexpr NormalForm kForms[] = {NormalForm::kNfc, NormalForm::kNfd, NormalForm::kNfkc,
                                 NormalForm::kNfkd};

bool is_compatible(NormalForm form) {
  return form == NormalForm::kNfkc || form == NormalForm::kNfkd;
}

int combining_class(utf8proc_int32_t code) {
  return utf8proc_get_property(code)->combining_class;
}

// Appends the decomposition of `code`.
void decompose(char32_t code, bool compatible, Codes& out) {
  constexpr size_t kLongest = 32;  // the longest decomposition has 18 code points
  const int options = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | (compatible ? UTF8PROC_COMPAT : 0);
  utf8proc_int32_t parts[kLongest];
  int boundary = 0;
  const utf8proc_ssize_t n =
      utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code), parts, kLongest,
                              static_cast<utf8proc_option_t>(options), &boundary);
  COHORT_CHECK(n >= 0 && n <= static_cast<utf8proc_ssize_t>(kLongest),
               "[unicode] cannot decompose U+", static_cast<uint32_t>(code));
  out.insert(out.end(), parts, parts + n);
}

void order_marks(Codes& codes) {
  const auto is_mark = [](utf8proc_int32_t code) { return combining_class(code) != 0; };
  for (auto it = codes.begin(); it != codes.end();) {
    const auto begin = std::find_if(it, codes.end(), is_mark);
    it = std::find_if_not(begin, codes.end(), is_mark);
    std::ranges::stable_sort(begin, it, {}, combining_class);
  }
}

void append_composed(utf8proc_int32_t* begin, utf8proc_int32_t* end, std::string& out) {
  const utf8proc_ssize_t n = utf8proc_normalize_utf32(
      begin, end - begin, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  COHORT_CHECK(n >= 0, "[unicode] cannot compose");
  for (utf8proc_ssize_t i = 0; i < n; ++i) out += encode_utf8(static_cast<char32_t>(begin[i]));
}

// Appends the normal form of decomposed `codes`, which it reorders and overwrites.
void append_form(Codes& codes, NormalForm form, std::string& out) {
  constexpr utf8proc_int32_t kNoTrailingConsonant = 0x11a7;
  order_marks(codes);
  if (form == NormalForm::kNfd || form == NormalForm::kNfkd) {
    for (const utf8proc_int32_t code : codes) out += encode_utf8(static_cast<char32_t>(code));
    return;
  }
  // The library drops U+11A7 after a Hangul syllable, though that character never composes, so it
  // is appended separately.
  utf8proc_int32_t* const end = codes.data() + codes.size();
  for (utf8proc_int32_t* begin = codes.data();;) {
    utf8proc_int32_t* const stop = std::find(begin, end, kNoTrailingConsonant);
    append_composed(begin, stop, out);
    if (stop == end) return;
    out += encode_utf8(static_cast<char32_t>(kNoTrailingConsonant));
    begin = stop + 1;
  }
}

void append_normalized(std::string_view text, NormalForm form, std::string& out) {
  Codes codes;
  for_characters(text, [&](Utf8Char c, size_t) { decompose(c.code, is_compatible(form), codes); });
  append_form(codes, form, out);
}

// Per character, a bit for each form in which it is inert: it never changes, and splitting a text
// before it does not change the normal form of the text.
std::vector<uint8_t> make_inert() {
  constexpr char32_t kEnd = 0x30000;  // no character from here on decomposes, combines or composes
  constexpr Range kJamo{0x1160, 0x11ff};
  constexpr uint8_t kComposedForms =
      1 << static_cast<int>(NormalForm::kNfc) | 1 << static_cast<int>(NormalForm::kNfkc);
  std::vector<uint8_t> inert(kCodePoints, 0x0f);
  Codes parts;
  std::string itself, normal;
  for (char32_t code = 0x80; code < kEnd; ++code) {
    if (code >= 0xd800 && code < 0xe000) continue;
    const bool is_reordered =
        combining_class(static_cast<utf8proc_int32_t>(code)) != 0 || kJamo.contains(code);
    itself = encode_utf8(code);
    for (const NormalForm form : kForms) {
      parts.clear();
      normal.clear();
      decompose(code, is_compatible(form), parts);
      // Trailing code points of a decomposition may compose with the preceding character.
      for (size_t i = 1; i < parts.size(); ++i)
        inert[static_cast<size_t>(parts[i])] &= static_cast<uint8_t>(~kComposedForms);
      const bool whole = parts.size() == 1 && parts[0] == static_cast<utf8proc_int32_t>(code);
      if (!whole) append_form(parts, form, normal);
      if (is_reordered || (!whole && normal != itself))
        inert[code] &= static_cast<uint8_t>(~(1 << static_cast<int>(form)));
    }
  }
  return inert;
}

}  // namespace

const uint16_t* char_classes() {
  static const std::vector<uint16_t> classes = make_classes();
  return classes.data();
}

std::string to_normal_form(std::string_view text, NormalForm form) {
  const auto is_ascii = [](char c) { return static_cast<uint8_t>(c) < 0x80; };
  if (std::all_of(text.begin(), text.end(), is_ascii)) return std::string(text);
  static const std::vector<uint8_t> all_inert = make_inert();
  std::string out;
  out.reserve(text.size());
  // Only ranges that may change go through the library, each from the inert character before it.
  size_t last_inert = 0, copied = 0;
  bool changing = false;
  for_characters(text, [&](Utf8Char c, size_t at) {
    const bool inert = (all_inert[c.code] >> static_cast<int>(form) & 1) != 0;
    if (inert && changing) {
      append_normalized(text.substr(copied, at - copied), form, out);
      copied = at;
    } else if (!inert && !changing) {
      out.append(text, copied, last_inert - copied);
      copied = last_inert;
    }
    changing = !inert;
    if (inert) last_inert = at;
  });
  if (changing)
    append_normalized(text.substr(copied), form, out);
  else
    out.append(text, copied);
  return out;
}

std::string to_lower_case(char32_t code) {
  if (code == 0x130) return "i\xcc\x87";
  return encode_utf8(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(code))));
}

std::string to_upper_case(char32_t code) {
  if (code == 0xdf) return "SS";
  return encode_utf8(static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(code))));
}

}  // namespace cohort
