// Groups of zero variance, which rounding errors must not train.
#include <set>

#include "tests/job/small_runs.h"
#include "trainers/grpo_step.h"

namespace cohort {
namespace {

using namespace test;

// Rewards whose weighted advantages cancel, and groups without variance in any reward, give no
// update, although 0.1 + 0.2 - 0.3 is no 0 and the mean over the step is a rounding error.
TEST(ZeroVarianceGroups, AdvantagesThatCancelGiveNoUpdate) {
  const TempDir dir;
  TrainConfig config = small_plan(dir, "run", std::string(kSmallModel) + kSmallData + kSmallGrpo,
                                  {"dtype=f64", "prompts_per_step=4", "num_generations=3"})
                           .stages[0];
  const Dataset data = load_dataset(config, nullptr);
  config.model.vocab_size = data.tokenizer->vocab_size();
  config.model.resolve();
  const auto comm = make_single_communicator();
  const auto learner = std::make_unique<Learner>(
      std::make_unique<Transformer>(config.model, config.dtype, 1), config.optimizer, *comm);
  Engine engine(learner->model(), {});
  const Sampler sampler(engine, *data.tokenizer, config.sampling);
  const std::vector<int64_t> shard = shard_prompts(*comm, config, 0);
  std::vector<Example> problems;
  for (const int64_t i : shard) problems.push_back(data.train->get(i));
  const auto step_with = [&](const std::vector<RewardConfig>& configs) {
    const RewardSet rewards(configs, data.task);
    return grpo_step({*comm, config, sampler, rewards, *learner, {}, problems, shard, {}, 0, 0});
  };
  const RewardConfig length{.name = "length"}, format{.name = "format", .pattern = ".*1.*"};
  const auto weighted = [](RewardConfig reward, double weight) {
    reward.weight = weight;
    return reward;
  };
  const std::vector<RewardConfig> cancel = {weighted(length, 0.1), weighted(length, 0.2),
                                            weighted(length, -0.3)};
  for (const PresetEntry& preset : kPresets) {
    config.grpo = {.preset = preset.value};
    config.grpo.apply_preset();
    config.grpo.beta = 0;
    config.grpo.refill_rounds = 0;
    const GrpoStepResult result = step_with(cancel);
    for (const double a : result.rollouts.advantages) EXPECT_EQ(a, 0) << preset.name;
    EXPECT_EQ(result.metrics.at("num_updates"), 0) << preset.name;
    EXPECT_EQ(result.metrics.at("frac_reward_zero_std"), 1) << preset.name;
    EXPECT_EQ(result.metrics.at("frac_groups_failed"), 1) << preset.name;
  }
  config.grpo = {.preset = Preset::kGdpo};
  config.grpo.apply_preset();
  const GrpoStepResult result = step_with({weighted(format, 0.1), weighted(format, 0.7)});
  const std::vector<double>& rewards = result.rollouts.scores.each[0];
  int64_t zero_variance = 0;
  for (size_t begin = 0; begin < rewards.size(); begin += 3) {
    const bool equal = std::set(rewards.begin() + static_cast<long>(begin),
                                rewards.begin() + static_cast<long>(begin) + 3)
                           .size() == 1;
    zero_variance += equal;
    for (size_t i = begin; i < begin + 3; ++i)
      EXPECT_EQ(result.rollouts.advantages[i] == 0, equal) << i;
  }
  EXPECT_GT(zero_variance, 0);
  EXPECT_LT(zero_variance, 4);
}

}  // namespace
}  // namespace cohort
