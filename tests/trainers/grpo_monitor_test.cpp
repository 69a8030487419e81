// Warnings of GRPO runs that go wrong: each is given once, with its reason, and none for a run that
// learns.
#include "trainers/grpo_monitor.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/rng.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

struct Numbers {
  double reward = 0.5, zero_variance = 0.2, entropy = 1, clip_low = 0, clip_high = 0, truncated = 0;
  double highest = 1.1, lowest = 0, context = 0;
  double length = 100, kl = 0.01, grad_norm = 1, score = std::numeric_limits<double>::quiet_NaN();
  double score_error = 0, score_step = std::numeric_limits<double>::quiet_NaN();
  double kl_old = 0, learning_rate = 1e-6;
};

class Monitor : public testing::Test {
 protected:
  // The warnings of one step.
  static std::vector<std::string> observe(GrpoMonitor& monitor, const Numbers& n) {
    return monitor.observe({{"reward", n.reward},
                            {"reward_max", n.highest},
                            {"reward_min", n.lowest},
                            {"completions/context_ratio", n.context},
                            {"frac_reward_zero_std", n.zero_variance},
                            {"clip_ratio/low", n.clip_low},
                            {"clip_ratio/high", n.clip_high},
                            {"entropy", n.entropy},
                            {"completions/clipped_ratio", n.truncated},
                            {"completions/mean_length", n.length},
                            {"kl", n.kl},
                            {"kl_old", n.kl_old},
                            {"learning_rate", n.learning_rate},
                            {"grad_norm", n.grad_norm}},
                           {n.score, n.score_error, n.score_step});
  }
  // Pairs of a step from 0 and a warning.
  using Warnings = std::vector<std::pair<int, std::string>>;
  Warnings observe_all(const std::function<Numbers(int)>& numbers, int steps) {
    GrpoMonitor monitor(config_, {});
    Warnings out;
    for (int i = 0; i < steps; ++i)
      for (const std::string& warning : observe(monitor, numbers(i))) out.emplace_back(i, warning);
    return out;
  }
  void expect_one(const Warnings& warnings, const std::string& text) {
    ASSERT_EQ(warnings.size(), 1u) << (warnings.empty() ? "" : warnings.back().second);
    EXPECT_NE(warnings[0].second.find(text), std::string::npos) << warnings[0].second;
    EXPECT_NE(warnings[0].second.find("hint: "), std::string::npos);
  }
  GrpoConfig config_;
};

TEST_F(Monitor, HasNoWarningForARunThatLearns) {
  const auto warnings = observe_all(
      [](int i) {
        const double t = i / 50.0, noise = 0.03 * std::sin(7.0 * i);
        return Numbers{.reward = std::min(1.1, 0.3 + t) + noise,
                       .zero_variance = std::min(0.9, t),
                       .entropy = 0.5 * std::exp(-3 * t),
                       .clip_low = 0.02,
                       .clip_high = 0.02,
                       .truncated = 0.1};
      },
      60);
  EXPECT_TRUE(warnings.empty()) << warnings[0].second;
}

// The collapse of GRPO at a learning rate for pretraining: from 0.89 to 0.09 in 20 steps.
TEST_F(Monitor, RewardThatCollapses) {
  const auto warnings =
      observe_all([](int i) { return Numbers{.reward = std::max(0.09, 0.89 - 0.05 * i)}; }, 40);
  expect_one(warnings, "the reward has collapsed: ");
  EXPECT_LT(warnings[0].first, 20);
  const auto negative =
      observe_all([](int i) { return Numbers{.reward = i < 8 ? -1.0 : -3.0}; }, 30);
  expect_one(negative, "after -1 at best");
}

TEST_F(Monitor, NoiseAroundASmallRewardIsNoCollapse) {
  EXPECT_TRUE(
      observe_all([](int i) { return Numbers{.reward = 0.02 + 0.02 * std::sin(2.4 * i)}; }, 200)
          .empty());
}

TEST_F(Monitor, EntropyThatCollapses) {
  const auto falling = [](double reward) {
    return [reward](int i) { return Numbers{.reward = reward, .entropy = i < 6 ? 0.8 : 0.02}; };
  };
  expect_one(observe_all(falling(0.5), 30), "the entropy has collapsed to");
  EXPECT_TRUE(observe_all(falling(1.05), 30).empty());  // solved
}

