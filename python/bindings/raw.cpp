// Kernels as cohort.torch calls them: outputs are arguments, and the work goes to a given stream.
// Tensors are DLPack capsules, or arrays.
#include <nanobind/stl/optional.h>

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

// Arguments of both directions.
struct Attention {
  Tensor q, k, v, cu_seqlens;
  kernels::AttentionDesc desc;

  Attention(const Array& q, const Array& k, const Array& v, const std::optional<Array>& offsets,
            kernels::AttentionDesc desc)
      : q(view(q)), k(view(k)), v(view(v)), desc(std::move(desc)) {
    if (offsets) cu_seqlens = view(*offsets);
  }
  // Views or copies for the kernels, on the current stream.
  void pack() {
    cu_seqlens = sequence_offsets(cu_seqlens, q);
    for (Tensor* t : {&q, &k, &v}) *t = packed(*t);
  }
};

kernels::AttentionDesc desc_of(bool causal, int64_t window, int64_t window_right, double soft_cap,
                               double scale) {
  return {.scale = scale,
          .mask = causal ? kernels::Mask::kCausal : kernels::Mask::kFull,
          .window = window,
          .window_right = window_right,
          .soft_cap = soft_cap};
}

void attention_forward(int64_t stream, const Tensor& o, Tensor lse, Attention in) {
  on_stream(stream, o, [&] {
    in.pack();
    Tensor rows = packed(o);
    kernels::attention_forward({.o = rows,
                                .lse = lse,
                                .q = in.q,
                                .k = in.k,
                                .v = in.v,
                                .cu_seqlens = in.cu_seqlens,
                                .desc = in.desc});
  });
}

struct AttentionResults {
  Tensor dq, dk, dv, dout, o, lse;
};
void attention_backward(int64_t stream, AttentionResults out, Attention in) {
  on_stream(stream, out.dq, [&] {
    in.pack();
    for (Tensor* t : {&out.dq, &out.dk, &out.dv, &out.dout, &out.o}) *t = packed(*t);
    kernels::attention_backward({.dq = {out.dq},
                                 .dk = {out.dk},
                                 .dv = {out.dv},
                                 .dout = out.dout,
                                 .q = in.q,
                                 .k = in.k,
                                 .v = in.v,
                                 .o = out.o,
                                 .lse = out.lse,
                                 .cu_seqlens = in.cu_seqlens,
                                 .desc = in.desc});
  });
}

}  // namespace

void bind_raw(nb::module_& m) {
  using Offsets = std::optional<Array>;
  m.def("raw_attention_forward",
        [](int64_t stream, const Array& o, const Array& lse, const Array& q, const Array& k,
           const Array& v, const Offsets& cu_seqlens, bool causal, int64_t window,
           int64_t window_right, double soft_cap, double scale) {
          attention_forward(
              stream, view(o), view(lse),
              {q, k, v, cu_seqlens, desc_of(causal, window, window_right, soft_cap, scale)});
        });
  m.def("raw_attention_backward",
        [](int64_t stream, const Array& dq, const Array& dk, const Array& dv, const Array& dout,
           const Array& o, const Array& lse, const Array& q, const Array& k, const Array& v,
           const Offsets& cu_seqlens, bool causal, int64_t window, int64_t window_right,
           double soft_cap, double scale) {
          attention_backward(
              stream, {view(dq), view(dk), view(dv), view(dout), view(o), view(lse)},
              {q, k, v, cu_seqlens, desc_of(causal, window, window_right, soft_cap, scale)});
        });
  m.def("raw_rms_norm_forward", [](int64_t stream, const Array& y, const Array& rstd,
                                   const Array& x, const Array& w, double eps) {
    Tensor out = view(y), statistics = view(rstd);
    const Tensor in = view(x), weight = view(w);
    on_stream(stream, out, [&] {
      kernels::rms_norm_forward({.y = out, .rstd = statistics, .x = in, .w = weight, .eps = eps});
    });
  });
  m.def("raw_rms_norm_backward",
        [](int64_t stream, const Array& dx, const Array& dw, const Array& dy, const Array& rstd,
           const Array& x, const Array& w, double /*eps*/) {
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
  m.def("raw_swiglu_forward", [](int64_t stream, const Array& y, const Array& x) {
    Tensor out = view(y);
    const Tensor in = view(x);
    on_stream(stream, out, [&] { kernels::swiglu_forward({.y = out, .x = in}); });
  });
  m.def("raw_swiglu_backward",
        [](int64_t stream, const Array& dx, const Array& dy, const Array& x) {
          Tensor in_grad = view(dx);
          const Tensor grad = view(dy), in = view(x);
          on_stream(stream, in_grad,
                    [&] { kernels::swiglu_backward({.dx = {in_grad}, .dy = grad, .x = in}); });
        });
}

}  // namespace cohort::python
