// Norms, attention, rotary embedding and dropout: forward and backward side by side.
#include "autograd/ops.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"
#include "kernels/rope.h"

namespace cohort {

using kernels::Grad;

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

}  // namespace

Variable rms_norm(const Variable& x, const Variable& weight, const RmsNormDesc& desc) {
  Variable w = weight;
  w.value() = w.value().to(x.value().dtype());
  Tensor y = empty_rows(x.value(), x.value().cols(), desc.padding), rstd = row_statistic(x.value());
  kernels::rms_norm_forward({.y = y,
                             .rstd = rstd,
                             .x = x.value(),
                             .w = w.value(),
                             .eps = desc.eps,
                             .weight_offset = desc.weight_offset});
  return rms_norm_node(y, rstd, x, w, desc.weight_offset);
}

Variable layer_norm(const Variable& x, const Variable& w, const Variable& b,
                    const LayerNormDesc& desc) {
  Tensor y = empty_rows(x.value(), x.value().cols(), desc.padding), mean = row_statistic(x.value()),
         rstd = row_statistic(x.value());
  kernels::layer_norm_forward({.y = y,
                               .mean = mean,
                               .rstd = rstd,
                               .x = x.value(),
                               .w = w.value(),
                               .b = b.value(),
                               .eps = desc.eps});
  return layer_norm_node(y, mean, rstd, x, w, b);
}

AddNorm add_rms_norm(const Variable& a, const Variable& b, const Variable& w,
                     const RmsNormDesc& desc) {
  Tensor sum = Tensor::empty_like(a.value()),
         y = empty_rows(a.value(), a.value().cols(), desc.padding);
  Tensor rstd = row_statistic(a.value());
  kernels::add_rms_norm_forward({.sum = sum,
                                 .y = y,
                                 .rstd = rstd,
                                 .a = a.value(),
                                 .b = b.value(),
                                 .w = w.value(),
                                 .eps = desc.eps,
                                 .weight_offset = desc.weight_offset});
  const Variable total = add_node(sum, a, b);
  return {total, rms_norm_node(y, rstd, total, w, desc.weight_offset)};
}

AddNorm add_layer_norm(const Variable& a, const Variable& b, const Variable& w,
                       const Variable& bias, const LayerNormDesc& desc) {
  Tensor sum = Tensor::empty_like(a.value()),
         y = empty_rows(a.value(), a.value().cols(), desc.padding);
  Tensor mean = row_statistic(a.value()), rstd = row_statistic(a.value());
  kernels::add_layer_norm_forward({.sum = sum,
                                   .y = y,
                                   .mean = mean,
                                   .rstd = rstd,
                                   .a = a.value(),
                                   .b = b.value(),
                                   .w = w.value(),
                                   .bias = bias.value(),
                                   .eps = desc.eps});
  const Variable total = add_node(sum, a, b);
  return {total, layer_norm_node(y, mean, rstd, total, w, bias)};
}

namespace {

// The queries, keys and values of qkv [T, H + 2 Hkv, D].
std::array<Tensor, 3> split_heads(const Tensor& qkv, int64_t kv_heads) {
  COHORT_CHECK(qkv.rank() == 3 && kv_heads >= 1 && qkv.dim(1) > 2 * kv_heads,
               "[qkv] expected [T, H + 2 Hkv, D] with ", kv_heads, " key heads, got ", qkv.str());
  const int64_t heads = qkv.dim(1) - 2 * kv_heads;
  return {qkv.narrow(1, 0, heads), qkv.narrow(1, heads, kv_heads),
          qkv.narrow(1, heads + kv_heads, kv_heads)};
}

// Heads [first, first + count) of qkv as rows of a norm with weight w: one row per head, or one per
// token.
Tensor norm_rows(const Tensor& qkv, int64_t first, int64_t count, const Tensor& w) {
  const int64_t dim = qkv.dim(2);
  if (w.numel() == dim) return qkv.narrow(1, first, count);
  return qkv.reshape({qkv.dim(0), qkv.dim(1) * dim}).narrow(1, first * dim, count * dim);
}

}  // namespace

