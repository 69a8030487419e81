#include "tests/kernels/policy_numbers.h"

namespace cohort::kernels {
namespace {

using namespace test;
using namespace policy_test;

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

// The loss and the gradient of a token as the clip and k3 define them, in the kernel's order of
// operations.
std::pair<double, double> clip_and_k3(const Tokens& t, size_t i, const PolicyLossDesc& desc) {
  const double ratio = std::exp(t.logprob[i] - t.old[i]), a = t.advantage[i];
  const double low = 1 - desc.epsilon_low, high = 1 + desc.epsilon_high;
  double loss = -a * ratio, gradient = -a * ratio;
  if (a < 0 && ratio < low) loss = -a * low, gradient = 0;
  if (a > 0 && ratio > high) loss = -a * high, gradient = 0;
  const double x = t.ref[i] - t.logprob[i], slope = std::expm1(x);
  return {t.weight[i] * (loss + desc.beta * (slope - x)),
          t.weight[i] * (gradient + -desc.beta * slope)};
}

TEST(PolicyLoss, DefaultsAreClipAndK3ToTheBit) {
  const Tokens t = random_tokens(500);
  for (const double beta : {0.0, 0.05}) {
    const PolicyLossDesc desc{.epsilon_low = 0.2, .epsilon_high = 0.28, .beta = beta};
    const Result r = run(t, desc);
    double loss = 0;
    for (size_t i = 0; i < t.logprob.size(); ++i) {
      const auto [value, gradient] = clip_and_k3(t, i, desc);
      loss += value;
      EXPECT_EQ(r.gradient[i], gradient) << i;
    }
    EXPECT_EQ(r.loss, loss);
  }
}

constexpr PolicyLossDesc kVariants[] = {
    {.epsilon_low = 0.2, .epsilon_high = 0.28, .beta = 0.05},
    {.dual_clip = 1.4},
    {.delta = 1.3},
    {.surrogate = Surrogate::kCispo},
    {.surrogate = Surrogate::kReinforce},
    {.surrogate = Surrogate::kSapo, .tau_pos = 1.5, .tau_neg = 4},
    {.beta = 0.5, .kl = KlEstimator::kK1},
    {.beta = 0.5, .kl = KlEstimator::kK2},
    {.beta = 0.5, .kl = KlEstimator::kK1, .kl_unbiased = true},
    {.beta = 0.5, .kl = KlEstimator::kK2, .kl_unbiased = true},
    {.beta = 0.5, .kl = KlEstimator::kK3, .kl_unbiased = true},
};

// Token i with its log-prob moved by h, as a function whose derivative the gradient is: the weight
// of CISPO is constant, and the unbiased KL is weighted by the ratio.
double moved_loss(const Tokens& t, size_t i, double h, const PolicyLossDesc& desc) {
  const double lp = t.logprob[i] + h, a = t.advantage[i], w = t.weight[i];
  const double old = t.old[i] + (desc.surrogate == Surrogate::kCispo ? h : 0);
  if (!desc.kl_unbiased) return run({{lp}, {old}, {t.ref[i]}, {a}, {w}}, desc).loss;
  return run({{lp}, {old}, {}, {a}, {w}}, {}).loss +
         run({{lp}, {old}, {t.ref[i]}, {0}, {w * std::exp(lp - old)}}, desc).loss;
}

TEST(PolicyLoss, GradientIsTheDerivative) {
  const Tokens t = random_tokens(200);
  const double h = 1e-3;
  for (const PolicyLossDesc& desc : kVariants) {
    SCOPED_TRACE(&desc - kVariants);
    const Result r = run(t, desc);
    for (size_t i = 0; i < t.logprob.size(); ++i) {
      // Away from the kinks at the clip bounds.
      const double ratio = std::exp(t.logprob[i] - t.old[i]);
      const auto is_near = [&](double bound) { return std::fabs(ratio - bound) < 0.01; };
      if (is_near(1 - desc.epsilon_low) || is_near(1 + desc.epsilon_high) ||
          is_near(desc.dual_clip) || is_near(desc.delta))
        continue;
      const auto moved = [&](double by) { return moved_loss(t, i, by, desc); };
      const double numeric =
          (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h);
      EXPECT_NEAR(r.gradient[i], numeric, 1e-6 * std::fabs(numeric) + 1e-9);
    }
    const bool clips =
        std::ranges::find(kSurrogates, desc.surrogate, &SurrogateEntry::value)->clips;
    EXPECT_EQ(r.stats.clipped_low + r.stats.clipped_high > 10, clips);
    EXPECT_EQ(r.stats.tokens, 200);
  }
  for (const SurrogateEntry& entry : kSurrogates) {
    if (entry.value == Surrogate::kVespo) continue;  // for sequences: a test of its own
    EXPECT_NE(std::ranges::find(kVariants, entry.value, &PolicyLossDesc::surrogate),
              std::end(kVariants))
        << "kVariants has no row for " << entry.name;
  }
}

TEST(PolicyLoss, AtRatioOneEverySurrogateHasTheGradientOfReinforce) {
  Tokens t = random_tokens(300);
  t.old = t.logprob;
  for (const PolicyLossDesc& desc : kVariants) {
    if (desc.beta > 0) continue;
    const Result r = run(t, desc);
    for (size_t i = 0; i < t.logprob.size(); ++i)
      EXPECT_EQ(r.gradient[i], t.weight[i] * -t.advantage[i]) << i;
    EXPECT_EQ(r.stats.max_ratio_deviation, 0);
    EXPECT_EQ(r.stats.clipped_low + r.stats.clipped_high, 0);
  }
}

// Rows computed by hand: a token with log-prob -1/2. kGate is the sigmoid of 1, kSlope four times
// its derivative there.
struct SurrogateRow {
  PolicyLossDesc desc;
  double ratio, advantage, loss, gradient;
  int low = 0, high = 0;
};

TEST(PolicyLoss, SurrogatesByHand) {
  constexpr double kGate = 0.73105857863000487, kSlope = 0.78644773296592741;
  const PolicyLossDesc dual{.dual_clip = 3}, two_sided{.delta = 2},
      cispo{.surrogate = Surrogate::kCispo},
      upper{.epsilon_low = 1, .epsilon_high = 4, .surrogate = Surrogate::kCispo},
      reinforce{.surrogate = Surrogate::kReinforce},
      sapo{.surrogate = Surrogate::kSapo, .tau_neg = 2};
  const SurrogateRow rows[] = {
      {dual, 10, -2, 6, 0, 0, 1},
      {dual, 2, -2, 4, 4},
      {dual, 10, 2, -2.4, 0, 0, 1},
      {dual, 0.5, -2, 1.6, 0, 1, 0},
      {two_sided, 10, -2, 4, 0, 0, 1},
      {two_sided, 1.5, -2, 3, 3},
      {two_sided, 10, 2, -2.4, 0, 0, 1},
      {two_sided, 0.5, 2, -1, -1},
      {cispo, 2, 2, 1.2, -2.4, 0, 1},
      {cispo, 2, -2, -1.2, 2.4, 0, 1},
      {cispo, 0.5, 2, 0.8, -1.6, 1, 0},
      {cispo, 1.1, 2, 1.1, -2.2},
      {upper, 0.1, 2, 0.1, -0.2},
      {upper, 9, 2, 5, -10, 0, 1},
      {reinforce, 2, 2, 1, -2},
      {reinforce, 0.1, -2, -1, 2},
      {sapo, 2, 2, -2 * 4 * kGate, -2 * 2 * kSlope},
      {sapo, 0.5, -1, 4 / 2.0 * (1 - kGate), 0.5 * kSlope},
      {sapo, 1, 2, -2 * 4 * 0.5, -2},
  };
  for (const SurrogateRow& row : rows) {
    SCOPED_TRACE(&row - rows);
    const Result r = run_one(-0.5, -0.5 - std::log(row.ratio), row.advantage, row.desc);
    EXPECT_NEAR(r.loss, row.loss, 1e-13);
    EXPECT_NEAR(r.gradient[0], row.gradient, 1e-13);
    EXPECT_EQ(r.stats.clipped_low, row.low);
    EXPECT_EQ(r.stats.clipped_high, row.high);
  }
  // Far from ratio 1 SAPO has no gradient where A > 0, and none beyond the clamp.
  for (const double log_ratio : {19.0, 30.0, -30.0})
    EXPECT_NEAR(run_one(-0.5, -0.5 - log_ratio, 1, sapo).gradient[0], 0, 1e-12) << log_ratio;
}

struct KlRow {
  KlEstimator estimator;
  bool unbiased;
  double ratio, x, value, gradient;
};

TEST(PolicyLoss, KlEstimatesByHand) {
  using enum KlEstimator;
  const double root = std::exp(0.5);
  const KlRow rows[] = {
      {kK1, false, 2, 0.5, -0.5, 1},
      {kK1, false, 1, -30, 30, 1},
      {kK1, false, 1, 25, -20, 0},
      {kK2, false, 2, 0.5, 0.125, -0.5},
      {kK2, false, 1, -30, 450, 30},
      {kK2, false, 1, 25, 200, 0},
      {kK3, false, 2, 0.5, root - 1.5, 1 - root},
      {kK1, true, 2, 0.5, -0.5, 2 * (-0.5 + 1)},
      {kK2, true, 2, 0.5, 0.125, 2 * (0.125 - 0.5)},
      {kK3, true, 2, 0.5, root - 1.5, 2 * -0.5},  // k3 + dk3 = -x
  };
  for (const KlRow& row : rows) {
    SCOPED_TRACE(&row - rows);
    const PolicyLossDesc desc{.beta = 0.1, .kl = row.estimator, .kl_unbiased = row.unbiased};
    const Result r = run({{-1}, {-1 - std::log(row.ratio)}, {-1 + row.x}, {0}, {3}}, desc);
    EXPECT_NEAR(r.loss, 0.3 * row.value, 1e-13);
    EXPECT_NEAR(r.gradient[0], 0.3 * row.gradient, 1e-14);
  }
}

// The mean over all tokens, sampled with the old policy's probabilities, of the gradient with
// respect to the logits of a softmax.
std::vector<double> mean_kl_gradient(const std::vector<double>& old, const std::vector<double>& p,
                                     const std::vector<double>& ref, KlEstimator kl,
                                     bool unbiased) {
  Tokens t;
  for (size_t v = 0; v < p.size(); ++v) {
    t.logprob.push_back(std::log(p[v])), t.old.push_back(std::log(old[v]));
    t.ref.push_back(std::log(ref[v])), t.advantage.push_back(0), t.weight.push_back(old[v]);
  }
  const Result r = run(t, {.beta = 1, .kl = kl, .kl_unbiased = unbiased});
  std::vector<double> out(p.size(), 0.0);
  for (size_t v = 0; v < p.size(); ++v)
    for (size_t j = 0; j < p.size(); ++j) out[j] += r.gradient[v] * ((v == j) - p[j]);
  return out;
}

TEST(PolicyLoss, WhatTheGradientsOfTheKlEstimatesEstimate) {
  using enum KlEstimator;
  const std::vector<double> old = {0.5, 0.3, 0.2}, p = {0.2, 0.2, 0.6}, ref = {0.1, 0.6, 0.3};
  double kl = 0;
  for (size_t v = 0; v < p.size(); ++v) kl += p[v] * std::log(p[v] / ref[v]);
  for (size_t j = 0; j < p.size(); ++j) {
    const double reverse = p[j] * (std::log(p[j] / ref[j]) - kl), forward = p[j] - ref[j];
    EXPECT_NEAR(mean_kl_gradient(p, p, ref, kK1, false)[j], 0, 1e-15);
    EXPECT_NEAR(mean_kl_gradient(p, p, ref, kK2, false)[j], reverse, 1e-15);
    EXPECT_NEAR(mean_kl_gradient(p, p, ref, kK3, false)[j], forward, 1e-15);
    EXPECT_NEAR(mean_kl_gradient(old, p, ref, kK1, true)[j], reverse, 1e-15);
    EXPECT_NEAR(mean_kl_gradient(old, p, ref, kK3, true)[j], reverse, 1e-15);
  }
}

// Tokens of two sequences with a weight of 1 over the tokens of each.
Tokens two_sequences() {
  return {{-1, -0.5, -2, -0.25, -3},
          {-1.5, -0.25, -2.75, -0.5, -2},
          {},
          {2, 2, 2, -3, -3},
          {1.0 / 3, 1.0 / 3, 1.0 / 3, 0.5, 0.5}};
}
// The log-ratios are 0.5, -0.25, 0.75 with the mean 1/3, and 0.25, -1 with the mean -3/8.
TEST(PolicyLoss, RatioOfASequenceIsTheGeometricMean) {
  const PolicyLossDesc desc{
      .epsilon_low = 0.5, .epsilon_high = 0.5, .level = RatioLevel::kSequence};
  const double first = std::exp(1.0 / 3), second = std::exp(-0.375);
  const Result r = run_segments(two_sequences(), {0, 0, 0, 1, 1}, desc);
  EXPECT_NEAR(r.loss, -2 * first + 3 * second, 1e-14);
  for (const size_t t : {0, 1, 2}) EXPECT_NEAR(r.gradient[t], -2 * first / 3, 1e-15);
  for (const size_t t : {3, 4}) EXPECT_NEAR(r.gradient[t], 3 * second / 2, 1e-15);
  // Deviations and the KL are those of the tokens.
  EXPECT_NEAR(r.stats.max_ratio_deviation, std::exp(0.75) - 1, 1e-15);
  // With bounds between the ratios of tokens and those of sequences, whole sequences are clipped.
  const Result clipped =
      run_segments(two_sequences(), {0, 0, 0, 1, 1},
                   {.epsilon_low = 0.3, .epsilon_high = 0.3, .level = RatioLevel::kSequence});
  EXPECT_EQ(clipped.stats.clipped_high, 3);
  EXPECT_EQ(clipped.stats.clipped_low, 2);
  EXPECT_NEAR(clipped.loss, -2 * 1.3 + 3 * 0.7, 1e-14);
  EXPECT_EQ(clipped.gradient, (std::vector<double>(5, 0)));
}

// learn.md's case: lp - lp_old of (0.1, 0.6, -0.5), of which GMPO clips 0.6 where A > 0 and -0.5
// where A < 0.
TEST(PolicyLoss, RatioOfClippedTokensIsTheirGeometricMean) {
  const PolicyLossDesc desc{.epsilon_low = 0.4, .epsilon_high = 0.4, .level = RatioLevel::kClipped};
  const auto run = [&](double a) {
    return run_segments(
        {{-1, -1, -1}, {-1.1, -1.6, -0.5}, {}, {a, a, a}, {1.0 / 3, 1.0 / 3, 1.0 / 3}}, {0, 0, 0},
        desc);
  };
  const auto expect = [](const Result& r, double loss, const std::vector<double>& gradient) {
    EXPECT_NEAR(r.loss, loss, 1e-8);
    for (size_t t = 0; t < 3; ++t) EXPECT_NEAR(r.gradient[t], gradient[t], 1e-8) << t;
  };
  const Result up = run(1), down = run(-1);
  expect(up, -1, {-1.0 / 3, 0, -1.0 / 3});
  EXPECT_EQ(up.stats.clipped_high, 1);
  expect(down, 1.10517092, {0.36839030, 0.36839030, 0});
  EXPECT_EQ(down.stats.clipped_low, 1);
  EXPECT_EQ(up.stats.clipped_low + down.stats.clipped_high, 0);
  expect(run(0), 0, {0, 0, 0});
  // A token without an advantage is no part of the ratio.
  const Result masked = run_segments(
      {{-1, -1, -1}, {-1.1, -4, -1.3}, {}, {1, 0, 1}, {0.5, 0.5, 0.5}}, {0, 0, 0}, desc);
  EXPECT_NEAR(masked.loss, -std::exp(0.2), 1e-15);
  EXPECT_EQ(masked.gradient[1], 0);
}

// A token of weight 0 is no part of its sequence's mean, whatever it holds.
TEST(PolicyLoss, MeansOfSequencesLeaveTokensOfWeightZeroOut) {
  const PolicyLossDesc desc{.level = RatioLevel::kSequence};
  const Tokens t = two_sequences();
  Tokens padded = t;
  for (std::vector<double>* v : {&padded.logprob, &padded.old, &padded.advantage})
    v->insert(v->begin() + 1, NAN);
  padded.weight.insert(padded.weight.begin() + 1, 0);
  const Result plain = run_segments(t, {0, 0, 0, 1, 1}, desc),
               with_padding = run_segments(padded, {0, 0, 0, 0, 1, 1}, desc);
  EXPECT_EQ(plain.loss, with_padding.loss);
  EXPECT_EQ(with_padding.gradient[1], 0);
  EXPECT_EQ(with_padding.gradient[2], plain.gradient[1]);
}

TEST(PolicyLoss, EntropyIsSubtractedWithTheWeightOfTheToken) {
  const Tensor lp = Tensor::from(std::vector<double>{-1, -2, NAN}),
               one = Tensor::from(std::vector<double>{1, 1, 1}),
               weight = Tensor::from(std::vector{0.5, 0.25, 0.0});
  Tensor loss = Tensor::empty({1}, DType::kF64), gradient = Tensor::empty_like(lp),
         dentropy = Tensor::full({3}, NAN, DType::kF64), stats = PolicyLossStats::zeros();
  policy_loss({.loss = loss,
               .dlogprob = gradient,
               .stats = stats,
               .logprob = lp,
               .old_logprob = lp,
               .ref_logprob = {},
               .advantage = one,
               .weight = weight,
               .desc = {.entropy_coef = 0.1},
               .entropy = Tensor::from(std::vector<double>{2, 3, NAN}),
               .dentropy = dentropy});
  EXPECT_NEAR(loss.item(), -0.75 - 0.1 * (0.5 * 2 + 0.25 * 3), 1e-15);
  EXPECT_EQ(dentropy.to_vector<double>(), (std::vector<double>{-0.1 * 0.5, -0.1 * 0.25, -0.0}));
  EXPECT_EQ(gradient.to_vector<double>(), (std::vector<double>{-0.5, -0.25, 0}));
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
  for (const PolicyLossDesc& desc : kVariants) {
    const std::vector<double> ones = {1, 1, 1}, minus = {-1, -1, -1};
    const Result r = run({{-1, NAN, -1}, minus, minus, ones, ones}, desc);
    EXPECT_TRUE(std::isnan(r.loss));
    EXPECT_TRUE(std::isnan(r.stats.max_ratio_deviation));
    // That of REINFORCE does not depend on the log-prob.
    EXPECT_EQ(std::isnan(r.gradient[1]), desc.surrogate != Surrogate::kReinforce);
  }
}

TEST(PolicyLoss, NoTokensGiveZero) {
  const Result r = run(Tokens{}, {});
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
