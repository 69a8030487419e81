// The checks of the table. Results must equal a case's numbers to its tolerance, and to 1e-9 those
// that the file has recomputed in f64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "rl/grpo_loss.h"
#include "rl/reward.h"
#include "tests/rl/grpo_truth.h"
#include "tests/support/policy_loss_call.h"

namespace cohort::test {
namespace {

using Values = std::vector<double>;

double number(const Json& truth, const char* key) {
  return truth.at("inputs").at(key).as_double();
}

Values values(const Json& array) {
  Values out;
  for (const Json& item : array.as_array()) out.push_back(item.as_double());
  return out;
}
Values input(const Json& truth, const char* key) {
  return values(truth.at("inputs").at(key));
}
// One row per sequence; a plain list is one sequence.
std::vector<Values> rows(const Json& array) {
  if (!array.as_array().at(0).is_array()) return {values(array)};
  std::vector<Values> out;
  for (const Json& row : array.as_array()) out.push_back(values(row));
  return out;
}
std::vector<Values> input_rows(const Json& truth, const char* key) {
  return rows(truth.at("inputs").at(key));
}

void expect_near(const Json& want, const Values& got, double tolerance, const char* key) {
  if (!want.is_array()) {
    ASSERT_EQ(got.size(), 1u) << key;
    EXPECT_NEAR(got[0], want.as_double(), tolerance * std::max(1.0, std::abs(got[0]))) << key;
    return;
  }
  Values flat;
  for (const Values& row : rows(want)) flat.insert(flat.end(), row.begin(), row.end());
  ASSERT_EQ(got.size(), flat.size()) << key;
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], flat[i], tolerance * std::max(1.0, std::abs(flat[i]))) << key << " " << i;
}

// Compares `got` with expected[key], and with recomputed_float64[key] if that exists.
void expect(const Json& truth, const char* key, const Values& got) {
  expect_near(truth.at("expected").at(key), got, truth.at("tolerance").as_double(), key);
  if (const Json* exact = truth.at("recomputed_float64").find(key))
    expect_near(*exact, got, 1e-9, key);
}
void expect(const Json& truth, const char* key, double got) {
  expect(truth, key, Values{got});
}

// ---- The policy loss on plain numbers
// ------------------------------------------------------------------------------------------------

struct Tokens {
  Values logprob, old_logprob, advantage, weight, ref_logprob;
  Values sampling_logprob = {};
  std::vector<int32_t> segments = {};
};
struct Outcome {
  double loss = 0;
  Values gradient;
  kernels::PolicyLossStats stats;
};

Outcome policy_loss_of(const Tokens& tokens, const kernels::PolicyLossDesc& desc) {
  Outcome out;
  const Tensor lp = Tensor::from(tokens.logprob);
  Tensor loss = Tensor::empty({1}, DType::kF64), gradient = Tensor::empty_like(lp);
  Tensor stats = kernels::PolicyLossStats::zeros();
  kernels::policy_loss(
      {.loss = loss,
       .dlogprob = gradient,
       .stats = stats,
       .logprob = lp,
       .old_logprob = Tensor::from(tokens.old_logprob),
       .ref_logprob = tokens.ref_logprob.empty() ? Tensor() : Tensor::from(tokens.ref_logprob),
       .advantage = Tensor::from(tokens.advantage),
       .weight = Tensor::from(tokens.weight),
       .desc = desc,
       .sampling_logprob =
           tokens.sampling_logprob.empty() ? Tensor() : Tensor::from(tokens.sampling_logprob),
       .segments = tokens.segments.empty() ? Tensor() : Tensor::from(tokens.segments)});
  out.loss = loss.item();
  out.stats = kernels::PolicyLossStats::from(stats);
  out.gradient = gradient.to_vector<double>();
  return out;
}

// Token i alone.
Tokens token_of(const Tokens& tokens, size_t i) {
  Tokens token{
      {tokens.logprob[i]}, {tokens.old_logprob[i]}, {tokens.advantage[i]}, {tokens.weight[i]}, {}};
  if (!tokens.ref_logprob.empty()) token.ref_logprob = {tokens.ref_logprob[i]};
  if (!tokens.sampling_logprob.empty()) token.sampling_logprob = {tokens.sampling_logprob[i]};
  return token;
}

