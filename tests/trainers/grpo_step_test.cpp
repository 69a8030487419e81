// The parts of a GRPO step: who samples what, what is packed, and the updates.
#include "trainers/grpo_step.h"

#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>

#include "tests/trainers/small_runs.h"

namespace cohort::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// The prompts of each rank in one step.
std::vector<std::vector<int64_t>> prompts_of_ranks(const TrainConfig& config, int ranks,
                                                   int64_t step) {
  std::vector<std::vector<int64_t>> indices(static_cast<size_t>(ranks));
  run_local_ranks(ranks, [&](Communicator& comm) {
    indices[static_cast<size_t>(comm.rank())] = share_prompts(comm, config, step).indices;
  });
  return indices;
}

TEST(GrpoShares, EveryPromptHasOneRank) {
  TrainConfig config;
  for (const int64_t prompts : {1, 4, 13, 32})
    for (const int64_t minibatches : {1, 3, 8})
      for (const int64_t step : {0, 1, 7}) {
        if (minibatches > prompts) continue;
        config.prompts_per_step = prompts;
        config.grpo.num_minibatches = minibatches;
        std::vector<int64_t> all;
        for (const auto& mine : prompts_of_ranks(config, 3, step))
          all.insert(all.end(), mine.begin(), mine.end());
        std::sort(all.begin(), all.end());
        std::vector<int64_t> expected(static_cast<size_t>(prompts));
        std::iota(expected.begin(), expected.end(), 0);
        EXPECT_EQ(all, expected);
      }
}

// 32 prompts in 8 minibatches on 8 ranks: each works in half of the minibatches of every step.
TEST(GrpoShares, MinibatchesWithFewPromptsGoRoundTheRanks) {
  TrainConfig config;
  config.prompts_per_step = 32;
  config.grpo.num_minibatches = 8;
  for (const int64_t step : {0, 1, 2})
    for (const auto& mine : prompts_of_ranks(config, 8, step)) EXPECT_EQ(mine.size(), 4u);
  config.prompts_per_step = 3;
  config.grpo.num_minibatches = 1;
  std::vector<size_t> worked(8);
  for (int64_t step = 0; step < 8; ++step) {
    const auto ranks = prompts_of_ranks(config, 8, step);
    for (size_t r = 0; r < 8; ++r) worked[r] += ranks[r].size();
  }
  EXPECT_EQ(worked, std::vector<size_t>(8, 3));
}

// A policy that has sampled: two prompts' completions of the addition task, with advantages.
class GrpoStep : public testing::Test {
 protected:
  GrpoStep() {
    const RunPlan plan =
        small_plan(dir_, "run", std::string(kSmallModel) + kSmallData + kSmallGrpo,
                   {"num_minibatches=2", "dtype=f64", "prompts_per_step=4", "num_generations=3"});
    config_ = plan.stages[0];
    data_ = load_dataset(config_, nullptr);
    config_.model.vocab_size = data_.tokenizer->vocab_size();
    config_.model.resolve();
  }

  std::unique_ptr<Learner> learner(Communicator& comm) const {
    return std::make_unique<Learner>(std::make_unique<Transformer>(config_.model, config_.dtype, 1),
                                     config_.optimizer, comm);
  }

  ScoredRollouts sampled(const Transformer& model, const PromptShare& share) const {
    ScoredRollouts out;
    Engine engine(model, {});
    out.trajectories = Sampler(engine, *data_.tokenizer, config_.sampling)
                           .sample(prompts(share), config_.num_generations,
                                   {.seed = 1, .step = 0, .prompt_indices = share.indices});
    for (const Trajectory& t : out.trajectories) {
      const auto index = static_cast<double>(t.index);
      out.scores.total.push_back(index);
      out.advantages.push_back(std::sin(index + 1));
    }
    return out;
  }
  std::vector<Example> prompts(const PromptShare& share) const {
    std::vector<Example> out;
    for (const int64_t i : share.indices) out.push_back(data_.train->get(i));
    return out;
  }

