// Evaluation: its metrics, the criterion of correctness, and bitwise equal scores for any number of
// ranks.
#include "trainers/evaluate.h"

#include <cmath>
#include <limits>

#include "job/report.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

Example example(const std::string& prompt, const std::string& answer) {
  return {.prompt = prompt, .answer = answer, .solution = answer, .fields = Json::Object{}};
}

std::unique_ptr<Transformer> small_model(int64_t vocab, int64_t context, DType dtype,
                                         uint64_t seed = 1) {
  ModelConfig c;
  c.num_layers = 1;
  c.d_model = 16;
  c.num_heads = 2;
  c.context = context;
  c.init_std = 0.3;
  c.vocab_size = vocab;
  c.resolve();
  return std::make_unique<Transformer>(c, dtype, seed);
}

std::vector<int32_t> small_tokens() {
  std::vector<int32_t> tokens;
  for (int i = 0; i < 15; ++i) tokens.push_back(i * i % 7);
  return tokens;
}

TEST(EvaluateText, IsTheMeanOverConsecutiveWindowsHoweverTheyAreBatched) {
  const auto model = small_model(7, 4, DType::kF64);
  const std::vector<int32_t> tokens = small_tokens();
  // Windows by hand: inputs 0-3, 4-7, 8-11, 12-13.
  double loss = 0;
  NoGradGuard no_grad;
  for (size_t begin = 0; begin < 14; begin += 4) {
    TokenSequence s;
    s.tokens.assign(tokens.begin() + static_cast<long>(begin),
                    tokens.begin() + static_cast<long>(std::min<size_t>(begin + 5, 15)));
    s.loss_mask.assign(s.tokens.size(), 1);
    const PackedBatch batch = pack({&s, 1});
    const auto lp =
        token_log_probs(model->forward(batch), model->head(), batch.targets).logprob.value();
    for (const double v : lp.to_vector<double>()) loss -= v / 14;
  }
  const auto alone = make_single_communicator();
  const TokenStream stream(tokens);
  for (const int64_t budget : {1, 8, 1000})
    EXPECT_NEAR(evaluate_text(*model, stream, 0, budget, *alone), loss, 1e-14);
}

TEST(EvaluateText, IsTheSameToTheBitOnAnyNumberOfRanks) {
  const auto model = small_model(7, 4, DType::kF32);
  const TokenStream stream(small_tokens());
  const double one = evaluate_text(*model, stream, 0, 8, *make_single_communicator());
  for (const int ranks : {2, 3, 6})  // for 4 windows
    run_local_ranks(ranks, [&](Communicator& comm) {
      EXPECT_EQ(evaluate_text(*model, stream, 0, 8, comm), one) << ranks;
    });
}

TEST(EvaluateText, OfALongStreamUsesEvenlySpacedWindows) {
  const auto model = small_model(7, 4, DType::kF64);
  const auto alone = make_single_communicator();
  std::vector<int32_t> tokens, taken;
  for (int i = 0; i < 41; ++i) tokens.push_back(i * i % 7);
  // These 3 of 10 windows.
  double mean = 0;
  for (const int64_t window : {0, 3, 6}) {
    const TokenStream part({tokens.begin() + 4 * window, tokens.begin() + 4 * window + 5});
    mean += evaluate_text(*model, part, 0, 8, *alone) / 3;
  }
  const TokenStream stream(tokens);
  EXPECT_NEAR(evaluate_text(*model, stream, 12, 8, *alone), mean, 1e-14);
  const double all = evaluate_text(*model, stream, 0, 8, *alone);
  EXPECT_EQ(evaluate_text(*model, stream, 40, 8, *alone), all);
  EXPECT_NE(evaluate_text(*model, stream, 39, 8, *alone), all);
}

TEST(EvaluateText, OfNothingIsNotMeasured) {
  const auto model = small_model(7, 4, DType::kF64);
  const auto alone = make_single_communicator();
  EXPECT_TRUE(std::isnan(evaluate_text(*model, {}, 0, 8, *alone)));
  EXPECT_TRUE(std::isnan(evaluate_text(*model, TokenStream({1}), 0, 8, *alone)));
}