// The weighted loss of each token: the loss of all minus that without its weight. The tokens of a
// sequence have no loss of their own.
Values per_token(const Tokens& tokens, const kernels::PolicyLossDesc& desc) {
  Values out;
  for (size_t i = 0; i < tokens.logprob.size(); ++i) {
    Tokens scaled = tokens;
    constexpr double kOthers = 1e-300;  // in the means of their sequence, not in the loss
    for (size_t k = 0; k < scaled.weight.size(); ++k)
      if (k != i) scaled.weight[k] = kOthers;
    out.push_back(policy_loss_of(scaled, desc).loss);
  }
  return out;
}

kernels::PolicyLossDesc clip_of(const Json& truth) {
  return {.epsilon_low = number(truth, "clip_low"), .epsilon_high = number(truth, "clip_high")};
}

Values scaled(Values x, double factor) {
  for (double& v : x) v *= factor;
  return x;
}
double mean_weight(size_t n) {
  return 1 / static_cast<double>(n);
}

// ---- Aggregation: sequences whose token losses are given
// ------------------------------------------------------------------------------------------------

// A token whose loss is l: ratio 1 and advantage -l.
struct LossRow {
  Values losses;
};

// Rows of losses under 0 / 1 masks. A row without a kept token is left out, like a sequence to
// which no reward applies.
std::vector<LossRow> loss_rows(const Json& losses, const Json& masks) {
  std::vector<LossRow> out;
  const auto loss = rows(losses), mask = rows(masks);
  for (size_t i = 0; i < loss.size(); ++i) {
    LossRow row;
    for (size_t t = 0; t < loss[i].size(); ++t)
      if (mask[i][t] != 0) row.losses.push_back(loss[i][t]);
    if (!row.losses.empty()) out.push_back(row);
  }
  return out;
}

// Sequences with as many tokens as the rows have losses.
std::vector<PolicySequence> sequences_of(const std::vector<LossRow>& rows) {
  std::vector<PolicySequence> sequences;
  for (const LossRow& row : rows) {
    const size_t n = row.losses.size();
    Trajectory completion{.tokens = std::vector<int32_t>(n + 1),
                          .loss_mask = std::vector<uint8_t>(n + 1, 1),
                          .logprobs = std::vector<double>(n + 1, -1),
                          .prompt_length = 1};
    completion.loss_mask[0] = 0;
    sequences.push_back(policy_sequence(completion, 0));
  }
  return sequences;
}

constexpr int64_t kMaxLength = 3;

// Contribution of a rank or micro batch to the step's loss, through real packing.
double aggregate(const std::vector<LossRow>& rows, LossType type, const StepTotals& totals) {
  const PackPolicyDesc desc{.loss_type = type,
                            .totals = totals,
                            .max_completion_length = kMaxLength,
                            .micro_batch_tokens = 1000,
                            .dtype = DType::kF64};
  const PolicyBatch batch = pack_policy(sequences_of(rows), desc).at(0);
  // At a ratio of 1 the loss of a token is minus its advantage.
  Tokens tokens{.logprob = batch.old_logprob.to_vector<double>(),
                .weight = batch.weight.to_vector<double>()};
  tokens.old_logprob = tokens.logprob;
  for (const LossRow& row : rows)
    for (const double loss : row.losses) tokens.advantage.push_back(-loss);
  return policy_loss_of(tokens, GrpoConfig{}.loss_desc()).loss;
}

StepTotals totals_of(const std::vector<LossRow>& rows) {
  return count_totals(sequences_of(rows));
}

}  // namespace

void check_kl(const Json& truth) {
  const Values lp = input(truth, "logprobs");
  const size_t n = lp.size();
  GrpoConfig config;
  const std::string estimator = truth.at("inputs").at("estimator").as_string();
  for (const auto& [value, name] : kKlEstimators)
    if (estimator == name) config.kl_estimator = value;
  config.beta = 1;
  Values kl = per_token({lp, lp, Values(n, 0.0), Values(n, 1.0), input(truth, "ref_logprobs")},
                        config.loss_desc());
  if (const Json* cap = truth.at("inputs").find("output_clamp"))
    for (double& v : kl) v = std::min(v, cap->as_double());
  expect(truth, "kl", kl);
}