  struct Trained {
    std::vector<Tensor> weights;
    Metrics metrics;
  };
  // One step on some ranks. `change` may edit what rank 0 has sampled.
  Trained train(int ranks, const std::function<void(ScoredRollouts&)>& change) const {
    Trained out;
    run_local_ranks(ranks, [&](Communicator& comm) {
      const auto mine = learner(comm);
      const PromptShare share = share_prompts(comm, config_, 0);
      ScoredRollouts scored = sampled(mine->model(), share);
      if (comm.rank() == 0) change(scored);
      auto minibatches =
          pack_minibatches(comm, mine->model(), scored, scored.advantages, share, config_);
      const UpdateSums updates = update_policy(comm, *mine, minibatches, config_, 1e-2);
      const Metrics summary = grpo_metrics(scored, {}, updates, config_, 1e-2).reduce(comm);
      if (comm.rank() != 0) return;
      out.metrics = summary;
      for (const NamedParameter& p : mine->model().parameters())
        out.weights.push_back(p.value.clone());
    });
    return out;
  }

  TempDir dir_;
  TrainConfig config_;
  Dataset data_;
};

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
    const auto mine = learner(*comm);
    Engine engine(mine->model(), {});
    const Sampler sampler(engine, *data_.tokenizer, config_.sampling);
    for (int64_t step = 0; step < 2; ++step) {
      const PromptShare share = share_prompts(*comm, config_, step);
      const std::vector<Example> problems = prompts(share);
      const GrpoStepResult result = grpo_step({.comm = *comm,
                                               .config = config_,
                                               .sampler = sampler,
                                               .rewards = rewards,
                                               .learner = *mine,
                                               .reference = nullptr,
                                               .prompts = problems,
                                               .share = share,
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
      EXPECT_EQ(mine->optimizer().updates(), 2 * (step + 1));
    }
    for (const NamedParameter& p : mine->model().parameters())
      weights[again].push_back(p.value.clone());
  }
  expect_same_weights(weights[0], weights[1]);
}

// With a reference that is the policy itself the KL is 0, and so is the gradient where all rewards
// are equal; a reward that applies to nothing leaves the weights alone, too.
TEST_F(GrpoStep, TakesAReferenceAndNeedsAReward) {
  config_.grpo.beta = 0.1;
  const auto comm = make_single_communicator();
  const auto mine = learner(*comm);
  const Transformer reference(config_.model, config_.dtype, 1);
  Engine engine(mine->model(), {});
  const Sampler sampler(engine, *data_.tokenizer, config_.sampling);
  const PromptShare share = share_prompts(*comm, config_, 0);
  const std::vector<Example> problems = prompts(share);
  const auto step_with = [&](const RewardSet& rewards) {
    return grpo_step({*comm, config_, sampler, rewards, *mine, &reference, problems, share, 0, 0});
  };
  const GrpoStepResult result = step_with(RewardSet({{.name = "task"}}, data_.task));
  EXPECT_EQ(result.metrics.at("kl"), 0);
  EXPECT_EQ(result.metrics.at("grad_norm"), 0);
  EXPECT_EQ(result.metrics.at("num_updates"), 0);
  EXPECT_EQ(mine->optimizer().updates(), 0);
  const GrpoStepResult none = step_with(RewardSet({{.name = "countdown"}}, nullptr));
  EXPECT_EQ(none.rewarded_count, 0);
  EXPECT_TRUE(std::isnan(none.metrics.at("reward")));
  EXPECT_TRUE(std::isnan(none.metrics.at("loss")));
  EXPECT_EQ(mine->optimizer().updates(), 0);
}

// A record that is not the trainer's log-prob is found before AdamW and mended: the step ends with
// the weights that the right record gives.
TEST_F(GrpoStep, AWrongRecordedLogProbIsMendedBeforeTheUpdate) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    const Trained right = train(ranks, [](ScoredRollouts&) {});
    EXPECT_EQ(right.metrics.at("ratio_deviation"), 0);
    const ExpectLog warning("max |ratio - 1| = 0.1");
    const Trained mended = train(ranks, [](ScoredRollouts& scored) {
      Trajectory& t = scored.trajectories[0];
      t.logprobs[static_cast<size_t>(t.prompt_length)] -= std::log(1.125);
    });
    EXPECT_NEAR(mended.metrics.at("ratio_deviation"), 0.125, 1e-9);
    expect_same_weights(mended.weights, right.weights);
    for (const char* name : {"loss", "grad_norm", "kl_old", "clip_ratio/high"})
      EXPECT_EQ(mended.metrics.at(name), right.metrics.at(name)) << name;
  }
}

