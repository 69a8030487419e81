// countdown: 1 if the expression found in the completion reaches the example's `target` with each
// of its `numbers` used once. Works on any data with these two fields; examples without them are
// not applicable.
#include "data/tasks/countdown.h"

#include "data/tasks/tasks.h"
#include "rl/rewards/rewards.h"

namespace cohort {
namespace {

std::optional<std::vector<int64_t>> integers(const Json* json) {
  if (json == nullptr || !json->is_array()) return {};
  std::vector<int64_t> values;
  for (const Json& item : json->as_array()) {
    if (!item.is_int()) return {};
    values.push_back(item.as_int());
  }
  return values;
}

}  // namespace

RewardFn make_countdown(const RewardConfig& config, const Task*) {
  return [finder = AnswerFinder(config.pattern)](const RewardInput& in) {
    const auto numbers = integers(in.example.fields.find("numbers"));
    const Json* target = in.example.fields.find("target");
    if (!numbers || target == nullptr || !target->is_int()) return kNotApplicable;
    const auto found = finder.find(in.completion);
    return found && countdown_solved(*numbers, target->as_int(), trimmed(*found)) ? 1.0 : 0.0;
  };
}

}  // namespace cohort