void check_kl_penalty(const Json& truth) {
  Tokens tokens{input(truth, "logprobs"),
                input(truth, "old_logprobs"),
                input(truth, "advantages"),
                {},
                input(truth, "ref_logprobs")};
  const auto n = static_cast<double>(tokens.logprob.size());
  tokens.weight.assign(tokens.logprob.size(), 1 / n);
  const double beta = number(truth, "beta");
  const Outcome out = policy_loss_of(tokens, {.beta = beta});
  expect(truth, "loss", out.loss);
  expect(truth, "kl_mean", out.stats.kl_to_reference / n);
  expect(truth, "kl", scaled(per_token(tokens, {.beta = beta}), n / beta));
}

void check_kl_gradient(const Json& truth) {
  const Values lp = input(truth, "logprobs");
  const size_t n = lp.size();
  const Tokens tokens{lp, lp, Values(n, 0.0), Values(n, mean_weight(n)),
                      input(truth, "ref_logprobs")};
  expect(truth, "grad",
         policy_loss_of(tokens, {.beta = number(truth, "beta"), .kl_unbiased = true}).gradient);
}

void check_clip(const Json& truth) {
  const Values lp = input(truth, "logprobs");
  const Tokens tokens{lp,
                      input(truth, "old_logprobs"),
                      input(truth, "advantages"),
                      Values(lp.size(), mean_weight(lp.size())),
                      {}};
  expect(truth, "loss", policy_loss_of(tokens, clip_of(truth)).loss);
}

void check_dual_clip(const Json& truth) {
  const Json& in = truth.at("inputs");
  Tokens tokens;
  tokens.advantage = input(truth, "advantages");
  const size_t n = tokens.advantage.size();
  if (in.find("ratio")) {
    tokens.logprob = input(truth, "ratio");
    for (double& v : tokens.logprob) v = std::log(v);
    tokens.old_logprob.assign(n, 0);
  } else {
    tokens.logprob = input(truth, "logprobs");
    tokens.old_logprob = input(truth, "old_logprobs");
  }
  tokens.weight.assign(n, 1);
  kernels::PolicyLossDesc desc = clip_of(truth);
  desc.dual_clip = number(truth, "dual_clip_c");
  expect(truth, "per_token", per_token(tokens, desc));
  tokens.weight.assign(n, mean_weight(n));
  if (truth.at("expected").find("loss")) expect(truth, "loss", policy_loss_of(tokens, desc).loss);
}

void check_cispo(const Json& truth) {
  Tokens tokens{input(truth, "logprobs"),
                input(truth, "logprobs"),
                input(truth, "advantages"),
                Values(input(truth, "logprobs").size(), 1.0),
                {}};
  const Values ratio = input(truth, "ratio");
  for (size_t i = 0; i < ratio.size(); ++i) tokens.old_logprob[i] -= std::log(ratio[i]);
  kernels::PolicyLossDesc desc = clip_of(truth);
  desc.surrogate = kernels::Surrogate::kCispo;
  expect(truth, "per_token", per_token(tokens, desc));
  const Outcome out = policy_loss_of(tokens, desc);
  expect(truth, "grad_wrt_logprobs_of_sum", out.gradient);
  double clipped = 0;
  for (const double c : values(truth.at("expected").at("clipfrac"))) clipped += c;
  EXPECT_EQ(out.stats.clipped_low + out.stats.clipped_high, clipped);
}

