// Denominators, weights and the layout of packed policy batches.
#include <gtest/gtest.h>

#include "tests/rl/tiny_policy.h"

namespace cohort {
namespace {

using namespace test;

// `logprobs` are those of the completion's tokens.
Trajectory completion(std::vector<int32_t> tokens, int64_t prompt_length,
                      std::vector<double> logprobs, int64_t index = 0) {
  Trajectory out{.tokens = std::move(tokens),
                 .loss_mask = {},
                 .logprobs = std::move(logprobs),
                 .prompt_length = prompt_length,
                 .index = index};
  const auto prompt = static_cast<size_t>(prompt_length);
  out.loss_mask.assign(prompt, 0);
  out.loss_mask.resize(out.tokens.size(), 1);
  out.logprobs.insert(out.logprobs.begin(), prompt, 0);
  return out;
}

PolicySequence masked(const Trajectory& trajectory, double advantage = 0) {
  PolicySequence out = policy_sequence(trajectory, advantage);
  out.loss_mask.assign(out.tokens.size(), 0);
  return out;
}

TEST(TokenWeight, FollowsTheLossTypes) {
  const StepTotals totals{.sequences = 4, .tokens = 50};
  EXPECT_EQ(token_weight(LossType::kGrpo, totals, 5, 16), 1.0 / 20);
  EXPECT_EQ(token_weight(LossType::kDapo, totals, 5, 16), 1.0 / 50);
  EXPECT_EQ(token_weight(LossType::kBnpo, totals, 5, 16), 1.0 / 50);
  EXPECT_EQ(token_weight(LossType::kDrGrpo, totals, 5, 16), 1.0 / 64);
  EXPECT_EQ(token_weight(LossType::kSequenceSum, totals, 5, 16), 1.0 / 4);
}

TEST(TokenWeight, DenominatorsAreAtLeastOne) {
  for (const auto& [type, name, denominator] : kLossTypes) {
    const double weight = token_weight(type, {}, 3, 8);
    EXPECT_GT(weight, 0);
    EXPECT_LE(weight, 1);
  }
}

TEST(StepTotals, CountAllSequencesAndTheUnmaskedTokens) {
  const Trajectory a = completion({1, 2, 3}, 1, {-1, -1}), b = completion({1, 2}, 1, {-1});
  const std::vector<PolicySequence> sequences = {policy_sequence(a, 0), masked(b),
                                                 policy_sequence(b, 0)};
  const StepTotals totals = count_totals(sequences);
  EXPECT_EQ(totals.sequences, 3);
  EXPECT_EQ(totals.tokens, 3);
  EXPECT_EQ(count_totals({}).tokens, 0);
}

TEST(PackPolicy, PutsValuesWhereTheNextTokenIsACompletionToken) {
  const std::vector<PolicySequence> sequences = {
      policy_sequence(completion({4, 5, 6, kEos}, 2, {-0.5, -0.25}, 20), 3),
      policy_sequence(completion({7, 8}, 1, {-2}, 21), -1)};
  const Minibatch batches = pack_policy(sequences, {.loss_type = LossType::kGrpo,
                                                    .totals = count_totals(sequences),
                                                    .max_completion_length = 4,
                                                    .micro_batch_tokens = 100,
                                                    .dtype = DType::kF64});
  ASSERT_EQ(batches.size(), 1u);
  const PolicyBatch& batch = batches[0];
  using I = std::vector<int>;
  using D = std::vector<double>;
  EXPECT_EQ(batch.tokens.to_vector<int>(), (I{4, 5, 6, 7}));
  // The end of sequence is an action like any other; prompt tokens are not actions.
  EXPECT_EQ(batch.target_positions.to_vector<int>(), (I{1, 2, 3}));
  EXPECT_EQ(batch.targets.to_vector<int>(), (I{6, kEos, 8}));
  EXPECT_EQ(batch.positions.to_vector<int>(), (I{0, 1, 2, 0}));
  EXPECT_EQ(batch.sequences.to_vector<int>(), (I{20, 20, 20, 21}));
  EXPECT_EQ(batch.cu_seqlens.to_vector<int>(), (I{0, 3, 4}));
  EXPECT_EQ(batch.num_targets(), 3);
  EXPECT_EQ(batch.old_logprob.to_vector<double>(), (D{-0.5, -0.25, -2}));
  EXPECT_EQ(batch.advantage.to_vector<double>(), (D{3, 3, -1}));
  EXPECT_EQ(batch.weight.to_vector<double>(), (D{0.25, 0.25, 0.5}));
  EXPECT_FALSE(batch.ref_logprob.defined());
}

// A conversation with several turns of the policy, between which its tokens are context.
TEST(PackPolicy, TakesSeveralSpansOfSampledTokens) {
  const Trajectory turns{.tokens = {1, 2, 3, 4, 5, 6},
                         .loss_mask = {0, 1, 0, 0, 1, 1},
                         .logprobs = {0, -1, 0, 0, -2, -3},
                         .prompt_length = 1};
  EXPECT_EQ(turns.completion_length(), 3);
  const std::vector<PolicySequence> sequences = {policy_sequence(turns, 2)};
  EXPECT_EQ(count_totals(sequences).tokens, 3);
  const PolicyBatch batch = pack_policy(sequences, pack_desc(LossType::kGrpo, sequences)).at(0);
  using D = std::vector<double>;
  EXPECT_EQ(batch.targets.to_vector<int>(), (std::vector<int>{2, 5, 6}));
  EXPECT_EQ(batch.old_logprob.to_vector<double>(), (D{-1, -2, -3}));
  EXPECT_EQ(batch.advantage.to_vector<double>(), (D{2, 2, 2}));
  EXPECT_EQ(batch.weight.to_vector<double>(), (D{1.0 / 3, 1.0 / 3, 1.0 / 3}));
}

TEST(PackPolicy, MaskedSequencesHaveNoTargetsAndNoWeight) {
  const Trajectory a = completion({1, 2, 3}, 1, {-1, -1}), b = completion({4, 5}, 1, {-3});
  const std::vector<PolicySequence> sequences = {masked(a, 2), policy_sequence(b, 1)};
  PackPolicyDesc desc = pack_desc(LossType::kDapo, sequences);
  const PolicyBatch batch = pack_policy(sequences, desc).at(0);
  EXPECT_EQ(batch.tokens.to_vector<int>(), (std::vector<int>{1, 2, 4}));
  EXPECT_EQ(batch.targets.to_vector<int>(), (std::vector<int>{5}));
  EXPECT_EQ(batch.weight.to_vector<double>(), (std::vector<double>{1}));
  EXPECT_EQ(batch.advantage.to_vector<double>(), (std::vector<double>{1}));
}

TEST(PackPolicy, WeightsOfAnUpdateSumToItsMean) {
  const auto completions = random_completions(20, 1);
  const auto advantages = random_advantages(20, 1);
  for (const Truncated truncated : {Truncated::kKeep, Truncated::kMask})
    for (const LossType type : {LossType::kGrpo, LossType::kDapo, LossType::kBnpo}) {
      const auto sequences = sequences_of(completions, advantages, truncated);
      double sum = 0, kept = 0;
      for (const PolicyBatch& batch : pack_policy(sequences, pack_desc(type, sequences, 12)))
        for (const double w : batch.weight.to_vector<double>()) sum += w;
      for (const PolicySequence& s : sequences) kept += s.num_targets() > 0;
      // With `grpo`, a masked sequence counts in the mean with weights of 0.
      EXPECT_NEAR(sum, type == LossType::kGrpo ? kept / 20 : 1, 1e-13);
    }
}

TEST(PackPolicy, MicroBatchesKeepTheOrderAndTheBudget) {
  const auto completions = random_completions(30, 2);
  const auto sequences = sequences_of(completions, random_advantages(30, 2));
  const Minibatch batches = pack_policy(sequences, pack_desc(LossType::kDapo, sequences, 20));
  EXPECT_GT(batches.size(), 5u);
  std::vector<int64_t> sequence_of_token;
  for (const PolicyBatch& batch : batches) {
    EXPECT_LE(batch.size(), 20);
    for (const int i : batch.sequences.to_vector<int>()) sequence_of_token.push_back(i);
  }
  EXPECT_TRUE(std::is_sorted(sequence_of_token.begin(), sequence_of_token.end()));
  sequence_of_token.erase(std::unique(sequence_of_token.begin(), sequence_of_token.end()),
                          sequence_of_token.end());
  EXPECT_EQ(sequence_of_token.size(), 30u);
  EXPECT_TRUE(pack_policy({}, pack_desc(LossType::kDapo, {}, 20)).empty());
}

TEST(PackPolicy, SaysWhichSequenceIsBroken) {
  const auto pack_one = [](const Trajectory& c) {
    const std::vector<PolicySequence> sequences = {policy_sequence(c, 0)};
    pack_policy(sequences, pack_desc(LossType::kDapo, sequences));
  };
  EXPECT_THROW_WITH(pack_one(completion({1, 2}, 0, {-1, -1}, 5)), Error, "sequence 5, got 0 and 2");
  EXPECT_THROW_WITH(pack_one(completion({1, 2}, 2, {}, 5)), Error, "sequence 5, got 2 and 0");
  EXPECT_THROW_WITH(pack_one(completion({1, 2, 3}, 1, {-1}, 5)), Error,
                    "sequence 5 has 3 tokens and 2 log-probs");
}

TEST(GrpoConfig, ReadsItsKeys) {
  GrpoConfig config;
  EXPECT_EQ(config.loss_desc().epsilon_high, 0.2);
  read_config(config, parse_yaml("{epsilon: 0.1, epsilon_high: 0.28, beta: 0.04, loss_type: "
                                 "dr_grpo, scale_rewards: leave_one_out, num_iterations: 2, "
                                 "num_minibatches: 3, mask_truncated_completions: true, "
                                 "shuffle_advantages: true}",
                                 "test"));
  const kernels::PolicyLossDesc desc = config.loss_desc();
  EXPECT_EQ(desc.epsilon_low, 0.1);
  EXPECT_EQ(desc.epsilon_high, 0.28);
  EXPECT_EQ(desc.beta, 0.04);
  EXPECT_EQ(config.loss_type, LossType::kDrGrpo);
  EXPECT_EQ(config.scale_rewards, AdvantageScale::kLeaveOneOut);
  EXPECT_EQ(config.num_iterations, 2);
  EXPECT_EQ(config.num_minibatches, 3);
  EXPECT_TRUE(config.mask_truncated_completions);
  EXPECT_TRUE(config.shuffle_advantages);
  EXPECT_THROW_WITH(read_config(config, parse_yaml("{loss_type: dapoo}", "test")), InputError,
                    "grpo, dapo, dr_grpo, bnpo, sequence_sum");
  EXPECT_THROW_WITH(read_config(config, parse_yaml("{beta: -1}", "test")), InputError, "beta");
}

GrpoConfig config_of(const std::string& yaml) {
  GrpoConfig config;
  read_config(config, parse_yaml(yaml, "test"));
  return config;
}

TEST(GrpoConfig, PassesItsChoicesToTheLoss) {
  const kernels::PolicyLossDesc off = GrpoConfig().loss_desc();
  EXPECT_EQ(off.surrogate, kernels::Surrogate::kClip);
  EXPECT_EQ(off.dual_clip, HUGE_VAL);
  EXPECT_EQ(off.delta, HUGE_VAL);
  EXPECT_EQ(off.kl, kernels::KlEstimator::kK3);
  EXPECT_FALSE(off.kl_unbiased);
  const kernels::PolicyLossDesc sapo =
      config_of(
          "{surrogate: sapo, sapo_tau_pos: 2, sapo_tau_neg: 3, kl_estimator: k2, "
          "kl_unbiased: yes}")
          .loss_desc();
  EXPECT_EQ(sapo.surrogate, kernels::Surrogate::kSapo);
  EXPECT_EQ(sapo.tau_pos, 2);
  EXPECT_EQ(sapo.tau_neg, 3);
  EXPECT_EQ(sapo.kl, kernels::KlEstimator::kK2);
  EXPECT_TRUE(sapo.kl_unbiased);
  EXPECT_EQ(config_of("{dual_clip: 3}").loss_desc().dual_clip, 3);
  EXPECT_EQ(config_of("{delta: 2}").loss_desc().delta, 2);
  EXPECT_THROW_WITH(config_of("{surrogate: ppo}"), InputError, "clip, cispo, reinforce, sapo");
}

TEST(PackPolicy, TokensWithoutASurrogateHaveNoAdvantage) {
  PolicySequence s = policy_sequence(completion({1, 2, 3, 4}, 1, {-1, -2, -3}, 5), 0.5);
  s.surrogate_mask = {0, 1, 0, 1};
  s.sampling_logprob = {0, -0.5, -1.5, -2.5};
  s.old_distance_coef = {9, 0, 0.3, 0};
  const std::vector<PolicySequence> sequences = {s};
  const Minibatch batches = pack_policy(
      sequences,
      {.totals = count_totals(sequences), .micro_batch_tokens = 100, .dtype = DType::kF64});
  EXPECT_EQ(batches[0].advantage.to_vector<double>(), (std::vector{0.5, 0.0, 0.5}));
  EXPECT_EQ(batches[0].weight.to_vector<double>(), std::vector<double>(3, 1.0 / 3));
  EXPECT_EQ(batches[0].sampling_logprob.to_vector<double>(), (std::vector{-0.5, -1.5, -2.5}));
  EXPECT_EQ(batches[0].old_distance_coef.to_vector<double>(), (std::vector{0.0, 0.3, 0.0}));
}

// A preset sets defaults: keys of the file win, wherever they stand, and a written configuration
// reads back as it was.
TEST(GrpoConfig, PresetsAreDefaultsOfOtherKeys) {
  const GrpoConfig gspo = config_of("{epsilon: 0.01, preset: gspo}");
  EXPECT_EQ(gspo.importance_sampling_level, kernels::RatioLevel::kSequence);
  EXPECT_EQ(gspo.loss_type, LossType::kGrpo);
  EXPECT_EQ(gspo.epsilon, 0.01);
  EXPECT_EQ(gspo.epsilon_high, 4e-4);
  for (const auto& [name, keys, preset] : kPresets) {
    SCOPED_TRACE(name);
    GrpoConfig config =
        config_of(str("{preset: ", name, name == "opd" ? ", reference: teacher" : "", "}"));
    EXPECT_EQ(config.preset, preset);
    config.validate();
    const std::string written = dump_config(config);
    EXPECT_EQ(dump_config(config_of(written)), written);
    if (preset != "none") {
      config.preset = "none";
      EXPECT_NE(dump_config(config), dump_config(GrpoConfig()));
    }
    config.num_minibatches = 4;
    EXPECT_EQ(config.warnings(), std::vector<std::string>());
  }
}

TEST(GrpoConfig, WarnsOfAPresetWhoseKeysAreAllGiven) {
  const std::string text = "preset: does nothing, as all keys that it sets are given";
  const auto warnings =
      config_of("{preset: dr_grpo, loss_type: dapo, scale_rewards: group}").warnings();
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(warnings[0].starts_with(text)) << warnings[0];
  EXPECT_TRUE(config_of("{preset: dr_grpo, loss_type: dapo}").warnings().empty());
}

// Earlier versions' name of reject, by the geometric mean.
TEST(GrpoConfig, ReadsTheEarlierNameOfAMode) {
  for (const char* name : {"sequence_mask", "reject"}) {
    const GrpoConfig config = config_of(str("{importance_weights: ", name, "}"));
    EXPECT_NE(dump_config(config).find("importance_weights: reject\n"), std::string::npos);
    const kernels::PolicyLossDesc desc = config.loss_desc();
    EXPECT_EQ(desc.importance, kernels::Importance::kReject);
    EXPECT_EQ(desc.importance_level, kernels::ImportanceLevel::kGeometric);
    EXPECT_EQ(desc.importance_min, 0.99);
    EXPECT_EQ(desc.importance_max, 1.01);
  }
  const kernels::PolicyLossDesc mask =
      config_of("{importance_weights: mask, importance_level: sequence}").loss_desc();
  EXPECT_EQ(mask.importance_min, 0);
  EXPECT_EQ(mask.importance_max, 3);
}

TEST(GrpoConfig, KeysAboutMovesDoNothingInOneUpdate) {
  for (const char* key : {"trust_region: tv", "off_policy_mask: 0.1", "old_kl_coef: 0.1"}) {
    const GrpoConfig once = config_of(str("{", key, "}")),
                     twice = config_of(str("{num_iterations: 2, ", key, "}"));
    ASSERT_EQ(once.warnings().size(), 1u) << key;
    EXPECT_NE(once.warnings()[0].find("does nothing with one update a step"), std::string::npos);
    EXPECT_TRUE(once.warnings(true).empty()) << key;
    EXPECT_TRUE(twice.warnings().empty()) << key;
    EXPECT_TRUE(once.needs_sampling_log_probs());
    EXPECT_EQ(twice.needs_all_completions(), twice.old_kl_coef > 0);
    EXPECT_FALSE(once.needs_all_completions());
  }
}

TEST(GrpoConfig, RefusesKeysThatContradictEachOther) {
  const auto expect_refused = [](const std::string& yaml, const std::string& text) {
    EXPECT_THROW_WITH(config_of(yaml).validate(), InputError, text);
  };
  expect_refused("{surrogate: cispo, dual_clip: 3}",
                 "dual_clip: belongs to surrogate: clip, not to cispo; hint: leave dual_clip out");
  expect_refused("{surrogate: reinforce, delta: 3}", "delta: belongs to surrogate: clip");
  expect_refused("{surrogate: clip, sapo_tau_pos: 2}", "sapo_tau_pos: belongs to surrogate: sapo");
  expect_refused("{surrogate: cispo, sapo_tau_neg: 2}", "hint: leave sapo_tau_neg out");
  expect_refused("{dual_clip: 3, delta: 4}", "and so does dual_clip; hint: leave one of them out");
  expect_refused("{dual_clip: 1}", "dual_clip: expected a number above 1, got 1");
  expect_refused("{epsilon_high: 0.5, delta: 1.5}",
                 "delta: expected a number above 1 + epsilon_high = 1.5, got 1.5");
  expect_refused("{importance_weights: mask, importance_min: 1.5}",
                 "expected bounds around 1, the weight of a token drawn from the policy itself");
  expect_refused("{importance_weights: truncate, importance_max: 0.5}", "got 0 and 0.5");
  expect_refused("{beta: 0.1, kl_in: reward, multi_objective_aggregation: normalize_then_sum}",
                 "hint: kl_in=loss");
  expect_refused("{beta: 0.1, kl_in: reward, kl_unbiased: yes}", "kl_unbiased: the gradient");
  expect_refused("{baseline: batch, dynamic_sampling_rounds: 2}",
                 "hint: dynamic_sampling_rounds=0");
  expect_refused("{baseline: none}", "scale_rewards: group: there is nothing to scale by");
  for (const char* key : {"multi_objective_aggregation: normalize_then_sum", "kl_in: reward",
                          "whiten_advantages: yes", "shuffle_advantages: yes"})
    expect_refused(str("{beta: 0.1, credit: turn, ", key, "}"),
                   " is for one per completion; hint: credit=completion");
  for (const char* yaml :
       {"{}", "{dual_clip: 3}", "{epsilon_high: 0.5, delta: 1.6}",
        "{surrogate: cispo, epsilon: 1, epsilon_high: 4}", "{surrogate: sapo, sapo_tau_neg: 1}",
        "{baseline: none, scale_rewards: none}", "{credit: turn, advantage_clip: 2}"})
    EXPECT_NO_THROW(config_of(yaml).validate()) << yaml;
}

}  // namespace
}  // namespace cohort
