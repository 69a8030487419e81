#include "kernels/gated_delta/gated_delta.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {
namespace {

void check_sizes(const ArgumentCheck& check, const Tensor& t) {
  check.require(t.device().is_cpu() || is_gpu_delta_dim(t.dim(2)),
                "expected heads of 64 or 128 on a GPU, got ", t);
  check.require(check["Hk"] > 0 && check["Hv"] > 0 && check["Hv"] % check["Hk"] == 0,
                "expected a multiple of the ", check["Hk"], " heads of k for v, got ", check["Hv"]);
}

}  // namespace

// on_device() skips the CPU's functions in a dry run; tensors of GPUs have been refused before.
void gated_delta(const GatedDelta& args) {
  ArgumentCheck check("gated_delta");
  check(
      "[T, Hk, D] q, k; [T, Hv, D] v, o, u; accumulate [T, Hv] g, beta; i32 [S + 1] cu_seqlens; "
      "i32 [S, 2] prefixes?",
      args.in.q, args.in.k, args.in.v, args.o, args.u, args.in.g, args.in.beta, args.cu_seqlens,
      args.desc.prefixes);
  check_sizes(check, args.in.v);
  on_device<cpu::gated_delta, cuda::gated_delta>(args.in.v.device(), args);
}

void gated_delta_backward(const GatedDeltaBackward& args) {
  ArgumentCheck check("gated_delta_backward");
  check(
      "[T, Hk, D] q, k; [T, Hv, D] v, u, dout; accumulate [T, Hv] g, beta; i32 [S + 1] "
      "cu_seqlens; i32 [S, 2] prefixes?",
      args.in.q, args.in.k, args.in.v, args.u, args.dout, args.in.g, args.in.beta, args.cu_seqlens,
      args.desc.prefixes);
  check("[T, Hk, D] dq, dk; [T, Hv, D] dv; accumulate [T, Hv] dg, dbeta", args.dq, args.dk, args.dv,
        args.dg, args.dbeta);
  check_sizes(check, args.in.v);
  on_device<cpu::gated_delta_backward, cuda::gated_delta_backward>(args.in.v.device(), args);
}

void gated_delta_cached(const GatedDeltaCached& args) {
  ArgumentCheck check("gated_delta_cached");
  check("[T, Hk, D] q, k; [T, Hv, D] v, o; accumulate [T, Hv] g, beta; i32 [T] states, positions",
        args.in.q, args.in.k, args.in.v, args.o, args.in.g, args.in.beta, args.states,
        args.positions);
  static_assert(kDeltaChunk == 64);
  check(
      "accumulate [N, Hv, D, D] s; [N, 64, Hk, D] k; [N, 64, Hv, D] u; accumulate [N, 64, Hv] "
      "decay",
      args.state.s, args.state.k, args.state.u, args.state.decay);
  check_sizes(check, args.in.v);
  on_device<cpu::gated_delta_cached, cuda::gated_delta_cached>(args.in.v.device(), args);
}

}  // namespace cohort::kernels
