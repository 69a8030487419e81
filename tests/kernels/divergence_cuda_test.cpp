#include "tests/kernels/cuda_test.h"
#include "tests/kernels/divergence_case.h"

namespace cohort::kernels {
namespace {

using namespace test;
using cohort::test::norm;

// As on the CPU in f64, for rows of any alignment, with ties among the teacher's logits.
TEST(CudaDivergence, EqualsTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t vocab : {1, 7, 64, 1000, 4099, 50257})
    for (const bool wide : {false, true})
      for (const DivergenceDesc& desc : divergence_kinds()) {
        const Tensor z = random_tensor({6, vocab}, DType::kF32, 1, 2);
        Tensor teacher = random_tensor({6, vocab}, DType::kF32, 2, 2);
        for (int64_t i = 0; i < teacher.numel(); i += 3) teacher.data<float>()[i] = 1.5;
        const auto there = [&](const Tensor& t) {
          const Tensor moved = t.to(device);
          return wide ? padded(moved, 1, head_rows(vocab, device) + 64, NAN) : moved;
        };
        const DivergenceOutputs exact = run_divergence(z.to(DType::kF64), teacher.to(DType::kF64),
                                                       desc, 0.8),
                                got = run_divergence(there(z), there(teacher), desc, 0.8),
                                again = run_divergence(there(z), there(teacher), desc, 0.8),
                                rounded =
                                    run_divergence(there(z), there(teacher), desc, 0.8,
                                                   Tensor::empty({6, vocab}, DType::kBF16, device));
        EXPECT_TRUE(bit_equal(got.divergence.to(Device{}), again.divergence.to(Device{})));
        const auto a = got.divergence.to_vector<double>(), b = exact.divergence.to_vector<double>();
        for (size_t t = 0; t < a.size(); ++t)
          EXPECT_NEAR(a[t], b[t], 2e-5 * (1 + std::fabs(b[t]))) << vocab << " " << desc.top_k;
        if (vocab == 1) continue;  // the gradients are rounding alone
        if (desc.top_k == 1 && norm(exact.gradient) < 1e-6) continue;
        EXPECT_LE(relative_error(got.gradient, exact.gradient), 1e-4) << vocab << " " << desc.top_k;
        EXPECT_LE(relative_error(rounded.gradient, exact.gradient), 4e-3) << vocab;
      }
}

TEST(CudaDivergence, OfEqualLogitsIsZero) {
  COHORT_REQUIRE_GPU(device);
  for (const DivergenceDesc& desc : divergence_kinds()) {
    const Tensor z = random_tensor({9, 4099}, DType::kF32, 3, 5).to(device);
    const DivergenceOutputs out = run_divergence(z, z, desc, 0.7);
    EXPECT_TRUE(bit_equal(out.divergence.to(Device{}), Tensor::zeros({9}, DType::kF32)));
    EXPECT_EQ(norm(out.gradient), 0) << desc.top_k;
  }
}

}  // namespace
}  // namespace cohort::kernels
