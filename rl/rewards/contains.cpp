// contains: 1 if the text found in the completion contains the example's answer, ignoring spaces
// and line breaks around the answer. No text contains an empty answer.
#include "data/tasks/tasks.h"
#include "rl/rewards/rewards.h"

namespace cohort {

RewardFn make_contains(const RewardConfig& config, const Task*) {
  return [finder = AnswerFinder(config.pattern)](const RewardInput& in) {
    const auto found = finder.find(in.completion);
    const std::string_view answer = trimmed(in.answer());
    return found && !answer.empty() && found->find(answer) != found->npos ? 1.0 : 0.0;
  };
}

}  // namespace cohort
