// numeric: 1 if the number found in the completion equals the example's answer, compared as exact
// fractions. Accepts numbers such as "1,234", "-0.50", "3/4", "$18.", "50 %". The signs $ and % are
// ignored, not interpreted: "50%" equals "50".

#include <charconv>

#include "data/tasks/tasks.h"
#include "rl/rewards/expression.h"
#include "rl/rewards/rewards.h"
#include "text/regex.h"

namespace cohort {
namespace {

// [$] [+-] [$] decimal [/ decimal] [% or $] [.], with spaces around "/" and before the end signs.
std::optional<Rational> parse_number(std::string_view text) {
  static const Regex kNumber(
      R"(^\s*(?:\$?([+-]?)|([+-])\$)([0-9,]*\.?[0-9]+)(?:\s*/\s*([0-9,]*\.?[0-9]+))?\s*[%$]?\s*\.?\s*$)");
  const auto match = kNumber.find_last(text);
  if (!match) return {};
  const auto decimal = [](std::string_view digits) {
    const auto value = take_decimal(digits);
    return digits.empty() ? value : std::nullopt;
  };
  auto value = decimal((*match)[3]);
  if (const std::string& under = (*match)[4]; value && !under.empty()) {
    const auto divisor = decimal(under);
    value = divisor ? divide(*value, *divisor) : std::nullopt;
  }
  const bool negative = (*match)[1] == "-" || (*match)[2] == "-";
  return value && negative ? negated(*value) : value;
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
