#include "tests/support/policy_loss_call.h"

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

struct Tokens {
  std::vector<double> logprob, old, ref, advantage, weight;
};

struct Result {
  double loss;
  std::vector<double> gradient;
  PolicyLossStats stats;
};

Result run(const Tokens& t, const PolicyLossDesc& desc, DType dtype = DType::kF64) {
  const auto tensor = [&](const std::vector<double>& v) { return Tensor::from(v).to(dtype); };
  const auto n = static_cast<int64_t>(t.logprob.size());
  Tensor loss = Tensor::full({1}, NAN, dtype), dlogprob = Tensor::full({n}, NAN, dtype);
  Result result{};
  Tensor stats = PolicyLossStats::zeros();
  policy_loss({loss, dlogprob, stats, tensor(t.logprob), tensor(t.old),
               t.ref.empty() ? Tensor() : tensor(t.ref), tensor(t.advantage), tensor(t.weight),
               desc});
  result.loss = loss.item();
  result.stats = PolicyLossStats::from(stats);
  result.gradient = dlogprob.to_vector<double>();
  return result;
}

Result run_one(double logprob, double old, double advantage, const PolicyLossDesc& desc = {}) {
  return run({{logprob}, {old}, {}, {advantage}, {1}}, desc);
}

TEST(PolicyLoss, OnPolicyItIsReinforce) {
  const Result r = run({{-1, -2.5, -0.1}, {-1, -2.5, -0.1}, {}, {1, -2, 0}, {0.5, 0.25, 0.25}}, {});
  EXPECT_EQ(r.loss, -0.5 * 1 + 0.25 * 2);
  EXPECT_EQ(r.gradient, (std::vector<double>{-0.5, 0.5, 0}));
  EXPECT_EQ(r.stats.tokens, 3);
  EXPECT_EQ(r.stats.max_ratio_deviation, 0);
  EXPECT_EQ(r.stats.kl_to_old, 0);
  EXPECT_EQ(r.stats.clipped_low + r.stats.clipped_high, 0);
  EXPECT_EQ(r.stats.kl_to_reference, 0);
}

// The four corners of the clip: it takes effect only where it makes the objective worse.
TEST(PolicyLoss, ClipTakesEffectOnTheSideThatWouldGain) {
  const PolicyLossDesc desc{.epsilon_low = 0.1, .epsilon_high = 0.3};
  const double up = std::log(1.5), down = std::log(0.5);
  const Result high = run_one(up, 0, 2, desc);
  EXPECT_NEAR(high.loss, -2 * 1.3, 1e-15);
  EXPECT_EQ(high.gradient[0], 0);
  EXPECT_EQ(high.stats.clipped_high, 1);
  EXPECT_EQ(high.stats.clipped_low, 0);
  const Result low = run_one(down, 0, -2, desc);
  EXPECT_NEAR(low.loss, 2 * 0.9, 1e-15);
  EXPECT_EQ(low.gradient[0], 0);
  EXPECT_EQ(low.stats.clipped_low, 1);
  EXPECT_EQ(low.stats.clipped_high, 0);
  const Result free_up = run_one(up, 0, -2, desc), free_down = run_one(down, 0, 2, desc);
  EXPECT_NEAR(free_up.loss, 3, 1e-14);
  EXPECT_NEAR(free_up.gradient[0], 3, 1e-14);
  EXPECT_NEAR(free_down.loss, -1, 1e-15);
  EXPECT_NEAR(free_down.gradient[0], -1, 1e-15);
  for (const Result& r : {free_up, free_down})
    EXPECT_EQ(r.stats.clipped_low + r.stats.clipped_high, 0);
  EXPECT_NEAR(high.stats.max_ratio_deviation, 0.5, 1e-15);
}

// As max and clamp in PyTorch: at the bound both branches are equal and the gradient flows.
TEST(PolicyLoss, GradientFlowsExactlyAtTheBound) {
  const double ratio = std::exp(0.25);
  const Result high = run_one(0.25, 0, 1, {.epsilon_high = ratio - 1});
  ASSERT_EQ(1 + (ratio - 1), ratio);
  EXPECT_EQ(high.gradient[0], -ratio);
  EXPECT_EQ(high.stats.clipped_high, 0);
  const double small = std::exp(-0.25);
  const Result low = run_one(-0.25, 0, -1, {.epsilon_low = 1 - small});
  ASSERT_EQ(1 - (1 - small), small);
  EXPECT_EQ(low.gradient[0], small);
  EXPECT_EQ(low.stats.clipped_low, 0);
}

TEST(PolicyLoss, LogRatioIsClampedAndItsGradientStops) {
  const Result far = run_one(30, 0, -1);
  EXPECT_EQ(far.loss, std::exp(20.0));
  EXPECT_EQ(far.gradient[0], 0);
  const Result at = run_one(20, 0, -1);
  EXPECT_EQ(at.gradient[0], std::exp(20.0));
  const Result below = run_one(-30, 0, 1);
  EXPECT_EQ(below.loss, -std::exp(-20.0));
  EXPECT_EQ(below.gradient[0], 0);
}

