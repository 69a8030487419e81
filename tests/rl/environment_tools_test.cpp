// The environment `tools`: what calls get as answers, the ranking of the search, its configuration.
#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "rl/environments/environments.h"
#include "rl/environments/search.h"
#include "tests/support/chat_tokenizer.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using test::TempDir;
using test::write_file;

// An environment of plain text with bytes as tokens, and a dialogue to submit turns of.
class Dialogue {
 public:
  explicit Dialogue(EnvironmentConfig config, ToolFormat format = ToolFormat::kHermes,
                    std::unique_ptr<Tokenizer> tokenizer = make_byte_tokenizer())
      : tokenizer_(std::move(tokenizer)) {
    config.name = "tools";
    config.tool_format = format;
    environment_ = make_environment(config, {*tokenizer_, {}});
  }
  Environment& environment() { return *environment_; }

  // The reply to a turn that ends by itself or, in the format inline, by ">>".
  EnvironmentReply reply(const std::string& turn, int64_t index = 0,
                         const std::string& prompt = "7=") {
    submit(turn, index, prompt);
    std::vector<EnvironmentReply> replies = environment_->poll(true);
    EXPECT_EQ(replies.size(), 1u);
    return replies.at(0);
  }
  void submit(const std::string& turn, int64_t index, const std::string& prompt = "7=") {
    Trajectory trajectory{.index = index};
    for (const int32_t token : tokenizer_->encode(prompt)) trajectory.append_observed(token);
    for (const int32_t token : tokenizer_->encode(turn)) trajectory.append_sampled(token, -1);
    trajectory.stop_reason =
        turn.ends_with(">>") ? StopReason::kStopString : StopReason::kStopToken;
    if (!turn.ends_with(">>")) trajectory.append_sampled(tokenizer_->eos_id(), -1);
    environment_->submit({}, trajectory, 0);
  }
  std::string text(const EnvironmentReply& reply) { return tokenizer_->decode(reply.tokens); }
  // The observation of a call of the calculator.
  std::string calculated(const std::string& expression) {
    return text(reply("<<" + expression + ">>"));
  }

 private:
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Environment> environment_;
};

std::string call_text(const std::string& name, const Json& arguments) {
  const Json call = Json().set("name", name).set("arguments", arguments);
  return "<tool_call>\n" + call.dump() + "\n</tool_call>";
}

TEST(ToolsEnvironment, ATurnWithoutACallEndsTheDialogue) {
  Dialogue dialogue({.tools = {"calculator"}});
  const EnvironmentReply reply = dialogue.reply("The answer is 42.", 7);
  EXPECT_EQ(reply.index, 7);
  EXPECT_TRUE(reply.done);
  EXPECT_TRUE(reply.error.empty());
  EXPECT_TRUE(reply.tokens.empty());
  EXPECT_TRUE(reply.messages.is_null());
  EXPECT_TRUE(std::isnan(reply.reward));
}

TEST(ToolsEnvironment, EachCallIsAnsweredByAMessage) {
  Dialogue dialogue({.tools = {"calculator"}});
  const auto call = [](const char* expression) {
    return call_text("calculator", Json().set("expression", expression));
  };
  const EnvironmentReply reply = dialogue.reply("So:" + call("37+58") + "\n" + call("1/0"));
  EXPECT_FALSE(reply.done);
  EXPECT_EQ(reply.messages.dump(),
            "[{\"role\":\"tool\",\"content\":\"95\",\"name\":\"calculator\"},"
            "{\"role\":\"tool\",\"content\":\"error: '1/0' is no expression with a value\","
            "\"name\":\"calculator\"}]");
  EXPECT_EQ(dialogue.text(reply), "95error: '1/0' is no expression with a value");
}

// Thinking is opened by the turn, or by the end of the prompt.
TEST(ToolsEnvironment, CallsInThinkingAreNotAnswered) {
  Dialogue dialogue({.tools = {"calculator"}});
  const std::string draft = call_text("calculator", Json().set("expression", "1+1")),
                    call = call_text("calculator", Json().set("expression", "2+2"));
  EXPECT_TRUE(dialogue.reply("<think>" + draft + "</think>It is 2.").done);
  EXPECT_EQ(dialogue.text(dialogue.reply("<think>" + draft + "</think>" + call)), "4");
  for (const char* prompt : {"1+1?<think>", "1+1?\n<think>\n", "1+1?\n[THINK] \n\n"}) {
    const std::string close =
        std::string(prompt).find("[") == std::string::npos ? "</think>" : "[/THINK]";
    EXPECT_TRUE(dialogue.reply(draft, 0, prompt).done);  // is not closed
    EXPECT_TRUE(dialogue.reply("so " + draft + close + " It is 2.", 0, prompt).done);
    EXPECT_EQ(dialogue.text(dialogue.reply(draft + close + call, 0, prompt)), "4");
  }
  for (const char* prompt : {"<think>\n\n</think>\n\n", "<think> is a tag"})
    EXPECT_EQ(dialogue.text(dialogue.reply(call, 0, prompt)), "4") << prompt;
  EXPECT_TRUE(dialogue.reply("No <tool_call> is needed: 2.").done);
}

