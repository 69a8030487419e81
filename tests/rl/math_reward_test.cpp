// Rewards for answers in mathematics: against published graders on the cases of their own tests, on
// GSM8K, and on hostile text.
#include <gtest/gtest.h>

#include <cmath>
#include <ctime>
#include <map>

#include "rl/reward.h"
#include "rl/rewards/expression.h"
#include "rl/rewards/math_answer.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

Example math_example(const std::string& answer) {
  return {.prompt = "?", .answer = answer, .solution = answer, .fields = Json::Object{}};
}

double math_reward(const std::string& answer, const std::string& completion) {
  static const RewardFn reward = make_reward({.name = "math"}, nullptr);
  return reward({math_example(answer), completion});
}

Json load(const std::string& path) {
  return parse_json(test::read_file(path), path);
}

std::string text_of(const Json& row, const char* key) {
  return row.at(key).as_string();
}

// ---- Extraction --------------------------------------------------------------------------------

TEST(FinalAnswer, IsFoundByTheFirstRuleThatApplies) {
  const std::pair<const char*, const char*> cases[] = {
      {R"(#### 1, then \boxed{\frac{1}{2}} and $3$)", R"(\frac{1}{2})"},
      {R"(\boxed{1} or rather \boxed{\text{\{2\}}}.)", R"(\text{\{2\}})"},
      {R"(\boxed{1} \fbox{2})", "2"},
      {R"(So $\boxed 5$.)", "5"},
      {R"(\boxed{4} no: \boxed{5)", "5"},      // unclosed box, so the last number
      {R"($3$ and \boxed{\frac{1}{2})", "3"},  // unclosed box
      {R"(\boxedtext{4} is 5 or so)", "5"},
      {"It is $7$.\n#### 1,018\nThat is all.", "1,018"},
      {"#### 5 #### 6 eggs ", "6 eggs"},
      {R"(First $x=1$, then \(x = 2\), so \[f(x=3) = 4\])", "4"},
      {R"($$a = \frac{x=1}{2}$$)", R"(\frac{x=1}{2})"},
      {R"($x >= 5$)", "x >= 5"},
      {R"($a$ costs $5 or $6)", "a"},
      {R"(\$5 or $x$ or \$6)", "x"},
      {"It costs 5$ and then 7$.", "7$"},
      {"It costs $5 and then $7.", "$7"},  // prices
      {"The answer is 5. There are 7 of them.", "5"},
      {"The Answer: **-1.5**\n\nI hope that 3 readers like it.", "-1.5"},
      {"**Answer**: 12", "12"},
      {"The answer is\n\n42!", "42"},
      {R"(Since $3x = 15$, x is 5. The answer is 5.)", "5"},
      {R"(The answer is found from $x = 3$. So $y = 4$.)", "3"},
      {"The answer is that all of them together have 7 eggs and 2 hens", "2"},
      {"Answer: Evelyn.", "Evelyn"},
      {"No answer isn't 5 or 6.", "6"},
      {"x^2 + 1", "x^2 + 1"},
      {"6 and 8", "6 and 8"},
      {R"(\text{Navin and Luis})", R"(\text{Navin and Luis})"},
      {R"(\infty)", R"(\infty)"},
      {R"(5 apples for $5, so it is $x$)", "x"},
      {" Evelyn.\n", "Evelyn"},
      {"Total: 72", "72"},
      {"She sold 48/2 = 24 clips in May, 72 in all.", "72"},
      {"so that makes (2+3)*4.", "(2+3)*4"},
      {"so that makes 2^3", "2^3"},
      {"so it is 4-(-5), which is x-9", "9"},
      {"so it is about -9?", "-9"},
      {"<answer>-5.5</answer>", "-5.5"},
      {"The ratio is [1/2].", "1/2"},
      {"The area is 12 cm^2", "12"},
  };
  for (const auto& [text, answer] : cases) EXPECT_EQ(final_answer(text), answer) << text;
}

TEST(FinalAnswer, IsAbsentIfNoRuleApplies) {
  for (const char* text : {"", " \n", "There is no such number.", "####", "$$", "\\boxed{}", "."})
    EXPECT_EQ(final_answer(text), std::nullopt) << text;
  EXPECT_EQ(final_answer("5 \\boxed{" + std::string(2000, '1') + "}"), std::nullopt);
}

