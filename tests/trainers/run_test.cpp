// Runs: their directories, interruption and resume, what they write and report. Interruptions here
// come through the stop flag, as from a signal; tests/apps/ kills processes.
#include "trainers/run.h"

#include <filesystem>
#include <map>

#include "tests/trainers/small_runs.h"
#include "trainers/checkpoint.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

const std::string kCommon = std::string(kSmallModel) + kSmallData;

// The steps of metrics.jsonl with the number of lines of each: of training, of evaluation.
struct LoggedSteps {
  std::map<int64_t, int> trained, evaluated;
};
LoggedSteps logged_steps(const std::string& stage_dir) {
  LoggedSteps out;
  for (const Json& line : json_lines(stage_dir + "/metrics.jsonl")) {
    const bool eval = line.find("eval") != nullptr;
    ++(eval ? out.evaluated : out.trained)[line.at("step").as_int()];
  }
  return out;
}

// A stage that was interrupted after some steps and resumed has the weights and the log of one that
// was not.
void expect_same_after_resume(const std::string& yaml,
                              const std::vector<std::string>& overrides = {}) {
  const TempDir dir;
  const std::string whole = train_new(small_plan(dir, "whole", yaml, overrides));
  for (const int64_t steps : {1, 3}) {
    SCOPED_TRACE(steps);
    const std::string run = train_interrupted(
        small_plan(dir, "interrupted" + std::to_string(steps), yaml, overrides), steps);
    EXPECT_EQ(load_state(find_checkpoint(run)).step, steps);
    EXPECT_FALSE(load_state(find_checkpoint(run)).finished);
    train_rest(run);
    for (const char* file : {"model.safetensors", "optimizer.safetensors"})
      EXPECT_TRUE(checkpoint_bytes(run, file) == checkpoint_bytes(whole, file)) << file;
    const LoggedSteps mine = logged_steps(run), theirs = logged_steps(whole);
    EXPECT_EQ(mine.trained, theirs.trained);
    EXPECT_EQ(mine.evaluated, theirs.evaluated);
    EXPECT_EQ(read_file(run + "/completions.jsonl"), read_file(whole + "/completions.jsonl"));
  }
}

TEST(Resume, GivesTheWeightsOfAnUninterruptedPretraining) {
  expect_same_after_resume(std::string(kSmallModel) + kSmallPretrain,
                           {"model.dropout=0.2", "eval.every=2", "checkpoint.every=2", "ranks=2"});
}

TEST(Resume, GivesTheWeightsOfAnUninterruptedSft) {
  expect_same_after_resume(kCommon + kSmallSft, {"model.recompute=block", "eval.every=3"});
}

TEST(Resume, GivesTheWeightsOfAnUninterruptedGrpo) {
  expect_same_after_resume(kCommon + kSmallGrpo, {"beta=0.1", "num_iterations=2",
                                                  "num_minibatches=2", "checkpoint.every=1"});
}

TEST(Resume, WorksBeforeTheFirstStep) {
  const TempDir dir;
  const std::string whole = train_new(small_plan(dir, "whole", kCommon + kSmallSft));
  Recorder recorder;
  const std::atomic<bool> stop{true};
  std::string run_dir;
  {
    cohort::Run run = cohort::Run::create(small_plan(dir, "run", kCommon + kSmallSft));
    run_dir = run.dir();
    EXPECT_EQ(run.execute(recorder, stop).end, StageEnd::kInterrupted);
  }
  EXPECT_EQ(load_state(find_checkpoint(run_dir)).step, 0);
  train_rest(run_dir);
  EXPECT_TRUE(checkpoint_bytes(run_dir) == checkpoint_bytes(whole));
  EXPECT_EQ(logged_steps(run_dir).evaluated, logged_steps(whole).evaluated);
}

