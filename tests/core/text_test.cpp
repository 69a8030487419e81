// Tests of escapes, of suggestions for mistyped names and of the text of numbers.
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
  // One letter may differ in a word of up to four.
  const std::vector<std::string> losses = {"grpo", "dapo", "dr_grpo"};
  EXPECT_EQ(did_you_mean("ppo", losses), "");
  EXPECT_EQ(did_you_mean("rloo", losses), "");
  EXPECT_EQ(did_you_mean("gpro", losses), "; did you mean 'grpo'?");
  EXPECT_EQ(did_you_mean("steps_", names), "; did you mean 'steps'?");
  EXPECT_EQ(did_you_mean("grp", losses), "; did you mean 'grpo'?");
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

TEST(Text, EscapesWhatControlsATerminalOrHidesText) {
  for (const auto& [text, shown] : std::vector<std::pair<std::string, std::string>>{
           {"\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"},
           {"line\n\ttab\r", "line\n\ttab\\x0d"},
           {std::string("nul\0", 4), "nul\\x00"},
           {"\x7f\x08", "\\x7f\\x08"},
           {"\xc2\x9b"
            "31m",
            "\\u009b31m"},  // C1 as UTF-8
           {"\x9b"
            "31m",
            "\\x9b31m"},                                               // and as a byte
           {"\xc0\x9b \xe2\x80 \xf5", "\\xc0\\x9b \\xe2\\x80 \\xf5"},  // not UTF-8
           {"\xe2\x80\xae"
            "gpj.exe",
            "\\u202egpj.exe"},  // right-to-left override
           {"\xe2\x81\xa6\xe2\x80\x8b\xef\xbb\xbf", "\\u2066\\u200b\\ufeff"},
           {"\xe2\x80\xa8\xc2\xad", "\\u2028\\u00ad"},
           {"\xf3\xa0\x81\x81", "\\U000e0041"}})  // a tag
    EXPECT_EQ(escape_controls(text), shown);
}

TEST(Text, EscapesKeepTextOfAllScriptsAndEmoji) {
  for (const std::string text :
       {"", "plain \\x1b 'text'\n", "\u00e9 \u65e5\u672c \u0645\u0631\u062d\u0628\u0627",
        "\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  // a non-joiner
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f", "\ufffd"})
    EXPECT_EQ(escape_controls(text), text);
}

TEST(Text, OmitsTheMiddleBetweenCharacters) {
  const std::string begin(3999, 'a'), end(1999, 'z'), wide = "\u65e5";
  EXPECT_TRUE(omit_middle(begin + end) == begin + end);
  const std::string shown = omit_middle(begin + wide + std::string(1 << 20, 'm') + wide + end);
  EXPECT_TRUE(shown == begin + wide + " [... 1048579 bytes ...] " + end) << shown.size();
  EXPECT_LT(omit_middle(std::string(1 << 20, '\x80')).size(), 6100u);
}

}  // namespace
}  // namespace cohort::test
