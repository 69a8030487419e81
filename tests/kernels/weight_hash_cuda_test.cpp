// The hash of tensors on CUDA is that of the same bits on the CPU.
#include "kernels/weight_hash.h"

#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(CudaWeightHash, IsThatOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const Start start : kStarts) {
      std::vector<Guarded> placed;
      std::vector<Tensor> on_device, on_host;
      for (const int64_t n : {1, 3, 0, 7, 8192, 16384, 16387, 1000003})
        placed.emplace_back(random_tensor({n}, DType::kF64, static_cast<uint64_t>(n)), dtype,
                            device, start);
      for (Guarded& each : placed) {
        on_device.push_back(each.tensor());
        on_host.push_back(each.tensor().to(Device{}));
      }
      Tensor expected = Tensor::empty({1}, DType::kI64),
             hash = Tensor::empty({1}, DType::kI64, device);
      weight_hash(expected, on_host);
      expect_reproducible([&] {
        weight_hash(hash, on_device);
        return std::vector<Tensor>{hash};
      });
      EXPECT_EQ(hash.to_vector<int64_t>(), expected.to_vector<int64_t>());
    }
}

}  // namespace
}  // namespace cohort::kernels
