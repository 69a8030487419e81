// The policy loss of one token, in f64 for any dtype of the tensors: the cost is negligible, and
// the clip decisions are then exact for the given log-probs. The CPU and CUDA share it.
#pragma once

#include <cmath>
#include <limits>

#include "core/host_device.h"
#include "kernels/policy_loss.h"

namespace cohort::kernels {

inline constexpr double kMaxLogRatio = 20;

// A function of x and its derivative. At a bound the derivative is that of the inside; NaN
// propagates.
struct ValueAndSlope {
  double value, slope;
};

// clamp(x, +-20).
COHORT_HD inline ValueAndSlope clamp_log_ratio(double x) {
  if (x > kMaxLogRatio) return {kMaxLogRatio, 0};
  if (x < -kMaxLogRatio) return {-kMaxLogRatio, 0};
  return {x, 1};
}

// exp(x) - x - 1 with x at most 20. Below there is no bound: k3 grows like -x, with slope -1.
COHORT_HD inline ValueAndSlope k3(double x) {
  if (x > kMaxLogRatio) return {std::expm1(kMaxLogRatio) - kMaxLogRatio, 0};
  const double slope = std::expm1(x);
  return {slope - x, slope};
}

// The larger of two deviations, NaN if one is.
COHORT_HD inline double larger_deviation(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

COHORT_HD inline void add(PolicyLossStats& total, const PolicyLossStats& more) {
  total.tokens += more.tokens;
  total.max_ratio_deviation = larger_deviation(more.max_ratio_deviation, total.max_ratio_deviation);
  total.clipped_low += more.clipped_low;
  total.clipped_high += more.clipped_high;
  total.kl_to_old += more.kl_to_old;
  total.kl_to_reference += more.kl_to_reference;
}

struct TokenLoss {
  double loss, gradient;
};

struct TokenInput {
  double logprob, old_logprob, advantage;
};

// The surrogate and its derivative with respect to the log-prob. Where both branches are equal
// (inside the clip range and at its bounds) the derivative is that of the unclipped one.
COHORT_HD inline TokenLoss surrogate(const TokenInput& t, const PolicyLossDesc& desc,
                                     PolicyLossStats& stats) {
  const ValueAndSlope log_ratio = clamp_log_ratio(t.logprob - t.old_logprob);
  const double ratio = std::exp(log_ratio.value);
  const double low = 1 - desc.epsilon_low, high = 1 + desc.epsilon_high;
  const bool clipped_low = t.advantage < 0 && ratio < low;
  const bool clipped_high = t.advantage > 0 && ratio > high;

  stats.tokens += 1;
  stats.max_ratio_deviation = larger_deviation(std::fabs(ratio - 1), stats.max_ratio_deviation);
  stats.clipped_low += clipped_low;
  stats.clipped_high += clipped_high;
  stats.kl_to_old += k3(t.logprob - t.old_logprob).value;
  if (clipped_low) return {-t.advantage * low, 0};
  if (clipped_high) return {-t.advantage * high, 0};
  return {-t.advantage * ratio, -t.advantage * ratio * log_ratio.slope};
}

// beta k3 towards the reference.
COHORT_HD inline TokenLoss penalty(double logprob, double ref_logprob, double beta,
                                   PolicyLossStats& stats) {
  const ValueAndSlope kl = k3(ref_logprob - logprob);
  stats.kl_to_reference += kl.value;
  if (beta == 0) return {0, 0};
  return {beta * kl.value, -beta * kl.slope};
}

// A token's share of the loss and of the statistics; a row of PolicyLossTerms::terms.
struct PolicyTerms {
  double loss = 0;
  PolicyLossStats stats;
};
static_assert(sizeof(PolicyTerms) == (1 + PolicyLossStats::kSize) * sizeof(double));

COHORT_HD inline void add(PolicyTerms& total, const PolicyTerms& more) {
  total.loss += more.loss;
  add(total.stats, more.stats);
}

// The tensors of a call as pointers; `ref_logprob` may be null.
template <class T>
struct PolicyTokens {
  const T *logprob, *old_logprob, *ref_logprob, *advantage, *weight;
  PolicyTerms* terms;
  T* dlogprob;

  explicit PolicyTokens(const PolicyLossTerms& args)
      : logprob(args.logprob.data<T>()),
        old_logprob(args.old_logprob.data<T>()),
        ref_logprob(args.ref_logprob.defined() ? args.ref_logprob.data<T>() : nullptr),
        advantage(args.advantage.data<T>()),
        weight(args.weight.data<T>()),
        terms(static_cast<PolicyTerms*>(args.terms.raw())),
        dlogprob(args.dlogprob.data<T>()) {}

  // Writes the terms and the gradient of token t.
  COHORT_HD void compute(int64_t t, const PolicyLossDesc& desc) const {
    PolicyTerms out;
    double gradient = 0;
    const auto lp = static_cast<double>(logprob[t]), scale = static_cast<double>(weight[t]);
    // A token of weight 0 is not part of the loss; its log-probs are not read.
    if (scale > 0) {
      TokenLoss token =
          surrogate({lp, static_cast<double>(old_logprob[t]), static_cast<double>(advantage[t])},
                    desc, out.stats);
      if (ref_logprob != nullptr) {
        const TokenLoss kl = penalty(lp, static_cast<double>(ref_logprob[t]), desc.beta, out.stats);
        token = {token.loss + kl.loss, token.gradient + kl.gradient};
      }
      out.loss = scale * token.loss;
      gradient = scale * token.gradient;
    } else if (scale != 0) {  // negative or NaN
      out.loss = gradient = std::numeric_limits<double>::quiet_NaN();
    }
    terms[t] = out;
    dlogprob[t] = static_cast<T>(gradient);
  }
};

}  // namespace cohort::kernels
