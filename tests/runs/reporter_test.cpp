// Tests of text_curve(), the curve that the terminal shows.
#include "runs/report.h"

#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

TEST(TextCurve, PlotsValuesFromLeftToRightAndLabelsTheRange) {
  EXPECT_EQ(text_curve({0, 1, 2, 1}, 10, 3),
            "   2.000 |  *\n"
            "   1.000 | * *\n"
            "   0.000 |*\n"
            "         +----\n");
}

TEST(TextCurve, AveragesValuesThatDoNotFit) {
  // Columns hold the means of 2 values: 0, 1, 4.
  EXPECT_EQ(text_curve({-1, 1, 0, 2, 3, 5}, 3, 2),
            "   4.000 |  *\n"
            "   0.000 |**\n"
            "         +---\n");
}

TEST(TextCurve, TakesConstantEmptyAndImpossibleInput) {
  EXPECT_EQ(text_curve({0.5, 0.5}, 4, 2),
            "   0.500 |\n"
            "   0.500 |**\n"
            "         +--\n");
  EXPECT_EQ(text_curve({}, 4, 2), "");
  EXPECT_EQ(text_curve({1}, 0, 2), "");
  EXPECT_EQ(text_curve({1}, 4, 1), "");
}

}  // namespace
}  // namespace cohort::test
