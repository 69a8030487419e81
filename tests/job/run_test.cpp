// Runs: their directories, interruption and resume, logs and reports. Interruptions here
// come through the stop flag, as from a signal; tests/apps/ kills processes.
#include "job/run.h"

#include <filesystem>
#include <map>

#include "data/loader.h"
#include "job/checkpoint.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

// The steps of metrics.jsonl with the number of lines of each: of training, of evaluation.
struct LoggedSteps {
  std::map<int64_t, int> trained, evaluated;
  double total_tokens = 0;  // in the last line of training
};
LoggedSteps logged_steps(const std::string& stage_dir) {
  LoggedSteps out;
  for (const Json& line : json_lines(stage_dir + "/metrics.jsonl")) {
    const bool eval = line.find("eval") != nullptr;
    ++(eval ? out.evaluated : out.trained)[line.at("step").as_int()];
    if (!eval) out.total_tokens = metric(line, "total_tokens");
  }
  return out;
}

// A stage that was interrupted after some steps and resumed has the weights and the log of an
// uninterrupted one.
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
    for (const char* file : {"model.safetensors", "training/optimizer.safetensors"})
      EXPECT_TRUE(checkpoint_bytes(run, file) == checkpoint_bytes(whole, file)) << file;
    const LoggedSteps actual = logged_steps(run), expected = logged_steps(whole);
    EXPECT_EQ(actual.trained, expected.trained);
    EXPECT_EQ(actual.evaluated, expected.evaluated);
    EXPECT_GT(expected.total_tokens, 0);
    EXPECT_EQ(actual.total_tokens, expected.total_tokens);
    EXPECT_EQ(read_file(run + "/completions.jsonl"), read_file(whole + "/completions.jsonl"));
  }
}

TEST(Resume, GivesTheWeightsOfAnUninterruptedPretraining) {
  expect_same_after_resume(std::string(kSmallModel) + kSmallPretrain,
                           {"model.dropout=0.2", "eval.every=2", "checkpoint.every=2", "ranks=2"});
}

TEST(Resume, GivesTheWeightsOfAnUninterruptedSft) {
  expect_same_after_resume(kSmallCommon + kSmallSft, {"model.recompute=block", "eval.every=3"});
  expect_same_after_resume(kSmallCommon + kSmallSft, {"optimizer.moments=bf16"});
}

TEST(Resume, GivesTheWeightsOfAnUninterruptedGrpo) {
  expect_same_after_resume(kSmallCommon + kSmallGrpo, {"beta=0.1", "num_iterations=2",
                                                       "num_minibatches=2", "checkpoint.every=1"});
}

TEST(Resume, GivesTheWeightsOfAnUninterruptedGrpoWithDeltaLayers) {
  std::vector<std::string> overrides = kSmallDelta;
  overrides.insert(overrides.end(), {"num_iterations=2", "num_minibatches=2", "checkpoint.every=1",
                                     "rollout.max_cache_tokens=500"});
  expect_same_after_resume(kSmallCommon + kSmallGrpo, overrides);
}

TEST(Resume, GivesTheLogOfAStageThatWasNotEvaluatedAtItsStart) {
  expect_same_after_resume(kSmallCommon + kSmallSft, {"eval.at_start=false"});
}

TEST(Runs, NeedNotEvaluateBeforeTheFirstStep) {
  const TempDir dir;
  const std::string yaml = kSmallCommon + kSmallSft;
  const std::string with = train_new(small_plan(dir, "with", yaml));
  const std::string without = train_new(small_plan(dir, "without", yaml, {"eval.at_start=false"}));
  EXPECT_TRUE(checkpoint_bytes(with) == checkpoint_bytes(without));
  EXPECT_EQ(logged_steps(with).evaluated.count(0), 1u);
  EXPECT_EQ(logged_steps(without).evaluated.count(0), 0u);
  EXPECT_EQ(logged_steps(without).evaluated.size(), 1u);  // the last
}

TEST(Resume, WorksBeforeTheFirstStep) {
  const TempDir dir;
  const std::string whole = train_new(small_plan(dir, "whole", kSmallCommon + kSmallSft));
  Recorder recorder;
  const std::atomic<bool> stop{true};
  std::string run_dir;
  {
    cohort::Run run = cohort::Run::create(small_plan(dir, "run", kSmallCommon + kSmallSft));
    run_dir = run.dir();
    EXPECT_EQ(run.execute(recorder, stop).end, StageEnd::kInterrupted);
  }
  EXPECT_EQ(load_state(find_checkpoint(run_dir)).step, 0);
  train_rest(run_dir);
  EXPECT_TRUE(checkpoint_bytes(run_dir) == checkpoint_bytes(whole));
  EXPECT_EQ(logged_steps(run_dir).evaluated, logged_steps(whole).evaluated);
}

