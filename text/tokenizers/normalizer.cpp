// Normalisers are functions of a text, or sequences of them, listed in a table.
#include <algorithm>
#include <utility>

#include "text/tokenizers/byte_level.h"
#include "text/tokenizers/json_fields.h"
#include "text/tokenizers/pattern.h"
#include "text/tokenizers/pipeline.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// A normaliser whose result function(text, work) returns.
template <class Function>
Normalizer make_step(Function function) {
  return [function](std::string& text, Work& work) {
    text = function(text, work);
    work.charge(text.size());
  };
}
// A normaliser whose result function(text) returns.
template <class Function>
Normalizer map_text(Function function) {
  return make_step([function](std::string_view text, Work&) { return function(text); });
}

// map(code, character, out) appends the replacement of a character.
template <class Map>
std::string map_characters(std::string_view text, const Map& map) {
  std::string out;
  out.reserve(text.size());
  for_characters(text, [&](Utf8Char c, size_t at) { map(c.code, text.substr(at, c.size), out); });
  return out;
}

std::string without(std::string_view text, int classes) {
  return map_characters(text, [&](char32_t code, std::string_view c, std::string& out) {
    if (!has_class(code, classes)) out += c;
  });
}

std::string lower_case(std::string_view text) {
  return map_characters(text, [](char32_t code, std::string_view c, std::string& out) {
    if (code < 0x80)
      out += code >= 'A' && code <= 'Z' ? static_cast<char>(code | 0x20) : c[0];
    else
      out += to_lower_case(code);
  });
}

Normalizer make_form(NormalForm form) {
  return map_text([form](std::string_view text) { return to_normal_form(text, form); });
}

Normalizer make_strip(const Json& json) {
  const bool left = flag(json, "strip_left", true), right = flag(json, "strip_right", true);
  return map_text([=](std::string_view text) {
    if (left) text = strip_if(text, Side::kLeft, is_white_space);
    if (right) text = strip_if(text, Side::kRight, is_white_space);
    return std::string(text);
  });
}

Normalizer make_prepend(const Json& json) {
  return map_text([prefix = json.at("prepend").as_string()](std::string_view text) {
    return text.empty() ? std::string() : prefix + std::string(text);
  });
}

Normalizer make_replace(const Json& json) {
  return make_step(
      [pattern = Pattern(json.at("pattern")), content = json.at("content").as_string()](
          std::string_view text, Work& work) { return pattern.replace_all(text, content, work); });
}

// BERT's normaliser removes control characters, maps white space to spaces, puts spaces around
// Chinese characters, strips accents and converts to lower case.
bool is_chinese(char32_t code) {
  constexpr std::pair<char32_t, char32_t> kRanges[] = {
      {0x4e00, 0x9fff},   {0x3400, 0x4dbf},   {0x20000, 0x2a6df}, {0x2a700, 0x2b73f},
      {0x2b740, 0x2b81f}, {0x2b920, 0x2ceaf}, {0xf900, 0xfaff},   {0x2f800, 0x2fa1f}};
  return std::ranges::any_of(
      kRanges, [&](auto& range) { return code >= range.first && code <= range.second; });
}

std::string clean(std::string_view text) {
  return map_characters(text, [](char32_t code, std::string_view c, std::string& out) {
    // Other control characters are removed, even if they are white space; unassigned ones stay.
    if (code == '\t' || code == '\n' || code == '\r')
      out += ' ';
    else if (code != 0xfffd && (!has_class(code, kOtherCharacter) || has_class(code, kUnassigned)))
      out += has_class(code, kWhiteSpace) ? " " : c;
  });
}

std::string with_chinese_spaces(std::string_view text) {
  return map_characters(text, [](char32_t code, std::string_view c, std::string& out) {
    if (is_chinese(code))
      out.append(1, ' ').append(c).append(1, ' ');
    else
      out += c;
  });
}

Normalizer make_bert(const Json& json) {
  const bool cleans = flag(json, "clean_text", true),
             chinese = flag(json, "handle_chinese_chars", true),
             lowers = flag(json, "lowercase", true), strips = flag(json, "strip_accents", lowers);
  return make_step([=](std::string_view given, Work& work) {
    std::string text(given);
    const auto assign = [&](std::string result) {
      work.charge(result.size());
      text = std::move(result);
    };
    if (cleans) assign(clean(text));
    if (chinese) assign(with_chinese_spaces(text));
    if (strips) assign(without(to_normal_form(text, NormalForm::kNfd), kNonspacingMark));
    if (lowers) assign(lower_case(text));
    return text;
  });
}

// SentencePiece's NMT rules: some control characters are removed, others become spaces.
std::string nmt(std::string_view text) {
  return map_characters(text, [](char32_t code, std::string_view c, std::string& out) {
    const bool removed = (code >= 0x1 && code <= 0x8) || code == 0xb ||
                         (code >= 0xe && code <= 0x1f) || code == 0x7f || code == 0x8f ||
                         code == 0x9f;
    const bool space = code == 0x9 || code == 0xa || code == 0xc || code == 0xd || code == 0x1680 ||
                       (code >= 0x200b && code <= 0x200f) || code == 0x2028 || code == 0x2029 ||
                       code == 0x2581 || code == 0xfeff || code == 0xfffd;
    if (space)
      out += ' ';
    else if (!removed)
      out += c;
  });
}

Normalizer make_sequence(const Json& json) {
  const Json::Array& list = json.at("normalizers").as_array();
  check_steps(list.size());
  std::vector<Normalizer> steps;
  for (const Json& item : list)
    if (Normalizer step = make_normalizer(item)) steps.push_back(std::move(step));
  return [steps](std::string& text, Work& work) {
    for (const Normalizer& step : steps) step(text, work);
  };
}

constexpr Component<Normalizer(const Json&)> kNormalizers[] = {
    {"Sequence", make_sequence},
    {"NFC", [](const Json&) { return make_form(NormalForm::kNfc); }},
    {"NFD", [](const Json&) { return make_form(NormalForm::kNfd); }},
    {"NFKC", [](const Json&) { return make_form(NormalForm::kNfkc); }},
    {"NFKD", [](const Json&) { return make_form(NormalForm::kNfkd); }},
    {"Lowercase", [](const Json&) { return map_text(lower_case); }},
    {"StripAccents",
     [](const Json&) {
       return map_text([](std::string_view text) { return without(text, kMark); });
     }},
    {"Nmt", [](const Json&) { return map_text(nmt); }},
    {"ByteLevel", [](const Json&) { return map_text(to_byte_characters); }},
    {"Strip", make_strip},
    {"Prepend", make_prepend},
    {"Replace", make_replace},
    {"BertNormalizer", make_bert},
};

}  // namespace

Normalizer make_normalizer(const Json& json) {
  if (json.is_null()) return nullptr;
  return find_component(json, "normalizer", kNormalizers)(json);
}

}  // namespace cohort
