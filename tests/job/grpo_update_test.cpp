// The updates of a GRPO step: packing, checks of ratios, and the metrics of both.
#include <cmath>
#include <limits>

#include "tests/job/grpo_step_fixture.h"

namespace cohort::test {
namespace {

using GrpoStep = GrpoStepTest;

constexpr double kUnrewarded = std::numeric_limits<double>::quiet_NaN();

// The surrogate is that of the step's tokens of the highest entropy; the others have an advantage
// of 0 in the micro batches.
TEST_F(GrpoStep, OnlyTokensOfHighEntropyHaveASurrogate) {
  config_.grpo.top_entropy_quantile = 0.25;
  config_.grpo.beta = 0.1;  // keeps all sequences
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  const ScoredRollouts scored = sampled(*comm, *learner);
  std::vector<double> entropies;
  for (const ScoredCompletion* c : completions_of(scored.groups))
    for (size_t t = 0; t < c->tokens.size(); ++t)
      if (c->loss_mask[t]) entropies.push_back(c->entropies[t]);
  const double threshold = quantile(entropies, 0.75);
  double kept = 0;
  size_t at = 0;
  for (const PolicyUpdate& update : packed(*comm, *learner, scored))
    for (const PolicyBatch& batch : update.batches)
      for (const double a : batch.advantage.to_vector<double>()) {
        EXPECT_EQ(a != 0, entropies[at] >= threshold) << at;
        kept += a != 0;
        ++at;
      }
  EXPECT_EQ(at, entropies.size());
  EXPECT_NEAR(kept / static_cast<double>(at), 0.25, 1.5 / static_cast<double>(at));
}

// The tokens of each turn have its advantage in the micro batches; observed tokens are no targets.
// A dialogue whose turns' advantages are all 0 is left out, one whose mean is 0 is not.
TEST_F(GrpoStep, TokensOfATurnShareItsAdvantage) {
  config_.grpo.credit = Credit::kTurn;
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  ScoredRollouts scored = sampled(*comm, *learner);
  std::vector<double> expected;
  for (ScoredCompletion* c : completions_of(scored.groups)) {
    for (int i = 0; i < 5; ++i) c->append_sampled(4, -1);
    c->loss_mask[c->tokens.size() - 3] = 0;  // two turns, the second of two tokens
    const double first = c->index % 3 == 0 ? 0 : static_cast<double>(c->index);
    const double second = -first * static_cast<double>(c->turn_lengths()[0]) / 2;
    set_advantage(*c, 0);
    c->turn_advantages = {first, second};
    if (first == 0) continue;
    expected.insert(expected.end(), static_cast<size_t>(c->turn_lengths()[0]), first);
    expected.insert(expected.end(), 2, second);
  }
  std::vector<double> found;
  for (const PolicyUpdate& update : packed(*comm, *learner, scored))
    for (const PolicyBatch& batch : update.batches)
      for (const double a : batch.advantage.to_vector<double>()) found.push_back(a);
  EXPECT_EQ(found, expected);
}

// With top-k the sampler draws from a renormalised distribution; the weights are the probability
// that it keeps, and at most 1.
TEST_F(GrpoStep, ImportanceWeightsFollowTheDistributionSampledFrom) {
  config_.sampling.top_k = 3;
  config_.grpo.importance_weights = kernels::Importance::kTruncate;
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  const ScoredRollouts scored = sampled(*comm, *learner);
  double tokens = 0, mass = 0;
  for (const ScoredCompletion* c : completions_of(scored.groups)) {
    tokens += static_cast<double>(c->completion_length());
    mass += c->truncated_mass;
  }
  auto minibatches = packed(*comm, *learner, scored);
  const UpdateSums updates = update_policy(*comm, *learner, minibatches, config_, 0);
  const Metrics metrics = grpo_metrics(scored, {}, updates, config_, 0).reduce(*comm);
  EXPECT_NEAR(metrics.at("importance_weight"), 1 - mass / tokens, 1e-12);
  EXPECT_GT(mass, 0);
  EXPECT_EQ(metrics.at("ratio_deviation"), 0);
}

// A recorded log-prob that differs from the trainer's is detected and corrected before AdamW: the
// step ends with the same weights as with the right record.
TEST_F(GrpoStep, AWrongRecordedLogProbIsCorrectedBeforeTheUpdate) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    const Trained right = train(ranks, [](std::vector<Group>&) {});
    EXPECT_EQ(right.metrics.at("ratio_deviation"), 0);
    const ExpectLog warning("max |ratio - 1| = 0.1");
    const Trained corrected = train(ranks, [](std::vector<Group>& groups) {
      ScoredCompletion& t = groups[0].completions[0];
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
  const auto damage_last = [](std::vector<Group>& groups) {
    groups.back().completions.back().logprobs.back() += std::log(1.25);
  };
  const Trained right = train(1, [](std::vector<Group>&) {});
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
    auto minibatches = packed(*comm, *learner, sampled(*comm, *learner));
    Tensor old = minibatches.back().batches.back().old_logprob;
    old.fill_(-1);
    std::optional<ExpectLog> warning;
    if (step % 20 == 0) warning.emplace("the sampler's log-probs differ from the trainer's");
    EXPECT_EQ(
        update_policy(*comm, *learner, minibatches, config_, 1e-2, {step}).ratio_deviation > 0,
        step % 20 == 0);
  }
}

// If truncated completions are masked, only the others decide whether a group has zero variance.
TEST_F(GrpoStep, ZeroVarianceGroupsDependOnUnmaskedTokens) {
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  ScoredRollouts scored = sampled(*comm, *learner);
  for (ScoredCompletion* c : completions_of(scored.groups)) c->stop_reason = StopReason::kLength;
  for (ScoredCompletion& c : scored.groups[0].completions) c.stop_reason = StopReason::kContext;
  scored.groups.back().completions.back().stop_reason = StopReason::kStopToken;
  const auto metrics = [&] { return grpo_metrics(scored, {}, {}, config_, 0).reduce(*comm); };
  EXPECT_EQ(metrics().at("frac_reward_zero_std"), 0);
  config_.grpo.mask_truncated_completions = true;
  EXPECT_EQ(metrics().at("frac_reward_zero_std"), 0.75);
  // Completions that end because the context is full are counted separately.
  EXPECT_EQ(metrics().at("completions/clipped_ratio"), 8.0 / 12);
  EXPECT_EQ(metrics().at("completions/context_ratio"), 3.0 / 12);
  EXPECT_EQ(metrics().at("reward_max"), 11);
  EXPECT_EQ(metrics().at("reward_min"), 0);
  set_rewards(scored.groups, std::vector<double>(12, kUnrewarded));
  EXPECT_TRUE(std::isnan(metrics().at("reward_max")) && std::isnan(metrics().at("reward_min")));
}

void set_truncated(Trajectory& trajectory, bool truncated = true) {
  trajectory.stop_reason = truncated ? StopReason::kLength : StopReason::kStopToken;
}

TEST_F(GrpoStep, AnUpdateWithoutATokenInTheMaskIsSkipped) {
  const auto comm = make_single_communicator();
  const auto learner = make_learner(*comm);
  ScoredRollouts scored = sampled(*comm, *learner);
  const std::vector<ScoredCompletion*> completions = completions_of(scored.groups);
  const auto count = [&] { return packed(*comm, *learner, scored).size(); };
  EXPECT_EQ(count(), 2u);
  // Zero advantages do not skip an update here: the learner sees their gradient.
  set_advantages(scored.groups, 0);
  EXPECT_EQ(count(), 2u);
  config_.grpo.mask_truncated_completions = true;
  for (size_t i = 0; i < 12; ++i) set_truncated(*completions[i], i < 6);
  EXPECT_EQ(count(), 1u);
  for (ScoredCompletion* c : completions) set_truncated(*c);
  EXPECT_EQ(count(), 0u);
  config_.grpo.mask_truncated_completions = false;
  EXPECT_EQ(count(), 2u);
  set_rewards(scored.groups, std::vector<double>(12, kUnrewarded));
  EXPECT_EQ(count(), 0u);
}

// If only one of two ranks has tokens in its mask, both make the update.
TEST_F(GrpoStep, AnUpdateIsMadeIfAnyRankHasATokenInTheMask) {
  config_.grpo.mask_truncated_completions = true;
  run_local_ranks(2, [&](Communicator& comm) {
    const auto learner = make_learner(comm);
    ScoredRollouts scored = sampled(comm, *learner);
    for (ScoredCompletion* c : completions_of(scored.groups)) set_truncated(*c, comm.rank() == 0);
    auto minibatches = packed(comm, *learner, scored);
    EXPECT_EQ(minibatches.size(), 2u);
    update_policy(comm, *learner, minibatches, config_, 1e-2);
    EXPECT_EQ(learner->optimizer().updates(), 2);
  });
}

// A metric without any token is NaN, which the log writes as null.
TEST_F(GrpoStep, MetricsWithoutATokenAreNaN) {
  const Trained zero_variance = train(1, [](std::vector<Group>& groups) {
    set_advantages(groups, 0);
    for (ScoredCompletion* c : completions_of(groups))
      for (size_t t = 0; t < c->tokens.size(); ++t) c->entropies[t] = c->loss_mask[t] ? 2 : 0;
  });
  EXPECT_TRUE(std::isnan(zero_variance.metrics.at("kl_old")));
  EXPECT_TRUE(std::isnan(zero_variance.metrics.at("kl")));
  EXPECT_EQ(zero_variance.metrics.at("clip_ratio/low"), 0);
  EXPECT_EQ(zero_variance.metrics.at("entropy"), 2);
  EXPECT_EQ(zero_variance.metrics.at("frac_reward_zero_std"), 1);
  EXPECT_TRUE(std::isnan(zero_variance.metrics.at("loss")));

  const Trained nothing = train(1, [](std::vector<Group>& groups) {
    set_rewards(groups, std::vector<double>(12, kUnrewarded));
    set_advantages(groups, 0);
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
  const Trained twice = train(1, [](std::vector<Group>&) {});
  EXPECT_TRUE(std::isnan(twice.metrics.at("update/kl")));
  config_.grpo.num_iterations = 1;
  const Trained once = train(1, [](std::vector<Group>&) {});
  for (const int64_t every : {1, 2})
    for (const int ranks : {1, 2}) {
      config_.grpo.kl_check_every = every;
      const Trained measured = train(ranks, [](std::vector<Group>&) {});
      const double kl = measured.metrics.at("update/kl");
      if (every == 2)
        EXPECT_TRUE(std::isnan(kl));
      else
        EXPECT_NEAR(kl / (2 * twice.metrics.at("kl_old")), 1, 1e-9) << ranks;
      if (ranks == 1) expect_same_weights(measured.weights, once.weights);
    }
  const Trained unmoved = train(1, [](std::vector<Group>& groups) { set_advantages(groups, 0); });
  EXPECT_TRUE(std::isnan(unmoved.metrics.at("update/kl")));
}

// A group without any reward is not a zero-variance group: it does not count.
TEST_F(GrpoStep, GroupsWithoutARewardDoNotCount) {
  const Trained trained = train(1, [](std::vector<Group>& groups) {
    set_rewards(groups, std::vector<double>(3, kUnrewarded));
    for (size_t i = 0; i < 6; ++i) set_advantage(*completions_of(groups)[i], 0);
  });
  EXPECT_EQ(trained.metrics.at("frac_reward_zero_std"), 1.0 / 3);
  EXPECT_EQ(trained.metrics.at("reward"), 7);  // mean of the rewards 3 to 11
}

TEST_F(GrpoStep, SolvedAndFailedGroupsHaveEqualRewards) {
  const Trained trained = train(1, [](std::vector<Group>& groups) {
    set_rewards(groups, {1, 1, kUnrewarded, 0, 0, 0, 0, 1, 0, -2, -2, -2});
  });
  EXPECT_EQ(trained.metrics.at("frac_groups_solved"), 0.25);
  EXPECT_EQ(trained.metrics.at("frac_groups_failed"), 0.5);
}

TEST_F(GrpoStep, GradientsAboveTheLimitAreCounted) {
  const auto clipped = [&](double limit) {
    config_.optimizer.max_grad_norm = limit;
    return train(1, [](std::vector<Group>&) {}).metrics.at("grad_clipped");
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
  const Trained trained = train(1, [&](std::vector<Group>& groups) {
    for (size_t i = 0; i < 12; ++i) {
      ScoredCompletion& c = *completions_of(groups)[i];
      set_truncated(c, i % 4 == 1);
      c.entropies.assign(c.tokens.size(), 0.5 * static_cast<double>(i));
      c.truncated_mass = 0.25 * static_cast<double>(i);
      if (i == 3) c.reward = kUnrewarded;
      if (i == 4) set_advantage(c, 0);
      if (c.truncated() || i == 3) continue;
      tokens += static_cast<double>(c.completion_length());
      entropy += c.entropy();
      truncated_mass += c.truncated_mass;
    }
  });
  EXPECT_NEAR(trained.metrics.at("entropy"), entropy / tokens, 1e-12);
  EXPECT_NEAR(trained.metrics.at("truncated_mass"), truncated_mass / tokens, 1e-12);
}

}  // namespace
}  // namespace cohort::test
