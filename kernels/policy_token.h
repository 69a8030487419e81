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

// The estimators of the KL, with x at most 20. Below there is no bound: k1 and k3 grow like -x,
// with slope -1.
COHORT_HD inline ValueAndSlope k1(double x) {
  if (x > kMaxLogRatio) return {-kMaxLogRatio, 0};
  return {-x, -1};
}
COHORT_HD inline ValueAndSlope k2(double x) {
  if (x > kMaxLogRatio) return {kMaxLogRatio * kMaxLogRatio / 2, 0};
  return {x * x / 2, x};
}
COHORT_HD inline ValueAndSlope k3(double x) {
  if (x > kMaxLogRatio) return {std::expm1(kMaxLogRatio) - kMaxLogRatio, 0};
  const double slope = std::expm1(x);
  return {slope - x, slope};
}

COHORT_HD inline ValueAndSlope kl_estimate(KlEstimator estimator, double x) {
  switch (estimator) {
    case KlEstimator::kK1:
      return k1(x);
    case KlEstimator::kK2:
      return k2(x);
    case KlEstimator::kK3:
    case KlEstimator::kReverse:  // divergences have no estimate
    case KlEstimator::kForward:
    case KlEstimator::kJsd:
      break;
  }
  return k3(x);
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
  total.importance += more.importance;
}

// The loss of a token and its derivative with respect to the log-prob.
struct TokenLoss {
  double loss, gradient;
};

// exp(clamp(log_ratio, +-20)) and its derivative.
COHORT_HD inline ValueAndSlope ratio_of(double log_ratio) {
  const ValueAndSlope clamped = clamp_log_ratio(log_ratio);
  const double value = std::exp(clamped.value);
  return {value, value * clamped.slope};
}

// A token with its ratio, whose slope is with respect to the log-prob.
struct PolicyToken {
  double logprob, old_logprob, advantage;
  ValueAndSlope ratio = ratio_of(logprob - old_logprob);
};

// The clip. At its bounds both branches are equal, and the derivative is that of the unclipped one.
COHORT_HD inline TokenLoss clip_surrogate(const PolicyToken& t, const PolicyLossDesc& desc,
                                          PolicyLossStats& stats) {
  const double low = 1 - desc.epsilon_low, high = 1 + desc.epsilon_high;
  const double cap = desc.dual_clip < desc.delta ? desc.dual_clip : desc.delta;
  const bool at_low = t.advantage < 0 && t.ratio.value < low;
  const bool at_high = t.advantage > 0 && t.ratio.value > high;
  const bool at_cap = t.advantage < 0 && t.ratio.value > cap;
  stats.clipped_low += at_low;
  stats.clipped_high += at_high || at_cap;
  if (at_low) return {-t.advantage * low, 0};
  if (at_high) return {-t.advantage * high, 0};
  if (at_cap) return {-t.advantage * cap, 0};
  return {-t.advantage * t.ratio.value, -t.advantage * t.ratio.slope};
}

// x = lp - lp_old of a token, bounded in the direction of its advantage. The slope is 0 beyond the
// bound, else 1.
COHORT_HD inline ValueAndSlope clip_log_ratio(double x, double advantage,
                                              const PolicyLossDesc& desc) {
  if (advantage > 0 && x > desc.epsilon_high) return {desc.epsilon_high, 0};
  if (advantage < 0 && x < -desc.epsilon_low) return {-desc.epsilon_low, 0};
  return {x, 1};
}

// The clip of RatioLevel::kClipped, whose ratio is the sequence's.
COHORT_HD inline TokenLoss clipped_mean_surrogate(const PolicyToken& t, const PolicyLossDesc& desc,
                                                  PolicyLossStats& stats) {
  const double slope = clip_log_ratio(t.logprob - t.old_logprob, t.advantage, desc).slope;
  stats.clipped_low += slope == 0 && t.advantage < 0;
  stats.clipped_high += slope == 0 && t.advantage > 0;
  return {-t.advantage * t.ratio.value, -t.advantage * t.ratio.slope * slope};
}

COHORT_HD inline TokenLoss cispo_surrogate(const PolicyToken& t, const PolicyLossDesc& desc,
                                           PolicyLossStats& stats) {
  const double low = 1 - desc.epsilon_low, high = 1 + desc.epsilon_high;
  const bool at_low = t.ratio.value < low;
  const bool at_high = t.ratio.value > high;
  stats.clipped_low += at_low;
  stats.clipped_high += at_high;
  const double gradient = -t.advantage * (at_low ? low : at_high ? high : t.ratio.value);
  return {gradient * t.logprob, gradient};
}

