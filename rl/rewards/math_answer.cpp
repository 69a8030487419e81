// Answers in mathematics: normalisation of their notation, and rules that find them.
#include "rl/rewards/math_answer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "rl/rewards/expression.h"
#include "text/regex.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr size_t kMaxAnswer = 1024;
constexpr std::string_view kBlank = " \t\r\n", kDigits = "0123456789";

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

// Characters and their spelling in ASCII or LaTeX.
constexpr std::pair<std::string_view, std::string_view> kCharacters[] = {
    {"−", "-"},
    {"–", "-"},
    {"—", " "},
    {"•", " "},
    {"“", "\""},
    {"”", "\""},
    {"’", "'"},
    {"。", ". "},
    {"、", ", "},
    {"\u3000", " "},
    {"\u00a0", " "},
    {"\u2009", " "},
    {"\u202f", " "},
    {"⁄", "/"},
    {"≤", "\\le "},
    {"≥", "\\ge "},
    {"≠", "\\ne "},
    {"∞", "\\infty "},
    {"∪", "\\cup "},
    {"²", "^2"},
    {"³", "^3"},
    {"½", "\\frac12"},
    {"⅓", "\\frac13"},
    {"⅔", "\\frac23"},
    {"¼", "\\frac14"},
    {"¾", "\\frac34"},
    {"⅕", "\\frac15"},
    {"⅖", "\\frac25"},
    {"⅗", "\\frac35"},
    {"⅘", "\\frac45"},
    {"⅙", "\\frac16"},
    {"⅚", "\\frac56"},
    {"⅛", "\\frac18"},
    {"⅜", "\\frac38"},
    {"⅝", "\\frac58"},
    {"⅞", "\\frac78"},
    // Bold text, as in "**5** dollars", and powers.
    {" ** ", "^"},
    {" **", " "},
    {"** ", " "},
};

// Spells kCharacters and the fullwidth forms of ASCII.
std::string plain(std::string_view given) {
  constexpr char32_t kFullwidth = 0xff01 - '!';
  std::string text(given);
  for (const auto& [from, to] : kCharacters) text = replaced(text, from, to);
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
  return without(text, " \t\r\n*`\":", " \t\r\n*`\":.,;");
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
// Applied in this order, to all occurrences.
constexpr std::pair<std::string_view, std::string_view> kReplacements[] = {
    {"°", ""},
    {"·", "*"},
    {"×", "*"},
    {"÷", "/"},
    {"π", "\\pi "},
    {"√", "sqrt"},
    {"\\ ", " "},
    {"\n", " "},
    {"\t", " "},
    {"\\!", ""},
    {"\\\\", "\\"},
    {"\\left", ""},
    {"\\right", ""},
    {"tfrac", "frac"},
    {"dfrac", "frac"},
    {"\\,", ""},
    {"\\;", " "},
    {"\\:", " "},
    {"\\qquad", " "},
    {"\\quad", " "},
    {"~", " "},
    {"^{\\circ}", ""},
    {"^\\circ", ""},
    {"\\$", ""},
    {"$", ""},
    {"\\%", ""},
    {"%", ""},
    {"€", ""},
    {"£", ""},
    {"{,}", ","},
    {"\\cdot", "*"},
    {"\\times", "*"},
    {"\\div", "/"},
    {"**", "^"},
    {"\\leqslant", "\\le"},
    {"\\leq", "\\le"},
    {"<=", "\\le "},
    {"\\lt", "<"},
    {"\\geqslant", "\\ge"},
    {"\\geq", "\\ge"},
    {">=", "\\ge "},
    {"\\gt", ">"},
    {"\\neq", "\\ne"},
    {" !=", "\\ne "},
    {"per cent", "percent"},
    {"\\(", ""},
    {"\\)", ""},
    {"\\[", ""},
    {"\\]", ""},
};

// Words that change the value of the number before them.
constexpr std::pair<std::string_view, std::string_view> kScales[] = {
    {"dozen", "*12"},        {"hundred", "*100"},        {"thousand", "*1000"},
    {"million", "*1000000"}, {"billion", "*1000000000"}, {"trillion", "*1000000000000"},
    {"percent", "*1/100"},   {"pct", "*1/100"},          {"percentage", "*1/100"},
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
      "sqrt|sin|cos|tan|log|mod|base|pi|root|squared|cubed|factorial|plus|minus|over|divided|"
      "multiplied|am|pm|noon|by|and|or|to|than|not|below|negative|remainder|choose|if|unless|"
      "except|"
      "hal(?:f|ves)|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|"
      "thousandth|millionth)s?");
  return kWords.full_match(word);
}

