// Matching, groups, UTF-8, and patterns and texts that would run forever without a budget.
#include "text/regex.h"

#include <chrono>

#include "core/check.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using Groups = std::vector<std::string>;

TEST(Regex, FullMatchWantsTheWholeText) {
  const Regex regex("a|ab");
  EXPECT_TRUE(regex.full_match("a"));
  EXPECT_TRUE(regex.full_match("ab"));  // the alternative that matches first is not the whole text
  EXPECT_FALSE(regex.full_match("abc"));
  EXPECT_FALSE(regex.full_match("xa"));
  EXPECT_FALSE(regex.full_match("a\n"));
}

TEST(Regex, TheLastMatchGivesGroups) {
  const Regex regex("(\\w+)=(\\d+)(!)?");
  const std::string text = "a=1 b=22! c=3, d";
  EXPECT_EQ(regex.find_last("a=1 b"), (Groups{"a=1", "a", "1", ""}));
  EXPECT_EQ(regex.find_last(text), (Groups{"c=3", "c", "3", ""}));
  EXPECT_EQ(regex.find_last("b=22!"), (Groups{"b=22!", "b", "22", "!"}));
  EXPECT_EQ(regex.find_last("nothing"), std::nullopt);
}

TEST(Regex, LastMatchPassesEmptyMatches) {
  EXPECT_EQ(Regex("a*").find_last("aab"), (Groups{""}));
  EXPECT_EQ(Regex("x?(é)?").find_last("aéa"), (Groups{"", ""}));
  EXPECT_EQ(Regex("").find_last("abc"), (Groups{""}));
  EXPECT_EQ(Regex("b*$").find_last("abb"), (Groups{""}));
}

TEST(Regex, CountsCharactersNotBytes) {
  EXPECT_TRUE(Regex(".").full_match("😀"));
  EXPECT_TRUE(Regex("[é€]{2}").full_match("€é"));
  EXPECT_EQ(Regex("(.)$").find_last("a€"), (Groups{"€", "€"}));
}

TEST(Regex, InvalidUtf8DoesNotMatch) {
  EXPECT_FALSE(Regex(".*").full_match("a\xff"));
  EXPECT_EQ(Regex("a").find_last("a\xc3"), std::nullopt);
}

TEST(Regex, BadPatternsNameTheError) {
  EXPECT_THROW_WITH(Regex("a(b"), InputError, "regular expression 'a(b': ");
  EXPECT_THROW_WITH(Regex("a(b"), InputError, "at byte 3");
  EXPECT_THROW_WITH(Regex("[z-a]"), InputError, "at byte 3");
  EXPECT_THROW_WITH(Regex("\\C"), InputError, "regular expression");
  EXPECT_THROW_WITH(Regex("\xff"), InputError, "UTF-8");
}

TEST(Regex, Moves) {
  Regex a("x"), b("y");
  a = std::move(b);
  EXPECT_TRUE(a.full_match("y"));
  const Regex c(std::move(a));
  EXPECT_TRUE(c.full_match("y"));
}

TEST(Regex, HostileTextsEndSoonWithoutAMatch) {
  const std::string many_a(100000, 'a'), spaces(1000000, ' ');
  std::string pairs;
  for (int i = 0; i < 50000; ++i) pairs += "ab ";
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(Regex("(a*)*b").find_last(many_a), std::nullopt);           // exponential
  EXPECT_FALSE(Regex("(a|aa)+$").full_match(many_a + "b"));             // exponential
  EXPECT_EQ(Regex("\\s++[yz]").find_last(spaces + "x"), std::nullopt);  // quadratic scan
  EXPECT_EQ(Regex("(\\w+)=").find_last(many_a), std::nullopt);          // quadratic backtracking
  EXPECT_EQ(Regex("(\\w+\\s)+=").find_last(pairs), std::nullopt);       // deep recursion
  EXPECT_EQ(Regex("(?:.|\\n)*?=").find_last(pairs), std::nullopt);      // quadratic, lazy
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  // Unbounded, each takes from minutes to the age of the universe; sanitizers slow down the rest.
  EXPECT_LT(seconds.count(), 30);
}

TEST(Regex, ALimitAfterTheFirstMatchHidesTheLast) {
  const std::string text = "x" + std::string(1000, 'a');
  const Regex regex("x|(a*)*b");
  EXPECT_EQ(regex.find_last("x"), (Groups{"x", ""}));
  EXPECT_EQ(regex.find_last(text), std::nullopt);
}

TEST(Regex, LongHonestTextsMatch) {
  const std::string thought(1 << 20, 'x');
  const std::string text = "<think>" + thought + "</think>\\boxed{1} and \\boxed{42}.";
  EXPECT_TRUE(Regex("(?s)<think>.*?</think>.*").full_match(text));
  EXPECT_EQ(Regex("\\\\boxed\\{([^}]*)\\}").find_last(text), (Groups{"\\boxed{42}", "42"}));
  std::string numbers;
  for (int i = 0; i < 100000; ++i) numbers += std::to_string(i) + " ";
  EXPECT_EQ(Regex("-?\\d+").find_last(numbers), (Groups{"99999"}));
}

}  // namespace
}  // namespace cohort
