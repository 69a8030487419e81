// The losses of preference pairs: hand-computed cases, gradients, and sums over micro batches.
#include "rl/preference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

// Chosen: log-prob -12, reference -13, 4 tokens; rejected: -20, -18, 8 tokens.
constexpr AnswerLogProbs kChosen{-12, -13, 4}, kRejected{-20, -18, 8};

PairTerms terms_of(const PreferenceConfig& config) {
  AnswerLogProbs chosen = kChosen, rejected = kRejected;
  if (config.reference == PairReferenceType::kNone) chosen.reference = rejected.reference = 0;
  return pair_terms(config, chosen, rejected);
}

TEST(PairTerms, AreThoseComputedByHand) {
  const auto expect = [](const PreferenceConfig& config, double loss, double chosen,
                         double rejected) {
    const PairTerms terms = terms_of(config);
    EXPECT_NEAR(terms.loss, loss, 1e-8);
    EXPECT_NEAR(terms.chosen_gradient, chosen, 1e-8);
    EXPECT_NEAR(terms.rejected_gradient, rejected, 1e-8);
  };
  using enum PreferenceLoss;
  expect({}, 0.55435524, -0.04255575, 0.04255575);
  expect({.label_smoothing = 0.1}, 0.58435524, -0.03255575, 0.03255575);
  expect({.loss = kRobust, .label_smoothing = 0.1}, 0.51685524, -0.05505575, 0.05505575);
  expect({.loss = kRobust}, 0.55435524, -0.04255575, 0.04255575);
  expect({.loss = kHinge}, 0.7, -0.1, 0.1);
  expect({.loss = kIpo}, 20.25, -2.25, 1.125);
  expect({.length_normalized = true}, 0.66845965, -0.01218757, 0.01218757 / 2);
  // SimPO.
  expect(
      {.beta = 2, .length_normalized = true, .margin = 0.5, .reference = PairReferenceType::kNone},
      1.70141328, -0.40878724, 0.40878724 / 2);
  // Beyond the margin of the hinge.
  expect({.loss = kHinge, .beta = 1}, 0, 0, 0);
}

// TRL's DPOTrainer: beta times the sums; its CPOTrainer for SimPO: the means.
TEST(PairTerms, RewardsAreSumsAndWithoutAReferenceNormalizedMeans) {
  const auto expect = [](const PreferenceConfig& config, double chosen, double rejected) {
    const PairTerms terms = terms_of(config);
    EXPECT_DOUBLE_EQ(terms.chosen_reward, chosen);
    EXPECT_DOUBLE_EQ(terms.rejected_reward, rejected);
  };
  expect({}, 0.1, -0.2);
  expect({.length_normalized = true}, 0.1, -0.2);
  expect({.reference = PairReferenceType::kNone}, -1.2, -2);
  expect({.length_normalized = true, .reference = PairReferenceType::kNone}, -0.3, -0.25);
}

TEST(PairTerms, OfAPolicyThatIsItsReferenceAreExact) {
  const PreferenceConfig config;
  const AnswerLogProbs chosen{-7.3, -7.3, 3}, rejected{-1e4, -1e4, 9};
  PairSums sums;
  for (int i = 1; i <= 64; ++i) {
    sums.add(pair_terms(config, chosen, rejected), chosen, rejected);
    EXPECT_EQ(sums.mean_loss(config), std::numbers::ln2) << i;
  }
  EXPECT_EQ(sums.chosen_rewards, 0);
  EXPECT_EQ(sums.rejected_rewards, 0);
  EXPECT_EQ(sums.accurate, 0);
}

TEST(PairTerms, AreFiniteForAnyLogProbs) {
  for (const auto loss : {PreferenceLoss::kSigmoid, PreferenceLoss::kRobust})
    for (const double u : {-1e5, 1e5}) {
      const PairTerms terms =
          pair_terms({.loss = loss, .beta = 1, .label_smoothing = 0.25}, {u, 0, 5}, {0, 0, 7});
      EXPECT_TRUE(std::isfinite(terms.loss)) << u;
      EXPECT_TRUE(std::isfinite(terms.chosen_gradient)) << u;
    }
  const PairTerms sure = pair_terms({.beta = 1}, {1e5, 0, 5}, {0, 0, 7});
  EXPECT_EQ(sure.loss, 0);
  EXPECT_EQ(sure.chosen_gradient, 0);
}

// Every combination of choices.
std::vector<PreferenceConfig> all_choices() {
  std::vector<PreferenceConfig> out;
  for (const auto& [loss, name] : kPreferenceLosses)
    for (const bool normalized : {false, true})
      for (const double smoothing : {0.0, 0.2})
        for (const double margin : {0.0, 0.3})
          for (const double sft : {0.0, 0.7})
            for (const auto reference : {PairReferenceType::kStart, PairReferenceType::kNone})
              out.push_back({.loss = loss,
                             .beta = 0.4,
                             .label_smoothing = smoothing,
                             .length_normalized = normalized,
                             .margin = margin,
                             .sft_weight = sft,
                             .reference = reference});
  return out;
}

// Two pairs on hidden states [L, 3] and a head [5, 3].
struct Micro {
  std::vector<int32_t> targets, segments;
  PackedBatch batch() const {
    PackedBatch out;
    out.targets = Tensor::from(targets);
    out.segments = Tensor::from(segments);
    return out;
  }
};
const Micro kBoth{{0, 3, 1, 4, 2, 2, 0, 1, 4}, {0, 0, 0, 1, 1, 2, 3, 3, 3}};
const std::vector<PairReference> kReferences = {{-4.5, -3.1}, {-1.2, -5.5}};