// The formula of k3 has three roundings of numbers up to 1.5.
constexpr double kRounding = 4e-16;

TEST(PolicyLoss, PenaltyIsK3OfTheReference) {
  const PolicyLossDesc desc{.beta = 0.1};
  const Result r = run({{-1}, {-1}, {-1.5}, {0}, {2}}, desc);
  const double k3 = std::exp(-0.5) + 0.5 - 1;
  EXPECT_NEAR(r.loss, 2 * 0.1 * k3, kRounding);
  EXPECT_NEAR(r.gradient[0], 2 * 0.1 * (1 - std::exp(-0.5)), kRounding);
  EXPECT_NEAR(r.stats.kl_to_reference, k3, kRounding);
  // Measured, but not part of the loss, if beta is 0.
  const Result measured = run({{-1}, {-1}, {-1.5}, {0}, {2}}, {});
  EXPECT_EQ(measured.loss, 0);
  EXPECT_EQ(measured.gradient[0], 0);
  EXPECT_NEAR(measured.stats.kl_to_reference, k3, kRounding);
  const Result clamped = run({{0}, {0}, {25}, {0}, {1}}, desc);
  EXPECT_NEAR(clamped.loss, 0.1 * (std::exp(20.0) - 21), 1e-6);
  EXPECT_EQ(clamped.gradient[0], 0);
}

// The gradient is largest for the largest deviation from the reference.
TEST(PolicyLoss, PenaltyHasNoLowerClamp) {
  const double x = -30, beta = 0.1;
  const Result r = run({{-1}, {-1}, {-1 + x}, {0}, {1}}, {.beta = beta});
  EXPECT_DOUBLE_EQ(r.gradient[0], beta * (1 - std::exp(x)));
  EXPECT_DOUBLE_EQ(r.loss, beta * (std::exp(x) - x - 1));
  EXPECT_DOUBLE_EQ(r.stats.kl_to_reference, std::exp(x) - x - 1);
}

// A token with probability 1/4 under the old policy and 1/2 under the policy: the estimate of
// KL(old || policy) is 2 - log 2 - 1. With the arguments reversed it would be 1/2 + log 2 - 1.
TEST(PolicyLoss, KlToOldIsThatOfTheOldPolicysSamples) {
  const double half = std::log(0.5), quarter = std::log(0.25);
  EXPECT_NEAR(run_one(half, quarter, 0).stats.kl_to_old, 2 - std::log(2.0) - 1, kRounding);
  EXPECT_NEAR(run_one(quarter, half, 0).stats.kl_to_old, 0.5 + std::log(2.0) - 1, kRounding);
  // It grows without bound below 0, and stays constant above 20.
  EXPECT_DOUBLE_EQ(run_one(-41, -1, 0).stats.kl_to_old, std::exp(-40.0) + 40 - 1);
  EXPECT_DOUBLE_EQ(run_one(-1, -41, 0).stats.kl_to_old, std::expm1(20.0) - 20);
}

// Over all tokens with the old policy's probabilities the estimate is the divergence itself.
TEST(PolicyLoss, KlToOldIsUnbiased) {
  const std::vector<double> old = {0.5, 0.3, 0.2}, now = {0.2, 0.2, 0.6};
  double estimate = 0, exact = 0;
  for (size_t v = 0; v < old.size(); ++v) {
    const double lp_old = std::log(old[v]), lp = std::log(now[v]);
    estimate += old[v] * run_one(lp, lp_old, 0).stats.kl_to_old;
    exact += old[v] * (lp_old - lp);
  }
  EXPECT_NEAR(estimate, exact, 1e-15);
}

Tokens random_tokens(int64_t n) {
  const auto values = [&](uint64_t seed, double scale) {
    return random_tensor({n}, DType::kF64, seed, scale).to_vector<double>();
  };
  Tokens t{values(1, 0.3), values(2, 0.3), values(3, 0.3), values(4, 1), values(5, 1)};
  for (double& w : t.weight) w = std::fabs(w);
  return t;
}

TEST(PolicyLoss, GradientIsTheDerivative) {
  const PolicyLossDesc desc{.epsilon_low = 0.2, .epsilon_high = 0.28, .beta = 0.05};
  const Tokens t = random_tokens(200);
  const Result r = run(t, desc);
  const double h = 1e-3;
  for (size_t i = 0; i < t.logprob.size(); ++i) {
    // Away from the kinks at the clip bounds.
    const double ratio = std::exp(t.logprob[i] - t.old[i]);
    if (std::fabs(ratio - 0.8) < 0.01 || std::fabs(ratio - 1.28) < 0.01) continue;
    const auto shifted = [&](double by) {
      const Tokens one{
          {t.logprob[i] + by}, {t.old[i]}, {t.ref[i]}, {t.advantage[i]}, {t.weight[i]}};
      return run(one, desc).loss;
    };
    const double numeric =
        (8 * (shifted(h) - shifted(-h)) - (shifted(2 * h) - shifted(-2 * h))) / (12 * h);
    EXPECT_NEAR(r.gradient[i], numeric, 1e-6 * std::fabs(numeric) + 1e-9);
  }
  EXPECT_GT(r.stats.clipped_low + r.stats.clipped_high, 10);
  EXPECT_EQ(r.stats.tokens, 200);
}