TEST_F(Monitor, ZeroVarianceGroups) {
  const auto zero_variance = [](double reward) {
    return [reward](int) { return Numbers{.reward = reward, .zero_variance = 1}; };
  };
  const auto hard = observe_all(zero_variance(0), 25);
  expect_one(hard, "no group has a signal for 10 steps");
  EXPECT_EQ(hard[0].first, 9);
  EXPECT_NE(hard[0].second.find("hint: easier problems"), std::string::npos);
  expect_one(observe_all(zero_variance(1.1), 25), "train on harder ones");
  EXPECT_TRUE(observe_all([](int i) { return Numbers{.zero_variance = i % 10 == 9 ? 0.9 : 1}; }, 60)
                  .empty());
}

TEST_F(Monitor, FewGroupsWithASignal) {
  const auto warnings = observe_all([](int) { return Numbers{.zero_variance = 0.95}; }, 25);
  expect_one(warnings, "fewer than 10 % of the groups have a signal for 10 steps");
  EXPECT_EQ(warnings[0].first, 9);
  // Some groups had one until the step of the warning.
  expect_one(observe_all([](int i) { return Numbers{.zero_variance = i < 9 ? 0.95 : 1}; }, 25),
             "fewer than 10 % of the groups have a signal for 10 steps");
}

// A spike is over 10 times the median of at least 10 earlier steps.
TEST_F(Monitor, SpikesOfTheGradientNormAndTheKl) {
  const auto spike = [](int at, double factor) {
    return [=](int i) { return Numbers{.grad_norm = i == at ? factor : 1 + 0.5 * (i % 2)}; };
  };
  const auto warnings = observe_all(spike(30, 15.1), 40);
  expect_one(warnings, "grad_norm is 15.1, over 10 times its median of the last 30 steps");
  EXPECT_EQ(warnings[0].first, 30);
  EXPECT_TRUE(observe_all(spike(30, 9.9), 40).empty());
  EXPECT_TRUE(observe_all(spike(9, 100), 40).empty());
  expect_one(observe_all([](int i) { return Numbers{.kl = i == 20 ? 0.2 : 0.01}; }, 40),
             "kl is 0.2");
  EXPECT_TRUE(observe_all([](int i) { return Numbers{.kl = i < 20 ? 0.0 : 0.2}; }, 40).empty());
}

TEST_F(Monitor, LengthsThatDoubleOrHalve) {
  const auto ramp = [](double last) {
    return [=](int i) { return Numbers{.length = 100 + (last - 100) * std::min(1.0, i / 20.0)}; };
  };
  expect_one(observe_all(ramp(320), 40), "mean length has doubled within 20 steps");
  expect_one(observe_all(ramp(30), 40), "mean length has halved within 20 steps");
  EXPECT_TRUE(observe_all(ramp(150), 40).empty());
  // From 6 to 16 tokens is no more than noise.
  EXPECT_TRUE(observe_all([](int i) { return Numbers{.length = 6 + std::min(10.0, i / 2.0)}; }, 40)
                  .empty());
  // As much, but over 200 steps.
  EXPECT_TRUE(observe_all([](int i) { return Numbers{.length = 100.0 + i}; }, 200).empty());
}

TEST_F(Monitor, LowEntropyWithAFlatReward) {
  const auto flat = [](double slope) {
    return [=](int i) { return Numbers{.reward = 0.4 + slope * i, .entropy = 0.04}; };
  };
  expect_one(observe_all(flat(0), 40), "the reward has not moved for 20 steps");
  EXPECT_TRUE(observe_all(flat(0.002), 40).empty());
}

TEST_F(Monitor, RewardsThatRiseWhileEvaluationsFall) {
  // Every tenth step has an evaluation.
  const auto run = [](double reward_slope, std::vector<double> scores) {
    return [=](int i) {
      return Numbers{.reward = 0.3 + reward_slope * i,
                     .score = scores[std::min(static_cast<size_t>(i / 10), scores.size() - 1)],
                     .score_step = i / 10.0 < 5 ? i / 10 : 4.0};
    };
  };
  const std::vector<double> falling = {0.5, 0.6, 0.55, 0.52, 0.5};
  const auto warnings = observe_all(run(0.005, falling), 60);
  expect_one(warnings, "three evaluations in a row were lower than the one before (0.6 to 0.5)");
  EXPECT_EQ(warnings[0].first, 40);
  EXPECT_TRUE(observe_all(run(-0.001, falling), 60).empty());
  EXPECT_TRUE(observe_all(run(0.005, {0.5, 0.6, 0.55, 0.56, 0.5}), 60).empty());
}

