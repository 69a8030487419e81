// The mixer of a gated delta rule layer: forward and backward.
#include "autograd/ops.h"
#include "kernels/delta_inputs.h"

namespace cohort {
namespace {

// Queries, keys, values and gates, which the backward makes again.
struct DeltaTensors {
  Tensor q, k, v, g, beta;

  static DeltaTensors empty(const DeltaDims& dims, const Tensor& x) {
    const int64_t tokens = x.dim(0);
    const Tensor keys = Tensor::empty({tokens, dims.key_heads, dims.dim}, x.dtype(), x.device()),
                 values = Tensor::empty({tokens, dims.heads, dims.dim}, x.dtype(), x.device()),
                 gates =
                     Tensor::empty({tokens, dims.heads}, accumulate_dtype(x.dtype()), x.device());
    return {keys, Tensor::empty_like(keys), values, gates, Tensor::empty_like(gates)};
  }
};

}  // namespace

Variable gated_delta(const DeltaVariables& in, const DeltaDims& dims, const Tensor& cu_seqlens,
                     const kernels::GatedDeltaDesc& desc) {
  const std::array values{in.x.value(), in.b.value(),     in.a.value(),
                          in.w.value(), in.a_log.value(), in.dt_bias.value()};
  const auto make_inputs = [values, dims, cu_seqlens, desc] {
    const auto& [x, b, a, w, a_log, dt_bias] = values;
    DeltaTensors t = DeltaTensors::empty(dims, x);
    kernels::delta_inputs({.q = t.q,
                           .k = t.k,
                           .v = t.v,
                           .g = t.g,
                           .beta = t.beta,
                           .x = x,
                           .w = w,
                           .b = b,
                           .a = a,
                           .a_log = a_log,
                           .dt_bias = dt_bias,
                           .cu_seqlens = cu_seqlens,
                           .prefixes = desc.prefixes});
    return t;
  };
  const DeltaTensors made = make_inputs();
  Tensor o = Tensor::empty_like(made.v), u = Tensor::empty_like(o);
  kernels::gated_delta({o, u, made.q, made.k, made.v, made.g, made.beta, cu_seqlens, desc});
  const auto backward = [values, dims, cu_seqlens, desc, make_inputs, u](const Tensor& dy,
                                                                         Gradients& gradients) {
    const auto& [x, b, a, w, a_log, dt_bias] = values;
    const DeltaTensors t = make_inputs();
    DeltaTensors d = DeltaTensors::empty(dims, x);
    kernels::gated_delta_backward({.dq = {d.q},
                                   .dk = {d.k},
                                   .dv = {d.v},
                                   .dg = {d.g},
                                   .dbeta = {d.beta},
                                   .dout = dy,
                                   .q = t.q,
                                   .k = t.k,
                                   .v = t.v,
                                   .g = t.g,
                                   .beta = t.beta,
                                   .u = u,
                                   .cu_seqlens = cu_seqlens,
                                   .desc = desc});
    GradSlot dx = gradients.slot(0), db = gradients.slot(1), da = gradients.slot(2),
             dw = gradients.weight_slot(3), da_log = gradients.weight_slot(4),
             ddt = gradients.weight_slot(5);
    kernels::delta_inputs_backward({.dx = dx,
                                    .dw = dw,
                                    .db = db,
                                    .da = da,
                                    .da_log = da_log,
                                    .ddt_bias = ddt,
                                    .dq = d.q,
                                    .dk = d.k,
                                    .dv = d.v,
                                    .dg = d.g,
                                    .dbeta = d.beta,
                                    .x = x,
                                    .w = w,
                                    .b = b,
                                    .a = a,
                                    .a_log = a_log,
                                    .dt_bias = dt_bias,
                                    .cu_seqlens = cu_seqlens,
                                    .prefixes = desc.prefixes});
  };
  return make_node("gated_delta", o, {in.x, in.b, in.a, in.w, in.a_log, in.dt_bias}, backward);
}

}  // namespace cohort