Variable qk_norm(Variable qkv, const QkNormWeights& w, int64_t kv_heads, double eps,
                 double weight_offset) {
  const bool in_place = !grad_enabled() && qkv.value().sole_owner();
  const Tensor x = qkv.value();
  Tensor y = in_place ? x : Tensor::empty_like(x);
  const int64_t heads = x.dim(1) - 2 * kv_heads;
  const auto normalise = [&](int64_t first, int64_t count, const Tensor& weight) {
    const Tensor rows = norm_rows(x, first, count, weight);
    Tensor normed = norm_rows(y, first, count, weight), rstd = row_statistic(rows);
    kernels::rms_norm_forward({normed, rstd, rows, weight, eps, weight_offset});
    return rstd;
  };
  const Tensor q_rstd = normalise(0, heads, w.q.value());
  const Tensor k_rstd = normalise(heads, kv_heads, w.k.value());
  if (!in_place) split_heads(y, kv_heads)[2].copy_(split_heads(x, kv_heads)[2]);
  return make_node("qk_norm", y, {qkv, w.q, w.k},
                   [x, wq = w.q.value(), wk = w.k.value(), q_rstd, k_rstd, heads, kv_heads,
                    weight_offset](const Tensor& dy, Gradients& g) {
                     Tensor dx = g.needed(0) ? Tensor::empty_like(x) : Tensor();
                     const auto backward = [&](int64_t first, int64_t count, const Tensor& weight,
                                               const Tensor& rstd, GradSlot dw) {
                       Tensor out = dx.defined() ? norm_rows(dx, first, count, weight) : Tensor();
                       kernels::rms_norm_backward({.dx = {out},
                                                   .dw = dw,
                                                   .dy = norm_rows(dy, first, count, weight),
                                                   .x = norm_rows(x, first, count, weight),
                                                   .w = weight,
                                                   .rstd = rstd,
                                                   .weight_offset = weight_offset});
                     };
                     backward(0, heads, wq, q_rstd, g.weight_slot(1));
                     backward(heads, kv_heads, wk, k_rstd, g.weight_slot(2));
                     if (!dx.defined()) return;
                     split_heads(dx, kv_heads)[2].copy_(split_heads(dy, kv_heads)[2]);
                     g.pass(0, dx);
                   });
}

Variable rope(Variable qkv, const Tensor& positions, const Tensor& table, int64_t kv_heads,
              const Tensor& scales) {
  const bool in_place = qkv.value().sole_owner();
  Tensor y = in_place ? qkv.value() : Tensor::empty_like(qkv.value());
  kernels::rope({.y = y,
                 .x = qkv.value(),
                 .positions = positions,
                 .table = table,
                 .plain_heads = kv_heads,
                 .scales = scales});
  return make_node("rope", y, {qkv}, [positions, table, kv_heads](const Tensor& dy, Gradients& g) {
    if (!g.needed(0)) return;
    // The gradient, too, is rotated in place if it has no other owner.
    const bool in_place = dy.sole_owner();
    GradSlot dx = in_place ? GradSlot{dy} : g.slot(0);
    kernels::rope({.y = dx.tensor,
                   .x = dy,
                   .positions = positions,
                   .table = table,
                   .direction = kernels::RopeDirection::kInverse,
                   .mode = dx.mode,
                   .plain_heads = kv_heads});
    if (in_place) g.pass(0, dy);
  });
}

Variable relative_bias(const Variable& table, const Tensor& rows) {
  const Tensor& w = table.value();
  Tensor y = Tensor::empty({rows.numel(), w.dim(1)}, w.dtype(), w.device());
  kernels::embedding_forward({.y = y, .table = w, .ids = rows});
  const Tensor bias = y.to(accumulate_dtype(w.dtype())).transpose(0, 1).contiguous();
  return make_node("relative_bias", bias, {table}, [rows](const Tensor& dy, Gradients& g) {
    kernels::embedding_backward(
        {.dtable = g.weight_slot(0), .dy = dy.transpose(0, 1).contiguous(), .ids = rows});
  });
}