std::string lowercase(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

// Strips the unit after a number, "42 square", "15\mbox{ cm}^2", and appends its words to `unit`.
// Words that scale become factors: "5 million users" is "5*1000000".
std::string without_units(std::string text, std::string& unit) {
  static const Regex kUnits(
      R"(^(.*[0-9})\]])(?:\\? )*)"
      R"((?|\\(?:text[a-z]*|mbox|mathrm(?!\{.\}))\{([^{}]*+)\})"
      R"(|(?<= )((?:[A-Za-z]{3}|(?:[ckm]m|ft|in|mi|[km]g|lb|oz|ml|hr)\b)[A-Za-z ./]*+)))"
      R"((?:\^\{?[23]\}?)?[ .]*$)");
  constexpr int kMaxUnits = 3;  // \text{ million} \text{ users}
  for (int i = 0; i < kMaxUnits; ++i) {
    const auto match = kUnits.find_last(text);
    if (!match) break;
    std::string factors, words;
    std::string_view rest = (*match)[2];
    while (!(rest = without(rest, " ./", "")).empty()) {
      const std::string word = lowercase(rest.substr(0, rest.find_first_of(" ./")));
      rest.remove_prefix(word.size());
      const std::string_view scale = words.empty() ? scale_of(word) : "";
      if (is_no_unit(word)) return text;
      factors += scale;
      if (scale.empty()) words += (words.empty() ? "" : " ") + word;
    }
    text = (*match)[1] + factors;
    unit = words + (words.empty() || unit.empty() ? "" : " ") + unit;
  }
  return text;
}

// True if the last word of one unit abbreviates that of the other, as in "cm" and "square
// centimeters", or is its plural; any unit is that of a number without one.
bool same_unit(std::string_view a, std::string_view b) {
  for (std::string_view* unit : {&a, &b}) unit->remove_prefix(unit->rfind(' ') + 1);
  if (a.size() > b.size()) std::swap(a, b);
  const bool same_start = a.empty() || a[0] == b[0];
  for (const char c : b)
    if (a.starts_with(c)) a.remove_prefix(1);
  return same_start && (a.empty() || a == "s");
}

// Commands whose argument is ordinary text or the answer itself.
constexpr std::string_view kWrappers[] = {"\\boxed",  "\\fbox", "\\mbox",   "\\textbf", "\\textrm",
                                          "\\textit", "\\text", "\\mathrm", "\\mathbf"};

// Input of expression_value(): spaces are kept, which distinguish "1 2" from "12". Sets `unit` to
// the words of its unit.
std::string cleaned(std::string_view answer, std::string& unit) {
  std::string text = plain(answer);
  for (const auto& [from, to] : kReplacements) text = replaced(text, from, to);
  text = without_units(std::move(text), unit);
  for (const std::string_view wrapper : kWrappers) text = replaced(text, wrapper, "");
  const size_t equals = text.find('=');
  if (equals != text.npos && text.find('=', equals + 1) == text.npos) {
    const std::string_view left = without(std::string_view(text).substr(0, equals), " ", " ");
    if (left.size() <= 2 && std::all_of(left.begin(), left.end(), is_letter))
      text.erase(0, equals + 1);
  }
  for (size_t i = 0; i + 1 < text.size(); ++i)  // .5
    if (text[i] == '.' && is_digit(text[i + 1]) &&
        (i == 0 || !(is_digit(text[i - 1]) || text[i - 1] == '}')))
      text.insert(i++, 1, '0');
  return std::string(bare(text));
}
std::string cleaned(std::string_view answer) {
  std::string unit;
  return cleaned(answer, unit);
}

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
    const bool argument = missing > 0 || after_command ||
                          std::string_view("^_]}").find(last) != std::string_view::npos;
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
    } else if ((last == '^' || last == '_') &&
               (is_letter(c) || is_digit(c) ||
                (c == '-' && is_digit(text[i + 1 < text.size() ? i + 1 : i])))) {
      const size_t end = is_letter(c) ? i + 1 : text.find_first_not_of(kDigits, i + 1);
      const std::string_view exponent = text.substr(i, end - i);
      out.append("{").append(exponent).append("}");
      i += exponent.size() - 1;
    } else if (missing > 0 && (is_digit(c) || is_letter(c))) {
      --missing;
      out.append("{").append(1, c).append("}");
    } else {
      missing = 0;
      out += c;
    }
  }
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

