// The clipped surrogate with its gradient: the loop over tokens on the CPU.
#include "kernels/policy_token.h"

namespace cohort::kernels::cpu {

void policy_loss(const PolicyLoss& args) {
  const int64_t tokens = args.logprob.numel();
  dispatch_float(args.logprob.dtype(), "policy_loss", [&]<class T>() {
    const PolicyTokens<T> inputs(args);
    const T* const w = inputs.weight;
    for (int64_t t = 0; t < tokens; ++t)
      COHORT_CHECK(w[t] >= 0, "[policy_loss] expected weights of 0 or more, got ", w[t],
                   " at token ", t);
    T* gradient = args.dlogprob.data<T>();
    PolicyLossStats batch;
    double total = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      gradient[t] = 0;
      if (w[t] == 0) continue;
      const TokenLoss token = inputs.loss(t, args.desc, batch);
      total += token.loss;
      gradient[t] = static_cast<T>(token.gradient);
    }
    *args.loss.data<T>() = static_cast<T>(total);
    PolicyLossStats stats = PolicyLossStats::from(args.stats);
    add(stats, batch);
    std::memcpy(args.stats.raw(), &stats, sizeof stats);
  });
}

}  // namespace cohort::kernels::cpu
