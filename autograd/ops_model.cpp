// Norms, attention, rotary embedding and dropout: forward and backward side by side.
#include "autograd/ops.h"
#include "kernels/norm.h"
#include "kernels/rope.h"

namespace cohort {

namespace {

// One statistic per row of x.
Tensor row_statistic(const Tensor& x) {
  return Tensor::empty({x.rows()}, accumulate_dtype(x.dtype()), x.device());
}

Variable rms_norm_node(const Tensor& y, const Tensor& rstd, const Variable& x, const Variable& w,
                       double weight_offset) {
  return make_node(
      "rms_norm", y, {x, w},
      [x = x.value(), w = w.value(), rstd, weight_offset](const Tensor& dy, Gradients& g) {
        kernels::rms_norm_backward({.dx = g.slot(0),
                                    .dw = g.weight_slot(1),
                                    .dy = dy,
                                    .x = x,
                                    .w = w,
                                    .rstd = rstd,
                                    .weight_offset = weight_offset});
      });
}

Variable layer_norm_node(const Tensor& y, const Tensor& mean, const Tensor& rstd, const Variable& x,
                         const Variable& w, const Variable& b) {
  return make_node("layer_norm", y, {x, w, b},
                   [x = x.value(), w = w.value(), mean, rstd](const Tensor& dy, Gradients& g) {
                     kernels::layer_norm_backward({.dx = g.slot(0),
                                                   .dw = g.weight_slot(1),
                                                   .db = g.weight_slot(2),
                                                   .dy = dy,
                                                   .x = x,
                                                   .w = w,
                                                   .mean = mean,
                                                   .rstd = rstd});
                   });
}

Variable add_node(const Tensor& sum, const Variable& a, const Variable& b) {
  return make_node("add", sum, {a, b}, [](const Tensor& dy, Gradients& g) {
    g.pass(0, dy);
    g.pass(1, dy);
  });
}

}  // namespace

Variable rms_norm(const Variable& x, const Variable& w, double eps, double weight_offset) {
  Tensor y = Tensor::empty_like(x.value()), rstd = row_statistic(x.value());
  kernels::rms_norm_forward({.y = y,
                             .rstd = rstd,
                             .x = x.value(),
                             .w = w.value(),
                             .eps = eps,
                             .weight_offset = weight_offset});
  return rms_norm_node(y, rstd, x, w, weight_offset);
}

Variable layer_norm(const Variable& x, const Variable& w, const Variable& b, double eps) {
  Tensor y = Tensor::empty_like(x.value()), mean = row_statistic(x.value()),
         rstd = row_statistic(x.value());
  kernels::layer_norm_forward({.y = y,
                               .mean = mean,
                               .rstd = rstd,
                               .x = x.value(),
                               .w = w.value(),
                               .b = b.value(),
                               .eps = eps});
  return layer_norm_node(y, mean, rstd, x, w, b);
}

AddNorm add_rms_norm(const Variable& a, const Variable& b, const Variable& w, double eps,
                     double weight_offset) {
  Tensor sum = Tensor::empty_like(a.value()), y = Tensor::empty_like(a.value());
  Tensor rstd = row_statistic(a.value());
  kernels::add_rms_norm_forward({.sum = sum,
                                 .y = y,
                                 .rstd = rstd,
                                 .a = a.value(),
                                 .b = b.value(),
                                 .w = w.value(),
                                 .eps = eps,
                                 .weight_offset = weight_offset});
  const Variable total = add_node(sum, a, b);
  return {total, rms_norm_node(y, rstd, total, w, weight_offset)};
}

AddNorm add_layer_norm(const Variable& a, const Variable& b, const Variable& w,
                       const Variable& bias, double eps) {
  Tensor sum = Tensor::empty_like(a.value()), y = Tensor::empty_like(a.value());
  Tensor mean = row_statistic(a.value()), rstd = row_statistic(a.value());
  kernels::add_layer_norm_forward({.sum = sum,
                                   .y = y,
                                   .mean = mean,
                                   .rstd = rstd,
                                   .a = a.value(),
                                   .b = b.value(),
                                   .w = w.value(),
                                   .bias = bias.value(),
                                   .eps = eps});
  const Variable total = add_node(sum, a, b);
  return {total, layer_norm_node(y, mean, rstd, total, w, bias)};
}

Variable softmax(const Variable& x) {
  Tensor y = Tensor::empty_like(x.value());
  kernels::softmax_forward({.y = y, .x = x.value()});
  return make_node("softmax", y, {x}, [y](const Tensor& dy, Gradients& g) {
    kernels::softmax_backward({.dx = g.slot(0), .dy = dy, .y = y});
  });
}

Variable rope(const Variable& x, const Tensor& positions, const Tensor& table) {
  Tensor y = Tensor::empty_like(x.value());
  kernels::rope({.y = y,
                 .x = x.value(),
                 .positions = positions,
                 .table = table,
                 .direction = kernels::RopeDirection::kForward});
  return make_node("rope", y, {x}, [positions, table](const Tensor& dy, Gradients& g) {
    GradSlot dx = g.slot(0);
    kernels::rope({.y = dx.tensor,
                   .x = dy,
                   .positions = positions,
                   .table = table,
                   .direction = kernels::RopeDirection::kInverse,
                   .mode = dx.mode});
  });
}

Variable attention(const Variable& q, const Variable& k, const Variable& v,
                   const Tensor& cu_seqlens, const kernels::AttentionDesc& desc) {
  const Tensor& qv = q.value();
  Tensor o = Tensor::empty_like(qv),
         lse = Tensor::empty({qv.dim(1), qv.dim(0)}, accumulate_dtype(qv.dtype()), qv.device());
  kernels::attention_forward({.o = o,
                              .lse = lse,
                              .q = qv,
                              .k = k.value(),
                              .v = v.value(),
                              .cu_seqlens = cu_seqlens,
                              .desc = desc});
  return make_node("attention", o, {q, k, v},
                   [q = qv, k = k.value(), v = v.value(), o, lse, cu_seqlens, desc](
                       const Tensor& dy, Gradients& g) {
                     // The kernel writes all three; one that nobody needs goes to scratch.
                     const auto slot_or_scratch = [&](int i, const Tensor& like) {
                       GradSlot slot = g.slot(i);
                       return slot.tensor.defined()
                                  ? slot
                                  : GradSlot{Tensor::empty_like(like), kernels::Grad::kOverwrite};
                     };
                     GradSlot dq = slot_or_scratch(0, q), dk = slot_or_scratch(1, k),
                              dv = slot_or_scratch(2, v);
                     kernels::attention_backward({.dq = dq,
                                                  .dk = dk,
                                                  .dv = dv,
                                                  .dout = dy,
                                                  .q = q,
                                                  .k = k,
                                                  .v = v,
                                                  .o = o,
                                                  .lse = lse,
                                                  .cu_seqlens = cu_seqlens,
                                                  .desc = desc});
                   });
}

Variable dropout(const Variable& x, const kernels::DropoutSpec& spec) {
  if (spec.p == 0) return x;
  Tensor y = Tensor::empty_like(x.value());
  kernels::dropout({.y = y, .x = x.value(), .spec = spec});
  return make_node("dropout", y, {x}, [spec](const Tensor& dy, Gradients& g) {
    GradSlot dx = g.slot(0);
    kernels::dropout({.y = dx.tensor, .x = dy, .spec = spec, .mode = dx.mode});
  });
}

}  // namespace cohort
