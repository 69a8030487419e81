// Resuming with changes: more steps, other keys, a changed data file, ranks with different state,
// an undamaged but bad checkpoint.
#include <filesystem>

#include "job/checkpoint.h"
#include "sys/files.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

const std::string kResumedSft = kSmallCommon + kSmallSft;

TrainState state_of(const std::string& run) {
  return load_state(find_checkpoint(run));
}

// The steps of metrics.jsonl in their order: "1 2 2e" is step 1, step 2 and an evaluation after it.
std::string logged(const std::string& stage_dir) {
  std::string out;
  for (const Json& line : json_lines(stage_dir + "/metrics.jsonl"))
    out += str(out.empty() ? "" : " ", line.at("step").as_int(),
               line.find("eval") != nullptr ? "e" : "");
  return out;
}

// ---- More steps --------------------------------------------------------------------------------

TEST(ResumeExtends, AFinishedRunToTheWeightsOfALongerOne) {
  const TempDir dir;
  // At a constant rate the first steps of both are the same.
  const std::vector<std::string> constant{"lr_schedule=constant"};
  std::vector<std::string> longer = constant;
  longer.push_back("steps=9");
  const std::string whole = train_new(small_plan(dir, "whole", kResumedSft, longer));
  const std::string run = train_new(small_plan(dir, "run", kResumedSft, constant));
  EXPECT_TRUE(state_of(run).finished);
  EXPECT_EQ(state_of(run).steps, 6);
  train_rest(run, {"steps=9"});
  EXPECT_EQ(state_of(run).steps, 9);
  for (const char* file : {"model.safetensors", "training/optimizer.safetensors"})
    EXPECT_TRUE(checkpoint_bytes(run, file) == checkpoint_bytes(whole, file)) << file;
  EXPECT_EQ(logged(run), "0e 1 2 3 4 5 6 6e 7 8 9 9e");
  EXPECT_NE(read_file(run + "/log.txt").find("steps: 6 -> 9; from step 6 on the learning rate"),
            std::string::npos);
}

TEST(ResumeExtends, ByTheScheduleOfTheNewSteps) {
  const TempDir dir;
  const std::string run = train_new(small_plan(dir, "run", kResumedSft, {"lr_schedule=linear"}));
  train_rest(run, {"steps=12"});
  const TrainConfig config =
      small_plan(dir, "other", kResumedSft, {"lr_schedule=linear"}).stages[0];
  for (const Json& line : json_lines(run + "/metrics.jsonl"))
    if (line.find("eval") == nullptr) {
      const int64_t step = line.at("step").as_int();
      EXPECT_EQ(metric(line, "learning_rate"),
                scheduled_learning_rate(config.optimizer, step - 1, step <= 6 ? 6 : 12))
          << step;
    }
}

TEST(ResumeExtends, AlsoIfItWasStoppedBeforeTheFirstNewStep) {
  const TempDir dir;
  const std::string whole =
      train_new(small_plan(dir, "whole", kResumedSft, {"lr_schedule=constant"}));
  train_rest(whole, {"steps=8"});
  const std::string run = train_new(small_plan(dir, "run", kResumedSft, {"lr_schedule=constant"}));
  Recorder recorder;
  const std::atomic<bool> stop{true};
  const std::vector<std::string> more{"steps=8"};
  EXPECT_EQ(cohort::Run::resume(run, more).execute(recorder, stop).end, StageEnd::kInterrupted);
  EXPECT_EQ(state_of(run).step, 6);
  train_rest(run);  // the new steps are stored
  EXPECT_EQ(state_of(run).step, 8);
  EXPECT_TRUE(checkpoint_bytes(run) == checkpoint_bytes(whole));
  EXPECT_EQ(logged(run), logged(whole));
}

TEST(ResumeExtends, AGoalThatWasReachedByAHigherOne) {
  const TempDir dir;
  const std::string run =
      train_new(small_plan(dir, "run", kResumedSft,
                           {"steps=20", "eval.every=2", "rewards=[{name: format, pattern: '.*'}]",
                            "eval.correct.reward=format", "eval.stop_at=0.5"}));
  EXPECT_EQ(state_of(run).step, 0);
  train_rest(run, {"steps=30"});  // the goal is still reached
  EXPECT_EQ(state_of(run).step, 0);
  EXPECT_EQ(logged(run), "0e");
  EXPECT_NE(
      read_file(run + "/log.txt")
          .find("sft is finished, at step 0: its last score, 1, reached eval.stop_at: 0.5; to "
                "train on, resume with steps=N or another eval.stop_at"),
      std::string::npos);
  train_rest(run, {"eval.stop_at=0"});
  EXPECT_EQ(state_of(run).step, 20);
}