// 500 steps of 64 completions, with an evaluation on `problems` problems every tenth step. `chance`
// and `reward` are the means at a step.
std::vector<Numbers> drawn_run(uint64_t seed, int problems,
                               const std::function<double(int)>& chance,
                               const std::function<double(int)>& reward) {
  Rng rng(seed, rng_stream(kTestPurpose, 7));
  const auto fraction = [&](int n, double p) {
    int hits = 0;
    for (int i = 0; i < n; ++i) hits += rng.uniform() < p;
    return static_cast<double>(hits) / n;
  };
  std::vector<Numbers> out;
  Numbers n;
  for (int i = 0; i < 500; ++i) {
    n.reward = fraction(64, reward(i));
    if (i % 10 == 0) {
      n.score = fraction(problems, chance(i));
      n.score_error = std::sqrt(n.score * (1 - n.score) / (problems - 1));
      n.score_step = i;
    }
    out.push_back(n);
  }
  return out;
}

// In runs that neither learn nor forget, three evaluations in a row fall again and again.
using MonitorSlow = Monitor;
TEST_F(MonitorSlow, NoiseIsNoOverfitting) {
  const auto warned = [&](int problems, const std::function<double(int)>& chance,
                          const std::function<double(int)>& reward) {
    int runs = 0;
    for (uint64_t seed = 0; seed < 200; ++seed) {
      const std::vector<Numbers> run = drawn_run(seed, problems, chance, reward);
      const Warnings warnings =
          observe_all([&](int i) { return run[static_cast<size_t>(i)]; }, 500);
      for (const auto& [step, text] : warnings)
        EXPECT_NE(text.find("three evaluations in a row"), std::string::npos) << text;
      runs += !warnings.empty();
    }
    return runs;
  };
  const auto flat = [](int) { return 0.5; };
  const auto rising = [](int i) { return 0.2 + 0.001 * i; };
  const auto overfits = [](int i) { return std::clamp(0.5 - 0.004 * (i - 150), 0.1, 0.5); };
  // Each of the 47 windows of a run is judged, so a few runs in a hundred meet all conditions.
  EXPECT_LE(warned(100, flat, flat), 12);
  EXPECT_LE(warned(100, flat, rising), 40);
  EXPECT_GE(warned(512, overfits, rising), 180);
}

// The mean of the last two evaluations must be two standard errors below that of the two before:
// 0.065 against 2 x 0.5 x sqrt(4 x error^2).
TEST_F(Monitor, AFallOfLessThanTwoStandardErrorsIsNoOverfitting) {
  const auto run = [](double error, std::vector<double> scores) {
    return [=](int i) {
      const size_t evaluation = std::min(static_cast<size_t>(i / 10), scores.size() - 1);
      return Numbers{.reward = 0.3 + 0.005 * i,
                     .score = scores[evaluation],
                     .score_error = error,
                     .score_step = static_cast<double>(evaluation)};
    };
  };
  const std::vector<double> falling = {0.5, 0.6, 0.55, 0.52, 0.5};
  expect_one(observe_all(run(0.032, falling), 60), "three evaluations in a row");
  EXPECT_TRUE(observe_all(run(0.033, falling), 60).empty());
  // An equal score in between is an evaluation, too; one of unknown error says nothing.
  EXPECT_TRUE(observe_all(run(0, {0.5, 0.6, 0.55, 0.55, 0.52, 0.52, 0.5}), 80).empty());
  EXPECT_TRUE(observe_all(run(std::nan(""), falling), 60).empty());
}

// The KL to the reference grows with the fourth power of the steps of a warm-up.
TEST_F(Monitor, AKlThatGrowsInWarmUpIsNoSpike) {
  const auto numbers = [](int warmup) {
    return [=](int i) {
      const double moved = i < warmup ? i * i / 2.0 : warmup * (i - warmup / 2.0);
      return Numbers{.kl = 1e-7 * moved * moved,
                     .learning_rate = 1e-6 * std::min(1.0, (i + 1.0) / warmup)};
    };
  };
  for (const int warmup : {1, 10, 20, 50}) {
    const auto warnings = observe_all(numbers(warmup), 150);
    EXPECT_TRUE(warnings.empty()) << warmup << " " << warnings[0].second;
  }
  const auto spike = observe_all(
      [&](int i) {
        Numbers n = numbers(20)(i);
        if (i == 60) n.kl *= 100;
        return n;
      },
      150);
  expect_one(spike, "kl is ");
  EXPECT_EQ(spike[0].first, 60);
}

TEST_F(Monitor, EntropyThatExplodes) {
  const auto rising = [](double first, double last) {
    return [=](int i) { return Numbers{.entropy = i < 6 ? first : last}; };
  };
  expect_one(observe_all(rising(0.5, 4), 30), "the entropy has exploded to");
  EXPECT_TRUE(observe_all(rising(0.5, 1.2), 30).empty());  // exploration
  EXPECT_TRUE(observe_all(rising(3, 4.5), 30).empty());
  config_.entropy_coef = 0.01;
  expect_one(observe_all(rising(0.5, 4), 30), "a smaller entropy_coef");
}

