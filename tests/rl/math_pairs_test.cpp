// Completions against right answers: what the math reward must accept, and what it must not.
#include <gtest/gtest.h>

#include <string>

#include "rl/rewards/math_answer.h"

namespace cohort {
namespace {

struct Pair {
  std::string completion, gold;
};

std::string repeated_text(const char* text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

bool is_right(const Pair& pair) {
  const auto wanted = final_answer(pair.gold), found = final_answer(pair.completion);
  return wanted && found && same_answer(*wanted, *found);
}

// Each group has pairs that are right and pairs that are wrong.
void expect_right(std::initializer_list<Pair> pairs) {
  for (const Pair& pair : pairs)
    EXPECT_TRUE(is_right(pair)) << pair.completion << "\nshould be " << pair.gold << ", is "
                                << final_answer(pair.completion).value_or("none");
}
void expect_wrong(std::initializer_list<Pair> pairs) {
  for (const Pair& pair : pairs)
    EXPECT_FALSE(is_right(pair)) << pair.completion << "\nshould not be " << pair.gold << ", is "
                                 << final_answer(pair.completion).value_or("none");
}

TEST(MathPairs, FormulasAfterTheAnswerIs) {
  expect_right({
      {"The answer is\n\n$$x = 5$$", "5"},
      {"The answer is $$5$$", "5"},
      {"The answer is:\n$$\n5\n$$\n", "5"},
      {"The answer is\n\\[\n\\frac{1}{2}\n\\]\nI hope it helps in 2 ways.", "1/2"},
      {"The answer is:\n\\[\nx = 2 + 3\n= 5\n\\]", "5"},
      {"The answer is \\[ 1.5 . \\] There are 7 more.", "3/2"},
      {"The answer is\\(5\\), not 6.", "5"},
      {"the answer is\n\\(x = 5\\)", "5"},
      {"**The answer is** $$\\frac{3}{4}$$", "0.75"},
      {"**The answer is:**\n\n$$\\frac{3}{4}$$\n\n**Done 7**", "0.75"},
      {"**The answer is\n$$12$$**", "12"},
      {"**Answer:**\n\n**$$12$$**", "12"},
      {"**Final answer**: \\[12\\]", "12"},
      {"The final answer is \"$$12$$\".", "12"},
      {"The final answer is \"\\(12\\)\".", "12"},
      {"The answer is “$12$”.", "12"},
      {"The answer is therefore\n\n$$\n12\n$$\nwhich has 2 digits.", "12"},
      {"The answer is given by\n\\[ f(2) = 12 \\]", "12"},
      {"The answer is\n$$\n\\begin{aligned}\nx &= 7 + 5 \\\\\n&= 12 \\\\\n\\end{aligned}\n$$",
       "12"},
      {"Answer:\n\\begin{align*}\nx &= 12\n\\end{align*}\n", "12"},
      {"The answer is\n\n12\n\n$$2 + 3 = 5$$", "12"},
      {"The answer is 12.\n$$2 + 3 = 5$$", "12"},
      {"$$\nx = 12\n$$", "12"},
      {"The answer is\t12", "12"},
      {"The answer is **12**.", "12"},
      {"The answer is: \"12\"", "12"},
      {"答：The answer is：12。", "12"},
      {"The answer is 12。So there are 7 left。", "12"},
      {"The answer is $12$。", "12"},
      {"The answer is '12'.", "12"},
      {"The answer is ‘12’.", "12"},
      {"The answer is «12».", "12"},
      {"The answer is __12__.", "12"},
      {"The answer is as follows:\n12", "12"},
      {"The answer is:\n\\begin{equation*}\nx = 12\n\\end{equation*}", "12"},
  });
  expect_wrong({
      {"The answer is\n\n$$x = 5$$", "6"},
      {"The answer is 12.\n$$2 + 3 = 5$$", "5"},
      {"The answer is 12\n$$2 + 3 = 5$$", "5"},
      {"The answer is\n$$x = 5$$\nThere are 7 of them.", "7"},
      {"The answer is\n$$5", "6"},
      {"The answer isn't $$5$$", "6"},
  });
}

TEST(MathPairs, DashesOfListsAndSigns) {
  expect_right({
      {"- 5", "5"},
      {"The answer is:\n- 5", "5"},
      {"The answer is:\n\n- **5**\n", "5"},
      {"Answer:\n* 5", "5"},
      {"Answer:\n• 5", "5"},
      {"Answer:\n– 5 eggs", "5"},
      {"So the only root is\n- 5", "5"},
      {"- Evelyn", "Evelyn"},
      {"-5", "-5"},
      {"The answer is -5.", "-5"},
      {"The answer is:\n-5", "-5"},
      {"The answer is:\n- -5", "-5"},
      {"The answer is:\n* -5", "-5"},
      {"\\boxed{- 5}", "-5"},
      {"The answer is $- 5$.", "-5"},
      {"- x + 5", "-x+5"},
      {"\\boxed{−5}", "-5"},
      {"The answer is −5.", "-5"},
      {"The answer is –5.", "-5"},
      {"so it is about −5 or so many", "-5"},
      {"The temperature in total was –5", "-5"},
      {"The answer is －５", "-5"},
      {"The answer is ‐5", "-5"},
      {"The answer is ‑5", "-5"},
      {"The answer is negative 5.", "-5"},
      {"so it was minus 5 in all of it", "-5"},
  });
  expect_wrong({
      {"- 5", "-5"},
      {"The answer is:\n- 5", "-5"},
      {"-5", "5"},
      {"The answer is:\n-5", "5"},
      {"The answer is −5.", "5"},
      {"\\boxed{–5}", "5"},
      {"\\boxed{- 5}", "5"},
      {"- x + 5", "x+5"},
      {"The answer is negative 5.", "5"},
  });
}

TEST(MathPairs, CommasOfNumbersPairsIntervalsAndSets) {
  expect_right({
      {"1,234", "1234"},
      {"\\boxed{1,234,567}", "1234567"},
      {"\\boxed{-1,234.50}", "-1234.5"},
      {"\\boxed{1{,}234}", "1234"},
      {"\\boxed{1\\,234}", "1,234"},
      {"\\boxed{\\$1,234}", "1234"},
      {"\\boxed{\\frac{1,234}{2}}", "617"},
      {"There are 12,345 of them in all", "12345"},
      {"\\boxed{(1,234)}", "(1, 234)"},
      {"\\boxed{\\left(1, 234\\right)}", "(1,234)"},
      {"\\boxed{[1,234]}", "[1, 234]"},
      {"\\boxed{\\{1,234\\}}", "\\{234, 1\\}"},
      {"\\boxed{(0.5, 1)}", "\\left(\\frac{1}{2}, 1\\right)"},
      {"The point is (1,234).", "(1,234)"},
      {"So the two of them meet in the point (1, 234)", "(1,234)"},
      {"So all of the solutions are in \\{1, 2\\}", "\\{1,2\\}"},
      {"\\boxed{1, 234}", "1,\\ 234"},
      {"\\boxed{x^2, 1,000}", "x^2, 1,000"},
      {"we conclude that gcd(12, 18) = 6", "6"},
      {repeated_text("é", 508) + " so they meet in (1,234)", "(1,234)"},
      {repeated_text("é", 509) + "x so they meet in (1,234)", "(1,234)"},
  });
  expect_wrong({
      {"\\boxed{(1,234)}", "1234"},
      {"The point is (1,234).", "1234"},
      {"So the two of them meet in the point (1,234)", "1234"},
      {"So the two of them meet in the point (1,234)", "234"},
      {"\\boxed{[1,234]}", "1234"},
      {"\\boxed{\\{1,234\\}}", "1234"},
      {"\\boxed{{1,234}}", "1234"},
      {"\\boxed{(1,234)}", "[1,234]"},
      {"\\boxed{(1,234)}", "(234,1)"},
      {"\\boxed{[0,100)}", "(0,100]"},
      {"\\boxed{1, 234}", "1234"},
      {"\\boxed{1,234}", "1, 234"},
      {"\\boxed{0,123}", "123"},
      {"\\boxed{0,123}", "0.123"},
      {"\\boxed{00,123}", "123"},
      {"\\boxed{12,3456}", "123456"},
      {"\\boxed{12,34}", "1234"},
      {"\\boxed{1234,567}", "1234567"},
      {"\\boxed{1,23,456}", "123456"},
      {"\\boxed{1,2345}", "12345"},
      {"\\boxed{1,234,56}", "123456"},
      {"\\boxed{2(1,234)}", "2468"},
      {"\\boxed{( 1,234 )}", "1234"},
  });
}

TEST(MathPairs, WordsThatScale) {
  expect_right({
      {"The answer is 5 million.", "5000000"},
      {"\\boxed{5\\text{ million}}", "5,000,000"},
      {"\\boxed{\\$1.5 \\text{ million}}", "1500000"},
      {"$2.5 billion", "2500000000"},
      {"The city has 5 million users in it by now", "5,000,000"},
      {"The answer is $5$ million.", "5000000"},
      {"The answer is \\(5\\) million dollars.", "5000000"},
      {"The answer is $$x = 5$$ million.", "5000000"},
      {"The answer is **5** million.", "5000000"},
      {"The answer is $50$%.", "50 percent"},
      {"2 dozen", "24"},
      {"2 dozen eggs", "24"},
      {"2 dozens", "24 eggs"},
      {"3 hundred", "300"},
      {"4 thousand dollars", "$4000"},
      {"2 hundred thousand", "200,000"},
      {"1/2 million", "500000"},
      {"1 1/2 million", "1,500,000"},
      {"5 MILLION", "5 million"},
      {"50 percent", "0.5"},
      {"There are 5 million of them " + repeated_text("é", 40), "5000000"},
      {"There are 5 million of these " + repeated_text("é", 40), "5000000"},
      {"50 percent", "50%"},
      {"50 percent", "\\frac{1}{2}"},
      {"That is 50 percent of all the eggs that were there", "50%"},
      {"50\\%", "50 percent"},
      {"50 per cent", "50 percent"},
      {"50\\%", "50"},
      {"50%", "50\\%"},
      {"12.5 \\text{ percent}", "1/8"},
  });
  expect_wrong({
      {"The answer is 5 million.", "5"},
      {"The city has 5 million users in it by now", "5"},
      {"5 million", "5 billion"},
      {"The answer is $5$ million.", "5"},
      {"The answer is \\(50\\) percent.", "50"},
      {"5 thousand", "5 million"},
      {"\\boxed{5\\text{ million}}", "5"},
      {"2 dozen", "2"},
      {"2 dozen eggs", "2"},
      {"3 hundred", "3"},
      {"4 thousand dollars", "4"},
      {"50 percent", "50"},
      {"That is 50 percent of all the eggs that were there", "50"},
      {"50 percent", "5"},
      {"5%", "50 percent"},
      {"0.5%", "50%"},
  });
}

TEST(MathPairs, UnitsAndOtherWords) {
  expect_right({
      {"5 dollars", "5"},
      {"The answer is **5** dollars.", "5"},
      {"$5", "5 dollars"},
      {"5 cm", "5"},
      {"5\\text{ cm}", "5 cm"},
      {"5 \\text{ cm}^2", "5"},
      {"5 cm²", "5"},
      {"90 degrees", "90^\\circ"},
      {"90°", "90"},
      {"18 eggs", "18"},
      {"1 egg", "1 eggs"},
      {"15 kilometers", "15 km"},
      {"15 square centimeters", "15\\mbox{ cm}^2"},
      {"\\boxed{12\\pi \\text{ cm}^2}", "12\\pi"},
      {"5 m", "5 meters"},
      {"5 cm^2", "5 cm²"},
      {"5 cm^{2}", "5 square centimeters"},
      {"5\\text{ m}^3", "5 cubic meters"},
      {"5\\text{ sq ft}", "5 square feet"},
      {"5 cups", "5 cups"},
      {"5 m/s", "5"},
      {"5 meters per second", "5 m/s"},
      {"20°C", "20 degrees"},
      {"an area of 12 cm^{2} in all of that", "12"},
      {"an area of 12 cm² in all of that", "12"},
      {"5 hours", "5 hrs"},
      {"5 miles per hour", "5"},
      {"20 m^3 per second", "20 cubic meters per second"},
      {"50 pounds per square inch", "50 lb/in^2"},
      {"30 houses per square mile", "30 houses per mi^2"},
      {"\\boxed{5\\text{cm^}}", "5"},
      {"3 squared", "3 squared"},
      {"5 or more", "5 or more"},
      {"3 halves", "3 halves"},
      {"#### 6 eggs", "6"},
  });
  expect_wrong({
      {"18 eggs", "18 chickens"},
      {"20 dollars", "20 cents"},
      {"5 km", "5 cm"},
      {"5 feet", "5 inches"},
      {"5 or more", "5"},
      {"5 or six", "5"},
      {"3 squared", "3"},
      {"2 cubed", "2"},
      {"4 factorial", "4"},
      {"3 halves", "3"},
      {"3 quarters", "3"},
      {"7 hundredths", "7"},
      {"7 hundredths", "700"},
      {"5 thousandths", "5000"},
      {"101 base two", "101"},
      {"7 remainder two", "7"},
      {"5 eggs and bacon", "5"},
      {"5 degrees below zero", "5"},
      {"2 pi", "2"},
      {"5\\text{ pm}", "5"},
      {"2**3", "23"},
      {"2 sin x", "2"},
      {"5 to one", "5"},
      {"5 cents", "5 centimeters"},
      {"5 mi", "5 min"},
      {"5 m", "5 mm"},
      {"5 cm^2", "5 cm^3"},
      {"5 cm²", "5 cm³"},
      {"5\\text{ cm}^2", "5\\text{ cm}^{3}"},
      {"5 square meters", "5 cubic meters"},
      {"5 square meters", "5 meters"},
      {"5 m^2", "5 m"},
      {"20 m^3 per second", "20 m^3 per hour"},
      {"5\\text{^2}", "5 meters^2"},
      {"5 times x", "5"},
      {"5 modulo seven", "5"},
      {"Evelyn", "5"},
  });
}

TEST(MathPairs, CharactersOutsideOfAscii) {
  expect_right({
      {"１２", "12"},
      {"The answer is １，２３４．５", "1234.5"},
      {"\\boxed{½}", "0.5"},
      {"1½", "3/2"},
      {"The answer is 2¼ cups.", "9/4"},
      {"¾", "\\frac{3}{4}"},
      {"⅔", "2/3"},
      {"1⁄2", "1/2"},
      {"x² + 1", "x^2+1"},
      {"x ≤ 5", "x \\leq 5"},
      {"x ≥ 5", "x >= 5"},
      {"（１，２）", "(1,2)"},
      {"５０％", "50%"},
      {"6 × 4", "24"},
      {"12。", "12"},
      {"\\boxed{12}。", "12"},
      {"(−∞, 3]", "(-\\infty, 3]"},
      {"2¹⁰", "1024"},
      {"10⁻³", "0.001"},
      {"x⁴", "x^{4}"},
      {"±5", "\\pm 5"},
      {"x ∈ [0,1)", "x \\in [0, 1)"},
  });
  expect_wrong({
      {"１２", "13"},
      {"½", "12"},
      {"1½", "11/2"},
      {"2¼", "21/4"},
      {"x² + 1", "x2+1"},
      {"2¹⁰", "2"},
      {"2¹⁰", "210"},
      {"x²", "2x"},
      {"x ≤ 5", "x ≥ 5"},
  });
}

TEST(MathPairs, NotationsOfTheSame) {
  expect_right({
      {"\\boxed{x^2}", "x^{2}"},
      {"\\boxed{x^{10}+y_1}", "x^10 + y_{1}"},
      {"\\boxed{x^{-1}}", "x^-1"},
      {"\\boxed{e^{x}}", "e^x"},
      {"\\boxed{\\frac12}", "\\frac{1}{2}"},
      {"\\boxed{\\dfrac{x}{y}}", "\\frac xy"},
      {"\\boxed{x \\le 5}", "x \\leq 5"},
      {"\\boxed{x <= 5}", "x \\leqslant 5"},
      {"\\boxed{x \\ge 5}", "x\\geq5"},
      {"\\boxed{x \\neq 5}", "x \\ne 5"},
      {"\\boxed{x < 5}", "x \\lt 5"},
      {"\\boxed{1e5}", "100000"},
      {"\\boxed{1E-3}", "0.001"},
      {"\\boxed{-2.5e+2}", "-250"},
      {"\\boxed{1 \\times 10^5}", "1e5"},
      {"\\boxed{1 \\cdot 10^{-3}}", "1e-3"},
      {"so it has the value 1.5e3", "1500"},
      {"1 1/2", "3/2"},
      {"1 1/2 cups", "1.5"},
      {"She used 1 1/2 cups of the flour that she had", "3/2"},
      {"-1 1/2", "-1.5"},
      {"\\boxed{1\\frac{1}{2}}", "1.5"},
      {"\\boxed{1 \\frac12}", "3/2"},
      {"\\boxed{\\{1, 2, 3\\}}", "\\{3,1,2\\}"},
      {"\\boxed{\\left\\{\\frac12, 1\\right\\}}", "\\{1, 0.5\\}"},
      {"\\boxed{\\{(1,2), (3,4)\\}}", "\\{(3,4),(1,2)\\}"},
      {"\\boxed{\\{a, b\\}}", "\\{b, a\\}"},
      {"\\boxed{\\{0.5\\}}", "\\{\\frac{1}{2}\\}"},
  });
  expect_wrong({
      {"\\boxed{x^2}", "x^3"},
      {"\\boxed{x^{2y}}", "x^2y"},
      {"\\boxed{x^{12}}", "x^{1}2"},
      {"\\boxed{x \\le 5}", "x < 5"},
      {"\\boxed{x \\le 5}", "x \\ge 5"},
      {"\\boxed{x \\ne 5}", "x = 5"},
      {"\\boxed{1e5}", "15"},
      {"\\boxed{1e-400}", "0"},
      {"\\boxed{1e400}", "1e401"},
      {"\\boxed{2e}", "2"},
      {"1 1/2", "11/2"},
      {"1 1/2", "1/2"},
      {"She used 1 1/2 cups of the flour that she had", "1/2"},
      {"1 3/2", "5/2"},
      {"\\boxed{\\{1, 2, 3\\}}", "\\{1, 2\\}"},
      {"\\boxed{\\{1, 2\\}}", "\\{1, 2, 3\\}"},
      {"\\boxed{\\{1, 2\\}}", "(1, 2)"},
      {"\\boxed{(2, 1)}", "(1, 2)"},
      {"\\boxed{\\{(1,2), (3,4)\\}}", "\\{(2,1),(3,4)\\}"},
      {"\\boxed{\\{5\\}}", "\\{6\\}"},
  });
}

TEST(MathPairs, NamesOfValues) {
  expect_right({
      {"\\boxed{f(2) = 72}", "72"},
      {"\\boxed{\\text{Area} = 72}", "72"},
      {"\\boxed{\\text{Area} = 72 \\text{ cm}^2}", "72"},
      {"\\boxed{\\text{total cost} = \\$72}", "72"},
      {"\\boxed{Area = 72}", "72"},
      {"\\boxed{x = 72}", "72"},
      {"\\boxed{x_1 = 72}", "72"},
      {"\\boxed{S_{10} = 72}", "72"},
      {"\\boxed{\\theta = 30^\\circ}", "30"},
      {"\\boxed{\\angle ABC = 30^\\circ}", "30"},
      {"\\boxed{P(A) = \\frac12}", "0.5"},
      {"\\boxed{f'(2) = 72}", "72"},
      {"\\boxed{f^{-1}(2) = 72}", "72"},
      {"\\boxed{g(f(2)) = 72}", "72"},
      {"\\boxed{P(X = 2) = \\frac12}", "0.5"},
      {"\\boxed{E[X] = 72}", "72"},
      {"\\boxed{|AB| = 72}", "72"},
      {"\\boxed{\\overline{AB} = 72}", "72"},
      {"\\boxed{\\displaystyle 72}", "72"},
      {"\\boxed{f(x) = 2x + 1}", "2x+1"},
      {"72", "f(2) = 72"},
      {"\\boxed{72}", "\\text{Area}=72\\text{ cm}^2"},
      {"\\boxed{x \\in \\{1, 2\\}}", "x \\in \\{2,1\\}"},
      {"\\boxed{x \\in [0, 1)}", "[0,1)"},
      {"\\boxed{D = \\{1, 2\\}}", "\\{2,1\\}"},
      {"\\boxed{f(2) = 72}", "f(2)=72"},
      {"\\boxed{f(2) = 70 + 2 = 72}", "72"},
  });
  expect_wrong({
      {"\\boxed{f(2) = 72}", "2"},
      {"\\boxed{f(2) = 72}", "f(3) = 72"},
      {"\\boxed{f(2) = 72}", "73"},
      {"\\boxed{2x = 72}", "72"},
      {"\\boxed{x^2 = 72}", "72"},
      {"\\boxed{x + y = 72}", "72"},
      {"\\boxed{f(2) > 3 and g(x) = 72}", "72"},
      {"\\boxed{\\sqrt{A} = 72}", "72"},
      {"\\boxed{abc = 72}", "72"},
      {"\\boxed{\\frac{x}{2} = 72}", "72"},
      {"\\boxed{x \\le 72}", "72"},
      {"\\boxed{x \\ne 72}", "72"},
      {"\\boxed{x = 72, y = 3}", "72"},
  });
}

TEST(MathPairs, BoxesAndHashes) {
  expect_right({
      {"#### 72", "72"},
      {"#### 1,018\nThat is all.", "1018"},
      {"#### **72**", "72"},
      {"#### $18", "18"},
      {"#### $x + 1$\nas said", "x+1"},
      {"#### Evelyn", "Evelyn"},
      {"#### Conclusion\nThe answer is 72.", "72"},
      {"#### The final answer is 72", "72"},
      {"#### Answer: 72", "72"},
      {"#### Step 2: add\nThe sum of both is 72", "72"},
      {"#### 2. Add them\nThe sum of both is 72", "72"},
      {"#### So all in all there are 72 of them", "72"},
      {"#### Result\n\n72", "72"},
      {"#### \n72", "72"},
      {"\\boxed{72} \\boxed{73} no, \\boxed{72}", "72"},
  });
  expect_wrong({
      {"The answer is 72. \\boxed{}", "72"},
      {"\\boxed{72} \\boxed{}", "72"},
      {"72 \\boxed{ }", "72"},
      {"72 \\boxed{\\text{}}", "72"},
      {"72 \\boxed{$$}", "72"},
      {"72", "\\boxed{}"},
      {"\\boxed{}", "\\boxed{}"},
      {"#### Conclusion\nThe answer is 72.", "Conclusion"},
      {"#### 2. Add them\nThe sum of both is 72", "2"},
      {"#### 72\n#### 73", "72"},
  });
}

}  // namespace
}  // namespace cohort
