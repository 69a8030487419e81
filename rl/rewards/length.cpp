// overlong, length, cosine: rewards by the number of sampled tokens, which includes the stop token.
// With m = max_length, or the run's max_completion_length where that is 0, and x tokens:
//   overlong   0 up to m - buffer tokens, then linear down to -penalty at m, and -penalty beyond
//              (the soft overlong punishment of DAPO, Yu et al. 2025, eq. 13).
//   length     -penalty min(x / m, 1)
//   cosine     b + (a - b) (1 + cos(pi min(x / m, 1))) / 2, where {a, b} is `right` for right
//              answers and `wrong` for the others (Yeo et al. 2025; TRL's cosine reward).
// They do not apply where x or m is unknown.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "rl/rewards/rewards.h"

namespace cohort {
namespace {

struct Length {
  double tokens = 0, limit = 0;
  double fraction() const { return std::min(tokens / limit, 1.0); }
};

std::optional<Length> length_of(const RewardInput& in, int64_t max_length) {
  const int64_t limit = max_length > 0 ? max_length : in.max_tokens;
  if (!in.tokens || limit <= 0) return {};
  return Length{static_cast<double>(in.tokens->size()), static_cast<double>(limit)};
}

void check_pair(const char* key, const std::vector<double>& values) {
  if (values.size() != 2)
    throw InputError(
        str(key, ": expected 2 values, of no tokens and of max_length, got ", values.size()));
}

}  // namespace

RewardFn make_overlong(const RewardConfig& config, const Task*) {
  if (config.buffer == 0)
    throw InputError("buffer: needs a number of tokens; hint: a fifth of max_completion_length");
  if (config.max_length > 0 && config.buffer > config.max_length)
    throw InputError(
        str("buffer: ", config.buffer, " is more than max_length, ", config.max_length));
  return [config](const RewardInput& in) {
    const auto length = length_of(in, config.max_length);
    if (!length) return kNotApplicable;
    const auto buffer = static_cast<double>(config.buffer);
    const double excess = length->tokens - (length->limit - buffer);
    return excess <= 0 ? 0.0 : -config.penalty * std::min(excess / buffer, 1.0);
  };
}

RewardFn make_length(const RewardConfig& config, const Task*) {
  return [config](const RewardInput& in) {
    const auto length = length_of(in, config.max_length);
    return length ? -config.penalty * length->fraction() : kNotApplicable;
  };
}

RewardFn make_cosine(const RewardConfig& config, const Task*) {
  if (config.correct.empty())
    throw InputError(
        "correct: needs the name of the reward that says which answers are right; hint: "
        "rewards: [{name: math, weight: 0}, {name: cosine, correct: math}]");
  check_pair("right", config.right);
  check_pair("wrong", config.wrong);
  return [config](const RewardInput& in) {
    const auto length = length_of(in, config.max_length);
    if (!length || std::isnan(in.correct)) return kNotApplicable;
    const std::vector<double>& ends = in.correct >= config.threshold ? config.right : config.wrong;
    const double cosine = std::cos(std::numbers::pi * length->fraction());
    return ends[1] + (ends[0] - ends[1]) * (1 + cosine) / 2;
  };
}

}  // namespace cohort
