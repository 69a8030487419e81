// starts_with: 1 if the text found in the completion starts with the example's solution, ignoring
// spaces and line breaks around both. Not applicable to an example without a solution.
#include "data/tasks/tasks.h"
#include "rl/rewards/rewards.h"

namespace cohort {

RewardFn make_starts_with(const RewardConfig& config, const Task*) {
  return [finder = AnswerFinder(config.pattern)](const RewardInput& in) {
    const std::string_view solution = trimmed(in.example.solution);
    if (solution.empty()) return kNotApplicable;
    const auto found = finder.find(in.completion);
    return found && trimmed(*found).starts_with(solution) ? 1.0 : 0.0;
  };
}

}  // namespace cohort