// Bounds of sequences clip many tokens of a healthy run, and some losses have no bounds.
TEST_F(Monitor, LossesWithoutBoundsOfTokensAreJudgedByTheKl) {
  const auto numbers = [](double clipped, double kl_old) {
    return [=](int) { return Numbers{.clip_high = clipped, .kl_old = kl_old}; };
  };
  EXPECT_TRUE(observe_all(numbers(0, 0.2), 20).empty());  // the clip bounds it
  config_.importance_sampling_level = kernels::RatioLevel::kSequence;
  EXPECT_TRUE(observe_all(numbers(0.4, 0.001), 20).empty());
  expect_one(observe_all(numbers(0.4, 0.2), 20), "the KL of the policy to the one that sampled is");
  config_.importance_sampling_level = kernels::RatioLevel::kToken;
  for (const auto surrogate : {kernels::Surrogate::kSapo, kernels::Surrogate::kReinforce}) {
    config_.surrogate = surrogate;
    expect_one(observe_all(numbers(0, 0.2), 20), "is 0.2 nats per token");
  }
}

TEST_F(Monitor, ClippedRatiosAndLengthsAtTheLimit) {
  expect_one(observe_all([](int) { return Numbers{.clip_low = 0.03, .clip_high = 0.03}; }, 20),
             "the ratios of 6 % of the tokens are clipped");
  expect_one(observe_all([](int) { return Numbers{.truncated = 0.4}; }, 20),
             "40 % of the completions end at the length limit");
}

// A hint suggests no key that is set already, and none that would have no effect.
TEST_F(Monitor, HintsSuggestKeysThatHaveAnEffect) {
  const auto has = [](const Warnings& warnings, const std::string& text) {
    return !warnings.empty() && warnings[0].second.find(text) != std::string::npos;
  };
  const auto truncated = [](int) { return Numbers{.truncated = 0.5}; };
  EXPECT_TRUE(has(observe_all(truncated, 9), "mask_truncated_completions: true"));
  config_.mask_truncated_completions = true;
  EXPECT_FALSE(has(observe_all(truncated, 9), "mask_truncated_completions"));
  const auto falling = [](int i) { return Numbers{.entropy = i < 6 ? 0.8 : 0.01}; };
  EXPECT_TRUE(has(observe_all(falling, 30), "the entropy has collapsed"));
  EXPECT_FALSE(has(observe_all(falling, 30), "epsilon_high"));  // one update a step
  config_.num_minibatches = 2;
  EXPECT_TRUE(has(observe_all(falling, 30), "epsilon_high: 0.28"));
  config_.surrogate = kernels::Surrogate::kSapo;  // has no bounds
  EXPECT_FALSE(has(observe_all(falling, 30), "epsilon_high"));
  config_.surrogate = kernels::Surrogate::kClip;
  config_.epsilon_high = 0.28;
  EXPECT_FALSE(has(observe_all(falling, 30), "epsilon_high"));
  config_.epsilon_high.reset();
  config_.epsilon = 0.3;  // is the upper bound, too
  EXPECT_FALSE(has(observe_all(falling, 30), "epsilon_high"));
  config_.epsilon = 3e-4;  // ratios of sequences are close to 1
  config_.importance_sampling_level = kernels::RatioLevel::kSequence;
  EXPECT_FALSE(has(observe_all(falling, 30), "epsilon_high"));
}

TEST_F(Monitor, CompletionsThatAreAllMaskedMakeNoUpdate) {
  config_.mask_truncated_completions = true;
  const auto warnings = observe_all(
      [](int) { return Numbers{.zero_variance = 1, .truncated = 0.75, .context = 0.25}; }, 25);
  ASSERT_EQ(warnings.size(), 3u);  // the length limit and the context, too
  EXPECT_EQ(warnings[2].first, 9);
  EXPECT_EQ(warnings[2].second.find("no update has been made for 10 steps: all completions are"),
            0u);
  EXPECT_EQ(warnings[2].second.find("mask_truncated_completions: true"), std::string::npos);
}

TEST_F(Monitor, CompletionsThatFillTheContext) {
  expect_one(observe_all([](int) { return Numbers{.context = 0.4}; }, 20),
             "40 % of the completions end where the model's context is full");
}