// The elements of a list, "1, 2", "(1,234)", "[0, 1)" or "\{1\}", after its brackets; or nothing.
std::vector<std::string_view> list_of(std::string_view text) {
  constexpr std::string_view kOpen = "([{", kClose = ")]}";
  text = without(text, " ", " ");
  const auto split = [&](std::string_view part, std::string_view brackets) {
    std::vector<std::string_view> out{brackets};
    size_t begin = 0;
    int depth = 0;
    for (size_t i = 0; i <= part.size() && depth >= 0; ++i) {
      const char c = i < part.size() ? part[i] : ',';
      depth += (kOpen.find(c) != kOpen.npos) - (kClose.find(c) != kClose.npos);
      if (c != ',' || depth != 0) continue;
      out.push_back(part.substr(begin, i - begin));
      begin = i + 1;
    }
    if (depth != 0) out.clear();
    return out;
  };
  const bool is_set = text.starts_with("\\{") && text.ends_with("\\}");
  const size_t size = is_set ? 2 : 1;  // a bracket's
  if (text.size() > 2 * size && kOpen.find(text[size - 1]) != kOpen.npos &&
      kClose.find(text.back()) != kClose.npos)
    if (auto all =
            split(text.substr(size, text.size() - 2 * size), is_set ? "{" : text.substr(0, 1));
        all.size() > (is_set ? 1 : 2)) {
      all.push_back(text.substr(text.size() - 1));
      return all;
    }
  auto all = split(text, "");
  return all.size() > 2 && !expression_value(text) ? all : std::vector<std::string_view>();
}

// Compares what cleaned() returns: as text, as lists, of which sets have no order, or as numbers.
bool same_text(std::string_view a, std::string_view b, int depth = 0) {
  constexpr int kMaxDepth = 3;
  constexpr size_t kMaxSet = 32;  // elements, each of which is compared with each
  const std::string text = normalised(std::string(a));
  if (!text.empty() && text == normalised(std::string(b))) return true;
  const auto left = list_of(a), right = list_of(b);
  if (!left.empty() || !right.empty()) {
    const auto same = [&](auto x, auto y) { return same_text(x, y, depth + 1); };
    const auto contains = [&](const auto& all, const auto& some) {
      return std::ranges::all_of(some, [&](auto x) {
        return std::ranges::any_of(all, [&](auto y) { return x == y || same(x, y); });
      });
    };
    if (left.empty() || right.empty() || left[0] != right[0] || depth == kMaxDepth) return false;
    if (left[0] == "{" && std::max(left.size(), right.size()) <= kMaxSet)
      return contains(left, right) && contains(right, left);
    return std::ranges::equal(left, right, [&](auto x, auto y) { return x == y || same(x, y); });
  }
  const auto value = expression_value(a);
  const auto other = value ? expression_value(b) : std::nullopt;
  return other && same_number(*value, *other);
}

