// The mixer of a gated delta rule layer: forward and backward.
#include "autograd/ops.h"
#include "kernels/delta_inputs.h"

namespace cohort {
namespace {

// A call on values, from which the backward makes queries, keys, values and gates again.
struct DeltaNode {
  Tensor x, b, a, w, a_log, dt_bias, cu_seqlens;
  DeltaDims dims;
  kernels::GatedDeltaDesc desc;
  Tensor u;

  DeltaTensors inputs() const {
    DeltaTensors t = empty_delta_tensors(x, dims);
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
  }
  DeltaTensors gradients(const Tensor& dy, const DeltaTensors& t) const {
    DeltaTensors d = empty_delta_tensors(x, dims);
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
    return d;
  }
  void operator()(const Tensor& dy, Gradients& to) const {
    const DeltaTensors d = gradients(dy, inputs());
    GradSlot dx = to.slot(0), db = to.slot(1), da = to.slot(2), dw = to.weight_slot(3),
             da_log = to.weight_slot(4), ddt_bias = to.weight_slot(5);
    kernels::delta_inputs_backward({.dx = dx,
                                    .dw = dw,
                                    .db = db,
                                    .da = da,
                                    .da_log = da_log,
                                    .ddt_bias = ddt_bias,
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
  }
};

}  // namespace

DeltaTensors empty_delta_tensors(const Tensor& x, const DeltaDims& dims) {
  const int64_t tokens = x.dim(0);
  const DType statistic = accumulate_dtype(x.dtype());
  const Tensor keys = Tensor::empty({tokens, dims.key_heads, dims.dim}, x.dtype(), x.device()),
               values = Tensor::empty({tokens, dims.heads, dims.dim}, x.dtype(), x.device()),
               gates = Tensor::empty({tokens, dims.heads}, statistic, x.device());
  return {keys, Tensor::empty_like(keys), values, gates, Tensor::empty_like(gates)};
}

Variable gated_delta(const DeltaVariables& in, const DeltaDims& dims, const Tensor& cu_seqlens,
                     const kernels::GatedDeltaDesc& desc) {
  DeltaNode node{.x = in.x.value(),
                 .b = in.b.value(),
                 .a = in.a.value(),
                 .w = in.w.value(),
                 .a_log = in.a_log.value(),
                 .dt_bias = in.dt_bias.value(),
                 .cu_seqlens = cu_seqlens,
                 .dims = dims,
                 .desc = desc,
                 .u = {}};
  const DeltaTensors t = node.inputs();
  Tensor o = Tensor::empty_like(t.v);
  node.u = Tensor::empty_like(o);
  kernels::gated_delta({o, node.u, t.q, t.k, t.v, t.g, t.beta, cu_seqlens, desc});
  return make_node("gated_delta", o, {in.x, in.b, in.a, in.w, in.a_log, in.dt_bias},
                   std::move(node));
}

}  // namespace cohort