class EvaluateProblems : public testing::Test {
 protected:
  EvaluateProblems() {
    data_.tokenizer = make_char_tokenizer("01");
    model_ = small_model(data_.tokenizer->vocab_size(), 12, DType::kF32, 3);
    for (const char* prompt : {"0", "1", "00", "01", "10", "11", "000"})
      data_.held_out.push_back(example(prompt, ""));
    config_.sampling.max_completion_length = 3;
    config_.eval.num_samples = 4;
    config_.eval.k = {1, 4};
  }
  ProblemScores evaluate(const Correctness& correct, Communicator& comm, int64_t step = 3) {
    Engine engine(*model_, config_.rollout);
    return evaluate_problems({engine, data_, correct, config_, step}, comm);
  }
  ProblemScores evaluate(const Correctness& correct, int64_t step = 3) {
    return evaluate(correct, *make_single_communicator(), step);
  }

  // Correct if the completion has a 1.
  const Correctness has_one_{
      .name = "has_one", .threshold = 1, .reward = [](const RewardInput& in) {
        return in.completion.find('1') != std::string_view::npos ? 1.0 : 0.0;
      }};
  Dataset data_;
  std::unique_ptr<Transformer> model_;
  TrainConfig config_;
};

std::vector<std::string> names_of(const Metrics& metrics) {
  std::vector<std::string> names;
  for (const auto& [name, value] : metrics) names.push_back(name);
  return names;
}