// Interrupted in the first stage, and again in the second.
TEST(Resume, CoversAllStages) {
  const std::string yaml = kSmallCommon +
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
  const std::string run = train_new(small_plan(dir, "run", kSmallCommon + kSmallSft));
  const std::string weights = checkpoint_bytes(run), metrics = read_file(run + "/metrics.jsonl");
  train_rest(run);
  EXPECT_TRUE(checkpoint_bytes(run) == weights);
  EXPECT_EQ(read_file(run + "/metrics.jsonl"), metrics);
}

// A last line that is incomplete after a kill.
TEST(Resume, DropsAHalfWrittenLine) {
  const TempDir dir;
  const std::string yaml = kSmallCommon + kSmallSft;
  const std::string run = train_interrupted(small_plan(dir, "run", yaml), 3);
  const std::string before = read_file(run + "/metrics.jsonl");
  write_file(run + "/metrics.jsonl", before + "{\"step\":4,\"loss\":1}\n{\"step\":5,\"lo");
  train_rest(run);
  const LoggedSteps logged = logged_steps(run);
  EXPECT_EQ(logged.trained,
            (std::map<int64_t, int>{{1, 1}, {2, 1}, {3, 1}, {4, 1}, {5, 1}, {6, 1}}));
  EXPECT_EQ(read_file(run + "/metrics.jsonl").find(before), 0u);
}

// A line damaged otherwise, of a step that is not trained again.
TEST(Resume, KeepsTheLinesAfterADamagedOne) {
  const TempDir dir;
  const std::string yaml = kSmallCommon + kSmallSft;
  const std::string run = train_interrupted(small_plan(dir, "run", yaml), 3),
                    log = run + "/metrics.jsonl";
  std::string text = read_file(log);
  const size_t at = text.find("\"step\":2,");
  ASSERT_NE(at, std::string::npos);
  text[at] = '\0';
  write_file(log, text + "{\"step\":4,\"loss\":1}\n");
  const std::string line = text.substr(at - 1, text.find('\n', at) + 2 - at);
  const std::string earlier = "earlier\n";
  write_file(log + ".damaged", earlier);
  {
    const ExpectLog warning(log + ": 1 damaged lines moved to " + log + ".damaged");
    train_rest(run);
  }
  EXPECT_EQ(logged_steps(run).trained,
            (std::map<int64_t, int>{{1, 1}, {3, 1}, {4, 1}, {5, 1}, {6, 1}}));
  EXPECT_EQ(read_file(log + ".damaged"), earlier + line);
}

TEST(Resume, WithoutACheckpointRestartsTheStage) {
  const TempDir dir;
  const std::string yaml = kSmallCommon + kSmallSft;
  const std::string whole = train_new(small_plan(dir, "whole", yaml));
  const std::string run = train_interrupted(small_plan(dir, "run", yaml), 3);
  fs::remove_all(run + "/checkpoints");  // as if killed before the first checkpoint
  train_rest(run);
  EXPECT_TRUE(checkpoint_bytes(run) == checkpoint_bytes(whole));
  EXPECT_EQ(logged_steps(run).trained, logged_steps(whole).trained);
  EXPECT_EQ(logged_steps(run).evaluated, logged_steps(whole).evaluated);
}

TEST(Resume, NeverRestartsIfEveryCheckpointIsDamaged) {
  const TempDir dir;
  const std::string run = train_interrupted(small_plan(dir, "run", kSmallCommon + kSmallSft), 3);
  fs::remove_all(checkpoint_path(run + "/checkpoints", 0));
  write_file(find_checkpoint(run) + "/training/optimizer.safetensors", "");
  EXPECT_THROW_WITH(train_rest(run), InputError, "hint: restore one from a copy");
}