TEST(ResumeExtends, OnlyTheLastStageThatHasStarted) {
  const TempDir dir;
  const std::string yaml = std::string(kSmallModel) + kSmallData +
                           "stages:\n"
                           "  - {trainer: sft, steps: 5, batch_size: 8}\n"
                           "  - {trainer: sft, steps: 3, batch_size: 4}\n";
  const std::string run = train_new(small_plan(dir, "run", yaml));
  const std::string first = checkpoint_bytes(run + "/1-sft");
  EXPECT_THROW_WITH(train_rest(run, {"steps=7"}), InputError,
                    "sft has ended at step 5 and cannot train on: 2-sft has started from its "
                    "weights; hint: a key such as steps reaches every stage; stages.1.steps=7 is "
                    "for the last one alone");
  EXPECT_EQ(state_of(run).step, 3);
  train_rest(run);  // the refused override has no effect
  EXPECT_EQ(state_of(run).step, 3);
  EXPECT_NE(read_file(run + "/log.txt").find("to train on, resume with stages.1.steps=N or"),
            std::string::npos);
  train_rest(run, {"stages.1.steps=7"});
  EXPECT_EQ(state_of(run).step, 7);
  EXPECT_EQ(state_of(run + "/1-sft").step, 5);
  EXPECT_TRUE(checkpoint_bytes(run + "/1-sft") == first);
  // Before the second has started, steps reaches both.
  fs::remove_all(run + "/2-sft");
  train_rest(run, {"steps=6"});
  EXPECT_EQ(state_of(run + "/1-sft").step, 6);
  EXPECT_EQ(state_of(run + "/2-sft").step, 6);
}

// Checkpoints without the fields of later versions.
TEST(ResumeExtends, RunsOfEarlierVersions) {
  const TempDir dir;
  const std::string whole = train_new(small_plan(dir, "whole", kResumedSft)),
                    run = train_interrupted(small_plan(dir, "run", kResumedSft), 3);
  const std::string state = find_checkpoint(run) + "/training/state.json";
  const std::string manifest = find_checkpoint(run) + "/manifest.json";
  const Json now = parse_json(read_file(state), "state");
  Json old;
  for (const auto& [key, value] : now.as_object())
    if (key != "steps" && key != "evaluated_step" && key != "data_fingerprint") old.set(key, value);
  write_file(state, old.dump());
  Json sums = parse_json(read_file(manifest), "manifest"), files = sums.at("files");
  files.set("training/state.json", Json()
                                       .set("bytes", static_cast<int64_t>(fs::file_size(state)))
                                       .set("xxh3", file_checksum(state)));
  write_file(manifest, sums.set("files", files).dump());
  train_rest(run);
  EXPECT_TRUE(checkpoint_bytes(run) == checkpoint_bytes(whole));
  EXPECT_EQ(logged(run), logged(whole));
}

// Training state beside the model, as earlier versions saved it, with a reference.
TEST(ResumeExtends, CheckpointsOfFormat1ToTheSameBitsInFormat2) {
  const TempDir dir;
  const std::string config = std::string(kSmallModel) + kSmallData + kSmallGrpo + "beta: 0.1\n";
  const std::string whole = train_new(small_plan(dir, "whole", config)),
                    run = train_interrupted(small_plan(dir, "run", config), 2),
                    before = find_checkpoint(run);
  to_format_1(before);
  ASSERT_TRUE(fs::exists(before + "/reference.safetensors"));
  verify_checkpoint(before);
  train_rest(run);
  for (const char* file :
       {"model.safetensors", "training/optimizer.safetensors", "training/reference.safetensors"})
    EXPECT_TRUE(checkpoint_bytes(run, file) == checkpoint_bytes(whole, file)) << file;
  EXPECT_EQ(parse_json(checkpoint_bytes(run, "manifest.json"), "").at("format").as_int(), 2);
}