// ---- Values ------------------------------------------------------------------------------------

TEST(ExpressionValue, IsThatOfArithmetic) {
  const std::pair<const char*, double> cases[] = {
      {"1,234.5", 1234.5},
      {"-2^2", -4},
      {"(-2)^2", 4},
      {"2^3^2", 512},
      {"2^{-1}", 0.5},
      {"2*-3", -6},
      {"7 - 2 - 1", 4},
      {"12/2/3", 2},
      {"1/2+1/3", 5.0 / 6},
      {"3!", 6},
      {"3!!", 720},
      {"25!", 15511210043330985984000000.0},
      {"30!/28!", 870},
      {"170!/169!", 170},
      {"0^0", 1},
      {"\\frac{\\frac{1}{2}}{\\frac34}", 2.0 / 3},
      {"\\frac1{72}", 1.0 / 72},
      {"\\frac{1}{2}^2", 0.25},
      {"\\sqrt{\\sqrt{16}}", 2},
      {"\\sqrt[3]{-8}", -2},
      {"\\sqrt2^2", 2},
      {"sqrt16", 4},
      {"sqrt(16)/2", 2},
      {"2\\pi", 2 * 3.141592653589793},
      {"3\\sqrt{4}(2)", 12},
      {"3\\frac{1}{2}", 3.5},
      {"-3\\frac12", -3.5},
      {"3\\frac{\\sqrt{4}}{4}", 1.5},
      {"1 + 1 = 2", 2},
  };
  for (const auto& [text, value] : cases) {
    const auto number = expression_value(text);
    ASSERT_TRUE(number) << text;
    EXPECT_NEAR(number->approx, value, 1e-12 * std::abs(value)) << text;
  }
}

TEST(ExpressionValue, IsAbsentForAnyOtherText) {
  const std::string deep(100, '-');
  for (const std::string& text : {std::string(),
                                  std::string("x"),
                                  std::string("2x"),
                                  std::string("1 2"),
                                  std::string("1/0"),
                                  std::string("0/0"),
                                  std::string("0^-1"),
                                  std::string("(1"),
                                  std::string("1)"),
                                  std::string("1,23"),
                                  std::string("\\sqrt{-1}"),
                                  std::string("\\sqrt[0]{1}"),
                                  std::string("(-8)^(1/3)"),
                                  std::string("(-1)!"),
                                  std::string("1.5!"),
                                  std::string("171!"),
                                  std::string("99999999999!"),
                                  std::string("9^9^9^9"),
                                  std::string("\\frac"),
                                  std::string("\\frac{1}"),
                                  std::string("1="),
                                  std::string("(1/0)^0"),
                                  std::string("nan"),
                                  std::string("inf"),
                                  std::string("0x10"),
                                  std::string(39, '9'),
                                  deep + "1",
                                  std::string(64, '(') + "1" + std::string(64, ')')})
    EXPECT_FALSE(expression_value(text)) << text;
}

TEST(ExpressionValue, IsExactForFractions) {
  const auto same = [](const char* a, const char* b) {
    return same_number(*expression_value(a), *expression_value(b));
  };
  EXPECT_TRUE(same("1/3", "2/6"));
  EXPECT_TRUE(same("2^100/2^99", "2"));
  EXPECT_FALSE(same("1/3", "0.3333333333333333"));
  EXPECT_FALSE(same("9007199254740993", "9007199254740992"));  // one double, two numbers
  EXPECT_FALSE(same("2^64", "2^64+1"));
  EXPECT_TRUE(same("\\sqrt{17}", "4.123105625617661"));
  EXPECT_FALSE(same("\\sqrt{17}", "4.1231056"));
  EXPECT_TRUE(same("(1/3)^{200}*3^{200}", "1"));  // overflows 128 bits
  EXPECT_TRUE(same("(-1)^{999999999}", "-1"));
}

// ---- Equal answers -----------------------------------------------------------------------------

