// Runs on preference pairs (dpo): the first update, resuming, the file of reference log-probs,
// evaluations, adapters.
#include <filesystem>
#include <numbers>
#include <set>

#include "job/evaluation.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class PreferenceRuns : public testing::Test {
 protected:
  RunPlan plan(const std::string& name, const std::vector<std::string>& overrides = {}) const {
    return small_plan(dir_, name, kSmallModel + kSmallDpo, overrides);
  }
  // Lines of metrics.jsonl: of steps, or of evaluations.
  static std::vector<Json> lines(const std::string& run, bool eval = false) {
    std::vector<Json> out;
    for (Json& line : json_lines(run + "/metrics.jsonl"))
      if ((line.find("eval") != nullptr) == eval) out.push_back(std::move(line));
    return out;
  }
  static void expect_equal_weights(const std::string& run, const std::string& whole) {
    for (const char* file : {"model.safetensors", "training/optimizer.safetensors"})
      EXPECT_TRUE(checkpoint_bytes(run, file) == checkpoint_bytes(whole, file)) << file;
  }
  TempDir dir_;
};

TEST_F(PreferenceRuns, BeginExactlyAtTheReference) {
  for (const char* ranks : {"ranks=1", "ranks=2"})
    for (const char* micro : {"micro_batch_tokens=8192", "micro_batch_tokens=8"}) {
      SCOPED_TRACE(str(ranks, " ", micro));
      const std::string run = train_new(plan("run", {ranks, micro}));
      const std::vector<Json> steps = lines(run), scores = lines(run, true);
      ASSERT_EQ(steps.size(), 6u);
      EXPECT_EQ(metric(steps[0], "loss"), std::numbers::ln2);
      for (const char* name :
           {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}) {
        EXPECT_EQ(metric(steps[0], name), 0) << name;
        EXPECT_NE(metric(steps[5], name), 0) << name;
      }
      EXPECT_LT(metric(steps[0], "logps/chosen"), 0);
      EXPECT_GT(metric(steps[0], "grad_norm"), 0);
      ASSERT_EQ(scores.size(), 2u);
      EXPECT_EQ(metric(scores[0], "accuracy"), 0);
      EXPECT_NEAR(metric(scores[0], "val_loss"), std::numbers::ln2, 1e-15);
      EXPECT_GT(metric(scores[1], "accuracy"), 0);
      EXPECT_GT(metric(scores[1], "rewards/margins"), 0);
      EXPECT_LT(metric(scores[1], "val_loss"), std::numbers::ln2);
      fs::remove_all(run);
    }
}

TEST_F(PreferenceRuns, HaveNoDropout) {
  const std::string without = train_new(plan("without"));
  const ExpectLog warning("model.dropout: does nothing in dpo");
  expect_equal_weights(train_new(plan("with", {"model.dropout=0.2"})), without);
}

TEST_F(PreferenceRuns, LearnToPreferWithEveryLoss) {
  for (const std::vector<std::string>& keys : std::vector<std::vector<std::string>>{
           {},
           {"preference.loss=hinge"},
           {"preference.loss=ipo"},
           {"preference.loss=robust", "preference.label_smoothing=0.1"},
           {"preference.length_normalized=yes"},
           {"preference.reference=none", "preference.length_normalized=yes", "preference.beta=2",
            "preference.margin=0.5"},
           {"preference.sft_weight=0.5"}}) {
    std::vector<std::string> all = {"steps=40", "learning_rate=3e-2"};
    all.insert(all.end(), keys.begin(), keys.end());
    SCOPED_TRACE(join(all, " "));
    const std::string run = train_new(plan("run", all));
    const std::vector<Json> steps = lines(run);
    EXPECT_LT(metric(steps.back(), "loss"), metric(steps.front(), "loss"));
    EXPECT_GT(metric(lines(run, true).back(), "accuracy"), 0.5);
    EXPECT_EQ(fs::exists(run + "/pair_reference"),
              join(all, " ").find("none") == std::string::npos);
    fs::remove_all(run);
  }
}

TEST_F(PreferenceRuns, ResumeToTheSameBits) {
  for (const char* ranks : {"ranks=1", "ranks=2"}) {
    const std::string whole = train_new(plan("whole", {ranks, "eval.every=2"}));
    for (const int64_t steps : {1, 3}) {
      const std::string run = train_interrupted(plan("run", {ranks, "eval.every=2"}), steps);
      train_rest(run);
      expect_equal_weights(run, whole);
      const std::vector<Json> actual = lines(run), expected = lines(whole);
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < actual.size(); ++i)
        EXPECT_EQ(metric(actual[i], "loss"), metric(expected[i], "loss"));
      EXPECT_EQ(read_file(run + "/pair_reference"), read_file(whole + "/pair_reference"));
      fs::remove_all(run);
    }
    fs::remove_all(whole);
  }
}

