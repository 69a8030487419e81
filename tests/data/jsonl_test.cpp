// JSONL loading: templates, splits, and messages that name file and line.
#include <algorithm>
#include <filesystem>
#include <set>
#include <tuple>

#include "config/visitor.h"
#include "core/text.h"
#include "data/class_examples.h"
#include "data/example.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

class Jsonl : public testing::Test {
 protected:
  // Everything is in the training split by default.
  JsonlConfig config(const std::string& text) {
    test::write_file(dir_.path("set.jsonl"), text);
    return {.path = {dir_.path("set.jsonl")}, .held_out_fraction = 0};
  }
  std::unique_ptr<ExampleSet> load(const std::string& text) {
    return load_jsonl(config(text)).train;
  }
  test::TempDir dir_;
};

TEST_F(Jsonl, FillsTemplates) {
  JsonlConfig c = config(R"({"numbers": [3, 7, 25], "target": 46, "solution": "3*7+25"})");
  c.prompt = "{{{numbers}}} -> {target}\n";
  c.answer = "{target}";
  c.solution = "<{solution}>";
  const auto set = load_jsonl(c).train;
  ASSERT_EQ(set->size(), 1);
  const Example e = set->get(0);
  EXPECT_EQ(e.prompt, "{3, 7, 25} -> 46\n");
  EXPECT_EQ(e.answer, "46");
  EXPECT_EQ(e.solution, "<3*7+25>");
  EXPECT_EQ(e.fields.at("numbers").as_array()[1].as_int(), 7);
  EXPECT_EQ(e.fields.dump(), R"({"numbers":[3,7,25],"target":46,"solution":"3*7+25"})");
}

TEST_F(Jsonl, SolutionIsTheAnswerUnlessGiven) {
  EXPECT_EQ(load(R"({"prompt": "p", "answer": "a"})")->get(0).solution, "a");
}

TEST_F(Jsonl, AcceptsBlankLinesCarriageReturnsAndAByteOrderMark) {
  const auto set = load(
      "\xEF\xBB\xBF{\"prompt\": \"1\", \"answer\": \"a\"}\r\n\r\n  \n"
      "{\"prompt\": \"2\", \"answer\": \"b\"}");
  ASSERT_EQ(set->size(), 2);
  EXPECT_EQ(set->get(1).prompt, "2");
  EXPECT_EQ(set->get(1).answer, "b");
}

TEST_F(Jsonl, LimitCountsExamples) {
  JsonlConfig c = config("\n{\"prompt\": \"1\", \"answer\": \"\"}\n\nthis is not read");
  c.limit = 1;
  EXPECT_EQ(load_jsonl(c).train->size(), 1);
}

TEST_F(Jsonl, ErrorsNameFileAndLine) {
  const std::string good = "{\"prompt\": \"1\", \"answer\": \"a\"}\n";
  EXPECT_THROW_WITH(load(good + "\n{\"prompt\": "), InputError, "set.jsonl:3: not valid JSON: ");
  EXPECT_THROW_WITH(load(good + "[1]"), InputError, "set.jsonl:2: expected an object");
  EXPECT_THROW_WITH(load(good + good + "{\"promt\": \"1\", \"answer\": \"a\"}"), InputError,
                    "set.jsonl:3: no field 'prompt', which the prompt template needs; "
                    "did you mean 'promt'?");
  EXPECT_THROW_WITH(load("{\"prompt\": \"1\", \"gold\": 1, \"x\": 2}"), InputError,
                    "set.jsonl:1: no field 'answer', which the answer template needs; "
                    "fields here: prompt, gold, x");
  EXPECT_THROW_WITH(load(good + "{\"prompt\": \"\xff\"}"), InputError, "set.jsonl:2: ");
}

