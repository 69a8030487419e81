// `cohort sample`: its options, kills and full disks at every write, and training on its output.
#include <signal.h>

#include <cerrno>
#include <filesystem>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class SampleCommand : public testing::Test {
 protected:
  SampleCommand() {
    std::string lines;
    for (int i = 0; i < 6; ++i)
      lines += str("{\"prompt\": \"", i, "+1=\", \"answer\": \"", i + 1, "\"}\n");
    write_file(problems_, lines);
    write_file(dir_.path("run.yaml"),
               str(kSmallModel, kSmallData, kSmallGrpo, "output_dir: run\n"));
    const Output output = run_cohort({"train", dir_.path("run.yaml"), "steps=1"});
    EXPECT_EQ(output.code, 0) << output.err;
  }
  std::vector<std::string> sample(const std::string& output,
                                  const std::vector<std::string>& more = {}) const {
    std::vector<std::string> out{
        "sample", run_,       "--problems",      problems_,           "--num",
        "8",      "--output", dir_.path(output), "prompts_per_step=2"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  std::string text(const std::string& output) const { return read_file(dir_.path(output)); }

  TempDir dir_;
  const std::string run_ = dir_.path("run"), problems_ = dir_.path("problems.jsonl");
};

TEST_F(SampleCommand, PrintsItsCountsAlsoOfAFinishedFile) {
  const Output first = run_cohort(sample("out.jsonl", {"--keep", "format >= 1, sum > 0"}));
  ASSERT_EQ(first.code, 0) << first.err;
  const Json counts = json_lines_of(first.out).at(0);
  EXPECT_EQ(counts.at("output").as_string(), dir_.path("out.jsonl"));
  EXPECT_EQ(counts.at("problems").as_int(), 6);
  EXPECT_EQ(counts.at("completions").as_int(), 48);
  EXPECT_EQ(counts.at("failed").as_int(), 0);
  EXPECT_EQ(counts.at("kept").as_int(), std::ssize(json_lines(dir_.path("out.jsonl"))));
  EXPECT_GT(counts.at("solved").as_int(), 1);
  EXPECT_NE(first.err.find("problems: 6 of 6, "), std::string::npos) << first.err;
  const std::string lines = text("out.jsonl");
  const Output again =
      run_cohort(sample("out.jsonl", {"--keep", "format >= 1, sum > 0", "max_concurrent=2"}));
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(again.out, first.out);
  EXPECT_EQ(again.err.find("problems: "), std::string::npos) << "nothing is sampled again";
  EXPECT_EQ(text("out.jsonl"), lines);
  // Two flags are one with a comma, but for the name of the setting.
  ASSERT_EQ(run_cohort(sample("two.jsonl", {"--keep", "format >= 1", "--keep", "sum > 0"})).code,
            0);
  EXPECT_EQ(text("two.jsonl"), lines);
}

TEST_F(SampleCommand, SurvivesAKillAtEveryWrite) {
  ASSERT_EQ(run_cohort(sample("whole.jsonl")).code, 0);
  const std::string whole = text("whole.jsonl");
  int kills = 0;
  for (const char* path : {"/cut.jsonl", "/.cut.jsonl.state"})
    for (int pass = 0; pass < 8; ++pass) {
      for (const char* name : {"cut.jsonl", ".cut.jsonl.state"}) fs::remove(dir_.path(name));
      const Output killed = run_cohort_with(
          {.call = "write", .path = path, .error = -1, .pass = pass}, sample("cut.jsonl"));
      kills += killed.code == 128 + SIGKILL;
      const Output resumed = run_cohort(sample("cut.jsonl"));
      EXPECT_EQ(resumed.code, 0) << resumed.err;
      EXPECT_EQ(text("cut.jsonl"), whole) << path << pass;
    }
  EXPECT_EQ(kills, 6 + 7);  // one write for each problem, and the settings
}

TEST_F(SampleCommand, LosesNothingOnAFullDisk) {
  ASSERT_EQ(run_cohort(sample("whole.jsonl")).code, 0);
  for (const char* path : {"/cut.jsonl", "/.cut.jsonl.state"})
    for (const int error : {ENOSPC, 0})  // 0: half of the bytes are written
      for (int pass = 0; pass < 3; ++pass) {
        for (const char* name : {"cut.jsonl", ".cut.jsonl.state"}) fs::remove(dir_.path(name));
        const Output full = run_cohort_with(
            {.call = "write", .path = path, .error = error, .pass = pass}, sample("cut.jsonl"));
        EXPECT_EQ(full.code, 1) << full.err;
        EXPECT_EQ(full.out, "");
        EXPECT_NE(full.err.find("cannot write "), std::string::npos) << full.err;
        EXPECT_NE(full.err.find("the same command continues "), std::string::npos) << full.err;
        const Output resumed = run_cohort(sample("cut.jsonl"));
        EXPECT_EQ(resumed.code, 0) << resumed.err;
        EXPECT_EQ(text("cut.jsonl"), text("whole.jsonl")) << path << error << pass;
      }
}

TEST_F(SampleCommand, GivesDataThatSftTrainsOn) {
  ASSERT_EQ(run_cohort(sample("out.jsonl", {"--distinct"})).code, 0);
  // Hidden files of a folder of data are not read, so the state beside the lines does not matter.
  write_file(dir_.path("sft.yaml"),
             str("trainer: sft\nsteps: 2\nbatch_size: 2\nnum_threads: 1\noutput_dir: sft\n",
                 "init_from: run\ndata: {jsonl: {path: data, held_out_fraction: 0}}\n"));
  fs::create_directory(dir_.path("data"));
  for (const char* name : {"out.jsonl", ".out.jsonl.state"})
    fs::copy(dir_.path(name), dir_.path("data"));
  const Output output = run_cohort({"train", dir_.path("sft.yaml")});
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_NE(output.err.find("solution: {completion}"), std::string::npos) << output.err;
}

TEST_F(SampleCommand, TakesAFolderWithAConfiguration) {
  const std::string folder = dir_.path("folder");
  ASSERT_EQ(run_cohort({"export", run_, folder}).code, 0);
  std::vector<std::string> arguments = sample("folder.jsonl");
  arguments[1] = folder;
  expect_bad_input(run_cohort(arguments), {"belongs to no run",
                                           "hint: name a file with the "
                                           "rewards: --rewards CONFIG.yaml"});
  arguments.insert(arguments.end(), {"--rewards", dir_.path("run.yaml")});
  const Output output = run_cohort(arguments);
  EXPECT_EQ(output.code, 0) << output.err;
  ASSERT_EQ(run_cohort(sample("run.jsonl")).code, 0);
  EXPECT_EQ(text("folder.jsonl"), text("run.jsonl")) << "the same model";
}

TEST_F(SampleCommand, RefusesBadInput) {
  const auto refuses = [&](const std::vector<std::string>& more,
                           const std::vector<std::string>& texts) {
    expect_bad_input(run_cohort(sample("out.jsonl", more)), texts);
    EXPECT_FALSE(fs::exists(dir_.path("out.jsonl")));
    EXPECT_FALSE(fs::exists(dir_.path(".out.jsonl.state")));
  };
  refuses({"--keep", "math >= 1"}, {"--keep: no reward is called 'math'; there are format, "
                                    "task, sum"});
  refuses({"--best", "--pairs"}, {"--best excludes --pairs"});
  refuses({"--most", "0"}, {"--most"});
  refuses({"--bset"}, {"did you mean '--best'?"});
  refuses({"rewards=[]"}, {"rewards: "});
  expect_bad_input(run_cohort({"sample", run_}), {"--problems is required"});
  expect_bad_input(run_cohort({"sample", run_, "--problems", problems_, "--num", "2"}),
                   {"--output is required"});
  // A file of the user's, or one of other settings.
  write_file(dir_.path("mine.jsonl"), "mine\n");
  expect_bad_input(run_cohort(sample("mine.jsonl")), {"mine.jsonl exists, and ", "hint: "});
  EXPECT_EQ(text("mine.jsonl"), "mine\n");
  ASSERT_EQ(run_cohort(sample("out.jsonl")).code, 0);
  const std::string lines = text("out.jsonl");
  expect_bad_input(run_cohort(sample("out.jsonl", {"seed=9"})),
                   {"was written with another setting: seed was ", "hint: "});
  EXPECT_EQ(text("out.jsonl"), lines);
}

}  // namespace
}  // namespace cohort::test
