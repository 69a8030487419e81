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
};
inline void policy_loss(const PolicyLoss& args) {
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
                     .count = args.logprob.numel()});
  policy_loss_sums({.loss = args.loss, .stats = args.stats, .terms = terms});
}

}  // namespace cohort::kernels
