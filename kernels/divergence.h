// The divergence of a student's distribution from a teacher's, summed over the vocabulary: the
// arithmetic of an entry of a row, which both devices share.
//
//   p, q: the softmax of the student's and the teacher's logits at the temperature
//   r_v = log p_v - log q_v, m = (1 - b) p + b q
//   reverse  D = sum_v p_v r_v = KL(p, q)              dD/dz_v = p_v (r_v - D) / temperature
//   forward  D = -sum_v q_v r_v = KL(q, p)             dD/dz_v = (p_v - q_v) / temperature
//   jsd      D = b KL(q, m) + (1 - b) KL(p, m)         dD/dz_v = (1 - b) p_v (log p_v - log m_v -
//                                                                KL(p, m)) / temperature
// (generalised knowledge distillation, Agarwal et al. 2024, arXiv 2306.13649). With top_k, all
// tokens but the teacher's top_k likeliest (of equal ones, those with lower ids) are one entry with
// the probabilities P and Q; where p_v of such a token moves, P does.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/policy_loss.h"
#include "kernels/vector_math.h"

namespace cohort::kernels {

// The values of a token's row that its entries share; T: the dtype of the logits.
template <class T>
struct DivergenceRow {
  static constexpr T kInfinity = std::numeric_limits<T>::infinity();

  // The teacher's likeliest tokens: those whose logit is above `least`, or equal to it with an id
  // up to last_id, which is a whole number.
  T least = -kInfinity, last_id = kInfinity;
  T log_p = 0, log_q = 0;  // log P and log Q of all other tokens
  T center = 0;            // reverse: D; jsd: KL(p, m)
};
inline constexpr int64_t kDivergenceRowSize = 5;
static_assert(sizeof(DivergenceRow<float>) == kDivergenceRowSize * sizeof(float));

// The terms of an entry in D and in KL(p, m).
struct DivergenceTerms {
  double divergence = 0, to_mixture = 0;
};

template <class T>
struct DivergenceEntry {
  T log_p, log_q, p, q;

  COHORT_HD DivergenceEntry(T log_p, T log_q)
      : log_p(log_p), log_q(log_q), p(vexp(log_p)), q(vexp(log_q)) {}

  // The log of p / m and of q / m, both 0 where p equals q. By the larger of p and q, so that
  // nothing overflows.
  struct Ratios {
    T p, q;
  };
  COHORT_HD Ratios to_mixture(T weight) const {
    const T r = log_p - log_q;
    if (r >= 0) {
      const T of_p = -std::log1p(weight * std::expm1(-r));
      return {of_p, of_p - r};
    }
    const T of_q = -std::log1p((1 - weight) * std::expm1(r));
    return {of_q + r, of_q};
  }

  // A probability of 0 adds nothing, whatever its logarithm is.
  COHORT_HD DivergenceTerms terms(const DivergenceDesc& desc) const {
    const auto times = [](T probability, T log) {
      return probability > 0 ? static_cast<double>(probability) * static_cast<double>(log) : 0;
    };
    if (desc.kind == KlEstimator::kReverse) return {times(p, log_p - log_q)};
    if (desc.kind == KlEstimator::kForward) return {times(q, log_q - log_p)};
    const double weight = desc.jsd_weight;
    const Ratios ratios = to_mixture(static_cast<T>(weight));
    const double of_p = times(p, ratios.p);
    return {weight * times(q, ratios.q) + (1 - weight) * of_p, of_p};
  }
};

// True if a token is one of the teacher's likeliest.
template <class T>
COHORT_HD bool is_likely(const DivergenceRow<T>& row, T teacher_logit, int64_t id) {
  return teacher_logit > row.least ||
         (teacher_logit == row.least && static_cast<T>(id) <= row.last_id);
}

// dD/dz of a token times the temperature. `own`: the entry of the token alone.
template <class T>
COHORT_HD T divergence_gradient(const DivergenceRow<T>& row, const DivergenceEntry<T>& own,
                                bool likely, const DivergenceDesc& desc) {
  const T log_p = likely ? own.log_p : row.log_p, log_q = likely ? own.log_q : row.log_q;
  if (desc.kind == KlEstimator::kForward)
    return likely ? own.p - own.q : own.p > 0 ? own.p * -std::expm1(log_q - log_p) : T(0);
  if (!(own.p > 0)) return own.p;
  if (desc.kind == KlEstimator::kReverse) return own.p * (log_p - log_q - row.center);
  const auto weight = static_cast<T>(desc.jsd_weight);
  const DivergenceEntry<T> entry(log_p, log_q);
  return (1 - weight) * own.p * (entry.to_mixture(weight).p - row.center);
}

// The divergence of a row, and `row` with its center, from the terms of its likely tokens and the
// probabilities of all others.
template <class T>
COHORT_HD T finish_divergence(DivergenceRow<T>& row, DivergenceTerms sum, double others_p,
                              double others_q, const DivergenceDesc& desc) {
  if (desc.top_k > 0) {
    // Sums that round to 0 have a logarithm, so that the divergence is finite.
    constexpr double kLeast = std::numeric_limits<T>::min();
    row.log_p = static_cast<T>(std::log(others_p > kLeast ? others_p : kLeast));
    row.log_q = static_cast<T>(std::log(others_q > kLeast ? others_q : kLeast));
    const DivergenceTerms others = DivergenceEntry<T>(row.log_p, row.log_q).terms(desc);
    sum.divergence += others.divergence;
    sum.to_mixture += others.to_mixture;
  }
  row.center = static_cast<T>(desc.kind == KlEstimator::kJsd ? sum.to_mixture : sum.divergence);
  return static_cast<T>(sum.divergence);
}

}  // namespace cohort::kernels
