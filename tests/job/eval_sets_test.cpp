// Evaluation sets in runs: their metrics, their independence of each other and of the training, the
// best checkpoint by a set, and what is refused before a run.
#include <cmath>
#include <map>

#include "job/preview.h"
#include "sys/files.h"
#include "tests/job/small_runs.h"
#include "tests/support/chat_tokenizer.h"

namespace cohort::test {
namespace {

constexpr const char* kSetA = "{name: a, path: a.jsonl, correct: {reward: format}}";
constexpr const char* kSetB =
    "{name: b, path: b.jsonl, prompt: '{x}+{y}=', answer: '{sum}', num_samples: 2, k: [2], "
    "temperature: 0.5, top_p: 0.9, max_completion_length: 2}";

class EvalSets : public testing::Test {
 protected:
  EvalSets() {
    std::string a, b;
    for (int i = 0; i < 7; ++i) {
      a += str("{\"prompt\": \"", i, "+1", i, "=\", \"answer\": \"", i + 10 + i, "\"}\n");
      b += str("{\"x\": ", i, ", \"y\": 2, \"sum\": ", i + 2, "}\n");
    }
    write_file(dir_.path("a.jsonl"), a);
    write_file(dir_.path("b.jsonl"), b);
  }
  RunPlan plan(const std::string& name, const std::string& sets,
               std::vector<std::string> overrides = {}) {
    const std::string text = std::string(kSmallModel) + kSmallData + kSmallGrpo +
                             "eval: {size: 8, every: 1, num_samples: 4, k: [1, 4], sets: [" + sets +
                             "]}\n";
    return small_plan(dir_, name,
                      text.substr(0, text.find("eval: {size: 8}\n")) +
                          text.substr(text.find("eval: {size: 8}\n") + 16),
                      overrides);
  }
  // The names and numbers of a run's evaluations that begin so.
  static std::string evaluations(const std::string& run, const std::string& prefix) {
    std::string out;
    for (const Json& line : json_lines(run + "/metrics.jsonl"))
      if (line.find("eval") != nullptr)
        for (const auto& [name, value] : line.as_object())
          if (name.starts_with(prefix)) out += str(name, " ", value.dump(), "\n");
    return out;
  }
  const TempDir dir_;
};

TEST_F(EvalSets, ChangeNoBitOfTheTrainingNorOfEachOther) {
  const std::string none = train_new(plan("none", "")), a = train_new(plan("a", kSetA)),
                    both = train_new(plan("both", str(kSetB, ", ", kSetA)));
  EXPECT_TRUE(checkpoint_bytes(a) == checkpoint_bytes(none));
  EXPECT_TRUE(checkpoint_bytes(both) == checkpoint_bytes(none));
  EXPECT_EQ(evaluations(both, "sampled_pass"), evaluations(none, "sampled_pass"));
  EXPECT_EQ(evaluations(both, "a/"), evaluations(a, "a/"));
  const Json first = json_lines(both + "/metrics.jsonl")[0];
  for (const char* name :
       {"pass@1", "pass@1_stderr", "sampled_pass@1", "sampled_pass@4", "sampled_pass@4_stderr",
        "maj@1", "maj@4", "maj@4_stderr", "mean_length", "clipped_ratio", "sampled_mean_length"})
    EXPECT_NE(first.find(str("a/", name)), nullptr) << name;
  EXPECT_EQ(first.at("a/problems").dump(), "7");
  EXPECT_EQ(first.find("b/maj@4"), nullptr) << "its own k";
  EXPECT_LE(metric(first, "b/sampled_mean_length"), 2);
  // Equal problems of another name have other samples.
  const std::string twin =
      train_new(plan("twin", str(kSetA, ", {name: c, path: a.jsonl, correct: {reward: format}}")));
  std::string other = evaluations(twin, "c/");
  EXPECT_EQ(evaluations(twin, "a/"), evaluations(a, "a/"));
  for (size_t at = 0; (at = other.find("c/", at)) != other.npos;) other[at] = 'a';
  EXPECT_NE(other, evaluations(a, "a/"));
}

// At a learning rate of 0 every number of ranks has the same weights.
TEST_F(EvalSets, HaveTheSameScoresOnAnyNumberOfRanks) {
  const std::string sets = str(kSetA, ", ", kSetB);
  const std::string one = train_new(plan("one", sets, {"learning_rate=0"})),
                    two = train_new(plan("two", sets, {"learning_rate=0", "ranks=2"}));
  EXPECT_GT(evaluations(one, "a/").size(), 100u);
  for (const char* prefix : {"a/", "b/", "pass@", "sampled_", "maj@"})
    EXPECT_EQ(evaluations(two, prefix), evaluations(one, prefix));
}

TEST_F(EvalSets, OneOfThemChoosesTheBestCheckpointAcrossAResume) {
  const std::string sets = str(kSetB, ", ", kSetA);
  const std::vector<std::string> by_a = {"eval.best=a", "learning_rate=0.03"};
  const std::string whole = train_new(plan("whole", sets, by_a));
  int64_t best_step = -1;
  double best = -1;
  for (const Json& line : json_lines(whole + "/metrics.jsonl"))
    if (line.find("eval") != nullptr && metric(line, "a/pass@1") > best) {
      best = metric(line, "a/pass@1");
      best_step = line.at("step").as_int();
    }
  EXPECT_GT(best_step, 0) << "a step that training has made the best";
  const TrainState state = load_state(find_checkpoint(whole));
  EXPECT_EQ(state.best_step, best_step);
  EXPECT_EQ(state.best, best);
  const std::string run = train_interrupted(plan("run", sets, by_a), 2);
  train_rest(run);
  EXPECT_TRUE(checkpoint_bytes(run) == checkpoint_bytes(whole));
  EXPECT_EQ(load_state(find_checkpoint(run)).best_step, best_step);
  EXPECT_EQ(evaluations(run, "a/"), evaluations(whole, "a/"));
  EXPECT_EQ(std::filesystem::read_symlink(run + "/checkpoints/best"),
            std::filesystem::read_symlink(whole + "/checkpoints/best"));
  // Scores of another set are not comparable: those before the resume do not count.
  const std::string other = train_interrupted(plan("other", sets, by_a), 2);
  EXPECT_LT(load_state(find_checkpoint(other)).best_step, 2);
  train_rest(other, {"eval.best=b"});
  EXPECT_GE(load_state(find_checkpoint(other)).best_step, 2);
  double best_b = -1;
  for (const Json& line : json_lines(other + "/metrics.jsonl"))
    if (line.find("eval") != nullptr && line.at("step").as_int() >= 2)
      best_b = std::max(best_b, metric(line, "b/pass@1"));
  EXPECT_EQ(load_state(find_checkpoint(other)).best, best_b);
}

TEST_F(EvalSets, AreReportedInLinesOfTheirOwn) {
  Recorder recorder;
  const std::atomic<bool> stop{false};
  cohort::Run::create(plan("run", str(kSetA, ", ", kSetB))).execute(recorder, stop);
  EXPECT_EQ(recorder.messages.at(0).find("step 0: pass@1 (task) "), 0u);
  EXPECT_EQ(recorder.messages.at(1).find("step 0: a/pass@1 (format) "), 0u);
  EXPECT_NE(recorder.messages[1].find(", maj@4 "), std::string::npos);
  EXPECT_NE(recorder.messages[1].find(" (7 problems, mean length "), std::string::npos);
  EXPECT_EQ(recorder.messages.at(2).find("step 0: b/pass@1 (task) "), 0u);
  EXPECT_NE(recorder.messages.back().find("\n  a/pass@1 (format) 0."), std::string::npos)
      << recorder.messages.back();
}

// The completions of the first problems of each set are logged, as those of the held-out ones are.
TEST_F(EvalSets, HaveTheirCompletionsLogged) {
  const std::string run = train_new(plan("run", str(kSetB, ", ", kSetA)));
  std::map<std::string, std::vector<std::string>> first_prompts;
  for (const Json& line : json_lines(run + "/completions.jsonl")) {
    if (line.find("eval") == nullptr || line.at("step").as_int() != 0) continue;
    const std::string* set = line.find_text("set");
    first_prompts[set == nullptr ? "" : *set].push_back(line.at("prompt").as_string());
    EXPECT_TRUE(line.at("correct").is_bool());
    EXPECT_NE(line.find("completion"), nullptr);
  }
  ASSERT_EQ(first_prompts.size(), 3u);
  EXPECT_EQ(first_prompts[""].size(), 8u);
  EXPECT_EQ(first_prompts["b"],
            (std::vector<std::string>{"0+2=", "1+2=", "2+2=", "3+2=", "4+2=", "5+2=", "6+2="}));
  ASSERT_EQ(first_prompts["a"].size(), 7u);
  EXPECT_EQ(first_prompts["a"][6], "6+16=");
}

TEST_F(EvalSets, OfFilesThatHaveChangedAreRefusedUntilAccepted) {
  const std::string run = train_interrupted(plan("run", str(kSetB, ", ", kSetA)), 2),
                    file = dir_.path("a.jsonl"), text = read_file(file),
                    before = file_checksum(file);
  write_file(file, text + text);
  const std::string after = file_checksum(file);
  EXPECT_THROW_WITH(train_rest(run), InputError,
                    "eval.sets[1].path: " + file +
                        " is not the file that was meant: its fingerprint is " + after +
                        ", expected " + before +
                        "; hint: restore the file, or accept this one with "
                        "eval.sets.1.fingerprint=" +
                        after);
  Recorder recorder;
  std::atomic<bool> stop{false};
  recorder.on_step = [&](int64_t) { stop = true; };
  cohort::Run::resume(run, std::vector<std::string>{"eval.sets.1.fingerprint=" + after})
      .execute(recorder, stop);
  write_file(file, text);
  EXPECT_THROW_WITH(train_rest(run), InputError, "expected " + after);  // the acceptance is stored
  write_file(file, text + text);
  train_rest(run);
  // A new run is checked against the key only.
  EXPECT_THROW_WITH(train_new(plan("new", str(kSetA), {"eval.sets.0.fingerprint=" + before})),
                    InputError, "eval.sets[0].path: " + file + " is not the file that was meant");
  train_new(plan("new", kSetA));
}

TEST_F(EvalSets, AreEnoughWhereNothingIsHeldOut) {
  const std::string run = train_new(small_plan(
      dir_, "run",
      std::string(kSmallModel) + kSmallSft + "rewards: [{name: format, pattern: '.*1.*'}]\n",
      {"data={jsonl: {path: " + dir_.path("a.jsonl") + ", held_out_fraction: 0}}",
       "eval={every: 2, best: a, sets: [{name: a, path: " + dir_.path("a.jsonl") + "}]}"}));
  EXPECT_EQ(evaluations(run, "pass@1"), "");
  EXPECT_NE(evaluations(run, "a/pass@1"), "");
  EXPECT_GE(load_state(find_checkpoint(run)).best_step, 0);
}

TEST_F(EvalSets, OfConversationsAreRenderedAsTheRunsProblems) {
  write_file(dir_.path("chat.jsonl"),
             "{\"messages\": [{\"role\": \"user\", \"content\": \"1+1\"}, {\"role\": "
             "\"assistant\", \"content\": \"2\"}], \"answer\": \"2\"}\n");
  TrainConfig config;
  config.batch.trainer = TrainerType::kSft;
  config.data.jsonl = {.path = {dir_.path("chat.jsonl")}, .messages = "messages"};
  config.data.jsonl.held_out_fraction = 0;
  config.eval.sets = {
      {.name = "same", .path = dir_.path("chat.jsonl")},
      {.name = "own", .path = dir_.path("b.jsonl"), .prompt = "{x}+{y}", .answer = "{sum}"}};
  Dataset data = load_dataset(config, chat_tokenizer(kTurns));
  const auto sets = load_eval_sets({config.eval, config, config.rewards, {}}, data, 1000,
                                   ContextLimit::kWholeModel);
  ASSERT_EQ(sets.size(), 2u);
  ASSERT_EQ(sets[0].problems.size(), 1u);
  EXPECT_EQ(sets[0].problems[0].prompt, "<|start|>user\n1+1<|end|>\n<|start|>assistant\n");
  EXPECT_EQ(sets[0].problems[0].answer, "2");
  ASSERT_EQ(sets[1].problems.size(), 7u);
  EXPECT_EQ(sets[1].problems[1].prompt, "<|start|>user\n1+2<|end|>\n<|start|>assistant\n");
  EXPECT_EQ(sets[1].problems[1].answer, "3");
  EXPECT_NE(data.tokenizer, nullptr);
}

TEST_F(EvalSets, WhatCannotBeReadIsRefusedBeforeTheRun) {
  write_file(dir_.path("empty.jsonl"), "");
  write_file(dir_.path("letters.jsonl"), "{\"prompt\": \"abc\", \"answer\": \"1\"}\n");
  const auto refuse = [&](const std::string& set, const std::string& message) {
    const RunPlan bad = plan("bad", str(kSetA, ", {name: x, ", set, "}"));
    EXPECT_THROW_WITH(preview_plan(bad), InputError, message);
    EXPECT_THROW_WITH(train_new(bad), InputError, message);
  };
  refuse("path: none.jsonl", "eval.sets[1].path: ");
  refuse("path: none.jsonl", "none.jsonl: cannot be opened: No such file");
  refuse("path: empty.jsonl", "empty.jsonl: holds no example");
  refuse("path: a.jsonl, prompt: '{'", "eval.sets[1].path: ");
  refuse("path: a.jsonl, prompt: '{question}'", "question");
  refuse("path: letters.jsonl", "eval.sets[1].path: ");
  refuse("path: a.jsonl, correct: {reward: math}", "eval.sets[1]: eval.correct.reward: no reward");
}

}  // namespace
}  // namespace cohort::test
