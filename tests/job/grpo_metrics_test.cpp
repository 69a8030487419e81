// The metrics of a step, computed anew from its records, under refills, skipped updates,
// whitening, a KL in the reward and a criterion of correctness.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>

#include "tests/job/grpo_step_fixture.h"

namespace cohort::test {
namespace {

constexpr double kNoReward = std::numeric_limits<double>::quiet_NaN();

class GrpoMetrics : public GrpoStepTest {
 protected:
  // The first prompt of the data in place of each.
  auto repeated_first() const {
    return [this](int64_t, std::span<const int64_t> at) {
      return std::vector<Example>(at.size(), data_.train->get(0));
    };
  }
  static std::vector<double> advantages_of(const GrpoStepResult& result) {
    return numbers_of(result.rollouts.groups, &ScoredCompletion::advantage);
  }
};

// Everything about a step with refilled groups that its records tell, computed from them.
TEST_F(GrpoMetrics, MetricsCountAllRoundsOfARefill) {
  const RewardSet rewards({{.name = "format", .pattern = ".*1.*"}}, data_.task);
  config_.grpo.dynamic_sampling_rounds = 3;
  // Keeps what was sampled in each round.
  class Rounds final : public StepJournal {
   public:
    void attach(DialogueOptions&) override {}
    void begin(const cohort::GrpoStep&) override {}
    void add(std::span<Group> groups) override {
      const std::lock_guard lock(mutex);
      for (const ScoredCompletion* c : completions_of(groups)) {
        tokens += static_cast<double>(c->tokens.size());
        rewards_of[c->group].push_back(c->reward);
      }
    }
    void end(const cohort::GrpoStep&, std::span<const Group>) override {}
    std::mutex mutex;
    double tokens = 0;
    std::map<int64_t, std::vector<double>> rewards_of;  // by the address of the prompt
  };
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    Rounds rounds;
    Metrics metrics;
    double kept = 0;
    run_local_ranks(ranks, [&](Communicator& comm) {
      const auto learner = make_learner(comm);
      const GrpoStepResult result =
          make_step(comm, *learner, rewards, {.learning_rate = 1e-2, .journal = &rounds});
      const std::lock_guard lock(rounds.mutex);
      for (const ScoredCompletion* c : completions_of(result.rollouts.groups))
        kept += static_cast<double>(c->tokens.size());
      if (comm.rank() == 0) metrics = result.metrics;
    });
    double solved = 0, failed = 0;
    for (const auto& [prompt, group] : rounds.rewards_of) {
      const auto [lowest, highest] = std::ranges::minmax(group);
      solved += lowest == highest && highest > 0;
      failed += lowest == highest && highest <= 0;
    }
    const auto groups = static_cast<double>(rounds.rewards_of.size());
    ASSERT_GT(groups, 4);  // some were replaced
    EXPECT_EQ(metrics.at("rollout/prompts"), groups);
    EXPECT_EQ(metrics.at("num_tokens"), rounds.tokens);
    EXPECT_GT(rounds.tokens, kept);
    EXPECT_DOUBLE_EQ(metrics.at("frac_groups_solved"), solved / groups);
    EXPECT_DOUBLE_EQ(metrics.at("frac_groups_failed"), failed / groups);
    // The tokens of the groups that are trained on, not those that were replaced.
    if (ranks == 1) {
      EXPECT_NEAR(metrics.at("update/tokens_per_second") * metrics.at("time/update") / kept, 1,
                  1e-9);
    }
  }
}

// The groups that a refill leaves alone are those that the configured advantages tell apart.
TEST_F(GrpoMetrics, ASignalIsAnAdvantageOtherThanZero) {
  const auto run = [&](const RewardSet& rewards, int64_t rounds) {
    config_.grpo.dynamic_sampling_rounds = rounds;
    return make_step(rewards, {.refill = repeated_first()});
  };
  // The rewards of a completion, 1 and 0 or 0 and 1, have the sum 1, and other weighted advantages.
  const RewardSet opposite({{.name = "format", .weight = 1, .pattern = ".*1.*"},
                            {.name = "format", .weight = 1, .pattern = "[^1]*"}},
                           data_.task);
  config_.grpo.multi_objective_aggregation = RewardAggregation::kSumThenNormalize;
  const GrpoStepResult sums = run(opposite, 1);
  EXPECT_EQ(sums.metrics.at("rollout/prompts"), 8);
  EXPECT_EQ(sums.metrics.at("frac_reward_zero_std"), 1);
  const RewardSet weighted(
      {{.name = "format", .weight = 1, .pattern = ".*1.*"}, {.name = "length", .weight = 1e-12}},
      data_.task);
  config_.grpo.multi_objective_aggregation = RewardAggregation::kNormalizeThenSum;
  // Lengths and matches both give advantages, whatever they weigh in the sum of the rewards.
  const GrpoStepResult normalized = run(weighted, 0);
  double zero_signal = 0;
  for (const Group& group : normalized.rollouts.groups) {
    bool differs = false;
    for (const ScoredCompletion& c : group.completions)
      differs |= c.rewards != group.completions[0].rewards;
    zero_signal += !differs;
  }
  EXPECT_EQ(normalized.metrics.at("frac_reward_zero_std"), zero_signal / 4);
  EXPECT_EQ(run(weighted, 1).metrics.at("rollout/prompts"), 4 + zero_signal);
}

// Whitening and a KL in the reward give groups of equal rewards an advantage, too. They have no
// signal all the same: they are counted and replaced.
TEST_F(GrpoMetrics, GroupsOfEqualRewardsHaveNoSignalUnderWhiteningOrAKl) {
  const Transformer reference(config_.model, config_.dtype, 2);
  const RewardSet rewards({{.name = "format", .pattern = ".*1.*"}}, data_.task);
  config_.grpo.scale_rewards = AdvantageScale::kNone;
  const auto run = [&](int64_t rounds) {
    config_.grpo.dynamic_sampling_rounds = rounds;
    return make_step(rewards, {.reference = config_.grpo.beta > 0 ? &reference : nullptr,
                               .refill = repeated_first()});
  };
  const GrpoStepResult plain = run(0);
  const double zero_signal = plain.metrics.at("frac_reward_zero_std");
  ASSERT_GT(zero_signal, 0);
  ASSERT_LT(zero_signal, 1);
  const double drawn = 4 + 4 * zero_signal;
  EXPECT_EQ(run(1).metrics.at("rollout/prompts"), drawn);
  config_.grpo.whiten_advantages = true;
  const GrpoStepResult whitened = run(0);
  EXPECT_EQ(std::ranges::count(advantages_of(whitened), 0.0), 0);
  EXPECT_EQ(whitened.metrics.at("frac_reward_zero_std"), zero_signal);
  EXPECT_EQ(run(1).metrics.at("rollout/prompts"), drawn);
  config_.grpo.whiten_advantages = false;
  config_.grpo.beta = 0.3;
  config_.grpo.kl_in = KlPlace::kReward;
  config_.grpo.kl_estimator = kernels::KlEstimator::kK1;
  const GrpoStepResult penalized = run(0);
  EXPECT_EQ(std::ranges::count(advantages_of(penalized), 0.0), 0);
  EXPECT_EQ(penalized.metrics.at("frac_reward_zero_std"), zero_signal);
  EXPECT_EQ(run(1).metrics.at("rollout/prompts"), drawn);
}

// An update whose gradient is exactly 0 is not made, and no part of the means.
TEST_F(GrpoMetrics, LossAndGradNormAreMeansOverTheUpdatesMade) {
  const auto without = [](size_t begin, size_t end) {
    return [=](std::vector<Group>& groups) {
      for (size_t i = begin; i < end; ++i) set_advantage(*completions_of(groups)[i], 0);
    };
  };
  // The first of the two minibatches is made of the first two groups. The second update is that of
  // a step whose first was not made.
  const Trained first = train(1, without(6, 12));
  EXPECT_EQ(first.metrics.at("num_updates"), 1);
  config_.grpo.num_minibatches = 1;
  config_.batch.prompts_per_step = 2;
  const Trained alone = train(1, without(12, 12));
  EXPECT_EQ(first.metrics.at("loss"), alone.metrics.at("loss"));
  EXPECT_EQ(first.metrics.at("grad_norm"), alone.metrics.at("grad_norm"));
  EXPECT_EQ(first.metrics.at("grad_clipped"), alone.metrics.at("grad_clipped"));
  const Trained none = train(1, without(0, 6));
  EXPECT_EQ(none.metrics.at("num_updates"), 0);
  for (const char* name : {"loss", "grad_norm", "grad_clipped"})
    EXPECT_TRUE(std::isnan(none.metrics.at(name))) << name;
}

// With importance weights a wrong record is a mismatch of the sampler: the weights and masks see it
// after the log-probs are corrected.
TEST_F(GrpoMetrics, ImportanceWeightsCompareTheTrainerWithTheRecord) {
  config_.grpo.num_minibatches = 1;
  config_.grpo.num_iterations = 2;
  double tokens = 0;
  const auto damage = [&](std::vector<Group>& groups) {
    tokens = 0;
    for (const ScoredCompletion* c : completions_of(groups))
      tokens += static_cast<double>(c->completion_length());
    ScoredCompletion& first = groups[0].completions[0];
    for (std::vector<double>* recorded : {&first.logprobs, &first.sampling_logprobs})
      (*recorded)[static_cast<size_t>(first.prompt_length)] -= std::log(1.5);
  };
  for (const auto& [mode, weight] :
       {std::pair{kernels::Importance::kTruncate, 1.5}, {kernels::Importance::kMask, 0.0}}) {
    config_.grpo.importance_weights = mode;
    config_.grpo.importance_min = 0.7;
    config_.grpo.importance_max = mode == kernels::Importance::kMask ? 1.4 : 2;
    const ExpectLog warning("max |ratio - 1| = 0.");
    const Trained corrected = train(1, damage);
    EXPECT_NEAR(corrected.metrics.at("importance_weight"), (tokens - 1 + weight) / tokens, 1e-12);
  }
}

// eval.correct tells solved from failed where rewards are equal, or differ by what does not count.
TEST_F(GrpoMetrics, SolvedAndFailedGroupsAreThoseOfTheCriterion) {
  const double none = kNoReward;
  const std::vector<std::vector<double>> each = {
      {0.1, 0.1, 0.1, 0.1, 0, 0.1, 0, 0, 0, none, none, none},
      {0, 0, 0.25, 1, 0.5, 1, 1, 0, none, 1, none, none}};
  std::vector<double> total = {0.1, 0.1, 0.1, 1.1, 1, 1.1, 1, 0, 0, none, none, none};
  const auto outcomes = [&](const SuccessCriterion& criterion) {
    std::vector<std::optional<int>> out;
    for (size_t g = 0; g < 12; g += 3) {
      Group group;
      for (size_t i = g; i < g + 3; ++i)
        group.completions.push_back({{}, {each[0][i], each[1][i]}, total[i]});
      out.push_back(group_outcome(group, criterion));
    }
    return out;
  };
  using Outcomes = std::vector<std::optional<int>>;
  EXPECT_EQ(outcomes({}), (Outcomes{1, 0, 0, std::nullopt}));
  EXPECT_EQ(outcomes({.reward = 1, .threshold = 0.5}), (Outcomes{-1, 1, 0, 1}));
  EXPECT_EQ(outcomes({.reward = 1, .threshold = 0.75}), (Outcomes{-1, 0, 0, 1}));
  EXPECT_EQ(outcomes({.reward = 0, .threshold = -1}), (Outcomes{1, 1, 1, std::nullopt}));
  // Sums that differ by rounding are equal, as for the advantages.
  total = {0.3, 0.1 + 0.2, 0.3, -0.3, -0.1 - 0.2, -0.3, 1e-300, 0, 0, 1e-12, 0, 0};
  EXPECT_EQ(outcomes({}), (Outcomes{1, -1, -1, 0}));
}

// The metrics of each step, computed anew from the completions that it logs. All completions have
// the reward of the format, but only those with a 1 are correct.
TEST(GrpoRunMetrics, AreThoseOfTheLoggedCompletions) {
  const TempDir dir;
  const ExpectLog random("starts from random weights"), truncated_log("end at the length limit");
  std::string lines;
  for (int i = 0; i < 12; ++i)
    lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"", i % 3, "\"}\n");
  write_file(dir.path("data.jsonl"), lines);
  const std::string run = train_new(
      small_plan(dir, "run",
                 std::string(kSmallModel) + kSmallGrpo +
                     "data: {jsonl: {path: data.jsonl, held_out_fraction: 0}}\n",
                 {"rewards=[{name: format, pattern: '(?s).*', weight: 0.5}, {name: contains}]",
                  "eval={at_start: false, correct: {reward: contains}}", "prompts_per_step=6",
                  "num_generations=3", "num_minibatches=2", "log_completions=18", "steps=8"}));
  std::map<int64_t, std::map<int64_t, std::vector<Json>>> groups_of;  // by step and group
  for (Json& line : json_lines(run + "/completions.jsonl"))
    if (line.find("eval") == nullptr)
      groups_of[line.at("step").as_int()][line.at("group").as_int()].push_back(std::move(line));
  double total_tokens = 0, failed_groups = 0;
  for (const Json& line : json_lines(run + "/metrics.jsonl")) {
    if (line.find("eval") != nullptr) continue;
    SCOPED_TRACE(line.dump());
    double reward = 0, deviation = 0, length = 0, longest = 0, zero_signal = 0, solved = 0,
           failed = 0, truncated = 0, right = 0, tokens = 0;
    const auto& groups = groups_of.at(line.at("step").as_int());
    ASSERT_EQ(groups.size(), 6u);
    for (const auto& [index, group] : groups) {
      ASSERT_EQ(group.size(), 3u);
      double sum = 0, squares = 0, correct = 0;
      for (const Json& c : group) {
        const double r = metric(c, "reward"), n = metric(c, "length");
        const bool has_answer =
            c.at("completion").as_string().find(c.at("answer").as_string()) != std::string::npos;
        EXPECT_EQ(r, 0.5 + has_answer);
        sum += r, squares += r * r, correct += has_answer;
        length += n, longest = std::max(longest, n);
        truncated += c.at("stop_reason").as_string() == "length";
        tokens += n + static_cast<double>(c.at("prompt").as_string().size());
      }
      reward += sum, right += correct;
      deviation += std::sqrt(std::max(0.0, squares - sum * sum / 3) / 2);
      zero_signal += correct == 0 || correct == 3;
      solved += correct == 3;
      failed += correct == 0;
    }
    EXPECT_NEAR(metric(line, "reward"), reward / 18, 1e-12);
    EXPECT_NEAR(metric(line, "rewards/contains/mean"), right / 18, 1e-12);
    EXPECT_NEAR(metric(line, "reward_std"), deviation / 6, 1e-7);
    EXPECT_NEAR(metric(line, "completions/mean_length"), length / 18, 1e-12);
    EXPECT_EQ(metric(line, "completions/max_length"), longest);
    EXPECT_NEAR(metric(line, "completions/clipped_ratio"), truncated / 18, 1e-12);
    EXPECT_NEAR(metric(line, "frac_reward_zero_std"), zero_signal / 6, 1e-12);
    EXPECT_NEAR(metric(line, "frac_groups_solved"), solved / 6, 1e-12);
    EXPECT_NEAR(metric(line, "frac_groups_failed"), failed / 6, 1e-12);
    EXPECT_EQ(metric(line, "num_tokens"), tokens);
    total_tokens += tokens;
    EXPECT_EQ(metric(line, "total_tokens"), total_tokens);
    EXPECT_NEAR(metric(line, "tokens_per_second") * metric(line, "step_time") / tokens, 1, 1e-9);
    failed_groups += failed;
  }
  EXPECT_GT(failed_groups, 0);  // their rewards are equal and above 0
}

}  // namespace
}  // namespace cohort::test
