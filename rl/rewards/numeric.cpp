// numeric: 1 if the number found in the completion equals the example's answer, compared as exact
// fractions. Written as people and models write numbers: "1,234", "-0.50", "3/4", "$18.", "50 %".
// The signs $ and % are dropped, not interpreted: "50%" equals "50".
#include <limits>

#include "data/tasks/tasks.h"
#include "rl/rewards/rewards.h"

namespace cohort {
namespace {

using Wide = unsigned __int128;
constexpr size_t kMaxDigits = 38;  // 10^38 fits into 128 bits; more digits are no number here

// Lowest terms and no negative zero, so that equal numbers have equal fields.
struct Rational {
  Wide num = 0, den = 1;
  bool negative = false;
  bool operator==(const Rational&) const = default;
};

Rational reduced(Wide num, Wide den) {
  Wide a = num, b = den;
  while (b != 0) {
    const Wide rest = a % b;
    a = b;
    b = rest;
  }
  return {num / a, den / a};
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Moves the leading digits of `text` to the end of `digits`.
void take_digits(std::string_view& text, std::string& digits) {
  size_t n = 0;
  while (n < text.size() && is_digit(text[n])) ++n;
  digits += text.substr(0, n);
  text.remove_prefix(n);
}

bool starts_with_group(std::string_view text) {  // ",234"
  return text.size() >= 4 && text[0] == ',' && is_digit(text[1]) && is_digit(text[2]) &&
         is_digit(text[3]);
}

// Takes "1,234.50" or ".5" off the front of `text`.
std::optional<Rational> take_decimal(std::string_view& text) {
  std::string digits, fraction;
  take_digits(text, digits);
  if (digits.size() >= 1 && digits.size() <= 3) {
    for (; starts_with_group(text); text.remove_prefix(4)) digits += text.substr(1, 3);
  }
  if (text.size() >= 2 && text[0] == '.' && is_digit(text[1])) {
    text.remove_prefix(1);
    take_digits(text, fraction);
  }
  if (digits.empty() && fraction.empty()) return {};
  fraction.resize(fraction.find_last_not_of('0') + 1);
  digits += fraction;
  digits.erase(0, digits.find_first_not_of('0'));
  if (digits.size() > kMaxDigits || fraction.size() > kMaxDigits) return {};
  Wide num = 0, den = 1;
  for (const char c : digits) num = num * 10 + static_cast<Wide>(c - '0');
  for (size_t i = 0; i < fraction.size(); ++i) den *= 10;
  return reduced(num, den);
}

bool take(std::string_view& text, char c) {
  if (text.empty() || text.front() != c) return false;
  text.remove_prefix(1);
  return true;
}

bool take_end(std::string_view& text, char c) {
  if (text.empty() || text.back() != c) return false;
  text.remove_suffix(1);
  text = trimmed(text);
  return true;
}

// [$] [+-] [$] decimal [/ decimal] [% or $] [.], with spaces around "/" and before the end signs.
std::optional<Rational> parse_number(std::string_view text) {
  text = trimmed(text);
  take_end(text, '.');
  if (!take_end(text, '%')) take_end(text, '$');
  const bool dollar = take(text, '$');
  const bool negative = take(text, '-');
  if (!negative) take(text, '+');
  if (!dollar) take(text, '$');

  std::optional<Rational> value = take_decimal(text);
  text = trimmed(text);
  if (value && take(text, '/')) {
    text = trimmed(text);
    const auto divisor = take_decimal(text);
    Wide num, den;
    if (!divisor || divisor->num == 0) return {};
    if (__builtin_mul_overflow(value->num, divisor->den, &num)) return {};
    if (__builtin_mul_overflow(value->den, divisor->num, &den)) return {};
    value = reduced(num, den);
  }
  if (!value || !text.empty()) return {};
  value->negative = negative && value->num != 0;
  return value;
}

}  // namespace

RewardFn make_numeric(const RewardConfig& config, const Task*) {
  return [finder = AnswerFinder(config.pattern)](const RewardInput& in) {
    // A worked solution serves as the answer too: then the pattern finds the number in it.
    auto wanted = parse_number(in.example.answer);
    if (!wanted) wanted = parse_number(finder.find(in.example.answer).value_or(""));
    if (!wanted) return std::numeric_limits<double>::quiet_NaN();
    const auto found = finder.find(in.completion);
    return found && parse_number(*found) == wanted ? 1.0 : 0.0;
  };
}

}  // namespace cohort
