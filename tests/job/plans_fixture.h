// Plans from YAML text.
#pragma once

#include <string>
#include <vector>

#include "job/config.h"
#include "tests/support/test_util.h"

namespace cohort::test {

class Plans : public testing::Test {
 protected:
  RunPlan load(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
    write_file(dir_.path("plan.yaml"), yaml);
    return load_plan(dir_.path("plan.yaml"), overrides);
  }
  // Expects an InputError with `text`.
  void expect_refused(const std::string& yaml, const std::string& text,
                      const std::vector<std::string>& overrides = {}) {
    SCOPED_TRACE(yaml);
    EXPECT_THROW_WITH(load(yaml, overrides), InputError, text);
  }
  TempDir dir_;
};

}  // namespace cohort::test