// Names and values, to the bit.
bool same(const Metrics& a, const Metrics& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

Metrics without_failures(const Metrics& metrics) {
  Metrics out;
  for (const auto& [name, value] : metrics)
    if (!name.ends_with("failed")) out.add(name, value);
  return out;
}

TEST_F(EvaluateProblems, GradesGreedyAndSampledCompletions) {
  const ProblemScores scores = evaluate(has_one_);
  EXPECT_EQ(names_of(scores.metrics),
            (std::vector<std::string>{
                "pass@1", "sampled_pass@1", "sampled_pass@4", "maj@1", "maj@4", "pass@1_stderr",
                "problems", "eval/mean_length", "eval/clipped_ratio", "eval/context_ratio",
                "eval/failed", "sampled_pass@1_stderr", "sampled_pass@4_stderr", "maj@1_stderr",
                "maj@4_stderr", "eval/sampled_mean_length", "eval/sampled_clipped_ratio",
                "eval/sampled_context_ratio", "eval/sampled_failed"}));
  EXPECT_LE(scores.metrics.at("sampled_pass@1"), scores.metrics.at("sampled_pass@4"));
  ASSERT_EQ(scores.samples.size(), 7u);
  double right = 0;
  for (const ProblemResult& p : scores.samples) {
    EXPECT_EQ(p.correct, p.completion.find('1') != std::string::npos);
    right += p.correct == true;
  }
  EXPECT_DOUBLE_EQ(scores.metrics.at("pass@1"), right / 7);
  // Greedy completions depend on neither seed nor step.
  config_.seed = 9;
  const ProblemScores other = evaluate(has_one_, 4);
  for (size_t i = 0; i < other.samples.size(); ++i)
    EXPECT_EQ(other.samples[i].completion, scores.samples[i].completion);
}

TEST_F(EvaluateProblems, OfSftHaveTheMeanLossOverAllTokensOfTheSolutions) {
  config_.batch.trainer = TrainerType::kSft;
  config_.eval = {};
  data_.held_out = {example("0", "1"), example("01", "1010"), example("111", ""),
                    example("10101", "0101011111")};
  config_.data.too_long = TooLong::kTruncate;  // the last one is longer than 12
  double loss = 0, tokens = 0;
  {
    NoGradGuard no_grad;
    for (const Example& e : data_.held_out) {
      const TokenSequence s = supervised_sequence(e, *data_.tokenizer, 12, config_.data.too_long);
      const PackedBatch batch = pack({&s, 1});
      const auto lp =
          token_log_probs(model_->hidden_at_targets(batch), model_->head(), batch.targets)
              .logprob.value();
      for (const double value : lp.to_vector<double>()) loss -= value;
      tokens += static_cast<double>(s.tokens.size() - e.prompt.size());
    }
  }
  EXPECT_EQ(tokens, 2 + 5 + 1 + 8);
  const ProblemScores one = evaluate(has_one_);
  EXPECT_EQ(names_of(one.metrics),
            (std::vector<std::string>{"pass@1", "val_loss", "pass@1_stderr", "problems",
                                      "eval/mean_length", "eval/clipped_ratio",
                                      "eval/context_ratio", "eval/failed"}));
  EXPECT_NEAR(one.metrics.at("val_loss"), loss / tokens,
              1e-13 * loss);  // the same f32 numbers, summed
  for (const int64_t budget : {1, 9, 1000})
    for (const int ranks : {1, 2, 3, 5}) {
      config_.batch.micro_batch_tokens = budget;
      run_local_ranks(ranks, [&](Communicator& comm) {
        EXPECT_TRUE(same(evaluate(has_one_, comm).metrics, one.metrics)) << budget << " " << ranks;
      });
    }
  config_.batch.trainer = TrainerType::kGrpo;
  EXPECT_FALSE(evaluate(has_one_).metrics.find("val_loss"));
}

TEST_F(EvaluateProblems, SampleWithTheOptionsOfTheEvaluation) {
  const Metrics of_run = evaluate(has_one_).metrics;
  config_.eval.temperature = config_.sampling.temperature;
  config_.eval.top_p = 1;
  config_.eval.max_completion_length = 3;
  EXPECT_TRUE(same(evaluate(has_one_).metrics, of_run));
  config_.eval.max_completion_length = 2;
  const Metrics shorter = evaluate(has_one_).metrics;
  EXPECT_LE(shorter.at("eval/mean_length"), 2);
  EXPECT_LE(shorter.at("eval/sampled_mean_length"), 2);
  // Samples without randomness are greedy, and vote as one.
  for (const bool by_temperature : {true, false}) {
    config_.eval.temperature = by_temperature ? 1e-4 : 1;
    config_.eval.top_p = by_temperature ? 1 : 1e-6;
    const Metrics sure = evaluate(has_one_).metrics;
    for (const char* name : {"sampled_pass@1", "sampled_pass@4", "maj@1", "maj@4"}) {
      EXPECT_EQ(sure.at(name), sure.at("pass@1")) << name;
      EXPECT_DOUBLE_EQ(sure.at(str(name, "_stderr")), sure.at("pass@1_stderr")) << name;
    }
    EXPECT_EQ(sure.at("eval/sampled_mean_length"), sure.at("eval/mean_length"));
  }
}

// The most frequent of two answers is that of at least three of five samples.
TEST_F(EvaluateProblems, CountTheMostFrequentAnswer) {
  Correctness first = has_one_;
  first.answer = [](std::string_view completion) {
    return std::string(completion.starts_with("1") ? "1" : "other");
  };
  first.reward = [](const RewardInput& in) { return in.completion.starts_with("1") ? 1.0 : 0.0; };
  config_.eval.num_samples = 5;
  config_.eval.k = {5};
  const ProblemScores scores = evaluate(first);
  double right = 0;
  for (const double rate : scores.pass_rates) right += rate > 0.5;
  EXPECT_DOUBLE_EQ(scores.metrics.at("maj@5"), right / 7);
}

// Every second completion cannot be judged; the others are right.
TEST_F(EvaluateProblems, PassRatesAreThoseOfTheSamplesThatCanBeJudged) {
  Correctness second = has_one_;
  second.reward = [calls = 0](const RewardInput&) mutable {
    return ++calls % 2 == 0 ? 1.0 : kNotApplicable;
  };
  const std::vector<double> rates = evaluate(second).pass_rates;
  EXPECT_EQ(std::ranges::count(rates, 1.0), std::ssize(rates));
}

// Also with more ranks than problems, and with verdicts that are NaN.
TEST_F(EvaluateProblems, GiveTheSameToTheBitOnAnyNumberOfRanks) {
  const Correctness sometimes{
      .name = "sometimes", .threshold = 0.5, .reward = [](const RewardInput& in) {
        if (in.example.prompt == "01") return std::numeric_limits<double>::quiet_NaN();
        return static_cast<double>(in.completion.size()) / 3 -
               (in.completion.find('1') != std::string_view::npos ? 0.0 : 0.4);
      }};
  const ProblemScores one = evaluate(sometimes);
  size_t length = 0;
  for (const ProblemResult& p : one.samples) length += p.completion.size();
  EXPECT_GT(length, 7u) << "completions that no other could stand for";
  const double sampled = one.metrics.at("sampled_pass@1");
  EXPECT_TRUE(sampled > 0 && sampled < 1) << "a score that depends on every sample";
  for (const int ranks : {1, 2, 3, 9})
    run_local_ranks(ranks, [&](Communicator& comm) {
      const ProblemScores scores = evaluate(sometimes, comm);
      EXPECT_TRUE(same(scores.metrics, one.metrics)) << ranks;
      ASSERT_EQ(scores.samples.size(), one.samples.size());
      for (size_t i = 0; i < one.samples.size(); ++i) {
        EXPECT_EQ(scores.samples[i].prompt, one.samples[i].prompt);
        EXPECT_EQ(scores.samples[i].completion, one.samples[i].completion);
        EXPECT_EQ(scores.samples[i].correct, one.samples[i].correct);
        EXPECT_EQ(one.samples[i].correct.has_value(), one.samples[i].prompt != "01");
      }
    });
}

// Correct if the completion has a 1; everything is wrong in lists of one completion.
constexpr const char* kJudge = R"(
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps([{"index": one["index"], "error": "no idea"} if one["prompt"] == "01" else
                      {"index": one["index"], "reward": "1" in one["completion"] and len(asked) > 1}
                      for one in asked]).replace("true", "1").replace("false", "0"), flush=True)
)";

