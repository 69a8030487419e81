// The eager reference of the CUDA kernels: it is correct, and it rounds.
#include "tests/kernels/attention_eager.h"

namespace cohort::test {
namespace {

using kernels::Mask;

TEST(AttentionEager, ComputesAttentionAndItsGradients) {
  for (const AttentionShape& shape :
       {AttentionShape{.heads = 6, .kv_heads = 2, .dim = 24},
        AttentionShape{.heads = 2, .kv_heads = 2, .dim = 40, .mask = Mask::kFull, .scale = 0.5},
        AttentionShape{.heads = 3, .kv_heads = 1, .dim = 8, .window = 30}}) {
    const AttentionCase c = make_case(shape, {{1, 70}, {2, 1}, {3, 0}, {4, 140}});
    const AttentionOutput out = run_forward(c);
    const AttentionGrads grads = run_backward(c, out);
    const EagerAttention exact = eager_attention(c, DType::kF64);
    const EagerAttention rounded = eager_attention(c, DType::kBF16);
    const auto expect = [](const Tensor& got, const Tensor& also, const Tensor& expected) {
      EXPECT_LT(relative_error(got, expected), 1e-12);
      EXPECT_LT(relative_error(also, expected), 0x1p-6);
      EXPECT_GT(relative_error(also, expected), 0x1p-13);
    };
    expect(exact.out.o, rounded.out.o, out.o);
    expect(exact.out.lse, rounded.out.lse, out.lse);
    expect(exact.grads.dq, rounded.grads.dq, grads.dq);
    expect(exact.grads.dk, rounded.grads.dk, grads.dk);
    expect(exact.grads.dv, rounded.grads.dv, grads.dv);
  }
}

}  // namespace
}  // namespace cohort::test
