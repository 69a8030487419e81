// The fused head and the losses on top of it: forward and backward side by side.
#include "autograd/ops.h"

namespace cohort {

TokenLogProbs token_log_probs(const Variable& x, const Variable& w, const Tensor& targets,
                              const kernels::HeadDesc& desc) {
  const Tensor& xv = x.value();
  const int64_t tokens = xv.rows();
  // One node with two rows, so that one recomputation of the logits serves both gradients.
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

namespace {

// Fills `loss` [1] from the log-probs of all tokens.
using FillLoss = std::function<void(Tensor& loss, const Tensor& logprob)>;
// Fills `dlogprob`, the loss's gradient, for the tokens from `begin` on that it covers.
using FillGradient = std::function<void(Tensor& dlogprob, const Tensor& logprob, int64_t begin)>;

// A loss that is a sum over the log-probs of tokens, in one node with the head. The gradients of x
// and w come from the same logits as the loss; the backward multiplies them by that of the loss.
// Inside backward(make) that of w is added to its leaf at once.
Variable head_loss(const char* name, const Variable& x, const Variable& w, const Tensor& targets,
                   const kernels::HeadDesc& desc, const FillLoss& fill_loss,
                   const FillGradient& fill_gradient) {
  const Tensor &xv = x.value(), &wv = w.value();
  const DType dtype = accumulate_dtype(xv.dtype());
  const Device device = xv.device();
  Tensor dx, loss = Tensor::empty({1}, dtype, device);
  if (grad_enabled() && x.requires_grad()) dx = Tensor::empty(xv.shape(), xv.dtype(), device);
  GradSlot dw = fused_loss_slot(w);
  const bool dw_in_leaf = dw.tensor.defined();
  if (grad_enabled() && w.requires_grad() && !dw_in_leaf)
    dw = {Tensor::empty(wv.shape(), dtype, device)};
  Tensor logprob = Tensor::empty({xv.rows()}, dtype, device);
  Tensor entropy = Tensor::empty_like(logprob), lse = Tensor::empty_like(logprob),
         dlogprob = Tensor::empty_like(logprob);
  const kernels::HeadLossGradients gradients{.dx = {dx},
                                             .dw = {dw.tensor, dw.mode},
                                             .dlogprob = dlogprob,
                                             .set_dlogprob = [&](int64_t begin, int64_t count) {
                                               Tensor part = dlogprob.narrow(0, begin, count);
                                               fill_gradient(part, logprob.narrow(0, begin, count),
                                                             begin);
                                             }};
  kernels::head_logprob_forward(
      {.logprob = logprob,
       .entropy = entropy,
       .lse = lse,
       .x = xv,
       .w = wv,
       .targets = targets,
       .desc = desc,
       .gradients = dx.defined() || dw.tensor.defined() ? &gradients : nullptr});
  fill_loss(loss, logprob);
  return make_node(name, loss, {x, w}, [=](const Tensor& dy, Gradients& g) {
    if (dw_in_leaf) return g.pass(0, dx);  // dy is 1
    const auto scale_into = [&](GradSlot slot, const Tensor& gradient) {
      if (slot.tensor.defined())
        kernels::scale_by({.y = slot.tensor, .x = gradient, .factor = dy, .mode = slot.mode});
    };
    scale_into(g.slot(0), dx);
    scale_into(g.weight_slot(1), dw.tensor);
  });
}

}  // namespace

Variable cross_entropy(const Variable& x, const Variable& w, const Tensor& targets,
                       const Tensor& weights, const kernels::HeadDesc& desc) {
  return head_loss(
      "cross_entropy", x, w, targets, desc,
      [&](Tensor& loss, const Tensor& logprob) {
        NoGradGuard no_grad;
        loss = scale(weighted_sum(Variable(logprob), weights), -1).value();
      },
      [&](Tensor& dlogprob, const Tensor&, int64_t begin) {
        const Tensor part = weights.narrow(0, begin, dlogprob.dim(0));
        kernels::scale({.y = dlogprob, .x = part, .factor = -1});
      });
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

LossAndStats policy_loss(const Variable& x, const Variable& w, const Tensor& targets,
                         const PolicyLossInputs& inputs, const kernels::PolicyLossDesc& loss_desc,
                         const kernels::HeadDesc& desc) {
  const Device device = x.value().device();
  const auto fill = [&](Tensor& loss, Tensor& dlogprob, Tensor& stats, const Tensor& logprob,
                        int64_t begin) {
    const auto part = [&](const Tensor& t) {
      return t.defined() ? t.narrow(0, begin, logprob.dim(0)) : t;
    };
    kernels::policy_loss({.loss = loss,
                          .dlogprob = dlogprob,
                          .stats = stats,
                          .logprob = logprob,
                          .old_logprob = part(inputs.old_logprob),
                          .ref_logprob = part(inputs.ref_logprob),
                          .advantage = part(inputs.advantage),
                          .weight = part(inputs.weight),
                          .desc = loss_desc});
  };
  Tensor stats = kernels::PolicyLossStats::zeros(device);
  const Variable loss = head_loss(
      "policy_loss", x, w, targets, desc,
      [&](Tensor& loss, const Tensor& logprob) {
        Tensor dlogprob = Tensor::empty_like(logprob);
        fill(loss, dlogprob, stats, logprob, 0);
      },
      // Loss and stats of a part of the tokens are discarded: those over all have one order.
      [&](Tensor& dlogprob, const Tensor& logprob, int64_t begin) {
        Tensor loss = Tensor::empty({1}, logprob.dtype(), device);
        Tensor stats = kernels::PolicyLossStats::zeros(device);
        fill(loss, dlogprob, stats, logprob, begin);
      });
  return {loss, stats};
}

}  // namespace cohort