struct PairLoss {
  double value = 0;
  Tensor dhidden, dweight;
  PairSums sums;
};
PairLoss pair_loss_of(const Micro& micro, const Tensor& hidden, const Tensor& weight,
                      const PreferenceConfig& config, std::span<const PairReference> references) {
  std::vector<PairReference> used(references.begin(), references.end());
  if (config.reference == PairReferenceType::kNone) used.assign(used.size(), {});
  const Variable h = Variable::parameter(hidden.clone()), w = Variable::parameter(weight.clone());
  PairLoss out;
  const HeadLoss loss = preference_loss(h, w, micro.batch(), used, {config, 2, 4}, out.sums);
  out.value = loss.loss.item();
  out.dhidden = loss.dhidden;
  out.dweight = w.grad();
  return out;
}

TEST(PreferenceLoss, GradientsOfEveryChoiceAreDifferenceQuotients) {
  const Tensor hidden = random_tensor({9, 3}, DType::kF64, 1),
               weight = random_tensor({5, 3}, DType::kF64, 2);
  constexpr double kStep = 1e-5;  // error: 1e-10 from the cube of the step, 1e-11 from rounding
  for (const PreferenceConfig& config : all_choices()) {
    const PairLoss at = pair_loss_of(kBoth, hidden, weight, config, kReferences);
    EXPECT_NEAR(at.value, at.sums.mean_loss(config), 1e-14);
    const auto check = [&](const Tensor& point, const Tensor& gradient, bool is_hidden) {
      const std::vector<double> expected = gradient.to_vector<double>();
      for (size_t i = 0; i < expected.size(); ++i) {
        double values[2];
        for (const int sign : {0, 1}) {
          Tensor moved = point.clone();
          moved.data<double>()[i] += sign == 0 ? -kStep : kStep;
          values[sign] = pair_loss_of(kBoth, is_hidden ? moved : hidden, is_hidden ? weight : moved,
                                      config, kReferences)
                             .value;
        }
        ASSERT_NEAR((values[1] - values[0]) / (2 * kStep), expected[i], 1e-7)
            << static_cast<int>(config.loss) << " " << config.length_normalized << " "
            << config.sft_weight << " element " << i;
      }
    };
    check(hidden, at.dhidden, true);
    check(weight, at.dweight, false);
  }
}

// 1e-14: rounding of f64 sums of a few numbers near 1.
TEST(PreferenceLoss, MicroBatchesAddUp) {
  const Tensor hidden = random_tensor({9, 3}, DType::kF64, 1),
               weight = random_tensor({5, 3}, DType::kF64, 2);
  const Micro first{{0, 3, 1, 4, 2}, {0, 0, 0, 1, 1}}, second{{2, 0, 1, 4}, {0, 1, 1, 1}};
  for (const PreferenceConfig& config : all_choices()) {
    const PairLoss whole = pair_loss_of(kBoth, hidden, weight, config, kReferences);
    const std::span<const PairReference> references = kReferences;
    const PairLoss a = pair_loss_of(first, hidden.narrow(0, 0, 5), weight, config,
                                    references.first(1)),
                   b = pair_loss_of(second, hidden.narrow(0, 5, 4), weight, config,
                                    references.last(1));
    EXPECT_NEAR(a.value + b.value, whole.value, 1e-14);
    const auto da = a.dweight.to_vector<double>(), db = b.dweight.to_vector<double>(),
               all = whole.dweight.to_vector<double>();
    for (size_t i = 0; i < all.size(); ++i) EXPECT_NEAR(da[i] + db[i], all[i], 1e-14);
    EXPECT_EQ(a.sums.pairs + b.sums.pairs, whole.sums.pairs);
    EXPECT_NEAR(a.sums.excess + b.sums.excess, whole.sums.excess, 1e-14);
  }
}

TEST(PreferenceLoss, AnAnswerWithoutTargetsIsAnError) {
  const Micro micro{{0, 3}, {0, 0}};
  EXPECT_THROW_WITH(
      pair_loss_of(micro, random_tensor({2, 3}, DType::kF64, 1),
                   random_tensor({5, 3}, DType::kF64, 2), {}, {kReferences.data(), 1}),
      Error, "pair 0 has an answer without targets");
}

TEST(PreferenceConfig, KeysThatContradictEachOtherAreRefused) {
  EXPECT_THROW_WITH(PreferenceConfig{.reference = PairReferenceType::kBase}.validate(false),
                    InputError, "preference.reference: base is the model without adapters");
  PreferenceConfig{.reference = PairReferenceType::kBase}.validate(true);
  EXPECT_THROW_WITH(PreferenceConfig{.label_smoothing = 0.5}.validate(false), InputError,
                    "with half of the labels swapped nothing can be learned");
}

TEST(PreferenceConfig, KeysWithoutAnEffectAreNamed) {
  const auto warned = [](const PreferenceConfig& config) { return join(config.warnings(), " "); };
  using enum PreferenceLoss;
  EXPECT_EQ(warned({}), "");
  EXPECT_EQ(warned({.label_smoothing = 0.1, .length_normalized = true, .margin = 1}), "");
  EXPECT_NE(warned({.loss = kHinge, .label_smoothing = 0.1}).find("preference.label_smoothing: "),
            std::string::npos);
  EXPECT_NE(warned({.loss = kIpo, .margin = 1}).find("preference.margin: "), std::string::npos);
  EXPECT_NE(
      warned({.loss = kIpo, .length_normalized = true}).find("preference.length_normalized: "),
      std::string::npos);
  EXPECT_NE(warned({.loss = kRobust}).find("preference.loss: robust is sigmoid"),
            std::string::npos);
}

}  // namespace
}  // namespace cohort::test
