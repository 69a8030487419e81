// What the documents promise: configurations that train, and code and figures that are the
// program's.
#include <filesystem>

#include "tests/apps/process.h"
#include "tests/trainers/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

std::string source(const char* name) {
  return (fs::path(__FILE__).parent_path().parent_path().parent_path() / name).string();
}

// Problems as in GSM8K: the worked solution ends in the number.
std::string word_problems() {
  std::string lines;
  for (int i = 1; i <= 60; ++i)
    lines += str(R"({"question": "Ann has )", i, R"( clips and buys as many. How many has she?", )",
                 R"("answer": "She has )", i, "+", i, "=<<", i, "+", i, "=", 2 * i, ">>", 2 * i,
                 R"( clips.\n#### )", 2 * i, "\"}\n");
  return lines;
}

TEST(Documents, WordProblemConfigurationsTrain) {
  const TempDir dir;
  write_file(dir.path("train.jsonl"), word_problems());
  const auto train = [&](const char* config, std::vector<std::string> more) {
    const std::vector<std::string> small{source(config),
                                         "data.jsonl.path=" + dir.path("train.jsonl"), "steps=2",
                                         "eval.size=2", "max_completion_length=8"};
    more.insert(more.begin(), small.begin(), small.end());
    more.insert(more.begin(), "train");
    const Output output = run_cohort(more);
    EXPECT_EQ(output.code, 0) << output.err;
    EXPECT_NE(output.out.find("pass@1 (numeric) 0.00 -> "), std::string::npos) << output.out;
  };
  const std::string sft = dir.path("sft"), grpo = dir.path("grpo");
  train("configs/gsm8k_sft.yaml",
        {"output_dir=" + sft, "model.d_model=16", "model.num_heads=2", "model.num_layers=1"});
  train("configs/gsm8k_grpo.yaml", {"output_dir=" + grpo, "init_from=" + sft});
  const Output said = run_cohort({"generate", grpo, "--template", "--max-tokens", "2"},
                                 "{\"question\": \"Why?\"}\n");
  EXPECT_EQ(said.out.rfind("Question: Why?\nAnswer: ", 0), 0u) << said.out << said.err;
}

TEST(Documents, ReadmeShowsTheOpOfTheExample) {
  const std::string example = read_file(source("examples/custom_op/main.cpp"));
  const size_t begin = example.find("Variable soft_cap("), end = example.find("\n}\n", begin);
  ASSERT_NE(end, std::string::npos);
  EXPECT_NE(read_file(source("README.md")).find(example.substr(begin, end - begin)),
            std::string::npos);
}

TEST(Documents, ReadmeCountsTheOpCasesThatGradcheckCounts) {
  const std::string said = run_cohort({"gradcheck"}).out;
  const size_t line = said.rfind('\n', said.size() - 2) + 1;
  const std::string cases = said.substr(line, said.find(" cases", line) - line);
  EXPECT_NE(read_file(source("README.md")).find("gradients of " + cases + " op cases"),
            std::string::npos)
      << cases;
}

}  // namespace
}  // namespace cohort::test
