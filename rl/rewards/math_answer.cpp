// Answers in mathematics: normalisation of their notation, and rules that find them.
#include "rl/rewards/math_answer.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "rl/rewards/expression.h"
#include "text/regex.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr size_t kMaxAnswer = 1024;
constexpr std::string_view kBlank = " \t\r\n", kDigits = "0123456789", kOpen = "([{",
                           kClose = ")]}";

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

using Replacement = std::pair<std::string_view, std::string_view>;
// Applies replacements in their order, each to all occurrences.
std::string spelled(std::string text, std::span<const Replacement> table) {
  for (const auto& [from, to] : table) text = replaced(text, from, to);
  return text;
}

// Characters and their spelling in ASCII or LaTeX. "**" is that of Markdown's bold text, as in
// "**5** dollars", or a power.
constexpr Replacement kCharacters[] = {
    {"−", "-"},        {"–", "-"},         {"‐", "-"},        {"‑", "-"},        {"﹣", "-"},
    {"—", " "},        {"•", " "},         {"“", "\""},       {"”", "\""},       {"„", "\""},
    {"«", "\""},       {"»", "\""},        {"‘", "'"},        {"’", "'"},        {"。", ". "},
    {"、", ", "},      {"⁄", "/"},         {"\u3000", " "},   {"\u00a0", " "},   {"\u2009", " "},
    {"\u202f", " "},   {"≤", "\\le "},     {"≥", "\\ge "},    {"≠", "\\ne "},    {"∞", "\\infty "},
    {"∪", "\\cup "},   {"∈", "\\in "},     {"±", "\\pm "},    {"½", "\\frac12"}, {"⅓", "\\frac13"},
    {"⅔", "\\frac23"}, {"¼", "\\frac14"},  {"¾", "\\frac34"}, {"⅕", "\\frac15"}, {"⅖", "\\frac25"},
    {"⅗", "\\frac35"}, {"⅘", "\\frac45"},  {"⅙", "\\frac16"}, {"⅚", "\\frac56"}, {"⅛", "\\frac18"},
    {"⅜", "\\frac38"}, {"⅝", "\\frac58"},  {"⅞", "\\frac78"}, {" ** ", "^"},     {" **", " "},
    {"** ", " "},      {"negative ", "-"}, {"minus ", "-"},
};

constexpr std::string_view kSuperscripts[] = {"⁰", "¹", "²", "³", "⁴", "⁵",
                                              "⁶", "⁷", "⁸", "⁹", "⁻"};

// Spells kCharacters, kSuperscripts, of which neighbours are one exponent, and the fullwidth forms
// of ASCII.
std::string plain(std::string_view given) {
  constexpr char32_t kFullwidth = 0xff01 - '!';
  std::string text = spelled(std::string(given), kCharacters);
  for (size_t i = 0; i < std::size(kSuperscripts); ++i)
    text = replaced(text, kSuperscripts[i], std::string{'\1', "0123456789-"[i], '\2'});
  text = replaced(replaced(replaced(text, "\2\1", ""), "\1", "^{"), "\2", "}");
  if (text.find('\xef') != text.npos)
    for (char c = '!'; c <= '~'; ++c)
      text = replaced(text, encode_utf8(kFullwidth + static_cast<char32_t>(c)), {&c, 1});
  return text;
}

std::string_view without(std::string_view text, std::string_view front, std::string_view back) {
  text.remove_prefix(std::min(text.find_first_not_of(front), text.size()));
  return text.substr(0, text.find_last_not_of(back) + 1);
}
// Strips the blanks, the emphasis of Markdown and the punctuation around an answer in a sentence.
std::string_view bare(std::string_view text) {
  text = without(text, " \t\r\n*`\":", " \t\r\n*`\":.,;");
  for (const char quote : {'\'', '_'})  // which may be part of an answer: f'
    if (text.starts_with(quote) && text.ends_with(quote))
      text = without(text, {&quote, 1}, {&quote, 1});
  return text;
}

// Returns the characters that are whole within the first `size` bytes.
std::string_view head(std::string_view text, size_t size) {
  return text.substr(0, utf8_prefix(text.substr(0, size)));
}