TEST_F(EvaluateProblems, ProgramsJudgeAllCompletionsAtOnce) {
  const TempDir dir;
  write_file(dir.path("judge.py"), kJudge);
  config_.rewards = {{.name = "command",
                      .program = {.run = "python3 judge.py", .directory = dir.path("")},
                      .batch = true}};
  const Correctness own = correctness_of(config_.eval.correct, config_.rewards, nullptr);
  Correctness built_in = has_one_;
  built_in.reward = [this](const RewardInput& in) {
    return in.example.prompt == "01" ? std::numeric_limits<double>::quiet_NaN()
                                     : has_one_.reward(in);
  };
  const ProblemScores one = evaluate(built_in);
  EXPECT_GT(one.metrics.at("sampled_pass@4"), 0);
  const ExpectLog failures(
      "evaluation: 1 of 7 completions could not be judged, and count in no score; the first: "
      "reward command: it reports: 'no idea'; hint: workers.log of a run"),
      samples("evaluation: 4 of 28 completions could not be judged");
  const Metrics failed = evaluate(own).metrics;
  EXPECT_TRUE(same(without_failures(failed), without_failures(one.metrics)));
  EXPECT_EQ(failed.at("eval/failed"), 1);
  EXPECT_EQ(failed.at("eval/sampled_failed"), 4);
  EXPECT_EQ(failed_count(failed), 5);
  EXPECT_EQ(failed_count(one.metrics), 0) << "a reward that does not apply is no failure";
  run_local_ranks(2, [&](Communicator& comm) {
    EXPECT_TRUE(
        same(evaluate(correctness_of(config_.eval.correct, config_.rewards, nullptr), comm).metrics,
             failed));
  });
}

// Turns end at once. Answers in reverse order, and fails the dialogues of some prompts.
class FailsSome final : public Environment {
 public:
  explicit FailsSome(std::string prompts) : prompts_(std::move(prompts)) {}
  void submit(const Example& example, const Trajectory& trajectory, int64_t) override {
    const bool fails = prompts_.find(" " + example.prompt + " ") != prompts_.npos;
    replies_.insert(replies_.begin(), {.index = trajectory.index,
                                       .done = true,
                                       .error = fails ? "lost " + example.prompt : "",
                                       .messages = {}});
  }
  std::vector<EnvironmentReply> poll(bool) override { return std::exchange(replies_, {}); }

 private:
  const std::string prompts_;
  std::vector<EnvironmentReply> replies_;
};

