// Requirements of a run: a model, enough problems, memory and disk space, as `check` and the start
// of `train` report them; and a disk that fills up during training.
#include <filesystem>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class Resources : public testing::Test {
 protected:
  // run.yaml: the keys of small_configs.h after these lines.
  void write_config(const std::string& keys) const {
    write_file(dir_.path("run.yaml"), "output_dir: run\n" + std::string(kSmallModel) + keys);
  }
  void write_problems() const {
    std::string lines;
    for (int i = 0; i < 3; ++i)
      lines += str("{\"prompt\": \"", i, "+1=\", \"answer\": \"", i + 1, "\"}\n");
    write_file(dir_.path("sums.jsonl"), lines);
  }
  Output run(const std::string& command, std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {command, dir_.path("run.yaml")});
    return run_cohort(more);
  }
  // The number in a row of `check`, which may occur several times: in the last one.
  static double row(const Output& output, const std::string& name) {
    const size_t at = output.out.rfind("  " + name + " ");
    EXPECT_NE(at, std::string::npos) << name << "\n" << output.out << output.err;
    return at == std::string::npos ? 0 : std::stod(output.out.substr(at + 2 + name.size()));
  }

  TempDir dir_;
  const std::string run_ = dir_.path("run");
};

constexpr const char* kSums =
    "data: {jsonl: {path: sums.jsonl, prompt: '{prompt}', held_out_fraction: 0}}\n";

void expect(const std::string& text, const std::string& part, bool is_there = true) {
  EXPECT_EQ(text.find(part) != text.npos, is_there) << part << "\n" << text;
}

TEST_F(Resources, AStartFromRandomWeightsIsSaid) {
  write_problems();
  const std::string random = "starts from random weights, as no model is given; hint: model.path=";
  write_config(kSums + std::string(kSmallSft));
  for (const char* command : {"check", "train"}) {
    expect(run(command, {"model.d_model=128", "model.num_layers=4", "model.num_heads=4",
                         "model.init_std=0.02"})
               .err,
           "model: sft " + random);
    // The new model is described, so that no hint is needed.
    const Output described = run(command);
    expect(described.out + described.err,
           " model: sft starts from random weights, as no model is given\n");
    expect(described.err, "hint: model.path", false);
  }
  // So is the model that a run, or a stage before, has made.
  expect(run("check", {"init_from=" + run_}).err, random, false);
  write_config(kSums + std::string(kSmallGrpo));
  for (const char* command : {"check", "train"})
    expect(run(command, {"rewards=[{name: exact_match}]"}).err, "model: grpo " + random);
  expect(run("check", {"rewards=[{name: exact_match}]", "init_from=" + run_}).err, random, false);
  // Generated tasks are for small models from nothing.
  write_config(kSmallData + std::string(kSmallGrpo));
  expect(run("check").out, " model: grpo starts from random weights, as no model is given\n");
}

TEST_F(Resources, AStepOfMoreProblemsThanThereAreIsSaid) {
  write_problems();
  write_config(kSums + std::string(kSmallSft));
  const std::string sft = "batch_size: 8, and there are 3 training problems";
  expect(run("check").out, sft);
  expect(run("train").err, sft);
  expect(run("check", {"batch_size=3"}).out, "training problems", false);
  write_config(kSums + std::string(kSmallGrpo));
  expect(run("check", {"rewards=[{name: exact_match}]"}).out,
         "prompts_per_step: 4, and there are 3 training problems");
}

TEST_F(Resources, CheckNamesTheFolderThatTheRunWillGet) {
  write_config(kSmallData + std::string(kSmallSft));
  expect(run("check").out, "a run would go to " + run_ + "\n");
  fs::create_directory(run_);
  fs::create_directory(run_ + "-2");
  expect(run("check").out, "a run would go to " + run_ + "-3\n");
  EXPECT_FALSE(fs::exists(run_ + "-3"));
  expect(run("train").out, "run directory: " + run_ + "-3\n");
  write_file(run_ + "-4", "");
  expect_bad_input(run("check"), {"cannot create the run directory", run_});
}

TEST_F(Resources, CheckRefusesARunThatNeedsMoreMemoryThanThereIs) {
  write_config(kSmallData + std::string(kSmallSft));
  const Output output = run("check", {"model.d_model=32768", "model.num_layers=200",
                                      "model.d_ff=131072", "model.num_heads=256"});
  EXPECT_EQ(output.code, 2);
  expect(output.out, "memory: peak per rank");
  expect(output.err, "cohort: memory: sft needs at least about ");
  expect(output.err, ", and this machine has free ");
  expect(output.err, "; hint: micro_batch_tokens=auto");
  EXPECT_EQ(run("check").code, 0);
}