// Returns the command at the start of `text`: a backslash with its letters, or with the one
// character that it escapes.
std::string_view command_of(std::string_view text) {
  size_t end = 1;
  while (end < text.size() && is_letter(text[end])) ++end;
  return text.substr(0, std::max<size_t>(end, 2));
}

// ---- Normalisation -----------------------------------------------------------------------------

// The replacements of _strip_string(), and further notations of spaces, signs and relations.
constexpr Replacement kReplacements[] = {
    {"°C", ""},       {"°F", ""},        {"°", ""},         {"˚", ""},         {"·", "*"},
    {"×", "*"},       {"÷", "/"},        {"π", "\\pi "},    {"√", "sqrt"},     {"\\ ", " "},
    {"\n", " "},      {"\t", " "},       {"\\!", ""},       {"\\\\", "\\"},    {"\\left", ""},
    {"\\right", ""},  {"tfrac", "frac"}, {"dfrac", "frac"}, {"\\,", ""},       {"\\;", " "},
    {"\\:", " "},     {"\\qquad", " "},  {"\\quad", " "},   {"~", " "},        {"^{\\circ}", ""},
    {"^\\circ", ""},  {"\\$", ""},       {"$", ""},         {"\\%", ""},       {"%", ""},
    {"€", ""},        {"£", ""},         {"{,}", ","},      {"\\cdot", "*"},   {"\\times", "*"},
    {"\\div", "/"},   {"**", "^"},       {"qslant", "q"},   {"\\leq", "\\le"}, {"<=", "\\le "},
    {"\\lt", "<"},    {"\\geq", "\\ge"}, {">=", "\\ge "},   {"\\gt", ">"},     {"\\neq", "\\ne"},
    {" !=", "\\ne "}, {"\\(", ""},       {"\\)", ""},       {"\\[", ""},       {"\\]", ""},
};

// Words that change the value of the number before them.
constexpr std::pair<std::string_view, std::string_view> kScales[] = {
    {"dozen", "*12"},        {"hundred", "*100"},        {"thousand", "*1000"},
    {"million", "*1000000"}, {"billion", "*1000000000"}, {"trillion", "*1000000000000"},
    {"percent", "*1/100"},
};
std::string_view scale_of(std::string word) {
  if (word.ends_with('s')) word.pop_back();
  const auto* found = std::ranges::find(kScales, word, [](auto& pair) { return pair.first; });
  return found == std::end(kScales) ? "" : found->second;
}

// Words after a number that say more about it than a unit does: functions, operations, conjunctions
// between two answers, fractions.
bool is_no_unit(const std::string& word) {
  static const Regex kWords(
      "sqrt|sin|cos|tan|log|mod(?:ulo)?|base|pi|root|squared|cubed|factorial|plus|minus|over|"
      "divided|multiplied|am|pm|noon|by|and|or|to|than|not|below|negative|remainder|choose|if|"
      "unless|except|[nxyz]|hal(?:f|ves)|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|"
      "tenth|hundredth|thousandth|millionth)s?");
  return kWords.full_match(word);
}

// Strips the unit after a number, "42 square", "15\mbox{ cm}^2", and prepends it to `unit`: "cm^2".
// Words that scale become factors: "5 million users" is "5*1000000".
std::string without_units(std::string text, std::string& unit) {
  static const Regex kUnits(
      R"(^(.*(?:[0-9})\]]|\\pi))(?:\\? )*)"
      R"((?|\\(?:text[a-z]*|mbox|mathrm(?!\{.\}))\{([^{}]*+)\})"
      R"(|(?<= )((?:[A-Za-z]{3}|(?:[ckm]m|ft|in|mi|yd|[km]?g|lb|oz|ml|hr|yr|[mLs])\b)[A-Za-z ./]*+)))"
      R"((?:\^\{?([23])\}?)?[ .]*$)");
  constexpr int kMaxUnits = 3;  // \text{ million} \text{ users}
  for (int i = 0; i < kMaxUnits; ++i) {
    const auto match = kUnits.find_last(text);
    if (!match) break;
    std::string factors, words;
    std::string_view rest = (*match)[2];
    while (!(rest = without(rest, " ./", "")).empty()) {
      std::string word(rest.substr(0, rest.find_first_of(" ./")));
      for (char& c : word)
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
      rest.remove_prefix(word.size());
      const std::string_view scale = words.empty() ? scale_of(word) : "";
      if (is_no_unit(word)) return text;
      factors += scale;
      if (scale.empty()) words += (words.empty() ? "" : " ") + word;
    }
    if (const std::string& power = (*match)[3]; !words.empty() && !power.empty())
      words += "^" + power;
    text = (*match)[1] + factors;
    unit = words + (words.empty() || unit.empty() ? "" : " ") + unit;
  }
  return text;
}