COHORT_HD inline TokenLoss reinforce_surrogate(const PolicyToken& t) {
  return {-t.advantage * t.logprob, -t.advantage};
}

COHORT_HD inline TokenLoss sapo_surrogate(const PolicyToken& t, const PolicyLossDesc& desc) {
  const double tau = t.advantage > 0 ? desc.tau_pos : desc.tau_neg;
  const double e = std::exp(-tau * (t.ratio.value - 1));  // at most exp(tau)
  const double gate = 1 / (1 + e);
  // The sigmoid's derivative is gate (1 - gate), 1/4 at ratio 1; 1 - gate = e gate.
  return {-t.advantage * (4 / tau * gate), -t.advantage * t.ratio.slope * (4 * gate * (e * gate))};
}

// The ratio is the product over the sequence.
COHORT_HD inline TokenLoss vespo_surrogate(const PolicyToken& t) {
  const double power = t.advantage > 0 ? 2 : 3, rate = t.advantage > 0 ? 3 : 2;
  const double weight = std::exp(power * std::log(t.ratio.value) + rate * (1 - t.ratio.value));
  return {-t.advantage * weight * t.logprob, -t.advantage * weight};
}

// The surrogate of desc; a row per enumerator.
COHORT_HD inline TokenLoss surrogate(const PolicyToken& t, const PolicyLossDesc& desc,
                                     PolicyLossStats& stats) {
  switch (desc.surrogate) {
    case Surrogate::kClip:
      if (desc.level == RatioLevel::kClipped) return clipped_mean_surrogate(t, desc, stats);
      break;
    case Surrogate::kCispo:
      return cispo_surrogate(t, desc, stats);
    case Surrogate::kReinforce:
      return reinforce_surrogate(t);
    case Surrogate::kSapo:
      return sapo_surrogate(t, desc);
    case Surrogate::kVespo:
      return vespo_surrogate(t);
  }
  return clip_surrogate(t, desc, stats);
}

// A row of PolicySequenceMeans::means: the means of lp - lp_old, of lp_old - lp_sampling and of the
// clipped lp - lp_old.
struct SequenceMeans {
  double to_old = 0, to_sampling = 0, tokens = 0, clipped = 0;
};
static_assert(sizeof(SequenceMeans) == PolicySequenceMeans::kSize * sizeof(double));

// The weight of a token's surrogate.
COHORT_HD inline double importance_weight(const PolicyToken& t, double sampling_logprob,
                                          const SequenceMeans& sequence,
                                          const PolicyLossDesc& desc) {
  if (desc.importance == Importance::kNone) return 1;
  double log_old = t.old_logprob - sampling_logprob, log_now = t.logprob - sampling_logprob;
  if (desc.importance_level != ImportanceLevel::kToken) {
    const double count = desc.importance_level == ImportanceLevel::kSequence ? sequence.tokens : 1;
    log_old = clamp_log_ratio(count * sequence.to_sampling).value;
    log_now = clamp_log_ratio(count * (sequence.to_old + sequence.to_sampling)).value;
  }
  const double mismatch = std::exp(log_old);
  const double r = desc.surrogate == Surrogate::kReinforce ? std::exp(log_now) : mismatch;
  const auto is_outside = [&](double x) {  // false for NaN, which is not to be masked
    return x < desc.importance_min || x > desc.importance_max;
  };
  switch (desc.importance) {
    case Importance::kNone:
      break;
    case Importance::kTruncate:
      return r < desc.importance_min   ? desc.importance_min
             : r > desc.importance_max ? desc.importance_max
                                       : r;
    case Importance::kMask:
      return is_outside(mismatch) ? 0 : r;
    case Importance::kReject:
      return is_outside(mismatch) ? 0 : 1;
  }
  return 1;
}

// At most 1: that of a token which restricted sampling left alone may be rounded above.
COHORT_HD inline double probability(double logprob) {
  return logprob > 0 ? 1 : std::exp(logprob);
}

// The KL of the Bernoulli distributions of two probabilities.
COHORT_HD inline double bernoulli_kl(double from, double to) {
  constexpr double kLeast = 1e-8;
  return from * std::log((from + kLeast) / (to + kLeast)) +
         (1 - from) * std::log((1 - from + kLeast) / (1 - to + kLeast));
}

