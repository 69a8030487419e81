// Data on its way into training: sequences, checks before the first step.
#include "trainers/dataset.h"

#include <cmath>

#include "tests/support/test_util.h"
#include "trainers/files.h"
#include "trainers/preview.h"

namespace cohort::test {
namespace {

Example example(const std::string& prompt, const std::string& solution) {
  return {.prompt = prompt, .answer = solution, .solution = solution, .fields = Json::Object{}};
}

class Datasets : public testing::Test {
 protected:
  // A JSONL file of `lines`.
  TrainConfig jsonl(TrainerType trainer, const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    write_file(dir_.path("data.jsonl"), text);
    TrainConfig config;
    config.trainer = trainer;
    config.data.jsonl.path = dir_.path("data.jsonl");
    config.data.jsonl.held_out_fraction = 0.3;
    config.eval.size = 1;
    return config;
  }
  static std::vector<std::string> sums() {
    std::vector<std::string> lines;
    for (int i = 0; i < 20; ++i)
      lines.push_back(str("{\"prompt\": \"", i, "+1=\", \"answer\": \"", i + 1, "\"}"));
    return lines;
  }
  static std::string line(const std::string& prompt, const std::string& answer) {
    return Json().set("prompt", prompt).set("answer", answer).dump();
  }
  // Loads and checks against a context of 8 tokens with the tokenizer of another run.
  static void check(const TrainConfig& config) {
    check_data(config, load_dataset(config, make_char_tokenizer("0123456789+=")), 8);
  }
  TempDir dir_;
};

TEST_F(Datasets, SupervisedSequenceLearnsSolutionAndEnd) {
  const auto tokenizer = make_char_tokenizer("+0123456789=");
  const TokenSequence s = supervised_sequence(example("1+2=", "3"), *tokenizer, 5);
  EXPECT_EQ(tokenizer->decode(s.tokens), "1+2=3");
  EXPECT_EQ(s.tokens.back(), tokenizer->eos_id());
  EXPECT_EQ(s.learn, (std::vector<uint8_t>{0, 0, 0, 0, 1, 1}));
  // 6 tokens are 5 inputs: they fit into a context of 5, and not of 4.
  EXPECT_THROW_WITH(supervised_sequence(example("1+2=", "3"), *tokenizer, 4), InputError,
                    "have 6 tokens, the model's context is 4");
  EXPECT_THROW_WITH(supervised_sequence(example("", "3"), *tokenizer, 4), InputError, "empty");
}

TEST_F(Datasets, LengthsAreThoseOfTheLongestExample) {
  TrainConfig config = jsonl(TrainerType::kSft, sums());
  const Dataset data = load_dataset(config, nullptr);
  const DataLengths sft = check_data(config, data, 8);
  EXPECT_EQ(sft.longest_prompt, 5);    // "19+1="
  EXPECT_EQ(sft.longest_sequence, 8);  // "19+1=20" and the end
  EXPECT_GT(sft.mean_sequence, 6);
  EXPECT_LT(sft.mean_sequence, 8);
  config.trainer = TrainerType::kGrpo;
  EXPECT_EQ(check_data(config, data, 8).longest_sequence, 5);
}

TEST_F(Datasets, CharacterWithoutATokenIsFoundBeforeTraining) {
  auto lines = sums();
  lines.push_back(line("5*5=", "25"));
  for (const TrainerType trainer : {TrainerType::kSft, TrainerType::kGrpo}) {
    TrainConfig config = jsonl(trainer, lines);
    config.eval.size = 100;  // so that the line is seen in whichever split it falls
    EXPECT_THROW_WITH(check(config), InputError, "'5*5=': the character '*'");
    EXPECT_THROW_WITH(check(config), InputError, "data.jsonl");
  }
}

TEST_F(Datasets, ExampleThatDoesNotFitIsFoundBeforeTraining) {
  auto lines = sums();
  lines.push_back(line("1+1+1+1=", "4"));
  TrainConfig config = jsonl(TrainerType::kGrpo, lines);
  config.eval.size = 100;
  EXPECT_THROW_WITH(check(config), InputError,
                    "'1+1+1+1=': the prompt has 8 tokens, the model's context is 8");
  lines.back() = line("1+1=", "222222");
  config = jsonl(TrainerType::kSft, lines);
  config.eval.size = 100;
  EXPECT_THROW_WITH(check(config), InputError, "have 11 tokens, the model's context is 8");
  config.trainer = TrainerType::kGrpo;  // which never sees the solution
  check(config);
  lines.back() = line("", "4");
  config = jsonl(TrainerType::kGrpo, lines);
  config.eval.size = 100;
  EXPECT_THROW_WITH(check(config), InputError, "the prompt is empty");
}

TEST_F(Datasets, TextShorterThanAWindowIsFoundBeforeTraining) {
  TrainConfig config;
  config.data.text = dir_.path("text.txt");
  write_file(config.data.text, "0123456789");
  config.data.held_out_fraction = 0.1;
  EXPECT_THROW_WITH(check_data(config, load_dataset(config, nullptr), 9), InputError,
                    "the training part has 9 tokens, a window needs 10");
  EXPECT_EQ(check_data(config, load_dataset(config, nullptr), 8).longest_sequence, 9);
}

TEST_F(Datasets, HeldOutProblemsOfATaskAreTheSameForEverySeed) {
  TrainConfig config;
  config.trainer = TrainerType::kSft;
  config.data.task = "addition";
  config.eval.size = 10;
  const Dataset a = load_dataset(config, nullptr);
  config.seed = 2;
  const Dataset b = load_dataset(config, nullptr);
  for (size_t i = 0; i < 10; ++i) EXPECT_EQ(a.held_out[i].prompt, b.held_out[i].prompt);
  EXPECT_NE(a.train->get(0).prompt, b.train->get(0).prompt);
}

TEST_F(Datasets, FileOfAnotherFingerprintIsRefused) {
  TrainConfig config = jsonl(TrainerType::kSft, sums());
  const std::string found = load_dataset(config, nullptr).fingerprint;
  EXPECT_EQ(found, file_checksum(config.data.jsonl.path));
  config.data.fingerprint = found;
  load_dataset(config, nullptr);
  auto lines = sums();
  lines.back() = line("19+1=", "2");
  jsonl(TrainerType::kSft, lines);
  const std::string other = file_checksum(config.data.jsonl.path);
  EXPECT_THROW_WITH(load_dataset(config, nullptr), InputError,
                    config.data.jsonl.path +
                        " is not the file that was meant: its fingerprint is " + other +
                        ", expected " + found);
  EXPECT_THROW_WITH(load_dataset(config, nullptr), InputError,
                    "hint: restore the file, or accept this one with data.fingerprint=" + other);
  config.data.fingerprint = other;
  load_dataset(config, nullptr);
  // Generated problems have no file.
  TrainConfig task;
  task.trainer = TrainerType::kSft;
  task.data.task = "addition";
  EXPECT_EQ(load_dataset(task, nullptr).fingerprint, "");
}

// ---- Previews ----------------------------------------------------------------------------------

TEST_F(Datasets, PreviewChecksEachStageAgainstTheOneBefore) {
  const std::string first =
      "data: {task: addition}\nmodel: {d_model: 16, num_heads: 2, context: 16}\nstages:\n"
      "  - {trainer: sft}\n  - trainer: grpo\n    rewards: [{name: task}]\n";
  const auto preview = [&](const std::string& more) {
    write_file(dir_.path("plan.yaml"), first + more);
    return preview_plan(load_plan(dir_.path("plan.yaml"), {}));
  };
  const auto stages = preview("");
  ASSERT_EQ(stages.size(), 2u);
  EXPECT_EQ(stages[1].model.d_model, 16);
  EXPECT_EQ(stages[1].model.vocab_size, 13);
  EXPECT_EQ(preview("    model: {dropout: 0.5, recompute: block}\n")[1].model.dropout, 0.5);
  EXPECT_THROW_WITH(preview("    model: {d_model: 32}\n"), InputError,
                    "model.d_model: 32 was asked for, but the model of the stage before");
  // Characters that only the second stage knows.
  EXPECT_THROW_WITH(preview("    data: {task: reverse}\n"), InputError,
                    "reverse: training example");
  EXPECT_THROW_WITH(preview("    data: {task: nothing}\n"), InputError, "unknown task 'nothing'");
}

TEST_F(Datasets, PreviewFindsBadRewards) {
  const auto preview = [&](const std::string& rewards) {
    write_file(dir_.path("plan.yaml"),
               "trainer: grpo\ndata: {task: addition}\nrewards:\n" + rewards);
    return preview_plan(load_plan(dir_.path("plan.yaml"), {}));
  };
  preview("  - {name: task}\n");
  EXPECT_THROW_WITH(preview("  - {name: tusk}\n"), InputError, "did you mean 'task'?");
  EXPECT_THROW_WITH(preview("  - {name: format, pattern: '('}\n"), InputError,
                    "rewards[0] 'format'");
}

// Of several rewards none says by itself what is right: that is found before anything is trained.
TEST_F(Datasets, PreviewWantsToKnowWhatIsRight) {
  jsonl(TrainerType::kGrpo, sums());
  const auto preview = [&](const std::string& more) {
    write_file(
        dir_.path("plan.yaml"),
        "trainer: grpo\ndata: {jsonl: {path: data.jsonl, held_out_fraction: 0.3}}\n"
        "model: {d_model: 16, num_heads: 2, context: 16}\nmax_completion_length: 4\n"
        "rewards: [{name: numeric}, {name: format, pattern: 1}, {name: format, pattern: 2}]\n" +
            more);
    return preview_plan(load_plan(dir_.path("plan.yaml"), {}));
  };
  EXPECT_THROW_WITH(preview(""), InputError,
                    "eval.correct.reward: there are 3 rewards (numeric, format, format_2)");
  EXPECT_THROW_WITH(preview(""), InputError, "hint: eval.correct.reward=numeric");
  preview("eval: {correct: {reward: format_2}}\n");
  EXPECT_THROW_WITH(preview("eval: {correct: {reward: format2}}\n"), InputError,
                    "no reward is called 'format2'; the rewards are numeric, format, format_2; did "
                    "you mean 'format");
}

}  // namespace
}  // namespace cohort::test