// The best reward is the largest observed one, or pass@1; not the sum of weights.
TEST_F(Monitor, TheBestRewardIsTheLargestObserved) {
  const auto zero_variance = [](double reward, double lowest, double highest) {
    return [=](int) {
      return Numbers{.reward = reward, .zero_variance = 1, .highest = highest, .lowest = lowest};
    };
  };
  expect_one(observe_all(zero_variance(30, 0, 30), 25), "train on harder ones");
  expect_one(observe_all(zero_variance(-1, -8, -1), 25), "train on harder ones");
  expect_one(observe_all(zero_variance(1.1, 0, 5), 25), "hint: easier problems");
  expect_one(observe_all(zero_variance(1.1, 1.1, 1.1), 25), "hint: easier problems");
  GrpoMonitor monitor(config_, {});
  std::vector<std::string> all;
  for (int i = 0; i < 12; ++i)
    for (std::string& warning : monitor.observe({{"reward", 1.1},
                                                 {"frac_reward_zero_std", 1},
                                                 {"clip_ratio/low", 0},
                                                 {"clip_ratio/high", 0},
                                                 {"entropy", 1},
                                                 {"completions/clipped_ratio", 0}},
                                                {.value = 0.95}))
      all.push_back(std::move(warning));
  ASSERT_EQ(all.size(), 1u);
  EXPECT_NE(all[0].find("train on harder ones"), std::string::npos) << all[0];
}

TEST_F(Monitor, ARecurringProblemIsWarnedOfAgain) {
  const auto warnings =
      observe_all([](int i) { return Numbers{.truncated = i / 15 % 2 == 0 ? 0.5 : 0.0}; }, 60);
  EXPECT_EQ(warnings.size(), 2u);
}

// Steps without any reward or measurement neither cause nor suppress a warning.
TEST_F(Monitor, MissingMeasurementsAreIgnored) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(
      observe_all([](int) { return Numbers{kNaN, kNaN, kNaN, kNaN, kNaN, kNaN}; }, 30).empty());
}

TEST_F(Monitor, ResumesFromItsStateAsIfNotInterrupted) {
  const auto numbers = [](int i) {
    return Numbers{.reward = i < 12 ? 0.9 : 0.1,
                   .zero_variance = i > 20 ? 1.0 : 0.0,
                   .entropy = i < 14 ? 1.0 : 0.02,
                   .truncated = 0.5,
                   .length = i < 10 ? 100.0 : 250.0,
                   .grad_norm = i == 30 ? 20.0 : 1.0,
                   .score = 0.5 - i / 10 * 0.01,
                   .score_step = i / 10 * 1.0};
  };
  std::vector<std::string> whole, resumed;
  GrpoMonitor uninterrupted(config_, {});
  Json state;
  for (int i = 0; i < 40; ++i) {
    for (const std::string& w : observe(uninterrupted, numbers(i))) whole.push_back(str(i, w));
    GrpoMonitor restored(config_, state);
    for (const std::string& w : observe(restored, numbers(i))) resumed.push_back(str(i, w));
    state = parse_json(restored.state().dump(), "state");
  }
  EXPECT_EQ(whole.size(), 6u);
  EXPECT_EQ(resumed, whole);
}

// Version 0.1.0 and later ones wrote windows beside the numbers, with a short and a long one of the
// reward, and called a diagnostic otherwise.
TEST_F(Monitor, ResumesFromTheStateOfEarlierVersions) {
  const auto values = [](int count, double value) {
    return Json::Array(static_cast<size_t>(count), Json(value));
  };
  Json state;
  state.set("best_reward", 0.9).set("best_deviation", 0.0).set("first_entropy", 1.0);
  state.set("zero_signal_steps", 40).set("reward", values(5, 0.5)).set("rewards", values(25, 0.5));
  state.set("truncated", values(5, 0.5)).set("lengths", values(25, 100));
  state.set("grad_norms", values(50, 1)).set("faults", Json::Array{"silent", "truncated"});
  GrpoMonitor monitor(config_, state);
  const Numbers same{.zero_variance = 1, .truncated = 0.5};
  EXPECT_TRUE(observe(monitor, same).empty());
  Numbers spike = same;
  spike.grad_norm = 20;
  for (const double kl : {0.01, 0.02}) {  // the second follows a step without an update
    spike.kl = kl;
    const std::vector<std::string> warnings = observe(monitor, spike);
    ASSERT_EQ(warnings.size(), 1u);
    EXPECT_NE(warnings[0].find("grad_norm is 20, over 10 times"), std::string::npos);
    Numbers none = same;
    none.grad_norm = std::nan("");
    EXPECT_TRUE(observe(monitor, none).empty());
  }
}

}  // namespace
}  // namespace cohort::test
