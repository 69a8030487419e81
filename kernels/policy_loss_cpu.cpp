// The clipped surrogate with its gradient, token by token in f64 whatever the tensors' dtype: a few
// exponentials per token are nothing beside the model, and the clip decisions are then those of the
// log-probs as given.
#include "kernels/policy_loss.h"

#include <algorithm>
#include <cmath>

namespace cohort::kernels {
namespace {

constexpr double kMaxLogRatio = 20;

// clamp(x, +-20) and its derivative, which is 1 at the bounds; NaN stays NaN.
struct Clamped {
  double value, slope;
};
Clamped clamp_log_ratio(double x) {
  if (x > kMaxLogRatio) return {kMaxLogRatio, 0};
  if (x < -kMaxLogRatio) return {-kMaxLogRatio, 0};
  return {x, 1};
}

double k3(double x) {
  return std::expm1(x) - x;
}

struct TokenLoss {
  double loss, gradient;
};

struct TokenInput {
  double logprob, old_logprob, advantage;
};

// The surrogate and its derivative with respect to the log-prob. Where both branches are equal
// (inside the clip range and at its bounds) the derivative is that of the unclipped one.
TokenLoss surrogate(const TokenInput& t, const PolicyLossDesc& desc, PolicyLossStats& stats) {
  const Clamped log_ratio = clamp_log_ratio(t.logprob - t.old_logprob);
  const double ratio = std::exp(log_ratio.value);
  const double low = 1 - desc.epsilon_low, high = 1 + desc.epsilon_high;
  const bool clipped_low = t.advantage < 0 && ratio < low;
  const bool clipped_high = t.advantage > 0 && ratio > high;

  stats.tokens += 1;
  const double deviation = std::fabs(ratio - 1);
  if (std::isnan(deviation) || deviation > stats.max_ratio_deviation)
    stats.max_ratio_deviation = deviation;
  stats.clipped_low += clipped_low;
  stats.clipped_high += clipped_high;
  stats.kl_to_old += k3(clamp_log_ratio(t.old_logprob - t.logprob).value);
  if (clipped_low) return {-t.advantage * low, 0};
  if (clipped_high) return {-t.advantage * high, 0};
  return {-t.advantage * ratio, -t.advantage * ratio * log_ratio.slope};
}

// beta k3 towards the reference.
TokenLoss penalty(double logprob, double ref_logprob, double beta, PolicyLossStats& stats) {
  const Clamped x = clamp_log_ratio(ref_logprob - logprob);
  const double kl = k3(x.value);
  stats.kl_to_reference += kl;
  if (beta == 0) return {0, 0};
  return {beta * kl, -beta * std::expm1(x.value) * x.slope};
}

}  // namespace

void policy_loss(Tensor& loss, Tensor& dlogprob, PolicyLossStats& stats, const Tensor& logprob,
                 const Tensor& old_logprob, const Tensor& ref_logprob, const Tensor& advantage,
                 const Tensor& weight, const PolicyLossDesc& desc) {
  constexpr const char* kOp = "policy_loss";
  COHORT_CHECK(logprob.rank() == 1, "[policy_loss] expected logprob [T], got ", logprob.str());
  COHORT_CHECK(desc.beta == 0 || ref_logprob.defined(), "[policy_loss] beta is ", desc.beta,
               " but there are no reference log-probs");
  dispatch_float(logprob.dtype(), kOp, [&]<class T>() {
    const Shape shape = logprob.shape();
    const DType dtype = logprob.dtype();
    check_tensor(logprob, shape, dtype, kOp, "logprob");
    check_tensor(old_logprob, shape, dtype, kOp, "old_logprob");
    if (ref_logprob.defined()) check_tensor(ref_logprob, shape, dtype, kOp, "ref_logprob");
    check_tensor(advantage, shape, dtype, kOp, "advantage");
    check_tensor(weight, shape, dtype, kOp, "weight");
    check_tensor(dlogprob, shape, dtype, kOp, "dlogprob");
    check_tensor(loss, {1}, dtype, kOp, "loss");
    const T *lp = logprob.data<T>(), *old = old_logprob.data<T>(), *adv = advantage.data<T>();
    const T *w = weight.data<T>(), *ref = ref_logprob.defined() ? ref_logprob.data<T>() : nullptr;
    for (int64_t t = 0; t < shape[0]; ++t)
      COHORT_CHECK(w[t] >= 0, "[policy_loss] expected weights of 0 or more, got ", w[t],
                   " at token ", t);

    T* gradient = dlogprob.data<T>();
    stats = {};
    double total = 0;
    for (int64_t t = 0; t < shape[0]; ++t) {
      gradient[t] = 0;
      if (w[t] == 0) continue;
      const double logprob_t = static_cast<double>(lp[t]), scale = static_cast<double>(w[t]);
      TokenLoss token = surrogate(
          {logprob_t, static_cast<double>(old[t]), static_cast<double>(adv[t])}, desc, stats);
      if (ref != nullptr) {
        const TokenLoss kl = penalty(logprob_t, static_cast<double>(ref[t]), desc.beta, stats);
        token = {token.loss + kl.loss, token.gradient + kl.gradient};
      }
      total += scale * token.loss;
      gradient[t] = static_cast<T>(scale * token.gradient);
    }
    *loss.data<T>() = static_cast<T>(total);
  });
}

}  // namespace cohort::kernels
