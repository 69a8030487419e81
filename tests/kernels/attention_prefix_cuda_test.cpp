// Shared prefixes on CUDA: the bits of repeating them.
#include "tests/kernels/attention_prefix_cases.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(CudaAttentionPrefix, EqualsRepeatingThePrefix) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {20, 64, 128, 256})
      for (const SharedPrefix& f :
           {SharedPrefix{2, 1, dim, 0, 5, {3, 1, 7}},
            SharedPrefix{4, 2, dim, 0, 127, {2, 130, 300}},
            SharedPrefix{14, 2, dim, 0, 128, {1, 65, 1, 40}},
            SharedPrefix{3, 3, dim, 30, 50, {9, 160}}, SharedPrefix{2, 1, dim, 0, 1000, {66, 129}},
            SharedPrefix{6, 2, dim, 200, 129, {1, 2, 255}},
            SharedPrefix{1, 1, dim, 0, 4090, {3, 70}}}) {
        SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim, ", prefix of ", f.prefix));
        expect_as_repeated(f, dtype, dtype == DType::kF32 ? 1e-5 : 1e-2, device);
      }
}

TEST(CudaAttentionPrefix, RunsGiveTheSameBits) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    const Packed all = shared({14, 2, 64, 0, 100, {3, 250, 1, 140}}, dtype);
    expect_reproducible([&] {
      const Results r = run(all, device);
      return std::vector{r.o, r.lse, r.dq, r.dk, r.dv};
    });
  }
}

}  // namespace
}  // namespace cohort::kernels