// Importance weights of tokens: the bounds are the case's, or none.
void check_rollout_weights(const Json& truth) {
  const Json& in = truth.at("inputs");
  Tokens tokens{
      input(truth, "logprobs"), input(truth, "old_logprobs"), input(truth, "advantages"), {}, {}};
  const size_t n = tokens.logprob.size();
  tokens.weight.assign(n, 1);
  tokens.sampling_logprob = input(truth, "rollout_logprobs");
  kernels::PolicyLossDesc desc = in.find("clip_low") ? clip_of(truth) : kernels::PolicyLossDesc{};
  desc.importance = kernels::Importance::kTruncate;
  if (const Json* cap = in.find("tis_cap")) desc.importance_max = cap->as_double();
  if (const Json* keep = in.find("keep_range")) {
    desc.importance = kernels::Importance::kMask;
    desc.importance_min = values(*keep)[0], desc.importance_max = values(*keep)[1];
    // The tokens that are kept do not depend on how far the policy has moved since.
    const Values kept = values(truth.at("expected").at("kept"));
    for (const double moved : {-2, 0, 2})
      for (size_t i = 0; i < n; ++i) {
        Tokens token = token_of(tokens, i);
        token.logprob[0] += moved;
        EXPECT_EQ(policy_loss_of(token, desc).stats.importance != 0, kept[i] != 0) << i;
      }
  }
  if (truth.at("expected").find("weights") && !in.find("keep_range")) {
    Values weights;
    for (size_t i = 0; i < n; ++i)
      weights.push_back(policy_loss_of(token_of(tokens, i), desc).stats.importance);
    expect(truth, "weights", weights);
  }
  if (truth.at("expected").find("weighted")) expect(truth, "weighted", per_token(tokens, desc));
  tokens.weight = scaled(tokens.weight, mean_weight(n));
  expect(truth, "loss", policy_loss_of(tokens, desc).loss);
}

void check_given_weights(const Json& truth) {
  const Values advantages = input(truth, "advantages");
  const size_t n = advantages.size();
  Tokens tokens{Values(n, -1.0), Values(n, -1.0), advantages, Values(n, 1.0), {}};
  for (const double ratio : input(truth, "importance_ratio"))
    tokens.sampling_logprob.push_back(-1 - std::log(ratio));
  const kernels::PolicyLossDesc desc{.importance = kernels::Importance::kTruncate,
                                     .importance_max = number(truth, "tis_max")};
  Values weights;
  for (size_t i = 0; i < n; ++i)
    weights.push_back(policy_loss_of(token_of(tokens, i), desc).stats.importance);
  expect(truth, "weights", weights);
  tokens.weight = scaled(tokens.weight, mean_weight(n));
  expect(truth, "loss", policy_loss_of(tokens, desc).loss);
}

// Sequences of one token.
void check_off_policy_mask(const Json& truth) {
  const Values advantages = input(truth, "advantages");
  const size_t n = advantages.size();
  Tokens tokens{Values(n, -1.0), Values(n, -1.0), advantages, Values(n, 1.0), {}};
  for (const double above : input(truth, "rollout_minus_policy_mean_kl")) {
    tokens.segments.push_back(static_cast<int32_t>(tokens.sampling_logprob.size()));
    tokens.sampling_logprob.push_back(-1 + above);
  }
  const Outcome out = policy_loss_of(tokens, {.off_policy_mask = number(truth, "threshold")});
  Values mask;
  for (const double g : out.gradient) mask.push_back(g != 0);
  expect(truth, "mask", mask);
}