// Returns the exponent of the last word of a unit, and leaves that word: 2 and "cm" of "square cm"
// and "cm^2", 1 and "hour" of "m^3 per hour".
char take_power(std::string_view& unit) {
  constexpr std::pair<std::string_view, char> kPowers[] = {
      {"square", '2'}, {"sq", '2'}, {"cubic", '3'}, {"cu", '3'}};
  const size_t begin = unit.rfind(' ') + 1;
  std::string_view before = unit.substr(0, begin == 0 ? 0 : begin - 1);
  before.remove_prefix(before.rfind(' ') + 1);
  unit.remove_prefix(begin);
  char power = '1';
  for (const auto& [word, number] : kPowers)
    if (before == word) power = number;
  const size_t at = unit.find('^');
  if (at != unit.npos && at > 0 && at + 1 < unit.size()) {
    power = unit[at + 1];
    unit = unit.substr(0, at);
  }
  return power;
}

// True if one unit is missing, or if they have the same exponent and the last word of one is that
// of the other, its plural or its abbreviation, as in "cm^2" and "square centimeters".
bool same_unit(std::string_view a, std::string_view b) {
  constexpr size_t kLongestAbbreviation = 4, kShortestWord = 4;
  if (a.empty() || b.empty()) return true;
  if (take_power(a) != take_power(b)) return false;
  if (a.size() > b.size()) std::swap(a, b);
  if (a == b || b == std::string(a) + "s") return true;
  if (a.size() > kLongestAbbreviation || b.size() < kShortestWord || a[0] != b[0]) return false;
  for (const char c : b)
    if (a.starts_with(c)) a.remove_prefix(1);
  return a.empty();
}

// Commands whose argument is ordinary text or the answer itself.
constexpr std::string_view kWrappers[] = {"\\boxed",  "\\fbox",        "\\mbox", "\\textbf",
                                          "\\textrm", "\\textit",      "\\text", "\\mathrm",
                                          "\\mathbf", "\\displaystyle"};

// Adds the missing braces around arguments of \frac and \sqrt and around exponents. Removes those
// around groups that are not arguments, and all spaces except between digits: "3 1/2" is not
// "31/2".
std::string with_braces(std::string_view text) {
  struct Level {
    int missing = 0;  // arguments that have not been read yet
    bool kept = true;
  };
  std::string out;
  std::vector<Level> levels(1);
  bool after_command = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i], last = out.empty() ? ' ' : out.back();
    int& missing = levels.back().missing;
    if (c == ' ') {
      const bool apart = missing == 0 && is_digit(last) && i + 1 < text.size();
      if (apart && is_digit(text[i + 1])) out += ' ';
      continue;
    }
    const bool argument = missing > 0 || after_command || last == ']' || last == '}';
    const bool is_power = last == '^' || last == '_';
    const bool is_minus = is_power && c == '-' && i + 1 < text.size() && is_digit(text[i + 1]);
    after_command = false;
    if (c == '\\') {
      const std::string_view command = command_of(text.substr(i));
      const bool frac = command.starts_with("\\frac"), sqrt = command.starts_with("\\sqrt");
      const size_t size = frac || sqrt ? 5 : command == "\\ " ? 1 : command.size();
      missing = frac ? 2 : sqrt ? 1 : 0;
      after_command = true;
      out += command.substr(0, size);
      i += size - 1;
    } else if (c == '{') {
      missing = std::max(missing - 1, 0);
      if (argument) out += c;
      levels.push_back({0, argument});
    } else if (c == '}' && levels.size() > 1) {
      if (levels.back().kept) out += c;
      levels.pop_back();
    } else if (missing > 0 && (is_digit(c) || is_letter(c) || is_minus)) {
      // An argument has one character, an exponent all digits.
      const size_t end = is_power && !is_letter(c) ? text.find_first_not_of(kDigits, i + 1) : i + 1;
      const std::string_view part = text.substr(i, end - i);
      --missing;
      out.append("{").append(part).append("}");
      i += part.size() - 1;
    } else {
      missing = c == '^' || c == '_' ? 1 : 0;
      out += c;
    }
  }
  return out;
}

