#include "core/shape.h"

#include "tests/support/test_util.h"

namespace cohort {
TEST(Shape, NegativeIndexCountsFromTheEnd) {
  const Shape s{2, 3, 4};
  EXPECT_EQ(s[-1], 4);
  EXPECT_EQ(s.numel(), 24);
  EXPECT_EQ(contiguous_strides(s), (Shape{12, 4, 1}));
  EXPECT_THROW_WITH(s[3], Error, "rank 3");
}
}  // namespace cohort