void check_sequence_ratio(const Json& truth) {
  const auto lp = input_rows(truth, "logprobs"), old = input_rows(truth, "old_logprobs"),
             advantages = input_rows(truth, "advantages");
  const Json &in = truth.at("inputs"), &want = truth.at("expected");
  Tokens tokens;
  Values ratios;
  kernels::PolicyLossDesc desc = clip_of(truth);
  desc.level = kernels::RatioLevel::kSequence;
  const StepTotals totals{.sequences = static_cast<double>(lp.size())};
  for (size_t s = 0; s < lp.size(); ++s) {
    const size_t n = lp[s].size();
    const auto append = [](Values& all, const Values& more) {
      all.insert(all.end(), more.begin(), more.end());
    };
    append(tokens.logprob, lp[s]), append(tokens.old_logprob, old[s]);
    append(tokens.advantage, advantages[s]);
    tokens.segments.insert(tokens.segments.end(), n, static_cast<int32_t>(s));
    Tokens free{lp[s], old[s], Values(n, 1.0), Values(n, mean_weight(n)), {}};
    free.segments.assign(n, 0);
    kernels::PolicyLossDesc unclipped = desc;
    unclipped.epsilon_low = 1, unclipped.epsilon_high = 1e9;
    unclipped.importance = kernels::Importance::kNone;
    ratios.push_back(-policy_loss_of(free, unclipped).loss);
    if (in.find("rollout_logprobs")) {
      append(tokens.sampling_logprob, input_rows(truth, "rollout_logprobs")[s]);
      desc.importance = kernels::Importance::kTruncate;
      desc.importance_level = kernels::ImportanceLevel::kSequence;
      if (const Json* cap = in.find("tis_cap")) desc.importance_max = cap->as_double();
    }
  }
  tokens.weight.assign(tokens.logprob.size(), 1);
  if (want.find("seq_ratio")) expect(truth, "seq_ratio", ratios);
  if (want.find("seq_weight")) {
    const kernels::PolicyLossStats stats = policy_loss_of(tokens, desc).stats;
    expect(truth, "seq_weight", stats.importance / stats.tokens);
  }
  expect(truth, want.find("weighted") ? "weighted" : "per_token", per_token(tokens, desc));
  for (double& w : tokens.weight)
    w *= token_weight(LossType::kGrpo, totals, static_cast<int64_t>(lp[0].size()), 1);
  expect(truth, "loss", policy_loss_of(tokens, desc).loss);
}

void check_leave_one_out(const Json& truth) {
  const Values groups = input(truth, "groups"), rewards = input(truth, "rewards"),
               valid = input(truth, "valid"), want = values(truth.at("expected").at("baseline"));
  for (size_t begin = 0, end; begin < groups.size(); begin = end) {
    for (end = begin; end < groups.size() && groups[end] == groups[begin];) ++end;
    Values group;
    for (size_t i = begin; i < end; ++i)
      group.push_back(valid[i] != 0 ? rewards[i] : std::numeric_limits<double>::quiet_NaN());
    const Values advantages =
        group_advantages(group, static_cast<int64_t>(group.size()), AdvantageScale::kLeaveOneOut);
    for (size_t i = begin; i < end; ++i) {
      if (valid[i] == 0)
        EXPECT_EQ(advantages[i - begin], 0.0);
      else  // relative: the rewards of a group have the same magnitude
        EXPECT_NEAR(rewards[i] - advantages[i - begin], want[i], 1e-12 * std::abs(rewards[i]));
    }
  }
}

void check_group_advantages(const Json& truth) {
  expect_near(truth.at("expected").at("advantages"),
              group_advantages(input(truth, "rewards"), 2, AdvantageScale::kGroup),
              truth.at("tolerance").as_double(), "advantages");
}

void check_group_advantages_without_floor(const Json& truth) {
  const Values rewards = input(truth, "rewards");
  ASSERT_EQ(rewards.size(), 2u);
  const double std = std::abs(rewards[1] - rewards[0]) / std::sqrt(2.0);
  expect(truth, "advantages",
         scaled(group_advantages(rewards, 2, AdvantageScale::kGroup), (std + 1e-4) / std));
}

void check_equal_rewards(const Json& truth) {
  for (const auto& [scale, name, factor] : kAdvantageScales)
    EXPECT_EQ(group_advantages(input(truth, "rewards"), 2, scale),
              values(truth.at("expected").at("advantages")));
}

void check_masked_mean(const Json& truth) {
  Values means;
  for (const LossRow& row : loss_rows(truth.at("inputs").at("x"), truth.at("inputs").at("mask")))
    means.push_back(aggregate({row}, LossType::kGrpo, totals_of({row})));
  expect(truth, "out", means);
}

