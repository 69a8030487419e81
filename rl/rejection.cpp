#include "rl/rejection.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <sstream>

#include "core/check.h"
#include "core/text.h"

namespace cohort {
namespace {

double estimate(int estimator, double x) {
  x = std::clamp(x, -20.0, 20.0);
  if (estimator == 1) return -x;
  return estimator == 2 ? x * x / 2 : std::expm1(x) - x;
}

}  // namespace

RejectionRule parse_rejection(const std::string& rule) {
  using Over = RejectionRule::Over;
  std::istringstream in(rule);
  std::string name, sign, number, rest;
  in >> name >> sign >> number;
  RejectionRule out{.above = sign == ">"};
  bool found = false;
  for (const auto& [prefix, over] : {std::pair{"token_k", Over::kToken},
                                     {"seq_sum_k", Over::kSum},
                                     {"seq_mean_k", Over::kMean},
                                     {"seq_max_k", Over::kMax}})
    for (const int estimator : {1, 2, 3})
      if (name == str(prefix, estimator)) {
        out.over = over;
        out.estimator = estimator;
        found = true;
      }
  char* end = nullptr;
  out.bound = std::strtod(number.c_str(), &end);
  const bool is_number = !number.empty() && *end == 0 && std::isfinite(out.bound);
  if (!found || (sign != ">" && sign != "<") || !is_number || in >> rest)
    throw InputError(str("rejection: expected a rule such as 'seq_mean_k3 > 0.002', got '", rule,
                         "'; hint: token, seq_sum, seq_mean or seq_max, then _k1, _k2 or _k3; > or "
                         "<; a number, with blanks between them"));
  if (!out.above && out.estimator > 1)
    throw InputError(str("rejection: '", rule, "': k2 and k3 are never below 0; hint: >"));
  if (out.above ? 0 > out.bound : 0 < out.bound)
    throw InputError(str("rejection: '", rule,
                         "' rejects every token that was drawn from the "
                         "policy itself, whose value is 0; hint: > with a bound of 0 or more, < "
                         "with one of 0 or less"));
  return out;
}

void reject_tokens(std::span<const std::string> rules, std::span<const double> old_logprob,
                   std::span<const double> sampling_logprob, std::span<const uint8_t> loss_mask,
                   std::vector<uint8_t>& kept) {
  using Over = RejectionRule::Over;
  for (const std::string& text : rules) {
    const RejectionRule rule = parse_rejection(text);
    const auto is_rejected = [&](double value) {
      return rule.above ? value > rule.bound : value < rule.bound;
    };
    double sum = 0, largest = -HUGE_VAL, count = 0;
    for (size_t t = 0; t < kept.size(); ++t) {
      if (!loss_mask[t]) continue;
      const double value = estimate(rule.estimator, old_logprob[t] - sampling_logprob[t]);
      sum += value;
      largest = std::max(largest, value);
      ++count;
      if (rule.over == Over::kToken && is_rejected(value)) kept[t] = 0;
    }
    if (rule.over == Over::kToken) continue;
    const double value = rule.over == Over::kSum    ? sum
                         : rule.over == Over::kMean ? sum / count
                                                    : largest;
    if (is_rejected(value)) std::ranges::fill(kept, 0);
  }
}

}  // namespace cohort