TEST_F(Jsonl, FieldsOfOtherFormatsSayHowTheyAreRead) {
  EXPECT_THROW_WITH(load(R"({"instruction": "i", "input": "x", "output": "o"})"), InputError,
                    "fields here: instruction, input, output; hint: the fields are Alpaca's: "
                    "jsonl: {prompt: \"{instruction}\\n{input}\", answer: \"{output}\"}");
  EXPECT_THROW_WITH(load(R"({"instruction": "i", "output": "o"})"), InputError,
                    "jsonl: {prompt: \"{instruction}\", answer: \"{output}\"}");
  EXPECT_THROW_WITH(load(R"({"prompt": "p", "chosen": "a", "rejected": "b"})"), InputError,
                    "data.jsonl.answer='{chosen}'");
  const std::string turns =
      R"({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]})";
  const char* hint = "human is user, gpt is assistant";
  EXPECT_THROW_WITH(load(turns), InputError, hint);
  EXPECT_THROW_WITH(load(turns), InputError, "'conversations' has the turns of ShareGPT; hint: ");
  JsonlConfig c = config(turns);
  c.messages = "conversations";
  EXPECT_THROW_WITH(load_jsonl(c), InputError, "conversations: message 1: expected messages like");
  EXPECT_THROW_WITH(load_jsonl(c), InputError, hint);
  c.messages = "messages";
  EXPECT_THROW_WITH(load_jsonl(c), InputError, hint);
}

TEST_F(Jsonl, FilesOfOtherFormatsAreNamedWithAWayToConvert) {
  const auto refused = [&](const std::string& text, const std::string& error) {
    EXPECT_THROW_WITH(load(text), InputError, "set.jsonl: is " + error);
    EXPECT_THROW_WITH(load(text), InputError, "; hint: ");
  };
  for (const char* array : {"[{\"prompt\": 1}]", "[\n{\"prompt\": 1}\n]", "\xEF\xBB\xBF[\n]"})
    refused(array, "a JSON array, not one JSON object per line; hint: jq -c '.[]' ");
  refused("{\n  \"prompt\": 1\n}\n", "JSON with a value on several lines");
  refused(std::string("PAR1\x15\0", 6), "a Parquet file");
  refused("\x1f\x8b\x08", "compressed by gzip");
  refused("ARROW1", "an Arrow file");
  JsonlConfig csv{.path = {dir_.path("set.csv")}, .held_out_fraction = 0};
  test::write_file(csv.path[0], "prompt,answer\n1,2\n");
  EXPECT_THROW_WITH(load_jsonl(csv), InputError, "set.csv: is a CSV file");
  EXPECT_THROW_WITH(load_jsonl(csv), InputError, "pandas.read_csv('" + csv.path[0] + "')");
  test::write_file(csv.path[0], R"({"prompt": "p", "answer": "a"})");
  EXPECT_EQ(load_jsonl(csv).train->size(), 1);
}

TEST_F(Jsonl, ANullAnswerIsNone) {
  const auto read = [&](const std::string& line) { return load(line)->get(0); };
  for (const char* none : {"null", "[]", "[null]", "[null, null]"}) {
    const Example e = read(str("{\"prompt\": \"p\", \"answer\": ", none, "}"));
    EXPECT_EQ(e.prompt, "p");
    EXPECT_EQ(e.answer, "") << none;
    EXPECT_TRUE(e.solution.empty() && e.other_answers.empty()) << none;
  }
  JsonlConfig c = config(R"({"prompt": "p", "answer": null, "gold": null, "unit": "m"})");
  c.answer = "{gold} {unit}.";
  EXPECT_EQ(load_jsonl(c).train->get(0).answer, "");
  // The first field that the line has, and has not as null.
  c = config(R"({"prompt": "p", "answer": null, "gold": 7})");
  c.answer = "<{answer|gold}>";
  EXPECT_EQ(load_jsonl(c).train->get(0).answer, "<7>");
  c.answer = "<{gold|answer}>";
  EXPECT_EQ(load_jsonl(c).train->get(0).answer, "<7>");
}

