// numeric: 1 if the number found in the completion equals the example's answer, compared as exact
// fractions. Accepts numbers such as "1,234", "-0.50", "3/4", "$18.", "50 %". The signs $ and % are
// ignored, not interpreted: "50%" equals "50".

#include <charconv>

#include "data/tasks/tasks.h"
#include "rl/rewards/expression.h"
#include "rl/rewards/rewards.h"

namespace cohort {
namespace {

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
    value = divisor ? divide(*value, *divisor) : std::nullopt;
  }
  if (!value || !text.empty()) return {};
  return negative ? negated(*value) : *value;
}

// A number that may have an exponent, as those of JSON do: "1e5".
std::optional<Rational> parse_json_number(std::string_view text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  const bool is_json = at == end && error == std::errc();
  const auto number = is_json ? expression_value(text) : std::nullopt;
  return number && number->exact ? number->exact : parse_number(text);
}

}  // namespace

RewardFn make_numeric(const RewardConfig& config, const Task*) {
  return [finder = AnswerFinder(config.pattern)](const RewardInput& in) {
    // The answer may be a worked solution, in which the pattern finds the number.
    auto wanted = parse_json_number(in.answer());
    if (!wanted) wanted = parse_number(finder.find(in.answer()).value_or(""));
    if (!wanted) return kNotApplicable;
    const auto found = finder.find(in.completion);
    const bool is_same = found && trimmed(*found) == trimmed(in.answer());
    return is_same || (found && parse_number(*found) == wanted) ? 1.0 : 0.0;
  };
}

}  // namespace cohort
