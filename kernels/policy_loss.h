// The clipped policy surrogate with a KL penalty, value and gradient in one pass over packed tokens
// (PPO, Schulman et al. 2017; GRPO, Shao et al. 2024; KL estimator k3, Schulman 2020).
//
//   ratio = exp(clamp(lp - lp_old, +-20)),  lo = 1 - epsilon_low, hi = 1 + epsilon_high
//   surrogate = max(-A ratio, -A clip(ratio, lo, hi))
//   k3(x) = exp(min(x, 20)) - min(x, 20) - 1
//   loss = sum_t weight[t] (surrogate[t] + beta k3(lp_ref[t] - lp[t]))
//
// k3(log p - log q) at samples of q estimates KL(q || p) without bias. The samples are the old
// policy's, so its divergence from the policy is measured by k3(lp - lp_old).
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

struct PolicyLossDesc {
  double epsilon_low = 0.2, epsilon_high = 0.2, beta = 0;
};

// Sums over tokens with a weight above 0; the trainer turns them into means over the optimiser
// step. They are accumulated in a tensor on the device: f64 [kSize], one element per field in the
// order below.
struct PolicyLossStats {
  static constexpr int64_t kSize = 6;

  double tokens = 0;
  double max_ratio_deviation = 0;  // max |ratio - 1|
  double clipped_low = 0;          // tokens clipped at the lower bound (A < 0 and ratio < lo)
  double clipped_high = 0;         // tokens clipped at the upper bound (A > 0 and ratio > hi)
  double kl_to_old = 0;            // k3(lp - lp_old)
  double kl_to_reference = 0;      // k3(lp_ref - lp); 0 without a reference

  static Tensor zeros(Device device = {});
  // Copies the sums from their device, which synchronises.
  static PolicyLossStats from(const Tensor& sums);
};

// The terms of tokens [begin, begin + count): their gradients, and what each adds to the loss and
// to the statistics, for policy_loss_sums(). A token of weight 0 contributes nothing and has
// dlogprob exactly 0, whatever its other values. A weight that is negative or NaN throws Error on
// the CPU; on CUDA, where log-probs are f32, that token's terms and gradient are NaN.
struct PolicyLossTerms {
  Tensor& dlogprob;  // [T], the gradient of the loss
  Tensor& terms;     // f64 [T, 1 + PolicyLossStats::kSize]: the loss's, then the statistics'
  const Tensor& logprob;
  const Tensor& old_logprob;
  const Tensor& ref_logprob;  // may be undefined: no reference
  const Tensor &advantage, &weight;
  PolicyLossDesc desc = {};
  int64_t begin = 0, count = 0;
};
COHORT_KERNEL(void policy_loss_terms(const PolicyLossTerms& args));

// Sums the terms of all tokens in an order that depends on their number only.
struct PolicyLossSums {
  Tensor& loss;   // [1], in the dtype of the log-probs
  Tensor& stats;  // PolicyLossStats, accumulated
  const Tensor& terms;
};
COHORT_KERNEL(void policy_loss_sums(const PolicyLossSums& args));

}  // namespace cohort::kernels