// ---- Recorded configurations -------------------------------------------------------------------

TEST(ResumeRecords, TheConfigurationOfEachStartThatWorked) {
  const TempDir dir;
  const std::string run = train_interrupted(small_plan(dir, "run", kResumedSft), 2);
  const auto start = [&](int n) { return run + "/starts/" + std::to_string(n) + ".yaml"; };
  EXPECT_NE(read_file(start(1)).find("Z: new run\n"), std::string::npos);
  EXPECT_FALSE(fs::exists(start(2)));
  const std::string config = read_file(run + "/config.yaml");
  // Failed starts are not recorded.
  EXPECT_THROW_WITH(train_rest(run, {"model.d_model=32"}), InputError, "model.d_model: 32");
  EXPECT_THROW_WITH(train_rest(run, {"data.task=parity"}), InputError, "parity");
  EXPECT_EQ(read_file(run + "/config.yaml"), config);
  EXPECT_FALSE(fs::exists(start(2)));

  Recorder recorder;
  std::atomic<bool> stop{false};
  recorder.on_step = [&](int64_t) { stop = true; };
  const std::vector<std::string> overrides{"learning_rate=0.5", "eval.every=3"};
  EXPECT_EQ(cohort::Run::resume(run, overrides).execute(recorder, stop).end,
            StageEnd::kInterrupted);
  EXPECT_NE(read_file(start(2)).find("Z: resumed learning_rate=0.5 eval.every=3\n"),
            std::string::npos)
      << read_file(start(2));
  train_rest(run);
  EXPECT_NE(read_file(start(3)).find("Z: resumed\n"), std::string::npos);
  for (const std::string& path : {start(2), start(3), run + "/config.yaml"}) {
    const TrainConfig recorded = load_plan(path, {}).stages[0];
    EXPECT_EQ(recorded.optimizer.learning_rate, 0.5) << path;
    EXPECT_EQ(recorded.eval.every, 3);
  }
  // The second resume continued at the new rate: warm-up 2, then step 3 of 6 at its peak.
  for (const Json& line : json_lines(run + "/metrics.jsonl"))
    if (line.find("eval") == nullptr && line.at("step").as_int() == 4) {
      EXPECT_GT(metric(line, "learning_rate"), 0.1);
    }
  // With nothing left to train there is no start.
  train_rest(run, {"learning_rate=0.7"});
  EXPECT_FALSE(fs::exists(start(4)));
  EXPECT_EQ(load_plan(run + "/config.yaml", {}).stages[0].optimizer.learning_rate, 0.5);
}

// ---- The data ----------------------------------------------------------------------------------

TEST(ResumeData, ThatHaveChangedAreRefusedUntilAccepted) {
  const TempDir dir;
  const std::string yaml = std::string(kSmallModel) + kSmallPretrain;
  const RunPlan plan = small_plan(dir, "run", yaml);
  const std::string run = train_interrupted(plan, 2), text = dir.path("text.txt");
  const std::string before = file_checksum(text);
  EXPECT_EQ(state_of(run).data_fingerprint, before);
  write_file(text, "one two three four five and\n" + small_text());
  const std::string after = file_checksum(text);
  EXPECT_THROW_WITH(train_rest(run), InputError,
                    text + " is not the file that was meant: its fingerprint is " + after +
                        ", expected " + before);
  EXPECT_THROW_WITH(train_rest(run), InputError,
                    "hint: restore the file, or accept this one with data.fingerprint=" + after);
  const auto take_one_step = [&](const std::vector<std::string>& overrides) {
    Recorder recorder;
    std::atomic<bool> stop{false};
    recorder.on_step = [&](int64_t) { stop = true; };
    cohort::Run::resume(run, overrides).execute(recorder, stop);
  };
  take_one_step({"data.fingerprint=" + after});
  EXPECT_EQ(state_of(run).data_fingerprint, after);
  take_one_step({});  // the acceptance is stored
  write_file(text, small_text());
  EXPECT_THROW_WITH(train_rest(run), InputError, "expected " + after);
  // A new run is checked against the key only.
  EXPECT_THROW_WITH(
      cohort::Run::create(small_plan(dir, "new", yaml, {"data.fingerprint=" + after})), InputError,
      "its fingerprint is " + before);
  EXPECT_FALSE(fs::exists(dir.path("new")));
  train_new(small_plan(dir, "new", yaml));
}

