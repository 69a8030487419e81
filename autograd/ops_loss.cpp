// The fused head and the losses on top of it: forward and backward side by side.
#include "autograd/ops.h"

namespace cohort {

TokenLogProbs token_log_probs(const Variable& x, const Variable& w, const Tensor& targets,
                              const kernels::HeadDesc& desc) {
  const Tensor& xv = x.value();
  const int64_t tokens = xv.rows();
  // One node with two rows, so that both gradients meet in one recomputation of the logits.
  const DType dtype = accumulate_dtype(xv.dtype());
  Tensor both = Tensor::empty({2, tokens}, dtype, xv.device());
  Tensor logprob = both.select(0, 0), entropy = both.select(0, 1);
  Tensor lse = Tensor::empty({tokens}, dtype, xv.device());
  kernels::head_logprob_forward({.logprob = logprob,
                                 .entropy = entropy,
                                 .lse = lse,
                                 .x = xv,
                                 .w = w.value(),
                                 .targets = targets,
                                 .desc = desc});
  const Variable node = make_node("token_log_probs", both, {x, w},
                                  [=, x = xv, w = w.value()](const Tensor& dy, Gradients& g) {
                                    kernels::head_logprob_backward({.dx = g.slot(0),
                                                                    .dw = g.weight_slot(1),
                                                                    .dlogprob = dy.select(0, 0),
                                                                    .dentropy = dy.select(0, 1),
                                                                    .x = x,
                                                                    .w = w,
                                                                    .targets = targets,
                                                                    .lse = lse,
                                                                    .entropy = entropy,
                                                                    .desc = desc});
                                  });
  return {select(node, 0), select(node, 1)};
}

Variable cross_entropy(const Variable& x, const Variable& w, const Tensor& targets,
                       const Tensor& weights, const kernels::HeadDesc& desc) {
  return scale(weighted_sum(token_log_probs(x, w, targets, desc).logprob, weights), -1);
}

LossAndStats policy_loss(const Variable& logprob, const PolicyLossInputs& inputs,
                         const kernels::PolicyLossDesc& desc) {
  const Tensor& lp = logprob.value();
  Tensor stats = kernels::PolicyLossStats::zeros(lp.device());
  Tensor loss = Tensor::empty({1}, lp.dtype(), lp.device()), dlogprob = Tensor::empty_like(lp);
  kernels::policy_loss({.loss = loss,
                        .dlogprob = dlogprob,
                        .stats = stats,
                        .logprob = lp,
                        .old_logprob = inputs.old_logprob,
                        .ref_logprob = inputs.ref_logprob,
                        .advantage = inputs.advantage,
                        .weight = inputs.weight,
                        .desc = desc});
  const auto backward = [dlogprob](const Tensor& dy, Gradients& g) {
    GradSlot dx = g.slot(0);
    kernels::scale_by({.y = dx.tensor, .x = dlogprob, .factor = dy, .mode = dx.mode});
  };
  return {make_node("policy_loss", loss, {logprob}, backward), stats};
}

}  // namespace cohort
