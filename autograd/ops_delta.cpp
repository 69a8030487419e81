// The mixer of a gated delta rule layer: forward and backward.
#include "autograd/ops.h"

namespace cohort {
namespace {

// A call on values, from which the backward makes queries, keys, values and gates again.
struct DeltaNode {
  kernels::DeltaSources in;
  Tensor cu_seqlens;
  DeltaDims dims;
  kernels::GatedDeltaDesc desc;
  Tensor u;

  kernels::DeltaTensors inputs() const {
    kernels::DeltaTensors t = empty_delta_tensors(in.x, dims);
    kernels::delta_inputs({t, in, cu_seqlens, desc.prefixes});
    return t;
  }
  void operator()(const Tensor& dy, Gradients& to) const {
    kernels::DeltaTensors d = empty_delta_tensors(in.x, dims);
    kernels::gated_delta_backward(
        {{d.q}, {d.k}, {d.v}, {d.g}, {d.beta}, dy, inputs(), u, cu_seqlens, desc});
    GradSlot dx = to.slot(0), db = to.slot(1), da = to.slot(2), dw = to.weight_slot(3),
             da_log = to.weight_slot(4), ddt_bias = to.weight_slot(5);
    kernels::delta_inputs_backward({.dx = dx,
                                    .dw = dw,
                                    .db = db,
                                    .da = da,
                                    .da_log = da_log,
                                    .ddt_bias = ddt_bias,
                                    .dout = d,
                                    .in = in,
                                    .cu_seqlens = cu_seqlens,
                                    .prefixes = desc.prefixes});
  }
};

}  // namespace

kernels::DeltaTensors empty_delta_tensors(const Tensor& x, const DeltaDims& dims) {
  const int64_t tokens = x.dim(0);
  const DType statistic = accumulate_dtype(x.dtype());
  const Tensor keys = Tensor::empty({tokens, dims.key_heads, dims.dim}, x.dtype(), x.device()),
               values = Tensor::empty({tokens, dims.heads, dims.dim}, x.dtype(), x.device()),
               gates = Tensor::empty({tokens, dims.heads}, statistic, x.device());
  return {keys, Tensor::empty_like(keys), values, gates, Tensor::empty_like(gates)};
}

Variable gated_delta(const DeltaVariables& in, const DeltaDims& dims, const Tensor& cu_seqlens,
                     const kernels::GatedDeltaDesc& desc) {
  DeltaNode node{.in = in.values(), .cu_seqlens = cu_seqlens, .dims = dims, .desc = desc, .u = {}};
  const kernels::DeltaTensors t = node.inputs();
  Tensor o = Tensor::empty_like(t.v);
  node.u = Tensor::empty_like(o);
  kernels::gated_delta({o, node.u, t, cu_seqlens, desc});
  return make_node("gated_delta", o, {in.x, in.b, in.a, in.w, in.a_log, in.dt_bias},
                   std::move(node));
}

}  // namespace cohort
