// Means of sequences on CUDA compared with the CPU.
#include "kernels/pooling.h"

#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

// The order of additions is the CPU's, and so are the bits of f32: inputs in bf16 are exact in f32.
TEST(CudaSegmentMean, HasTheBitsOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const std::vector<int32_t>& begins :
       {std::vector<int32_t>{0}, {0, 1}, {0, 1, 4, 40, 41}, {0, 513, 514, 1100}})
    for (const int64_t cols : {1, 5, 384, 1000})
      for (const DType dtype : kCudaTypes)
        for (const Start start : kStarts) {
          const auto sequences = static_cast<int64_t>(begins.size()) - 1;
          const Tensor x = rounded_random({begins.back(), cols}, dtype, 1);
          Tensor expected = Tensor::empty({sequences, cols}, DType::kF32);
          segment_mean({expected, x.to(DType::kF32), ids(begins)});
          Guarded on_gpu(x, dtype, device, start, NAN),
              y(Shape{sequences, cols}, DType::kF32, device, start);
          segment_mean({y.tensor(), on_gpu.tensor(), ids(begins).to(device)});
          EXPECT_TRUE(bit_equal(y.tensor().to(Device{}), expected)) << cols;
          EXPECT_TRUE(y.intact());
        }
}

TEST(CudaSegmentMean, ASequenceWithoutTokensIsNaN) {
  COHORT_REQUIRE_GPU(device);
  Tensor y = Tensor::empty({1, 3}, DType::kF32, device);
  segment_mean({y, Tensor::zeros({2, 3}, DType::kF32, device), ids({2, 2}).to(device)});
  for (const float value : y.to_vector<float>()) EXPECT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace cohort::kernels
