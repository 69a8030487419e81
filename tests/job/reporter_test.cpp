// Tests of what the terminal shows of a run: its curve and its samples.
#include "job/report.h"

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
            "         |\n"
            "   0.500 |**\n"
            "         +--\n");
  EXPECT_EQ(text_curve({}, 4, 2), "");
  EXPECT_EQ(text_curve({1}, 0, 2), "");
  EXPECT_EQ(text_curve({1}, 4, 1), "");
}

// Line breaks are line breaks, not "\\n".
TEST(FinalReport, ShowsPromptsAndCompletionsApart) {
  const Json report = parse_json(
      R"({"last": {"score": 0.5, "completions": [
            {"prompt": "1+1=", "completion": "2", "correct": true},
            {"prompt": "Q: 1+1\nA:", "completion": " 3\n4", "correct": false},
            {"prompt": "2+2=", "completion": "5", "correct": false, "answer": "4"},
            {"prompt": "Say it\n", "completion": "", "correct": null}]}})",
      "report");
  EXPECT_EQ(final_report(report),
            "after GRPO (held-out pass@1 0.500):\n"
            "  right  1+1= -> 2\n"
            "  wrong  Q: 1+1\n"
            "         A:\n"
            "         ->  3\n"
            "         4\n"
            "  wrong  2+2= -> 5  (answer: 4)\n"
            "  ?      Say it -> \n");
}

}  // namespace
}  // namespace cohort::test