// Simulates hosts with different run directories.
TEST(Resume, RankZeroNamesTheCheckpointForAll) {
  const TempDir dir;
  const RunPlan plan = small_plan(dir, "run", kSmallCommon + kSmallSft);
  const std::string one = train_interrupted(plan, 1), three = train_interrupted(plan, 3);
  const std::atomic<bool> stop{false};
  Reporter reporter;
  const auto resume = [&](const std::string& of_rank_0, const std::string& of_rank_1) {
    run_local_ranks(2, [&](Communicator& comm) {
      const std::string& run_dir = comm.rank() == 0 ? of_rank_0 : of_rank_1;
      const Stage stage({plan.stages[0], run_dir, comm, reporter, stop});
      EXPECT_EQ(stage.step(), of_rank_0 == one ? 1 : 3);
    });
  };
  resume(one, one);
  for (const std::string& other : {three, dir.path("none")})
    EXPECT_THROW_WITH(
        resume(one, other), InputError,
        "checkpoints/step-00000001, from which rank 0 resumes, is not visible to rank "
        "1; hint: the run directory must be on a file system that all hosts share");
  // Other checkpoints of that host, newer or older, do not count.
  fs::copy(three + "/checkpoints/step-00000003", one + "/checkpoints/step-00000003",
           fs::copy_options::recursive);
  fs::copy(one + "/checkpoints/step-00000001", three + "/checkpoints/step-00000001",
           fs::copy_options::recursive);
  resume(three, one);
}

TEST(Resume, TakesOverridesAndRefusesAnotherModel) {
  const TempDir dir;
  const std::string run = train_interrupted(small_plan(dir, "run", kSmallCommon + kSmallSft), 3);
  EXPECT_THROW_WITH(train_rest(run, {"model.d_model=32"}), InputError, "model.d_model: 32");
  EXPECT_THROW_WITH(train_rest(run, {"device=cuda:99"}), InputError, "'cuda:99' was asked for");
  train_rest(run, {"steps=4"});
  EXPECT_EQ(load_state(find_checkpoint(run)).step, 4);
}

TEST(Resume, WithoutARunOrOfOneInUseIsRefused) {
  const TempDir dir;
  EXPECT_THROW_WITH(cohort::Run::resume(dir.path(), {}), InputError, "nothing to resume");
  EXPECT_THROW_WITH(cohort::Run::resume(dir.path("none"), {}), InputError, "nothing to resume");
  const cohort::Run run = cohort::Run::create(small_plan(dir, "run", kSmallCommon + kSmallSft));
  EXPECT_THROW_WITH(cohort::Run::resume(run.dir(), {}), InputError, "another process is using");
}

TEST(Resume, RepairsTheLinkToTheBest) {
  const TempDir dir;
  const std::string run =
      train_interrupted(small_plan(dir, "run", std::string(kSmallModel) + kSmallPretrain,
                                   {"eval.every=1", "checkpoint.every=1"}),
                        3);
  const std::string link = run + "/checkpoints/best", best = fs::read_symlink(link);
  fs::remove(link);
  fs::create_directory_symlink("step-00000099", link);
  Recorder recorder;
  const std::atomic<bool> stop{true};
  cohort::Run::resume(run, {}).execute(recorder, stop);
  EXPECT_EQ(fs::read_symlink(link), best);
}

TEST(Runs, EndWithAnErrorIfTheirDirectoryIsRemoved) {
  const TempDir dir;
  Recorder recorder;
  const std::atomic<bool> stop{false};
  cohort::Run run = cohort::Run::create(small_plan(dir, "run", kSmallCommon + kSmallSft));
  recorder.on_step = [&](int64_t step) {
    if (step == 2) fs::remove_all(run.dir());
  };
  EXPECT_THROW_WITH(run.execute(recorder, stop), Error,
                    "the run directory " + run.dir() + " is gone: it was removed or renamed");
  EXPECT_FALSE(fs::exists(run.dir()));
}

TEST(Runs, NeverShareADirectory) {
  const TempDir dir;
  const RunPlan plan = small_plan(dir, "run", kSmallCommon + kSmallSft);
  const std::string first = train_new(plan), weights = checkpoint_bytes(first);
  const std::string second = train_new(plan);
  EXPECT_EQ(first, dir.path("run"));
  EXPECT_EQ(second, dir.path("run-2"));
  EXPECT_TRUE(checkpoint_bytes(first) == weights);
  EXPECT_TRUE(checkpoint_bytes(second) == weights);  // the same plan is the same training
}