// References cannot be made again: the model that the stage began with may have changed.
TEST_F(PreferenceRuns, ReferencesThatAreLostAreAnError) {
  const auto refused = [&](const char* message, const std::function<void(std::string&)>& damage) {
    const std::string run = train_interrupted(plan("run"), 3), path = run + "/pair_reference";
    std::string text = read_file(path);
    damage(text);
    text.empty() ? static_cast<void>(fs::remove(path)) : write_file(path, text);
    EXPECT_THROW_WITH(train_rest(run), InputError, message);
    fs::remove_all(run);
  };
  refused("pair_reference is missing; hint: restore it", [](std::string& text) { text.clear(); });
  refused("pair_reference is damaged", [](std::string& text) { text[text.size() / 2] ^= 1; });
  refused("pair_reference is damaged", [](std::string& text) { text.resize(text.size() - 8); });
  refused("pair_reference is damaged", [](std::string& text) { text = "x"; });
}

TEST_F(PreferenceRuns, MoreStepsHaveTheReferencesOfTheStart) {
  const std::vector<std::string> few = {"steps=2", "batch_size=2", "lr_schedule=constant"};
  const std::string run = train_new(plan("run", few));
  train_rest(run, {"steps=6"});
  const std::string whole =
      train_new(plan("whole", {"steps=6", "batch_size=2", "lr_schedule=constant"}));
  expect_equal_weights(run, whole);
}

