// HeadLossGradients for the tests of the head on both devices.
#pragma once

#include "autograd/ops.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels::test {

struct HeadLossOutputs {
  Tensor logprob, entropy, lse, dx, dw;
};

// Runs the head with gradients; set_dlogprob copies each chunk of `dlogprob`.
inline HeadLossOutputs run_fused_head_loss(const Tensor& x, const Tensor& w, const Tensor& targets,
                                           const Tensor& dlogprob, const HeadDesc& desc) {
  const DType dtype = accumulate_dtype(x.dtype());
  const auto statistic = [&] { return Tensor::empty({x.dim(0)}, dtype, x.device()); };
  HeadLossOutputs out{
      statistic(), statistic(), statistic(), Tensor::empty_like(x),
      Tensor::full(w.with_padding().shape(), NAN, dtype, x.device()).hide_padding(0, w.dim(0))};
  Tensor dlogprob_set = Tensor::zeros(out.lse.shape(), dtype, x.device());
  int64_t next = 0;
  const HeadLossGradients gradients{
      .dx = {out.dx},
      .dw = {out.dw},
      .dlogprob = dlogprob_set,
      .set_dlogprob = [&](int64_t begin, int64_t count) {
        EXPECT_EQ(begin, next);
        next += count;
        dlogprob_set.narrow(0, begin, count).copy_(dlogprob.narrow(0, begin, count));
      }};
  head_logprob_forward({out.logprob, out.entropy, out.lse, {x, w, targets, desc}, &gradients});
  EXPECT_EQ(next, x.dim(0));
  return out;
}

}  // namespace cohort::kernels::test
