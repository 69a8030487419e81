// TRL's data formats through the commands, with a model made here that has a chat template.
#include <filesystem>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"
#include "tests/support/chat_tokenizer.h"

namespace cohort::test {
namespace {

class TrlCommands : public testing::Test {
 protected:
  TrlCommands() {
    std::filesystem::create_directory(dir_.path("tokenizer"));
    for (const auto& [name, text] : chat_files(kTurns))
      write_file(dir_.path("tokenizer/" + name), text);
  }
  // A configuration whose only key of the format is the path.
  std::string config(const std::string& trainer, const std::string& reward,
                     const std::string& lines) const {
    write_file(dir_.path("lines.jsonl"), lines);
    write_file(dir_.path("run.yaml"),
               "trainer: " + trainer +
                   "\nsteps: 1\nbatch_size: 2\nprompts_per_step: 2\nnum_generations: 2\n"
                   "max_completion_length: 4\noutput_dir: run\nnum_threads: 1\nrewards: [" +
                   reward +
                   "]\nmodel: {num_layers: 1, d_model: 16, num_heads: 2, context: 64}\n"
                   "eval: {size: 2}\ndata: {tokenizer_path: tokenizer, "
                   "jsonl: {path: lines.jsonl, held_out_fraction: 0.5}}\n");
    return dir_.path("run.yaml");
  }
  // Twelve lines "{HEAD N TAIL}".
  static std::string lines(const std::string& head, const std::string& tail) {
    std::string out;
    for (int i = 0; i < 12; ++i) out += "{" + head + std::to_string(i) + tail + "}\n";
    return out;
  }
  TempDir dir_;
};

const std::string kPrompt = R"("prompt": [{"role": "user", "content": "q)", kPromptEnd = R"("}])";

TEST_F(TrlCommands, TrainEvaluateAndGenerate) {
  const struct {
    const char* trainer;
    std::string lines;
  } cases[] = {
      {"sft", lines(kPrompt, kPromptEnd + R"(, "completion": "a")")},
      {"grpo", lines(kPrompt, kPromptEnd + R"(, "solution": "a")")},
      {"sft", lines(R"("text": "q)", R"(")")},
  };
  for (const auto& c : cases) {
    const std::string path = config(c.trainer, "{name: exact_match}", c.lines);
    const Output run = run_cohort({"train", path});
    ASSERT_EQ(run.code, 0) << run.err << c.lines;
    EXPECT_NE((run.out + run.err).find("data.jsonl: by the fields of "), std::string::npos);
    const Output eval = run_cohort({"eval", dir_.path("run")});
    EXPECT_EQ(eval.code, 0) << eval.err;
    std::filesystem::remove(dir_.path("lines.jsonl"));
    if (c.lines.find("text") == std::string::npos) {
      const Output output =
          run_cohort({"generate", dir_.path("run"), "--template", "--json"},
                     "{" + kPrompt + kPromptEnd + "}\n{" + kPrompt + kPromptEnd + "}\n");
      EXPECT_EQ(output.code, 0) << output.err;
      EXPECT_NE(output.out.find(R"("prompt":"<|start|>user\nq<|end|>\n<|start|>assistant\n")"),
                std::string::npos)
          << output.out;
    }
    std::filesystem::remove_all(dir_.path("run"));
  }
}

TEST_F(TrlCommands, ALinesOwnToolsAndVariablesReachEveryCommand) {
  const std::string shows =
      "{% if tools is defined %}{{ tools | tojson }}{% endif %}({{ mood }})" + std::string(kTurns);
  for (const auto& [name, text] : chat_files(shows.c_str()))
    write_file(dir_.path("tokenizer/" + name), text);
  const std::string tail =
      R"(, "answer": "a", "tools": [{"name": "f"}], "chat_template_kwargs": "{\"mood\": \"x\"}")";
  const std::string path = config("grpo", "{name: exact_match}", lines(kPrompt, kPromptEnd + tail));
  const std::string shown = R"([{"name": "f"}](x)<|start|>user)";
  const Output check = run_cohort({"check", path, "--full"});
  EXPECT_EQ(check.code, 0) << check.err;
  EXPECT_NE(check.out.find(shown), std::string::npos) << check.out;
  const Output run = run_cohort({"train", path});
  ASSERT_EQ(run.code, 0) << run.err;
  for (const Json& line : json_lines(dir_.path("run/completions.jsonl")))
    EXPECT_TRUE(line.at("prompt").as_string().starts_with(shown)) << line.dump();
  EXPECT_EQ(run_cohort({"eval", dir_.path("run")}).code, 0);
  const Output output = run_cohort({"generate", dir_.path("run"), "--template", "--json"},
                                   "{" + kPrompt + kPromptEnd + tail + "}\n");
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_TRUE(parse_json(output.out, "").at("prompt").as_string().starts_with(shown)) << output.out;
  for (const char* command : {"check", "train"})
    expect_bad_input(
        run_cohort(
            {command, path, "environment={name: tools, tools: [calculator], tool_format: hermes}"}),
        {"lines.jsonl:", "tools: they differ from those of the run", "hint: "});
}

TEST_F(TrlCommands, AnyAnswerOfAListIsRightAndNullIsNone) {
  std::string text;
  for (int i = 0; i < 12; ++i)
    text += str("{", kPrompt, i, kPromptEnd, ", \"answer\": ", i == 0 ? "null" : R"(["4.0", 1e5])",
                "}\n");
  const Output check = run_cohort({"check", config("grpo", "{name: exact_match}", text),
                                   "data.jsonl.held_out_fraction=0", "eval.every=0"});
  EXPECT_EQ(check.code, 0) << check.err;
  EXPECT_NE(check.out.find("no gold answer; an empty completion: exact_match not applicable"),
            std::string::npos)
      << check.out;
  EXPECT_NE(check.out.find("exact_match 1; total 1"), std::string::npos) << check.out;
  EXPECT_EQ(check.err.find("gold answers get less"), std::string::npos) << check.err;
}

// Conversations without an answer of the assistant have their gold answer in a field, or none.
TEST_F(TrlCommands, CheckTriesTheGoldAnswersOfConversations) {
  const std::string messages = R"("messages": [{"role": "user", "content": "q)";
  const auto check = [&](const std::string& tail, const char* more = "held_out_fraction: 0.5") {
    std::string text = read_file(config("grpo", "{name: exact_match}", lines(messages, tail)));
    text.replace(text.find("held_out_fraction: 0.5"), 22, more);
    write_file(dir_.path("run.yaml"), text);
    const Output output = run_cohort({"check", dir_.path("run.yaml")});
    EXPECT_EQ(output.code, 0) << output.err;
    return output.out + output.err;
  };
  for (const char* more : {"held_out_fraction: 0.5", "messages: messages"}) {
    const std::string gold = check(R"("}], "answer": "a")", more);
    EXPECT_NE(gold.find("exact_match 1; total 1"), std::string::npos) << gold;
    EXPECT_EQ(gold.find("gold answers get less"), std::string::npos) << gold;
    const std::string none = check(R"("}])", more);
    EXPECT_NE(none.find("no gold answer"), std::string::npos) << none;
    EXPECT_EQ(none.find("gold answers get less"), std::string::npos) << none;
  }
}

