#include "kernels/row_sum.h"

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

const Shape kShapes[] = {{0, 5}, {1}, {7}, {3, 1}, {1, 17}, {5, 16}, {2, 3, 65}, {130, 33}};

TEST(RowSum, ForwardIsTheDefinition) {
  for (const Shape& shape : kShapes)
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      const Tensor x = random_tensor(shape, dtype, 1);
      Tensor y = Tensor::full(row_sum_shape(shape), NAN, dtype);
      row_sum_forward({y, x});
      const auto in = x.to_vector<double>(), out = y.to_vector<double>();
      const auto cols = static_cast<size_t>(shape[-1]);
      for (size_t r = 0; r < out.size(); ++r) {
        double sum = 0, size = 0;
        for (size_t c = 0; c < cols; ++c) {
          sum += in[r * cols + c];
          size += std::fabs(in[r * cols + c]);
        }
        // A sum of n terms has an error of at most n roundings of the sum of their sizes.
        const double rounding = dtype == DType::kF32 ? 0x1p-24 : 0x1p-53;
        EXPECT_NEAR(out[r], sum, 2 * static_cast<double>(cols) * rounding * size) << shape.str();
      }
    }
}

TEST(RowSum, BackwardRepeatsTheGradientAlongTheRow) {
  const Tensor dy = Tensor::from<double>({2, -3}, {2});
  Tensor dx = Tensor::full({2, 3}, NAN, DType::kF64), sum = Tensor::full({2, 3}, 10, DType::kF64);
  row_sum_backward({{dx}, dy});
  EXPECT_EQ(dx.to_vector<double>(), (std::vector<double>{2, 2, 2, -3, -3, -3}));
  row_sum_backward({{sum, Grad::kAccumulate}, dy});
  EXPECT_EQ(sum.to_vector<double>(), (std::vector<double>{12, 12, 12, 7, 7, 7}));
}

TEST(RowSum, RowsDoNotDependOnOthersOrOnThreads) {
  const Tensor x = random_tensor({300, 129}, DType::kF32, 1);
  Tensor all = Tensor::empty({300}, DType::kF32), one = Tensor::empty({1}, DType::kF32);
  row_sum_forward({all, x});
  for (const int64_t r : {0, 1, 299}) {
    row_sum_forward({one, x.narrow(0, r, 1)});
    EXPECT_TRUE(bit_equal(one, all.narrow(0, r, 1))) << r;
  }
  expect_thread_invariant([&] {
    Tensor y = Tensor::empty({300}, DType::kF32), dx = Tensor::empty_like(x);
    row_sum_forward({y, x});
    row_sum_backward({{dx}, y});
    return std::vector{y, dx};
  });
}

TEST(RowSum, MismatchesAreNamed) {
  const Tensor x = Tensor::zeros({2, 3}, DType::kF32), none = Tensor::zeros({2, 0}, DType::kF32);
  Tensor y = Tensor::zeros({3}, DType::kF32), dx = Tensor::zeros({2, 3}, DType::kF32);
  EXPECT_THROW_WITH(row_sum_forward({y, x}), Error, "[row_sum] expected y f32[2]");
  EXPECT_THROW_WITH(row_sum_forward({y, none}), Error, "expected x [..., C] with C of at least 1");
  EXPECT_THROW_WITH(row_sum_backward({{dx}, y}), Error, "[row_sum_backward] expected dy f32[2]");
}

}  // namespace
}  // namespace cohort::kernels
