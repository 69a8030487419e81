// The parts of a GRPO step: the shards of its prompts, packing, and the updates.
#include "trainers/grpo_step.h"

#include <cmath>
#include <limits>
#include <numeric>

#include "tests/job/grpo_step_fixture.h"

namespace cohort::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

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

void expect_same_weights(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(bit_equal(a[i], b[i])) << i;
}

// The whole step, without a run around it.
TEST_F(GrpoStep, IsAFunctionOfItsInputs) {
  const RewardSet rewards({{.name = "format", .pattern = ".*1.*"}, {.name = "task"}}, data_.task);
  std::vector<Tensor> weights[2];
  for (const bool again : {false, true}) {
    const auto comm = make_single_communicator();
    const auto learner = make_learner(*comm);
    Engine engine(learner->model(), {});
    const Sampler sampler(engine, *data_.tokenizer, config_.sampling);
    for (int64_t step = 0; step < 2; ++step) {
      const std::vector<int64_t> shard = shard_prompts(*comm, config_, step);
      const std::vector<Example> problems = prompts(shard);
      const GrpoStepResult result = grpo_step({.comm = *comm,
                                               .config = config_,
                                               .sampler = sampler,
                                               .rewards = rewards,
                                               .learner = *learner,
                                               .reference = {},
                                               .prompts = problems,
                                               .indices = shard,
                                               .step = step,
                                               .learning_rate = 1e-2});
      EXPECT_EQ(result.rewarded_count, 12);
      ASSERT_EQ(result.rollouts.trajectories.size(), 12u);
      ASSERT_EQ(result.rollouts.scores.total.size(), 12u);
      EXPECT_EQ(result.rollouts.advantages,
                group_advantages(result.rollouts.scores.total, 3, config_.grpo.scale_rewards));
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
      Engine engine(learner->model(), {});
      const Sampler sampler(engine, *data_.tokenizer, config_.sampling);
      for (int64_t step = 0; step < 2; ++step) {
        const std::vector<int64_t> shard = shard_prompts(*comm, config_, step);
        const std::vector<Example> problems = prompts(shard);
        const GrpoStepResult result = grpo_step(
            {*comm, config_, sampler, rewards, *learner, {}, problems, shard, {}, step, 1e-2});
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
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  Engine engine(learner->model(), {});
  const Sampler sampler(engine, *data_.tokenizer, config_.sampling);
  const std::vector<int64_t> shard = shard_prompts(*comm, config_, 0);
  const GrpoStepResult result = grpo_step({.comm = *comm,
                                           .config = config_,
                                           .sampler = sampler,
                                           .rewards = rewards,
                                           .learner = *learner,
                                           .reference = {},
                                           .prompts = prompts(shard),
                                           .indices = shard,
                                           .step = 0,
                                           .learning_rate = 1e-2});
  const ScoredRollouts& rollouts = result.rollouts;
  for (size_t i = 0; i < rollouts.trajectories.size(); ++i) {
    const Trajectory& t = rollouts.trajectories[i];
    const double fraction = static_cast<double>(t.completion_length()) / static_cast<double>(limit);
    EXPECT_EQ(t.max_tokens, limit);
    EXPECT_EQ(rollouts.scores.each[1][i], -fraction) << i;
    EXPECT_EQ(rollouts.scores.each[2][i], -fraction) << i;
    EXPECT_EQ(rollouts.scores.total[i], -2 * fraction) << i;
    const double cosine = rollouts.scores.each[3][i];
    EXPECT_EQ(rollouts.scores.each[0][i] >= 1, cosine > 0) << i;
    EXPECT_NEAR(std::abs(cosine), 0.5 + (1 + std::cos(std::acos(-1) * fraction)) / 4, 1e-12) << i;
  }
}

// With a reference that equals the policy the KL is 0, and so is the gradient if all rewards are
// equal. A reward that applies to no completion does not change the weights either.
TEST_F(GrpoStep, TakesAReferenceAndNeedsAReward) {
  config_.grpo.beta = 0.1;
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  const Transformer reference(config_.model, config_.dtype, 1);
  Engine engine(learner->model(), {});
  const Sampler sampler(engine, *data_.tokenizer, config_.sampling);
  const std::vector<int64_t> shard = shard_prompts(*comm, config_, 0);
  const std::vector<Example> problems = prompts(shard);
  const auto step_with = [&](const RewardSet& rewards) {
    return grpo_step(
        {*comm, config_, sampler, rewards, *learner, {&reference}, problems, shard, {}, 0, 0});
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
  const auto comm = make_single_communicator();
  const Transformer reference(config_.model, config_.dtype, 2);
  const std::vector<int64_t> shard = shard_prompts(*comm, config_, 0);
  const std::vector<Example> problems = prompts(shard);
  const RewardSet rewards({{.name = "format", .pattern = ".*1.*"}}, data_.task);
  config_.grpo.kl_in = KlPlace::kReward;
  config_.grpo.kl_estimator = kernels::KlEstimator::kK1;
  const auto step_with = [&](double beta) {
    config_.grpo.beta = beta;
    const auto learner = make_learner(*comm);
    Engine engine(learner->model(), {});
    const Sampler sampler(engine, *data_.tokenizer, config_.sampling);
    return grpo_step({*comm,
                      config_,
                      sampler,
                      rewards,
                      *learner,
                      {beta > 0 ? &reference : nullptr},
                      problems,
                      shard,
                      {},
                      0,
                      1e-2});
  };
  const GrpoStepResult plain = step_with(0), penalized = step_with(0.3);
  std::vector<double> expected = plain.rollouts.scores.total;
  EXPECT_EQ(penalized.rollouts.scores.total, expected);
  for (size_t i = 0; i < expected.size(); ++i) {
    const Trajectory& c = plain.rollouts.trajectories[i];
    const TokenSequence sequence{.tokens = c.tokens, .loss_mask = c.loss_mask};
    const PackedBatch batch = pack({&sequence, 1});
    const auto ref = policy_log_probs(reference, batch, config_.sampling.temperature)
                         .logprob.value()
                         .to_vector<double>();
    double kl = -std::accumulate(ref.begin(), ref.end(), 0.0);
    for (size_t t = 0; t < c.tokens.size(); ++t) kl += c.loss_mask[t] ? c.logprobs[t] : 0;
    expected[i] -= 0.3 * kl;
  }
  const std::vector<double> advantages =
      group_advantages(expected, config_.batch.num_generations, config_.grpo.scale_rewards);
  for (size_t i = 0; i < advantages.size(); ++i)
    EXPECT_NEAR(penalized.rollouts.advantages[i], advantages[i], 1e-10);
  EXPECT_NE(penalized.rollouts.advantages, plain.rollouts.advantages);
  EXPECT_EQ(penalized.metrics.at("ratio_deviation"), 0);
  EXPECT_GT(penalized.metrics.at("kl"), 0);
}

// GDPO: each reward's advantages are added by weight and standardised over the step, so that a
// reward of a large scale does not drown the other.
TEST_F(GrpoStep, SeveralRewardsMayBeNormalizedBeforeTheirSum) {
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  Engine engine(learner->model(), {});
  const Sampler sampler(engine, *data_.tokenizer, config_.sampling);
  const std::vector<int64_t> shard = shard_prompts(*comm, config_, 0);
  const std::vector<Example> problems = prompts(shard);
  const RewardSet rewards(
      {{.name = "format", .weight = 0.5, .pattern = ".*1.*"}, {.name = "length", .weight = 100}},
      data_.task);
  config_.grpo.multi_objective_aggregation = RewardAggregation::kNormalizeThenSum;
  const GrpoStepResult result =
      grpo_step({*comm, config_, sampler, rewards, *learner, {}, problems, shard, {}, 0, 0});
  const auto size = config_.batch.num_generations;
  const auto first = group_advantages(result.rollouts.scores.each[0], size, AdvantageScale::kGroup),
             second =
                 group_advantages(result.rollouts.scores.each[1], size, AdvantageScale::kGroup);
  std::vector<double> sums;
  for (size_t i = 0; i < first.size(); ++i) sums.push_back(0.5 * first[i] + 100 * second[i]);
  const double n = static_cast<double>(sums.size()),
               mean = std::accumulate(sums.begin(), sums.end(), 0.0) / n, std = reward_std(sums);
  ASSERT_GT(std, 0);
  for (size_t i = 0; i < sums.size(); ++i)
    EXPECT_NEAR(result.rollouts.advantages[i], (sums[i] - mean) / (std + 1e-4), 1e-12) << i;
}

// The surrogate is that of the step's tokens of the highest entropy; the others have an advantage
// of 0 in the micro batches.
TEST_F(GrpoStep, OnlyTokensOfHighEntropyHaveASurrogate) {
  config_.grpo.top_entropy_quantile = 0.25;
  config_.grpo.beta = 0.1;  // keeps all sequences
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  const ScoredRollouts scored = sampled(learner->model(), shard_prompts(*comm, config_, 0));
  std::vector<double> entropies;
  for (const Trajectory& c : scored.trajectories)
    for (size_t t = 0; t < c.tokens.size(); ++t)
      if (c.loss_mask[t]) entropies.push_back(c.entropies[t]);
  const double threshold = quantile(entropies, 0.75);
  double kept = 0;
  size_t at = 0;
  for (const PolicyUpdate& update :
       pack_minibatches(*comm, *learner, scored, scored.advantages, config_))
    for (const PolicyBatch& batch : update.batches)
      for (const double a : batch.advantage.to_vector<double>()) {
        EXPECT_EQ(a != 0, entropies[at] >= threshold) << at;
        kept += a != 0;
        ++at;
      }
  EXPECT_EQ(at, entropies.size());
  EXPECT_NEAR(kept / static_cast<double>(at), 0.25, 1.5 / static_cast<double>(at));
}

// With top-k the sampler draws from a renormalised distribution; the weights are the probability
// that it keeps, and at most 1.
TEST_F(GrpoStep, ImportanceWeightsFollowTheDistributionSampledFrom) {
  config_.sampling.top_k = 3;
  config_.grpo.importance_weights = kernels::Importance::kTruncate;
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  const std::vector<int64_t> shard = shard_prompts(*comm, config_, 0);
  const ScoredRollouts scored = sampled(learner->model(), shard);
  double tokens = 0, mass = 0;
  for (const Trajectory& c : scored.trajectories) {
    tokens += static_cast<double>(c.completion_length());
    mass += c.truncated_mass;
  }
  auto minibatches = pack_minibatches(*comm, *learner, scored, scored.advantages, config_);
  const UpdateSums updates = update_policy(*comm, *learner, minibatches, config_, 0);
  const Metrics metrics = grpo_metrics(scored, {}, updates, config_, 0).reduce(*comm);
  EXPECT_NEAR(metrics.at("importance_weight"), 1 - mass / tokens, 1e-12);
  EXPECT_GT(mass, 0);
  EXPECT_EQ(metrics.at("ratio_deviation"), 0);
}

// Groups without a signal get the next prompts of the data, up to refill_rounds times; the others
// and their places stay.
TEST_F(GrpoStep, GroupsWithoutASignalAreReplaced) {
  const auto comm = make_single_communicator();
  const std::vector<int64_t> shard = shard_prompts(*comm, config_, 0);
  const std::vector<Example> problems = prompts(shard);
  const RewardSet rewards({{.name = "format", .pattern = ".*1.*"}}, data_.task);
  std::vector<int64_t> asked;
  const auto step_with = [&](int64_t rounds) {
    config_.grpo.refill_rounds = rounds;
    const auto learner = make_learner(*comm);
    Engine engine(learner->model(), {});
    const Sampler sampler(engine, *data_.tokenizer, config_.sampling);
    asked.clear();
    return grpo_step({.comm = *comm,
                      .config = config_,
                      .sampler = sampler,
                      .rewards = rewards,
                      .learner = *learner,
                      .reference = {},
                      .prompts = problems,
                      .indices = shard,
                      .more_prompts =
                          [&](int64_t count, std::span<const int64_t> positions) {
                            EXPECT_EQ(count, static_cast<int64_t>(positions.size()));
                            asked.push_back(count);
                            return std::vector<Example>(static_cast<size_t>(count),
                                                        problems.back());
                          },
                      .step = 0,
                      .learning_rate = 0});
  };
  const GrpoStepResult plain = step_with(0), refilled = step_with(4);
  EXPECT_FALSE(asked.empty());
  const auto size = static_cast<size_t>(config_.batch.num_generations);
  int64_t drawn = config_.batch.prompts_per_step, replaced = 0;
  for (const int64_t count : asked) drawn += count;
  EXPECT_EQ(refilled.metrics.at("rollout/prompts"), static_cast<double>(drawn));
  EXPECT_EQ(refilled.metrics.at("rollout/rounds"), static_cast<double>(1 + asked.size()));
  for (size_t i = 0; i < plain.rollouts.trajectories.size(); ++i) {
    const Trajectory &before = plain.rollouts.trajectories[i],
                     &after = refilled.rollouts.trajectories[i];
    EXPECT_EQ(after.index, before.index);
    EXPECT_EQ(after.group, before.group);
    const auto group = i / size * size;
    bool signal = false;
    for (size_t g = group; g < group + size; ++g) signal |= plain.rollouts.advantages[g] != 0;
    if (signal) {
      EXPECT_EQ(after.tokens, before.tokens);
    } else if (i == group) {
      ++replaced;
      EXPECT_EQ(refilled.prompts[i / size].prompt, problems.back().prompt);
    }
  }
  EXPECT_EQ(asked[0], replaced);
  EXPECT_LE(refilled.metrics.at("frac_reward_zero_std"), plain.metrics.at("frac_reward_zero_std"));
  EXPECT_EQ(refilled.metrics.at("ratio_deviation"), 0);
}

// A recorded log-prob that differs from the trainer's is detected and corrected before AdamW: the
// step ends with the same weights as with the right record.
TEST_F(GrpoStep, AWrongRecordedLogProbIsCorrectedBeforeTheUpdate) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    const Trained right = train(ranks, [](ScoredRollouts&) {});
    EXPECT_EQ(right.metrics.at("ratio_deviation"), 0);
    const ExpectLog warning("max |ratio - 1| = 0.1");
    const Trained corrected = train(ranks, [](ScoredRollouts& scored) {
      Trajectory& t = scored.trajectories[0];
      t.logprobs[static_cast<size_t>(t.prompt_length)] -= std::log(1.125);
    });
    EXPECT_NEAR(corrected.metrics.at("ratio_deviation"), 0.125, 1e-9);
    expect_same_weights(corrected.weights, right.weights);
    for (const char* name : {"loss", "grad_norm", "kl_old", "clip_ratio/high"})
      EXPECT_EQ(corrected.metrics.at(name), right.metrics.at(name)) << name;
  }
}

// The second minibatch is updated with other weights than those that sampled, so only a check
// before the first update can detect a wrong record in it.
TEST_F(GrpoStep, EveryMinibatchIsCheckedPeriodically) {
  const auto damage_last = [](ScoredRollouts& scored) {
    Trajectory& t = scored.trajectories.back();
    t.logprobs.back() += std::log(1.25);
  };
  const Trained right = train(1, [](ScoredRollouts&) {});
  for (const int64_t every : {1, 20}) {
    config_.grpo.ratio_check_every = every;
    const ExpectLog warning("max |ratio - 1| = 0.2");
    const Trained corrected = train(1, damage_last);
    EXPECT_NEAR(corrected.metrics.at("ratio_deviation"), 0.2, 1e-9);
    expect_same_weights(corrected.weights, right.weights);
  }
  config_.grpo.ratio_check_every = 0;
  const Trained wrong = train(1, damage_last);
  EXPECT_EQ(wrong.metrics.at("ratio_deviation"), 0);
  EXPECT_NE(wrong.metrics.at("kl_old"), right.metrics.at("kl_old"));
  // Steps in between are checked on the first minibatch alone.
  config_.grpo.ratio_check_every = 20;
  const auto comm = make_single_communicator();
  for (const int64_t step : {0, 1, 19, 20, 40}) {
    const auto learner = make_learner(*comm);
    const std::vector<int64_t> shard = shard_prompts(*comm, config_, 0);
    ScoredRollouts scored = sampled(learner->model(), shard);
    auto minibatches = pack_minibatches(*comm, *learner, scored, scored.advantages, config_);
    Tensor old = minibatches.back().batches.back().old_logprob;
    old.fill_(-1);
    std::optional<ExpectLog> warning;
    if (step % 20 == 0) warning.emplace("the sampler's log-probs differ from the trainer's");
    EXPECT_EQ(update_policy(*comm, *learner, minibatches, config_, 1e-2, step).ratio_deviation > 0,
              step % 20 == 0);
  }
}

// If truncated completions are masked, only the others decide whether a group has zero variance.
TEST_F(GrpoStep, ZeroVarianceGroupsDependOnUnmaskedTokens) {
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  const std::vector<int64_t> shard = shard_prompts(*comm, config_, 0);
  ScoredRollouts scored = sampled(learner->model(), shard);
  for (Trajectory& c : scored.trajectories) c.stop_reason = StopReason::kLength;
  for (size_t i = 0; i < 3; ++i) scored.trajectories[i].stop_reason = StopReason::kContext;
  scored.trajectories.back().stop_reason = StopReason::kStopToken;
  const auto metrics = [&] { return grpo_metrics(scored, {}, {}, config_, 0).reduce(*comm); };
  EXPECT_EQ(metrics().at("frac_reward_zero_std"), 0);
  config_.grpo.mask_truncated_completions = true;
  EXPECT_EQ(metrics().at("frac_reward_zero_std"), 0.75);
  // Completions that end because the context is full are counted separately.
  EXPECT_EQ(metrics().at("completions/clipped_ratio"), 8.0 / 12);
  EXPECT_EQ(metrics().at("completions/context_ratio"), 3.0 / 12);
  EXPECT_EQ(metrics().at("reward_max"), 11);
  EXPECT_EQ(metrics().at("reward_min"), 0);
  scored.scores.total.assign(12, kNaN);
  EXPECT_TRUE(std::isnan(metrics().at("reward_max")) && std::isnan(metrics().at("reward_min")));
}

void set_truncated(Trajectory& trajectory, bool truncated = true) {
  trajectory.stop_reason = truncated ? StopReason::kLength : StopReason::kStopToken;
}

TEST_F(GrpoStep, AnUpdateWithoutATokenInTheMaskIsSkipped) {
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  const std::vector<int64_t> shard = shard_prompts(*comm, config_, 0);
  ScoredRollouts scored = sampled(learner->model(), shard);
  const auto count = [&] {
    return pack_minibatches(*comm, *learner, scored, scored.advantages, config_).size();
  };
  EXPECT_EQ(count(), 2u);
  // Zero advantages do not skip an update here: the learner sees their gradient.
  scored.advantages.assign(scored.advantages.size(), 0);
  EXPECT_EQ(count(), 2u);
  config_.grpo.mask_truncated_completions = true;
  for (size_t i = 0; i < 12; ++i) set_truncated(scored.trajectories[i], i < 6);
  EXPECT_EQ(count(), 1u);
  for (Trajectory& c : scored.trajectories) set_truncated(c);
  EXPECT_EQ(count(), 0u);
  config_.grpo.mask_truncated_completions = false;
  EXPECT_EQ(count(), 2u);
  scored.scores.total.assign(12, kNaN);
  EXPECT_EQ(count(), 0u);
}

// If only one of two ranks has tokens in its mask, both make the update.
TEST_F(GrpoStep, AnUpdateIsMadeIfAnyRankHasATokenInTheMask) {
  config_.grpo.mask_truncated_completions = true;
  run_local_ranks(2, [&](Communicator& comm) {
    const auto learner = make_learner(comm);
    const std::vector<int64_t> shard = shard_prompts(comm, config_, 0);
    ScoredRollouts scored = sampled(learner->model(), shard);
    for (Trajectory& c : scored.trajectories) set_truncated(c, comm.rank() == 0);
    auto minibatches = pack_minibatches(comm, *learner, scored, scored.advantages, config_);
    EXPECT_EQ(minibatches.size(), 2u);
    update_policy(comm, *learner, minibatches, config_, 1e-2);
    EXPECT_EQ(learner->optimizer().updates(), 2);
  });
}

TEST_F(GrpoStep, AdvantagesAreShuffledOverAllRanks) {
  std::vector<std::vector<double>> results;
  for (const int ranks : {1, 2, 3}) {
    std::vector<double> all_shuffled(12, kNaN);
    run_local_ranks(ranks, [&](Communicator& comm) {
      const std::vector<int64_t> shard = shard_prompts(comm, config_, 0);
      ScoredRollouts rollouts;
      for (const int64_t n : shard)
        for (int64_t g = 0; g < 3; ++g) {
          rollouts.trajectories.push_back({.index = 3 * n + g, .group = n});
          rollouts.advantages.push_back(static_cast<double>(3 * n + g) + 1);
        }
      const auto shuffled = shuffled_advantages(comm, rollouts, config_, 5);
      for (size_t i = 0; i < shuffled.size(); ++i)
        all_shuffled[static_cast<size_t>(shard[i / 3]) * 3 + i % 3] = shuffled[i];
    });
    results.push_back(all_shuffled);
  }
  EXPECT_EQ(results[1], results[0]);
  EXPECT_EQ(results[2], results[0]);
  std::vector<double> sorted = results[0], all(12);
  std::iota(all.begin(), all.end(), 1);
  EXPECT_NE(sorted, all);
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, all);
}

// A metric without any token is NaN, which the log writes as null.
TEST_F(GrpoStep, MetricsWithoutATokenAreNaN) {
  const Trained zero_variance = train(1, [](ScoredRollouts& scored) {
    scored.advantages.assign(scored.advantages.size(), 0);
    for (Trajectory& c : scored.trajectories)
      for (size_t t = 0; t < c.tokens.size(); ++t) c.entropies[t] = c.loss_mask[t] ? 2 : 0;
  });
  EXPECT_TRUE(std::isnan(zero_variance.metrics.at("kl_old")));
  EXPECT_TRUE(std::isnan(zero_variance.metrics.at("kl")));
  EXPECT_EQ(zero_variance.metrics.at("clip_ratio/low"), 0);
  EXPECT_EQ(zero_variance.metrics.at("entropy"), 2);
  EXPECT_EQ(zero_variance.metrics.at("frac_reward_zero_std"), 1);
  EXPECT_TRUE(std::isnan(zero_variance.metrics.at("loss")));

  const Trained nothing = train(1, [](ScoredRollouts& scored) {
    scored.scores.total.assign(scored.scores.total.size(), kNaN);
    scored.advantages.assign(scored.advantages.size(), 0);
  });
  for (const char* name : {"reward", "reward_std", "frac_reward_zero_std", "clip_ratio/low",
                           "clip_ratio/high", "kl_old", "entropy", "loss", "grad_norm"})
    EXPECT_TRUE(std::isnan(nothing.metrics.at(name))) << name;
}

// A second pass measures the same with its loss, before its update: kl_old is 0 in the first.
TEST_F(GrpoStep, TheKlOfAStepIsThatOfAForwardAfterIt) {
  config_.grpo.num_minibatches = 1;
  config_.grpo.num_iterations = 2;
  config_.grpo.kl_check_every = 0;
  const Trained twice = train(1, [](ScoredRollouts&) {});
  EXPECT_TRUE(std::isnan(twice.metrics.at("update/kl")));
  config_.grpo.num_iterations = 1;
  const Trained once = train(1, [](ScoredRollouts&) {});
  for (const int64_t every : {1, 2})
    for (const int ranks : {1, 2}) {
      config_.grpo.kl_check_every = every;
      const Trained measured = train(ranks, [](ScoredRollouts&) {});
      const double kl = measured.metrics.at("update/kl");
      if (every == 2)
        EXPECT_TRUE(std::isnan(kl));
      else
        EXPECT_NEAR(kl / (2 * twice.metrics.at("kl_old")), 1, 1e-9) << ranks;
      if (ranks == 1) expect_same_weights(measured.weights, once.weights);
    }
  const Trained silent = train(
      1, [](ScoredRollouts& scored) { scored.advantages.assign(scored.advantages.size(), 0); });
  EXPECT_TRUE(std::isnan(silent.metrics.at("update/kl")));
}

// A group without any reward is not a zero-variance group: it does not count.
TEST_F(GrpoStep, GroupsWithoutARewardDoNotCount) {
  const Trained trained = train(1, [](ScoredRollouts& scored) {
    for (size_t i = 0; i < 3; ++i) scored.scores.total[i] = kNaN;
    for (size_t i = 0; i < 6; ++i) scored.advantages[i] = 0;
  });
  EXPECT_EQ(trained.metrics.at("frac_reward_zero_std"), 1.0 / 3);
  EXPECT_EQ(trained.metrics.at("reward"), 7);  // mean of the rewards 3 to 11
}

TEST_F(GrpoStep, SolvedAndFailedGroupsHaveEqualRewards) {
  const Trained trained = train(1, [](ScoredRollouts& scored) {
    scored.scores.total = {1, 1, kNaN, 0, 0, 0, 0, 1, 0, -2, -2, -2};
  });
  EXPECT_EQ(trained.metrics.at("frac_groups_solved"), 0.25);
  EXPECT_EQ(trained.metrics.at("frac_groups_failed"), 0.5);
}

TEST_F(GrpoStep, GradientsAboveTheLimitAreCounted) {
  const auto clipped = [&](double limit) {
    config_.optimizer.max_grad_norm = limit;
    return train(1, [](ScoredRollouts&) {}).metrics.at("grad_clipped");
  };
  EXPECT_EQ(clipped(0), 0);
  EXPECT_EQ(clipped(1e-9), 1);
  EXPECT_EQ(clipped(1e9), 0);
}

// Entropy, clip ratios and truncated mass are means over the loss mask, independent of advantages.
TEST_F(GrpoStep, MeansAreOverTheTokensOfTheLossMask) {
  config_.grpo.mask_truncated_completions = true;
  config_.sampling.top_k = 3;
  double tokens = 0, entropy = 0, truncated_mass = 0;
  const Trained trained = train(1, [&](ScoredRollouts& scored) {
    for (size_t i = 0; i < 12; ++i) {
      Trajectory& c = scored.trajectories[i];
      set_truncated(c, i % 4 == 1);
      c.entropies.assign(c.tokens.size(), 0.5 * static_cast<double>(i));
      c.truncated_mass = 0.25 * static_cast<double>(i);
      if (i == 3) scored.scores.total[i] = kNaN;
      if (i == 4) scored.advantages[i] = 0;
      if (c.truncated() || i == 3) continue;
      tokens += static_cast<double>(c.completion_length());
      entropy += c.entropy();
      truncated_mass += c.truncated_mass;
    }
  });
  EXPECT_NEAR(trained.metrics.at("entropy"), entropy / tokens, 1e-12);
  EXPECT_NEAR(trained.metrics.at("cut_probability"), truncated_mass / tokens, 1e-12);
}

}  // namespace
}  // namespace cohort::test
