// Fingerprints on CUDA are those of the same bits on the CPU.
#include "kernels/fingerprint.h"

#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(CudaFingerprint, IsThatOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kU8})
    for (const Start start : kStarts)
      for (const int64_t n : {1, 3, 0, 7, 8192, 16384, 16387, 1000003}) {
        std::vector<double> bytes(static_cast<size_t>(n));
        for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<double>(37 * i % 251);
        Guarded placed(Tensor::from(bytes), dtype, device, start);
        const Tensor t = placed.tensor();
        Tensor expected = Tensor::zeros({1}, DType::kI64),
               sum = Tensor::zeros({1}, DType::kI64, device);
        fingerprint(expected, t.to(Device{}), 9);
        expect_reproducible([&] {
          sum.zero_();
          fingerprint(sum, t, 9);
          return std::vector<Tensor>{sum};
        });
        EXPECT_EQ(sum.to_vector<int64_t>(), expected.to_vector<int64_t>());
        for (const int64_t cut : {n / 3, n / 2}) {  // in two pieces
          const int64_t begin = cut / 2 * 2;
          sum.zero_();
          fingerprint(sum, t.narrow(0, begin, n - begin),
                      9 + begin * static_cast<int64_t>(dtype_size(dtype)) / 2);
          fingerprint(sum, t.narrow(0, 0, begin), 9);
          EXPECT_EQ(sum.to_vector<int64_t>(), expected.to_vector<int64_t>());
        }
      }
}

}  // namespace
}  // namespace cohort::kernels
