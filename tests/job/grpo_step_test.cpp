// Whole GRPO steps, and the shards of their prompts.
#include "trainers/grpo_step.h"

#include <cmath>
#include <numeric>

#include "rl/grpo_loss.h"
#include "tests/job/grpo_step_fixture.h"

namespace cohort::test {
namespace {

// The prompts of each rank in one step.
std::vector<std::vector<int64_t>> prompts_of_ranks(const TrainConfig& config, int ranks,
                                                   int64_t step) {
  std::vector<std::vector<int64_t>> indices(static_cast<size_t>(ranks));
  run_local_ranks(ranks, [&](Communicator& comm) {
    indices[static_cast<size_t>(comm.rank())] = shard_prompts(comm, config, step);
  });
  return indices;
}

TEST(GrpoShards, EveryPromptHasOneRank) {
  TrainConfig config;
  for (const int64_t prompts : {1, 4, 13, 32})
    for (const int64_t minibatches : {1, 3, 8})
      for (const int64_t step : {0, 1, 7}) {
        if (minibatches > prompts) continue;
        config.batch.prompts_per_step = prompts;
        config.grpo.num_minibatches = minibatches;
        std::vector<int64_t> all;
        for (const auto& rank : prompts_of_ranks(config, 3, step))
          all.insert(all.end(), rank.begin(), rank.end());
        std::sort(all.begin(), all.end());
        std::vector<int64_t> expected(static_cast<size_t>(prompts));
        std::iota(expected.begin(), expected.end(), 0);
        EXPECT_EQ(all, expected);
      }
}

// 32 prompts in 8 minibatches on 8 ranks: each rank has prompts in half of the minibatches.
TEST(GrpoShards, MinibatchesWithFewPromptsRotateOverTheRanks) {
  TrainConfig config;
  config.batch.prompts_per_step = 32;
  config.grpo.num_minibatches = 8;
  for (const int64_t step : {0, 1, 2})
    for (const auto& rank : prompts_of_ranks(config, 8, step)) EXPECT_EQ(rank.size(), 4u);
  config.batch.prompts_per_step = 3;
  config.grpo.num_minibatches = 1;
  std::vector<size_t> counts(8);
  for (int64_t step = 0; step < 8; ++step) {
    const auto ranks = prompts_of_ranks(config, 8, step);
    for (size_t r = 0; r < 8; ++r) counts[r] += ranks[r].size();
  }
  EXPECT_EQ(counts, std::vector<size_t>(8, 3));
}

using GrpoStep = GrpoStepTest;

// The whole step, without a run around it.
TEST_F(GrpoStep, IsAFunctionOfItsInputs) {
  const RewardSet rewards({{.name = "format", .pattern = ".*1.*"}, {.name = "task"}}, data_.task);
  std::vector<Tensor> weights[2];
  for (const bool again : {false, true}) {
    const auto comm = make_single_communicator();
    const auto learner = make_learner(*comm);
    for (int64_t step = 0; step < 2; ++step) {
      const GrpoStepResult result =
          make_step(*comm, *learner, rewards, {.step = step, .learning_rate = 1e-2});
      const std::vector<Group>& groups = result.rollouts.groups;
      EXPECT_EQ(result.rewarded_count, 12);
      EXPECT_EQ(numbers_of(groups, &ScoredCompletion::advantage),
                group_advantages(numbers_of(groups, &ScoredCompletion::reward), 3,
                                 config_.grpo.scale_rewards));
      EXPECT_EQ(result.metrics.at("ratio_deviation"), 0);
      EXPECT_GT(result.metrics.at("grad_norm"), 0);
      EXPECT_GE(result.metrics.at("time/update"), 0);
      EXPECT_EQ(learner->optimizer().updates(), 2 * (step + 1));
    }
    for (const NamedParameter& p : learner->model().parameters())
      weights[again].push_back(p.value.clone());
  }
  expect_same_weights(weights[0], weights[1]);
}

// The ratios of the first minibatch are 1 to the bit: the sampler's cached attention and the
// trainer's packed one agree under every scheme of positions and every rule.
TEST_F(GrpoStep, RatiosAreExactUnderEverySchemeAndRule) {
  const RewardSet rewards({{.name = "format", .pattern = ".*1.*"}, {.name = "task"}}, data_.task);
  const ModelConfig plain = config_.model;
  for (const char* keys :
       {"position: sinusoidal", "position: alibi", "position: t5", "position: exposb",
        "position: none", "window: 5", "soft_cap: 0.5", "attention_sinks: true",
        "{position: t5, window: 9, soft_cap: 3, attention_sinks: true, recompute: block}"})
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      SCOPED_TRACE(keys);
      config_.model = plain;
      config_.dtype = dtype;
      read_config(config_.model, parse_yaml(keys, "model"));
      config_.model.resolve();
      const auto comm = make_single_communicator();
      const auto learner = make_learner(*comm);
      for (int64_t step = 0; step < 2; ++step) {
        const GrpoStepResult result =
            make_step(*comm, *learner, rewards, {.step = step, .learning_rate = 1e-2});
        EXPECT_EQ(result.metrics.at("ratio_deviation"), 0);
        EXPECT_GT(result.metrics.at("grad_norm"), 0);
      }
    }
}

TEST_F(GrpoStep, RewardsByLengthScoreTheSampledTokens) {
  const int64_t limit = config_.sampling.max_completion_length;
  const RewardSet rewards({{.name = "task", .weight = 0},
                           {.name = "overlong", .weight = 2, .buffer = limit},
                           {.name = "length", .weight = 0},
                           {.name = "cosine", .weight = 0, .correct = "task"}},
                          data_.task);
  const GrpoStepResult result = make_step(rewards, {.learning_rate = 1e-2});
  for (const ScoredCompletion* c : completions_of(result.rollouts.groups)) {
    SCOPED_TRACE(c->index);
    const double fraction =
        static_cast<double>(c->completion_length()) / static_cast<double>(limit);
    EXPECT_EQ(c->max_tokens, limit);
    EXPECT_EQ(c->rewards[1], -fraction);
    EXPECT_EQ(c->rewards[2], -fraction);
    EXPECT_EQ(c->reward, -2 * fraction);
    const double cosine = c->rewards[3];
    EXPECT_EQ(c->rewards[0] >= 1, cosine > 0);
    EXPECT_NEAR(std::abs(cosine), 0.5 + (1 + std::cos(std::acos(-1) * fraction)) / 4, 1e-12);
  }
}

// With a reference that equals the policy the KL is 0, and so is the gradient if all rewards are
// equal. A reward that applies to no completion does not change the weights either.
TEST_F(GrpoStep, TakesAReferenceAndNeedsAReward) {
  config_.grpo.beta = 0.1;
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  const Transformer reference(config_.model, config_.dtype, 1);
  const auto step_with = [&](const RewardSet& rewards) {
    return make_step(*comm, *learner, rewards, {.reference = &reference});
  };
  const GrpoStepResult result = step_with(RewardSet({{.name = "task"}}, data_.task));
  EXPECT_EQ(result.metrics.at("kl"), 0);
  EXPECT_TRUE(std::isnan(result.metrics.at("grad_norm")));
  EXPECT_EQ(result.metrics.at("num_updates"), 0);
  EXPECT_EQ(learner->optimizer().updates(), 0);
  const GrpoStepResult none = step_with(RewardSet({{.name = "countdown"}}, nullptr));
  EXPECT_EQ(none.rewarded_count, 0);
  EXPECT_TRUE(std::isnan(none.metrics.at("reward")));
  EXPECT_TRUE(std::isnan(none.metrics.at("loss")));
  EXPECT_EQ(learner->optimizer().updates(), 0);
}

// The step subtracts beta times the KL of each completion from its reward before the advantages.
TEST_F(GrpoStep, AKlInTheRewardChangesTheAdvantages) {
  const Transformer reference(config_.model, config_.dtype, 2);
  const RewardSet rewards({{.name = "format", .pattern = ".*1.*"}}, data_.task);
  config_.grpo.kl_in = KlPlace::kReward;
  config_.grpo.kl_estimator = kernels::KlEstimator::kK1;
  const auto step_with = [&](double beta) {
    config_.grpo.beta = beta;
    return make_step(rewards,
                     {.reference = beta > 0 ? &reference : nullptr, .learning_rate = 1e-2});
  };
  const GrpoStepResult plain = step_with(0), penalized = step_with(0.3);
  const std::vector<Group>& groups = plain.rollouts.groups;
  std::vector<double> expected = numbers_of(groups, &ScoredCompletion::reward);
  EXPECT_EQ(numbers_of(penalized.rollouts.groups, &ScoredCompletion::reward), expected);
  for (size_t i = 0; i < expected.size(); ++i) {
    const ScoredCompletion& c = *completions_of(groups)[i];
    const TokenSequence sequence{.tokens = c.tokens, .loss_mask = c.loss_mask};
    const PackedBatch batch = pack({&sequence, 1});
    const auto ref = policy_log_probs(reference, batch, config_.sampling.temperature)
                         .logprob.value()
                         .to_vector<double>();
    double kl = -std::accumulate(ref.begin(), ref.end(), 0.0);
    for (size_t t = 0; t < c.tokens.size(); ++t) kl += c.loss_mask[t] ? c.logprobs[t] : 0;
    expected[i] -= 0.3 * kl;
  }
  const std::vector<double> advantages = group_advantages(expected, config_.batch.num_generations,
                                                          config_.grpo.scale_rewards),
                            found =
                                numbers_of(penalized.rollouts.groups, &ScoredCompletion::advantage);
  for (size_t i = 0; i < advantages.size(); ++i) EXPECT_NEAR(found[i], advantages[i], 1e-10);
  EXPECT_NE(found, numbers_of(groups, &ScoredCompletion::advantage));
  EXPECT_EQ(penalized.metrics.at("ratio_deviation"), 0);
  EXPECT_GT(penalized.metrics.at("kl"), 0);
}

// GDPO: each reward's advantages are added by weight and standardised over the step, so that a
// reward of a large scale does not drown the other.
TEST_F(GrpoStep, SeveralRewardsMayBeNormalizedBeforeTheirSum) {
  const RewardSet rewards(
      {{.name = "format", .weight = 0.5, .pattern = ".*1.*"}, {.name = "length", .weight = 100}},
      data_.task);
  config_.grpo.multi_objective_aggregation = RewardAggregation::kNormalizeThenSum;
  const GrpoStepResult result = make_step(rewards);
  std::vector<double> each[2];
  for (const ScoredCompletion* c : completions_of(result.rollouts.groups))
    for (size_t k = 0; k < 2; ++k) each[k].push_back(c->rewards[k]);
  const auto size = config_.batch.num_generations;
  const auto first = group_advantages(each[0], size, AdvantageScale::kGroup),
             second = group_advantages(each[1], size, AdvantageScale::kGroup);
  std::vector<double> sums;
  for (size_t i = 0; i < first.size(); ++i) sums.push_back(0.5 * first[i] + 100 * second[i]);
  const double n = static_cast<double>(sums.size()),
               mean = std::accumulate(sums.begin(), sums.end(), 0.0) / n, std = reward_std(sums);
  ASSERT_GT(std, 0);
  const auto advantages = numbers_of(result.rollouts.groups, &ScoredCompletion::advantage);
  for (size_t i = 0; i < sums.size(); ++i)
    EXPECT_NEAR(advantages[i], (sums[i] - mean) / (std + 1e-4), 1e-12) << i;
}

// Groups without a signal get the next prompts of the data, up to dynamic_sampling_rounds times;
// the others and their positions stay.
TEST_F(GrpoStep, GroupsWithoutASignalAreReplaced) {
  const RewardSet rewards({{.name = "format", .pattern = ".*1.*"}}, data_.task);
  const Example other = data_.train->get(3);
  std::vector<int64_t> asked;
  const auto step_with = [&](int64_t rounds) {
    config_.grpo.dynamic_sampling_rounds = rounds;
    asked.clear();
    return make_step(rewards, {.refill = [&](int64_t count, std::span<const int64_t> positions) {
                       EXPECT_EQ(count, std::ssize(positions));
                       asked.push_back(count);
                       return std::vector<Example>(positions.size(), other);
                     }});
  };
  const GrpoStepResult plain = step_with(0), refilled = step_with(4);
  EXPECT_FALSE(asked.empty());
  int64_t drawn = config_.batch.prompts_per_step, replaced = 0;
  for (const int64_t count : asked) drawn += count;
  EXPECT_EQ(refilled.metrics.at("rollout/prompts"), static_cast<double>(drawn));
  EXPECT_EQ(refilled.metrics.at("rollout/rounds"), static_cast<double>(1 + asked.size()));
  EXPECT_EQ(std::ssize(refilled.outcomes), drawn);
  for (size_t g = 0; g < 4; ++g) {
    const Group &before = plain.rollouts.groups[g], &after = refilled.rollouts.groups[g];
    const bool signal =
        std::ranges::any_of(before.completions, [](const auto& c) { return c.advantage != 0; });
    EXPECT_EQ(after.index, before.index);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(after.completions[i].index, before.completions[i].index);
      EXPECT_EQ(after.completions[i].group, before.completions[i].group);
      if (signal) {
        EXPECT_EQ(after.completions[i].tokens, before.completions[i].tokens);
      }
    }
    replaced += !signal;
    EXPECT_EQ(after.example.prompt, signal ? before.example.prompt : other.prompt);
  }
  EXPECT_EQ(asked[0], replaced);
  EXPECT_LE(refilled.metrics.at("frac_reward_zero_std"), plain.metrics.at("frac_reward_zero_std"));
  EXPECT_EQ(refilled.metrics.at("ratio_deviation"), 0);
}

