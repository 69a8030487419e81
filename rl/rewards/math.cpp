// math: 1 if the final answer of the text found in the completion is that of the example's answer,
// as rl/rewards/math_answer.h defines both. A pattern selects a part of the completion, as in
// '(?s)</think>(.*)'; it is not applied to the example's answer. Expressions are compared by value:
// "6*12" equals 72. Not applicable to an example whose answer has no final answer.

#include "rl/rewards/math_answer.h"
#include "rl/rewards/rewards.h"

namespace cohort {

RewardFn make_math(const RewardConfig& config, const Task*) {
  return [finder = AnswerFinder(config.pattern)](const RewardInput& in) {
    const auto wanted = final_answer(in.answer());
    if (!wanted) return kNotApplicable;
    const auto text = finder.find(in.completion);
    const auto found = text ? final_answer(*text) : std::nullopt;
    return found && same_answer(*wanted, *found) ? 1.0 : 0.0;
  };
}

}  // namespace cohort
