// repetition: -penalty (1 - d / a), where d of all a n-grams of the sampled tokens are distinct,
// and 0 for fewer than n tokens (as TRL's get_repetition_penalty_reward; `distinct` scores the
// text). It does not apply where the tokens are unknown.
#include <algorithm>

#include "rl/rewards/rewards.h"

namespace cohort {

RewardFn make_repetition(const RewardConfig& config, const Task*) {
  return [n = config.n, penalty = config.penalty](const RewardInput& in) {
    if (!in.tokens) return kNotApplicable;
    const std::vector<int32_t>& tokens = *in.tokens;
    std::vector<std::vector<int32_t>::const_iterator> grams;
    for (auto begin = tokens.begin(); tokens.end() - begin >= n; ++begin) grams.push_back(begin);
    if (grams.empty()) return 0.0;
    const auto equal = [n](auto a, auto b) { return std::equal(a, a + n, b); };
    std::ranges::sort(
        grams, [n](auto a, auto b) { return std::lexicographical_compare(a, a + n, b, b + n); });
    const auto all = static_cast<double>(grams.size());
    const auto repeated = static_cast<double>(std::ranges::unique(grams, equal).size());
    return repeated == 0 ? 0.0 : -penalty * repeated / all;
  };
}

}  // namespace cohort