TEST_F(EvaluateProblems, DialoguesThatTheEnvironmentFailsAreNoResults) {
  config_.sampling.stop_strings = {"0", "1"};
  const auto evaluate_with = [&](const std::string& failing, const Correctness& correct,
                                 Communicator& comm) {
    Engine engine(*model_, config_.rollout);
    FailsSome environment(failing);
    ProblemEvaluation evaluation{engine, data_, correct, config_, 3};
    evaluation.dialogue.environment = &environment;
    return evaluate_problems(evaluation, comm);
  };
  const auto alone = make_single_communicator();
  const Correctness short_or_long{
      .name = "wrong", .threshold = 1, .reward = [](const RewardInput& in) {
        return in.example.prompt.size() == 2 ? 0.0 : 1.0;
      }};
  const Metrics whole = evaluate_with("", short_or_long, *alone).metrics;
  EXPECT_DOUBLE_EQ(whole.at("pass@1"), 3.0 / 7);
  EXPECT_EQ(failed_count(whole), 0);
  const ExpectLog others("completions could not be judged"),
      warning(
          "evaluation: 3 of 7 completions could not be judged, and count in no score; the first: "
          "environment: lost 00; hint: ");
  const ProblemScores scores = evaluate_with(" 00 01 11 ", short_or_long, *alone);
  EXPECT_DOUBLE_EQ(scores.metrics.at("pass@1"), 3.0 / 4);
  EXPECT_EQ(scores.metrics.at("problems"), 4) << "those that were judged";
  EXPECT_EQ(scores.metrics.at("eval/failed"), 3);
  EXPECT_EQ(scores.metrics.at("eval/sampled_failed"), 12);
  EXPECT_DOUBLE_EQ(scores.metrics.at("maj@4"), 3.0 / 4);
  EXPECT_FALSE(scores.samples[2].correct.has_value());
  EXPECT_TRUE(std::isnan(scores.pass_rates[2]) && scores.pass_rates[4] == 0);
  const Evaluation reported{{.measure = "pass@1 (wrong)", .metrics = scores.metrics}, 3};
  EXPECT_NE(evaluation_text(3, reported).find(" (4 problems, 15 completions failed, mean length "),
            std::string::npos)
      << evaluation_text(3, reported);
  EXPECT_EQ(evaluation_json(reported).at("eval/failed").dump(), "3");
  for (const int ranks : {2, 3, 9})
    run_local_ranks(ranks, [&](Communicator& comm) {
      EXPECT_TRUE(same(evaluate_with(" 00 01 11 ", short_or_long, comm).metrics, scores.metrics));
    });
  const Metrics none = evaluate_with(" 0 1 00 01 10 11 000 ", short_or_long, *alone).metrics;
  EXPECT_TRUE(std::isnan(none.at("pass@1")) && none.at("problems") == 0);
  EXPECT_EQ(none.at("eval/failed"), 7);
}

TEST_F(EvaluateProblems, SkipProblemsToWhichTheRewardDoesNotApply) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Correctness some{.name = "some", .threshold = 1, .reward = [&](const RewardInput& in) {
                           return in.example.prompt.size() == 1 ? nan : in.example.prompt == "00";
                         }};
  const ProblemScores scores = evaluate(some);
  for (const char* name : {"pass@1", "sampled_pass@1", "sampled_pass@4"})
    EXPECT_EQ(scores.metrics.at(name), 1.0 / 5) << name;
  // One of the five that can be judged: sqrt(p (1 - p) / (n - 1)).
  EXPECT_DOUBLE_EQ(scores.metrics.at("pass@1_stderr"), std::sqrt(0.2 * 0.8 / 4));
  EXPECT_EQ(scores.metrics.at("problems"), 5) << "those that were judged";
  EXPECT_EQ(failed_count(scores.metrics), 0);
  const Correctness none{
      .name = "none", .threshold = 1, .reward = [&](const RewardInput&) { return nan; }};
  const Metrics unmeasured = evaluate(none).metrics;
  for (const char* name : {"pass@1", "pass@1_stderr", "sampled_pass@1", "sampled_pass@4"})
    EXPECT_TRUE(std::isnan(unmeasured.at(name))) << name;
}

TEST(CorrectnessRule, IsTheTasksCheckerElseTheOnlyRewardElseAnExactMatch) {
  TrainConfig config;
  const Example e = example("p", "42");
  const auto judge = [&](const std::string& completion, const Task* task = nullptr) {
    return correctness_of(config.eval.correct, config.rewards, task).judge({e, completion});
  };
  EXPECT_EQ(judge("42"), 1);
  EXPECT_EQ(judge("42.0"), 0);
  EXPECT_EQ(correctness_of(config.eval.correct, config.rewards, nullptr).measure(),
            "pass@1 (exact_match)");
  config.rewards = {{.name = "numeric", .weight = 0.1, .pattern = ""}};
  EXPECT_EQ(judge("42.0"), 1);
  const Example parity = example("10=", "1");
  config.rewards.push_back({.name = "format", .weight = 5, .pattern = "x"});
  const Correctness task =
      correctness_of(config.eval.correct, config.rewards, &find_task("parity"));
  EXPECT_EQ(task.judge({parity, "11:1"}), 1);
  EXPECT_EQ(task.rule(), "task >= 1");
  EXPECT_THROW_WITH(judge("42"), InputError, "there are 2 rewards (numeric, format)");
}