TEST(SameAnswer, AsTextOrAsANumber) {
  const std::pair<const char*, const char*> same[] = {
      {"\\frac{1}{2}", "0.5"},
      {"-\\frac{1}{2}", "-1/2"},
      {"\\frac{72}1", "72"},
      {"x=\\frac12", "1/2"},
      {"\\left( 3, \\dfrac{\\pi}2 \\right)", "(3,\\frac{\\pi}{2})"},
      {"50\\%", "50"},
      {"90^\\circ", "90 degrees"},
      {"15\\mbox{ cm}^2", "15"},
      {"\\frac{1}{3} \\textbf{meters}", "1/3"},
      {"\\$18.00", "18"},
      {"10{,}000", "10000"},
      {"10\\,000", "10,000"},
      {"\\text{(C)}", "(C)"},
      {"2 \\cdot 3 \\times 4", "24"},
      {"6 × 4", "24"},
      {"−3", "-3"},
      {"√16", "4"},
      {"2π", "2\\pi"},
      {"2**3", "8"},
      {"48 + 24 = 72", "72"},
      {"{.5}", "0.5"},
  };
  for (const auto& [a, b] : same) {
    EXPECT_TRUE(same_answer(a, b)) << a << " and " << b;
    EXPECT_TRUE(same_answer(b, a)) << b << " and " << a;
  }
  const std::pair<const char*, const char*> different[] = {
      {"", ""},         {"\\text{}", ""},     {"1/0", "0/0"},
      {"nan", "0"},     {"(3,4)", "(4,3)"},   {"6 \\text{ and } 8", "6"},
      {"6 and 8", "6"}, {"6 and eight", "6"}, {"2 sin x", "2"},
      {"abc = 5", "5"}, {"3 1/2", "31/2"},    {"1 2", "12"},
      {"2 pi", "2"},    {"x \\le 5", "5"},    {"x >= 5", "5"},
      {"5 + x", "5"},   {"Evelyn", "Carla"},  {"1112112_3", "1112112"},
  };
  for (const auto& [a, b] : different) EXPECT_FALSE(same_answer(a, b)) << a << " and " << b;
}

TEST(MathReward, SearchesThePartThatThePatternSelects) {
  const RewardFn after =
      make_reward({.name = "math", .weight = 1, .pattern = "(?s)</think>(.*)"}, nullptr);
  EXPECT_EQ(after({math_example("42"), "<think>\\boxed{41}</think> 42"}), 1);
  EXPECT_EQ(after({math_example("42"), "<think>\\boxed{42}</think> Some other text."}), 0);
  EXPECT_EQ(after({math_example("42"), "<think>\\boxed{42}"}), 0);
}

TEST(MathReward, IsNotApplicableWithoutARightAnswer) {
  for (const char* answer : {"", "no number at all", "\\boxed{}"})
    EXPECT_TRUE(std::isnan(math_reward(answer, "1"))) << answer;
}

// ---- Published cases ---------------------------------------------------------------------------

TEST(PublishedMathCases, UnclosedBoxesAreIgnored) {
  COHORT_REQUIRE_DATA(dir);
  const Json cases = load(dir + "/math_verify/reward_cases.json");
  for (const Json& row : cases.at("boxed_cases").as_array()) {
    const auto expected =
        row.at("last_boxed").is_null() ? std::nullopt : std::optional(text_of(row, "last_boxed"));
    EXPECT_EQ(final_answer(text_of(row, "text")), expected) << text_of(row, "text");
  }
}

TEST(PublishedMathCases, NormalisationIsThePublishedOne) {
  COHORT_REQUIRE_DATA(dir);
  const Json cases = load(dir + "/math_verify/reward_cases.json");
  for (const Json& row : cases.at("normalise_cases").as_array())
    EXPECT_EQ(normalised_answer(text_of(row, "raw")), text_of(row, "expected")) << row.dump();
}

TEST(PublishedMathCases, ThinkFormatIsThatOfTrl) {
  COHORT_REQUIRE_DATA(dir);
  const RewardFn reward = make_reward({.name = "think_format"}, nullptr);
  const Json cases = load(dir + "/math_verify/reward_cases.json");
  for (const Json& row : cases.at("think_format_cases").as_array())
    EXPECT_EQ(reward({math_example(""), text_of(row, "completion")}), row.at("reward").as_double())
        << row.dump();
}