void check_token_mean(const Json& truth) {
  const auto lp = input_rows(truth, "logprobs"), old = input_rows(truth, "old_logprobs"),
             advantages = input_rows(truth, "advantages"), mask = input_rows(truth, "mask");
  StepTotals totals;
  for (const Values& row : mask) {
    totals.sequences += 1;
    for (const double m : row) totals.tokens += m;
  }
  Tokens all;
  double sum_of_rows = 0;
  for (size_t s = 0; s < lp.size(); ++s) {
    Tokens row{lp[s], old[s], advantages[s], mask[s], {}};
    row.weight = scaled(row.weight, token_weight(LossType::kDapo, totals, 1, 1));
    sum_of_rows += policy_loss_of(row, clip_of(truth)).loss;
    all.logprob.insert(all.logprob.end(), row.logprob.begin(), row.logprob.end());
    all.old_logprob.insert(all.old_logprob.end(), row.old_logprob.begin(), row.old_logprob.end());
    all.advantage.insert(all.advantage.end(), row.advantage.begin(), row.advantage.end());
    all.weight.insert(all.weight.end(), row.weight.begin(), row.weight.end());
  }
  const double whole = policy_loss_of(all, clip_of(truth)).loss;
  expect(truth, "loss", whole);
  EXPECT_NEAR(sum_of_rows, whole, 1e-15);
}

void check_token_mean_of_ranks(const Json& truth) {
  const Json& in = truth.at("inputs");
  const auto all = loss_rows(in.at("loss"), in.at("mask"));
  const auto ranks = rows(in.at("ranks"));
  const StepTotals totals = totals_of(all);
  Values rank_losses;
  for (const Values& rank : ranks) {
    std::vector<LossRow> rank_rows;
    for (const double i : rank) rank_rows.push_back(all[static_cast<size_t>(i)]);
    // The case averages over ranks, while our ranks are summed.
    rank_losses.push_back(aggregate(rank_rows, LossType::kDapo, totals) *
                          static_cast<double>(ranks.size()));
  }
  expect(truth, "rank", rank_losses);
  expect(truth, "global_", aggregate(all, LossType::kDapo, totals));
}

void check_token_mean_of_micro_batches(const Json& truth) {
  const Json::Array &losses = truth.at("inputs").at("micro_batches").as_array(),
                    &masks = truth.at("inputs").at("masks").as_array();
  std::vector<std::vector<LossRow>> micro_batches;
  std::vector<LossRow> all;
  for (size_t i = 0; i < losses.size(); ++i) {
    micro_batches.push_back(loss_rows(losses[i], masks[i]));
    all.insert(all.end(), micro_batches[i].begin(), micro_batches[i].end());
  }
  double loss = 0;
  for (const auto& rows : micro_batches) loss += aggregate(rows, LossType::kDapo, totals_of(all));
  expect(truth, "loss", loss);
}

void check_token_sum(const Json& truth) {
  const Json& in = truth.at("inputs");
  const auto all = loss_rows(in.at("loss"), in.at("mask"));
  const StepTotals totals = totals_of(all);
  const double denominator = totals.sequences * static_cast<double>(kMaxLength);
  expect(truth, "loss",
         aggregate(all, LossType::kDrGrpo, totals) * denominator * number(truth, "dp"));
}

void check_sequence_mean(const Json& truth) {
  const Json &in = truth.at("inputs"), &want = truth.at("expected");
  const auto all = loss_rows(in.at("loss"), in.at("mask"));
  const StepTotals totals = totals_of(all);
  if (want.find("valid_sequences")) expect(truth, "valid_sequences", totals.sequences);
  expect(truth, want.find("global_") ? "global_" : "seq_mean",
         aggregate(all, LossType::kGrpo, totals));
}

// ---- Rewards
// ------------------------------------------------------------------------------------------------

namespace {

RewardInput completion_of(std::vector<int32_t> tokens) {
  static const Example example;
  RewardInput in{example, ""};
  in.tokens = std::move(tokens);
  return in;
}
RewardInput completion_of(const Json& length) {
  return completion_of(std::vector<int32_t>(static_cast<size_t>(length.as_int()), 1));
}

}  // namespace

void check_overlong(const Json& truth) {
  const Json& in = truth.at("inputs");
  RewardInput completion = completion_of(in.at("length"));
  completion.max_tokens = in.at("max_len").as_int();
  expect(truth, "reward",
         make_reward({.name = "overlong", .buffer = in.at("cache").as_int()}, nullptr)(completion));
}

