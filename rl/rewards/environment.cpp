// environment: the discounted sum of the rewards that an environment gave to the turns of a
// dialogue (rl/engine/environment.h), 0 without any. It does not apply where there is no dialogue.
#include <cmath>

#include "rl/rewards/rewards.h"

namespace cohort {

RewardFn make_environment(const RewardConfig&, const Task*) {
  return [](const RewardInput& in) {
    if (in.transcript == nullptr) return kNotApplicable;
    return std::isnan(in.environment_reward) ? 0.0 : in.environment_reward;
  };
}

}  // namespace cohort