// True if a token has no surrogate since the policy has moved too far from the one that sampled.
COHORT_HD inline bool has_moved_too_far(const PolicyToken& t, double sampling_logprob,
                                        const SequenceMeans& sequence, const PolicyLossDesc& desc,
                                        PolicyLossStats& stats) {
  if (t.advantage < 0 && -(sequence.to_old + sequence.to_sampling) > desc.off_policy_mask)
    return true;
  const bool has_surrogate = t.advantage > 0 || t.advantage < 0;
  if (desc.trust_region == TrustRegion::kNone || !has_surrogate) return false;
  const double from = probability(sampling_logprob), to = probability(t.logprob), moved = to - from;
  const double bound = t.advantage > 0 ? desc.trust_high : desc.trust_low,
               along = t.advantage > 0 ? moved : -moved;
  const bool outside = desc.trust_region == TrustRegion::kTv ? along > bound
                       : desc.trust_region == TrustRegion::kKl
                           ? along > 0 && bernoulli_kl(from, to) > bound
                           : std::fabs(moved) > desc.trust_high;
  stats.clipped_low += outside && moved < 0;
  stats.clipped_high += outside && moved > 0;
  return outside;
}

// old_kl_coef times the squared log ratio to the distribution that sampled.
COHORT_HD inline TokenLoss old_penalty(const PolicyToken& t, double sampling_logprob,
                                       const PolicyLossDesc& desc) {
  const double x = t.logprob - sampling_logprob;
  return {desc.old_kl_coef * x * x, 2 * desc.old_kl_coef * x};
}

// A coefficient times |lp - lp_old|, whose derivative at 0 is 0.
COHORT_HD inline TokenLoss old_distance(const PolicyToken& t, double coefficient) {
  const double x = t.logprob - t.old_logprob;
  return {coefficient * std::fabs(x), coefficient * ((x > 0) - (x < 0))};
}