// Both stages take part: interrupted in the first, and again in the second.
TEST(Resume, GoesThroughAllStages) {
  const std::string yaml = kCommon +
                           "stages:\n"
                           "  - {trainer: sft, steps: 5, batch_size: 8}\n"
                           "  - trainer: grpo\n"
                           "    steps: 3\n"
                           "    prompts_per_step: 2\n"
                           "    num_generations: 4\n"
                           "    beta: 0.1\n"
                           "    rewards: [{name: format, pattern: '.*1.*'}]\n";
  const TempDir dir;
  const std::string whole = train_new(small_plan(dir, "whole", yaml));
  EXPECT_EQ(find_checkpoint(whole), whole + "/2-grpo/checkpoints/step-00000003");

  std::atomic<bool> stop{false};
  Recorder recorder;
  int count = 0;
  // Stops after step 2 of the first stage, and then after step 1 of the second.
  recorder.on_step = [&](int64_t) { stop = ++count == 2 || count == 6; };
  std::string run_dir;
  {
    cohort::Run run = cohort::Run::create(small_plan(dir, "run", yaml));
    run_dir = run.dir();
    EXPECT_EQ(run.execute(recorder, stop).end, StageEnd::kInterrupted);
  }
  EXPECT_FALSE(fs::exists(run_dir + "/2-grpo"));
  stop = false;
  EXPECT_EQ(cohort::Run::resume(run_dir, {}).execute(recorder, stop).end, StageEnd::kInterrupted);
  EXPECT_EQ(load_state(find_checkpoint(run_dir)).step, 1);
  stop = false;
  const RunResult result = cohort::Run::resume(run_dir, {}).execute(recorder, stop);
  EXPECT_EQ(result.end, StageEnd::kFinished);
  EXPECT_EQ(result.last_trainer, TrainerType::kGrpo);
  for (const char* stage : {"/1-sft", "/2-grpo"}) {
    EXPECT_TRUE(checkpoint_bytes(run_dir + stage) == checkpoint_bytes(whole + stage)) << stage;
    EXPECT_EQ(logged_steps(run_dir + stage).trained, logged_steps(whole + stage).trained);
    EXPECT_EQ(logged_steps(run_dir + stage).evaluated, logged_steps(whole + stage).evaluated);
  }
}

TEST(Resume, OfAFinishedRunChangesNothing) {
  const TempDir dir;
  const std::string run = train_new(small_plan(dir, "run", kCommon + kSmallSft));
  const std::string weights = checkpoint_bytes(run), metrics = read_file(run + "/metrics.jsonl");
  train_rest(run);
  EXPECT_TRUE(checkpoint_bytes(run) == weights);
  EXPECT_EQ(read_file(run + "/metrics.jsonl"), metrics);
}

// The last line of a log that a kill cut short.
TEST(Resume, DropsAHalfWrittenLine) {
  const TempDir dir;
  const std::string yaml = kCommon + kSmallSft;
  const std::string run = train_interrupted(small_plan(dir, "run", yaml), 3);
  const std::string before = read_file(run + "/metrics.jsonl");
  write_file(run + "/metrics.jsonl", before + "{\"step\":4,\"loss\":1}\n{\"step\":5,\"lo");
  train_rest(run);
  const LoggedSteps logged = logged_steps(run);
  EXPECT_EQ(logged.trained,
            (std::map<int64_t, int>{{1, 1}, {2, 1}, {3, 1}, {4, 1}, {5, 1}, {6, 1}}));
  EXPECT_EQ(read_file(run + "/metrics.jsonl").find(before), 0u);
}

TEST(Resume, WithoutACheckpointStartsTheStageAgain) {
  const TempDir dir;
  const std::string yaml = kCommon + kSmallSft;
  const std::string whole = train_new(small_plan(dir, "whole", yaml));
  const std::string run = train_interrupted(small_plan(dir, "run", yaml), 3);
  fs::remove_all(run + "/checkpoints");  // as if killed before the first one was there
  train_rest(run);
  EXPECT_TRUE(checkpoint_bytes(run) == checkpoint_bytes(whole));
  EXPECT_EQ(logged_steps(run).trained, logged_steps(whole).trained);
  EXPECT_EQ(logged_steps(run).evaluated, logged_steps(whole).evaluated);
}

TEST(Resume, NeverStartsAgainWhereEveryCheckpointIsDamaged) {
  const TempDir dir;
  const std::string run = train_interrupted(small_plan(dir, "run", kCommon + kSmallSft), 3);
  write_file(find_checkpoint(run) + "/optimizer.safetensors", "");
  EXPECT_THROW_WITH(train_rest(run), InputError, "hint: restore one from a copy");
}

// As on hosts whose run directories are not the same.
TEST(Resume, RefusesRanksThatFindDifferentCheckpoints) {
  const TempDir dir;
  const RunPlan plan = small_plan(dir, "run", kCommon + kSmallSft);
  const std::string one = train_interrupted(plan, 1), three = train_interrupted(plan, 3);
  const std::atomic<bool> stop{false};
  Reporter silent;
  const auto resume = [&](const std::string& of_rank_0, const std::string& of_rank_1) {
    run_local_ranks(2, [&](Communicator& comm) {
      const std::string& mine = comm.rank() == 0 ? of_rank_0 : of_rank_1;
      Stage({plan.stages[0], mine, comm, silent, stop});
    });
  };
  resume(one, one);
  for (const std::string& other : {three, dir.path("none")}) {
    EXPECT_THROW_WITH(resume(one, other), InputError, "the ranks have found different checkpoints");
    EXPECT_THROW_WITH(resume(other, one), InputError, "hint: the run directory must be on");
  }
}

