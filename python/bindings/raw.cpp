// Kernels as cohort.torch calls them, on torch tensors: outputs are arguments, and the work goes to
// torch's current stream.
#include "core/device.h"
#include "kernels/attention/attention.h"
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "python/bindings/bindings.h"

namespace cohort::python {
namespace {

// Binds fn, whose first parameter is a Tensor.
template <class... T>
void define_raw(nb::module_& m, const char* name, void (*fn)(T...)) {
  m.def(name, [fn](typename Argument<std::decay_t<T>>::Type... arguments) {
    std::tuple<std::decay_t<T>...> values{Argument<std::decay_t<T>>::of(arguments)...};
    const Device device = std::get<0>(values).device();
    std::optional<StreamGuard> guard;
    if (device.is_cuda()) guard.emplace(torch_stream(std::get<0>(std::tie(arguments...)), device));
    without_gil([&] { std::apply(fn, values); });
  });
}

kernels::AttentionDesc desc_of(const Tensor& bias, const Tensor& sinks, const Tensor& slopes,
                               const Tensor& prefix_lm, const Tensor& tiles, bool causal,
                               int64_t window, int64_t window_right, double soft_cap,
                               double scale) {
  kernels::AttentionDesc desc{.scale = scale, .window = window, .window_right = window_right};
  if (!causal) desc.mask = kernels::Mask::kFull;
  desc.prefix_lm = prefix_lm;
  desc.tiles = tiles;
  desc.soft_cap = soft_cap;
  desc.slopes = slopes;
  desc.bias = bias;
  desc.sinks = sinks;
  return desc;
}

// Rules: the other parameters of desc_of().
template <class... Rules>
struct Attention {
  static void forward(const Tensor& o, Tensor lse, const Tensor& q, const Tensor& k,
                      const Tensor& v, const MaybeTensor& bias, const MaybeTensor& sinks,
                      const MaybeTensor& cu_seqlens, Rules... rules) {
    Tensor rows = packed(o);
    kernels::attention_forward({rows, lse, packed(q), packed(k), packed(v),
                                sequence_offsets(cu_seqlens, q), desc_of(bias, sinks, rules...)});
  }
  static void backward(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                       const MaybeTensor& dbias, const MaybeTensor& dsinks, const Tensor& dout,
                       const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                       const Tensor& v, const MaybeTensor& bias, const MaybeTensor& sinks,
                       const MaybeTensor& cu_seqlens, Rules... rules) {
    Tensor grads[] = {packed(dq), packed(dk), packed(dv), dbias, dsinks};
    const auto term = [](Tensor& grad) {
      return grad.defined() ? std::optional(kernels::GradOut{grad}) : std::nullopt;
    };
    kernels::attention_backward({.dq = {grads[0]},
                                 .dk = {grads[1]},
                                 .dv = {grads[2]},
                                 .dout = packed(dout),
                                 .q = packed(q),
                                 .k = packed(k),
                                 .v = packed(v),
                                 .o = packed(o),
                                 .lse = lse,
                                 .cu_seqlens = sequence_offsets(cu_seqlens, q),
                                 .desc = desc_of(bias, sinks, rules...),
                                 .dbias = term(grads[3]),
                                 .dsinks = term(grads[4])});
  }
};
using AttentionCalls =
    Attention<MaybeTensor, MaybeTensor, MaybeTensor, bool, int64_t, int64_t, double, double>;

void rms_norm_forward(Tensor y, Tensor rstd, const Tensor& x, const Tensor& w, double eps) {
  kernels::rms_norm_forward({.y = y, .rstd = rstd, .x = x, .w = w, .eps = eps});
}
void rms_norm_backward(Tensor dx, Tensor dw, const Tensor& dy, const Tensor& rstd, const Tensor& x,
                       const Tensor& w, double /*eps*/) {
  kernels::rms_norm_backward({.dx = {dx}, .dw = {dw}, .dy = dy, .x = x, .w = w, .rstd = rstd});
}
void swiglu_forward(Tensor y, const Tensor& x) {
  kernels::swiglu_forward({.y = y, .x = x});
}
void swiglu_backward(Tensor dx, const Tensor& dy, const Tensor& x) {
  kernels::swiglu_backward({.dx = {dx}, .dy = dy, .x = x});
}

}  // namespace

void bind_raw(nb::module_& m) {
  define_raw(m, "raw_attention_forward", &AttentionCalls::forward);
  define_raw(m, "raw_attention_backward", &AttentionCalls::backward);
  define_raw(m, "raw_rms_norm_forward", &rms_norm_forward);
  define_raw(m, "raw_rms_norm_backward", &rms_norm_backward);
  define_raw(m, "raw_swiglu_forward", &swiglu_forward);
  define_raw(m, "raw_swiglu_backward", &swiglu_backward);
}

}  // namespace cohort::python