// An answer "Area = 72 cm" in parts. The value is an input of expression_value(): spaces are kept,
// which distinguish "1 2" from "12". A name of one or two letters is left out.
struct Answer {
  std::string name, value, unit;
};

Answer answer_of(std::string_view given) {
  // Products, as "abc = 72", and other equations have no name.
  static const Regex kName(
      R"(^\s*((?:\{[A-Za-z ]*\}|[A-Z][A-Za-z]{2,}(?: [A-Za-z]+)*|m?\\(?!sqrt)[a-z]+ *\{?[A-Z]*\}?)"
      R"(|[A-Za-z]{1,2}|\|[A-Z]+\|)(?:_(?:\w|\{[^{}]*\})|'|\^\{-1\})*(?:\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\])?)"
      R"()\s*(?:=|\\in(?![a-z]))(.*)$)");
  Answer out;
  std::string text = replaced(spelled(plain(given), kReplacements), "per cent", "percent");
  text = without_units(std::move(text), out.unit);
  for (const std::string_view wrapper : kWrappers) text = replaced(text, wrapper, "");
  if (const auto match = kName.find_last(text)) {
    out.name = with_braces((*match)[1]);
    if (out.name.size() <= 2) out.name.clear();
    text = (*match)[2];
  }
  for (size_t i = 0; i + 1 < text.size(); ++i)  // .5
    if (text[i] == '.' && is_digit(text[i + 1]) &&
        (i == 0 || !(is_digit(text[i - 1]) || text[i - 1] == '}')))
      text.insert(i++, 1, '0');
  out.value = bare(text);
  return out;
}

bool is_integer(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  return !text.empty() && text.find_first_not_of(kDigits) == text.npos;
}

std::string normalised(std::string text) {
  std::string_view number = without(text, "-", "");
  if (take_decimal(number) && number.empty()) std::erase(text, ',');
  text = with_braces(text);
  if (text == "0.5") return "\\frac{1}{2}";
  const size_t slash = text.find('/');
  if (slash == text.npos) return text;
  const std::string over = text.substr(0, slash), under = text.substr(slash + 1);
  return is_integer(over) && is_integer(under) ? "\\frac{" + over + "}{" + under + "}" : text;
}

// The parts of a text between the commas that are in no bracket; none if a bracket is open.
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> out;
  size_t begin = 0;
  int depth = 0;
  for (size_t i = 0; i <= text.size() && depth >= 0; ++i) {
    const char c = i < text.size() ? text[i] : ',';
    depth += (kOpen.find(c) != kOpen.npos) - (kClose.find(c) != kClose.npos);
    if (c != ',' || depth != 0) continue;
    out.push_back(text.substr(begin, i - begin));
    begin = i + 1;
  }
  return depth == 0 ? out : std::vector<std::string_view>();
}

// The brackets and the elements of a list, "1, 2", "(1,234)", "[0, 1)" or "\{1\}"; or nothing.
std::vector<std::string_view> list_of(std::string_view text) {
  text = without(text, " ", " ");
  const bool is_set = text.starts_with("\\{") && text.ends_with("\\}");
  const size_t size = is_set ? 2 : 1;  // a bracket's
  auto out = split(text);
  if (out.size() == 1 && text.size() > 2 * size && kOpen.find(text[size - 1]) != kOpen.npos &&
      kClose.find(text.back()) != kClose.npos) {
    out = split(text.substr(size, text.size() - 2 * size));
    out.insert(out.begin(), text.substr(size - 1, 1));
    out.push_back(text.substr(text.size() - 1));
    return out.size() > (is_set ? 2 : 3) ? out : std::vector<std::string_view>();
  }
  return out.size() > 1 && !expression_value(text) ? out : std::vector<std::string_view>();
}