TEST(Resume, TakesOverridesAndRefusesAnotherModel) {
  const TempDir dir;
  const std::string run = train_interrupted(small_plan(dir, "run", kCommon + kSmallSft), 3);
  EXPECT_THROW_WITH(train_rest(run, {"model.d_model=32"}), InputError, "model.d_model: 32");
  EXPECT_THROW_WITH(train_rest(run, {"device=cuda:99"}), InputError, "'cuda:99' was asked for");
  train_rest(run, {"steps=4"});
  EXPECT_EQ(load_state(find_checkpoint(run)).step, 4);
}

TEST(Resume, OfWhatIsNoRunOrInUseIsRefused) {
  const TempDir dir;
  EXPECT_THROW_WITH(cohort::Run::resume(dir.path(), {}), InputError, "nothing to resume");
  EXPECT_THROW_WITH(cohort::Run::resume(dir.path("none"), {}), InputError, "nothing to resume");
  const cohort::Run run = cohort::Run::create(small_plan(dir, "run", kCommon + kSmallSft));
  EXPECT_THROW_WITH(cohort::Run::resume(run.dir(), {}), InputError, "another process is using");
}

TEST(Runs, NeverShareADirectory) {
  const TempDir dir;
  const RunPlan plan = small_plan(dir, "run", kCommon + kSmallSft);
  const std::string first = train_new(plan), weights = checkpoint_bytes(first);
  const std::string second = train_new(plan);
  EXPECT_EQ(first, dir.path("run"));
  EXPECT_EQ(second, dir.path("run-2"));
  EXPECT_TRUE(checkpoint_bytes(first) == weights);
  EXPECT_TRUE(checkpoint_bytes(second) == weights);  // the same plan is the same training
}

TEST(Runs, BadInputLeavesNoDirectory) {
  const TempDir dir;
  RunPlan plan = small_plan(dir, "run", kCommon + kSmallSft);
  plan.stages[0].data.task = "nothing";
  EXPECT_THROW_WITH(cohort::Run::create(plan), InputError, "unknown task");
  plan = small_plan(dir, "run", kCommon + kSmallSft, {"init_from=" + dir.path("none")});
  EXPECT_THROW_WITH(cohort::Run::create(plan), InputError, "does not exist");
  EXPECT_FALSE(fs::exists(dir.path("run")));
}

TEST(Runs, StartFromTheWeightsOfAnother) {
  const TempDir dir;
  const std::string first = train_new(small_plan(dir, "first", kCommon + kSmallSft));
  // One step at a learning rate of 0 leaves the weights as they are.
  const std::string second = train_new(small_plan(
      dir, "second", kCommon + kSmallGrpo, {"init_from=" + first, "steps=1", "learning_rate=0"}));
  EXPECT_TRUE(bit_equal(final_weights(second), final_weights(first)));
}

TEST(Runs, EndWhenTheGoalIsReached) {
  const TempDir dir;
  const std::string yaml = std::string(kSmallModel) +
                           "trainer: sft\nsteps: 400\nbatch_size: 16\n"
                           "data: {task: addition, task_sizes: {max_size: 1, min_size: 1}}\n";
  const std::string run = train_new(
      small_plan(dir, "run", yaml,
                 {"eval.every=20", "eval.stop_at=0.2", "checkpoint.every=20", "eval.size=8"}));
  const TrainState state = load_state(find_checkpoint(run));
  EXPECT_TRUE(state.finished);
  EXPECT_GT(state.step, 0);
  EXPECT_LT(state.step, 400);
  EXPECT_EQ(state.step % 20, 0);
  EXPECT_EQ(logged_steps(run).evaluated.at(state.step), 1);
  train_rest(run);
  EXPECT_EQ(load_state(find_checkpoint(run)).step, state.step);
}

TEST(Runs, LogEveryFewStepsAndTheLast) {
  const TempDir dir;
  const std::string run = train_new(small_plan(dir, "run", kCommon + kSmallSft, {"log_every=4"}));
  EXPECT_EQ(logged_steps(run).trained, (std::map<int64_t, int>{{4, 1}, {6, 1}}));
  EXPECT_EQ(logged_steps(run).evaluated, (std::map<int64_t, int>{{0, 1}, {6, 1}}));
}

TEST(Runs, KeepTheBestCheckpoint) {
  const TempDir dir;
  const std::string run = train_new(
      small_plan(dir, "run", std::string(kSmallModel) + kSmallPretrain,
                 {"eval.every=1", "checkpoint.every=1", "checkpoint.keep_last=1", "steps=16",
                  "learning_rate=3", "warmup_steps=60", "lr_schedule=constant"}));
  // The lowest validation loss, from the log.
  double best = INFINITY;
  int64_t best_step = -1;
  for (const Json& line : json_lines(run + "/metrics.jsonl"))
    if (line.find("eval") != nullptr && metric(line, "val_loss") < best) {
      best = metric(line, "val_loss");
      best_step = line.at("step").as_int();
    }
  ASSERT_GT(best_step, 0);
  EXPECT_LT(best_step, 16) << "the learning rate is meant to be too large to end well";
  EXPECT_EQ(load_state(run + "/checkpoints/best").step, best_step);
  EXPECT_EQ(load_state(find_checkpoint(run)).best_step, best_step);
}