// beta times the estimate of the KL to the reference.
COHORT_HD inline TokenLoss penalty(const PolicyToken& t, double ref_logprob,
                                   const PolicyLossDesc& desc, PolicyLossStats& stats) {
  const double x = ref_logprob - t.logprob;
  stats.kl_to_reference += k3(x).value;
  if (desc.beta == 0) return {0, 0};
  const ValueAndSlope kl = kl_estimate(desc.kl, x);
  double gradient = -kl.slope;  // x decreases with the log-prob
  if (desc.kl_unbiased) gradient = t.ratio.slope * kl.value + t.ratio.value * gradient;
  return {desc.beta * kl.value, desc.beta * gradient};
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

// Sums over the tokens of a sequence, for its means.
struct LogRatioSums {
  double tokens = 0, to_old = 0, to_sampling = 0;
  double clipped = 0, with_advantage = 0;  // only tokens with an advantage count
};

// The tensors of policy_sequence_means() as pointers.
template <class T>
struct SequenceLogRatios {
  const T *logprob, *old_logprob, *sampling_logprob, *advantage, *weight;
  PolicyLossDesc desc;
  SequenceMeans* means;

  explicit SequenceLogRatios(const PolicySequenceMeans& args)
      : logprob(args.logprob.data<T>()),
        old_logprob(args.constants.old_logprob.data<T>()),
        sampling_logprob(args.constants.sampling().data<T>()),
        advantage(args.constants.advantage.data<T>()),
        weight(args.constants.weight.data<T>()),
        desc(args.desc),
        means(pointer<SequenceMeans>(args.means)) {}

  COHORT_HD void add(LogRatioSums& sums, int64_t t) const {
    if (!(weight[t] > 0)) return;
    const auto old = static_cast<double>(old_logprob[t]);
    sums.tokens += 1;
    const double to_old = static_cast<double>(logprob[t]) - old;
    sums.to_old += to_old;
    sums.to_sampling += old - static_cast<double>(sampling_logprob[t]);
    const auto a = static_cast<double>(advantage[t]);
    if (a == 0) return;
    sums.clipped += clip_log_ratio(to_old, a, desc).value;
    sums.with_advantage += 1;
  }
  COHORT_HD void set(int64_t t, const LogRatioSums& sums) const {
    means[t].to_old = sums.to_old / sums.tokens;
    means[t].to_sampling = sums.to_sampling / sums.tokens;
    means[t].tokens = sums.tokens;
    means[t].clipped = sums.with_advantage > 0 ? sums.clipped / sums.with_advantage : 0;
  }
};

// The tensors of a call as pointers; those that may be undefined may be null.
template <class T>
struct PolicyTokens {
  const T *logprob, *old_logprob, *ref_logprob, *sampling_logprob, *advantage, *weight, *entropy,
      *divergence, *old_distance_coef;
  const SequenceMeans* sequence_means;
  PolicyTerms* terms;
  T *dlogprob, *dentropy;

  explicit PolicyTokens(const PolicyLossTerms& args)
      : logprob(args.logprob.data<T>()),
        old_logprob(args.constants.old_logprob.data<T>()),
        ref_logprob(pointer<T>(args.constants.ref_logprob)),
        sampling_logprob(args.constants.sampling().data<T>()),
        advantage(args.constants.advantage.data<T>()),
        weight(args.constants.weight.data<T>()),
        entropy(pointer<T>(args.entropy)),
        divergence(pointer<T>(args.divergence)),
        old_distance_coef(pointer<T>(args.constants.old_distance_coef)),
        sequence_means(pointer<SequenceMeans>(args.sequence_means)),
        terms(pointer<PolicyTerms>(args.terms)),
        dlogprob(args.dlogprob.data<T>()),
        dentropy(args.dentropy.defined() ? Tensor(args.dentropy).data<T>() : nullptr) {}

  // The surrogate of token t with its weight, whose ratio may be that of its sequence.
  COHORT_HD TokenLoss weighted_surrogate(int64_t t, const PolicyToken& token,
                                         const PolicyLossDesc& desc, PolicyLossStats& stats) const {
    stats.tokens += 1;
    stats.max_ratio_deviation =
        larger_deviation(std::fabs(token.ratio.value - 1), stats.max_ratio_deviation);
    stats.kl_to_old += k3(token.logprob - token.old_logprob).value;
    const SequenceMeans sequence = sequence_means == nullptr ? SequenceMeans{} : sequence_means[t];
    const auto sampling = static_cast<double>(sampling_logprob[t]);
    const double importance = importance_weight(token, sampling, sequence, desc);
    stats.importance += importance;
    if (has_moved_too_far(token, sampling, sequence, desc, stats)) return {0, 0};
    PolicyToken of_sequence = token;
    if (desc.surrogate == Surrogate::kVespo)
      of_sequence.ratio = ratio_of(sequence.tokens * sequence.to_old);
    else if (desc.level != RatioLevel::kToken)
      of_sequence.ratio =
          ratio_of(desc.level == RatioLevel::kClipped ? sequence.clipped : sequence.to_old);
    const TokenLoss loss = surrogate(of_sequence, desc, stats);
    return {importance * loss.loss, importance * loss.gradient};
  }

  // Writes the terms and the gradient of token t.
  COHORT_HD void compute(int64_t t, const PolicyLossDesc& desc) const {
    PolicyTerms out;
    double gradient = 0;
    const auto scale = static_cast<double>(weight[t]);
    // A token of weight 0 is not part of the loss; its log-probs are not read.
    if (scale > 0) {
      const PolicyToken token{static_cast<double>(logprob[t]), static_cast<double>(old_logprob[t]),
                              static_cast<double>(advantage[t])};
      TokenLoss sum = weighted_surrogate(t, token, desc, out.stats);
      if (ref_logprob != nullptr) {
        const TokenLoss kl = penalty(token, static_cast<double>(ref_logprob[t]), desc, out.stats);
        sum = {sum.loss + kl.loss, sum.gradient + kl.gradient};
      }
      if (divergence != nullptr) {
        const auto value = static_cast<double>(divergence[t]);
        out.stats.kl_to_reference += value;
        sum.loss += desc.beta * value;
      }
      if (desc.old_kl_coef != 0) {
        const TokenLoss kl = old_penalty(token, static_cast<double>(sampling_logprob[t]), desc);
        sum = {sum.loss + kl.loss, sum.gradient + kl.gradient};
      }
      if (old_distance_coef != nullptr) {
        const TokenLoss kl = old_distance(token, static_cast<double>(old_distance_coef[t]));
        sum = {sum.loss + kl.loss, sum.gradient + kl.gradient};
      }
      if (entropy != nullptr) sum.loss -= desc.entropy_coef * static_cast<double>(entropy[t]);
      out.loss = scale * sum.loss;
      gradient = scale * sum.gradient;
    } else if (scale != 0) {  // negative or NaN
      out.loss = gradient = std::numeric_limits<double>::quiet_NaN();
    }
    terms[t] = out;
    dlogprob[t] = static_cast<T>(gradient);
    if (dentropy != nullptr) dentropy[t] = static_cast<T>(-desc.entropy_coef * scale);
  }
};

}  // namespace cohort::kernels
