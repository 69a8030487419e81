// The gated delta rule: forward and backward.
#include "autograd/ops.h"

namespace cohort {

Variable gated_delta(const DeltaVariables& x, const Tensor& cu_seqlens,
                     const kernels::GatedDeltaDesc& desc) {
  const std::array in{x.q.value(), x.k.value(), x.v.value(), x.g.value(), x.beta.value()};
  Tensor o = Tensor::empty_like(in[2]), u = Tensor::empty_like(o);
  kernels::gated_delta({o, u, in[0], in[1], in[2], in[3], in[4], cu_seqlens, desc});
  return make_node("gated_delta", o, {x.q, x.k, x.v, x.g, x.beta},
                   [in, u, cu_seqlens, desc](const Tensor& dy, Gradients& gradients) {
                     std::array<GradSlot, 5> slots;
                     for (size_t i = 0; i < slots.size(); ++i) {
                       slots[i] = gradients.slot(static_cast<int>(i));
                       if (!slots[i].tensor.defined()) slots[i].tensor = Tensor::empty_like(in[i]);
                     }
                     const auto grad = [&](size_t i) {
                       return kernels::GradOut{slots[i].tensor, slots[i].mode};
                     };
                     kernels::gated_delta_backward({.dq = grad(0),
                                                    .dk = grad(1),
                                                    .dv = grad(2),
                                                    .dg = grad(3),
                                                    .dbeta = grad(4),
                                                    .dout = dy,
                                                    .q = in[0],
                                                    .k = in[1],
                                                    .v = in[2],
                                                    .g = in[3],
                                                    .beta = in[4],
                                                    .u = u,
                                                    .cu_seqlens = cu_seqlens,
                                                    .desc = desc});
                   });
}

}  // namespace cohort
