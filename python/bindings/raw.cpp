// Kernels as cohort.torch calls them: outputs are arguments, and the work goes to a given stream.
// Tensors are DLPack capsules, or arrays.
#include "core/device.h"
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "python/bindings/attention.h"
#include "python/bindings/bindings.h"

namespace cohort::python {
namespace {

// The stream that kernels of the tensor's device use while this lives; none on the CPU.
class Current {
 public:
  Current(int64_t stream, const Tensor& t) {
    if (t.device().is_cuda())
      guard_.emplace(Stream{.device = t.device(), .handle = reinterpret_cast<void*>(stream)});
  }

 private:
  std::optional<StreamGuard> guard_;
};

kernels::AttentionDesc desc_of(bool causal, int64_t window, int64_t window_right, double soft_cap,
                               double scale) {
  return {.scale = scale,
          .mask = causal ? kernels::Mask::kCausal : kernels::Mask::kFull,
          .window = window,
          .window_right = window_right,
          .soft_cap = soft_cap};
}

void attention_forward(int64_t stream, const Tensor& o, Tensor lse, const Tensor& q,
                       const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens, bool causal,
                       int64_t window, int64_t window_right, double soft_cap, double scale) {
  const Current current(stream, o);
  Tensor rows = packed(o);
  kernels::attention_forward({.o = rows,
                              .lse = lse,
                              .q = packed(q),
                              .k = packed(k),
                              .v = packed(v),
                              .cu_seqlens = sequence_offsets(cu_seqlens, q),
                              .desc = desc_of(causal, window, window_right, soft_cap, scale)});
}

void attention_backward(int64_t stream, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                        const Tensor& dout, const Tensor& o, const Tensor& lse, const Tensor& q,
                        const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                        bool causal, int64_t window, int64_t window_right, double soft_cap,
                        double scale) {
  const Current current(stream, q);
  Tensor grads[] = {packed(dq), packed(dk), packed(dv)};
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
                               .desc = desc_of(causal, window, window_right, soft_cap, scale)});
}

void rms_norm_forward(int64_t stream, Tensor y, Tensor rstd, const Tensor& x, const Tensor& w,
                      double eps) {
  const Current current(stream, x);
  kernels::rms_norm_forward({.y = y, .rstd = rstd, .x = x, .w = w, .eps = eps});
}
void rms_norm_backward(int64_t stream, Tensor dx, Tensor dw, const Tensor& dy, const Tensor& rstd,
                       const Tensor& x, const Tensor& w, double /*eps*/) {
  const Current current(stream, x);
  kernels::rms_norm_backward({.dx = {dx}, .dw = {dw}, .dy = dy, .x = x, .w = w, .rstd = rstd});
}
void swiglu_forward(int64_t stream, Tensor y, const Tensor& x) {
  const Current current(stream, x);
  kernels::swiglu_forward({.y = y, .x = x});
}
void swiglu_backward(int64_t stream, Tensor dx, const Tensor& dy, const Tensor& x) {
  const Current current(stream, x);
  kernels::swiglu_backward({.dx = {dx}, .dy = dy, .x = x});
}

}  // namespace

void bind_raw(nb::module_& m) {
  define(m, "raw_attention_forward", &attention_forward);
  define(m, "raw_attention_backward", &attention_backward);
  define(m, "raw_rms_norm_forward", &rms_norm_forward);
  define(m, "raw_rms_norm_backward", &rms_norm_backward);
  define(m, "raw_swiglu_forward", &swiglu_forward);
  define(m, "raw_swiglu_backward", &swiglu_backward);
}

}  // namespace cohort::python
