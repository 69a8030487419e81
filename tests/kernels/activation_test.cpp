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

TEST(Activation, FusedMatmulsHaveTheBitsOfTheSingleOps) {
  for (const ActivationCase& test : activation_cases())
    for (const DType dtype : {DType::kF32, DType::kF64})
      for (const LinearActivationSizes& size : {LinearActivationSizes{37, 5, 11, 3},
                                                {1, 1, 1, 1},
                                                {0, 4, 8, 4},
                                                {20, 40, 24, 17},
                                                {20, 104, 24, 17, 64}})
        expect_bits_of_composition(
            test, size,
            [&](const Shape& shape, uint64_t seed) { return random_tensor(shape, dtype, seed); },
            [](const Shape& shape, DType dtype) { return Tensor::full(shape, NAN, dtype); });
}

// dh a is added to dy w before the activation's derivative.
TEST(Activation, BackwardOfAnAdapterAddsItsGradient) {
  for (const ActivationCase& test : activation_cases()) {
    const int64_t rows = 37, c = 17, cols = 24, p = 64, wide = is_gated(test.op) ? 48 : 24;
    const Tensor dy = random_tensor({rows, c}, DType::kF64, 1),
                 dh = random_tensor({rows, p}, DType::kF64, 2);
    const Tensor w = random_tensor({c, cols}, DType::kF64, 3),
                 a = random_tensor({p, cols}, DType::kF64, 4);
    const Tensor u = random_tensor({rows, wide}, DType::kF64, 5);
    Tensor df = Tensor::empty({rows, cols}, DType::kF64), expected = Tensor::empty_like(u);
    Tensor du = expected.clone(), dbias = Tensor::empty({wide}, DType::kF64), sums = dbias.clone();
    matmul({df, dy, w});
    matmul({df, dh, a, {.out = Grad::kAccumulate}});
    activation_backward({.du = expected, .dbias = {sums}, .dy = df, .u = u, .op = test.op});
    linear_activation_backward(
        {.du = du, .dbias = {dbias}, .dy = dy, .w = w, .u = u, .op = test.op, .dh = dh, .a = a});
    EXPECT_TRUE(bit_equal(du, expected) && bit_equal(dbias, sums)) << test.name;
  }
}

TEST(Activation, MismatchesOfFusedMatmulsNameTheTensor) {
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::kF32); };
  const auto forward = [&](const Shape& y, const Shape& u, const Shape& w, const Shape& bias) {
    Tensor out = zeros(y), kept = zeros(u);
    linear_activation({out, zeros({3, 5}), zeros(w), zeros(bias), Activation::kSwiGlu, kept});
  };
  forward({3, 2}, {3, 4}, {4, 5}, {4});
  EXPECT_THROW_WITH(forward({3, 2}, {3, 4}, {3, 5}, {4}), Error,
                    "expected w f32[2, 5] = [G F, K], where G = 2");
  EXPECT_THROW_WITH(forward({3, 2}, {3, 4}, {4, 6}, {4}), Error,
                    "expected w f32[4, 5] = [G F, K], where G = 2, K = 5 as in x");
  EXPECT_THROW_WITH(forward({3, 2}, {3, 2}, {4, 5}, {4}), Error, "expected u f32[3, 4]");
  EXPECT_THROW_WITH(forward({3, 4}, {3, 4}, {4, 5}, {4}), Error, "expected y f32[3, 2]");
  EXPECT_THROW_WITH(forward({3, 2}, {3, 4}, {4, 5}, {2}), Error, "expected bias f32[4]");
  const auto backward = [&](const Shape& du, const Shape& w, const Shape& u, const Shape& y) {
    Tensor out = zeros(du), none;
    linear_activation_backward({.du = out,
                                .dbias = {none},
                                .dy = zeros({3, 5}),
                                .w = zeros(w),
                                .u = zeros(u),
                                .op = Activation::kSwiGlu,
                                .y = zeros(y)});
  };
  backward({3, 4}, {5, 2}, {3, 4}, {3, 2});
  EXPECT_THROW_WITH(backward({3, 4}, {4, 2}, {3, 4}, {3, 2}), Error,
                    "expected w f32[5, 2] = [C, F], where C = 5 as in dy");
  EXPECT_THROW_WITH(backward({3, 2}, {5, 2}, {3, 4}, {3, 2}), Error, "expected du f32[3, 4]");
  EXPECT_THROW_WITH(backward({3, 4}, {5, 2}, {3, 2}, {3, 2}), Error, "expected u f32[3, 4]");
  EXPECT_THROW_WITH(backward({3, 4}, {5, 2}, {3, 4}, {3, 4}), Error, "expected y f32[3, 2]");
}

}  // namespace
}  // namespace cohort::kernels