TEST(ResumeData, OfSeveralSourcesContinueWhereTheyWere) {
  const TempDir dir;
  write_file(dir.path("text.txt"), small_text());
  std::string lines, sums, more;
  for (int i = 0; i < 20; ++i) lines += "{\"text\": \"" + std::string(20, 'x') + "\"}\n";
  write_file(dir.path("lines.jsonl"), lines);
  for (int i = 0; i < 40; ++i)
    (i % 3 == 0 ? sums : more) +=
        str("{\"prompt\": \"", i, "+1=\", \"answer\": \"", i + 1, "\"}\n");
  write_file(dir.path("sums.jsonl"), sums);
  write_file(dir.path("more.jsonl"), more);
  const std::string text =
      std::string(kSmallModel) +
      "trainer: pretrain\nsteps: 6\nbatch_size: 4\n"
      "data: {text: [text.txt, lines.jsonl], weights: [1, 3], cache_dir: kept}\n";
  const std::string problems = std::string(kSmallModel) + kSmallSft +
                               "data: {jsonl: {path: [sums.jsonl, more.jsonl]}, weights: [3, 1],\n"
                               "  curriculum: length}\n";
  for (const std::string& yaml : {text, problems}) {
    const std::string whole = train_new(small_plan(dir, "whole", yaml));
    const std::string run = train_interrupted(small_plan(dir, "run", yaml), 3);
    train_rest(run);
    for (const char* file : {"model.safetensors", "training/optimizer.safetensors"})
      EXPECT_TRUE(checkpoint_bytes(run, file) == checkpoint_bytes(whole, file)) << yaml << file;
    const std::string alone = train_new(small_plan(dir, "alone", yaml, {"data.weights=[1, 1]"}));
    EXPECT_FALSE(checkpoint_bytes(alone, "model.safetensors") ==
                 checkpoint_bytes(whole, "model.safetensors"));
  }
}

// A longer run continues its curriculum where it was: no problem repeats before all others have
// come.
TEST(ResumeData, OfACurriculumContinueWhereTheyWere) {
  const TempDir dir;
  std::string lines;
  for (int i = 0; i < 40; ++i)
    lines +=
        str("{\"prompt\": \"", i % 10, "=\", \"answer\": \"",
            std::string(static_cast<size_t>(1 + i / 10), static_cast<char>('0' + i % 10)), "\"}\n");
  write_file(dir.path("sums.jsonl"), lines);
  const std::string yaml =
      std::string(kSmallModel) + kSmallSft +
      "lr_schedule: constant\n"
      "data: {curriculum: length, jsonl: {path: sums.jsonl, held_out_fraction: 0}}\n";
  const std::string planned = train_new(small_plan(dir, "planned", yaml, {"steps=3"}));
  train_rest(planned, {"steps=5"});
  EXPECT_EQ(load_state(find_checkpoint(planned)).planned_steps, (std::vector<int64_t>{3, 5}));
  // As if the longer run had come after an interruption of the shorter one.
  const std::string interrupted = train_interrupted(small_plan(dir, "run", yaml, {"steps=3"}), 2);
  train_rest(interrupted, {"steps=5"});
  EXPECT_EQ(load_state(find_checkpoint(interrupted)).planned_steps, (std::vector<int64_t>{3, 5}));
  EXPECT_TRUE(checkpoint_bytes(interrupted) == checkpoint_bytes(planned));
  const std::string other = train_new(small_plan(dir, "other", yaml, {"steps=5"}));
  EXPECT_FALSE(checkpoint_bytes(other) == checkpoint_bytes(planned));
}

// A refilled step takes more prompts than others.
TEST(ResumeData, OfRefilledStepsContinueWhereTheyWere) {
  const TempDir dir;
  const std::string yaml = std::string(kSmallModel) + kSmallData + kSmallGrpo;
  const std::vector<std::string> keys = {"steps=4", "dynamic_sampling_rounds=2"};
  const std::string whole = train_new(small_plan(dir, "whole", yaml, keys));
  EXPECT_GT(state_of(whole).data_position,
            4 * small_plan(dir, "plan", yaml, keys).stages[0].batch.prompts_per_step);
  const std::string interrupted = train_interrupted(small_plan(dir, "run", yaml, keys), 2);
  train_rest(interrupted, {});
  EXPECT_EQ(state_of(interrupted).data_position, state_of(whole).data_position);
  EXPECT_TRUE(checkpoint_bytes(interrupted) == checkpoint_bytes(whole));
}

