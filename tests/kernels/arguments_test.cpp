// Specs of tensors: what fits, which sizes get names, and what a mismatch says.
#include "kernels/arguments.h"

#include <gtest/gtest.h>

#include "tests/support/test_util.h"

namespace cohort::kernels {
namespace {

Tensor f32(const Shape& shape) {
  return Tensor::zeros(shape, DType::kF32);
}

TEST(Arguments, SizesHaveTheirNamesInAllSpecsOfACheck) {
  ArgumentCheck check("op");
  check.bind("G", 3);
  check("[T, H, 2 F] x; i32 [S + 1] starts", f32({5, 2, 6}), Tensor::zeros({4}, DType::kI32));
  check("[G F, T] w; (10, 6) y", f32({9, 5}), f32({5, 2, 6}));
  EXPECT_EQ(check["T"], 5);
  EXPECT_EQ(check["F"], 3);
  EXPECT_EQ(check["S"], 3);
  EXPECT_EQ(check["no such name"], -1);
  EXPECT_THROW_WITH(check("[S, T] z", f32({5, 5})), Error,
                    "[op] expected z f32[3, 5] = [S, T], where S = 3 as in starts, T = 5 as in x, "
                    "got f32[5, 5] on cpu");
  EXPECT_THROW_WITH(check("[G F] z", f32({6})), Error, "z f32[9] = [G F], where G = 3, F = 3 as");
  EXPECT_THROW_WITH(check("[T] z", f32({5, 1})), Error, "expected z f32[5] = [T]");
  EXPECT_THROW_WITH(check("[T, N] z", f32({5})), Error, "expected z f32[T, N], where T = 5");
}

TEST(Arguments, SizesThatNoValueGivesAreRefused) {
  EXPECT_THROW_WITH(ArgumentCheck("op")("[2 F] x", f32({5})), Error, "expected x f32[4] = [2 F]");
  EXPECT_THROW_WITH(ArgumentCheck("op")("[S + 1] x", f32({0})), Error, "expected x f32[S + 1]");
  EXPECT_THROW_WITH(ArgumentCheck("op")("(1, 1) x", f32({2})), Error,
                    "expected x f32[1, 1] = (1, 1)");
  ArgumentCheck("op")("(1, 1) x", f32({}));
}

TEST(Arguments, AnyNumberOfSizesIsTheSameInAllPlaces) {
  ArgumentCheck check("op");
  check("[..., C] x; [..., 2 C] y; [rows] r; [numel] n", f32({2, 3, 4}), f32({2, 3, 8}), f32({6}),
        f32({24}));
  EXPECT_THROW_WITH(check("[..., C] z", f32({3, 2, 4})), Error,
                    "expected z f32[2, 3, 4] = [..., C], where C = 4 as in x");
  EXPECT_THROW_WITH(check("[C, ...] z", f32({4, 2})), Error, "expected z f32[4, 2, 3]");
  ArgumentCheck("op")("[...] x; [..., 1] y", f32({}), f32({1}));
  EXPECT_THROW_WITH(ArgumentCheck("op")("[..., C] x", f32({})), Error, "expected x f32[..., C]");
}

TEST(Arguments, TypesAreThoseOfTheFirstTensorUnlessTheSpecNamesThem) {
  const Tensor ids = Tensor::zeros({2}, DType::kI32), x = Tensor::zeros({2}, DType::kBF16);
  ArgumentCheck check("op");
  check("i32 [N] ids; [N] x, y; accumulate [N] sum; any [N] z", ids, x, x, f32({2}), ids);
  EXPECT_THROW_WITH(check("[N] w", f32({2})), Error, "expected w bf16[2] = [N]");
  EXPECT_THROW_WITH(check("accumulate [N] w", x), Error, "expected w f32[2] = [N]");
  EXPECT_THROW_WITH(check("i64 [N] w", ids), Error, "expected w i64[2] = [N]");
}

TEST(Arguments, OnlyThoseWithAQuestionMarkMayBeUndefined) {
  ArgumentCheck check("op");
  check("[N] a?, x, b?", Tensor(), f32({2}), Tensor());
  EXPECT_THROW_WITH(check("[N] y", Tensor()), Error,
                    "y f32[2] = [N], where N = 2 as in x, got an "
                    "undefined tensor");
}

TEST(Arguments, LayoutsSayWhichStridesAreFree) {
  const Tensor wide = f32({4, 6, 2}), columns = wide.narrow(1, 1, 3);
  const Tensor heads = f32({4, 2, 6}).transpose(1, 2).transpose(1, 2).narrow(2, 0, 3);
  ArgumentCheck check("op");
  check("strided [T, H, D] x; view [T, H, D] y", columns, columns);
  EXPECT_THROW_WITH(check("[T, H, D] z", columns), Error,
                    "[op] expected contiguous z, got f32[4, 3, 2] on cpu with strides [12, 2, 1]");
  check("view [T, 2, 3] z", heads);
  EXPECT_THROW_WITH(check("strided [T, 2, 3] z", heads), Error, "expected contiguous z");
  EXPECT_THROW_WITH(check("view [T, D, H] z", columns.transpose(1, 2)), Error, "contiguous z");
  // A matrix of higher rank has one stride of rows only if it is contiguous.
  EXPECT_THROW_WITH(check("strided (M, D) z", columns), Error, "expected contiguous z");
  check("strided (4, 2) z", wide.select(1, 3));
}

TEST(Arguments, TheirConditionsNameTheOp) {
  const ArgumentCheck check("op");
  check.require(true, "fine");
  EXPECT_THROW_WITH(check.require(false, "expected ", 1, ", got ", f32({2})), Error,
                    "[op] expected 1, got f32[2] on cpu");
}

}  // namespace
}  // namespace cohort::kernels