// Prompts, turns and answers together are the template's text of the whole conversation, with and
// without thinking.
TEST(ToolsEnvironmentData, DialoguesOfQwen35HaveTheTokensOfTheirTemplate) {
  COHORT_REQUIRE_DATA(dir);
  const auto tokenizer = test::make_chat_tokenizer(
      test::real_template(dir, "Qwen3.5-4B"), "<|im_end|>",
      parse_json(R"({"start": "<|im_start|>", "think": "<think>", "thought": "</think>", "call":
                     "<tool_call>", "called": "</tool_call>"})",
                 "variables"));
  EnvironmentConfig config;
  config.name = "tools";
  config.tools = {"calculator"};
  for (const bool thinks : {true, false}) {
    const ChatFormat format(
        *tokenizer,
        Json().set("tools", tools_environment_schemas(config)).set("enable_thinking", thinks));
    const auto environment = make_environment(config, {*tokenizer, format});
    Json::Array messages{make_message("user", "2+2=")};
    Trajectory trajectory;
    for (const int32_t token : tokenizer->encode(format.prompt(messages)))
      trajectory.append_observed(token);
    for (const auto& [said, expression, answer] :
         {std::tuple{"", "2+2", "4"},
          {"So.", "<b>1", "error: '<b>1' is no expression with a value"},
          {"Again.", "7*8", "56"}}) {
      const std::string thought = thinks ? "Not \"<tool_call>\"\n\n\xc3\xa9." : "";
      const std::string turn =
          str(thinks ? thought + "\n</think>\n\n" : "", said, *said != 0 ? "\n\n" : "",
              "<tool_call>\n<function=calculator>\n<parameter=expression>\n", expression,
              "\n</parameter>\n</function>\n</tool_call><|im_end|>");
      for (const int32_t token : tokenizer->encode(turn)) trajectory.append_sampled(token, -1);
      trajectory.stop_reason = StopReason::kStopToken;
      environment->submit({}, trajectory, 0);
      const EnvironmentReply reply = environment->poll(true).at(0);
      ASSERT_EQ(reply.error, "");
      ASSERT_FALSE(reply.done);
      for (const int32_t token : reply.tokens) trajectory.append_observed(token);
      const Json call =
          make_tool_call("", "calculator", Json().set("expression", std::string(expression)));
      messages.push_back(make_message("assistant", said)
                             .set("reasoning_content", thought)
                             .set("tool_calls", Json::Array{call}));
      messages.push_back(make_message("tool", answer));
    }
    EXPECT_EQ(trajectory.tokens, tokenizer->encode(format.prompt(messages)));
  }
  config.turns = PastTurns::kStrict;
  EXPECT_THROW_WITH(
      make_environment(config, {*tokenizer, ChatFormat(*tokenizer, Json())}), InputError,
      "environment.turns: strict: the chat template renders a turn otherwise once a message of the "
      "role user follows; hint: turns: as_sampled");
}

TEST(ToolsEnvironment, InLlama3OnlyObjectsThatNameAToolAreCalls) {
  Dialogue dialogue({.tools = {"calculator"}}, ToolFormat::kLlama3);
  EXPECT_EQ(
      dialogue.text(dialogue.reply(
          R"({"type": "function", "name": "calculator", "parameters": {"expression": "2+2"}})")),
      "4");
  EXPECT_TRUE(dialogue.reply(R"({"name": "Ada", "parameters": {"born": 1815}})").done);
  EXPECT_TRUE(dialogue.reply(R"({"name": "calculator"})").done);
}

