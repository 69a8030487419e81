#include "kernels/quantized_weight.h"
#include "tests/support/test_util.h"

namespace cohort::kernels {
namespace {

TEST(CudaQuantizedWeights, HaveTheBitsOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const WeightFormat format :
       {WeightFormat::kInt8, WeightFormat::kNf4, WeightFormat::kNf4Single})
    for (const auto& [rows, columns, padding] : {std::array<int64_t, 3>{1, 1, 0},
                                                 {3, 7, 1},
                                                 {5, 64, 0},
                                                 {33, 136, 64},
                                                 {70, 200, 5},
                                                 {1030, 896, 64}}) {
      const QuantizedWeight w =
          quantize_weight(test::random_tensor({rows, columns}, DType::kF32, 3, 1), format);
      const QuantizedWeight on_device{w.values.to(device), w.scales.to(device), columns};
      Tensor expected = Tensor::empty({rows, columns}, DType::kF32);
      dequantize_weight({expected, w});
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const Tensor wide = Tensor::full({rows, columns + padding}, 7, dtype, device);
        Tensor y = wide.narrow(1, 0, columns);
        dequantize_weight({y, on_device});
        EXPECT_EQ(y.to_vector<float>(), expected.to_vector<float>()) << rows << " x " << columns;
        for (const float v : wide.narrow(1, columns, padding).to_vector<float>()) EXPECT_EQ(v, 7);
      }
    }
}

}  // namespace
}  // namespace cohort::kernels