// The cache adapts to the memory that is free: many completions are no reason to refuse a run.
TEST_F(Resources, ALimitOfTheCacheCounts) {
  write_config(kSmallData + std::string(kSmallGrpo));
  const std::vector<std::string> many{"max_concurrent=1000000", "num_generations=65536",
                                      "max_completion_length=4000", "model.context=4096"};
  const Output all = run("check", many);
  EXPECT_EQ(all.code, 0) << all.err;
  std::vector<std::string> few = many;
  few.emplace_back("rollout.max_cache_tokens=65536");
  const Output limited = run("check", few);
  // Keys and values of a token are 2 * 16 numbers of 4 bytes; the logits of 3e5 sequences remain.
  EXPECT_GT(row(all, "memory: rollouts"), 1e5);
  EXPECT_LT(row(limited, "memory: rollouts"), 1e3);
}

TEST_F(Resources, CheckCountsTheDiskSpaceOfCheckpoints) {
  write_config(kSmallData + std::string(kSmallSft) +
               "stages:\n  - {trainer: sft}\n  - {trainer: grpo, beta: 0.1, prompts_per_step: 4, "
               "num_generations: 4, max_completion_length: 4, rewards: [{name: task}]}\n");
  const std::vector<std::string> sizes{"steps=2", "model.d_model=96", "model.d_ff=500"};
  const Output check = run("check", sizes);
  const double bytes = row(check, "disk: checkpoint") * (1 << 20);
  EXPECT_EQ(run("train", sizes).code, 0);
  double saved = 0;
  for (const auto& entry :
       fs::recursive_directory_iterator(run_ + "/2-grpo/checkpoints/step-00000002"))
    if (entry.path().extension() == ".safetensors") saved += static_cast<double>(entry.file_size());
  EXPECT_NEAR(saved / bytes, 1, 0.05);
  // Three tensors of the size of the weights for sft, four for grpo: three checkpoints each, and
  // one that is being written.
  EXPECT_NEAR(row(check, "disk: checkpoints of the run") * (1 << 20) / bytes, 3 * 0.75 + 3 + 1,
              0.2);
  expect(check.out, "MiB at most; free: ");
}

TEST_F(Resources, CheckRefusesARunWhoseCheckpointDoesNotFit) {
  write_config(kSmallData + std::string(kSmallSft));
  const Output output = run_cohort_with({.call = "statvfs", .path = "/", .error = 0},
                                        {"check", dir_.path("run.yaml")});
  EXPECT_EQ(output.code, 2);
  expect(output.err, "disk: a checkpoint of sft takes ");
  expect(output.err, ", and 0.0 MiB are free for " + run_);
}

TEST_F(Resources, AFullDiskSaysWhatToDeleteAndLeavesNoHalfCheckpoint) {
  write_config(kSmallData + std::string(kSmallSft) + "checkpoint: {every: 1, keep_last: 9}\n");
  const std::vector<std::string> train{"train", dir_.path("run.yaml"), "eval.every=0"};
  ASSERT_EQ(run_cohort(train).code, 0);
  const std::string other = dir_.path("it's another");
  fs::rename(run_, other);
  const std::string step = "/.tmp-step-00000003";
  for (const auto& [call, path] :
       {std::pair("write", step + "/model"), {"write", step + "/manifest.json"}, {"mkdir", step}})
    for (const int error : {ENOSPC, EDQUOT}) {
      fs::remove_all(run_);
      const Output output = run_cohort_with({.call = call, .path = path, .error = error}, train);
      EXPECT_EQ(output.code, 1) << output.err;
      for (const std::string& text :
           {std::string(std::strerror(error)) + "; a checkpoint takes about ",
            std::string(", and "), std::string("MiB are free; hint: `rm -r "),
            "`rm -r '" + dir_.path("it'\\''s another") + "'` frees ",
            "`rm -r " + run_ + "/checkpoints/step-00000001` frees 0.",
            "then cohort train --resume " + run_})
        expect(output.err, text);
      expect(output.err, "step-00000002`", false);
      EXPECT_FALSE(fs::exists(run_ + "/checkpoints" + step));
      EXPECT_EQ(run_cohort({"train", "--resume", run_}).code, 0);
    }
}

}  // namespace
}  // namespace cohort::test
