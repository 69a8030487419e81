// format: 1 if the pattern matches the whole completion.
#include "rl/rewards/rewards.h"

namespace cohort {

RewardFn make_format(const RewardConfig& config, const Task*) {
  if (config.pattern.empty())
    throw InputError("needs a pattern; hint: pattern: '(?s)<think>.*</think>.*'");
  return [regex = std::make_shared<const Regex>(config.pattern)](const RewardInput& in) {
    return regex->full_match(in.completion) ? 1.0 : 0.0;
  };
}

}  // namespace cohort
