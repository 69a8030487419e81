// Kernels as cohort.torch calls them: outputs are arguments, and the work goes to a given stream.
// Tensors are DLPack capsules, or arrays.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include "core/device.h"
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "python/bindings/attention.h"
#include "python/bindings/bindings.h"

namespace cohort::python {
namespace {

Tensor view(const Array& x) {
  return import_array(x, Access::kRead).value();
}

// fn() with `stream`, a cudaStream_t of the tensor's device, as the current one.
template <class F>
void on_stream(int64_t stream, const Tensor& t, F&& fn) {
  without_gil([&] {
    if (t.device().is_cpu()) return fn();
    const StreamGuard guard({.device = t.device(), .handle = reinterpret_cast<void*>(stream)});
    fn();
  });
}

// causal, window, window_right, soft_cap, scale.
using Rules = std::tuple<bool, int64_t, int64_t, double, double>;

kernels::AttentionDesc desc_of(const Rules& rules) {
  const auto& [causal, window, window_right, soft_cap, scale] = rules;
  return {.scale = scale,
          .mask = causal ? kernels::Mask::kCausal : kernels::Mask::kFull,
          .window = window,
          .window_right = window_right,
          .soft_cap = soft_cap};
}

Tensor optional_view(const std::optional<Array>& x) {
  return x ? view(*x) : Tensor();
}

}  // namespace

void bind_raw(nb::module_& module) {
  nb::module_ m = module.def_submodule("raw");
  m.def(
      "attention_forward",
      [](int64_t stream, const Array& o, const Array& lse, const Array& q, const Array& k,
         const Array& v, const std::optional<Array>& cu_seqlens, const Rules& rules) {
        Tensor out = view(o), statistics = view(lse);
        const Tensor queries = view(q), keys = view(k), values = view(v);
        const Tensor offsets = optional_view(cu_seqlens);
        on_stream(stream, out, [&] {
          Tensor rows = packed(out);
          kernels::attention_forward({.o = rows,
                                      .lse = statistics,
                                      .q = packed(queries),
                                      .k = packed(keys),
                                      .v = packed(values),
                                      .cu_seqlens = sequence_offsets(offsets, queries),
                                      .desc = desc_of(rules)});
        });
      },
      nb::arg("stream"), nb::arg("o"), nb::arg("lse"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
      nb::arg("cu_seqlens").none(), nb::arg("rules"));
  m.def(
      "attention_backward",
      [](int64_t stream, const Array& dq, const Array& dk, const Array& dv, const Array& dout,
         const Array& q, const Array& k, const Array& v, const Array& o, const Array& lse,
         const std::optional<Array>& cu_seqlens, const Rules& rules) {
        const Tensor grads[] = {view(dq), view(dk), view(dv)};
        const Tensor dy = view(dout), queries = view(q), keys = view(k), values = view(v);
        const Tensor out = view(o), statistics = view(lse), offsets = optional_view(cu_seqlens);
        on_stream(stream, out, [&] {
          Tensor rows[] = {packed(grads[0]), packed(grads[1]), packed(grads[2])};
          kernels::attention_backward({.dq = {rows[0]},
                                       .dk = {rows[1]},
                                       .dv = {rows[2]},
                                       .dout = packed(dy),
                                       .q = packed(queries),
                                       .k = packed(keys),
                                       .v = packed(values),
                                       .o = packed(out),
                                       .lse = statistics,
                                       .cu_seqlens = sequence_offsets(offsets, queries),
                                       .desc = desc_of(rules)});
        });
      },
      nb::arg("stream"), nb::arg("dq"), nb::arg("dk"), nb::arg("dv"), nb::arg("dout"), nb::arg("q"),
      nb::arg("k"), nb::arg("v"), nb::arg("o"), nb::arg("lse"), nb::arg("cu_seqlens").none(),
      nb::arg("rules"));
  m.def("rms_norm_forward", [](int64_t stream, const Array& y, const Array& rstd, const Array& x,
                               const Array& w, double eps) {
    Tensor out = view(y), statistics = view(rstd);
    const Tensor in = view(x), weight = view(w);
    on_stream(stream, out, [&] {
      kernels::rms_norm_forward({.y = out, .rstd = statistics, .x = in, .w = weight, .eps = eps});
    });
  });
  m.def("rms_norm_backward", [](int64_t stream, const Array& dx, const Array& dw, const Array& dy,
                                const Array& x, const Array& w, const Array& rstd) {
    Tensor in_grad = view(dx), weight_grad = view(dw);
    const Tensor grad = view(dy), in = view(x), weight = view(w), statistics = view(rstd);
    on_stream(stream, in_grad, [&] {
      kernels::rms_norm_backward({.dx = {in_grad},
                                  .dw = {weight_grad},
                                  .dy = grad,
                                  .x = in,
                                  .w = weight,
                                  .rstd = statistics});
    });
  });
  m.def("swiglu_forward", [](int64_t stream, const Array& y, const Array& x) {
    Tensor out = view(y);
    const Tensor in = view(x);
    on_stream(stream, out, [&] { kernels::swiglu_forward({.y = out, .x = in}); });
  });
  m.def("swiglu_backward", [](int64_t stream, const Array& dx, const Array& dy, const Array& x) {
    Tensor in_grad = view(dx);
    const Tensor grad = view(dy), in = view(x);
    on_stream(stream, in_grad,
              [&] { kernels::swiglu_backward({.dx = {in_grad}, .dy = grad, .x = in}); });
  });
}

}  // namespace cohort::python
