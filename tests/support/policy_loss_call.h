// The policy loss of all tokens at once.
#pragma once

#include "kernels/policy_loss.h"

namespace cohort::kernels {

struct PolicyLoss {
  Tensor& loss;      // [1]
  Tensor& dlogprob;  // [T]
  Tensor& stats;     // PolicyLossStats, accumulated
  const Tensor &logprob, &old_logprob, &ref_logprob, &advantage, &weight;
  PolicyLossDesc desc = {};
  Tensor sampling_logprob = {};  // undefined: old_logprob
  Tensor segments = {};          // needed if desc.needs_sequences()
  Tensor entropy = {}, dentropy = {}, old_distance_coef = {};
};
inline void policy_loss(const PolicyLoss& args) {
  const PolicyLossConstants constants{args.old_logprob,      args.ref_logprob,
                                      args.advantage,        args.weight,
                                      args.sampling_logprob, args.old_distance_coef};
  Tensor means;
  if (args.desc.needs_sequences()) {
    means = Tensor::empty({args.logprob.numel(), PolicySequenceMeans::kSize}, DType::kF64,
                          args.logprob.device());
    policy_sequence_means({.means = means,
                           .logprob = args.logprob,
                           .constants = constants,
                           .segments = args.segments,
                           .desc = args.desc});
  }
  Tensor terms = Tensor::empty({args.logprob.numel(), 1 + PolicyLossStats::kSize}, DType::kF64,
                               args.logprob.device());
  policy_loss_terms({.dlogprob = args.dlogprob,
                     .terms = terms,
                     .logprob = args.logprob,
                     .constants = constants,
                     .desc = args.desc,
                     .begin = 0,
                     .count = args.logprob.numel(),
                     .sequence_means = means,
                     .entropy = args.entropy,
                     .dentropy = args.dentropy});
  policy_loss_sums({.loss = args.loss, .stats = args.stats, .terms = terms});
}

}  // namespace cohort::kernels
