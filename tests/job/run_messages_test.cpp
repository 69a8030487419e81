// Messages of a run on its data, its keys and its updates; the reference of a resumed run.
#include <filesystem>
#include <set>

#include "core/log.h"
#include "job/checkpoint.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

TEST(RunMessages, ReportTheRewardsOfGoldAnswersAndTheNumberOfTargetTokens) {
  const TempDir dir;
  const std::string grpo =
      train_new(small_plan(dir, "grpo", kSmallCommon + kSmallGrpo, {"steps=1"}));
  EXPECT_NE(read_file(grpo + "/log.txt").find(" gold answers get less than the rewards can give"),
            std::string::npos);
  const std::string sft = train_new(small_plan(dir, "sft", kSmallCommon + kSmallSft, {"steps=2"}));
  for (const Json& line : json_lines(sft + "/metrics.jsonl")) {
    if (line.find("eval") != nullptr) continue;
    // One to three digits and the end of sequence of each of 8.
    EXPECT_GE(metric(line, "num_target_tokens"), 16);
    EXPECT_LT(metric(line, "num_target_tokens"), metric(line, "num_tokens"));
  }
}

// A learning rate that is too small is reported once.
TEST(RunMessages, UpdatesThatHardlyChangeTheWeightsAreReported) {
  const TempDir dir;
  const std::vector<std::string> keys{"steps=130", "lr_schedule=constant", "eval.every=0"};
  {
    const ExpectLog warning("the last 50 steps have each changed the weights by less than 1e-6");
    std::vector<std::string> tiny = keys;
    tiny.push_back("learning_rate=1e-9");
    const std::string run = train_new(small_plan(dir, "run", kSmallCommon + kSmallSft, tiny));
    const std::string log = read_file(run + "/log.txt");
    const size_t first = log.find("by less than 1e-6");
    EXPECT_EQ(log.find("by less than 1e-6", first + 1), log.npos);
  }
  train_new(small_plan(dir, "usual", kSmallCommon + kSmallSft, keys));
}

// All weights of so small a model are sampled. The size is measured every 10 steps.
TEST(RunMessages, TheSizeOfAnUpdateIsLogged) {
  const TempDir dir;
  const ExpectLog truncated("end at the length limit");
  for (const char* trainer : {kSmallSft, kSmallGrpo}) {
    const auto weights = [&](int64_t steps) {
      const RunPlan plan =
          small_plan(dir, str("run", steps), kSmallCommon + trainer, {"steps=11", "eval.every=0"});
      const std::string run = train_interrupted(plan, steps);
      return std::pair(run, final_weights(run).to_vector<double>());
    };
    const auto [run, after] = weights(10);
    const std::vector<double> before = weights(9).second;
    double change = 0, length = 0;
    for (size_t i = 0; i < after.size(); ++i) {
      change += (after[i] - before[i]) * (after[i] - before[i]);
      length += before[i] * before[i];
    }
    for (const Json& line : json_lines(run + "/metrics.jsonl")) {
      if (line.find("eval") != nullptr) continue;
      if (line.at("step").as_int() != 10) {
        EXPECT_TRUE(line.at("update/norm").is_null() && line.at("update/relative").is_null());
        continue;
      }
      EXPECT_NEAR(metric(line, "update/norm") / std::sqrt(change), 1, 1e-9);
      EXPECT_NEAR(metric(line, "update/relative") / std::sqrt(change / length), 1, 1e-9);
    }
  }
}

// Generated problems have no end, so no epochs.
TEST(RunMessages, EpochsAreThePassesOverTheTrainingData) {
  const TempDir dir;
  const ExpectLog new_model("grpo starts from random weights");
  std::string lines;
  for (int i = 0; i < 20; ++i)
    lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"", i, "\"}\n");
  write_file(dir.path("lines.jsonl"), lines);
  write_file(dir.path("text.txt"), small_text());
  const auto epoch = [&](const std::string& yaml) {
    const std::string run = train_new(
        small_plan(dir, "run", std::string(kSmallModel) + yaml, {"steps=3", "eval.every=0"}));
    double tokens = 0;
    Json last;
    for (const Json& line : json_lines(run + "/metrics.jsonl")) {
      if (line.find("eval") != nullptr) continue;
      tokens += metric(line, "num_tokens");
      EXPECT_EQ(metric(line, "total_tokens"), tokens);
      last = line.at("epoch");
    }
    return number_or_nan(last);
  };
  const std::string jsonl = "data: {jsonl: {path: lines.jsonl, held_out_fraction: 0}}\n";
  const std::string grpo =
      "trainer: grpo\nprompts_per_step: 4\nrewards: [{name: format, pattern: '.*1.*'}]\n";
  EXPECT_EQ(epoch(kSmallSft + jsonl), 3 * 8 / 20.0);
  EXPECT_EQ(epoch(grpo + jsonl), 3 * 4 / 20.0);
  EXPECT_TRUE(std::isnan(epoch(kSmallSft + std::string(kSmallData))));
  EXPECT_NEAR(epoch(kSmallPretrain), 3 * 4 * 16 / (0.8 * 1500), 0.01);
}