kernels::AttentionDesc AttentionTerms::added_to(kernels::AttentionDesc desc) const {
  const auto statistic = [](const Tensor& t) { return t.to(accumulate_dtype(t.dtype())); };
  if (bias.defined()) desc.bias = statistic(bias.value());
  if (sinks.defined()) desc.sinks = statistic(sinks.value());
  return desc;
}

Variable attention(std::span<const Variable> inputs, const QkvViews& views, Tensor y,
                   const Tensor& cu_seqlens, const kernels::AttentionDesc& rules,
                   const AttentionTerms& terms) {
  const kernels::AttentionDesc desc = terms.added_to(rules);
  std::vector<Tensor> values;
  for (const Variable& input : inputs) values.push_back(input.value());
  const std::array<Tensor, 3> qkv = views(values);
  const auto& [q, k, v] = qkv;
  Tensor o = y.reshape(q.shape());
  Tensor lse = Tensor::empty({q.dim(1), q.dim(0)}, accumulate_dtype(v.dtype()), q.device());
  kernels::attention_forward({o, lse, q, k, v, cu_seqlens, desc});
  std::vector<Variable> all(inputs.begin(), inputs.end());
  all.insert(all.end(), {terms.bias, terms.sinks});
  return make_node(
      "attention", std::move(y), std::span<const Variable>(all),
      [values, views, qkv, o, lse, cu_seqlens, desc](const Tensor& dy, Gradients& g) {
        const int count = static_cast<int>(values.size());
        std::vector<Tensor> grads;
        std::vector<Grad> modes;
        for (int i = 0; i < count; ++i) {
          const GradSlot slot = g.slot(i);
          const Tensor& value = values[static_cast<size_t>(i)];
          grads.push_back(slot.tensor.defined() ? slot.tensor : Tensor::empty_like(value));
          modes.push_back(slot.mode);
        }
        modes.resize(3, modes[0]);
        auto [dq, dk, dv] = views(grads);
        // Layers share the bias. A tensor of its own for each makes the sum over layers the same
        // with and without recomputation.
        Tensor dbias = g.needed(count) ? Tensor::empty_like(desc.bias) : Tensor();
        GradSlot dsinks = g.weight_slot(count + 1);
        const auto wanted = [](Tensor& t, Grad mode) {
          return t.defined() ? std::optional(kernels::GradOut{t, mode}) : std::nullopt;
        };
        kernels::attention_backward({.dq = {dq, modes[0]},
                                     .dk = {dk, modes[1]},
                                     .dv = {dv, modes[2]},
                                     .dout = dy.reshape(o.shape()),
                                     .q = qkv[0],
                                     .k = qkv[1],
                                     .v = qkv[2],
                                     .o = o,
                                     .lse = lse,
                                     .cu_seqlens = cu_seqlens,
                                     .desc = desc,
                                     .dbias = wanted(dbias, Grad::kOverwrite),
                                     .dsinks = wanted(dsinks.tensor, dsinks.mode)});
        if (dbias.defined()) g.pass(count, dbias);
      });
}

Variable attention(const Variable& qkv, int64_t kv_heads, const Tensor& cu_seqlens,
                   const kernels::AttentionDesc& desc, int64_t padding,
                   const AttentionTerms& terms) {
  const auto views = [kv_heads](std::span<const Tensor> tensors) {
    return split_heads(tensors[0], kv_heads);
  };
  const Tensor& x = qkv.value();
  const Shape shape = split_heads(x, kv_heads)[0].shape();
  const int64_t width = shape[1] * shape[2];
  const Tensor rows = Tensor::empty({shape[0], width + padding}, x.dtype(), x.device());
  return attention(std::array{qkv}, views, rows.hide_padding(1, width), cu_seqlens, desc, terms);
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