// Splits "f(2) = 72", "Area = 72" or "x \in [0, 1)" into a name and its value; without a name, all
// is the value. Products, as "abc = 72", and other equations have none.
std::pair<std::string, std::string> split_name(const std::string& text) {
  static const Regex kName(
      R"(^((?:\{[A-Za-z ]*\}|[A-Z][A-Za-z]{2,}(?: [A-Za-z]+)*|m?\\angle *[A-Z]+|[A-Za-z]{1,2})"
      R"(|\\[a-z]+))"
      R"((?:_(?:\w|\{[^{}]*\})|'|\^\{-1\})*(?:\([^()=]*\))?)\s*(?:=|\\in(?![a-z]))(.*)$)");
  const auto match = kName.find_last(text);
  if (!match) return {"", text};
  return {normalised((*match)[1]), std::string(bare((*match)[2]))};
}

bool same_plain(std::string_view a, std::string_view b) {
  std::string unit_a, unit_b;
  const std::string left = cleaned(a, unit_a), right = cleaned(b, unit_b);
  if (!same_unit(unit_a, unit_b)) return false;
  if (same_text(left, right)) return true;
  const auto [name, value] = split_name(left);
  const auto [other_name, other] = split_name(right);
  return (name.empty() || other_name.empty() || name == other_name) && same_text(value, other);
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
  text = bare(text);
  if (text.size() < 2 || text[0] != '-' || kBlank.find(text[1]) == kBlank.npos) return text;
  const std::string_view item = bare(text.substr(1));
  const bool is_word = item.size() > 1 && in_word(item[0]) && in_word(item[1]);
  const bool is_number = item.find_first_of(kDigits) <= (item.starts_with('-') ? 1 : 0);
  return (is_word || is_number) && item.find_first_of("+^=\\*") == item.npos ? item : text;
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
    {"$$", "$$"}, {"\\(", "\\)"}, {"\\[", "\\]"}, {"\\begin{align", "\\end{align"}};

// Returns the size of the display formula, or \(...\), that opens at the start of `text`; 0: none.
size_t formula_size(std::string_view text) {
  for (const auto& [open, close] : kDelimiters) {
    if (!text.starts_with(open)) continue;
    const size_t at = text.substr(0, kMaxAnswer).find(close, open.size());
    return at == text.npos ? 0 : at + close.size();
  }
  return 0;
}

// Truncates at a line break, or at the first of ".!?" that precedes a blank or the end, outside of
// formulas. A display formula below a line continues it if it has no answer yet.
std::string_view sentence(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (const size_t size = i < kMaxAnswer ? formula_size(text.substr(i)) : 0; size > 0) {
      i += size - 1;
      continue;
    }
    const bool ends = i + 1 == text.size() || kBlank.find(text[i + 1]) != kBlank.npos;
    const bool mark = text[i] == '.' || text[i] == '!' || text[i] == '?';
    if (mark && ends) return text.substr(0, i);
    if (text[i] != '\n') continue;
    const size_t next = text.find_first_not_of(" \t\r\n*\"", i);
    if (next == text.npos || formula_size(text.substr(next)) == 0 ||
        text.substr(0, i).find_first_of("0123456789$\\") != text.npos)
      return text.substr(0, i);
    i = next - 1;
  }
  return text;
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

// Returns the number at [begin, end) with the words after it that change its value.
std::string_view with_scale(std::string_view text, size_t begin, size_t end) {
  static const Regex kWords(
      R"((?i)^(?: *(?:\\?%|(?:dozen|hundred|thousand|million|billion|trillion|percent(?:age)?|pct))"
      R"(s?\b))+)");
  constexpr size_t kLongest = 64;
  const auto words = kWords.find_last(text.substr(end, kLongest));
  return text.substr(begin, end - begin + (words ? (*words)[0].size() : 0));
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
  std::string_view math = right_hand_side(text.substr(begin + size, end - begin - size));
  const size_t after = std::min(end + size, text.size());  // "$5$ million"
  const std::string_view scaled =
      with_scale(text, static_cast<size_t>(math.data() - text.data()), after);
  if (scaled.data() + scaled.size() > text.data() + after) return scaled;
  math = math.substr(0, math.find("\\end{align"));
  return without(math, "& \t\r\n", "\\ \t\r\n");
}

