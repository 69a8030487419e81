// In bf16 the kernels are at least as exact as attention without a fused kernel.
#include "tests/kernels/attention_eager.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::test {
namespace {

using kernels::Mask;

double largest_deviation(const Tensor& got, const Tensor& exact) {
  const auto a = got.to_vector<double>(), b = exact.to_vector<double>();
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::fmax(largest, std::fabs(a[i] - b[i]));
  return largest;
}

// A random supported shape, with at least one sequence of 200 tokens or more: the maximum of a few
// errors says little.
AttentionCase random_case(uint64_t seed) {
  Rng rng(seed, rng_stream(kTestPurpose));
  AttentionShape shape{.dim =
                           rng.below(2) == 0 ? int64_t{64} << rng.below(3) : rng.between(1, 256)};
  shape.kv_heads = rng.between(1, 2);
  shape.heads = shape.kv_heads * rng.between(1, 8);
  shape.mask = rng.below(2) == 0 ? Mask::kCausal : Mask::kFull;
  if (shape.mask == Mask::kCausal && rng.below(2) == 0) shape.window = rng.between(1, 300);
  if (rng.below(2) == 0)
    shape.scale = (1 + 2 * rng.uniform()) / std::sqrt(static_cast<double>(shape.dim));
  std::vector<SequenceSpec> sequences{{0, rng.between(1, 130)}, {1, rng.between(200, 400)}};
  for (int64_t more = rng.below(4); more > 0; --more)
    sequences.push_back({1 + more, rng.between(0, 260)});
  return in_dtype(in_dtype(make_case(shape, sequences), DType::kBF16), DType::kF64);
}

// The maximum error is at most twice that of rounding after each operation, and the relative error
// of the whole tensor at most as large.
TEST(CudaAttentionErrors, AreThoseOfEagerComputationOrSmaller) {
  COHORT_REQUIRE_GPU(device);
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const AttentionCase c = random_case(seed);
    SCOPED_TRACE(str("seed ", seed, ", D ", c.shape.dim, ", heads ", c.shape.heads, "/",
                     c.shape.kv_heads, ", window ", c.shape.window, ", scale ", c.shape.scale,
                     c.shape.mask == Mask::kCausal ? ", causal" : ", full"));
    const EagerAttention exact = eager_attention(c, DType::kF64);
    const EagerAttention eager = eager_attention(c, DType::kBF16);
    const AttentionCase on = on_device(in_dtype(c, DType::kBF16), device);
    const AttentionOutput out = run_forward(on);
    const AttentionGrads grads = run_backward(on, out);
    const auto expect = [](const char* name, const Tensor& got, const Tensor& rounded,
                           const Tensor& expected) {
      EXPECT_LE(largest_deviation(got, expected), 2 * largest_deviation(rounded, expected) + 1e-5)
          << name;
      EXPECT_LE(relative_error(got, expected), relative_error(rounded, expected) + 1e-5) << name;
    };
    expect("O", out.o, eager.out.o, exact.out.o);
    expect("log-sum-exp", out.lse, eager.out.lse, exact.out.lse);
    expect("dQ", grads.dq, eager.grads.dq, exact.grads.dq);
    expect("dK", grads.dk, eager.grads.dk, exact.grads.dk);
    expect("dV", grads.dv, eager.grads.dv, exact.grads.dv);
  }
}

}  // namespace
}  // namespace cohort::test