TEST(PublishedMathCases, CountdownJudgesAlike) {
  COHORT_REQUIRE_DATA(dir);
  const RewardFn reward = make_reward({.name = "countdown"}, nullptr);
  const Json cases = load(dir + "/math_verify/reward_cases.json");
  for (const Json& row : cases.at("countdown_cases").as_array()) {
    Example example = math_example("");
    example.fields = row;
    EXPECT_EQ(reward({example, text_of(row, "answer")}), row.at("correct").as_bool() ? 1 : 0)
        << row.dump();
  }
}

// Per rule: the number of its rows, and of those on which the math reward agrees. Rules with fewer
// agreements ask for symbolic algebra, sets, other tolerances or partial credit.
struct Tally {
  int rows = 0, agreements = 0;
  bool operator==(const Tally&) const = default;
};
void PrintTo(const Tally& tally, std::ostream* out) {
  *out << tally.agreements << " of " << tally.rows;
}
using Tallies = std::map<std::string, Tally>;

TEST(PublishedMathCases, RewardsAgreeWithTheImplementedRules) {
  COHORT_REQUIRE_DATA(dir);
  const std::string tag = "<answer> tag number; tolerance ";
  const Tallies expected = {
      {"gsm8k_reward_fn", {17, 17}},
      {"math-verify", {1, 1}},
      {"trl accuracy_reward (math-verify)", {2, 2}},
      {"trl reasoning_accuracy_reward: only after </think>", {3, 3}},
      {"grade_answer_verl: boxed required", {1, 1}},
      // Not implemented.
      {"geometry3k_reward_fn", {8, 6}},
      {tag + "1e-6, partial credit 0.1 when the gold appears outside the tag", {13, 9}},
      {tag + "1e-3, partial credit 0.2 when the gold appears outside the tag", {3, 1}},
      {"DAPO compute_score strict box: +1/-1, only last 300 characters", {3, 1}},
  };
  Tallies found;
  const Json cases = load(dir + "/math_verify/reward_cases.json");
  for (const Json& row : cases.at("reward_cases").as_array()) {
    const std::string rule = text_of(row, "rule");
    const bool after = rule.ends_with("only after </think>");
    const RewardFn reward = make_reward(
        {.name = "math", .weight = 1, .pattern = after ? "(?s)</think>(.*)" : ""}, nullptr);
    const double value = reward({math_example(text_of(row, "gold")), text_of(row, "completion")});
    const bool agrees = value == row.at("reward").as_double();
    found[rule].rows += 1;
    found[rule].agreements += agrees;
    EXPECT_TRUE(agrees || rule != "gsm8k_reward_fn") << row.dump();
  }
  EXPECT_EQ(found, expected);
}

TEST(PublishedMathCases, EqualAnswersAgreeWithTheImplementedRules) {
  COHORT_REQUIRE_DATA(dir);
  const Tallies expected = {
      {"MATH is_equiv: string normalisation only, not symbolic", {10, 10}},
      {"Hendrycks string normalisation", {1, 1}},
      // Not implemented; test_... are tests of Math-Verify.
      {"symbolic", {1, 0}},
      {"PRM800K/DeepScaleR rule: fractions must match exactly, unreduced is wrong (math-verify "
       "says "
       "equal)",
       {1, 0}},
      {"test_boxed", {2, 1}},
      {"test_complex_math_expressions", {4, 2}},
      {"test_float_precision", {1, 1}},
      {"test_latex_notation", {11, 10}},
      {"test_latex_notation_math", {17, 17}},
      {"test_math_extraction_additional_cases", {13, 8}},
      {"test_math_extraction_edge_cases", {8, 7}},
      {"test_matrix_extraction", {3, 3}},
      {"test_number_extraction", {10, 8}},
      {"test_numina_cases", {13, 4}},
      {"test_open_thoughts", {13, 8}},
      {"test_percent_notation", {5, 5}},
      {"test_relations_math", {18, 10}},
      {"test_set_rel_assymetry", {4, 1}},
      {"test_sets_handling", {4, 4}},
      {"test_simple_fraction_notation", {1, 1}},
      {"test_sqrt_precision", {1, 1}},
      {"test_strict_variable_comparison", {2, 1}},
      {"test_string_extraction", {9, 7}},
  };
  Tallies found;
  const Json triples = load(dir + "/math_verify/equal_triples.json");
  for (const Json& row : triples.as_array()) {
    const std::string gold = text_of(row, "gold"), prediction = text_of(row, "pred");
    const Json* rule = row.at("config").find("rule");
    const std::string source = text_of(row, "source");
    Tally& tally =
        found[rule != nullptr ? rule->as_string() : source.substr(source.rfind(':') + 1)];
    tally.rows += 1;
    tally.agreements += (math_reward(gold, prediction) == 1) == row.at("equal").as_bool();
    if (source.starts_with("hendrycks")) {
      EXPECT_EQ(same_answer(gold, prediction), row.at("equal").as_bool()) << row.dump();
    }
  }
  EXPECT_EQ(found, expected);
}