TEST(Runs, BadInputLeavesNoDirectory) {
  const TempDir dir;
  RunPlan plan = small_plan(dir, "run", kSmallCommon + kSmallSft);
  plan.stages[0].data.task = "nothing";
  EXPECT_THROW_WITH(cohort::Run::create(plan), InputError, "unknown task");
  plan = small_plan(dir, "run", kSmallCommon + kSmallSft, {"init_from=" + dir.path("none")});
  EXPECT_THROW_WITH(cohort::Run::create(plan), InputError, "does not exist");
  EXPECT_FALSE(fs::exists(dir.path("run")));
}

TEST(Runs, StartFromTheWeightsOfAnother) {
  const TempDir dir;
  const std::string first = train_new(small_plan(dir, "first", kSmallCommon + kSmallSft));
  // One step at a learning rate of 0 leaves the weights as they are.
  const std::string second =
      train_new(small_plan(dir, "second", kSmallCommon + kSmallGrpo,
                           {"init_from=" + first, "steps=1", "learning_rate=0"}));
  EXPECT_TRUE(bit_equal(final_weights(second), final_weights(first)));
}

// One update at a rate that overflows f32 is detected at the end of the run and before a checkpoint
// or evaluation.
TEST(Runs, NeverSaveWeightsThatAreNotFinite) {
  for (const std::vector<std::string>& overrides :
       {std::vector<std::string>{"steps=1"}, {"checkpoint.every=1"}, {"eval.every=1"}}) {
    SCOPED_TRACE(overrides[0]);
    const TempDir dir;
    RunPlan plan = small_plan(dir, "run", kSmallCommon + kSmallSft, overrides);
    plan.stages[0].optimizer.learning_rate = 1e38;
    plan.stages[0].optimizer.lr_schedule = Schedule::kConstant;
    plan.stages[0].optimizer.warmup_steps = 0;
    EXPECT_THROW_WITH(train_new(plan), NonFiniteError,
                      "the last update made weights or moments that are not finite");
    EXPECT_EQ(load_state(find_checkpoint(dir.path("run"))).step, 0);  // before the update
  }
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
  const std::string run =
      train_new(small_plan(dir, "run", kSmallCommon + kSmallSft, {"log_every=4"}));
  EXPECT_EQ(logged_steps(run).trained, (std::map<int64_t, int>{{4, 1}, {6, 1}}));
  EXPECT_EQ(logged_steps(run).evaluated, (std::map<int64_t, int>{{0, 1}, {6, 1}}));
}

// The last digits of the steps that a run has checkpoints of.
std::string saved_steps(const std::string& run) {
  std::string out;
  for (const std::string& name : list_directory(run + "/checkpoints"))
    if (name[0] == 's') out += name.back();
  return out;
}