TEST(CorrectnessRule, IsTheNamedRewardFromItsThresholdOn) {
  TrainConfig config;
  config.rewards = {{.name = "format", .weight = 1, .pattern = "a"},
                    {.name = "numeric", .weight = 1, .pattern = ""},
                    {.name = "format", .weight = 1, .pattern = "b"}};
  config.eval.correct.reward = "format_2";
  const Example e = example("p", "x");  // no number: numeric does not apply
  const Correctness second = correctness_of(config.eval.correct, config.rewards, nullptr);
  EXPECT_EQ(second.measure(), "pass@1 (format_2)");
  EXPECT_EQ(second.judge({e, "b"}), 1);
  EXPECT_EQ(second.judge({e, "a"}), 0);
  config.eval.correct.reward = "numeric";
  EXPECT_TRUE(
      std::isnan(correctness_of(config.eval.correct, config.rewards, nullptr).judge({e, "1"})));
  config.eval.correct.threshold = 0.25;
  EXPECT_EQ(correctness_of(config.eval.correct, config.rewards, nullptr).measure(),
            "pass@1 (numeric >= 0.25)");
  const Correctness half{.name = "h", .threshold = 0.5, .reward = [](const RewardInput& in) {
                           return in.completion == "half" ? 0.5 : 0.49;
                         }};
  EXPECT_EQ(half.judge({e, "half"}), 1);
  EXPECT_EQ(half.judge({e, "less"}), 0);
  config.rewards.clear();
  EXPECT_THROW_WITH(correctness_of(config.eval.correct, config.rewards, nullptr), InputError,
                    "no reward is called 'numeric'; there are none");
}

// ---- In runs -----------------------------------------------------------------------------------

// A line of a log without times, which differ between runs.
std::string without_times(const Json& line) {
  Json out;
  for (const auto& [name, value] : line.as_object())
    if (name != "time" && name != "time/evaluation") out.set(name, value);
  return out.dump();
}

std::string evaluation_lines(const std::string& path) {
  std::string out;
  for (const Json& line : json_lines(path))
    if (line.find("eval") != nullptr) out += without_times(line) + "\n";
  return out;
}

// At a learning rate of 0 every number of ranks has the same weights.
TEST(EvaluationOfRuns, LogsTheSameOnAnyNumberOfRanks) {
  const std::string problems = std::string(kSmallModel) + kSmallData;
  for (const std::string& yaml :
       {problems + kSmallSft, problems + kSmallGrpo, std::string(kSmallModel) + kSmallPretrain}) {
    const TempDir dir;
    const ExpectLog idle_ranks(" or fewer ranks");
    std::string metrics, completions;
    for (const char* ranks : {"1", "2", "3", "9"}) {  // for 8 problems
      SCOPED_TRACE(yaml + ranks);
      const std::string run = train_new(small_plan(
          dir, "run", yaml,
          {"learning_rate=0", "steps=2", "eval.every=1", "eval.num_samples=3", "eval.k=[1, 3]",
           "eval.correct.threshold=0.5", std::string("ranks=") + ranks}));
      const std::string lines = evaluation_lines(run + "/metrics.jsonl");
      if (metrics.empty()) {
        metrics = lines;
        completions = evaluation_lines(run + "/completions.jsonl");
        EXPECT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), 3);
      }
      EXPECT_EQ(lines, metrics);
      EXPECT_EQ(evaluation_lines(run + "/completions.jsonl"), completions);
      for (const Json& line : json_lines(run + "/metrics.jsonl"))
        if (line.find("eval") != nullptr) {
          EXPECT_GE(metric(line, "time/evaluation"), 0);
        }
    }
  }
}

TEST(EvaluationOfRuns, ReportsTheCriterion) {
  const TempDir dir;
  const auto train = [&](const std::vector<std::string>& overrides, Recorder& recorder) {
    cohort::Run run = cohort::Run::create(
        small_plan(dir, "run", std::string(kSmallModel) + kSmallData + kSmallGrpo, overrides));
    const std::atomic<bool> stop{false};
    const RunResult result = run.execute(recorder, stop);
    return std::pair{result.measure,
                     json_lines(run.dir() + "/metrics.jsonl")[0].at("correct").as_string()};
  };
  Recorder first, second;
  EXPECT_EQ(train({}, first), (std::pair<std::string, std::string>{"pass@1 (task)", "task >= 1"}));
  EXPECT_EQ(first.messages.at(0).find("step 0: pass@1 (task) 0."), 0u) << first.messages[0];
  EXPECT_NE(first.messages.back().find("before GRPO (held-out pass@1 (task) 0."), std::string::npos)
      << first.messages.back();
  EXPECT_EQ(train({"eval.correct.reward=format", "eval.correct.threshold=0.5"}, second),
            (std::pair<std::string, std::string>{"pass@1 (format >= 0.5)", "format >= 0.5"}));
  EXPECT_EQ(second.messages.at(0).find("step 0: pass@1 (format >= 0.5) 0."), 0u)
      << second.messages[0];
}