// The number after "####" in a GSM8K solution, without thousands separators.
std::string gsm8k_number(const std::string& answer) {
  std::string number = answer.substr(answer.rfind("#### ") + 5);
  std::erase(number, ',');
  return number;
}

TEST(MathReward, EveryRealGsm8kSolutionIsRightAndNoOtherIs) {
  COHORT_REQUIRE_DATA(dir);
  const auto set =
      load_jsonl(
          {.path = {dir + "/gsm8k/test.jsonl"}, .prompt = "{question}", .held_out_fraction = 0})
          .train;
  const RewardFn reward = make_reward({.name = "math"}, nullptr);
  ASSERT_EQ(set->size(), 1319);
  for (int64_t i = 0; i < set->size(); ++i) {
    const Example example = set->get(i);
    EXPECT_EQ(reward({example, example.solution}), 1) << example.solution;
    for (const int64_t step : {1, 2, 700}) {
      const Example other = set->get((i + step) % set->size());
      const bool equal = gsm8k_number(example.answer) == gsm8k_number(other.answer);
      EXPECT_EQ(reward({example, other.solution}), equal ? 1 : 0) << example.answer << other.answer;
    }
  }
}

// ---- Hostile text ------------------------------------------------------------------------------

TEST(MathReward, HostileCompletionsCostLittle) {
  const auto times = [](const char* text, int count) {
    std::string out;
    for (int i = 0; i < count; ++i) out += text;
    return out;
  };
  std::vector<std::string> hostile;
  for (const char* unit :
       {"\\boxed{", "\\boxed{1}", "{",      "}",          "(",       "$",
        "$1",       "$$",         "$ $",    "\\(",        "\\[",     "\\",
        "####",     "#### 1\n",   "answer", "answer is ", "answer:", "1",
        "1 ",       "1/",         "9^",     "-",          "--1",     "!",
        "1!",       ",000",       "\\frac", "\\frac{",    "\\frac1", "\\sqrt",
        "sqrt",     "\\sqrt[",    "\\pi",   "\\text{",    "1 aa ",   "1 \\text{a} ",
        "=",        "a^2 ",       ".",      ".5",         "\\\\",    "\\left",
        " ",        "\n",         "π",      "\xff",       "170!*",   "1/7+",
        "2^99*",    "\\frac{1}{"})
    for (const char* end : {"", "1", "}", "$", " aa!", "^2"}) {
      const std::string text = times(unit, 10'000 / static_cast<int>(std::strlen(unit)));
      hostile.push_back(text + end);
      hostile.push_back("\\boxed{" + text.substr(0, 1000) + end + "}");
    }
  for (const std::string& text : hostile) {
    const std::clock_t start = std::clock();  // CPU time, which does not depend on other processes
    const double value = math_reward("46", text);
    const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    EXPECT_TRUE(value == 0 || value == 1);
    // At most 1 ms on an idle machine; a superlinear algorithm exceeds the limit on 10 kB.
    EXPECT_LT(seconds, 0.1) << text.substr(0, 40);
  }
}

TEST(MathReward, HostileAnswersAreNotNumbers) {
  for (const std::string& text :
       {std::string("9^9^9^9"), std::string("1/0"), std::string("\\frac"), std::string("(((("),
        std::string("\\boxed{\\boxed{"), std::string(10'000, '9'), "1e" + std::string(400, '9')}) {
    EXPECT_EQ(math_reward("46", text), 0) << text;
    const double itself = math_reward(text, text);
    EXPECT_TRUE(itself == 0 || itself == 1 || std::isnan(itself));
  }
}

}  // namespace
}  // namespace cohort
