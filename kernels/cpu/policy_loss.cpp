// The policy loss with its gradient: the loops over tokens on the CPU.
#include "kernels/policy_token.h"

namespace cohort::kernels::cpu {

void policy_loss_terms(const PolicyLossTerms& args) {
  const int64_t end = args.begin + args.count;
  dispatch_float(args.logprob.dtype(), "policy_loss", [&]<class T>() {
    const PolicyTokens<T> tokens(args);
    for (int64_t t = args.begin; t < end; ++t)
      COHORT_CHECK(tokens.weight[t] >= 0, "[policy_loss] expected weights of 0 or more, got ",
                   tokens.weight[t], " at token ", t);
    for (int64_t t = args.begin; t < end; ++t) tokens.compute(t, args.desc);
  });
}

void policy_sequence_means(const PolicySequenceMeans& args) {
  const auto* segments = args.segments.data<int32_t>();
  const int64_t count = args.segments.numel();
  dispatch_float(args.logprob.dtype(), "policy_sequence_means", [&]<class T>() {
    const SequenceLogRatios<T> ratios(args);
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
      LogRatioSums sums;
      for (; end < count && segments[end] == segments[begin]; ++end) ratios.add(sums, end);
      for (int64_t t = begin; t < end; ++t) ratios.set(t, sums);
    }
  });
}

void policy_loss_sums(const PolicyLossSums& args) {
  const auto* terms = static_cast<const PolicyTerms*>(args.terms.raw());
  PolicyTerms total;
  for (int64_t t = 0; t < args.terms.rows(); ++t) add(total, terms[t]);
  args.loss.fill_(total.loss);
  PolicyLossStats stats = PolicyLossStats::from(args.stats);
  add(stats, total.stats);
  std::memcpy(args.stats.raw(), &stats, sizeof stats);
}

}  // namespace cohort::kernels::cpu