TEST(ToolsEnvironment, RepliesAreReadyInOrderUntilTheyAreTakenOrCancelled) {
  Dialogue dialogue({.tools = {"calculator"}}, ToolFormat::kInline);
  for (const int64_t index : {5, 3}) dialogue.submit("<<1+1>>", index);
  const std::vector<EnvironmentReply> replies = dialogue.environment().poll(false);
  ASSERT_EQ(replies.size(), 2u);
  EXPECT_EQ(replies[0].index, 5);
  EXPECT_EQ(replies[1].index, 3);
  dialogue.submit("<<1+1>>", 1);
  dialogue.environment().cancel_all();
  EXPECT_TRUE(dialogue.environment().poll(true).empty());
}

TEST(ToolsEnvironment, WrongCallsGetAnErrorAsTheirAnswer) {
  Dialogue dialogue({.tools = {"calculator"}});
  const std::map<std::string, std::string> answers = {
      {call_text("calculater", Json().set("expression", "1")),
       "error: unknown tool 'calculater'; known: calculator"},
      {call_text("search", Json().set("query", "1")),  // it exists, but is not configured
       "error: unknown tool 'search'; known: calculator"},
      {call_text("calculator", Json::Object{}),
       "error: calculator: no argument 'expression'; it takes {\"expression\": text}"},
      {call_text("calculator", Json().set("expression", 1)),
       "error: calculator: 'expression' is no text; it takes {\"expression\": text}"},
      {call_text("calculator", Json().set("expression", "1").set("digits", 3)),
       "error: calculator: unknown argument 'digits'; it takes {\"expression\": text}"},
  };
  for (const auto& [turn, answer] : answers)
    EXPECT_EQ(dialogue.text(dialogue.reply(turn)), answer) << turn;
  EXPECT_TRUE(
      dialogue.text(dialogue.reply("<tool_call>{\"name\":</tool_call>")).starts_with("error: "));
}

TEST(ToolsEnvironment, InlineCallsEndATurnAndTheirResultIsPlainText) {
  Dialogue dialogue({.tools = {"calculator"}}, ToolFormat::kInline);
  EXPECT_EQ(dialogue.environment().stop_strings(), std::vector<std::string>{">>"});
  EXPECT_EQ(Dialogue({.tools = {"calculator"}}).environment().stop_strings().size(), 0u);
  const EnvironmentReply reply = dialogue.reply("\n<<(37+58)*41>>");
  EXPECT_FALSE(reply.done);
  EXPECT_EQ(dialogue.text(reply), "3895");
  EXPECT_EQ(reply.messages.dump(),
            "[{\"role\":\"tool\",\"content\":\"3895\",\"name\":\"calculator\"}]");
  EXPECT_TRUE(dialogue.reply("3895").done);
}

TEST(ToolsEnvironment, InlineCallsWhoseAnswerHasNoTokensEndTheDialogue) {
  const auto digits = [] { return make_char_tokenizer("0123456789+=<>"); };
  Dialogue dialogue({.tools = {"calculator"}}, ToolFormat::kInline, digits());
  EXPECT_EQ(dialogue.calculated("1+1"), "2");
  const EnvironmentReply reply = dialogue.reply("<<1+>>", 4);  // "error" has no tokens
  EXPECT_EQ(reply.index, 4);
  EXPECT_TRUE(reply.done);
  EXPECT_TRUE(reply.error.empty());
  EXPECT_TRUE(reply.messages.is_null());
  EXPECT_THROW_WITH(
      Dialogue({.tools = {"calculator"}}, ToolFormat::kInline, make_char_tokenizer("01+=<>")),
      InputError, "'2'");
}

TEST(ToolsEnvironment, TextWithoutTokensIsAFailureOfOtherFormats) {
  const std::string call = call_text("calculator", Json().set("expression", "1+"));
  Dialogue dialogue({.tools = {"calculator"}}, ToolFormat::kHermes,
                    make_char_tokenizer(call + "7="));  // no apostrophe
  EXPECT_FALSE(dialogue.reply(call).error.empty());
}

TEST(Calculator, ResultsAreExactDecimalsOrTenDigits) {
  Dialogue dialogue({.tools = {"calculator"}}, ToolFormat::kInline);
  const std::map<std::string, std::string> results = {
      {"0", "0"},
      {"3-5", "-2"},
      {"-47*41", "-1927"},
      {"10^30", "1000000000000000000000000000000"},
      {"1/8", "0.125"},
      {"-1/8", "-0.125"},
      {"2+3/50", "2.06"},
      {"1/4096", "0.000244140625"},   // 12 digits
      {"1/8192", "0.0001220703125"},  // 13 digits, of which 10 are significant
      {"1/3", "0.3333333333"},
      {"-2/3", "-0.6666666667"},
      {"200/3", "66.66666667"},
      {"sqrt(2)", "1.414213562"},
      {"1/0", "error: '1/0' is no expression with a value"},
      {"two", "error: 'two' is no expression with a value"},
      {"", "error: '' is no expression with a value"},
  };
  for (const auto& [expression, result] : results)
    EXPECT_EQ(dialogue.calculated(expression), result) << expression;
  EXPECT_TRUE(dialogue.calculated("1" + std::string(2000, '+')).starts_with("error: "));
}

