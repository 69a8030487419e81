// Tests of suggestions for mistyped names and of the text of numbers.
#include "core/text.h"

#include <cstdlib>
#include <vector>

#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

TEST(Text, NearestNameCorrectsTyposOnly) {
  const std::vector<std::string> names = {"learning_rate", "steps", "beta"};
  EXPECT_EQ(nearest_name("learning-rate", names), "learning_rate");
  EXPECT_EQ(nearest_name("lerning_rates", names), "learning_rate");
  EXPECT_EQ(nearest_name("bta", names), "beta");
  EXPECT_EQ(nearest_name("temperature", names), "");
}

TEST(Text, FormatDoubleIsShortestAndExact) {
  EXPECT_EQ(format_double(0.001), "0.001");
  EXPECT_EQ(format_double(1e-8), "1e-08");
  EXPECT_EQ(format_double(3), "3");
  for (const double v : {0.1, 1.0 / 3, 1e300, 5e-324, -2.5})
    EXPECT_EQ(std::strtod(format_double(v).c_str(), nullptr), v);
}

}  // namespace
}  // namespace cohort::test
