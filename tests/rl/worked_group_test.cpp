// The worked group of docs/grpo.md, computed by the functions of the trainer.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <numeric>

#include "kernels/policy_token.h"
#include "rl/policy_batch.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

std::string digits(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4f", value);
  return text;
}

kernels::TokenLoss surrogate_of(double ratio, double advantage) {
  kernels::PolicyLossDesc desc;
  desc.epsilon_low = desc.epsilon_high = 0.2;
  kernels::PolicyLossStats stats;
  return kernels::surrogate({std::log(ratio), 0, advantage}, desc, stats);
}

TEST(WorkedGroup, HasTheDigitsOfTheDocument) {
  const std::string page = test::read_file(
      (std::filesystem::path(__FILE__).parent_path() / "../../docs/grpo.md").string());
  const std::vector<double> rewards{1.1, 0.1, 0, 0};
  const std::vector<int64_t> lengths{5, 3, 8, 4};
  const std::vector<double> a = group_advantages(rewards, 4, AdvantageScale::kGroup);
  const StepTotals totals{.sequences = 4, .tokens = 20};
  double loss = 0, grpo = 0;
  for (size_t i = 0; i < rewards.size(); ++i) {
    const double weight = token_weight(LossType::kDapo, totals, lengths[i], 48),
                 part = surrogate_of(1, a[i]).loss * weight * static_cast<double>(lengths[i]);
    EXPECT_NE(page.find("| " + digits(a[i]) + " | " + digits(part) + " |"), std::string::npos)
        << digits(a[i]) << " " << digits(part);
    loss += part;
    grpo -= a[i] * token_weight(LossType::kGrpo, totals, lengths[i], 48) *
            static_cast<double>(lengths[i]);
  }
  EXPECT_NEAR(grpo, 0, 1e-12);
  const double up = a[0] * 0.05, down = -a[2] * 0.05;
  for (const std::string& text :
       {" = " + digits(reward_std(rewards)) + ". The advantage", "   " + digits(loss) + ". It says",
        "= " + digits(up) + " per unit", "= " + digits(down) + ".",
        "= " + digits(surrogate_of(1.3, a[0]).loss) + ", times 0.05"})
    EXPECT_NE(page.find(text), std::string::npos) << text;
  EXPECT_EQ(surrogate_of(1.3, a[0]).gradient, 0);
  EXPECT_NEAR(surrogate_of(0.7, a[0]).gradient, -a[0] * 0.7, 1e-12);
}

}  // namespace
}  // namespace cohort
