// The soft cap of scores in every CUDA kernel: against eager computation, and equal bits in prefill
// and decode.
#include "tests/kernels/attention_eager.h"
#include "tests/kernels/attention_paged_cases.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::test {
namespace {

// Aligned dims of every kernel for sm_90, and dims of the generic ones.
constexpr int64_t kDims[] = {64, 96, 128, 192, 256, 60, 100, 130};
const std::vector<SequenceSpec> kSequences = {{1, 1}, {2, 450}, {3, 30}, {4, 270}};

AttentionShape shape_of(int64_t dim, int64_t window) {
  return {.heads = 6, .kv_heads = 2, .dim = dim, .scale = 0.3, .window = window, .soft_cap = 1.5};
}

double largest_error(const Tensor& got, const Tensor& exact) {
  const auto a = got.to_vector<double>(), b = exact.to_vector<double>();
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::fmax(largest, std::fabs(a[i] - b[i]));
  return largest;
}

// As in CudaAttentionErrors: at most twice the error of rounding after each operation.
TEST(CudaAttentionSoftCap, ErrorsAreThoseOfEagerComputationOrSmaller) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : kDims)
    for (const int64_t window : {0, 100}) {
      SCOPED_TRACE(str("D ", dim, ", window ", window));
      const AttentionCase c = in_dtype(
          in_dtype(make_case(shape_of(dim, window), kSequences), DType::kBF16), DType::kF64);
      const EagerAttention exact = eager_attention(c, DType::kF64);
      const EagerAttention eager = eager_attention(c, DType::kBF16);
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        const AttentionCase on = on_device(in_dtype(c, dtype), device);
        const AttentionOutput out = run_forward(on);
        const AttentionGrads grads = run_backward(on, out);
        const auto expect = [](const char* name, const Tensor& got, const Tensor& rounded,
                               const Tensor& expected) {
          EXPECT_LE(largest_error(got, expected), 2 * largest_error(rounded, expected) + 1e-5)
              << name;
        };
        expect("O", out.o, eager.out.o, exact.out.o);
        expect("log-sum-exp", out.lse, eager.out.lse, exact.out.lse);
        expect("dQ", grads.dq, eager.grads.dq, exact.grads.dq);
        expect("dK", grads.dk, eager.grads.dk, exact.grads.dk);
        expect("dV", grads.dv, eager.grads.dv, exact.grads.dv);
      }
    }
}

TEST(CudaAttentionSoftCap, BitsOfPrefillAndDecodeAreThoseOfTheForwardPass) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(7, rng_stream(kTestPurpose, 9));
  for (const DType dtype : {DType::kBF16, DType::kF32})
    for (const int64_t dim : kDims)
      for (const int64_t window : {0, 100}) {
        SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim, ", window ", window));
        const AttentionCase c = in_dtype(make_case(shape_of(dim, window), kSequences), dtype);
        EXPECT_TRUE(bit_equal(run_in_random_steps(c, 16, rng, device),
                              run_forward(on_device(c, device)).o.to(Device{})));
      }
}

}  // namespace
}  // namespace cohort::test
