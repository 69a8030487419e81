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

// The replacements of _strip_string(), and further notations of spaces and signs. Applied in this
// order, to all occurrences.
constexpr std::pair<std::string_view, std::string_view> kReplacements[] = {
    {"\n", " "},      {"\t", " "},       {"\\!", ""},       {"\\\\", "\\"}, {"\\left", ""},
    {"\\right", ""},  {"tfrac", "frac"}, {"dfrac", "frac"}, {"\\,", ""},    {"\\;", " "},
    {"\\:", " "},     {"\\qquad", " "},  {"\\quad", " "},   {"~", " "},     {"^{\\circ}", ""},
    {"^\\circ", ""},  {"°", ""},         {"\\$", ""},       {"$", ""},      {"\\%", ""},
    {"%", ""},        {"€", ""},         {"£", ""},         {"{,}", ","},   {"\\cdot", "*"},
    {"\\times", "*"}, {"\\div", "/"},    {"·", "*"},        {"×", "*"},     {"÷", "/"},
    {"**", "^"},      {"−", "-"},        {"π", "\\pi "},    {"√", "sqrt"},
};

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  size_t at = text.find(from);
  if (at == text.npos) return;
  std::string out;
  size_t done = 0;
  for (; at != text.npos; at = text.find(from, done)) {
    out.append(text, done, at - done).append(to);
    done = at + from.size();
  }
  text = out.append(text, done);
}

// Strips the unit after a number: "42 square", "15\mbox{ cm}^2". Names of functions and
// conjunctions between two answers are not units.
std::string without_units(std::string text) {
  static const Regex kUnits(
      R"(^(.*[0-9})\]])(?:\\? )*)"
      R"((?:\\(?:text[a-z]*|mbox|mathrm(?!\{.\}))\{[^{}]*+\})"
      R"(|(?<= )(?!(?:sqrt|sin|cos|tan|log|mod|and)\b))"
      R"((?:[A-Za-z]{3}|(?:[ckm]m|ft|in|mi|[km]g|lb|oz|ml|hr)\b)[A-Za-z ./]*+))"
      R"((?:\^\{?[23]\}?|²|³)?[ .]*$)");
  const auto match = kUnits.find_last(text);
  return match ? (*match)[1] : text;
}

// Commands whose argument is ordinary text or the answer itself.
constexpr std::string_view kWrappers[] = {"\\boxed",  "\\fbox", "\\mbox",   "\\textbf", "\\textrm",
                                          "\\textit", "\\text", "\\mathrm", "\\mathbf"};

// Input of expression_value(): spaces are kept, which distinguish "1 2" from "12".
std::string cleaned(std::string_view answer) {
  std::string text(answer);
  for (const auto& [from, to] : kReplacements) replace_all(text, from, to);
  text = without_units(std::move(text));
  for (const std::string_view wrapper : kWrappers) replace_all(text, wrapper, "");
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

// Adds the missing braces around arguments of \frac and \sqrt, removes those around groups that are
// not arguments, and removes all spaces except between digits: "3 1/2" is not "31/2".
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
  return rest.substr(0, rest.find_first_of(" \t\r\n$"));
}

Found after_hashes(std::string_view text) {
  constexpr std::string_view kHashes = "####";
  const size_t at = text.rfind(kHashes);
  if (at == text.npos) return {};
  const std::string_view rest = text.substr(at + kHashes.size());
  return rest.substr(0, rest.find('\n'));
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
  for (const auto& [open, close] : {std::pair("$$", "$$"), {"\\(", "\\)"}, {"\\[", "\\]"}}) {
    const size_t at = text.rfind(close);
    if (at != text.npos && at >= 2) offer(text.rfind(open, at - 2), at);
  }
  if (end == 0) return {};
  const size_t size = text[begin] == '$' && text[begin + 1] != '$' ? 1 : 2;
  return right_hand_side(text.substr(begin + size, end - begin - size));
}

// Truncates at a line break, or at the first of ".!?" that precedes a blank or the end.
std::string_view sentence(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const bool ends = i + 1 == text.size() || kBlank.find(text[i + 1]) != kBlank.npos;
    const bool mark = text[i] == '.' || text[i] == '!' || text[i] == '?';
    if (text[i] == '\n' || (mark && ends)) return text.substr(0, i);
  }
  return text;
}

// The sentence after "answer is".
Found answer_sentence(std::string_view text) {
  constexpr std::string_view kAnswer = "answer";
  std::string lower(text);
  for (char& c : lower)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  for (size_t at = lower.rfind(kAnswer); at != lower.npos; at = lower.rfind(kAnswer, at - 1)) {
    const size_t end = lower.find_first_not_of(" *", at + kAnswer.size());
    const std::string_view rest = std::string_view(lower).substr(std::min(end, lower.size()));
    for (const std::string_view word : {":", "is ", "is:", "is\n"})
      if (rest.starts_with(word)) return sentence(bare(text.substr(end + word.size())));
    if (at == 0) break;
  }
  return {};
}

// True for ASCII letters and for the first byte of a character outside of ASCII.
bool in_word(char c) {
  return is_letter(c) || static_cast<unsigned char>(c) >= 0xc0;
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

Found last_expression(std::string_view text) {
  size_t last = text.find_last_of(kDigits);
  // The exponent of a unit, as in "12 cm^2", is not part of the number.
  while (last != text.npos && last >= 2 && text[last - 1] == '^' && is_letter(text[last - 2]))
    last = text.find_last_of(kDigits, last - 1);
  if (last == text.npos) return {};
  const size_t begin = text.find_last_of(kBlank, last) + 1;
  const std::string_view token = bare(text.substr(begin, text.find_first_of(kBlank, last) - begin));
  if (token.size() <= kMaxAnswer && expression_value(cleaned(token))) return token;

  text = text.substr(0, last + 1);
  const size_t before = text.find_last_not_of("0123456789.,/") + 1;
  const std::string_view number = without(text.substr(before), ".,/", "");
  const size_t start = text.size() - number.size();
  const bool negative = start > 0 && text[start - 1] == '-' &&
                        (start == 1 || !(is_letter(text[start - 2]) || is_digit(text[start - 2])));
  return text.substr(start - (negative ? 1 : 0));
}

Found after_answer(std::string_view text) {
  const Found sentence = answer_sentence(text);
  if (!sentence) return {};
  for (const auto rule : {last_math, whole_line, last_expression})
    if (const Found found = rule(*sentence)) return found;
  return sentence;
}

}  // namespace

std::optional<std::string> final_answer(std::string_view text) {
  for (const auto rule :
       {last_boxed, after_hashes, after_answer, last_math, whole_line, last_expression}) {
    const std::string_view found = bare(rule(text).value_or(""));
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
  const std::string left = cleaned(a), right = cleaned(b);
  const std::string text = normalised(left);
  if (!text.empty() && text == normalised(right)) return true;
  const auto value = expression_value(left);
  const auto other = value ? expression_value(right) : std::nullopt;
  return other && same_number(*value, *other);
}

}  // namespace cohort
