// Rejection of tokens and sequences by how far the policy is from the distribution that sampled
// them (verl's rollout_rs).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cohort {

// A statistic of x = lp_old - lp_sampling, and the bound beyond which it rejects. Of a token: k1 is
// -x, k2 is x^2 / 2 and k3 is exp(x) - 1 - x, with x clamped to +-20; of a sequence their sum, mean
// or maximum over its sampled tokens.
struct RejectionRule {
  enum class Over : uint8_t { kToken, kSum, kMean, kMax } over = Over::kToken;
  int estimator = 3;  // k1, k2, k3
  bool above = true;  // rejects values above the bound; false: below it
  double bound = 0;
};
// Reads "seq_mean_k3 > 0.002". Throws InputError for anything else, and for a rule that
// rejects 0, the value of a token drawn from the policy itself.
RejectionRule parse_rejection(const std::string& rule);

// Sets kept[t] of the sampled tokens (those in the loss mask) that a rule rejects to 0. NaN rejects
// nothing. All lists have an element per token.
void reject_tokens(std::span<const std::string> rules, std::span<const double> old_logprob,
                   std::span<const double> sampling_logprob, std::span<const uint8_t> loss_mask,
                   std::vector<uint8_t>& kept);

}  // namespace cohort
