// Quantisation on CUDA gives the bytes of the CPU.
#include "kernels/quantize.h"

#include "tests/kernels/cuda_test.h"
#include "tests/kernels/quantize_cases.h"

namespace cohort::kernels {
namespace {

using namespace test;

// Quantises x, in `dtype` on the device, and expects the bytes of the CPU between sentinels. x is
// the transpose of what is in memory if `turned`.
void expect_bytes(const Tensor& x, DType dtype, DType format, ScaleGroups groups, Device device,
                  Start start, bool turned = false) {
  SCOPED_TRACE(str(dtype_name(dtype), x.shape().str(), " ", dtype_name(format), ", ",
                   groups == ScaleGroups::kBlocks ? "blocks" : "rows", turned ? ", turned" : ""));
  const Tensor rounded = x.to(dtype).to(DType::kF32);
  const Quantized expected = quantized(rounded, format, groups);
  Guarded in(turned ? rounded.transpose(0, 1).clone() : rounded, dtype, device, start, NAN),
      values(Tensor::full(x.shape(), 3, DType::kF32), format, device, start, 40),
      scales(expected.scales.shape(), DType::kF32, device, start);
  Quantized out{values.tensor(), scales.tensor(), groups};
  quantize({out, turned ? in.tensor().transpose(0, 1) : in.tensor()});
  EXPECT_TRUE(bit_equal(out.values.to(Device{}), expected.values));
  EXPECT_TRUE(bit_equal(out.scales.to(Device{}), expected.scales));
  EXPECT_TRUE(values.intact() && scales.intact());
  Guarded y(x.shape(), dtype, device, start);
  dequantize({y.tensor(), out});
  EXPECT_TRUE(bit_equal(y.tensor().to(Device{}), dequantized_as(expected, dtype)));
  EXPECT_TRUE(y.intact());
}

TEST(CudaQuantize, HasTheBytesOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const Start start : kStarts)
      for (const auto& [format, groups] : formats()) {
        for (const Shape& shape : quantize_shapes())
          expect_bytes(mixed_values(shape, DType::kF32, 1), dtype, format, groups, device, start);
        for (const int64_t rows : {65536, 512, 16})
          expect_bytes(all_bf16_values(rows), dtype, format, groups, device, start);
        expect_bytes(random_tensor({1000, 4096}, DType::kF32, 2), dtype, format, groups, device,
                     start);
      }
}

TEST(CudaQuantize, TransposedIsTheTranspose) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const Start start : kStarts) {
      for (const Shape& shape : quantize_shapes())
        expect_bytes(mixed_values(shape, DType::kF32, 3), dtype, DType::kE4M3, ScaleGroups::kBlocks,
                     device, start, true);
      expect_bytes(random_tensor({1000, 4096}, DType::kF32, 4), dtype, DType::kE4M3,
                   ScaleGroups::kBlocks, device, start, true);
    }
}

TEST(CudaQuantize, RefusesDtypesOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  Quantized q = Quantized::empty({4, 8}, DType::kE4M3, ScaleGroups::kRows, device);
  EXPECT_THROW_WITH(quantize({q, Tensor::zeros({4, 8}, DType::kF64, device)}), Error,
                    "[quantize] expected f32 or bf16 on a CUDA device, got f64");
}

}  // namespace
}  // namespace cohort::kernels