TEST(Runs, KeepTheBestCheckpoint) {
  const TempDir dir;
  const ExpectLog warmup("warmup_steps: 60 of 16 steps: the learning rate never reaches its peak");
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

TEST(Runs, SaveByTheClock) {
  const TempDir dir;
  const std::string yaml = std::string(kSmallModel) + kSmallPretrain;
  const std::string plain = train_new(small_plan(dir, "plain", yaml));
  EXPECT_EQ(saved_steps(plain), "06");
  for (const char* ranks : {"ranks=1", "ranks=2"}) {
    const std::string often = train_new(small_plan(
        dir, "often", yaml, {"checkpoint.every_minutes=1e-9", "checkpoint.keep_last=9", ranks}));
    EXPECT_EQ(saved_steps(often), "0123456");
    if (std::string(ranks) == "ranks=1") {
      EXPECT_TRUE(checkpoint_bytes(often) == checkpoint_bytes(plain));
    }
  }
}

TEST(Runs, SaveTheBestByDefault) {
  const TempDir dir;
  const std::vector<std::string> keys{"checkpoint.keep_last=1", "checkpoint.every_minutes=0"};
  const std::string yaml = std::string(kSmallModel) + kSmallPretrain;
  // A learning rate at which every step makes the model worse, and one at which it learns.
  EXPECT_EQ(saved_steps(train_new(small_plan(
                dir, "worse", yaml, {keys[0], keys[1], "eval.every=2", "learning_rate=3"}))),
            "06");
  EXPECT_EQ(
      saved_steps(train_new(small_plan(dir, "better", yaml, {keys[0], keys[1], "eval.every=5"}))),
      "6");
  // No completion is correct: of equal scores the one with the lower loss is better.
  EXPECT_EQ(saved_steps(train_new(small_plan(dir, "sft", kSmallCommon + kSmallSft, keys))), "6");
}

TEST(Runs, ReportsOfGrpoShowTheCurveAndCompletionsBeforeAndAfter) {
  const TempDir dir;
  Recorder recorder;
  const std::atomic<bool> stop{false};
  cohort::Run run = cohort::Run::create(small_plan(dir, "run", kSmallCommon + kSmallGrpo));
  const RunResult result = run.execute(recorder, stop);
  EXPECT_EQ(recorder.steps, (std::vector<int64_t>{1, 2, 3, 4}));
  const std::string& report = recorder.messages.back();
  for (const char* part : {"mean reward over 4 steps", "before GRPO (held-out pass@1",
                           "after GRPO (held-out pass@1", "\n  wrong  ", "= -> "})
    EXPECT_NE(report.find(part), std::string::npos) << report;
  const auto lines = json_lines(run.dir() + "/metrics.jsonl");
  EXPECT_EQ(metric(lines.front(), "pass@1"), result.before);
  EXPECT_EQ(metric(lines.back(), "pass@1"), result.after);
}

TEST(Runs, GrpoMetricsDescribeItsSamples) {
  const TempDir dir;
  const std::string run = train_new(small_plan(
      dir, "run", kSmallCommon + kSmallGrpo, {"eval.num_samples=4", "eval.k=[1, 4]", "beta=0.1"}));
  for (const Json& line : json_lines(run + "/metrics.jsonl")) {
    if (line.find("eval") != nullptr) {
      EXPECT_LE(metric(line, "sampled_pass@1"), metric(line, "sampled_pass@4"));
      continue;
    }
    EXPECT_NEAR(metric(line, "reward"),
                metric(line, "rewards/format/mean") + metric(line, "rewards/task/mean"), 1e-12);
    EXPECT_GE(metric(line, "completions/mean_length"), 1);
    EXPECT_LE(metric(line, "completions/max_length"), 4);
    // Truncated completions have all the 4 tokens they may have.
    if (const double truncated = metric(line, "completions/clipped_ratio"); truncated < 1) {
      EXPECT_NEAR(
          metric(line, "completions/mean_length"),
          4 * truncated + (1 - truncated) * metric(line, "completions/mean_terminated_length"),
          1e-12);
    }
    EXPECT_GT(metric(line, "entropy"), 0);
    // The reference is the start: no distance before the first update.
    if (line.at("step").as_int() == 1)
      EXPECT_EQ(metric(line, "kl"), 0);
    else
      EXPECT_GT(metric(line, "kl"), 0);
    EXPECT_EQ(metric(line, "learning_rate"), 1e-2);
    EXPECT_GT(metric(line, "tokens_per_second"), 0);
    EXPECT_LE(
        metric(line, "time/sampling") + metric(line, "time/rewards") + metric(line, "time/update"),
        metric(line, "step_time"));
  }
}

TEST(Runs, LinesOfMetricsHaveATimeStamp) {
  const TempDir dir;
  for (const char* stage : {kSmallSft, kSmallGrpo}) {
    const std::string run = train_new(small_plan(dir, "run", kSmallCommon + stage));
    std::string last;
    for (const Json& line : json_lines(run + "/metrics.jsonl")) {
      const std::string time = line.at("time").as_string();
      EXPECT_EQ(time.size(), std::string("2026-01-01T00:00:00.000Z").size());
      EXPECT_LE(last, time);
      last = time;
    }
  }
}

// All completions are truncated and masked: the steps make no update, with a warning.
TEST(Runs, StepsWithAnEmptyLossMaskAreNoUpdates) {
  const TempDir dir;
  const ExpectLog warning("of the completions end at the length limit"),
      idle("no update has been made for 10 steps: all completions are truncated");
  const std::string run = train_new(
      small_plan(dir, "run", kSmallCommon + kSmallGrpo,
                 {"max_completion_length=1", "mask_truncated_completions=true", "steps=30",
                  "prompts_per_step=1", "num_generations=2", "loss_type=grpo"}));
  int64_t updates = 0, skipped = 0;
  for (const Json& line : json_lines(run + "/metrics.jsonl")) {
    if (line.find("eval") != nullptr) continue;
    EXPECT_EQ(line.at("loss").is_null(), line.at("grad_norm").is_null());
    const bool made = line.at("num_updates").as_double() == 1;
    EXPECT_EQ(made, !line.at("loss").is_null() && line.at("grad_norm").as_double() > 0);
    EXPECT_TRUE(made || metric(line, "frac_reward_zero_std") == 1);
    ++(made ? updates : skipped);
  }
  EXPECT_GT(skipped, 5);
  EXPECT_EQ(updates + skipped, 30);
  EXPECT_EQ(load_state(find_checkpoint(run)).updates, updates);
}

void expect_grpo_improves(const std::vector<std::string>& model) {
  const TempDir dir;
  const ExpectLog truncated("of the completions end at the length limit"),
      solved("the problems are solved, train on harder ones");
  // One sampled digit, right if it is a 1: from one in 13 to nearly always.
  std::vector<std::string> overrides = model;
  overrides.insert(overrides.end(),
                   {"rewards=[{name: format, pattern: '1'}]", "max_completion_length=1", "steps=40",
                    "num_generations=8", "prompts_per_step=8", "learning_rate=0.02"});
  const std::string run = train_new(small_plan(dir, "run", kSmallCommon + kSmallGrpo, overrides));
  const auto lines = json_lines(run + "/metrics.jsonl");
  EXPECT_LT(metric(lines[1], "reward"), 0.3);
  EXPECT_GT(metric(lines[lines.size() - 2], "reward"), 0.9);
}

TEST(Runs, GrpoOnASmallSettingImproves) {
  expect_grpo_improves({});
}
TEST(Runs, GrpoWithDeltaLayersImproves) {
  expect_grpo_improves(kSmallDelta);
}

// The control experiment: rewards shuffled over the completions give no improvement.
TEST(Runs, GrpoWithShuffledAdvantagesDoesNotImprove) {
  const TempDir dir;
  const ExpectLog truncated("of the completions end at the length limit");
  const std::string run =
      train_new(small_plan(dir, "run", kSmallCommon + kSmallGrpo,
                           {"rewards=[{name: format, pattern: '1'}]", "max_completion_length=1",
                            "steps=40", "num_generations=8", "prompts_per_step=8",
                            "learning_rate=0.02", "shuffle_advantages=true"}));
  const auto lines = json_lines(run + "/metrics.jsonl");
  EXPECT_LT(metric(lines[lines.size() - 2], "reward"), 0.5);
}

// Metrics of the groups are computed before the advantages are shuffled.
TEST(Runs, ShufflingChangesNoMetricOfTheGroups) {
  const TempDir dir;
  const auto first_step = [&](const std::string& shuffle) {
    const std::string run = train_new(
        small_plan(dir, "run", kSmallCommon + kSmallGrpo,
                   {"steps=1", "rewards=[{name: format, pattern: '.*1.*'}]", "prompts_per_step=8",
                    "num_generations=3", "shuffle_advantages=" + shuffle}));
    return json_lines(run + "/metrics.jsonl").at(1);
  };
  const Json plain = first_step("false"), shuffled = first_step("true");
  EXPECT_GT(metric(plain, "frac_reward_zero_std"), 0);
  EXPECT_EQ(metric(shuffled, "frac_reward_zero_std"), metric(plain, "frac_reward_zero_std"));
  EXPECT_NE(metric(shuffled, "grad_norm"), metric(plain, "grad_norm"));
}

// The reward penalizes correct completions.
TEST(Runs, CollapseOfThePassRateIsReported) {
  const TempDir dir;
  const std::string start =
      train_new(small_plan(dir, "start", kSmallCommon + kSmallSft, {"steps=120", "eval.size=64"}));
  const ExpectLog truncated("end at the length limit"), solved("the problems are solved"),
      collapse(
          "pass@1 (format) has collapsed to 0.0000; hint: a lower learning_rate; best so far: ");
  train_new(small_plan(
      dir, "run", kSmallCommon + kSmallGrpo,
      {"init_from=" + start, "steps=60", "eval={every: 5, size: 64, correct: {reward: format}}",
       "rewards=[{name: format, pattern: '[0-9]+', weight: -1}]", "max_completion_length=3"}));
}

// A run whose numeric reward applies to only one of its training problems.
class RareReward : public testing::Test {
 protected:
  const ExpectLog random_{"starts from random weights"};
  RareReward() {
    std::string words;
    for (int i = 0; i < 40; ++i)
      words += str("{\"prompt\": \"", i, "=\", \"answer\": \"", i == 7 ? "1" : "x", "\"}\n");
    write_file(dir_.path("words.jsonl"), words);
  }
  RunPlan plan(const std::vector<std::string>& overrides) {
    return small_plan(dir_, "run",
                      std::string(kSmallModel) +
                          "trainer: grpo\nsteps: 30\nprompts_per_step: 1\nnum_generations: 2\n"
                          "lr_schedule: constant\ncheckpoint: {every: 1, keep_last: 100}\n"
                          "data: {jsonl: {path: words.jsonl, held_out_fraction: 0.1}}\n"
                          "rewards: [{name: numeric}]\n",
                      overrides);
  }
  // It applies to no held-out problem.
  const ExpectLog not_measured_{"pass@1 (numeric) is not measured"};
  // The smallest seed with which the rewarded problem comes at step `step` (from 0).
  std::string seed_with_reward_at(int64_t step) {
    for (int64_t seed = 0;; ++seed) {
      const std::string override = str("seed=", seed);
      const TrainConfig config = plan({override}).stages[0];
      const Dataset data = load_dataset(config, nullptr);
      MixedOrder order = make_order(config, data);
      order.seek(step);
      if (data.train->get(order.next()).answer == "1") return override;
    }
  }
  TempDir dir_;
};

TEST_F(RareReward, NoneAtTheFirstStepIsAnError) {
  EXPECT_THROW_WITH(train_new(plan({seed_with_reward_at(1)})), InputError,
                    "none applies to any of the 2 completions of step 1; hint: ");
}

TEST_F(RareReward, NoneForTenStepsIsAnErrorAlsoAfterAResume) {
  const ExpectLog truncated("end at the length limit"), others("; the step is skipped"),
      warning("completions of step 10; the step is skipped");
  const std::string seed = seed_with_reward_at(0), expected = "of step 11, the last of 10 in a row";
  EXPECT_THROW_WITH(train_new(plan({seed})), InputError, expected);
  const std::string run = train_interrupted(plan({seed}), 6);
  EXPECT_THROW_WITH(train_rest(run), InputError, expected);
}

TEST_F(RareReward, AStepWithoutAnyIsSkipped) {
  const ExpectLog truncated("end at the length limit"), others("; the step is skipped"),
      warning("rewards: none applies to any of the 2 completions of step 4; the step");
  const std::string run = train_new(plan({seed_with_reward_at(0), "steps=5"}));
  const TrainState state = load_state(find_checkpoint(run));
  EXPECT_EQ(state.step, 5);
  const auto weights = [&](int step) {
    return read_file(str(run, "/checkpoints/step-0000000", step, "/model.safetensors"));
  };
  EXPECT_TRUE(weights(1) == weights(5));
  for (const Json& line : json_lines(run + "/metrics.jsonl")) {
    if (line.find("eval") != nullptr) continue;
    EXPECT_EQ(line.at("reward").is_null(), line.at("step").as_int() > 1);
  }
}

// With completions of one token, the loss types that divide by completions and by tokens are equal,
// unless a denominator counts completions without a reward.
TEST(Runs, CompletionsWithoutARewardAreInNoDenominator) {
  const ExpectLog random("starts from random weights");
  const TempDir dir;
  std::string problems;
  for (const char c : std::string("abcdefghijklmnopqrst"))
    problems += str("{\"prompt\": \"", c, "=\", \"answer\": \"", c % 2 == 0 ? "1" : "x", "\"}\n");
  write_file(dir.path("problems.jsonl"), problems);
  std::vector<double> norms;
  for (const std::string type : {"grpo", "dapo", "dr_grpo"}) {
    const std::string run = train_new(
        small_plan(dir, type,
                   std::string(kSmallModel) +
                       "trainer: grpo\nsteps: 1\nprompts_per_step: 6\nnum_generations: 32\n"
                       "data: {jsonl: {path: problems.jsonl, held_out_fraction: 0.4}}\n"
                       "rewards: [{name: numeric}]\n",
                   {"loss_type=" + type, "max_completion_length=1"}));
    for (const Json& line : json_lines(run + "/metrics.jsonl"))
      if (line.find("eval") == nullptr) norms.push_back(metric(line, "grad_norm"));
  }
  ASSERT_EQ(norms.size(), 3u);
  EXPECT_GT(norms[0], 0);
  EXPECT_EQ(norms[1], norms[0]);
  EXPECT_EQ(norms[2], norms[0]);
}

TEST(Runs, RewardThatAppliesToNothingIsAnError) {
  const ExpectLog random("starts from random weights");
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
