#include "kernels/matmul.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

void matmul(const Matmul& args) {
  const auto& [c, a, b, desc] = args;
  ArgumentCheck check("matmul");
  if (desc.a == Transpose::kYes)
    check("strided (K, M) a", a);
  else
    check("strided (M, K) a", a);
  if (desc.b == Transpose::kYes)
    check("strided (N, K) b", b);
  else
    check("strided (K, N) b", b);
  if (c.dtype() == accumulate_dtype(a.dtype()))
    check("accumulate (M, N) c", c);
  else
    check("(M, N) c", c);
  on_device<cpu::matmul, cuda::matmul>(a.device(), args);
}

void linear_forward(const LinearForward& args) {
  const auto& [y, x, w, bias, tail] = args;
  ArgumentCheck check("linear");
  check("(M, K) x; [N, K] w; (M, N) y; [N] bias?", x, w, y, bias);
  check.require(tail >= 0 && tail <= check["K"], "expected a tail of at most ", check["K"],
                " columns, got ", tail);
  on_device<cpu::linear_forward, cuda::linear_forward>(x.device(), args);
}

void bias_backward(const BiasBackward& args) {
  ArgumentCheck("bias_backward")("(M, N) dy; accumulate [N] dbias", args.dy, args.dbias);
  on_device<cpu::bias_backward, cuda::bias_backward>(args.dy.device(), args);
}

}  // namespace cohort::kernels
