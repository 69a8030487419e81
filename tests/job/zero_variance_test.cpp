// Groups of zero variance, which rounding errors must not train.
#include <set>

#include "tests/job/grpo_step_fixture.h"

namespace cohort {
namespace {

using namespace test;

using ZeroVarianceGroups = GrpoStepTest;

// Rewards whose weighted advantages cancel, and groups without variance in any reward, give no
// update, although 0.1 + 0.2 - 0.3 is no 0 and the mean over the step is a rounding error.
TEST_F(ZeroVarianceGroups, AdvantagesThatCancelGiveNoUpdate) {
  const auto step_with = [&](const std::vector<RewardConfig>& configs) {
    return make_step(RewardSet(configs, data_.task));
  };
  const RewardConfig length{.name = "length"}, format{.name = "format", .pattern = ".*1.*"};
  const auto weighted = [](RewardConfig reward, double weight) {
    reward.weight = weight;
    return reward;
  };
  const std::vector<RewardConfig> cancel = {weighted(length, 0.1), weighted(length, 0.2),
                                            weighted(length, -0.3)};
  for (const PresetEntry& preset : kPresets) {
    config_.grpo = {.preset = preset.value};
    config_.grpo.apply_preset();
    config_.grpo.beta = 0;
    config_.grpo.dynamic_sampling_rounds = 0;
    const GrpoStepResult result = step_with(cancel);
    for (const ScoredCompletion* c : completions_of(result.rollouts.groups))
      EXPECT_EQ(c->advantage, 0) << preset.name;
    EXPECT_EQ(result.metrics.at("num_updates"), 0) << preset.name;
    EXPECT_EQ(result.metrics.at("frac_reward_zero_std"), 1) << preset.name;
    EXPECT_EQ(result.metrics.at("frac_groups_failed"), 1) << preset.name;
  }
  config_.grpo = {.preset = "gdpo"};
  config_.grpo.apply_preset();
  const GrpoStepResult result = step_with({weighted(format, 0.1), weighted(format, 0.7)});
  int64_t zero_variance = 0;
  for (const Group& group : result.rollouts.groups) {
    std::set<double> rewards;
    for (const ScoredCompletion& c : group.completions) rewards.insert(c.rewards[0]);
    zero_variance += rewards.size() == 1;
    for (const ScoredCompletion& c : group.completions)
      EXPECT_EQ(c.advantage == 0, rewards.size() == 1) << c.index;
  }
  EXPECT_GT(zero_variance, 0);
  EXPECT_LT(zero_variance, 4);
}

}  // namespace
}  // namespace cohort