TEST(Calculator, SaysWhereExactArithmeticEnds) {
  Dialogue dialogue({.tools = {"calculator"}}, ToolFormat::kInline);
  const std::string most = "340282366920938463463374607431768211455";  // 2^128 - 1
  EXPECT_EQ(dialogue.calculated("2^127*2-1-(2^127*1)+2^127"),
            "error: '2^127*2-1-(2^127*1)+2^127' "
            "is too large for exact arithmetic");
  EXPECT_EQ(dialogue.calculated("2^127+(2^127-1)"), most);
  EXPECT_EQ(dialogue.calculated("34!"), "295232799039604140847618609643520000000");
  EXPECT_EQ(dialogue.calculated("2^127/2^127"), "1");
  EXPECT_EQ(dialogue.calculated("2^-3"), "0.125");
  EXPECT_EQ(dialogue.calculated("4^0.5"), "2");  // a root
  std::string product = "2";
  for (int i = 0; i < 200; ++i) product += "*2";
  for (const std::string& expression :
       std::vector<std::string>{"2^128",
                                "2^127+2^127",
                                "10^39",
                                "10^400",
                                "10^4000000000",
                                "2^200/2^199",
                                "2^-200",
                                "35!",
                                "171!",
                                "1000000!",
                                "9^9^9",
                                "3!!!!",
                                product,
                                product + "*0",
                                "1/3^81",
                                "1/3^80+1/7^40",
                                "123456789012345678901234567890123456789*1",
                                "0." + std::string(39, '0') + "1",
                                "sqrt(2)^9999",
                                "2*(1+2^128)",
                                "-2^128",
                                "1" + std::string(1100, '0'),
                                "1" + std::string(600, '+') + "1",
                                std::string(70, '(') + "1" + std::string(70, ')')})
    EXPECT_TRUE(dialogue.calculated(expression).ends_with(" is too large for exact arithmetic"))
        << expression << ": " << dialogue.calculated(expression);
  for (const char* expression : {"2+2=4", "x=1", "2+2=", "=4", "1=1=1", "1==1", "2^200=1", " = "})
    EXPECT_EQ(dialogue.calculated(expression),
              str("error: '", expression, "' is an equation, not an expression"));
  for (const char* expression : {"0^-1", "1/0", "1/(1-1)", "(-1)!", "0.5!", "2^128+x", "1/0+2^128"})
    EXPECT_TRUE(dialogue.calculated(expression).starts_with("error: ")) << expression;
}

// The results in worked solutions are those of the calculator.
TEST(Calculator, AgreesWithTheSolutionsOfTheTaskArithmetic) {
  Dialogue dialogue({.tools = {"calculator"}}, ToolFormat::kInline,
                    make_char_tokenizer(find_task("arithmetic").alphabet));
  const auto set = make_task_set(find_task("arithmetic"), {1, 8}, Split::kTrain, 1, 0);
  for (int64_t i = 0; i < 200; ++i) {
    const Example example = set->get(i);
    std::string turn;
    for (size_t at = 0; at < example.solution.size(); ++at) {
      turn += example.solution[at];
      if (!turn.ends_with(">>")) continue;
      const std::string result = dialogue.text(dialogue.reply(turn));
      ASSERT_EQ(example.solution.substr(at + 1, result.size() + 1), result + "\n")
          << example.solution;
      at += result.size();
      turn.clear();
    }
    const EnvironmentReply end = dialogue.reply(turn);
    EXPECT_TRUE(end.done);
    EXPECT_EQ(turn, "\n" + example.answer);
    EXPECT_EQ(find_task("arithmetic").check(example, turn), 1);
  }
}

// A corpus of a folder, which disappears with it.
struct Corpus {
  explicit Corpus(const std::vector<std::string>& texts, const std::string& field = "text") {
    std::string lines;
    for (const std::string& text : texts) lines += Json().set(field, text).dump() + "\n";
    write_file(path, lines);
  }
  TempDir dir;
  std::string path = dir.path("corpus.jsonl");
};

