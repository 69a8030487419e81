// Shapes and row-major strides.
#include "core/shape.h"

#include "tests/support/test_util.h"

namespace cohort {

TEST(Shape, NegativeIndexCountsFromTheEnd) {
  const Shape s{2, 3, 4};
  EXPECT_EQ(s[-1], 4);
  EXPECT_EQ(s.numel(), 24);
  EXPECT_EQ(contiguous_strides(s), (Shape{12, 4, 1}));
  EXPECT_THROW_WITH(s[3], Error, "rank 3");
  EXPECT_THROW_WITH(s[-4], Error, "rank 3");
}

TEST(Shape, RankZeroHasOneElement) {
  const Shape s;
  EXPECT_EQ(s.numel(), 1);
  EXPECT_EQ(s.str(), "[]");
  EXPECT_THROW_WITH(s[0], Error, "rank 0");
}

TEST(Shape, EraseKeepsTheOthersInOrder) {
  Shape s{2, 3, 4};
  s.erase(1);
  EXPECT_EQ(s, (Shape{2, 4}));
  s.erase(-1);
  EXPECT_EQ(s, (Shape{2}));
  EXPECT_NE(s, (Shape{2, 1}));
}

TEST(Shape, PushBackStopsAtTheLargestRank) {
  Shape s;
  for (int i = 0; i < kMaxRank; ++i) s.push_back(i + 1);
  EXPECT_EQ(s.numel(), 720);
  EXPECT_THROW_WITH(s.push_back(1), Error, "exceeds 6");
}

}  // namespace cohort
