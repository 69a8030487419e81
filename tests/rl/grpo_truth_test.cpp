// Every published case has a row in the table, every row a case, and every check passes.
#include <gtest/gtest.h>

#include <set>

#include "tests/rl/grpo_truth.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using namespace test;

Json read_cases(const std::string& dir) {
  const std::string path = dir + "/grpo_truth/cases.json";
  return parse_json(read_file(path), path);
}

TEST(GrpoTruth, TableAndFileNameTheSameCases) {
  COHORT_REQUIRE_DATA(dir);
  std::multiset<std::string> in_file, in_table;
  const Json cases = read_cases(dir);
  for (const Json& truth : cases.as_array()) in_file.insert(truth.at("id").as_string());
  for (const TruthCase& row : truth_table()) in_table.insert(row.id);
  for (const std::string& id : in_file)
    EXPECT_EQ(in_table.count(id), 1u) << "the table has no check of '" << id << "'";
  for (const std::string& id : in_table)
    EXPECT_EQ(in_file.count(id), 1u) << "'" << id << "' is not in the file";
}

TEST(GrpoTruth, EveryCoveredCaseIsReproduced) {
  COHORT_REQUIRE_DATA(dir);
  const Json cases = read_cases(dir);
  int checked = 0, covered = 0;
  for (const TruthCase& row : truth_table()) {
    EXPECT_EQ(row.check == nullptr, row.coverage == Coverage::kNone) << row.id;
    if (row.check == nullptr) continue;
    ++covered;
    for (const Json& truth : cases.as_array()) {
      if (truth.at("id").as_string() != row.id) continue;
      SCOPED_TRACE(row.id);
      row.check(truth);
      ++checked;
    }
  }
  EXPECT_EQ(checked, covered);
}

}  // namespace
}  // namespace cohort
