// TRL's data formats through the commands, with a model made here that has a chat template.
#include <filesystem>

#include "tests/apps/process.h"
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
