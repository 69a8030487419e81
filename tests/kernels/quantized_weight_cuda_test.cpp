#include "kernels/matmul.h"
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

// Kernels that expand weights as they read them have the bits of the GEMM on expanded ones, with
// adapters and biases, for any number of rows, and write nothing else.
TEST(CudaQuantizedWeights, AreReadWithTheBitsOfTheGemm) {
  COHORT_REQUIRE_GPU(device);
  size_t read = 0;
  for (const WeightFormat format : {WeightFormat::kInt8, WeightFormat::kNf4})
    for (const auto& [n, k, tail] : {std::array<int64_t, 3>{8, 64, 0},
                                     {40, 192, 64},
                                     {576, 576, 64},
                                     {1536, 1600, 0},
                                     {1048, 4096, 192},
                                     {4096, 2304, 64},
                                     {6200, 2368, 0},
                                     {8200, 1600, 64},
                                     {10568, 2304, 16},
                                     {10568, 2304, 64}})
      for (const bool with_bias : {false, true}) {
        const QuantizedWeight host =
            quantize_weight(test::random_tensor({n, k}, DType::kF32, 3, 0.1), format);
        const QuantizedWeight w{host.values.to(device), host.scales.to(device), k};
        const Tensor whole =
            test::random_tensor({n, k + tail}, DType::kF32, 4, 0.1).to(DType::kBF16).to(device);
        Tensor columns = whole.narrow(1, 0, k);
        dequantize_weight({columns, w});
        const Tensor adapter = tail > 0 ? whole.narrow(1, k, tail).contiguous() : Tensor();
        const Tensor bias =
            with_bias ? test::random_tensor({n}, DType::kF32, 5).to(DType::kBF16).to(device)
                      : Tensor();
        for (const int64_t rows : {1, 2, 7, 16, 17, 32, 33, 63, 64}) {
          if (!reads_quantized(rows, w, DType::kBF16, tail, with_bias)) continue;
          ++read;
          const Tensor x_wide = Tensor::full({rows, k + tail + 8}, NAN, DType::kBF16, device);
          const Tensor x = x_wide.narrow(1, 0, k + tail);
          Tensor(x).copy_(test::random_tensor({rows, k + tail}, DType::kF32, 6 + rows).to(device));
          Tensor expected = Tensor::empty({rows, n}, DType::kBF16, device);
          linear_forward({.y = expected, .x = x.contiguous(), .w = whole, .bias = bias});
          const Tensor wide = Tensor::full({rows + 1, n + 8}, 7, DType::kBF16, device);
          Tensor y = wide.narrow(0, 0, rows).narrow(1, 0, n);
          quantized_linear({y, x, w, adapter, bias});
          EXPECT_TRUE(test::bit_equal(y.contiguous(), expected))
              << rows << " rows, " << n << " x " << k << " + " << tail;
          EXPECT_EQ(wide.narrow(1, n, 8).to_vector<float>(),
                    std::vector<float>(static_cast<size_t>(8 * (rows + 1)), 7));
        }
      }
  // On GPUs whose cuBLASLt accumulates in order, all of them.
  EXPECT_EQ(read, 2u * 10 * 2 * 9) << "some sizes are not supported here";
}

}  // namespace
}  // namespace cohort::kernels