// The second minibatch is updated with other weights than those that sampled, so only a check
// before the first update can see that a record of it is wrong.
TEST_F(GrpoStep, EveryMinibatchIsCheckedNowAndThen) {
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
    const auto mine = learner(*comm);
    const PromptShare share = share_prompts(*comm, config_, 0);
    ScoredRollouts scored = sampled(mine->model(), share);
    auto minibatches =
        pack_minibatches(*comm, mine->model(), scored, scored.advantages, share, config_);
    Tensor old = minibatches.back().back().columns.at("old_logprob");
    old.fill_(-1);
    std::optional<ExpectLog> warning;
    if (step % 20 == 0) warning.emplace("the sampler's log-probs differ from the trainer's");
    EXPECT_EQ(update_policy(*comm, *mine, minibatches, config_, 1e-2, step).ratio_deviation > 0,
              step % 20 == 0);
  }
}

// With its truncated completions masked, a group has a signal only if the others have one.
TEST_F(GrpoStep, GroupsAreSilentByTheTokensThatCount) {
  const auto comm = make_single_communicator();
  const auto mine = learner(*comm);
  const PromptShare share = share_prompts(*comm, config_, 0);
  ScoredRollouts scored = sampled(mine->model(), share);
  for (Trajectory& c : scored.trajectories) c.stop_reason = StopReason::kLength;
  for (size_t i = 0; i < 3; ++i) scored.trajectories[i].stop_reason = StopReason::kContext;
  scored.trajectories.back().stop_reason = StopReason::kStopToken;
  const auto metrics = [&] { return grpo_metrics(scored, {}, {}, config_, 0).reduce(*comm); };
  EXPECT_EQ(metrics().at("frac_reward_zero_std"), 0);
  config_.grpo.mask_truncated_completions = true;
  EXPECT_EQ(metrics().at("frac_reward_zero_std"), 0.75);
  // Completions that end where the context is full are counted apart.
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

TEST_F(GrpoStep, AnUpdateWithoutATokenInTheMaskIsNotMade) {
  const auto comm = make_single_communicator();
  const auto mine = learner(*comm);
  const PromptShare share = share_prompts(*comm, config_, 0);
  ScoredRollouts scored = sampled(mine->model(), share);
  const auto count = [&] {
    return pack_minibatches(*comm, mine->model(), scored, scored.advantages, share, config_).size();
  };
  EXPECT_EQ(count(), 2u);
  // Zero advantages are no reason here: the learner sees their gradient.
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

// One rank without a token in its mask, the other with some: both make the update.
TEST_F(GrpoStep, AnUpdateIsMadeIfAnyRankHasATokenInTheMask) {
  config_.grpo.mask_truncated_completions = true;
  run_local_ranks(2, [&](Communicator& comm) {
    const auto mine = learner(comm);
    const PromptShare share = share_prompts(comm, config_, 0);
    ScoredRollouts scored = sampled(mine->model(), share);
    for (Trajectory& c : scored.trajectories) set_truncated(c, comm.rank() == 0);
    auto minibatches =
        pack_minibatches(comm, mine->model(), scored, scored.advantages, share, config_);
    EXPECT_EQ(minibatches.size(), 2u);
    update_policy(comm, *mine, minibatches, config_, 1e-2);
    EXPECT_EQ(mine->optimizer().updates(), 2);
  });
}

TEST_F(GrpoStep, ShuffledAdvantagesAreDealtOverAllRanks) {
  std::vector<std::vector<double>> dealt_by;
  for (const int ranks : {1, 2, 3}) {
    std::vector<double> dealt(12, kNaN);
    run_local_ranks(ranks, [&](Communicator& comm) {
      const PromptShare share = share_prompts(comm, config_, 0);
      std::vector<double> mine;
      for (const int64_t n : share.indices)
        for (int64_t g = 0; g < 3; ++g) mine.push_back(static_cast<double>(3 * n + g) + 1);
      const auto got = shuffled_advantages(comm, mine, share, config_, 5);
      for (size_t i = 0; i < got.size(); ++i)
        dealt[static_cast<size_t>(share.indices[i / 3]) * 3 + i % 3] = got[i];
    });
    dealt_by.push_back(dealt);
  }
  EXPECT_EQ(dealt_by[1], dealt_by[0]);
  EXPECT_EQ(dealt_by[2], dealt_by[0]);
  std::vector<double> sorted = dealt_by[0], all(12);
  std::iota(all.begin(), all.end(), 1);
  EXPECT_NE(sorted, all);
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, all);
}

// What no token was measured on is null in the log, not 0.
TEST_F(GrpoStep, WhatWasNotMeasuredIsNotANumber) {
  const Trained silent = train(1, [](ScoredRollouts& scored) {
    scored.advantages.assign(scored.advantages.size(), 0);
    for (Trajectory& c : scored.trajectories) c.entropy = 2.0 * c.completion_length();
  });
  EXPECT_TRUE(std::isnan(silent.metrics.at("kl_old")));
  EXPECT_TRUE(std::isnan(silent.metrics.at("kl")));
  EXPECT_EQ(silent.metrics.at("clip_ratio/low"), 0);
  EXPECT_EQ(silent.metrics.at("entropy"), 2);
  EXPECT_EQ(silent.metrics.at("frac_reward_zero_std"), 1);
  EXPECT_EQ(silent.metrics.at("loss"), 0);

  const Trained nothing = train(1, [](ScoredRollouts& scored) {
    scored.scores.total.assign(scored.scores.total.size(), kNaN);
    scored.advantages.assign(scored.advantages.size(), 0);
  });
  for (const char* name : {"reward", "reward_std", "frac_reward_zero_std", "clip_ratio/low",
                           "clip_ratio/high", "kl_old", "entropy", "loss", "grad_norm"})
    EXPECT_TRUE(std::isnan(nothing.metrics.at(name))) << name;
}

// A group without any reward is no group without a signal: it counts nowhere.
TEST_F(GrpoStep, GroupsWithoutARewardCountNowhere) {
  const Trained trained = train(1, [](ScoredRollouts& scored) {
    for (size_t i = 0; i < 3; ++i) scored.scores.total[i] = kNaN;
    for (size_t i = 0; i < 6; ++i) scored.advantages[i] = 0;
  });
  EXPECT_EQ(trained.metrics.at("frac_reward_zero_std"), 1.0 / 3);
  EXPECT_EQ(trained.metrics.at("reward"), 7);  // of 3 to 11
}

// Entropy, clip shares and cut are means over the loss mask, whatever the advantages.
TEST_F(GrpoStep, MeansAreOverTheTokensOfTheLossMask) {
  config_.grpo.mask_truncated_completions = true;
  config_.sampling.top_k = 3;
  double tokens = 0, entropy = 0, cut = 0;
  const Trained trained = train(1, [&](ScoredRollouts& scored) {
    for (size_t i = 0; i < 12; ++i) {
      Trajectory& c = scored.trajectories[i];
      set_truncated(c, i % 4 == 1);
      c.entropy = static_cast<double>(i);
      c.cut = 0.25 * static_cast<double>(i);
      if (i == 3) scored.scores.total[i] = kNaN;
      if (i == 4) scored.advantages[i] = 0;
      if (c.truncated() || i == 3) continue;
      tokens += static_cast<double>(c.completion_length());
      entropy += c.entropy;
      cut += c.cut;
    }
  });
  EXPECT_NEAR(trained.metrics.at("entropy"), entropy / tokens, 1e-12);
  EXPECT_NEAR(trained.metrics.at("cut_probability"), cut / tokens, 1e-12);
}

}  // namespace
}  // namespace cohort::test