TEST_F(Jsonl, TextsThatAreNullAreErrorsWithFileAndLine) {
  const std::string good = "{\"prompt\": \"1\", \"answer\": \"a\", \"more\": \"m\"}\n";
  EXPECT_THROW_WITH(load(good + R"({"prompt": null, "answer": "a"})"), InputError,
                    "set.jsonl:2: the field 'prompt' of the prompt template is null; hint: ");
  JsonlConfig c = config(good + R"({"prompt": "p", "answer": "a", "more": null})");
  c.prompt = "{prompt} {more}";
  EXPECT_THROW_WITH(load_jsonl(c), InputError, "set.jsonl:2: the field 'more' of the prompt");
  c.prompt = "{prompt}";
  c.solution = "{more} {answer}";
  EXPECT_THROW_WITH(load_jsonl(c), InputError, "set.jsonl:2: the field 'more' of the solution");
  // Answers are taught where there is no solution.
  for (const char* none : {"null", "[]", "[null]"}) {
    c = config(good + str("{\"prompt\": \"p\", \"answer\": ", none, "}"));
    EXPECT_EQ(load_jsonl(c).train->size(), 2);
    c.teaches = true;
    EXPECT_THROW_WITH(load_jsonl(c), InputError,
                      "set.jsonl:2: the answer, which is taught, is null");
  }
  c = config(R"({"prompt": [{"role": "user", "content": "q"}], "completion": [null]})");
  c.messages = "prompt";
  c.completion = "completion";
  EXPECT_THROW_WITH(load_jsonl(c), InputError, "set.jsonl:1: completion: expected a text or a ");
  // An empty answer is no error: it is a text.
  c = config(R"({"prompt": "p", "answer": ""})");
  c.teaches = true;
  EXPECT_EQ(load_jsonl(c).train->size(), 1);
}

TEST_F(Jsonl, EachItemOfAListIsARightAnswer) {
  const auto answers = [&](const std::string& value, const std::string& answer = "{answer}") {
    JsonlConfig c = config("{\"prompt\": \"p\", \"answer\": " + value + "}");
    c.answer = answer;
    const Example e = load_jsonl(c).train->get(0);
    EXPECT_EQ(e.solution, e.answer);
    return e.answer + "|" + join(e.other_answers, "|");
  };
  EXPECT_EQ(answers(R"(["4", "four", 4.0])"), "4|four|4.0");
  EXPECT_EQ(answers(R"(["4"])"), "4|");
  EXPECT_EQ(answers(R"([null, "4", null, "b, c"])"), "4|b, c");
  EXPECT_EQ(answers(R"([[1, 2], [3]])"), "1, 2|3");
  EXPECT_EQ(answers(R"(["4", "5"])", "#### {answer}"), "#### 4|#### 5");
  // Beside other fields a list is a part of the text.
  EXPECT_EQ(answers(R"([4, 5])", "{answer} {prompt}"), "4, 5 p|");
}

TEST_F(Jsonl, NumbersOfFieldsKeepTheirSpelling) {
  JsonlConfig c = config(
      R"({"q": [1.0, 1e5, {"x": 0.10}], "answer": 123456789012345678901234567890, "s": 2.50})");
  c.prompt = "{q}?";
  c.solution = "{s}";
  const Example e = load_jsonl(c).train->get(0);
  EXPECT_EQ(e.prompt, R"(1.0, 1e5, {"x":0.10}?)");
  EXPECT_EQ(e.answer, "123456789012345678901234567890");
  EXPECT_EQ(e.solution, "2.50");
  EXPECT_EQ(load(R"({"prompt": 1.0, "answer": [1e5, 1.50]})")->get(0).other_answers[0], "1.50");
}