using Texts = std::vector<std::string>;

TEST(TextSearch, RanksByBm25AndThenByTheOrderOfTheFile) {
  const Texts texts = {"The cat sat on the mat, and the mat was flat.", "A dog!", "dog and cat",
                       "a dog.", "\xc3\x89t\xc3\xa9 42"};
  const Corpus corpus(texts);
  const TextSearch search(corpus.path, "text");
  EXPECT_EQ(search.find("DOG", 10), (Texts{texts[1], texts[3], texts[2]}));
  EXPECT_EQ(search.find("cat", 10), (Texts{texts[2], texts[0]}));
  EXPECT_EQ(search.find("dog cat zebra", 2), (Texts{texts[2], texts[1]}));
  EXPECT_EQ(search.find("\xc3\xa9t\xc3\x89", 10), Texts{texts[4]});
  EXPECT_EQ(search.find("42?", 10), Texts{texts[4]});
  EXPECT_EQ(search.find("zebra", 10), Texts{});
  EXPECT_EQ(search.find("?!", 10), Texts{});
}

// Against the formula, evaluated document by document.
TEST(TextSearch, HasTheScoresOfTheFormula) {
  constexpr int kDocuments = 60;
  Rng rng(1, 1);
  Texts texts;
  std::vector<std::vector<int64_t>> words(kDocuments);
  double total = 0;
  for (std::vector<int64_t>& document : words) {
    std::string text;
    for (int64_t left = rng.between(1, 30); left > 0; --left) {
      document.push_back(std::min(rng.below(12), rng.below(12)));
      text += str("w", document.back(), " ");
    }
    texts.push_back(text);
    total += static_cast<double>(document.size());
  }
  const Corpus corpus(texts);
  const TextSearch search(corpus.path, "text");
  for (int64_t a = 0; a < 12; ++a) {
    const int64_t b = (a + 5) % 12;
    std::vector<std::pair<double, int>> expected;
    for (int i = 0; i < kDocuments; ++i) {
      double score = 0;
      for (const int64_t word : {a, b}) {
        const auto count = [&](const std::vector<int64_t>& document) {
          return static_cast<double>(std::count(document.begin(), document.end(), word));
        };
        const auto having = static_cast<double>(
            std::count_if(words.begin(), words.end(), [&](const auto& d) { return count(d) > 0; }));
        const double f = count(words[static_cast<size_t>(i)]);
        const auto length = static_cast<double>(words[static_cast<size_t>(i)].size());
        score += std::log(1 + (kDocuments - having + 0.5) / (having + 0.5)) * f * 2.2 /
                 (f + 1.2 * (0.25 + 0.75 * length * kDocuments / total));
      }
      if (score > 0) expected.emplace_back(-score, i);
    }
    // Scores of the two words in another order may differ by rounding, which makes no near ties
    // here.
    std::sort(expected.begin(), expected.end());
    const Texts found = search.find(str("w", a, " w", b, " w", a), kDocuments);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_EQ(found[i], texts[static_cast<size_t>(expected[i].second)]) << a << " " << i;
  }
}

TEST(TextSearch, ErrorsNameFileAndLine) {
  const TempDir dir;
  const std::string path = dir.path("c.jsonl");
  write_file(path, "{\"text\": \"a\"}\n{\"txt\": \"b\"}\n");
  EXPECT_THROW_WITH(TextSearch(path, "text"), InputError,
                    str("environment.corpus: ", path, ":2: no field 'text'"));
  write_file(path, "{\"text\": \"a\"}\n\n{\"text\": \n");
  EXPECT_THROW_WITH(TextSearch(path, "text"), InputError, str(path, ":3: not valid JSON"));
  EXPECT_THROW_WITH(TextSearch(dir.path("none.jsonl"), "text"), InputError, "none.jsonl");
}

TEST(Search, ResultsAreNumberedAndCutBetweenCharacters) {
  std::string longest = "fox ";
  while (longest.size() < 999) longest += 'x';
  const Corpus corpus({"fox", longest + "\xc3\xa9!", "hen"}, "body");
  Dialogue dialogue({.tools = {"search", "calculator"},
                     .corpus = corpus.path,
                     .corpus_field = "body",
                     .search_results = 5});
  const auto found = [&](const char* query) {
    return dialogue.text(dialogue.reply(call_text("search", Json().set("query", query))));
  };
  EXPECT_EQ(found("Fox"), "1. fox\n2. " + longest);
  EXPECT_EQ(found("zebra"), "error: no document matches");
  EXPECT_EQ(
      dialogue.text(dialogue.reply(call_text("calculator", Json().set("expression", "2^10")))),
      "1024");
}