// Over all ranks, those of all prompts in turn, with every reward.
TEST(RunMessages, GrpoLogsTheRequestedNumberOfCompletions) {
  const TempDir dir;
  std::string single_rank;
  for (const char* ranks : {"ranks=1", "ranks=2", "ranks=3"}) {
    const std::string run = train_new(small_plan(dir, "run", kSmallCommon + kSmallGrpo,
                                                 {"log_completions=13", "steps=1", ranks}));
    std::string logged;
    std::set<std::string> prompts;
    int64_t count = 0;
    for (const Json& line : json_lines(run + "/completions.jsonl")) {
      if (line.find("eval") != nullptr) continue;
      const Json& rewards = line.at("rewards");
      EXPECT_EQ(rewards.as_object().size(), 2u);
      EXPECT_EQ(metric(rewards, "format") + metric(rewards, "task"), metric(line, "reward"));
      EXPECT_FALSE(line.at("advantage").is_null());
      // The first completion of each of the 4 prompts, then the second of each.
      EXPECT_EQ(line.at("group").as_int(), count % 4);
      EXPECT_EQ(line.at("sample").as_int(), count / 4);
      prompts.insert(line.at("prompt").as_string());
      EXPECT_EQ(line.at("truncated").as_bool(), line.at("stop_reason").as_string() == "length");
      EXPECT_GE(metric(line, "length"), 1);
      EXPECT_LE(metric(line, "length"), 4);
      EXPECT_LT(metric(line, "mean_logprob"), 0);
      // Advantages of a group are its rewards less their mean, over a positive number.
      EXPECT_EQ(metric(line, "advantage") > 0,
                metric(line, "reward") > metric(line, "group_reward"));
      EXPECT_EQ(metric(line, "advantage") < 0,
                metric(line, "reward") < metric(line, "group_reward"));
      logged += line.dump() + "\n";
      ++count;
    }
    EXPECT_EQ(count, 13);
    EXPECT_EQ(prompts.size(), 4u);
    if (single_rank.empty()) single_rank = logged;
    EXPECT_EQ(logged, single_rank) << ranks;
  }
  const std::string none = train_new(
      small_plan(dir, "run", kSmallCommon + kSmallGrpo, {"log_completions=0", "steps=1"}));
  for (const Json& line : json_lines(none + "/completions.jsonl")) {
    EXPECT_TRUE(line.find("eval") != nullptr);
  }
}

// A step whose pass rate is 0 is no best one.
TEST(RunMessages, WarningsNameNoBestStepOfScoreZero) {
  const TempDir dir;
  std::string warnings;
  logging::set_observer([&](logging::Level, const std::string& text) { warnings += text + "\n"; });
  train_new(small_plan(dir, "run", kSmallCommon + kSmallGrpo,
                       {"steps=8", "eval={every: 2, size: 8, correct: {reward: format_2}}",
                        "rewards=[{name: format, pattern: '[0-9]+'}, {name: format, pattern: no}]",
                        "max_completion_length=1"}));
  logging::set_observer({});
  EXPECT_NE(warnings.find("end at the length limit"), std::string::npos) << warnings;
  EXPECT_EQ(warnings.find("best so far"), std::string::npos) << warnings;
}

// A run without a reference that is resumed with one takes the initial model of the stage.
TEST(RunMessages, AResumeWithBetaUsesTheInitialModelAsReference) {
  const TempDir dir;
  const ExpectLog truncated("end at the length limit");
  const std::string start = train_new(small_plan(dir, "start", kSmallCommon + kSmallSft));
  const auto reference_of = [](const std::string& run) {
    return checkpoint_bytes(run, "training/reference.safetensors");
  };
  const RunPlan plan =
      small_plan(dir, "run", kSmallCommon + kSmallGrpo, {"init_from=" + start, "steps=8"});
  const std::string run = train_interrupted(plan, 3), lost = train_interrupted(plan, 3);
  train_rest(run, {"beta=0.1"});
  EXPECT_EQ(reference_of(run), checkpoint_bytes(start));
  EXPECT_GT(metric(json_lines(run + "/metrics.jsonl").back(), "pass@1") + 1, 0);
  // A new model also serves as the reference.
  const RunPlan fresh = small_plan(dir, "fresh", kSmallCommon + kSmallGrpo, {"steps=8"});
  const std::string new_run = train_interrupted(fresh, 3);
  train_rest(new_run, {"beta=0.1"});
  EXPECT_EQ(
      reference_of(new_run),
      reference_of(train_new(small_plan(dir, "whole", kSmallCommon + kSmallGrpo, {"beta=0.1"}))));
  std::filesystem::remove_all(start);
  EXPECT_THROW_WITH(train_rest(lost, {"beta=0.1"}), InputError,
                    "has no reference, as the stage had beta 0 when it began");
}

}  // namespace
}  // namespace cohort::test
