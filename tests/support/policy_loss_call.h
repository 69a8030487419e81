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
  Tensor means;
  if (args.desc.needs_sequences()) {
    means = Tensor::empty({args.logprob.numel(), PolicySequenceMeans::kSize}, DType::kF64,
                          args.logprob.device());
    policy_sequence_means({.means = means,
                           .logprob = args.logprob,
                           .old_logprob = args.old_logprob,
                           .sampling_logprob = args.sampling_logprob,
                           .advantage = args.advantage,
                           .weight = args.weight,
                           .segments = args.segments,
                           .desc = args.desc});
  }
  Tensor terms = Tensor::empty({args.logprob.numel(), 1 + PolicyLossStats::kSize}, DType::kF64,
                               args.logprob.device());
  policy_loss_terms({.dlogprob = args.dlogprob,
                     .terms = terms,
                     .logprob = args.logprob,
                     .old_logprob = args.old_logprob,
                     .ref_logprob = args.ref_logprob,
                     .advantage = args.advantage,
                     .weight = args.weight,
                     .desc = args.desc,
                     .begin = 0,
                     .count = args.logprob.numel(),
                     .sampling_logprob = args.sampling_logprob,
                     .sequence_means = means,
                     .entropy = args.entropy,
                     .dentropy = args.dentropy,
                     .old_distance_coef = args.old_distance_coef});
  policy_loss_sums({.loss = args.loss, .stats = args.stats, .terms = terms});
}

}  // namespace cohort::kernels
