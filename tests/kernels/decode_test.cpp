// Steps of the sampler's state.
#include "kernels/decode.h"

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(Increment, AddsOneEverywhere) {
  Tensor a = Tensor::from<int32_t>({-1, 0, 7}), b = Tensor::from<int64_t>({int64_t{1} << 40, -1});
  increment(a);
  increment(b);
  EXPECT_EQ(a.to_vector<int32_t>(), (std::vector<int32_t>{0, 1, 8}));
  EXPECT_EQ(b.to_vector<int64_t>(), (std::vector<int64_t>{(int64_t{1} << 40) + 1, 0}));
  Tensor none = Tensor::empty({0}, DType::kI32);
  increment(none);
  Tensor real = Tensor::zeros({1}, DType::kF32);
  EXPECT_THROW_WITH(increment(real), Error, "[increment] expected i32 or i64");
}

}  // namespace
}  // namespace cohort::kernels
