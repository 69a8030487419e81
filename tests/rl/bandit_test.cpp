// "Emit token k": a policy of V free logits, with reward 1 for token k. Its expected gradient, and
// therefore the learning curve under exact gradient ascent, has a closed form.
//
//   J = p_k,  dJ/dlogits = p_k (e_k - p)
//
// From equal logits, the other logits stay equal, and with d = logit_k - logit_other
//   d <- d + rate p_k (1 - p_k + p_other)
//   p_other = (1 - p_k) / (V - 1),  p_k = 1 / (1 + (V - 1) e^-d)
#include <gtest/gtest.h>

#include <cmath>

#include "rl/grpo_loss.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

constexpr int64_t kActions = 7;
constexpr int32_t kBest = 3;

// One token per action, all with the same logits.
struct Bandit {
  Variable logits = Variable::parameter(Tensor::zeros({1, kActions}, DType::kF64));
  Variable head;
  Tensor actions, row = Tensor::zeros({kActions}, DType::kI32);

  Bandit() {
    Tensor identity = Tensor::zeros({kActions, kActions}, DType::kF64);
    std::vector<int32_t> ids;
    for (int32_t a = 0; a < kActions; ++a) {
      identity.data<double>()[a * kActions + a] = 1;
      ids.push_back(a);
    }
    head = Variable(identity);
    actions = Tensor::from(ids);
  }
  Variable logprobs() const {
    return token_log_probs(embedding(logits, row), head, actions).logprob;
  }
  double best_probability() const {
    return std::exp(logprobs().value().to_vector<double>()[kBest]);
  }
  std::vector<double> gradient() const { return logits.grad().to_vector<double>(); }
  void ascend(double rate) {
    double* z = logits.value().data<double>();
    const auto g = gradient();
    for (size_t a = 0; a < g.size(); ++a) z[a] -= rate * g[a];  // g is the gradient of the loss
  }

  // Gradient of the expected GRPO loss: every action once, weighted by its probability, with the
  // exact mean reward p_k as the baseline.
  void expected_gradient() {
    logits.zero_grad();
    const Variable lp = logprobs();
    std::vector<double> p = lp.value().to_vector<double>(), advantage;
    for (double& x : p) x = std::exp(x);
    for (int32_t a = 0; a < kActions; ++a) advantage.push_back((a == kBest) - p[kBest]);
    PolicyBatch batch;
    batch.targets = actions;
    batch.old_logprob = lp.value().clone();
    batch.advantage = Tensor::from(advantage);
    batch.weight = Tensor::from(p);
    const HeadLoss loss = grpo_loss(embedding(logits, row), head, batch, {}, 1);
    backward(loss.hidden, loss.dhidden);
    ASSERT_EQ(kernels::PolicyLossStats::from(loss.stats).max_ratio_deviation, 0.0);
  }
};

TEST(Bandit, FollowsTheClosedFormStepByStep) {
  const double rate = 2;
  Bandit bandit;
  double d = 0;
  for (int step = 0; step < 200; ++step) {
    const double p = 1 / (1 + (kActions - 1) * std::exp(-d)), other = (1 - p) / (kActions - 1);
    // Both sides round at 1e-16 per step, and ascent contracts the difference.
    ASSERT_NEAR(bandit.best_probability(), p, 1e-13) << "step " << step;
    bandit.expected_gradient();
    bandit.ascend(rate);
    d += rate * p * (1 - p + other);
  }
  EXPECT_GT(bandit.best_probability(), 0.95);
}

TEST(Bandit, GradientIsThatOfTheSuccessProbability) {
  Bandit bandit;
  bandit.logits.value().copy_(test::random_tensor({1, kActions}, DType::kF64, 1));
  const auto lp = bandit.logprobs().value().to_vector<double>();
  bandit.expected_gradient();
  const auto gradient = bandit.gradient();
  for (size_t a = 0; a < lp.size(); ++a) {
    const double want = std::exp(lp[kBest]) * ((a == kBest) - std::exp(lp[a]));
    EXPECT_NEAR(gradient[a], -want, 1e-15);
  }
}

// As the rate goes to 0 the curve is the solution of dp/dt = p^2 (1 - p)^2 V / (V - 1), along which
//   F(p) = 1 / (1 - p) - 1 / p + 2 log(p / (1 - p))
// grows by V / (V - 1) per unit of time. The error of Euler's steps halves with the rate.
TEST(Bandit, SmallRatesFollowTheDifferentialEquation) {
  const auto f = [](double p) { return 1 / (1 - p) - 1 / p + 2 * std::log(p / (1 - p)); };
  const double time = 20, v = kActions;
  double errors[2];
  for (int i = 0; i < 2; ++i) {
    const int steps = 500 << i;
    Bandit bandit;
    for (int step = 0; step < steps; ++step) {
      bandit.expected_gradient();
      bandit.ascend(time / steps);
    }
    errors[i] = f(bandit.best_probability()) - f(1 / v) - time * v / (v - 1);
  }
  EXPECT_LT(std::abs(errors[0]), 0.02 * time);
  EXPECT_NEAR(errors[0] / errors[1], 2, 0.05);
}

// At equal logits a group in which every token occurs once is the expectation. Therefore the whole
// path, from rewards to packed batches, must give the exact gradient, scaled as the advantage is.
TEST(Bandit, OneBalancedGroupThroughTheWholePathIsExact) {
  const double v = kActions;
  const struct {
    AdvantageScale scale;
    double factor;
  } cases[] = {{AdvantageScale::kNone, 1},
               {AdvantageScale::kLeaveOneOut, v / (v - 1)},
               {AdvantageScale::kGroup, 1 / (std::sqrt(1 / v) + 1e-4)}};
  for (const auto& c : cases)
    for (const LossType type :
         {LossType::kGrpo, LossType::kDapo, LossType::kBnpo, LossType::kDrGrpo}) {
      Bandit bandit;
      std::vector<double> rewards(kActions, 0.0);
      rewards[kBest] = 1;
      const auto advantages = group_advantages(rewards, kActions, c.scale);
      const auto lp = bandit.logprobs().value().to_vector<double>();
      std::vector<PolicySequence> sequences;
      for (int32_t a = 0; a < kActions; ++a) {
        const auto i = static_cast<size_t>(a);
        const Trajectory completion{
            .tokens = {0, a}, .loss_mask = {0, 1}, .logprobs = {0, lp[i]}, .prompt_length = 1};
        sequences.push_back(policy_sequence(completion, advantages[i]));
      }
      const PackPolicyDesc desc{.loss_type = type,
                                .totals = count_totals(sequences),
                                .max_completion_length = 1,
                                .micro_batch_tokens = 3,
                                .dtype = DType::kF64};
      for (const PolicyBatch& batch : pack_policy(sequences, desc)) {
        const Variable x =
            select_rows(embedding(bandit.logits, batch.tokens), batch.target_positions);
        backward(x, grpo_loss(x, bandit.head, batch, {}, 1).dhidden);
      }
      const auto gradient = bandit.gradient();
      for (int32_t a = 0; a < kActions; ++a) {
        const double want = c.factor * (1 / v) * ((a == kBest) - 1 / v);
        EXPECT_NEAR(gradient[static_cast<size_t>(a)], -want, 1e-14);
      }
    }
}

}  // namespace
}  // namespace cohort