// The held-out pairs, which the file has, show that the model is another one.
TEST_F(PreferenceRuns, AnotherStartThanThatOfTheReferencesIsAnError) {
  const std::string base = train_new(small_plan(dir_, "base", kSmallModel + kSmallDpo)),
                    other =
                        train_new(small_plan(dir_, "other", kSmallModel + kSmallDpo, {"seed=5"}));
  const std::vector<std::string> few = {"steps=2", "batch_size=2", "init_from=" + base};
  const std::string run = train_new(plan("run", few));
  fs::copy(find_checkpoint(other), find_checkpoint(base),
           fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  EXPECT_THROW_WITH(train_rest(run, {"steps=6"}), InputError,
                    "the model that the stage began with has changed");
}

// References are those of the tokens of a pair, so that a resumed stage never uses others.
TEST_F(PreferenceRuns, PairsWithOtherTokensHaveOtherReferences) {
  const std::vector<std::string> other = {
      "data.jsonl.prompt={prompt}=", "data.jsonl.answer={chosen}",
      "data.jsonl.rejected={rejected}"};
  const std::string run = train_interrupted(plan("run"), 3);
  // The new records, of the rest of the stage, are among those of a run that began with these.
  constexpr size_t kRecord = 24;
  const auto records = [](const std::string& dir) {
    const std::string text = read_file(dir + "/pair_reference");
    std::set<std::string> out;
    for (size_t at = 16; at < text.size(); at += kRecord) out.insert(text.substr(at, kRecord));
    return out;
  };
  const std::set<std::string> before = records(run);
  train_rest(run, other);
  const std::set<std::string> all = records(train_new(plan("whole", other)));
  size_t added = 0;
  for (const std::string& record : records(run)) {
    if (before.contains(record)) continue;
    EXPECT_TRUE(all.contains(record));
    ++added;
  }
  EXPECT_GT(added, 8u);
}

TEST_F(PreferenceRuns, AdaptersHaveTheirBaseOrTheirStartAsReference) {
  const std::string base =
      train_new(small_plan(dir_, "base", kSmallModel + kSmallDpo, {"dtype=f64"}));
  const std::vector<std::string> lora = {"init_from=" + base, "lora.rank=3", "dtype=f64"};
  const auto with = [&](std::vector<std::string> keys) {
    keys.insert(keys.end(), lora.begin(), lora.end());
    return keys;
  };
  const std::string of_base = train_new(plan("lora", with({"preference.reference=base"}))),
                    of_start = train_new(plan("lora_start", with({})));
  EXPECT_EQ(metric(lines(of_base)[0], "loss"), std::numbers::ln2);
  EXPECT_TRUE(checkpoint_bytes(of_base, "adapter_model.safetensors") ==
              checkpoint_bytes(of_start, "adapter_model.safetensors"));
  // Adapters that are trained further: their base is another policy than their start.
  const std::vector<std::string> more = {"init_from=" + of_base, "lora.rank=3", "dtype=f64"};
  std::vector<std::string> further = more;
  further.emplace_back("preference.reference=base");
  EXPECT_NE(metric(lines(train_new(plan("further", further)))[0], "rewards/margins"), 0);
  EXPECT_EQ(metric(lines(train_new(plan("restart", more)))[0], "rewards/margins"), 0);
  const std::string run = train_interrupted(plan("stopped", with({})), 3);
  train_rest(run);
  EXPECT_TRUE(checkpoint_bytes(run, "adapter_model.safetensors") ==
              checkpoint_bytes(of_start, "adapter_model.safetensors"));
}

TEST_F(PreferenceRuns, AStageAfterSftHasItsResultAsReference) {
  const std::string yaml = std::string(kSmallModel) + kSmallPairs +
                           "batch_size: 4\nstages:\n  - {trainer: sft, steps: 3, data: {jsonl: "
                           "{answer: '{chosen}'}}}\n  - {trainer: dpo, steps: 6, data: {jsonl: "
                           "{answer: '{chosen}', rejected: '{rejected}'}}}\n";
  const std::string run = train_new(small_plan(dir_, "run", yaml));
  EXPECT_EQ(metric(lines(run + "/2-dpo")[0], "loss"), std::numbers::ln2);
  const std::string stopped = train_interrupted(small_plan(dir_, "stopped", yaml), 4);
  train_rest(stopped);
  EXPECT_TRUE(checkpoint_bytes(stopped) == checkpoint_bytes(run));
}

// `cohort eval` scores held-out pairs by the file of the run.
TEST_F(PreferenceRuns, CheckpointsAreEvaluatedAgainstTheReferencesOfTheRun) {
  const std::string run = train_new(plan("run"));
  const std::string checkpoint = find_checkpoint(run);
  const RunPlan own = load_plan(run + "/config.yaml", {});
  const LoadedModel loaded = load_model(checkpoint, DType::kF32);
  const ModelScores scores = evaluate_model(own, loaded);
  EXPECT_EQ(scores.measure, "accuracy");
  for (const char* name : {"accuracy", "val_loss", "rewards/margins"})
    EXPECT_EQ(metric(scores.metrics, name), metric(lines(run, true).back(), name)) << name;
  // By any name of the checkpoint.
  fs::create_directory_symlink(checkpoint, dir_.path("link"));
  const LoadedModel linked = load_model(dir_.path("link"), DType::kF32);
  EXPECT_EQ(metric(evaluate_model(own, linked).metrics, "val_loss"),
            metric(scores.metrics, "val_loss"));
  fs::remove(run + "/pair_reference");
  EXPECT_THROW_WITH(evaluate_model(own, loaded), InputError, "pair_reference is missing");
}

// Keys of the section preference, and those of grpo that dpo does not read.
TEST(PreferencePlans, KeysThatDoNothingAreNamed) {
  const TempDir dir;
  const auto load = [&](const std::string& yaml) {
    write_file(dir.path("plan.yaml"), yaml);
    return load_plan(dir.path("plan.yaml"), {});
  };
  const std::string pairs =
      "trainer: dpo\ndata: {jsonl: {path: a.jsonl, answer: '{good}', rejected: '{bad}'}}\n";
  const auto warnings = [&](const std::string& yaml) {
    return join(load(yaml).stages[0].warnings(), "\n");
  };
  const auto expect = [&](const std::string& yaml, const std::string& text) {
    EXPECT_NE(warnings(yaml).find(text), std::string::npos) << warnings(yaml);
  };
  EXPECT_EQ(warnings(pairs), "");
  expect(
      pairs + "beta: 0.2\n",
      "beta: 0.2 does nothing here: it is for trainer: grpo, and dpo has the section preference");
  expect(pairs + "rewards: [{name: exact_match}]\n",
         "rewards does nothing here: it is for trainers sft and grpo");
  expect(pairs + "environment: {name: tools, tools: [calculator]}\n", "environment does nothing");
  expect(pairs + "preference: {loss: ipo, margin: 1}\n",
         "preference.margin: does nothing with loss ipo");
  const std::string task = "data: {task: parity}\npreference: {beta: 0.2}\n";
  expect("trainer: sft\n" + task, "preference.beta: 0.2 does nothing here: it is for trainer: dpo");
  expect("trainer: sft\ndata: {jsonl: {path: a.jsonl, rejected: '{bad}'}}\n",
         "data.jsonl.rejected: \"{bad}\" does nothing here: it is for trainer: dpo");
  // Another stage reads them.
  EXPECT_EQ(warnings("beta: 0.2\npreference: {margin: 1}\nstages:\n"
                     "  - {trainer: dpo, data: {jsonl: {path: a.jsonl, rejected: '{bad}'}}}\n"
                     "  - {trainer: grpo, data: {task: parity}, rewards: [{name: task}]}\n"),
            "");
  const auto refused = [&](const std::string& yaml, const char* message) {
    EXPECT_THROW_WITH(load(yaml), InputError, message);
  };
  refused(pairs + "preference: {reference: base}\n", "preference.reference: base is the model");
  refused(pairs + "preference: {loss: robust, label_smoothing: 0.5}\n",
          "label_smoothing: with half");
  refused(pairs + "preference: {beta: 0}\n", "preference.beta: expected a number from 1e-06");
  refused(pairs + "preference: {loss: kto}\n", "preference.loss: expected one of sigmoid, hinge");
  refused(pairs + "eval: {num_samples: 4}\n", "trainer dpo samples none of");
  refused("trainer: dpo\ndata: {task: parity}\n", "trainer dpo needs pairs of answers");
  refused("trainer: dpo\ndata: {text: a.txt}\n", "trainer dpo needs pairs of answers");
  refused("trainer: dpo\nmodel: {mask: full}\ndata: {jsonl: {path: a.jsonl, rejected: '{b}'}}\n",
          "trainer dpo needs a causal mask");
}

}  // namespace
}  // namespace cohort::test