// A reward that applies to no held-out problem: no score, no best step, no early end, but the run
// continues.
TEST(EvaluationOfRuns, WithoutAScoreWarnOnceAndResume) {
  const TempDir dir;
  std::string lines;
  for (int i = 0; i < 40; ++i) lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"x\"}\n");
  write_file(dir.path("words.jsonl"), lines);
  const RunPlan plan = small_plan(dir, "run",
                                  std::string(kSmallModel) + kSmallSft +
                                      "data: {jsonl: {path: words.jsonl, held_out_fraction: 0.5}}\n"
                                      "rewards: [{name: numeric}]\n",
                                  {"eval.every=2", "eval.stop_at=0.01", "checkpoint.every=2"});
  std::string run;
  {
    const ExpectLog warning(
        "pass@1 (numeric) is not measured: numeric applies to none of the 8 held-out problems");
    run = train_interrupted(plan, 3);
  }
  const TrainState state = load_state(find_checkpoint(run));
  EXPECT_EQ(state.best_step, 2);  // by the loss
  EXPECT_TRUE(std::isnan(state.best));
  EXPECT_EQ(state.evaluated_step, 2);
  Recorder recorder;
  const std::atomic<bool> stop{false};
  const ExpectLog warning("is not measured");
  const RunResult result = cohort::Run::resume(run, {}).execute(recorder, stop);
  EXPECT_TRUE(std::isnan(result.before) && std::isnan(result.after));
  EXPECT_EQ(load_state(find_checkpoint(run)).step, 6);
  EXPECT_EQ(recorder.messages.back().find("step 6: pass@1 (numeric) not measured, val_loss "), 0u);
  EXPECT_NE(recorder.messages.back().find(" (0 problems, mean length "), std::string::npos);
  const auto metrics = json_lines(run + "/metrics.jsonl");
  EXPECT_TRUE(metrics.front().at("pass@1").is_null());
  EXPECT_TRUE(json_lines(run + "/completions.jsonl").front().at("correct").is_null());
  EXPECT_EQ(std::filesystem::read_symlink(run + "/checkpoints/best"), "step-00000006");
}

// Nothing is sampled to be compared with answers that there are none of, unless `eval` asks for it.
TEST(EvaluationOfRuns, OfTextsWithoutAnswersAreTheirLoss) {
  const TempDir dir;
  std::string lines;
  for (int i = 0; i < 40; ++i) lines += str("{\"text\": \"", i, "=x\"}\n");
  write_file(dir.path("words.jsonl"), lines);
  Recorder recorder;
  const auto train = [&](const std::string& name, std::vector<std::string> keys) {
    keys.insert(keys.end(), {"eval.every=2", "checkpoint.every=2"});
    const RunPlan plan =
        small_plan(dir, name,
                   std::string(kSmallModel) + kSmallSft +
                       "data: {jsonl: {path: words.jsonl}, held_out_fraction: 0.5}\n",
                   keys);
    const std::atomic<bool> stop{false};
    recorder = {};
    cohort::Run run = cohort::Run::create(plan);
    return run.execute(recorder, stop);
  };
  const RunResult result = train("loss", {});
  EXPECT_EQ(result.measure, "validation loss");
  EXPECT_EQ(result.before, -result.loss_before);
  EXPECT_GT(result.after, result.before);
  EXPECT_EQ(recorder.messages.at(0).find("step 0: val_loss "), 0u) << recorder.messages[0];
  const Json first = json_lines(result.run_dir + "/metrics.jsonl").front();
  EXPECT_EQ(first.find("pass@1"), nullptr);
  EXPECT_EQ(first.find("problems"), nullptr);
  const ExpectLog warning("pass@1 (exact_match) is not measured");
  EXPECT_EQ(train("asked", {"eval.num_samples=1", "eval.k=[1]"}).measure, "pass@1 (exact_match)");
}