void check_overlong_added(const Json& truth) {
  const Json& in = truth.at("inputs");
  const int64_t buffer = in.at("buffer").as_int(), limit = in.at("max_len").as_int();
  const RewardFn overlong = make_reward({.name = "overlong",
                                         .buffer = buffer,
                                         .max_length = limit,
                                         .penalty = number(truth, "penalty")},
                                        nullptr);
  Values rewards = input(truth, "rewards");
  for (size_t i = 0; i < rewards.size(); ++i) {
    const Json& length = in.at("lengths").as_array()[i];
    rewards[i] += overlong(completion_of(length));
    const auto beyond = static_cast<double>(std::max<int64_t>(0, length.as_int() - limit));
    rewards[i] -= number(truth, "penalty") * beyond / static_cast<double>(buffer);
  }
  expect(truth, "rewards", rewards);
}

void check_repetition(const Json& truth) {
  std::vector<int32_t> tokens;
  for (const double id : input(truth, "ids")) tokens.push_back(static_cast<int32_t>(id));
  const RewardConfig config{.name = "repetition",
                            .n = truth.at("inputs").at("ngram").as_int(),
                            .penalty = -number(truth, "max_penalty")};
  expect(truth, "reward", make_reward(config, nullptr)(completion_of(tokens)));
}

void check_cosine(const Json& truth) {
  const Json& in = truth.at("inputs");
  const RewardSet rewards({{.name = "cosine", .correct = "exact_match"}, {.name = "exact_match"}},
                          nullptr);
  const Example problem{.answer = "1"};
  const auto length = static_cast<size_t>(in.at("length").as_int());
  // A prompt of one token, before as many sampled ones as the case has.
  Trajectory completion{.tokens = std::vector<int32_t>(length + 1),
                        .loss_mask = std::vector<uint8_t>(length + 1, 1),
                        .prompt_length = 1,
                        .max_tokens = in.at("max_len").as_int(),
                        .text = in.at("correct").as_bool() ? "1" : "2"};
  completion.loss_mask[0] = 0;
  expect(truth, "reward", rewards.score({&problem, 1}, {&completion, 1}).each[0]);
}

// The tokens that keep their surrogate; padding has none.
void check_entropy_mask(const Json& truth) {
  const auto entropies = input_rows(truth, "entropies"), mask = input_rows(truth, "mask");
  Values counted;
  for (size_t s = 0; s < mask.size(); ++s)
    for (size_t t = 0; t < mask[s].size(); ++t)
      if (mask[s][t] != 0) counted.push_back(entropies[s][t]);
  const double threshold = quantile(counted, number(truth, "quantile"));
  const auto want = rows(truth.at("expected").at("mask"));
  for (size_t s = 0; s < mask.size(); ++s)
    for (size_t t = 0; t < mask[s].size(); ++t)
      EXPECT_EQ(mask[s][t] != 0 && entropies[s][t] >= threshold, want[s][t] != 0) << s << " " << t;
}

void check_nll(const Json& truth) {
  const int64_t tokens = truth.at("inputs").at("tokens").as_int(), vocab = 4;
  const bool right = truth.at("id").as_string() == "nll_right";
  Tensor identity = Tensor::zeros({vocab, vocab}, DType::kF64);
  for (int64_t i = 0; i < vocab; ++i) identity.data<double>()[i * vocab + i] = 1;
  Tensor logits = Tensor::zeros({tokens, vocab}, DType::kF64);
  std::vector<int32_t> targets;
  for (int64_t t = 0; t < tokens; ++t) {
    logits.data<double>()[t * vocab + t] = number(truth, "logit_gap");
    targets.push_back(static_cast<int32_t>(right ? t : t + 1));
  }
  const auto lp = token_log_probs(Variable(logits), Variable(identity), Tensor::from(targets));
  double loss = 0;
  for (const double v : lp.logprob.value().to_vector<double>())
    loss -= v / static_cast<double>(tokens);
  expect(truth, "loss", loss);
}

}  // namespace cohort::test
