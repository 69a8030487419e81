#include "kernels/delta_inputs.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {
namespace {

// The inputs that all calls have, and the numbers of heads by tensors of the shapes of the outputs.
void check_inputs(ArgumentCheck& check, const DeltaSources& in, const DeltaTensors& out) {
  check("strided [T, C] x; [C, 4] w; strided [T, Hv] b, a; accumulate [Hv] a_log, dt_bias", in.x,
        in.w, in.b, in.a, in.a_log, in.dt_bias);
  check("[T, Hk, D] q, k; [T, Hv, D] v; accumulate [T, Hv] g, beta", out.q, out.k, out.v, out.g,
        out.beta);
  check.require(check["C"] == (2 * check["Hk"] + check["Hv"]) * check["D"],
                "expected x [T, 2 Hk D + Hv D], got ", in.x, " with q ", out.q, " and v ", out.v);
  check.require(in.x.device().is_cpu() || is_gpu_delta_dim(check["D"]),
                "expected heads of 64 or 128 on a GPU, got ", out.q);
}

}  // namespace

void delta_inputs(const DeltaInputs& args) {
  ArgumentCheck check("delta_inputs");
  check_inputs(check, args.in, args.out);
  check("i32 [S + 1] cu_seqlens; i32 [S, 2] prefixes?", args.cu_seqlens, args.prefixes);
  on_device<cpu::delta_inputs, cuda::delta_inputs>(args.in.x.device(), args);
}

void delta_inputs_cached(const DeltaInputsCached& args) {
  ArgumentCheck check("delta_inputs_cached");
  check_inputs(check, args.in, args.out);
  check("strided [N, 8, C] ring; i32 [T] states, positions", args.ring, args.states,
        args.positions);
  on_device<cpu::delta_inputs_cached, cuda::delta_inputs_cached>(args.in.x.device(), args);
}

void delta_inputs_backward(const DeltaInputsBackward& args) {
  ArgumentCheck check("delta_inputs_backward");
  check_inputs(check, args.in, args.dout);
  check(
      "strided [T, C] dx?; accumulate [C, 4] dw?; strided [T, Hv] db?, da?;"
      "accumulate [Hv] da_log?, ddt_bias?; i32 [S + 1] cu_seqlens; i32 [S, 2] prefixes?",
      args.dx, args.dw, args.db, args.da, args.da_log, args.ddt_bias, args.cu_seqlens,
      args.prefixes);
  on_device<cpu::delta_inputs_backward, cuda::delta_inputs_backward>(args.in.x.device(), args);
}

}  // namespace cohort::kernels
