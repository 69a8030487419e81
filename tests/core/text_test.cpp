// Tests of suggestions for mistyped names and of the text of numbers.
#include "core/text.h"

#include <cstdlib>
#include <vector>

#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

TEST(Text, SuggestionsCorrectTyposOnly) {
  const std::vector<std::string> names = {"learning_rate", "steps", "beta"};
  EXPECT_EQ(did_you_mean("learning-rate", names), "; did you mean 'learning_rate'?");
  EXPECT_EQ(did_you_mean("lerning_rates", names), "; did you mean 'learning_rate'?");
  EXPECT_EQ(did_you_mean("bta", names), "; did you mean 'beta'?");
  EXPECT_EQ(did_you_mean("temperature", names), "");
  EXPECT_EQ(did_you_mean("temperature", names, "; no"), "; no");
  EXPECT_EQ(join(names, ", "), "learning_rate, steps, beta");
  EXPECT_EQ(join({}, ", "), "");
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