TEST(ResumeData, OfAnEvaluationThatHaveChangedAreRefused) {
  const TempDir dir;
  const ExpectLog leak("20 of the 20 held-out problems are also trained on, the first: " +
                       dir.path("test.jsonl") + ":1; hint: ");
  std::string lines;
  for (int i = 0; i < 20; ++i) lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"1\"}\n");
  write_file(dir.path("train.jsonl"), lines);
  write_file(dir.path("test.jsonl"), lines);
  const std::string run = train_interrupted(
      small_plan(dir, "run",
                 std::string(kSmallModel) + kSmallSft +
                     "data: {jsonl: {path: train.jsonl, eval_path: test.jsonl}}\n"),
      2);
  write_file(dir.path("test.jsonl"), lines + lines);
  EXPECT_THROW_WITH(train_rest(run), InputError,
                    dir.path("test.jsonl") + " is not the file that was meant");
  write_file(dir.path("test.jsonl"), lines);
  train_rest(run);
}

// ---- Ranks -------------------------------------------------------------------------------------

class ResumeRanks : public testing::Test {
 protected:
  // Starts a stage on two ranks, each with its own configuration and directory.
  static void start(const RunPlan& plan_0, const std::string& dir_0, const RunPlan& plan_1,
                    const std::string& dir_1) {
    const std::atomic<bool> stop{false};
    Reporter reporter;
    run_local_ranks(2, [&](Communicator& comm) {
      const bool first = comm.rank() == 0;
      Stage({(first ? plan_0 : plan_1).stages[0], first ? dir_0 : dir_1, comm, reporter, stop});
    });
  }
  std::string trained(const std::string& name, const std::vector<std::string>& overrides) {
    return train_interrupted(small_plan(dir_, name, kResumedSft, overrides), 2);
  }
  TempDir dir_;
};

TEST_F(ResumeRanks, WithOtherWeightsAreRefused) {
  const RunPlan plan = small_plan(dir_, "plan", kResumedSft);
  const std::string one = trained("one", {}), other = trained("other", {"seed=2"});
  start(plan, one, plan, one);
  EXPECT_THROW_WITH(start(plan, one, plan, other), InputError,
                    "the ranks do not start alike: rank 1 has other weights "
                    "(model.embed_tokens.weight) than rank 0");
  // Also where no checkpoint is involved.
  fs::create_directories(dir_.path("fresh"));
  EXPECT_THROW_WITH(start(plan, dir_.path("fresh"),
                          small_plan(dir_, "plan", kResumedSft, {"seed=2"}), dir_.path("fresh")),
                    InputError, "rank 1 has other weights");
}

TEST_F(ResumeRanks, WithAnotherOptimizerStateAreRefused) {
  const RunPlan plan = small_plan(dir_, "plan", kResumedSft);
  // At a rate of 0 the weights are the same, and the moments are not.
  const std::string one = trained("one", {"learning_rate=0"}),
                    other = trained("other", {"learning_rate=0", "batch_size=3"});
  EXPECT_THROW_WITH(start(plan, one, plan, other), InputError,
                    "rank 1 has other optimizer state (model.embed_tokens.weight.m) than rank 0");
}

TEST_F(ResumeRanks, WithOtherDataAreRefused) {
  const std::string yaml = std::string(kSmallModel) + kSmallPretrain;
  const RunPlan plan = small_plan(dir_, "plan", yaml);
  write_file(dir_.path("other.txt"), small_text() + "one");  // the same characters
  const RunPlan other = small_plan(dir_, "plan", yaml, {"data.text=" + dir_.path("other.txt")});
  fs::create_directories(dir_.path("fresh"));
  EXPECT_THROW_WITH(start(plan, dir_.path("fresh"), other, dir_.path("fresh")), InputError,
                    "rank 1 has other data than rank 0");
}