TEST(PolicyLoss, F32FollowsF64) {
  const PolicyLossDesc desc{.beta = 0.05};
  Tokens t = random_tokens(500);
  for (std::vector<double>* v : {&t.logprob, &t.old, &t.ref, &t.advantage, &t.weight})
    for (double& x : *v) x = static_cast<float>(x);
  const Result a = run(t, desc, DType::kF32), b = run(t, desc);
  EXPECT_NEAR(a.loss, b.loss, 1e-7 * std::fabs(b.loss));
  EXPECT_LE(relative_error(Tensor::from(a.gradient), Tensor::from(b.gradient)), 1e-7);
  EXPECT_EQ(a.stats.clipped_low, b.stats.clipped_low);
  EXPECT_EQ(a.stats.kl_to_old, b.stats.kl_to_old);
}

TEST(PolicyLoss, TokensOfWeightZeroMayHoldAnything) {
  const Tokens clean{{-1, -2}, {-1.1, -2}, {-1, -2.2}, {1, -1}, {0.5, 0.25}};
  Tokens padded{{NAN, -1, 1e30, -2},
                {0, -1.1, NAN, -2},
                {NAN, -1, 0, -2.2},
                {1, 1, NAN, -1},
                {0, 0.5, 0, 0.25}};
  const PolicyLossDesc desc{.beta = 0.1};
  const Result a = run(clean, desc), b = run(padded, desc);
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(b.gradient, (std::vector<double>{0, a.gradient[0], 0, a.gradient[1]}));
  EXPECT_FALSE(std::signbit(b.gradient[0]));
  EXPECT_EQ(b.stats.tokens, 2);
  EXPECT_EQ(a.stats.max_ratio_deviation, b.stats.max_ratio_deviation);
  EXPECT_EQ(a.stats.kl_to_reference, b.stats.kl_to_reference);
}

TEST(PolicyLoss, NaNInAWeightedTokenShows) {
  const Result r = run({{-1, NAN, -1}, {-1, -1, -1}, {}, {1, 1, 1}, {1, 1, 1}}, {});
  EXPECT_TRUE(std::isnan(r.loss));
  EXPECT_TRUE(std::isnan(r.gradient[1]));
  EXPECT_TRUE(std::isnan(r.stats.max_ratio_deviation));
}

TEST(PolicyLoss, NoTokensGiveZero) {
  const Result r = run({}, {});
  EXPECT_EQ(r.loss, 0);
  EXPECT_EQ(r.stats.tokens, 0);
}

TEST(PolicyLoss, StatsAccumulateOverCalls) {
  const Tensor old = Tensor::from(std::vector<double>{0, 0}),
               one = Tensor::from(std::vector{1.0, 1.0});
  Tensor loss = Tensor::zeros({1}, DType::kF64), gradient = Tensor::zeros(old.shape(), old.dtype());
  Tensor total = PolicyLossStats::zeros();
  for (const double shift : {0.5, 0.1}) {  // one clipped, then one not
    const Tensor lp = Tensor::from(std::vector{shift, 0.0});
    policy_loss({loss, gradient, total, lp, old, {}, one, one, {}});
  }
  const PolicyLossStats stats = PolicyLossStats::from(total);
  EXPECT_EQ(stats.tokens, 4);
  EXPECT_EQ(stats.clipped_high, 1);
  EXPECT_EQ(stats.max_ratio_deviation, std::fabs(std::exp(0.5) - 1));
  EXPECT_NEAR(stats.kl_to_old, std::exp(0.5) + std::exp(0.1) - 0.6 - 2, 2e-15);
  // A NaN is kept.
  for (const double lp : {double{NAN}, 0.0})
    policy_loss({loss, gradient, total, Tensor::from(std::vector{0.0, lp}), old, {}, one, one, {}});
  EXPECT_TRUE(std::isnan(PolicyLossStats::from(total).max_ratio_deviation));
}

TEST(PolicyLoss, SaysWhatIsWrong) {
  EXPECT_THROW_WITH(run({{-1}, {-1}, {}, {1}, {1}}, {.beta = 0.1}), Error,
                    "no reference log-probs");
  EXPECT_THROW_WITH(run({{-1}, {-1, -2}, {}, {1}, {1}}, {}), Error, "expected old_logprob f64[1]");
  EXPECT_THROW_WITH(run({{-1, -1}, {-1, -1}, {}, {1, 1}, {1, -1}}, {}), Error, "-1 at token 1");
}

}  // namespace
}  // namespace cohort::kernels
