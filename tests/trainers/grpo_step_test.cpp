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
  std::vector<std::vector<int64_t>> numbers(static_cast<size_t>(ranks));
  run_local_ranks(ranks, [&](Communicator& comm) {
    numbers[static_cast<size_t>(comm.rank())] = share_prompts(comm, config, step).numbers;
  });
  return numbers;
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
    std::vector<Example> prompts;
    for (const int64_t n : share.numbers) prompts.push_back(data_.train->get(n));
    ScoredRollouts out;
    out.rollouts = Sampler(model, *data_.tokenizer, config_.sampling)
                       .sample(prompts, config_.num_generations,
                               {.seed = 1, .step = 0, .prompt_numbers = share.numbers});
    for (size_t i = 0; i < out.rollouts.samples.size(); ++i) {
      const auto number =
          static_cast<double>(share.numbers[i / 3] * 3 + static_cast<int64_t>(i % 3));
      out.scores.total.push_back(number);
      out.advantages.push_back(std::sin(number + 1));
    }
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
        out.weights.push_back(p.variable.value().clone());
    });
    return out;
  }

  static double value(const Metrics& metrics, const std::string& name) {
    for (const auto& [key, v] : metrics)
      if (key == name) return v;
    ADD_FAILURE() << "no metric " << name;
    return kNaN;
  }

  TempDir dir_;
  TrainConfig config_;
  Dataset data_;
};

void expect_same_weights(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(bit_equal(a[i], b[i])) << i;
}

// A record that is not the trainer's log-prob is found before AdamW and mended: the step ends with
// the weights that the right record gives.
TEST_F(GrpoStep, AWrongRecordedLogProbIsMendedBeforeTheUpdate) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    const Trained right = train(ranks, [](ScoredRollouts&) {});
    EXPECT_EQ(value(right.metrics, "ratio_deviation"), 0);
    const ExpectLog warning("max |ratio - 1| = 0.1");
    const Trained mended = train(ranks, [](ScoredRollouts& scored) {
      scored.rollouts.samples[0].logprobs[0] -= std::log(1.125);
    });
    EXPECT_NEAR(value(mended.metrics, "ratio_deviation"), 0.125, 1e-9);
    expect_same_weights(mended.weights, right.weights);
    for (const char* name : {"loss", "grad_norm", "kl_old", "clip_ratio/high"})
      EXPECT_EQ(value(mended.metrics, name), value(right.metrics, name)) << name;
  }
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
  // Zero advantages are no reason: AdamW's momentum goes on, as in TRL.
  scored.advantages.assign(scored.advantages.size(), 0);
  EXPECT_EQ(count(), 2u);
  config_.grpo.mask_truncated_completions = true;
  for (size_t i = 0; i < 12; ++i) set_truncated(scored.rollouts.samples[i], i < 6);
  EXPECT_EQ(count(), 1u);
  for (Trajectory& c : scored.rollouts.samples) set_truncated(c);
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
    for (Trajectory& c : scored.rollouts.samples) set_truncated(c, comm.rank() == 0);
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
      for (const int64_t n : share.numbers)
        for (int64_t g = 0; g < 3; ++g) mine.push_back(static_cast<double>(3 * n + g) + 1);
      const auto got = shuffled_advantages(comm, mine, share, config_, 5);
      for (size_t i = 0; i < got.size(); ++i)
        dealt[static_cast<size_t>(share.numbers[i / 3]) * 3 + i % 3] = got[i];
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
    for (Trajectory& c : scored.rollouts.samples) c.entropy = 2.0 * c.completion_length();
  });
  EXPECT_TRUE(std::isnan(value(silent.metrics, "kl_old")));
  EXPECT_TRUE(std::isnan(value(silent.metrics, "kl")));
  EXPECT_EQ(value(silent.metrics, "clip_ratio/low"), 0);
  EXPECT_EQ(value(silent.metrics, "entropy"), 2);
  EXPECT_EQ(value(silent.metrics, "frac_reward_zero_std"), 1);
  EXPECT_EQ(value(silent.metrics, "loss"), 0);

  const Trained nothing = train(1, [](ScoredRollouts& scored) {
    scored.scores.total.assign(scored.scores.total.size(), kNaN);
    scored.advantages.assign(scored.advantages.size(), 0);
  });
  for (const char* name : {"reward", "reward_std", "frac_reward_zero_std", "clip_ratio/low",
                           "clip_ratio/high", "kl_old", "entropy", "loss", "grad_norm"})
    EXPECT_TRUE(std::isnan(value(nothing.metrics, name))) << name;
}

// A group without any reward is no group without a signal: it counts nowhere.
TEST_F(GrpoStep, GroupsWithoutARewardCountNowhere) {
  const Trained trained = train(1, [](ScoredRollouts& scored) {
    for (size_t i = 0; i < 3; ++i) scored.scores.total[i] = kNaN;
    for (size_t i = 0; i < 6; ++i) scored.advantages[i] = 0;
  });
  EXPECT_EQ(value(trained.metrics, "frac_reward_zero_std"), 1.0 / 3);
  EXPECT_EQ(value(trained.metrics, "reward"), 7);  // of 3 to 11
}

// Entropy, clip shares and cut are means over the loss mask, whatever the advantages.
TEST_F(GrpoStep, MeansAreOverTheTokensOfTheLossMask) {
  config_.grpo.mask_truncated_completions = true;
  config_.sampling.top_k = 3;
  double tokens = 0, entropy = 0, cut = 0;
  const Trained trained = train(1, [&](ScoredRollouts& scored) {
    for (size_t i = 0; i < 12; ++i) {
      Trajectory& c = scored.rollouts.samples[i];
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
  EXPECT_NEAR(value(trained.metrics, "entropy"), entropy / tokens, 1e-12);
  EXPECT_NEAR(value(trained.metrics, "cut_probability"), cut / tokens, 1e-12);
}

}  // namespace
}  // namespace cohort::test