TEST_F(TrlCommands, CheckPrintsEveryTurnThatIsLearned) {
  const std::string turns =
      R"("}, {"role": "assistant", "content": "first"}, {"role": "user", "content": "r"}, )"
      R"({"role": "assistant", "content": "last"}])";
  const Output check =
      run_cohort({"check", config("sft", "{name: exact_match}",
                                  lines(R"("messages": [{"role": "user", "content": "q)", turns))});
  EXPECT_EQ(check.code, 0) << check.err;
  const auto row = [&](const std::string& name) {
    const size_t begin = check.out.find(name);
    return check.out.substr(begin, check.out.find('\n', begin) - begin);
  };
  for (const auto& [name, turn, other] : {std::tuple{"           solution", "last", "first"},
                                          {"           learned too", "first", "last"}}) {
    EXPECT_NE(row(name).find(turn), std::string::npos) << check.out;
    EXPECT_EQ(row(name).find(other), std::string::npos) << check.out;
  }
  EXPECT_EQ(row("           learned too").find('q'), std::string::npos) << check.out;
}

TEST_F(TrlCommands, ErrorsNameTheKeyAndTheLine) {
  const std::string chat = lines(kPrompt, kPromptEnd + R"(, "answer": "a")");
  const std::string path = config("sft", "{name: exact_match}", chat);
  expect_bad_input(run_cohort({"check", path, "data.jsonl.prompt={prompt}"}),
                   {"lines.jsonl:1: data.jsonl.prompt: ", "hint: ", "data.jsonl.messages: prompt"});
  expect_bad_input(run_cohort({"check", path, "data.tokenizer_path=", "data.tokenizer=byte"}),
                   {"no chat template"});
  config("grpo", "{name: exact_match}", lines(R"("text": "q)", R"(")"));
  expect_bad_input(run_cohort({"check", path}), {"lines.jsonl:1", "needs a prompt"});
}

}  // namespace
}  // namespace cohort::test
