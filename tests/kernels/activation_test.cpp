#include "tests/kernels/activation_cases.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(Activation, BackwardHasTheBitsOfTheSingleOps) {
  for (const ActivationCase& test : activation_cases())
    for (const DType dtype : {DType::kF32, DType::kF64})
      for (const Shape& shape : kActivationShapes)
        expect_bits_of_single_ops(test, shape, dtype, {}, Start::kAligned);
}

TEST(Activation, ForwardIsTheElementwiseOp) {
  for (const ActivationCase& test : activation_cases()) {
    const Tensor u = random_tensor({3, 34}, DType::kF32, 1);
    Tensor y = Tensor::empty({3, is_gated(test.op) ? 17 : 34}, DType::kF32), expected = y.clone();
    activation_forward({y, u, test.op});
    test.forward(expected, u);
    EXPECT_TRUE(bit_equal(y, expected)) << test.name;
  }
}

TEST(Activation, MismatchesNameTheTensor) {
  const Tensor u = Tensor::zeros({3, 4}, DType::kF32), half = Tensor::zeros({3, 2}, DType::kF32);
  Tensor du = u.clone(), columns = Tensor::zeros({4}, DType::kF32);
  const auto call = [&](Tensor du, Tensor dbias, const Tensor& dy, Activation op, const Tensor& y) {
    activation_backward({.du = du, .dbias = {dbias}, .dy = dy, .u = u, .op = op, .y = y});
  };
  call(du, columns, u, Activation::kGelu, u);
  call(du, columns, half, Activation::kSwiGlu, half);
  EXPECT_THROW_WITH(call(du, columns, half, Activation::kGelu, {}), Error,
                    "[activation_backward] expected dy f32[3, 4]");
  EXPECT_THROW_WITH(call(du, columns, u, Activation::kSwiGlu, {}), Error, "expected dy f32[3, 2]");
  EXPECT_THROW_WITH(call(half, columns, u, Activation::kGelu, {}), Error, "expected du f32[3, 4]");
  EXPECT_THROW_WITH(call(du, half, u, Activation::kGelu, {}), Error, "expected dbias f32[4]");
  EXPECT_THROW_WITH(call(du, columns, half, Activation::kSwiGlu, u), Error, "expected y f32[3, 2]");
}

}  // namespace
}  // namespace cohort::kernels
