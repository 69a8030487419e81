#include "rl/rejection.h"

#include <cmath>

#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

// The tokens that are left of three after a prompt, whose lp_old - lp_sampling are 0.5, 0.4, 0.3.
std::vector<uint8_t> kept(const std::vector<std::string>& rules,
                          std::vector<double> mismatch = {0.5, 0.4, 0.3}) {
  std::vector<double> old(mismatch.size() + 1, -1), sampling(mismatch.size() + 1, -1);
  std::vector<uint8_t> mask(mismatch.size() + 1, 1), out(mismatch.size() + 1, 1);
  mask[0] = 0;
  sampling[0] = 7;
  for (size_t i = 0; i < mismatch.size(); ++i) sampling[i + 1] = old[i + 1] - mismatch[i];
  reject_tokens(rules, old, sampling, mask, out);
  return {out.begin() + 1, out.end()};
}

const std::vector<uint8_t> kAll{1, 1, 1}, kNone{0, 0, 0};

// k3: 0.14872, 0.09182, 0.04986, mean 0.09680; k2: 0.125, 0.08, 0.045, sum 0.25.
TEST(Rejection, IsByTheStatisticsOfTokensAndSequences) {
  EXPECT_EQ(kept({"token_k3 > 0.1"}), (std::vector<uint8_t>{0, 1, 1}));
  EXPECT_EQ(kept({"token_k1 < -0.45"}), (std::vector<uint8_t>{0, 1, 1}));
  EXPECT_EQ(kept({"token_k2 > 0.06", "token_k1 < -0.25"}), kNone);
  EXPECT_EQ(kept({"seq_mean_k3 > 0.0968"}), kNone);
  EXPECT_EQ(kept({"seq_mean_k3 > 0.09681"}), kAll);
  EXPECT_EQ(kept({"seq_max_k3 > 0.1487"}), kNone);
  EXPECT_EQ(kept({"seq_max_k3 > 0.14873"}), kAll);
  EXPECT_EQ(kept({"seq_sum_k2 > 0.2499"}), kNone);
  EXPECT_EQ(kept({"seq_sum_k2 > 0.2501"}), kAll);
  EXPECT_EQ(kept({"seq_mean_k1 < -0.39"}), kNone);
  EXPECT_EQ(kept({}), kAll);
}

// A token that restricted sampling had not kept, and a log-prob that is not a number.
TEST(Rejection, OfExtremeLogProbs) {
  EXPECT_EQ(kept({"token_k3 > 1"}, {HUGE_VAL, 0, -HUGE_VAL}), (std::vector<uint8_t>{0, 1, 0}));
  EXPECT_EQ(kept({"token_k3 > 1", "seq_max_k2 > 100", "seq_mean_k1 < -5"}, {std::nan(""), 0, 0}),
            kAll);
}

TEST(Rejection, OtherRulesAreErrors) {
  for (const char* rule : {"", "seq_mean_k3", "seq_mean_k3 > ", "seq_mean_k3 >0.002",
                           "seq_mean_k4 > 1", "k3 > 1", "seq_min_k3 > 1", "token_k3 = 1",
                           "token_k3 > x", "token_k3 > 1x", "token_k3 > 1 2", "token_k3 > nan"})
    EXPECT_THROW_WITH(parse_rejection(rule), InputError, "rejection: expected a rule such as");
  for (const char* rule : {"token_k2 < 0.1", "seq_max_k3 < 0"})
    EXPECT_THROW_WITH(parse_rejection(rule), InputError, "k2 and k3 are never below 0");
  for (const char* rule : {"seq_mean_k1 < 0.5", "seq_max_k3 > -1"})
    EXPECT_THROW_WITH(parse_rejection(rule), InputError, "rejects every token that was drawn from");
}

}  // namespace
}  // namespace cohort::test