// Compares values: as text, as lists, of which sets have no order, or as numbers.
bool same_text(std::string_view a, std::string_view b, int depth = 0) {
  constexpr int kMaxDepth = 3;
  constexpr size_t kMaxSet = 32;  // elements, each of which is compared with each
  const std::string text = normalised(std::string(a));
  if (!text.empty() && text == normalised(std::string(b))) return true;
  const auto left = list_of(a), right = list_of(b);
  if (!left.empty() || !right.empty()) {
    const auto same = [&](auto x, auto y) { return x == y || same_text(x, y, depth + 1); };
    if (left.size() != right.size() || depth == kMaxDepth) return false;
    return left[0] == "{" && left.size() <= kMaxSet ? std::ranges::is_permutation(left, right, same)
                                                    : std::ranges::equal(left, right, same);
  }
  const auto value = expression_value(a);
  const auto other = value ? expression_value(b) : std::nullopt;
  return other && same_number(*value, *other);
}

bool same_plain(std::string_view a, std::string_view b) {
  const Answer left = answer_of(a), right = answer_of(b);
  const bool same_name = left.name.empty() || right.name.empty() || left.name == right.name;
  return same_name && same_unit(left.unit, right.unit) && same_text(left.value, right.value);
}

// ---- Extraction --------------------------------------------------------------------------------

using Found = std::optional<std::string_view>;

// Returns the content of the braces that open at the start of `text`.
Found group(std::string_view text) {
  if (!text.starts_with('{')) return {};
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\')
      ++i;
    else if (text[i] == '{')
      ++depth;
    else if (text[i] == '}' && --depth == 0)
      return text.substr(1, i - 1);
  }
  return {};
}

Found last_boxed(std::string_view text) {
  const size_t boxed = text.rfind("\\boxed"), fbox = text.rfind("\\fbox");
  // One past the backslash, 0 for npos.
  const size_t at = std::max(boxed + 1, fbox + 1);
  if (at == 0) return {};
  std::string_view rest = text.substr(at - 1);
  const std::string_view command = command_of(rest);
  if (command != "\\boxed" && command != "\\fbox") return {};
  rest.remove_prefix(command.size());
  rest = without(rest, kBlank, "");
  if (rest.starts_with('{')) return group(rest);
  rest = rest.substr(0, rest.find_first_of(" \t\r\n$"));
  return bare(rest).empty() ? Found() : rest;
}

// True for ASCII letters and for the first byte of a character outside of ASCII.
bool in_word(char c) {
  return is_letter(c) || static_cast<unsigned char>(c) >= 0xc0;
}

// Removes the dash of an item of a list: "- 5" is 5, unlike "-5" and "- x + 5".
std::string_view without_dash(std::string_view text) {
  static const Regex kItem(R"(^-\s+((?:\pL\pL|-?\d)[^+^=*\\]*)$)");
  text = bare(text);
  const auto item = kItem.find_last(text);
  return item ? text.substr(text.size() - (*item)[1].size()) : text;
}

Found whole_line(std::string_view text) {
  text = bare(text);
  const auto has = [&](std::string_view part) { return text.find(part) != text.npos; };
  if (text.size() > kMaxAnswer || has("\n") || has("\\boxed") || has("\\fbox")) return {};
  const size_t first_digit = text.find_first_of(kDigits);
  bool has_content = first_digit != text.npos;
  int words = 0, run = 0;  // run: letters of the current word; far below 0 in a command
  for (size_t i = 0; i < text.size(); ++i) {
    if (continues_utf8(text[i])) continue;
    run = in_word(text[i]) ? run + 1 : text[i] == '\\' ? -static_cast<int>(kMaxAnswer) : 0;
    has_content = has_content || in_word(text[i]);
    if (run == 2 && (++words > 3 || (first_digit != text.npos && i < first_digit))) return {};
  }
  return has_content ? Found(text) : std::nullopt;
}

// Delimiters of formulas, without those of one dollar.
constexpr std::pair<std::string_view, std::string_view> kDelimiters[] = {
    {"$$", "$$"},
    {"\\(", "\\)"},
    {"\\[", "\\]"},
    {"\\begin{align", "\\end{align"},
    {"\\begin{equation", "\\end{equation"}};