TEST(ToolsEnvironment, PythonRunsProgramsInTheSandbox) {
  EnvironmentConfig config{.tools = {"python", "calculator"}};
  config.program.workers = 2;
  config.program.timeout = 1;
  Dialogue dialogue(config);
  const auto code = [](const std::string& text) {
    return call_text("python", Json().set("code", text));
  };
  const auto output = [&](const std::string& text) {
    return dialogue.text(dialogue.reply(code(text)));
  };
  EXPECT_EQ(output("print(6 * 7)"), "42\n");
  EXPECT_EQ(output("x = 1"), "");
  EXPECT_NE(output("print('so far')\n1 / 0").find("ZeroDivisionError"), std::string::npos);
  EXPECT_NE(output("while True: pass").find("error: "), std::string::npos);
  EXPECT_NE(output("open('/etc/passwd')").find("Error"), std::string::npos);
  EXPECT_LE(output("print('x' * 100000)").size(), 4096u);
  // Results come in the order of the calls, whichever of them is the first to be known.
  EXPECT_EQ(dialogue.text(dialogue.reply(code("import time; time.sleep(0.3); print(1)") +
                                         code("print(2)") +
                                         call_text("calculator", Json().set("expression", "1+2")))),
            "1\n2\n3");
  // Another dialogue is answered meanwhile.
  dialogue.submit(code("import time; time.sleep(0.6); print('late')"), 0);
  dialogue.submit(code("print('early')"), 1);
  for (const int64_t index : {1, 0}) {
    const std::vector<EnvironmentReply> replies = dialogue.environment().poll(true);
    ASSERT_EQ(replies.size(), 1u);
    EXPECT_EQ(replies[0].index, index);
    EXPECT_EQ(dialogue.text(replies[0]), index == 0 ? "late\n" : "early\n");
  }
  dialogue.submit(code("print(1)"), 0);
  dialogue.environment().cancel_all();
  EXPECT_EQ(output("print(2)"), "2\n");
}

TEST(ToolsEnvironment, SchemasDescribeTheToolsInTheOrderOfTheConfiguration) {
  const EnvironmentConfig config{
      .name = "tools", .tools = {"search", "calculator"}, .corpus = "c.jsonl"};
  const Json schemas = tool_schemas(config);
  ASSERT_EQ(schemas.as_array().size(), 2u);
  for (const size_t i : {0u, 1u}) {
    const Json& schema = schemas.as_array()[i];
    EXPECT_EQ(schema.at("type").as_string(), "function");
    const Json& function = schema.at("function");
    EXPECT_EQ(function.at("name").as_string(), config.tools[i]);
    EXPECT_FALSE(function.at("description").as_string().empty());
    const Json& parameters = function.at("parameters");
    EXPECT_EQ(parameters.at("type").as_string(), "object");
    const std::string argument = i == 0 ? "query" : "expression";
    EXPECT_EQ(parameters.at("properties").at(argument).at("type").as_string(), "string");
    EXPECT_EQ(parameters.at("required").dump(), "[\"" + argument + "\"]");
  }
}

TEST(ToolsEnvironment, ConfigurationsThatDoNotFitAreErrors) {
  const auto check = [](EnvironmentConfig config, const char* message) {
    config.name = "tools";
    EXPECT_THROW_WITH(config.validate(), InputError, message);
  };
  check({}, "environment.tools: is empty; hint: known: calculator, python, search");
  check({.tools = {"calculater"}},
        "environment.tools: unknown tool 'calculater'; known: calculator, python, search; did you "
        "mean "
        "'calculator'?");
  check({.tools = {"calculator", "calculator"}}, "environment.tools: 'calculator' is there twice");
  check({.tools = {"search"}}, "environment.corpus: the tool search needs it");
  check({.tools = {"calculator"}, .corpus = "c.jsonl"}, "environment.corpus: only the tool search");
  check({.tool_format = ToolFormat::kInline, .tools = {"search"}, .corpus = "c.jsonl"},
        "environment.tools: tool_format: inline needs the calculator");
  check({.tool_format = ToolFormat::kInline, .tools = {"calculator", "python"}},
        "environment.tools: tool_format: inline cannot call python");
  check({.tools = {"calculator"}, .sandbox = "landlock"},
        "environment: sandbox, workers, timeout and memory: only the tool python takes them");
}

}  // namespace
}  // namespace cohort