TEST_F(Jsonl, MessagesLoseNullsAndTheirTextPartsAreJoined) {
  const auto read = [&](const std::string& messages) {
    JsonlConfig c = config("{\"messages\": " + messages + "}");
    c.messages = "messages";
    return load_jsonl(c).train->get(0).messages.dump();
  };
  const std::string part = R"({"type": "text", "text": "b"})";
  EXPECT_EQ(read(R"([{"role": "user", "content": [{"type": "text", "text": "a "}, )" + part +
                 R"(], "name": null}, {"role": "assistant", "content": "c", "tool_calls": null}])"),
            R"([{"role":"user","content":"a b"},{"role":"assistant","content":"c"}])");
  // Nulls inside of calls are arguments.
  const std::string calls = R"("tool_calls":[{"function":{"name":"f","arguments":{"x":null}}}])";
  EXPECT_EQ(read(R"([{"role": "assistant", "content": null, )" + calls + "}]"),
            R"([{"role":"assistant",)" + calls + "}]");
  EXPECT_EQ(read(R"([{"role": "user", "content": 1.50}])"),
            R"([{"role":"user","content":"1.50"}])");
  for (const char* result : {R"({"a":1})", "[1,2]", "[]", R"([{"a":1}])", "true"})
    EXPECT_EQ(read(str(R"([{"role":"tool","content":)", result, "}]")),
              str(R"([{"role":"tool","content":)", result, "}]"));
  EXPECT_EQ(read(R"([{"role": "tool", "content": [)" + part + "]}]"),
            R"([{"role":"tool","content":"b"}])");
  const auto refuse = [&](const std::string& message, const char* error) {
    EXPECT_THROW_WITH(read(R"([{"role": "user", "content": "q"}, )" + message + "]"), InputError,
                      str("set.jsonl:1: messages: message 2 ", error));
  };
  refuse(
      R"({"role": "user", "content": [)" + part + R"(, {"type": "image_url", "image_url": "u"}]})",
      "(user): content[1]: expected a part of the type text");
  refuse(R"({"role": "user", "content": [{"type": "text"}]})",
         "(user): content[0]: missing key 'text'");
  refuse(R"({"role": "user", "content": [{"type": "text", "text": null}]})",
         "(user): content[0].text: exp");
  refuse(R"({"role": "assistant", "content": ["x"]})",
         "(assistant): content[0]: expected an object");
  refuse(R"({"role": "user", "content": {"a": 1}})", "(user): content: expected a list");
  refuse(R"({"role": "tool", "content": [{"type": "image"}]})",
         "(tool): content[0]: expected a part");
  refuse(R"({"role": "user", "content": null})",
         "(user): content: expected a text, got null; hint: ");
  refuse(R"({"role": "user", "content": null, "id": 3})",
         "(user): content: expected a text, got null");
  refuse(R"({"role": "assistant", "content": null, "tool_calls": null})",
         "(assistant): content: expected a");
  refuse(R"({"role": "assistant", "content": null, "tool_calls": []})",
         "(assistant): content: expected a");
  refuse(R"({"role": "user", "name": "x"})", "(user): expected a text, got no content");
  refuse(R"({"role": "assistant"})", "(assistant): expected a text, got no content");
}

TEST_F(Jsonl, ErrorsOfFilesHaveANextStep) {
  EXPECT_THROW_WITH(load_jsonl({.path = {dir_.path("none.jsonl")}}), InputError,
                    "none.jsonl: cannot be opened: No such file or directory; hint: ");
  EXPECT_THROW_WITH(load(""), InputError, "set.jsonl: holds no example; hint: ");
  EXPECT_THROW_WITH(load("\n \n"), InputError, "holds no example");
  JsonlConfig c = config("{\"prompt\": \"1\", \"answer\": \"a\"}");
  c.held_out_fraction = 1e-9;
  EXPECT_THROW_WITH(load_jsonl(c), InputError,
                    "no example in the held-out split at data.held_out_fraction 1e-09, of 1; hint: "
                    "data.held_out_fraction=0 holds nothing out");
  c.held_out_fraction = 1 - 1e-9;
  EXPECT_THROW_WITH(load_jsonl(c), InputError, "no example in the training split");
}

TEST_F(Jsonl, FractionsOf0And1PutEverythingIntoOneSplit) {
  JsonlConfig c =
      config("{\"prompt\": \"1\", \"answer\": \"a\"}\n\n{\"prompt\": \"2\", \"answer\": \"b\"}\n");
  EXPECT_EQ(load_jsonl(c).train->size(), 2);
  EXPECT_EQ(load_jsonl(c).held_out->size(), 0);
  c.held_out_fraction = 1;
  EXPECT_EQ(load_jsonl(c).train->size(), 0);
  const auto held_out = load_jsonl(c).held_out;
  ASSERT_EQ(held_out->size(), 2);
  EXPECT_EQ(held_out->get(0).where, c.path[0] + ":1");
  EXPECT_EQ(held_out->get(1).where, c.path[0] + ":3");
}

TEST_F(Jsonl, ProblemsAreCountedUpToANumber) {
  JsonlConfig c = config("{}\n\n \t\n{}\n{}");
  EXPECT_TRUE(has_fewer_problems(c, 4));
  EXPECT_FALSE(has_fewer_problems(c, 3));
  c.path.push_back(c.path[0]);
  EXPECT_TRUE(has_fewer_problems(c, 7));
  EXPECT_FALSE(has_fewer_problems(c, 6));
  c.limit = 2;  // in each path
  EXPECT_TRUE(has_fewer_problems(c, 5));
  EXPECT_FALSE(has_fewer_problems(c, 4));
  c = {.path = {dir_.path("none.jsonl")}};
  EXPECT_FALSE(has_fewer_problems(c, 3));
}

