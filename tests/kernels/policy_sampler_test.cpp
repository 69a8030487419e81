// The policy loss where the policy differs from the distribution that sampled: importance weights,
// trust regions, masks and products over sequences.
#include "tests/kernels/policy_numbers.h"

namespace cohort::kernels {
namespace {

using namespace policy_test;

TEST(PolicyLoss, ImportanceWeightsCompareWithTheDistributionSampledFrom) {
  const Tokens t = {{-1, -1, -1}, {-1, -1, -1}, {}, {1, 1, 1}, {1, 1, 1}};
  const std::vector<double> sampling = {-1.5, -3, -0.7};  // r = e^0.5, e^2, e^-0.3
  const double r[] = {std::exp(0.5), std::exp(2.0), std::exp(-0.3)};
  const auto expect = [&](const PolicyLossDesc& desc, const std::vector<double>& weights) {
    const Result result = run_segments(t, {0, 0, 0}, desc, sampling);
    double sum = 0;
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(result.gradient[i], -weights[i], 1e-15) << i;
      sum += weights[i];
    }
    EXPECT_NEAR(result.stats.importance, sum, 1e-14);
    EXPECT_EQ(result.stats.max_ratio_deviation, 0);
  };
  using enum Importance;
  expect({}, {1, 1, 1});
  expect({.importance = kTruncate, .importance_max = 2}, {r[0], 2, r[2]});
  expect({.importance = kTruncate, .importance_min = 0.9, .importance_max = 2}, {r[0], 2, 0.9});
  expect({.importance = kMask, .importance_min = 0.5, .importance_max = 5}, {r[0], 0, r[2]});
  expect({.importance = kReject, .importance_max = 5}, {1, 0, 1});
  // The mean of the logs is 2.2 / 3; the product of the weights is 9.03, their geometric mean 2.08.
  using enum ImportanceLevel;
  expect({.importance = kReject, .importance_level = kGeometric, .importance_max = 2.1}, {1, 1, 1});
  expect({.importance = kReject, .importance_level = kGeometric, .importance_max = 2}, {0, 0, 0});
  const double product = std::exp(2.2), mean = std::exp(2.2 / 3);
  expect({.importance = kTruncate, .importance_level = kSequence}, {product, product, product});
  expect({.importance = kTruncate, .importance_level = kSequence, .importance_max = 2}, {2, 2, 2});
  expect({.importance = kMask, .importance_level = kSequence, .importance_max = 9}, {0, 0, 0});
  expect({.importance = kMask, .importance_level = kGeometric, .importance_max = 9},
         {mean, mean, mean});
}

// In a later update the surrogate's ratio accounts for the policy's change; REINFORCE has none, so
// that its weight does.
TEST(PolicyLoss, ImportanceWeightsOfLaterUpdates) {
  const Tokens t = {{-0.5}, {-1}, {}, {1}, {1}};
  const PolicyLossDesc wide{
      .epsilon_high = 9, .importance = Importance::kTruncate, .importance_max = 2};
  EXPECT_NEAR(run_segments(t, {0}, wide, {-1.25}).gradient[0], -std::exp(0.5) * std::exp(0.25),
              1e-15);
  PolicyLossDesc reinforce = wide;
  reinforce.surrogate = Surrogate::kReinforce;
  EXPECT_EQ(run_segments(t, {0}, reinforce, {-1.25}).gradient[0], -2);
  EXPECT_NEAR(run_segments(t, {0}, reinforce, {-0.75}).gradient[0], -std::exp(0.25), 1e-15);
  EXPECT_NEAR(run_segments(t, {0}, reinforce).gradient[0], -std::exp(0.5), 1e-15);
}

// Masks compare the old policy with the distribution that was sampled from: they are the same in
// all updates of a step, however far the policy has moved.
TEST(PolicyLoss, MasksAreThoseOfTheFirstUpdate) {
  const std::vector<double> sampling = {-1.25, -1.75, -0.5, -1, -1.2, -0.6};
  const std::vector<int32_t> segments = {0, 0, 1, 1, 2, 2};
  const auto kept = [&](const PolicyLossDesc& desc, double moved) {
    Tokens t{{}, std::vector(6, -1.0), {}, std::vector(6, 1.0), std::vector(6, 1.0)};
    for (const double sign : {1, -1, 1, 1, -1, -1}) t.logprob.push_back(-1 + sign * moved);
    const Result result = run_segments(t, segments, desc, sampling);
    std::vector<bool> out;
    for (const double g : result.gradient) out.push_back(g != 0);
    return out;
  };
  for (const Surrogate surrogate : {Surrogate::kClip, Surrogate::kReinforce})
    for (const double moved : {0.0, 0.1, 0.7, -0.7}) {
      SCOPED_TRACE(moved);
      // exp(lp_old - lp_sampling) is 1.28, 2.12, 0.61, 1, 1.22, 0.67; its geometric means over the
      // sequences are 1.65, 0.78, 0.90. No ratio is clipped.
      PolicyLossDesc desc{.epsilon_low = 1,
                          .epsilon_high = 9,
                          .surrogate = surrogate,
                          .importance = Importance::kMask,
                          .importance_min = 0.65,
                          .importance_max = 2};
      EXPECT_EQ(kept(desc, moved), (std::vector{true, false, false, true, true, true}));
      desc.importance = Importance::kReject;
      desc.importance_level = ImportanceLevel::kGeometric;
      desc.importance_min = 0.85;
      desc.importance_max = 1.5;
      EXPECT_EQ(kept(desc, moved), (std::vector{false, false, false, false, true, true}));
    }
}

// A token of probability p, drawn with probability from: its loss and gradient with the ratio of
// both, or what is left where it has no surrogate.
TEST(PolicyLoss, TrustRegionsByHand) {
  PolicyLossDesc tv{.epsilon_low = 1, .epsilon_high = 1e9, .trust_region = TrustRegion::kTv};
  tv.old_kl_coef = 1e-3;
  PolicyLossDesc kl = tv, ipo = tv;
  kl.trust_region = TrustRegion::kKl, ipo.trust_region = TrustRegion::kIpo;
  kl.trust_low = kl.trust_high = 0.14, ipo.trust_high = 0.1;
  struct Row {
    PolicyLossDesc desc;
    double from, to, advantage, loss, gradient;
    int low = 0, high = 0;
  };
  const auto penalty = [](double from, double to) {
    return 1e-3 * std::pow(std::log(to / from), 2);
  };
  const auto slope = [](double from, double to) { return 2e-3 * std::log(to / from); };
  const auto left = [&](const PolicyLossDesc& desc, double from, double to, double advantage) {
    return Row{desc, from, to, advantage, penalty(from, to), slope(from, to), to<from, to> from};
  };
  const auto kept = [&](const PolicyLossDesc& desc, double from, double to, double advantage) {
    const double surrogate = -advantage * to / from;
    return Row{
        desc, from, to, advantage, surrogate + penalty(from, to), surrogate + slope(from, to)};
  };
  PolicyLossDesc wide = kl;
  wide.trust_low = wide.trust_high = 0.15;  // above the KL of 0.5 and 0.75, 0.1438
  const Row rows[] = {{tv, 0.5, 0.75, 1, 0.00016440, 0.00081093, 0, 1},
                      {tv, 0.5, 0.65, 1, -1.29993116, -1.29947527},
                      {tv, 0.5, 0.75, -1, 1.50016440, 1.50081093},
                      {tv, 0.001, 0.1, 1, -99.97879241, -99.99078966},
                      left(tv, 0.5, 0.25, -1),
                      kept(tv, 0.5, 0.25, 1),
                      left(kl, 0.5, 0.75, 1),
                      kept(kl, 0.5, 0.75, -1),
                      left(kl, 0.5, 0.25, -1),
                      kept(wide, 0.5, 0.75, 1),
                      left(ipo, 0.5, 0.65, 1),
                      left(ipo, 0.5, 0.35, 1),
                      left(ipo, 0.5, 0.65, -1),
                      kept(ipo, 0.5, 0.45, 1)};
  for (const Row& row : rows) {
    SCOPED_TRACE(&row - rows);
    const Result r = run_one(std::log(row.to), std::log(row.from), row.advantage, row.desc);
    EXPECT_NEAR(r.loss, row.loss, 5e-9 * std::fmax(1, std::fabs(row.loss)));
    EXPECT_NEAR(r.gradient[0], row.gradient, 5e-9 * std::fmax(1, std::fabs(row.gradient)));
    EXPECT_EQ(r.stats.clipped_low, row.low);
    EXPECT_EQ(r.stats.clipped_high, row.high);
  }
}

// Probabilities that are rounded above 1 count as 1; a log-prob of NaN stays NaN, and a token
// without an advantage is not counted.
TEST(PolicyLoss, TrustRegionsAtTheEnds) {
  for (const TrustRegion region : {TrustRegion::kTv, TrustRegion::kKl, TrustRegion::kIpo}) {
    const PolicyLossDesc desc{.epsilon_low = 1, .epsilon_high = 1e9, .trust_region = region};
    for (const double one : {0.0, 1e-7})
      for (const auto& [to, from, left] :
           {std::tuple(std::log(0.5), one, true), {one, 0.0, false}}) {
        const Result r = run_one(to, from, -1, desc);
        EXPECT_EQ(r.gradient[0] == 0, left) << static_cast<int>(region) << " " << one;
      }
    EXPECT_TRUE(std::isnan(run_one(NAN, -1, 1, desc).gradient[0]));
    EXPECT_TRUE(std::isnan(run_one(-1, NAN, 1, desc).gradient[0]));
    const Result none = run_one(-3, -0.1, 0, desc);
    EXPECT_EQ(none.stats.clipped_low + none.stats.clipped_high, 0);
  }
}

// The product of a long sequence's weights is bounded, so that the loss is finite.
TEST(PolicyLoss, ProductsOfImportanceWeightsAreClamped) {
  const size_t n = 4000;
  const Tokens t{
      std::vector(n, -1.0), std::vector(n, -1.5), {}, std::vector(n, 1.0), std::vector(n, 1.0)};
  const PolicyLossDesc desc{.surrogate = Surrogate::kReinforce,
                            .importance = Importance::kMask,
                            .importance_level = ImportanceLevel::kSequence,
                            .importance_max = 3};
  for (const double g : run_segments(t, std::vector<int32_t>(n), desc).gradient)
    ASSERT_NEAR(g, -std::exp(20.0), 1e-6);
}

// Sequences with A < 0 whose mean log-prob has fallen below the sampler's by more than the bound.
TEST(PolicyLoss, OffPolicyMaskLeavesOutSequencesWithNegativeAdvantages) {
  const Tokens t{{-1, -3, -1, -3, -1, -1.5},
                 std::vector(6, -1.0),
                 {},
                 {1, 1, -1, -1, -1, -1},
                 std::vector(6, 1.0)};
  const std::vector<int32_t> segments = {0, 0, 1, 1, 2, 2};
  const auto kept = [&](double bound, const std::vector<double>& sampling) {
    const Result r =
        run_segments(t, segments, {.epsilon_low = 1, .off_policy_mask = bound}, sampling);
    std::vector<bool> out;
    for (const double g : r.gradient) out.push_back(g != 0);
    return out;
  };
  EXPECT_EQ(kept(0.9, {}), (std::vector{true, true, false, false, true, true}));
  EXPECT_EQ(kept(1.1, {}), std::vector(6, true));
  const std::vector<double> higher(6, -0.2);  // what the tokens were drawn from
  EXPECT_EQ(kept(0.9, higher), (std::vector{true, true, false, false, false, false}));
}

// phi at W = 1.5, 0.5 and 1, with A of both signs: the product over two tokens.
TEST(PolicyLoss, VespoWeighsByTheProductOfTheSequence) {
  const PolicyLossDesc desc{.surrogate = Surrogate::kVespo};
  for (const auto& [product, advantage, phi] : {std::tuple(1.5, 1.0, 0.50204286),
                                                {0.5, 1.0, 1.12042227},
                                                {1.5, -1.0, 1.24159311},
                                                {0.5, -1.0, 0.33978523},
                                                {1.0, 1.0, 1.0},
                                                {1.0, -1.0, 1.0}}) {
    const double part = 0.3 * std::log(product), rest = 0.7 * std::log(product);
    const Tokens t{{-1 + part, -2 + rest}, {-1, -2}, {}, {advantage, advantage}, {1, 1}};
    const Result r = run_segments(t, {0, 0}, desc);
    for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(r.gradient[i], -advantage * phi, 5e-9);
    EXPECT_NEAR(r.loss, -advantage * phi * (t.logprob[0] + t.logprob[1]), 2e-8);
  }
}

}  // namespace
}  // namespace cohort::kernels
