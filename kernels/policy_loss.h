// The policy loss: a surrogate and a KL penalty, value and gradient in one pass over packed tokens.
//
//   ratio = exp(clamp(lp - lp_old, +-20)),  lo = 1 - epsilon_low, hi = 1 + epsilon_high
//   x     = min(lp_ref - lp, 20)
//   loss  = sum_t weight[t] (importance[t] surrogate[t] + beta kl[t] - entropy_coef entropy[t]
//                            + old_kl_coef (lp - lp_sampling)^2
//                            + old_distance_coef[t] |lp - lp_old|)
//
// k3(log p - log q) at samples of q estimates KL(q || p) without bias. The samples are the old
// policy's, so its divergence from the policy is measured by k3(lp - lp_old).
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/common.h"

namespace cohort::kernels {

// The surrogate of a token. At ratio 1 the gradient of each with respect to lp is exactly -A.
//   kClip       max(-A ratio, -A clip(ratio, lo, hi)), and where A < 0 at most -A dual_clip and at
//               most -A delta (PPO, Schulman et al. 2017; GRPO, Shao et al. 2024; dual clip, Ye et
//               al. 2020)
//   kCispo      -A clip(ratio, lo, hi) lp, where the clipped ratio is a constant weight: no token's
//               gradient is 0 (MiniMax-M1, 2025)
//   kReinforce  -A lp (Williams 1992); the ratio has no effect
//   kSapo       -A (4 / tau) sigmoid(tau (ratio - 1)), where tau is tau_pos if A > 0, else tau_neg
//               (Soft Adaptive Policy Optimization, Gao et al. 2025, arXiv 2511.20347)
//   kVespo      -A phi(W) lp, where W is the product of the sequence's ratios and phi(W) = W^k
//               exp(a (1 - W)), with k = 2, a = 3 if A > 0, else k = 3, a = 2, is a constant weight
//               (VESPO, 2026, as in TRL)
enum class Surrogate : uint8_t { kClip, kCispo, kReinforce, kSapo, kVespo };
struct SurrogateEntry {
  Surrogate value;
  const char* name;  // in configurations
  bool clips;        // lo and hi bound its ratio
};
// All of them; tests and warnings go by this table.
inline constexpr SurrogateEntry kSurrogates[] = {{Surrogate::kClip, "clip", true},
                                                 {Surrogate::kCispo, "cispo", true},
                                                 {Surrogate::kReinforce, "reinforce", false},
                                                 {Surrogate::kSapo, "sapo", false},
                                                 {Surrogate::kVespo, "vespo", false}};

// The log of the surrogate's ratio: lp - lp_old of the token, or its mean over the tokens of the
// sequence (GSPO, Zheng et al. 2025, arXiv 2507.18071). The mean's gradient is that of GSPO-token:
// ratio d lp of each token with its own weight and advantage, which is GSPO's where the weights and
// advantages of a sequence are equal. kClipped, of kClip alone: the mean of min(lp - lp_old,
// epsilon_high) where A > 0 and of max(lp - lp_old, -epsilon_low) where A < 0, over the tokens with
// A other than 0, and no other clip; tokens beyond these bounds have no gradient (GMPO, Zhao et al.
// 2025, arXiv 2507.20673).
enum class RatioLevel : uint8_t { kToken, kSequence, kClipped };

// The weight of a token's surrogate for the difference between the policy and the distribution that
// sampled the token, whose log-prob is lp_sampling. With q = exp(lp_old - lp_sampling) of the
// token, its product over the sequence, or its geometric mean, by ImportanceLevel: r = q, since the
// surrogate's ratio accounts for lp - lp_old; with kReinforce, which has none, r is that of
// exp(lp - lp_sampling). Logs of products and means are clamped to +-20. The weight is constant in
// the gradient:
//   kTruncate  clip(r, min, max) (Espeholt et al. 2018; Yao et al. 2025)
//   kMask      r, and 0 where q is outside of [min, max] (IcePop, 2025)
//   kReject    1, and 0 where q is outside of [min, max]
// A mask does not depend on lp, so it leaves out the same tokens in all updates of a step.
enum class Importance : uint8_t { kNone, kTruncate, kMask, kReject };
enum class ImportanceLevel : uint8_t { kToken, kSequence, kGeometric };

// Tokens whose probability p = exp(lp) has moved from p_s = exp(lp_sampling) too far have no
// surrogate. With the bound trust_high if A > 0, else trust_low:
//   kTv   p - p_s, in the direction of A's sign, is above the bound (prime-rl; verl's dppo_tv)
//   kKl   p has moved in that direction, and the KL of the Bernoulli distributions of p_s and p,
//         with 1e-8 added to each probability inside a logarithm, is above it (verl's dppo_kl)
//   kIpo  |p - p_s| is above trust_high, whatever A is (prime-rl)
enum class TrustRegion : uint8_t { kNone, kTv, kKl, kIpo };

// Estimators of KL(policy || reference) at a sample of the policy (Schulman 2020): -x, x^2 / 2 and
// exp(x) - x - 1. The others are not estimates, but the divergences of kernels/divergence.h, summed
// over the vocabulary.
enum class KlEstimator : uint8_t { kK1, kK2, kK3, kReverse, kForward, kJsd };
constexpr bool is_divergence(KlEstimator estimator) {
  return estimator >= KlEstimator::kReverse;
}
struct DivergenceDesc {
  KlEstimator kind = KlEstimator::kReverse;
  double jsd_weight = 0.5;  // b of jsd, between 0 and 1
  int64_t top_k = 0;        // 0: every token is an entry of its own
};

struct PolicyLossDesc {
  static constexpr double kOff = std::numeric_limits<double>::infinity();