TEST(Runs, ReportsOfGrpoShowTheCurveAndCompletionsBeforeAndAfter) {
  const TempDir dir;
  Recorder recorder;
  const std::atomic<bool> stop{false};
  cohort::Run run = cohort::Run::create(small_plan(dir, "run", kCommon + kSmallGrpo));
  const RunResult result = run.execute(recorder, stop);
  EXPECT_EQ(recorder.steps, (std::vector<int64_t>{1, 2, 3, 4}));
  const std::string& report = recorder.messages.back();
  for (const char* part : {"mean reward over 4 steps", "before GRPO (held-out pass@1",
                           "after GRPO (held-out pass@1", "wrong  "})
    EXPECT_NE(report.find(part), std::string::npos) << report;
  const auto lines = json_lines(run.dir() + "/metrics.jsonl");
  EXPECT_EQ(metric(lines.front(), "pass@1"), result.before);
  EXPECT_EQ(metric(lines.back(), "pass@1"), result.after);
}

TEST(Runs, GrpoMeasuresWhatItSampled) {
  const TempDir dir;
  const std::string run = train_new(small_plan(
      dir, "run", kCommon + kSmallGrpo, {"eval.num_samples=4", "eval.k=[1, 4]", "beta=0.1"}));
  for (const Json& line : json_lines(run + "/metrics.jsonl")) {
    if (line.find("eval") != nullptr) {
      EXPECT_LE(metric(line, "sampled_pass@1"), metric(line, "sampled_pass@4"));
      continue;
    }
    EXPECT_NEAR(metric(line, "reward"),
                metric(line, "rewards/format/mean") + metric(line, "rewards/task/mean"), 1e-12);
    EXPECT_GE(metric(line, "completions/mean_length"), 1);
    EXPECT_LE(metric(line, "completions/max_length"), 4);
    EXPECT_GT(metric(line, "entropy"), 0);
    // The reference is the start: no distance before the first update.
    if (line.at("step").as_int() == 1)
      EXPECT_EQ(metric(line, "kl"), 0);
    else
      EXPECT_GT(metric(line, "kl"), 0);
    EXPECT_EQ(metric(line, "learning_rate"), 1e-2);
    EXPECT_GT(metric(line, "tokens_per_second"), 0);
  }
}

TEST(Runs, GrpoOnASmallSettingImproves) {
  const TempDir dir;
  // One sampled digit, right if it is a 1: from one in 13 to nearly always.
  const std::string run = train_new(
      small_plan(dir, "run", kCommon + kSmallGrpo,
                 {"rewards=[{name: format, pattern: '1'}]", "max_completion_length=1", "steps=40",
                  "num_generations=8", "prompts_per_step=8", "learning_rate=0.02"}));
  const auto lines = json_lines(run + "/metrics.jsonl");
  EXPECT_LT(metric(lines[1], "reward"), 0.3);
  EXPECT_GT(metric(lines[lines.size() - 2], "reward"), 0.9);
}

// The control experiment: the same rewards, dealt to the wrong completions, teach nothing.
TEST(Runs, GrpoWithShuffledAdvantagesDoesNotImprove) {
  const TempDir dir;
  const std::string run =
      train_new(small_plan(dir, "run", kCommon + kSmallGrpo,
                           {"rewards=[{name: format, pattern: '1'}]", "max_completion_length=1",
                            "steps=40", "num_generations=8", "prompts_per_step=8",
                            "learning_rate=0.02", "shuffle_advantages=true"}));
  const auto lines = json_lines(run + "/metrics.jsonl");
  EXPECT_LT(metric(lines[lines.size() - 2], "reward"), 0.5);
}

TEST(Runs, RewardThatAppliesToNothingIsAnError) {
  const TempDir dir;
  std::string words;
  for (const char c : std::string("abcdefghijklmnopqrst"))
    words += str("{\"prompt\": \"", c, "=\", \"answer\": \"x\"}\n");
  write_file(dir.path("words.jsonl"), words);
  const RunPlan plan =
      small_plan(dir, "run",
                 std::string(kSmallModel) +
                     "trainer: grpo\nsteps: 2\nprompts_per_step: 2\nnum_generations: 2\n"
                     "data: {jsonl: {path: words.jsonl, held_out_fraction: 0.5}}\nrewards: [{name: "
                     "numeric}]\n");
  const ExpectLog warning("pass@1 (numeric) is not measured");
  EXPECT_THROW_WITH(train_new(plan), InputError, "none applies to any of the 4 completions");
}

}  // namespace
}  // namespace cohort::test
