// Steps of the sampler's state on CUDA.
#include "kernels/decode.h"

#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(CudaIncrement, AddsOneEverywhere) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kI32, DType::kI64})
    for (const int64_t n : {0, 1, 255, 256, 257, 1000})
      for (const Start start : kStarts) {
        Guarded t(Tensor::full({n}, 6, dtype), dtype, device, start);
        increment(t.tensor());
        EXPECT_EQ(t.tensor().to_vector<double>(), std::vector<double>(static_cast<size_t>(n), 7));
        EXPECT_TRUE(t.intact());
      }
  Tensor large = Tensor::from<int64_t>({(int64_t{1} << 40) + 5}).to(device);
  increment(large);
  EXPECT_EQ(large.to_vector<int64_t>()[0], (int64_t{1} << 40) + 6);
}

}  // namespace
}  // namespace cohort::kernels