  double epsilon_low = 0.2, epsilon_high = 0.2, beta = 0;
  Surrogate surrogate = Surrogate::kClip;
  RatioLevel level = RatioLevel::kToken;
  Importance importance = Importance::kNone;
  ImportanceLevel importance_level = ImportanceLevel::kToken;
  double importance_min = 0, importance_max = kOff;
  TrustRegion trust_region = TrustRegion::kNone;
  double trust_low = 0.2, trust_high = 0.2;
  // Sequences with A < 0 whose mean of lp_sampling - lp is above it have no surrogate
  // (DeepSeek-V3.2, 2025, equation 9).
  double off_policy_mask = kOff;
  double old_kl_coef = 0;  // for the term (lp - lp_sampling)^2 (prime-rl)
  double dual_clip = kOff, delta = kOff;
  double tau_pos = 1, tau_neg = 1.05;
  KlEstimator kl = KlEstimator::kK3;
  // The penalty's gradient is that of ratio kl, whose mean over samples of the old policy is the
  // gradient of the policy's mean kl. Its value remains kl.
  bool kl_unbiased = false;
  double entropy_coef = 0;

  // True if a token's loss depends on the log-probs lp of its whole sequence, or on any of them.
  bool needs_sequence_ratios() const {
    return level != RatioLevel::kToken || surrogate == Surrogate::kVespo ||
           off_policy_mask != kOff ||
           (surrogate == Surrogate::kReinforce && importance != Importance::kReject &&
            needs_sequence_importance());
  }
  bool needs_sequences() const { return needs_sequence_ratios() || needs_sequence_importance(); }

 private:
  bool needs_sequence_importance() const {
    return importance != Importance::kNone && importance_level != ImportanceLevel::kToken;
  }
};

// Sums over tokens with a weight above 0; the trainer turns them into means over the optimiser
// step. They are accumulated in a tensor on the device: f64 [kSize], one element per field in the
// order below.
struct PolicyLossStats {
  static constexpr int64_t kSize = 7;

  double tokens = 0;
  double max_ratio_deviation = 0;  // max |ratio - 1|
  // Tokens clipped at the lower bound (A < 0 and ratio < lo) and at an upper one (A > 0 and ratio >
  // hi, A < 0 and ratio > dual_clip or delta). kCispo: those whose weight is clipped. Also those
  // outside of the trust region with p below p_s, and above it.
  double clipped_low = 0, clipped_high = 0;
  double kl_to_old = 0;  // k3(lp - lp_old)
  // k3(lp_ref - lp), whatever the estimator, or the divergence; 0 without a reference.
  double kl_to_reference = 0;
  double importance = 0;  // the weights of Importance

  static Tensor zeros(Device device = {});
  // Copies the sums from their device, which synchronises.
  static PolicyLossStats from(const Tensor& sums);
};

// Constants of the loss, [T] each.
struct PolicyLossConstants {
  Tensor old_logprob;
  Tensor ref_logprob;  // undefined: no reference
  Tensor advantage, weight;
  Tensor sampling_logprob = {};   // undefined: old_logprob
  Tensor old_distance_coef = {};  // undefined: 0

  const Tensor& sampling() const {
    return sampling_logprob.defined() ? sampling_logprob : old_logprob;
  }
};

// Means over the tokens of each sequence that have a weight above 0, at each of them: of lp -
// lp_old and of lp_old - lp_sampling; the number of these tokens; and the mean of RatioLevel's
// kClipped. The order of the sums depends on the sequence's length only.
struct PolicySequenceMeans {
  static constexpr int64_t kSize = 4;
  Tensor& means;  // f64 [T, kSize]
  const Tensor& logprob;
  const PolicyLossConstants& constants;
  const Tensor& segments;  // [T] i32: the sequence of each token, ascending
  PolicyLossDesc desc = {};
};
COHORT_KERNEL(void policy_sequence_means(const PolicySequenceMeans& args));

// The terms of tokens [begin, begin + count): their gradients, and what each adds to the loss and
// to the statistics, for policy_loss_sums(). A token of weight 0 contributes nothing and has
// dlogprob exactly 0, whatever its other values. A weight that is negative or NaN throws Error on
// the CPU; on CUDA, where log-probs are f32, that token's terms and gradient are NaN.
struct PolicyLossTerms {
  Tensor& dlogprob;  // [T], the gradient of the loss
  Tensor& terms;     // f64 [T, 1 + PolicyLossStats::kSize]: the loss's, then the statistics'
  const Tensor& logprob;
  const PolicyLossConstants& constants;
  PolicyLossDesc desc = {};
  int64_t begin = 0, count = 0;
  Tensor sequence_means = {};  // PolicySequenceMeans; needed if desc.needs_sequences()
  // For an entropy bonus, else undefined: the entropies [T], and the gradient of the loss [T].
  Tensor entropy = {}, dentropy = {};
  // Divergences [T] in place of estimates of the KL: needed if is_divergence(desc.kl) and beta > 0.
  // Their gradients are the caller's.
  Tensor divergence = {};
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
