#include "kernels/pooling.h"

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

// The contract fixes the order of additions, so the naive loop gives the same bits.
TEST(SegmentMean, AddsTheTokensInOrderAndDividesOnce) {
  const std::vector<int32_t> begins{0, 1, 4, 40, 41};
  for (const int64_t cols : {1, 5, 384}) {
    const Tensor x = random_tensor({41, cols}, DType::kF32, 1);
    Tensor y = Tensor::full({4, cols}, NAN, DType::kF32);
    segment_mean({y, x, ids(begins)});
    for (int64_t s = 0; s < 4; ++s)
      for (int64_t c = 0; c < cols; ++c) {
        float sum = 0;
        const int begin = begins[static_cast<size_t>(s)], end = begins[static_cast<size_t>(s) + 1];
        for (int64_t t = begin; t < end; ++t) sum += x.data<float>()[t * cols + c];
        EXPECT_EQ(y.data<float>()[s * cols + c], sum / static_cast<float>(end - begin));
      }
  }
}

TEST(SegmentMean, RowsDoNotDependOnTheOtherSequencesOrThreads) {
  std::vector<int32_t> begins{0};
  for (int i = 0; i < 300; ++i) begins.push_back(begins.back() + 1 + i * 7 % 50);
  const Tensor x = random_tensor({begins.back(), 65}, DType::kF64, 2);
  Tensor all = Tensor::empty({300, 65}, DType::kF64), one = Tensor::empty({1, 65}, DType::kF64);
  for (const int threads : {1, 3}) {
    const Threads guard(threads);
    segment_mean({all, x, ids(begins)});
    for (size_t s = 0; s < 300; s += 23) {
      const int32_t n = begins[s + 1] - begins[s];
      segment_mean({one, x.narrow(0, begins[s], n), ids({0, n})});
      EXPECT_TRUE(bit_equal(one, all.narrow(0, static_cast<int64_t>(s), 1)));
    }
  }
}

TEST(SegmentMean, RefusesWhatItDoesNotSupport) {
  const Tensor x = random_tensor({4, 3}, DType::kF32, 1);
  Tensor y = Tensor::empty({2, 3}, DType::kF32), none = Tensor::empty({0, 3}, DType::kF32);
  segment_mean({none, x.narrow(0, 0, 0), ids({0})});
  EXPECT_THROW_WITH(segment_mean({y, x, ids({0, 2})}), Error, "[segment_mean] expected cu_seqlens");
  EXPECT_THROW_WITH(segment_mean({y, x, ids({0, 2, 5})}), Error, "do not ascend from 0 to 4");
  EXPECT_THROW_WITH(segment_mean({y, x, ids({0, 3, 2})}), Error, "do not ascend from 0 to 4");
  segment_mean({y, x, ids({0, 4, 4})});
  EXPECT_TRUE(std::isnan(y.to_vector<float>()[3]));
}

}  // namespace
}  // namespace cohort::kernels
