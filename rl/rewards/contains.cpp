// contains: 1 if the text found in the completion contains the example's answer, ignoring spaces
// and line breaks around the answer. Not applicable to an example without an answer.
#include "data/tasks/tasks.h"
#include "rl/rewards/rewards.h"

namespace cohort {

RewardFn make_contains(const RewardConfig& config, const Task*) {
  return [finder = AnswerFinder(config.pattern)](const RewardInput& in) {
    const std::string_view answer = trimmed(in.answer());
    if (answer.empty()) return kNotApplicable;
    const auto found = finder.find(in.completion);
    return found && found->find(answer) != found->npos ? 1.0 : 0.0;
  };
}

}  // namespace cohort