TEST_F(Jsonl, AFileOfItsOwnIsHeldOutAsAWholeAndTheOtherIsForTraining) {
  std::string text;
  for (int i = 0; i < 49; ++i) text += str("{\"prompt\": \"", i, "\", \"answer\": \"a\"}\n");
  JsonlConfig c = config(text);
  c.held_out_fraction.reset();
  EXPECT_LT(load_jsonl(c).train->size(), 49);
  c.eval_path = {dir_.path("test.jsonl")};
  c.prompt = "{prompt}?";
  c.limit = 30;
  test::write_file(c.eval_path[0], text + "{\"prompt\": \"x\", \"answer\": \"y\"}\n");
  EXPECT_EQ(load_jsonl(c).train->size(), 30);
  const auto held_out = load_jsonl(c).held_out;
  ASSERT_EQ(held_out->size(), 50);
  EXPECT_EQ(held_out->get(49).prompt, "x?");
  test::write_file(c.eval_path[0], "{\"promt\": \"x\"}\n");
  EXPECT_THROW_WITH(load_jsonl(c), InputError, "test.jsonl:1: no field 'prompt'");
}

TEST_F(Jsonl, SeveralFilesFoldersAndPatternsCanBeRead) {
  std::filesystem::create_directory(dir_.path("more"));
  const auto line = [](const std::string& name, int i) {
    return str("{\"", name, "\": \"", i, "\", \"answer\": \"\"}\n");
  };
  test::write_file(dir_.path("more/b.jsonl"), line("question", 2) + line("question", 3));
  test::write_file(dir_.path("more/a.jsonl"), "\n" + line("problem", 1));
  JsonlConfig c = config(line("question", 0));
  c.prompt = "{question|problem}?";
  c.path = {c.path[0], dir_.path("more"), dir_.path("more/b*")};
  const JsonlSplits splits = load_jsonl(c);
  EXPECT_EQ(splits.source_sizes, (std::vector<int64_t>{1, 3, 2}));
  std::string prompts;
  for (int64_t i = 0; i < splits.train->size(); ++i) prompts += splits.train->get(i).prompt;
  EXPECT_EQ(prompts, "0?1?2?3?2?3?");
  EXPECT_EQ(splits.train->get(1).where, dir_.path("more/a.jsonl") + ":2");
  c.limit = 2;  // per entry
  EXPECT_EQ(load_jsonl(c).source_sizes, (std::vector<int64_t>{1, 2, 2}));
  test::write_file(dir_.path("more/c.jsonl"), line("text", 1));
  c.limit = 0;
  EXPECT_THROW_WITH(load_jsonl(c), InputError,
                    "c.jsonl:1: no field 'question|problem', which the prompt template needs");
}

TEST_F(Jsonl, LinesThatChangeWhileARunReadsThemAreAnError) {
  const std::string good = "{\"prompt\": \"1\", \"answer\": \"a\"}\n";
  const auto set = load(good + good);
  EXPECT_EQ(set->get(1).prompt, "1");
  test::write_file(dir_.path("set.jsonl"), good + "{\"prompt\": \"2\", \"answer\": \"a\"}\n");
  EXPECT_EQ(set->get(0).prompt, "1");
  EXPECT_THROW_WITH(set->get(1), InputError, "set.jsonl:2: has changed since the run read it");
  test::write_file(dir_.path("set.jsonl"), good);
  EXPECT_THROW_WITH(set->get(1), InputError, "set.jsonl: cannot be read: it has become shorter");
  test::write_file(dir_.path("set.jsonl"), good + good);
  EXPECT_EQ(set->get(1).prompt, "1");
}

TEST_F(Jsonl, LinesLongerThanABlockAreRead) {
  const std::string word(9'000'000, 'w');
  const auto line = [&](int i) { return str("{\"prompt\": \"", i, word, "\", \"answer\": \"\"}"); };
  const auto set = load(line(0) + "\n\n" + line(1) + "\n" + line(2));
  ASSERT_EQ(set->size(), 3);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(set->get(i).prompt, str(i, word));
  EXPECT_EQ(set->get(2).where, dir_.path("set.jsonl") + ":4");
}