// Truncates at a line break, or at the first of ".!?" that precedes a blank or the end, outside of
// formulas. What is below the line continues it if that has no answer yet: a display formula, and
// any text after a colon.
std::string_view sentence(std::string_view text) {
  static const Regex kSentence(
      R"((?s)^(?:[^.!?\n0-9$\\]|[.!?](?!\s|$))*+(?:\n[\s*"]*(?=(?&formula))|(?<=:)\n\s*)?)"
      R"((?:(?&formula)|[^.!?\n]|[.!?](?!\s|$))*+)"
      R"((?(DEFINE)(?<formula>\$\$.*?\$\$|\\\(.*?\\\)|\\\[.*?\\\]|)"
      R"(\\begin\{(?:align|equation).*?\\end\{(?:align|equation))))");
  const auto match = kSentence.find_last(head(text, 2 * kMaxAnswer));
  return text.substr(0, match ? (*match)[0].size() : text.find('\n'));
}

Found after_hashes(std::string_view text) {
  constexpr std::string_view kHashes = "####";
  const size_t at = text.rfind(kHashes);
  if (at == text.npos) return {};
  const std::string_view rest = text.substr(at + kHashes.size());
  const std::string_view line = bare(rest.substr(0, rest.find('\n')));
  // Prose, as a heading is: words above other text, several sentences or words before a number.
  const bool is_last = bare(rest).size() == line.size();
  const bool has_math = line.find_first_of("0123456789$\\") != line.npos;
  return sentence(line).size() == line.size() && (has_math || is_last) ? whole_line(line) : Found();
}

// Returns the part of `math` after the last "=" that is neither in a bracket nor part of "<=", or
// all of it.
std::string_view right_hand_side(std::string_view math) {
  size_t begin = 0;
  int depth = 0;
  for (size_t i = 0; i < math.size(); ++i) {
    const char c = math[i];
    if (c == '\\') ++i;
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') --depth;
    if (c == '=' && depth <= 0 &&
        (i == 0 || std::string_view("<>!").find(math[i - 1]) == math.npos))
      begin = i + 1;
  }
  return math.substr(begin);
}

// The last "$" before `end` that is neither escaped nor one of "$$".
size_t last_dollar(std::string_view text, size_t end) {
  while (end != 0 && (end = text.rfind('$', end - 1)) != text.npos) {
    const char before = end == 0 ? ' ' : text[end - 1];
    const char after = end + 1 == text.size() ? ' ' : text[end + 1];
    if (before != '\\' && before != '$' && after != '$') return end;
  }
  return text.npos;
}

// Returns the part of `text` with the words after it that change its value.
std::string_view with_scale(std::string_view text, std::string_view part) {
  static const Regex kWords(
      R"((?i)^(?: *(?:\\?%|(?:dozen|hundred|thousand|million|billion|trillion|percent)s?\b))+)");
  constexpr size_t kLongest = 64;
  const auto end = static_cast<size_t>(part.data() + part.size() - text.data());
  const auto words = kWords.find_last(head(text.substr(end), kLongest));
  return {part.data(), part.size() + (words ? (*words)[0].size() : 0)};
}

Found last_math(std::string_view text) {
  size_t begin = 0, end = 0;  // delimiters of the formula that closes last
  const auto offer = [&](size_t open, size_t close) {
    if (open != text.npos && close != text.npos && close > end) begin = open, end = close;
  };
  size_t dollar = last_dollar(text, text.size());
  while (dollar != text.npos && dollar + 1 < text.size() && is_digit(text[dollar + 1]))
    dollar = last_dollar(text, dollar);
  const size_t opening = dollar == text.npos ? dollar : last_dollar(text, dollar);
  if (opening == 0 || (opening != text.npos && !is_digit(text[opening - 1])))
    offer(opening, dollar);
  for (const auto& [open, close] : kDelimiters)
    if (const size_t at = text.rfind(close); at != text.npos && at >= open.size())
      offer(text.rfind(open, at - open.size()), at);
  if (end == 0) return {};
  size_t size = text[begin] == '$' && text[begin + 1] != '$' ? 1 : 2;
  if (text.substr(begin).starts_with("\\begin")) size = text.find('}', begin) + 1 - begin;
  const std::string_view math = right_hand_side(text.substr(begin + size, end - begin - size));
  const std::string_view formula(math.data(), math.size() + std::min(size, text.size() - end));
  const std::string_view scaled = with_scale(text, formula);  // "5$ million"
  if (scaled.size() > formula.size()) return scaled;
  return without(math.substr(0, math.find("\\end{align")), "& \t\r\n", "\\ \t\r\n");
}