// The sentence after "answer is".
Found answer_sentence(std::string_view text) {
  constexpr std::string_view kAnswer = "answer";
  const std::string lower = lowercase(text);
  for (size_t at = lower.rfind(kAnswer); at != lower.npos; at = lower.rfind(kAnswer, at - 1)) {
    const size_t end = lower.find_first_not_of(" *", at + kAnswer.size());
    const std::string_view rest = std::string_view(lower).substr(std::min(end, lower.size()));
    const size_t size = rest.starts_with("is") ? 2 : rest.starts_with(':') ? 1 : 0;
    if (size == 1 || (size == 2 && rest.size() > 2 && !in_word(rest[2]) && rest[2] != '\'')) {
      const std::string_view after = text.substr(end + size), answer = bare(after);
      const auto skipped = static_cast<size_t>(answer.data() - after.data());
      const bool new_line = after.substr(0, skipped).find('\n') != after.npos;
      return sentence(new_line ? without_dash(answer) : answer);
    }
    if (at == 0) break;
  }
  return {};
}

// The list in brackets, as (1,234), or the mixed number, as 1 1/2, whose last digit is at `last`.
Found last_group(std::string_view text, size_t last) {
  static const Regex kGroup(
      R"((?:(?<![A-Za-z])((?:\\\{|[(\[{])[0-9.,+/ -]*,[0-9.,+/ -]*(?:\\\}|[)\]}])))"
      R"(|(?:^|(?<=\s))(-?[0-9]+ [0-9]+/[0-9]+))[^0-9]*$)");
  constexpr size_t kAfter = 3;  // " \}"
  const size_t begin = last - std::min(last, kMaxAnswer);
  const std::string_view window = text.substr(begin, last - begin + 1 + kAfter);
  const auto match = kGroup.find_last(window.substr(0, utf8_prefix(window)));
  if (!match) return {};
  const std::string& group = (*match)[1].empty() ? (*match)[2] : (*match)[1];
  return with_scale(text, begin + window.rfind(group), begin + window.rfind(group) + group.size());
}

Found last_expression(std::string_view text) {
  size_t last = text.find_last_of(kDigits);
  // The exponent of a unit, as in "12 cm^2" or "12\\text{ cm}^2", is not part of the number.
  const auto is_letter_at = [&](size_t i) { return i < text.size() && is_letter(text[i]); };
  while (last != text.npos && last >= 2 && text[last - 1] == '^' &&
         (is_letter_at(last - 2) || (text[last - 2] == '}' && is_letter_at(last - 3))))
    last = text.find_last_of(kDigits, last - 1);
  if (last == text.npos) return {};
  if (const Found group = last_group(text, last)) return group;
  const size_t begin = text.find_last_of(kBlank, last) + 1;
  const std::string_view token = bare(text.substr(begin, text.find_first_of(kBlank, last) - begin));
  const auto token_begin = static_cast<size_t>(token.data() - text.data());
  if (token.size() <= kMaxAnswer && expression_value(cleaned(token)))
    return with_scale(text, token_begin, token_begin + token.size());

  const std::string_view front = text.substr(0, last + 1);
  const size_t before = front.find_last_not_of("0123456789.,/") + 1;
  const std::string_view number = without(front.substr(before), ".,/", "");
  const size_t start = front.size() - number.size();
  const bool negative = start > 0 && text[start - 1] == '-' &&
                        (start == 1 || !(is_letter(text[start - 2]) || is_digit(text[start - 2])));
  return with_scale(text, start - (negative ? 1 : 0), front.size());
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
  const std::string text = plain(given);
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
  return normalised(cleaned(answer));
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
