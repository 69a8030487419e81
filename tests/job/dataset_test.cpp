// Data for training: sequences, checks before the first step.
#include "data/dataset.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "data/data_check.h"
#include "job/preview.h"
#include "sys/files.h"
#include "tests/support/test_util.h"
#include "trainers/sampling.h"

namespace cohort::test {
namespace {

Example solved_example(const std::string& prompt, const std::string& solution) {
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
    config.batch.trainer = trainer;
    config.data.jsonl.path = {dir_.path("data.jsonl")};
    config.data.jsonl.held_out_fraction = 0.3;
    config.eval.size = 1;
    config.sampling.max_completion_length = 3;
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
  static void check(const TrainConfig& config) { loaded(config); }
  // Also returns the checked data.
  static std::pair<Dataset, DataLengths> loaded(const TrainConfig& config,
                                                ContextLimit limit = ContextLimit::kMayGrow) {
    Dataset data = load_dataset(config, make_char_tokenizer("0123456789+="));
    DataLengths lengths = check_data(config, data, 8, limit);
    check_sampling(config.sampling, config.batch.trainer, *data.tokenizer, lengths.shortest_prompt,
                   8, limit);
    return {std::move(data), std::move(lengths)};
  }
  // 20 sums that fit into 8 tokens, and lines 21 to 23, which do not; a file of two to evaluate on.
  TrainConfig too_long(TrainerType trainer, TooLong mode) {
    auto lines = sums();
    lines.push_back(line("1+1+1+1=", "4"));
    lines.push_back(line("1+2+3+4+5+6=", "21"));
    lines.push_back(line("1+1=", "222222"));
    TrainConfig config = jsonl(trainer, lines);
    config.data.jsonl.held_out_fraction.reset();
    config.data.jsonl.eval_path = {dir_.path("test.jsonl")};
    write_file(config.data.jsonl.eval_path[0],
               line("9+9=", "18") + "\n" + line("11111111+1=", "11111112") + "\n");
    config.data.too_long = mode;
    config.eval.size = 0;
    return config;
  }
  TempDir dir_;
};

TEST_F(Datasets, SupervisedSequenceHasLossOnSolutionAndEnd) {
  const auto tokenizer = make_char_tokenizer("+0123456789=");
  const TokenSequence s = supervised_sequence(solved_example("1+2=", "3"), *tokenizer, 5);
  EXPECT_EQ(tokenizer->decode(s.tokens), "1+2=3");
  EXPECT_EQ(s.tokens.back(), tokenizer->eos_id());
  EXPECT_EQ(s.loss_mask, (std::vector<uint8_t>{0, 0, 0, 0, 1, 1}));
  // 6 tokens are 5 inputs: they fit into a context of 5, and not of 4.
  EXPECT_THROW_WITH(supervised_sequence(solved_example("1+2=", "3"), *tokenizer, 4), InputError,
                    "have 6 tokens, the model's context is 4");
  EXPECT_THROW_WITH(supervised_sequence(solved_example("", "3"), *tokenizer, 4), InputError,
                    "empty");
}

TEST_F(Datasets, LengthsAreThoseOfTheLongestExample) {
  TrainConfig config = jsonl(TrainerType::kSft, sums());
  Dataset data = load_dataset(config, nullptr);
  const DataLengths sft = check_data(config, data, 8);
  EXPECT_EQ(sft.shortest_prompt, 4);   // "9+1="
  EXPECT_EQ(sft.longest_prompt, 5);    // "19+1="
  EXPECT_EQ(sft.longest_sequence, 8);  // "19+1=20" and the end
  EXPECT_GT(sft.mean_sequence, 6);
  EXPECT_LT(sft.mean_sequence, 8);
  config.batch.trainer = TrainerType::kGrpo;
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
  config.batch.trainer = TrainerType::kGrpo;  // which does not use the solution
  check(config);
  lines.back() = line("", "4");
  config = jsonl(TrainerType::kGrpo, lines);
  config.eval.size = 100;
  EXPECT_THROW_WITH(check(config), InputError, "the prompt is empty");
}

TEST_F(Datasets, TextShorterThanAWindowIsFoundBeforeTraining) {
  TrainConfig config;
  config.data.text = {dir_.path("text.txt")};
  write_file(config.data.text[0], "0123456789");
  config.data.jsonl.held_out_fraction = 0.1;
  Dataset data = load_dataset(config, nullptr);
  EXPECT_THROW_WITH(check_data(config, data, 9), InputError,
                    "the training part has 9 tokens, a window needs 10");
  EXPECT_EQ(check_data(config, data, 8).longest_sequence, 9);
}

TEST_F(Datasets, ErrorOfTooLongProblemsCountsThemAndNamesTheLongest) {
  const TrainConfig grpo = too_long(TrainerType::kGrpo, TooLong::kError);
  EXPECT_THROW_WITH(
      check(grpo), InputError,
      grpo.data.jsonl.path[0] +
          ":22: '1+2+3+4+5+6=': the prompt has 12 tokens, the model's context is 8, "
          "which leaves none for a completion; 2 of 23 training and 1 of 2 held-out problems "
          "are too long, this is the longest; hint: a larger model.context or "
          "data.too_long: skip or truncate");
  const TrainConfig sft = too_long(TrainerType::kSft, TooLong::kError);
  EXPECT_THROW_WITH(
      check(sft), InputError,
      sft.data.jsonl.eval_path[0] +
          ":2: '11111111+1=': the prompt has 11 tokens, the model's context is 8, which "
          "leaves none for a completion; 3 of 23 training and 1 of 2 held-out problems");
}

TEST_F(Datasets, NoContextIsAdvisedThatTheModelDoesNotHave) {
  TrainConfig config = too_long(TrainerType::kGrpo, TooLong::kError);
  Dataset data = load_dataset(config, nullptr);
  EXPECT_THROW_WITH(check_data(config, data, 8, ContextLimit::kWholeModel), InputError,
                    "this is the longest; hint: data.too_long: skip or truncate; the model has no "
                    "larger context");
  EXPECT_THROW_WITH(check_held_out(config, data, 8, ContextLimit::kWholeModel), InputError,
                    "; the model has no larger context");
  config = jsonl(TrainerType::kGrpo, sums());
  config.sampling.max_completion_length = 64;
  data = load_dataset(config, nullptr);
  const std::string note = check_data(config, data, 8, ContextLimit::kWholeModel).notes.at(0);
  EXPECT_TRUE(note.ends_with("; hint: shorter prompts; the model has no larger context")) << note;
  EXPECT_THROW_WITH(loaded(config, ContextLimit::kWholeModel), InputError,
                    "hint: max_completion_length=4 at most; the model has no larger context");
  ModelConfig model{.context = 8};
  model.position = PositionType::kRope;
  EXPECT_EQ(context_limit(config, model), ContextLimit::kMayGrow);
  config.init_from = "model";
  EXPECT_EQ(context_limit(config, model), ContextLimit::kWholeModel);
  model.position_rows = 16;  // the model's own context, of which model.context is a part
  EXPECT_EQ(context_limit(config, model), ContextLimit::kMayGrow);
  model.position_rows = 0;
  model.position = PositionType::kAlibi;
  EXPECT_EQ(context_limit(config, model), ContextLimit::kMayGrow);
}

TEST_F(Datasets, TooLongProblemsAreSkippedIfConfigured) {
  for (const TrainerType trainer : {TrainerType::kGrpo, TrainerType::kSft}) {
    const TrainConfig config = too_long(trainer, TooLong::kSkip);
    const auto [data, lengths] = loaded(config);
    const int64_t left = trainer == TrainerType::kGrpo ? 21 : 20;
    ASSERT_EQ(data.train->size(), left);
    EXPECT_EQ(data.train->get(left - 1).prompt, left == 21 ? "1+1=" : "19+1=");
    ASSERT_EQ(data.held_out.size(), 1u);
    EXPECT_EQ(data.held_out[0].prompt, "9+9=");
    EXPECT_EQ(data.held_out_set->size(), 2);
    EXPECT_EQ(lengths.longest_prompt, 5);
    EXPECT_EQ(lengths.too_long.find(str("skipped ", 23 - left,
                                        " of 23 training and 1 of 2 held-out problems; the "
                                        "longest: ",
                                        dir_.path())),
              0u)
        << lengths.too_long;
  }
  // Skipped problems are replaced by the next ones: eval.size counts the remaining.
  TrainConfig config = too_long(TrainerType::kGrpo, TooLong::kSkip);
  write_file(config.data.jsonl.eval_path[0],
             line("11111111+1=", "1") + "\n" + line("1+1=", "2") + "\n" + line("1+2=", "3") + "\n");
  config.eval.size = 1;
  const auto [data, lengths] = loaded(config);
  ASSERT_EQ(data.held_out.size(), 1u);
  EXPECT_EQ(data.held_out[0].prompt, "1+1=");
  write_file(config.data.jsonl.eval_path[0], line("11111111+1=", "1") + "\n");
  EXPECT_THROW_WITH(check(config), InputError, "1 of 1 held-out problems are too long");
}

TEST_F(Datasets, TooLongPromptsLoseTheirStartAndSolutionsTheirEndIfTruncated) {
  for (const TrainerType trainer : {TrainerType::kGrpo, TrainerType::kSft}) {
    const auto [data, lengths] = loaded(too_long(trainer, TooLong::kTruncate));
    ASSERT_EQ(data.train->size(), 23);
    // 8 tokens, 3 of them for the completion.
    EXPECT_EQ(data.train->get(20).prompt, "+1+1=");
    EXPECT_EQ(data.train->get(21).prompt, "+5+6=");
    EXPECT_EQ(data.train->get(21).answer, "21");
    EXPECT_EQ(data.train->get(22).prompt, "1+1=");
    EXPECT_EQ(data.train->get(19).prompt, "19+1=");  // which fits
    ASSERT_EQ(data.held_out.size(), 2u);
    EXPECT_EQ(data.held_out[1].prompt, "11+1=");
    const bool sft = trainer == TrainerType::kSft;
    EXPECT_EQ(
        lengths.too_long.find(sft ? "truncated 3 of 23 training and 1 of 2 held-out problems"
                                  : "truncated 2 of 23 training and 1 of 2 held-out problems"),
        0u)
        << lengths.too_long;
    EXPECT_EQ(lengths.longest_sequence, sft ? 9 : 5);
    // Solutions lose their end, including the end of sequence.
    const TokenSequence s =
        supervised_sequence(data.train->get(22), *data.tokenizer, 8, TooLong::kTruncate);
    EXPECT_EQ(data.tokenizer->decode(s.tokens), "1+1=22222");
    EXPECT_EQ(s.tokens.size(), 9u);
    EXPECT_EQ(s.loss_mask, (std::vector<uint8_t>{0, 0, 0, 0, 1, 1, 1, 1, 1}));
  }
}

TEST_F(Datasets, HoldingEverythingOutIsAnErrorInTraining) {
  TrainConfig config = jsonl(TrainerType::kSft, sums());
  config.data.jsonl.held_out_fraction = 1;
  config.eval.size = 0;
  EXPECT_THROW_WITH(check(config), InputError, "data.held_out_fraction: 1 holds everything");
  Dataset data = load_dataset(config, nullptr);
  EXPECT_EQ(check_held_out(config, data, 16).too_long, "");
  EXPECT_EQ(data.held_out.size(), 20u);
  config.eval.size = 7;
  check_held_out(config, data, 16);
  EXPECT_EQ(data.held_out.size(), 7u);
  TrainConfig text;
  text.data.text = {dir_.path("text.txt")};
  write_file(text.data.text[0], "0123456789");
  text.data.jsonl.held_out_fraction = 1;
  Dataset whole = load_dataset(text, nullptr);
  EXPECT_EQ(whole.held_out_text.size(), 10);
  EXPECT_THROW_WITH(check_data(text, whole, 4), InputError, "data.held_out_fraction: 1 holds");
}

TEST_F(Datasets, SourcesFollowTheirWeightsAlsoIfProblemsAreSkipped) {
  TrainConfig config = too_long(TrainerType::kSft, TooLong::kSkip);
  config.data.jsonl.held_out_fraction = 0;
  write_file(dir_.path("few.jsonl"),
             line("11111111+1=", "1") + "\n" + line("9+0=", "9") + "\n" + line("8+0=", "8") + "\n");
  config.data.jsonl.path.push_back(dir_.path("few.jsonl"));
  config.data.weights = {1, 3};
  const auto [data, lengths] = loaded(config);
  EXPECT_EQ(data.source_sizes, (std::vector<int64_t>{20, 2}));
  MixedOrder order = make_order(config, data);
  std::map<std::string, int> seen;
  for (int i = 0; i < 80; ++i) ++seen[data.train->get(order.next()).prompt];
  EXPECT_EQ(seen["9+0="], 30);
  EXPECT_EQ(seen["8+0="], 30);
  EXPECT_EQ(seen["19+1="], 1);
  write_file(dir_.path("few.jsonl"), line("11111111+1=", "1") + "\n");
  EXPECT_THROW_WITH(loaded(config), InputError,
                    "few.jsonl: has no problem to train on, but a weight in data.weights; hint: ");
}

TEST_F(Datasets, CurriculumSortsByLengthOrPassRate) {
  TrainConfig config = jsonl(TrainerType::kSft, {});
  std::string lines;
  for (int i = 0; i < 9; ++i)
    lines += Json()
                 .set("prompt", str(i, "="))
                 .set("answer", std::string(static_cast<size_t>(1 + i * 4 % 9 / 2), '1'))
                 .set("pass_rate", i * 5 % 9 / 8.0)
                 .dump() +
             "\n";
  write_file(config.data.jsonl.path[0], lines);
  config.data.jsonl.held_out_fraction = 0;
  const auto keys = [&](Curriculum curriculum) {
    config.data.curriculum = curriculum;
    const auto [data, lengths] = loaded(config);
    MixedOrder order = make_order(config, data);
    std::vector<double> out;
    for (int i = 0; i < 9; ++i) {
      const Example e = data.train->get(order.next());
      out.push_back(curriculum == Curriculum::kLength ? static_cast<double>(e.answer.size())
                                                      : -e.fields.at("pass_rate").as_double());
    }
    return out;
  };
  for (const Curriculum each : {Curriculum::kLength, Curriculum::kPassRate}) {
    const auto order = keys(each);
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  }
  write_file(config.data.jsonl.path[0], lines + line("1=", "1") + "\n");
  EXPECT_THROW_WITH(keys(Curriculum::kPassRate), InputError,
                    "data.jsonl:10: '1=': data.curriculum: expected the field 'pass_rate', a");
}

// The curriculum of a run is one order from its first step to its last, over all its epochs.
TEST_F(Datasets, ACurriculumSpansTheRun) {
  std::vector<std::string> lines;
  for (int i = 0; i < 9; ++i)
    lines.push_back(line(str(i, "="), std::string(static_cast<size_t>(1 + i % 3), '1')));
  TrainConfig config = jsonl(TrainerType::kSft, lines);
  config.data.jsonl.held_out_fraction = 0;
  config.data.curriculum = Curriculum::kLength;
  config.batch.steps = 7;
  config.batch.batch_size = 3;
  const auto [data, lengths] = loaded(config);
  const auto sizes = [&](const std::vector<int64_t>& planned_steps, int picks) {
    MixedOrder order = make_order(config, data, planned_steps);
    std::vector<size_t> out;
    for (int i = 0; i < picks; ++i) out.push_back(data.train->get(order.next()).answer.size());
    return out;
  };
  const auto whole = sizes({7}, 21), longer = sizes({7, 10}, 30);
  EXPECT_TRUE(std::is_sorted(whole.begin(), whole.end()));
  EXPECT_EQ(whole.front(), 1u);
  EXPECT_EQ(whole.back(), 3u);
  EXPECT_EQ(std::vector<size_t>(longer.begin(), longer.begin() + 21), whole);
  EXPECT_TRUE(std::is_sorted(longer.begin() + 21, longer.end()));
}

// A later stage of the same data and seed sees the problems in another order, generated ones too.
TEST_F(Datasets, EachStageHasADifferentOrder) {
  TrainConfig config = jsonl(TrainerType::kSft, sums());
  config.data.jsonl.held_out_fraction = 0;
  TrainConfig task;
  task.batch.trainer = TrainerType::kGrpo;
  task.data.task = "addition";
  const auto orders = [&](int64_t stage) {
    config.stage = task.stage = stage;
    const auto [data, lengths] = loaded(config);
    const Dataset generated = load_dataset(task, nullptr);
    MixedOrder order = make_order(config, data);
    std::vector<std::string> out;
    for (int i = 0; i < 20; ++i) out.push_back(data.train->get(order.next()).prompt);
    for (int i = 0; i < 20; ++i) out.push_back(generated.train->get(i).prompt);
    return out;
  };
  const auto first = orders(0), second = orders(1), third = orders(2);
  for (const auto& [a, b] : {std::pair(first, second), {first, third}, {second, third}}) {
    EXPECT_NE(std::vector(a.begin(), a.begin() + 20), std::vector(b.begin(), b.begin() + 20));
    EXPECT_NE(std::vector(a.begin() + 20, a.end()), std::vector(b.begin() + 20, b.end()));
  }
  ShuffledOrder by_seed(20, static_cast<uint64_t>(config.seed));
  config.stage = 0;
  const auto [data, lengths] = loaded(config);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(data.train->get(by_seed.next()).prompt, first[i]);
}

TEST_F(Datasets, AnEvaluationTakesASampleThatDoesNotDependOnTheFilesOrder) {
  TrainConfig config = jsonl(TrainerType::kSft, sums());
  config.data.jsonl.held_out_fraction = 1;
  config.eval.size = 6;
  const auto sample = [&](const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& each : lines) text += each + "\n";
    write_file(config.data.jsonl.path[0], text);
    Dataset data = load_dataset(config, make_char_tokenizer("0123456789+="));
    check_held_out(config, data, 16);
    std::vector<std::string> out;
    for (const Example& e : data.held_out) out.push_back(e.prompt);
    return out;
  };
  std::vector<std::string> lines = sums();
  const auto chosen = sample(lines);
  ASSERT_EQ(chosen.size(), 6u);
  EXPECT_NE(chosen.back(), "5+1=");  // not the first lines
  std::reverse(lines.begin(), lines.end());
  auto reversed = sample(lines);
  std::reverse(reversed.begin(), reversed.end());  // they stay in the order of the file
  EXPECT_EQ(reversed, chosen);
}

TEST_F(Datasets, NotesReportPromptsAndSolutionsThatAreTooLong) {
  TrainConfig config = jsonl(TrainerType::kSft, sums());
  config.data.jsonl.held_out_fraction = 0;
  config.batch.batch_size = config.batch.prompts_per_step = 20;
  config.sampling.max_completion_length = 2;
  EXPECT_EQ(
      loaded(config).second.notes,
      std::vector<std::string>{
          "max_completion_length: the solutions of 11 of 20 training problems have more than 2 "
          "tokens, the longest 3: a completion of that length is truncated; hint: "
          "max_completion_length=3"});
  config.batch.trainer = TrainerType::kGrpo;
  config.sampling.max_completion_length = 4;
  EXPECT_EQ(loaded(config).second.notes,
            std::vector<std::string>{
                "max_completion_length: the prompts of 10 of 20 training problems leave fewer "
                "than 4 tokens in the context of 8, the longest leaves 3; hint: a larger "
                "model.context or shorter prompts"});
  config.sampling.max_completion_length = 3;
  EXPECT_TRUE(loaded(config).second.notes.empty());
  config.batch.prompts_per_step = 21;
  EXPECT_EQ(loaded(config).second.notes,
            std::vector<std::string>{"prompts_per_step: 21, and there are 20 training problems: a "
                                     "step repeats some of them"});
}

// ---- Held-out problems in the training data

TEST_F(Datasets, HeldOutProblemsThatAreTrainedOnAreCounted) {
  TrainConfig config = too_long(TrainerType::kSft, TooLong::kSkip);
  const auto leak = [&] {
    return held_out_leak(load_dataset(config, make_char_tokenizer("0123456789+=")), {});
  };
  EXPECT_EQ(leak(), "");
  write_file(config.data.jsonl.eval_path[0],
             line("9+9=", "18") + "\n" + line("1+1=", "other") + "\n" + line("7+1=", "8") + "\n");
  EXPECT_EQ(leak(), str("data: 2 of the 3 held-out problems are also trained on, the first: ",
                        dir_.path("test.jsonl"), ":2; hint: problems of data.jsonl.eval_path that ",
                        "data.jsonl.path does not have"));
}

// Stages with other templates or fractions hold out different problems, unless they hash the same
// fields.
TEST_F(Datasets, ALaterStageCountsProblemsThatEarlierOnesTrainedOn) {
  TrainConfig later = jsonl(TrainerType::kGrpo, sums()), earlier = later;
  later.data.jsonl.prompt = "{prompt}?";
  const auto leak = [&] {
    return held_out_leak(load_dataset(later, make_char_tokenizer("0123456789+=?")), {earlier});
  };
  // By their lines, although their prompts differ.
  std::string text = leak();
  EXPECT_NE(text.find(" held-out problems are trained on by stage 1 ("), text.npos) << text;
  EXPECT_NE(text.find("; hint: one data.split_by and one held_out_fraction for all"), text.npos);
  later.data.jsonl.split_by = earlier.data.jsonl.split_by = {"prompt"};
  EXPECT_EQ(leak(), "");
  earlier.data.jsonl.held_out_fraction = 0.1;
  EXPECT_NE(leak(), "");
  earlier.data.jsonl.held_out_fraction = 0.5;
  EXPECT_EQ(leak(), "");
  // By their prompts, although the file is another one.
  earlier.data.jsonl.held_out_fraction = 0;
  earlier.data.jsonl.path = {dir_.path("other.jsonl")};
  write_file(dir_.path("other.jsonl"), line("0+1=", "x") + "\n" + line("nothing", "x") + "\n");
  later.data.jsonl.held_out_fraction = 1;
  EXPECT_EQ(leak().find("data: 1 of the 20 held-out problems are trained on by stage 1"), 0u);
  std::filesystem::remove(dir_.path("other.jsonl"));
  EXPECT_EQ(leak(), "");
}

TEST_F(Datasets, WindowsOfTextFollowTheWeightsOfTheSources) {
  TrainConfig config;
  write_file(dir_.path("a"), std::string(1000, 'a'));
  write_file(dir_.path("b"), std::string(300, 'b'));
  config.data.text = {dir_.path("a"), dir_.path("b")};
  const auto fraction_of_b = [&](std::vector<double> weights) {
    config.data.weights = std::move(weights);
    Dataset data = load_dataset(config, nullptr);
    check_data(config, data, 8);
    int b = 0;
    for (int64_t i = 0; i < 2000; ++i) {
      const TextWindow window = text_window(data, 9, 5, i);
      const std::string text = data.tokenizer->decode(window.tokens.read(window.begin, 9));
      // Whole windows of one source, whose document may end at their end.
      EXPECT_TRUE(text.find_first_not_of(text[0]) == text.npos) << text;
      b += text[0] == 'b';
    }
    return b / 2000.0;
  };
  EXPECT_NEAR(fraction_of_b({1, 3}), 0.75, 0.05);
  EXPECT_NEAR(fraction_of_b({}), 300.0 / 1300, 0.05);  // proportional to their sizes
  Dataset data = load_dataset(config, nullptr);
  // A tenth of each, with its end: 100 and 30 characters.
  EXPECT_EQ(data.held_out_text.size(), 132);
  EXPECT_EQ(data.train_text[0].size(), 901);
}

TEST_F(Datasets, ImpossibleSamplingIsFoundBeforeTraining) {
  TrainConfig config = jsonl(TrainerType::kGrpo, sums());
  config.sampling.max_completion_length = 5;
  EXPECT_THROW_WITH(check(config), InputError,
                    "max_completion_length: 5 tokens fit after no prompt: the shortest has "
                    "4, the model's context is 8; hint: a larger model.context or "
                    "max_completion_length=4 at most");
  config.sampling.max_completion_length = 4;  // after "1+1=", though not after "10+1="
  check(config);
  for (const TrainerType trainer : {TrainerType::kGrpo, TrainerType::kSft}) {
    config.batch.trainer = trainer;
    config.sampling.stop_tokens = {12};  // 12 characters and the end of sequence
    check(config);
    config.sampling.stop_tokens = {3, 13};
    EXPECT_THROW_WITH(check(config), InputError,
                      "stop_tokens: 13 is outside the vocabulary of 13; hint: ids are 0 to 12");
  }
}

TEST_F(Datasets, HeldOutProblemsOfATaskAreTheSameForEverySeed) {
  TrainConfig config;
  config.batch.trainer = TrainerType::kSft;
  config.data.task = "addition";
  config.eval.size = 10;
  const Dataset a = load_dataset(config, nullptr);
  config.seed = 2;
  const Dataset b = load_dataset(config, nullptr);
  for (int64_t i = 0; i < 10; ++i)
    EXPECT_EQ(a.held_out_set->get(i).prompt, b.held_out_set->get(i).prompt);
  EXPECT_NE(a.train->get(0).prompt, b.train->get(0).prompt);
}

TEST_F(Datasets, FileOfAnotherFingerprintIsRefused) {
  TrainConfig config = jsonl(TrainerType::kSft, sums());
  const std::string found = load_dataset(config, nullptr).fingerprint;
  EXPECT_EQ(found, file_checksum(config.data.jsonl.path[0]));
  config.data.fingerprint = found;
  load_dataset(config, nullptr);
  auto lines = sums();
  lines.back() = line("19+1=", "2");
  jsonl(TrainerType::kSft, lines);
  const std::string other = file_checksum(config.data.jsonl.path[0]);
  EXPECT_THROW_WITH(load_dataset(config, nullptr), InputError,
                    config.data.jsonl.path[0] +
                        " is not the file that was meant: its fingerprint is " + other +
                        ", expected " + found);
  EXPECT_THROW_WITH(load_dataset(config, nullptr), InputError,
                    "hint: restore the file, or accept this one with data.fingerprint=" + other);
  config.data.fingerprint = other;
  load_dataset(config, nullptr);
  // A file of held-out problems counts, too, and the one that has changed is named.
  config.data.jsonl.held_out_fraction = 0;
  config.data.jsonl.eval_path = {dir_.path("test.jsonl")};
  write_file(config.data.jsonl.eval_path[0], line("1+1=", "2"));
  const std::string both = other + "+" + file_checksum(config.data.jsonl.eval_path[0]);
  EXPECT_THROW_WITH(load_dataset(config, nullptr), InputError, "data.fingerprint=" + both);
  config.data.fingerprint = both;
  EXPECT_EQ(load_dataset(config, nullptr).fingerprint, both);
  write_file(config.data.jsonl.eval_path[0], line("1+1=", "3"));
  EXPECT_THROW_WITH(load_dataset(config, nullptr), InputError,
                    "test.jsonl is not the file that was meant");
  jsonl(TrainerType::kSft, sums());
  EXPECT_THROW_WITH(load_dataset(config, nullptr), InputError,
                    "data.jsonl is not the file that was meant");
  // An evaluation compares the held-out file alone.
  const auto held_out = [&] {
    return load_dataset(config, make_char_tokenizer("0123456789+="), DataParts::kHeldOut);
  };
  EXPECT_THROW_WITH(held_out(), InputError, "test.jsonl is not the file that was meant");
  write_file(config.data.jsonl.eval_path[0], line("1+1=", "2"));
  std::filesystem::remove(config.data.jsonl.path[0]);
  EXPECT_EQ(held_out().held_out_set->size(), 1);
  EXPECT_EQ(held_out().train->size(), 0);
  // Generated problems have no file.
  TrainConfig task;
  task.batch.trainer = TrainerType::kSft;
  task.data.task = "addition";
  task.data.fingerprint = "0123456789012345";  // matches no file
  EXPECT_EQ(load_dataset(task, nullptr).fingerprint, "");
}

// ---- Previews ----------------------------------------------------------------------------------

TEST_F(Datasets, PreviewChecksEachStageAgainstTheOneBefore) {
  const std::string first =
      "data: {task: addition}\nmodel: {d_model: 16, num_heads: 2, context: 16}\n"
      "max_completion_length: 4\nstages:\n"
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
  // Characters that occur only in the second stage.
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

TEST_F(Datasets, PreviewScoresTheGoldAnswers) {
  auto lines = sums();
  lines.insert(lines.begin(), line("9+9=", "?"));
  jsonl(TrainerType::kGrpo, lines);
  const auto preview = [&](const std::string& more) {
    write_file(dir_.path("plan.yaml"),
               "trainer: grpo\ndata: {jsonl: {path: data.jsonl, eval_path: data.jsonl, answer: "
               "'{answer}'" +
                   more +
                   "}}\nmodel: {d_model: 16, num_heads: 2, context: 16}\n"
                   "max_completion_length: 4\neval: {correct: {reward: numeric}}\n"
                   "rewards: [{name: numeric, pattern: '= *(.+)'}, {name: format, weight: 0.1, "
                   "pattern: '= .*'}]\n");
    return preview_plan(load_plan(dir_.path("plan.yaml"), {})).at(0);
  };
  // A pattern that no answer matches: a mistake.
  const StagePreview bad = preview("");
  ASSERT_EQ(bad.examples.size(), 3u);
  EXPECT_EQ(bad.examples[1].prompt, "0+1=");
  EXPECT_EQ(bad.gold_rewards, (std::vector<std::string>{"numeric not applicable, format 0; total 0",
                                                        "numeric 0, format 0; total 0",
                                                        "numeric 0, format 0; total 0"}));
  EXPECT_EQ(
      bad.reward_warning,
      "rewards: 21 of 21 gold answers get less than the rewards can give; the first: '?' after "
      "'9+9=' gets numeric not applicable, format 0; total 0; hint: the gold answer is the "
      "solution, or the answer where there is none; do the patterns of the rewards fit it?");
  const StagePreview good = preview(", solution: '= {answer}'");
  EXPECT_EQ(good.gold_rewards[1], "numeric 1, format 1; total 1.1");
  EXPECT_EQ(good.reward_warning, "");
}

// A gold answer has the tokens of its text and is not truncated. A penalty is no warning.
TEST_F(Datasets, PreviewKnowsTheLengthsOfGoldAnswers) {
  jsonl(TrainerType::kGrpo, {line("1+1=", "2"), line("9+9=", "18"), line("8+9=", "17")});
  write_file(dir_.path("plan.yaml"),
             "trainer: grpo\ndata: {jsonl: {path: data.jsonl, eval_path: data.jsonl, answer: "
             "'{answer}'}}\nmodel: {d_model: 16, num_heads: 2, context: 16}\n"
             "max_completion_length: 4\neval: {correct: {reward: numeric}}\n"
             "rewards: [{name: numeric}, {name: length}]\n");
  const StagePreview preview = preview_plan(load_plan(dir_.path("plan.yaml"), {})).at(0);
  EXPECT_EQ(preview.gold_rewards[0], "numeric 1, length -0.25; total 0.75");
  EXPECT_EQ(preview.gold_rewards[1], "numeric 1, length -0.5; total 0.5");
  EXPECT_EQ(preview.reward_warning, "");
}

// Several rewards need a choice of the criterion, which is checked before training.
TEST_F(Datasets, PreviewRequiresACriterionOfCorrectness) {
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