// The sentence after "answer is".
Found answer_sentence(std::string_view text) {
  static const Regex kTail(R"((?si)^.*answer[ *]*(?::|is(?![\pL']))(.+)$)");
  const auto tail = kTail.find_last(text);
  if (!tail) return {};
  const std::string_view after = text.substr(text.size() - (*tail)[1].size()), answer = bare(after);
  const auto skipped = static_cast<size_t>(answer.data() - after.data());
  const bool new_line = after.substr(0, skipped).find('\n') != after.npos;
  return sentence(new_line ? without_dash(answer) : answer);
}

// The list in brackets, as (1,234), or the mixed number, as 1 1/2, whose last digit is at `last`.
Found last_group(std::string_view text, size_t last) {
  static const Regex kGroup(
      R"((?:(?<![A-Za-z])((?:\\\{|[(\[{])[0-9.,+/ -]*,[0-9.,+/ -]*(?:\\\}|[)\]}])))"
      R"(|(?:^|(?<=\s))(-?[0-9]+ [0-9]+/[0-9]+))[^0-9]*$)");
  constexpr size_t kAfter = 3;  // " \}"
  const size_t begin = next_utf8_boundary(text, last - std::min(last, kMaxAnswer));
  const std::string_view window = head(text.substr(begin), last - begin + 1 + kAfter);
  const auto match = kGroup.find_last(window);
  if (!match) return {};
  const std::string& group = (*match)[(*match)[1].empty() ? 2 : 1];
  return with_scale(text, window.substr(window.rfind(group), group.size()));
}

Found last_expression(std::string_view text) {
  size_t last = text.find_last_of(kDigits);
  // The exponent of a unit, as in "12 cm^2" or "12\\text{ cm}^{2}", is not part of the number.
  while (last != text.npos && last > 0) {
    const size_t unit = text.find_last_not_of("^{}", last - 1);
    if (unit == text.npos || !is_letter(text[unit])) break;
    if (text.substr(unit, last - unit).find('^') == text.npos) break;
    last = text.find_last_of(kDigits, last - 1);
  }
  if (last == text.npos) return {};
  if (const Found group = last_group(text, last)) return group;
  const size_t begin = text.find_last_of(kBlank, last) + 1;
  const std::string_view token = bare(text.substr(begin, text.find_first_of(kBlank, last) - begin));
  if (token.size() <= kMaxAnswer && expression_value(answer_of(token).value))
    return with_scale(text, token);

  const std::string_view front = text.substr(0, last + 1);
  const std::string_view number =
      without(front.substr(front.find_last_not_of("0123456789.,/") + 1), ".,/", "");
  const size_t start = front.size() - number.size();
  const bool negative = start > 0 && text[start - 1] == '-' &&
                        (start == 1 || !(is_letter(text[start - 2]) || is_digit(text[start - 2])));
  return with_scale(text, front.substr(start - (negative ? 1 : 0)));
}

Found after_answer(std::string_view text) {
  const Found sentence = answer_sentence(text);
  if (!sentence) return {};
  for (const auto rule : {last_math, whole_line, last_expression})
    if (const Found found = rule(*sentence)) return found;
  return sentence;
}

}  // namespace

std::optional<std::string> final_answer(std::string_view given) {
  const std::string text = plain(repair_utf8(given));
  for (const auto rule :
       {last_boxed, after_hashes, after_answer, last_math, whole_line, last_expression}) {
    const Found answer = rule(rule == whole_line ? without_dash(text) : std::string_view(text));
    const std::string_view found = bare(answer.value_or(""));
    if (answer && rule == last_boxed && normalised_answer(found).empty()) return {};
    if (found.empty()) continue;
    if (found.size() > kMaxAnswer) return {};
    return std::string(found);
  }
  return {};
}

std::string normalised_answer(std::string_view answer) {
  return normalised(answer_of(answer).value);
}

bool same_answer(std::string_view a, std::string_view b) {
  if (same_plain(a, b)) return true;
  // "50%" is 50, as in hendrycks/math, and 50 percent.
  std::string left = plain(a), right = plain(b);
  if (left.find('%') == left.npos && right.find('%') == right.npos) return false;
  for (std::string* text : {&left, &right})
    *text = replaced(replaced(*text, "\\%", "%"), "%", " percent ");
  return same_plain(left, right);
}

}  // namespace cohort