TEST_F(GrpoStep, AdvantagesAreShuffledOverAllRanks) {
  std::vector<double> all(12);
  std::iota(all.begin(), all.end(), 1);
  std::vector<double> shuffled = all, again = all, next = all;
  shuffle_advantages(shuffled, 3, 5);
  shuffle_advantages(again, 3, 5);
  shuffle_advantages(next, 3, 6);
  EXPECT_EQ(again, shuffled);
  EXPECT_NE(shuffled, all);
  EXPECT_NE(next, shuffled);
  std::ranges::sort(shuffled);
  EXPECT_EQ(shuffled, all);
  // The update has the same advantages for any number of ranks; the log has those before.
  const RewardSet rewards({{.name = "length"}}, data_.task);
  const auto step_on = [&](int ranks) {
    Metrics metrics;
    run_local_ranks(ranks, [&](Communicator& comm) {
      const GrpoStepResult result = make_step(comm, *make_learner(comm), rewards, {});
      for (const Group& group : result.rollouts.groups) {
        std::vector<double> lengths;
        for (const ScoredCompletion& c : group.completions) lengths.push_back(c.reward);
        const std::vector<Group> one = {group};
        EXPECT_EQ(numbers_of(one, &ScoredCompletion::advantage),
                  group_advantages(lengths, 3, config_.grpo.scale_rewards));
      }
      if (comm.rank() == 0) metrics = result.metrics;
    });
    return metrics.at("grad_norm");
  };
  const double plain = step_on(1);
  config_.grpo.shuffle_advantages = true;
  const double one = step_on(1);
  EXPECT_GT(std::abs(one / plain - 1), 1e-3);
  for (const int ranks : {2, 3}) EXPECT_NEAR(step_on(ranks) / one, 1, 1e-12);
}

}  // namespace
}  // namespace cohort::test
