// Compiler bugs that the build works around (cmake/options.cmake): these tests fail if a workaround
// is lost.
#include "tests/support/test_util.h"

namespace cohort {
namespace {

__attribute__((noinline)) double weighted(const std::vector<double>& v) {
  double sum = 0;
  for (size_t i = 0; i < v.size(); ++i) sum += static_cast<double>(i + 1) * v[i];
  return sum;
}

// g++ 12.2 with AVX-512 repeats the first half of such constants.
TEST(Compiler, CopiesConstantsCompletely) {
  EXPECT_EQ(weighted({0.5, 0.5, 0, 0}), 1.5);
  EXPECT_EQ(std::vector<int32_t>({1, 1, 1, 1, 0, 0, 0, 0})[4], 0);
}

}  // namespace
}  // namespace cohort
