// task: the verdict of the generated task's own checker.
#include "rl/rewards/rewards.h"

namespace cohort {

RewardFn make_task(const RewardConfig& config, const Task* task) {
  if (task == nullptr)
    throw InputError("needs data from a generated task; hint: exact_match or numeric for a file");
  return [finder = AnswerFinder(config.pattern), task](const RewardInput& in) {
    const auto found = finder.find(in.completion);
    return found ? task->check(in.example, *found) : 0.0;
  };
}

}  // namespace cohort
