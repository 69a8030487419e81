// Entry point of every test program. A logged warning or error fails the test that logs it, unless
// the test expects it with an ExpectLog (tests/support/test_util.h).
#include <gtest/gtest.h>

#include "tests/support/test_util.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new cohort::test::LogListener);
  return RUN_ALL_TESTS();
}
