// exact_match: 1 if the text found in the completion is the example's answer, ignoring spaces
// and line breaks around both. Not applicable to an example without an answer.

#include "data/tasks/tasks.h"
#include "rl/rewards/rewards.h"

namespace cohort {

RewardFn make_exact_match(const RewardConfig& config, const Task*) {
  return [finder = AnswerFinder(config.pattern)](const RewardInput& in) {
    if (trimmed(in.answer()).empty()) return kNotApplicable;
    const auto found = finder.find(in.completion);
    return found && trimmed(*found) == trimmed(in.answer()) ? 1.0 : 0.0;
  };
}

}  // namespace cohort