TEST_F(Jsonl, BadTemplatesNameTheKey) {
  JsonlConfig c = config("{}");
  for (const char* text : {"{", "{a", "}", "a}b", "{}", "{a{b}", "{{a}", "{a}}"}) {
    c.prompt = text;
    EXPECT_THROW_WITH(load_jsonl(c), InputError, "prompt: '");
  }
}

TEST_F(Jsonl, DuplicatesOfAPromptNeverStraddleTheSplits) {
  std::string text;
  for (int i = 0; i < 3000; ++i)
    text += str("{\"prompt\": \"", i % 500, "\", \"answer\": \"", i, "\"}\n");
  JsonlConfig c = config(text);
  c.held_out_fraction = 0.2;
  const auto [train, held_out, sizes] = load_jsonl(c);
  EXPECT_EQ(train->size() + held_out->size(), 3000);
  std::set<std::string> prompts;
  for (int64_t i = 0; i < held_out->size(); ++i) prompts.insert(held_out->get(i).prompt);
  EXPECT_EQ(held_out->size(), static_cast<int64_t>(6 * prompts.size()));
  EXPECT_NEAR(static_cast<double>(prompts.size()), 100, 45);  // 5 standard deviations of 8.9
  for (int64_t i = 0; i < train->size(); ++i) ASSERT_FALSE(prompts.contains(train->get(i).prompt));
}

// True for each line that is held out.
std::vector<bool> held_out(const test::TempDir& dir, const JsonlConfig& base,
                           const std::string& lines) {
  JsonlConfig config = base;
  config.path = {dir.path("split.jsonl")};
  config.held_out_fraction = 0.5;
  test::write_file(config.path[0], lines);
  const JsonlSplits splits = load_jsonl(config);
  std::vector<bool> out(static_cast<size_t>(splits.train->size() + splits.held_out->size()));
  for (int64_t i = 0; i < splits.held_out->size(); ++i) {
    const std::string where = splits.held_out->get(i).where;
    out.at(std::stoul(where.substr(where.rfind(':') + 1)) - 1) = true;
  }
  return out;
}

std::string conversation(int question, int answer) {
  return str("{\"messages\": [{\"role\": \"user\", \"content\": \"", question,
             "?\"}, {\"role\": \"assistant\", \"content\": \"", answer, "\"}]}\n");
}

// A question must not be held out if its other answers are trained on.
TEST_F(Jsonl, ConversationsThatDifferInTheirLastAnswerAreOnOneSide) {
  std::string lines;
  for (int question = 0; question < 40; ++question)
    for (int answer = 0; answer < 3; ++answer) lines += conversation(question, answer);
  JsonlConfig config;
  config.messages = "messages";
  const std::vector<bool> held = held_out(dir_, config, lines);
  ASSERT_EQ(held.size(), 120u);
  for (size_t i = 0; i < 120; ++i) EXPECT_EQ(held[i], held[i / 3 * 3]) << i;
  EXPECT_NEAR(static_cast<double>(std::count(held.begin(), held.end(), true)), 60, 30);
}

TEST_F(Jsonl, TheFieldsOfSplitByDecideWhateverTheTemplates) {
  std::string lines;
  for (int i = 0; i < 60; ++i)
    lines += str("{\"id\": ", i, ", \"question\": \"", i, "+1\", \"answer\": \"x\"}\n");
  JsonlConfig one, other;
  one.prompt = "{question} = ";
  other.prompt = "Q{id}: {question}\nA: ";
  EXPECT_NE(held_out(dir_, one, lines), held_out(dir_, other, lines));
  one.split_by = other.split_by = {"problem|question"};
  EXPECT_EQ(held_out(dir_, one, lines), held_out(dir_, other, lines));
  other.split_by = {"question", "id"};
  EXPECT_NE(held_out(dir_, one, lines), held_out(dir_, other, lines));
  other.split_by = {"problem"};
  EXPECT_THROW_WITH(held_out(dir_, other, lines), InputError,
                    "split.jsonl:1: no field 'problem', which the data.split_by template needs");
}

