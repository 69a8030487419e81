#include "rl/group.h"

#include <algorithm>
#include <cmath>

namespace cohort {

std::vector<Group> group_completions(std::span<const Example> prompts,
                                     std::vector<Trajectory> completions,
                                     const RewardSet::Scores& scores) {
  std::vector<Group> out;
  const size_t size = completions.size() / std::max<size_t>(1, prompts.size());
  for (size_t i = 0; i < completions.size(); ++i) {
    if (i % size == 0) out.push_back({.index = completions[i].group, .example = prompts[i / size]});
    out.back().completions.push_back({std::move(completions[i])});
    ScoredCompletion& c = out.back().completions.back();
    if (scores.total.empty()) continue;
    c.reward = scores.total[i];
    c.error =
        c.environment_error.empty() ? scores.errors[i] : "environment: " + c.environment_error;
    for (const std::vector<double>& each : scores.each) c.rewards.push_back(each[i]);
  }
  return out;
}

std::vector<double> turn_returns(const ScoredCompletion& c, std::span<const std::string> names,
                                 std::span<const double> weights, double discount) {
  std::vector<double> out(static_cast<size_t>(c.num_turns()), c.reward), others = c.rewards;
  if (std::isnan(c.reward)) return out;
  double weight = 0;
  for (size_t k = 0; k < names.size(); ++k)
    if (names[k] == "environment") {
      weight = weights[k];
      others[k] = std::nan("");
    }
  const auto or_zero = [](double value) { return std::isnan(value) ? 0 : value; };
  double later = or_zero(weighted_sum(weights, others));
  for (size_t k = out.size(); k-- > 0;) {
    const double reward = k < c.turn_rewards.size() ? or_zero(weight * c.turn_rewards[k]) : 0;
    out[k] = without_rounding(reward + later, std::abs(reward) + std::abs(later));
    later = discount * out[k];
  }
  return out;
}

std::optional<int> group_outcome(const Group& group, const SuccessCriterion& criterion) {
  std::vector<double> verdicts;
  for (const ScoredCompletion& c : group.completions) {
    verdicts.push_back(c.reward);
    if (criterion.reward < 0) continue;
    const double value = c.rewards[static_cast<size_t>(criterion.reward)];
    verdicts.back() = std::isnan(value) ? value : value >= criterion.threshold ? 1 : -1;
  }
  return group_outcome(verdicts);
}

std::optional<int> group_outcome(std::span<const double> rewards) {
  double lowest = HUGE_VAL, highest = -HUGE_VAL;
  for (const double r : rewards) lowest = std::fmin(lowest, r), highest = std::fmax(highest, r);
  if (lowest > highest) return std::nullopt;
  if (!equal_rewards(lowest, highest)) return 0;
  return highest > 0 && !equal_rewards(highest, 0) ? 1 : -1;
}

int64_t count_loss_tokens(const ScoredCompletion& completion, const GrpoConfig& config) {
  if (std::isnan(completion.reward)) return 0;
  if (config.mask_truncated_completions && completion.truncated()) return 0;
  return completion.completion_length();
}

bool has_signal(const Group& group, const GrpoConfig& config) {
  return std::ranges::any_of(group.completions, [&](const ScoredCompletion& c) {
    const bool differs = std::ranges::any_of(c.turn_advantages, [](double a) { return a != 0; });
    return (c.reward_advantage != 0 || differs) && count_loss_tokens(c, config) > 0;
  });
}

}  // namespace cohort
