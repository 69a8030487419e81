// think_format: 1 if the text found in the completion begins with <think>, has no second <think>,
// and closes it with </think>, whatever follows (the form of TRL's think_format_reward). If the
// prompt ends with <think>, as some templates have it, the text has none at all.
#include "data/tasks/tasks.h"
#include "rl/rewards/rewards.h"

namespace cohort {

RewardFn make_think_format(const RewardConfig& config, const Task*) {
  return [finder = AnswerFinder(config.pattern)](const RewardInput& in) {
    constexpr std::string_view kOpen = "<think>", kClose = "</think>";
    const bool is_open = trimmed(in.example.prompt).ends_with(kOpen);
    const auto text = finder.find(in.completion);
    return text && text->rfind(kOpen) == (is_open ? text->npos : 0) &&
                   text->find(kClose) != text->npos
               ? 1.0
               : 0.0;
  };
}

}  // namespace cohort