// Permuted numbers are the same problem, both in prompts and in split_by fields.
TEST_F(Jsonl, ListsCountWithoutTheirOrder) {
  std::string lines;
  for (int i = 0; i < 40; ++i)
    for (const auto& [a, b, c] : {std::tuple(i, 7, 25), {25, i, 7}, {7, 25, i}})
      lines += str("{\"numbers\": [", a, ", ", b, ", ", c, "], \"target\": 9, \"n\": ", a, "}\n");
  JsonlConfig config;
  config.prompt = "{numbers} -> {target}\n";
  config.answer = "{target}";
  for (const auto& fields : {std::vector<std::string>{}, {"numbers", "target"}}) {
    config.split_by = fields;
    const std::vector<bool> held = held_out(dir_, config, lines);
    for (size_t i = 0; i < 120; ++i) EXPECT_EQ(held[i], held[i / 3 * 3]) << i;
  }
}

TEST_F(Jsonl, FieldsOfLabelledPairsAreFound) {
  for (const auto& [text, pair] : {std::pair{"sentence1", "sentence2"},
                                   {"premise", "hypothesis"},
                                   {"question1", "question2"},
                                   {"question", "sentence"},
                                   {"text", "text_pair"},
                                   {"text", ""},
                                   {"sentence", ""}}) {
    JsonlConfig c = config(
        str("{\"", text, "\": \"a\", \"", *pair == 0 ? "id" : pair, "\": \"b\", \"label\": 1}"));
    detect_format(c, LineKind::kLabels);
    EXPECT_EQ(c.prompt, str("{", text, "}"));
    EXPECT_EQ(c.pair, *pair == 0 ? "" : str("{", pair, "}")) << text;
    EXPECT_EQ(c.answer, "{label}");
  }
}

TEST_F(Jsonl, LabelsThatAreNumbersAreSpelledAsInTheFile) {
  std::string text;
  for (const char* label : {"1.50", "2", "1.5", "1e3"})
    text += str("{\"text\": \"a\", \"label\": ", label, "}\n");
  DataConfig data{.jsonl = config(text)};
  detect_format(data.jsonl, LineKind::kLabels);
  EXPECT_EQ(class_labels({.data = data, .batch = BatchConfig()}),
            (std::vector<std::string>{"1.5", "1.50", "1e3", "2"}));
}

// As `cohort classify` reads a text_pair that is empty.
TEST_F(Jsonl, AnEmptySecondTextIsOneOfAPair) {
  JsonlConfig c = config(R"({"a": "x", "b": "", "l": "no"})"), single = c;
  c.prompt = single.prompt = "{a}";
  c.answer = single.answer = "{l}";
  c.pair = "{b}";
  const auto tokenizer =
      make_tokenizer({{"vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nx\n"}}, "folder");
  const std::vector<std::string> labels{"no", "yes"};
  const ClassReader reader({*tokenizer, labels, 8, 0, 0, 2}, Augment::kNone, 0);
  const TokenSequence pair = reader.read(load_jsonl(c).train->get(0), -1, 0);
  EXPECT_EQ(pair.tokens, tokenizer->encode_texts("x", "").ids);
  EXPECT_EQ(pair.tokens.size(), 4u);
  EXPECT_EQ(reader.read(load_jsonl(single).train->get(0), -1, 0).tokens.size(), 3u);
}

TEST(JsonlConfig, ReadsItsKeys) {
  JsonlConfig config;
  read_config(config, parse_yaml("path: a.jsonl\nprompt: '{q}'\nlimit: 3\n", "c.yaml"));
  EXPECT_EQ(config.path, std::vector<std::string>{"a.jsonl"});
  EXPECT_EQ(config.prompt, "{q}");
  EXPECT_EQ(config.limit, 3);
  EXPECT_EQ(config.answer, "{answer}");
  EXPECT_THROW_WITH(read_config(config, parse_yaml("limit: -1", "c.yaml")), InputError,
                    "c.yaml:1: limit");
  TaskConfig task;
  EXPECT_THROW_WITH(read_config(task, parse_yaml("min_size: 0", "c.yaml")), InputError, "min_size");
}

TEST(JsonlReal, Gsm8kLoads) {
  COHORT_REQUIRE_DATA(dir);
  const JsonlConfig config{.path = {dir + "/gsm8k/test.jsonl"}, .prompt = "{question}\n"};
  const auto [train, held_out, sizes] = load_jsonl(config);
  EXPECT_EQ(train->size() + held_out->size(), 1319);
  EXPECT_NEAR(static_cast<double>(held_out->size()), 132, 55);  // 5 standard deviations of 10.9
  EXPECT_NE(train->get(0).answer.find("#### "), std::string::npos);
}

}  // namespace
}  // namespace cohort
