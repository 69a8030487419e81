// Claims of the documents: configurations train, and quoted code and numbers match the program.
#include <algorithm>
#include <filesystem>
#include <sstream>

#include "job/config.h"
#include "job/foreign_keys.h"
#include "nn/model_folder.h"
#include "nn/transformer.h"
#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

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

constexpr const char* kQwen2 =
    R"({"model_type": "qwen2", "vocab_size": 300, "hidden_size": 16, "eos_token_id": 0,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 24, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true})";
constexpr const char* kQwen35 =
    R"({"model_type": "qwen3_5_text", "vocab_size": 300, "hidden_size": 16, "eos_token_id": 0,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 24, "max_position_embeddings": 1024, "full_attention_interval": 2,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "tie_word_embeddings": true})";

// A folder of a chat model, with random weights. Thinking is opened if `enable_thinking` is there.
std::string chat_model(const TempDir& dir, const char* config = kQwen2) {
  const std::string model = dir.path("model");
  write_file(dir.path("text.txt"), word_problems());
  EXPECT_EQ(run_cohort({"tokenizer", "train", "--vocab-size=300", "--output=" + model,
                        dir.path("text.txt"), "--special=<|endoftext|>", "--special=<|im_end|>"})
                .code,
            0);
  write_file(model + "/chat_template.jinja",
             "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
             "{% if add_generation_prompt %}assistant: {% if enable_thinking is defined %}<think>\n"
             "{% if not enable_thinking %}</think>\n\n{% endif %}{% endif %}{% endif %}");
  write_file(model + "/config.json", config);
  save_weights(Transformer(load_config(model), DType::kF32, 1), model, "model");
  return model;
}

// Trains two steps of a configuration for word problems.
void train_word_problems(const TempDir& dir, const char* config, std::vector<std::string> more) {
  write_file(dir.path("train.jsonl"), word_problems());
  const std::vector<std::string> small{
      "train",   source(config), "data.jsonl.path=" + dir.path("train.jsonl"),
      "steps=2", "eval.size=2",  "max_completion_length=8"};
  more.insert(more.begin(), small.begin(), small.end());
  const Output output = run_cohort(more);
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_NE(output.out.find("pass@1 (math) 0.00 -> "), std::string::npos) << output.out;
}

TEST(Documents, WordProblemConfigurationsTrain) {
  const TempDir dir;
  const std::string model = chat_model(dir);
  const std::string sft = dir.path("sft"), grpo = dir.path("grpo");
  train_word_problems(dir, "configs/gsm8k_sft.yaml",
                      {"output_dir=" + sft, "model.path=" + model, "batch_size=4"});
  train_word_problems(dir, "configs/gsm8k_grpo.yaml",
                      {"output_dir=" + grpo, "model.path=" + sft, "prompts_per_step=4"});
  const Output generated = run_cohort({"generate", grpo, "--template", "--max-tokens", "2"},
                                      "{\"question\": \"Why?\"}\n");
  EXPECT_TRUE(generated.out.starts_with(
      "system: Reason step by step, and give the final answer as a number after ####.<|im_end|>\n"
      "user: Why?<|im_end|>\nassistant: "))
      << generated.out << generated.err;
}

TEST(Documents, TheConfigurationOfQwen35TrainsModelsWithDeltaLayers) {
  const TempDir dir;
  const std::string grpo = dir.path("grpo");
  train_word_problems(
      dir, "configs/qwen3_5_grpo.yaml",
      {"output_dir=" + grpo, "model.path=" + chat_model(dir, kQwen35), "prompts_per_step=4",
       "rewards.1.pattern=(?s)[ -P].*"});  // some completions of random weights have this start
  const std::string metrics = read_file(grpo + "/metrics.jsonl");
  EXPECT_NE(metrics.find("\"num_updates\":1.0"), std::string::npos) << metrics;
  EXPECT_EQ(metrics.find("\"ratio_deviation\":null"), std::string::npos) << metrics;
  EXPECT_EQ(metrics.find("\"ratio_deviation\":"), metrics.find("\"ratio_deviation\":0.0,"))
      << metrics;
  const Output generated = run_cohort({"generate", grpo, "--template", "--max-tokens", "2"},
                                      "{\"question\": \"Why?\"}\n");
  EXPECT_NE(generated.out.find("assistant: <think>\n</think>\n\n"), std::string::npos)
      << generated.out << generated.err;
}

TEST(Documents, ReadmeIsShortAndShowsTheFilesOfItsExample) {
  const std::string readme = read_file(source("README.md"));
  EXPECT_LE(std::count(readme.begin(), readme.end(), '\n'), 250);
  for (const char* from :
       {"examples/assistant/reward.py\nimport re", "examples/assistant/config.yaml\ntrainer:"}) {
    const std::string_view name_and_start = from;
    const size_t end = name_and_start.find('\n');
    const std::string file = read_file(source(std::string(name_and_start.substr(0, end)).c_str()));
    const size_t begin = file.find(name_and_start.substr(end + 1));
    ASSERT_NE(begin, std::string::npos) << from;
    EXPECT_NE(readme.find(str("\n", file.substr(begin), "```")), std::string::npos) << from;
  }
  const std::string data = read_file(source("examples/assistant/data.jsonl"));
  const size_t line = readme.find("{\"prompt\": [{");
  EXPECT_NE(data.find(readme.substr(line, readme.find('\n', line) - line)), std::string::npos);
}

// Names of other trainers that the page lists are explained where someone writes them.
TEST(Documents, NamesOfOtherTrainersAreKnown) {
  const std::vector<std::string> keys = config_keys<TrainConfig>();
  std::istringstream page(read_file(source("docs/from_trl.md")));
  int names = 0;
  for (std::string line; std::getline(page, line);) {
    if (!line.starts_with("| `")) continue;
    const std::string theirs = line.substr(2, line.find('|', 2) - 2);
    for (size_t begin = theirs.find('`'); begin != theirs.npos; begin = theirs.find('`', begin)) {
      const size_t end = theirs.find('`', begin + 1);
      const std::string name = theirs.substr(begin + 1, end - begin - 1);
      begin = end + 1;
      if (name.find_first_of(" :.(") != name.npos && !name.starts_with("actor_")) continue;
      ++names;
      EXPECT_TRUE(std::count(keys.begin(), keys.end(), name) == 1 ||
                  !foreign_key_text(name).empty())
          << name;
    }
  }
  EXPECT_GT(names, 60);
}

}  // namespace
}  // namespace cohort::test