// A wrong bit on one rank ends all, and nothing of the step is written.
TEST_F(ResumeRanks, WithOtherWeightsSaveNothing) {
  for (const char* sharding : {"sharding=none", "sharding=optimizer", "sharding=full"})
    for (const int bad : {-1, 0, 2}) {
      const RunPlan plan =
          small_plan(dir_, "plan", kResumedSft, {sharding, "steps=1", "warmup_steps=0"});
      const std::string run = dir_.path(str(sharding, bad));
      fs::create_directories(run);
      const std::atomic<bool> stop{false};
      std::atomic<int> refusals = 0;
      Reporter reporter;
      run_local_ranks(3, [&](Communicator& comm) {
        Stage stage({plan.stages[0], run, comm, reporter, stop});
        for (const NamedParameter& p : stage.model().parameters())
          if (comm.rank() == bad && p.name == "model.norm.weight")
            *(static_cast<uint8_t*>(const_cast<void*>(p.value.raw())) + p.value.nbytes() - 3) ^= 1;
        stage.state().step = 1;
        const std::string ranks = bad == 0 ? "ranks 1, 2 have" : "rank 2 has";
        try {
          stage.finish();
        } catch (const Error& e) {
          EXPECT_EQ(dynamic_cast<const InputError*>(&e), nullptr);  // which would save the step
          EXPECT_TRUE(std::string(e.what()).starts_with(
              str("step 1 is not saved: ", ranks, " other model.norm.weight than rank 0")))
              << e.what();
          ++refusals;
        }
      });
      EXPECT_EQ(refusals, bad < 0 ? 0 : 3);
      EXPECT_EQ(has_checkpoint(run + "/checkpoints"), bad < 0);
      EXPECT_EQ(fs::exists(run + "/checkpoints"), bad < 0);
    }
}

// ---- Undamaged but bad checkpoints -------------------------------------------------------------

TEST(ResumeBadStart, FallsBackACheckpointAndEndsLikeAnUninterruptedRun) {
  for (const char* ranks : {"ranks=1", "ranks=3"}) {
    SCOPED_TRACE(ranks);
    const TempDir dir;
    const std::vector<std::string> keys{ranks, "checkpoint.every=1", "checkpoint.keep_last=9",
                                        "eval.every=2"};
    const std::string whole = train_new(small_plan(dir, "whole", kResumedSft, keys));
    const std::string run = train_interrupted(small_plan(dir, "run", kResumedSft, keys), 4);
    const std::string at = run + "/checkpoints/step-0000000";
    poison(run, at + "4");
    poison(run, at + "3");
    {
      const ExpectLog first("the first update after resuming from " + at + "4 failed (");
      const ExpectLog second("going back to " + at + "2");
      train_rest(run);
    }
    for (const char* step : {"4", "6"})
      EXPECT_TRUE(read_file(at + step + "/model.safetensors") ==
                  read_file(whole + "/checkpoints/step-0000000" + step + "/model.safetensors"));
    EXPECT_EQ(logged(run), "0e 1 2 2e 3 4 4e 5 6 6e");
  }
}

TEST(ResumeBadStart, WithoutAnEarlierCheckpointIsAnError) {
  const TempDir dir;
  const std::string run = train_interrupted(small_plan(dir, "run", kResumedSft), 3);
  const std::string weights = checkpoint_bytes(run);
  fs::remove_all(checkpoint_path(run + "/checkpoints", 0));
  poison(run, find_checkpoint(run));
  EXPECT_THROW_WITH(train_rest(run), Error, "there is no checkpoint before it; hint:");
  EXPECT_EQ(state_of(run).step, 3);
}

// After a good update the checkpoint is not the cause.
TEST(ResumeBadStart, IsOnlyTheFirstUpdate) {
  const TempDir dir;
  const std::string run =
      train_interrupted(small_plan(dir, "run", kResumedSft, {"checkpoint.every=1", "steps=9"}), 3);
  // Adam moves every weight by about the rate: after one such step the loss is not finite.
  EXPECT_THROW_WITH(
      train_rest(run, {"learning_rate=1e3", "warmup_steps=0", "dtype=f32", "max_grad_norm=0",
                       "weight_decay=10", "lr_schedule=constant", "steps=60"}),
      Error, "nothing was updated");
}

}  // namespace
}  // namespace cohort::test
