// On CUDA the backward of gelu and gelu_tanh is one kernel with the bias's gradient.
#include "tests/kernels/activation_cases.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(CudaActivation, BackwardHasTheBitsOfTheSingleOps) {
  COHORT_REQUIRE_GPU(device);
  for (const ActivationCase& test : activation_cases())
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : kActivationShapes)
        for (const Start start : kStarts)
          expect_bits_of_single_ops(test, shape, dtype, device, start);
}

// Against the CPU's f64 on the same values; the sums are of what du was rounded to.
TEST(CudaActivation, BackwardFollowsTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const ActivationCase& test : kUnaryActivations)
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : kActivationShapes) {
        const Tensor u = rounded_random(shape, dtype, 1, 2), dy = rounded_random(shape, dtype, 2);
        Tensor expected_du = Tensor::empty_like(u), expected_y = Tensor::empty_like(u);
        activation_backward({.du = expected_du,
                             .dbias = {none()},
                             .dy = dy,
                             .u = u,
                             .op = test.op,
                             .y = expected_y});
        Guarded in(u, dtype, device), gradient(dy, dtype, device), du(shape, dtype, device);
        Guarded dbias(Shape{shape[-1]}, DType::kF32, device);
        activation_backward({.du = du.tensor(),
                             .dbias = {dbias.tensor()},
                             .dy = gradient.tensor(),
                             .u = in.tensor(),
                             .op = test.op,
                             .y = gradient.tensor()});
        expect_close(du.tensor(), expected_du, test.name);
        expect_close(gradient.tensor(), expected_y, test.name);
        Tensor sums = Tensor::empty({shape[-1]}, DType::kF64);
        bias_backward({.dbias = {sums}, .dy = du.tensor().to(Device{}).to(DType::kF64)});
        expect_close(dbias.tensor(), sums, test.name);
      }
}

TEST(CudaActivation, BackwardHasTheSameBitsEveryTime) {
  COHORT_REQUIRE_GPU(device);
  for (const ActivationCase& test : kUnaryActivations) {
    const Shape shape{1000, 264};
    const Tensor u = random_tensor(shape, DType::kF32, 1).to(DType::kBF16).to(device);
    const Tensor dy = random_tensor(shape, DType::kF32, 2).to(DType::kBF16).to(device);
    expect_reproducible([&] {
      Tensor du = Tensor::empty_like(u), y = dy.clone();
      Tensor dbias = Tensor::empty({shape[-1]}, DType::kF32, device);
      activation_backward({.du = du, .dbias = {dbias}, .dy = y, .u = u, .op = test.op, .y = y});
      return std::vector{du, dbias, y};
    });
  }
}

}  // namespace
}  // namespace cohort::kernels