TEST(EvaluationOfRuns, WithoutHeldOutTextAreSkipped) {
  const TempDir dir;
  const auto plan = [&](const std::string& name) {
    return small_plan(dir, name, std::string(kSmallModel) + kSmallPretrain,
                      {"data.held_out_fraction=0", "checkpoint.every=1"});
  };
  const std::string whole = train_new(plan("whole"));
  const std::string run = train_interrupted(plan("run"), 3);
  Recorder recorder;
  const std::atomic<bool> stop{false};
  const RunResult result = cohort::Run::resume(run, {}).execute(recorder, stop);
  EXPECT_TRUE(std::isnan(result.before) && std::isnan(result.after));
  EXPECT_TRUE(recorder.messages.empty());
  EXPECT_TRUE(checkpoint_bytes(run) == checkpoint_bytes(whole));
  EXPECT_EQ(json_lines(run + "/metrics.jsonl").size(), 6u);
  for (const Json& line : json_lines(run + "/metrics.jsonl")) EXPECT_EQ(line.find("eval"), nullptr);
  cohort::Run again = cohort::Run::resume(run, {});
  EXPECT_TRUE(std::isnan(again.execute(recorder, stop).after));
}

TEST(EvaluationOfRuns, WithoutHeldOutProblemsAreSkipped) {
  const ExpectLog random("starts from random weights");
  for (const char* trainer : {kSmallSft, kSmallGrpo}) {
    const TempDir dir;
    std::string lines;
    for (int i = 0; i < 40; ++i) lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"1\"}\n");
    write_file(dir.path("sums.jsonl"), lines);
    const auto plan = [&](const std::string& name) {
      return small_plan(dir, name,
                        std::string(kSmallModel) + trainer +
                            "data: {jsonl: {path: sums.jsonl, held_out_fraction: 0}}\n",
                        {"checkpoint.every=1", "rewards=[{name: numeric}]"});
    };
    const std::string whole = train_new(plan("whole"));
    const std::string run = train_interrupted(plan("run"), 2);
    Recorder recorder;
    const std::atomic<bool> stop{false};
    const RunResult result = cohort::Run::resume(run, {}).execute(recorder, stop);
    EXPECT_EQ(result.measure, "");
    EXPECT_TRUE(checkpoint_bytes(run) == checkpoint_bytes(whole));
    for (const Json& line : json_lines(run + "/metrics.jsonl"))
      EXPECT_EQ(line.find("eval"), nullptr);
    for (const std::string& message : recorder.messages)
      EXPECT_EQ(message.find("pass@1"), std::string::npos) << message;
  }
}

// Held-out problems are only evaluated, never trained on.
TEST(EvaluationOfRuns, OfSftLogTheLossAndChangeNoBitOfTheTraining) {
  const TempDir dir;
  const auto plan = [&](const std::string& name, const std::vector<std::string>& overrides) {
    return small_plan(dir, name, std::string(kSmallModel) + kSmallData + kSmallSft, overrides);
  };
  const std::string often = train_new(plan("often", {"eval.every=1", "model.dropout=0.1"})),
                    seldom = train_new(plan("seldom", {"model.dropout=0.1"}));
  EXPECT_TRUE(checkpoint_bytes(often) == checkpoint_bytes(seldom));
  EXPECT_TRUE(checkpoint_bytes(often, "training/optimizer.safetensors") ==
              checkpoint_bytes(seldom, "training/optimizer.safetensors"));
  std::vector<double> losses;
  for (const Json& line : json_lines(often + "/metrics.jsonl"))
    if (line.find("eval") != nullptr) losses.push_back(metric(line, "val_loss"));
  ASSERT_EQ(losses.size(), 7u);
  EXPECT_NEAR(losses[0], std::log(13), 0.5);  // vocabulary of 13, before training
  EXPECT_LT(losses[6], losses[0]);
  Recorder recorder;
  const std::atomic<bool> stop{false};
  const RunResult result = cohort::Run::resume(often, {}).execute(recorder, stop);
  EXPECT_EQ(result.loss_before, losses[0]);
  EXPECT_EQ(result.loss_after, losses[6]);
}

// Scores of another criterion are not comparable with the best one.
TEST(EvaluationOfRuns, ForgetTheBestStepIfTheCriterionChanges) {
  const TempDir dir;
  const std::string run = train_interrupted(
      small_plan(dir, "run", std::string(kSmallModel) + kSmallData + kSmallSft,
                 {"rewards=[{name: format, pattern: '.*'}]", "eval.correct.reward=format"}),
      3);
  EXPECT_EQ(load_state(find_checkpoint(run)).best, 1);
  train_rest(run, {"eval.correct.reward="});
  const TrainState state = load_state(find_checkpoint(run));
  EXPECT_EQ(state.best_step, 6);
  EXPECT_LT(state.best, 1);
}

}  // namespace
}  // namespace cohort::test
