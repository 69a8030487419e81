// Losses of the head as nodes of the tape, for gradcheck and for tests that compose a loss further.
#pragma once

#include "autograd/ops.h"
#include "kernels/elementwise.h"
#include "tests/support/policy_loss_call.h"

namespace cohort::test {

// The loss that make(hidden, head) computes, [1], as a function of x and w.
template <class Make>
Variable loss_node(const Variable& x, const HeadWeights& head, Make&& make) {
  const auto& [w, b] = head;
  if (!needs_gradient(std::vector{x, w, b})) return Variable(make(x, head).loss);
  const auto leaf = [](const Variable& v) {
    return v.value().defined() ? Variable::parameter(v.value()) : Variable();
  };
  const Variable hidden = leaf(x), weight = leaf(w), bias = leaf(b);
  const HeadLoss loss = make(hidden, HeadWeights(weight, bias));
  return make_node(
      "head_loss", loss.loss, {x, w, b},
      [dx = loss.dhidden, dw = weight.grad(), db = b.value().defined() ? bias.grad() : Tensor()](
          const Tensor& dy, Gradients& g) {
        const auto scaled = [&](GradSlot slot, const Tensor& gradient) {
          if (slot.tensor.defined())
            kernels::scale_by({.y = slot.tensor, .x = gradient, .factor = dy, .mode = slot.mode});
        };
        scaled(g.slot(0), dx);
        scaled(g.weight_slot(1), dw);
        if (db.defined()) scaled(g.weight_slot(2), db);
      });
}

inline Variable cross_entropy_node(const Variable& x, const HeadWeights& w, const Tensor& targets,
                                   const Tensor& weights, const kernels::HeadDesc& desc = {}) {
  return loss_node(x, w, [&](const Variable& hidden, const HeadWeights& head) {
    return cross_entropy(hidden, head, targets, weights, desc);
  });
}

inline Variable policy_loss_node(const Variable& x, const HeadWeights& w, const Tensor& targets,
                                 const PolicyLossInputs& inputs,
                                 const kernels::PolicyLossDesc& loss_desc,
                                 const kernels::HeadDesc& desc = {}) {
  return loss_node(x, w, [&](const Variable& hidden, const HeadWeights& head) {
    return policy_loss(hidden, head, targets, inputs, loss_desc, desc);
  });
}

// The policy loss as a function of the log-probs.
inline Variable policy_loss_of_log_probs(const Variable& logprob, const PolicyLossInputs& inputs,
                                         const kernels::PolicyLossDesc& desc) {
  const Tensor& lp = logprob.value();
  Tensor loss = Tensor::empty({1}, lp.dtype(), lp.device()), dlogprob = Tensor::empty_like(lp);
  Tensor stats = kernels::PolicyLossStats::zeros(lp.device());
  kernels::policy_loss({.loss = loss,
                        .dlogprob = dlogprob,
                        .stats = stats,
                        .logprob = lp,
                        .old_logprob = inputs.old_logprob,
                        .ref_logprob = inputs.ref_logprob,
                        .advantage = inputs.advantage,
                        .weight = inputs.weight,
                        .desc = desc,
                        .sampling_logprob = inputs.sampling_logprob,
                        .segments = inputs.segments});
  return make_node("policy_loss", loss, {logprob}, [dlogprob](const Tensor& dy, Gradients& g) {
    GradSlot dx = g.slot(0);
    kernels::scale_by({.y = dx.tensor, .x = dlogprob, .factor = dy, .mode = dx.mode});
  });
}

// A loss on the tape, for Learner::update().
inline HeadLoss on_tape(const Variable& loss) {
  return {.loss = loss.value(), .hidden = loss};
}

}  // namespace cohort::test
