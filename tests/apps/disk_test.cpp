// Disk failures: nothing that was saved or logged is lost, and an unreadable file is never treated
// as missing.
#include <filesystem>
#include <map>
#include <tuple>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class Disk : public testing::Test {
 protected:
  Disk() {
    write_file(dir_.path("run.yaml"), std::string(kSmallModel) + kSmallData + kSmallSft +
                                          "output_dir: run\nlog_every: 1\n"
                                          "checkpoint: {every: 2, keep_last: 2}\n");
  }
  std::vector<std::string> train() const { return {"train", dir_.path("run.yaml")}; }
  std::vector<std::string> resume() const {
    return {"train", "--resume", run_, "steps=9", "checkpoint.keep_last=1"};
  }

  // Every file of the run with its bytes, without log.txt.
  std::map<std::string, std::string> files() const {
    std::map<std::string, std::string> out;
    for (const auto& entry : fs::recursive_directory_iterator(run_))
      if (entry.is_regular_file() && entry.path().filename() != "log.txt")
        out[entry.path().string()] = read_file(entry.path().string());
    return out;
  }
  void expect_stopped_without_a_change(const Fault& fault, const std::string& text) const {
    SCOPED_TRACE(fault.call + " " + fault.path);
    const auto before = files();
    const Output output = run_cohort_with(fault, resume());
    EXPECT_EQ(output.code, 1) << output.err;
    EXPECT_NE(output.err.find(text), std::string::npos) << output.err;
    EXPECT_TRUE(files() == before);
  }

  TempDir dir_;
  const std::string run_ = dir_.path("run");
};

TEST_F(Disk, UnreadableCheckpointsAreNotTreatedAsMissing) {
  ASSERT_EQ(run_cohort(train()).code, 0);
  const std::string checkpoints = run_ + "/checkpoints";
  for (const char* call : {"opendir", "readdir"})
    expect_stopped_without_a_change(
        {.call = call, .path = "/checkpoints", .error = EIO},
        "cannot read " + checkpoints + ": Input/output error; hint: nothing was changed");
  // Fails after one entry has been read.
  expect_stopped_without_a_change(
      {.call = "readdir", .path = "/checkpoints", .error = ESTALE, .pass = 3},
      "cannot read " + checkpoints + ": Stale file handle");
  const std::string newest = checkpoints + "/step-00000006";
  expect_stopped_without_a_change({.call = "lstat", .path = newest, .error = EACCES},
                                  "cannot read " + newest + ": Permission denied");
  expect_stopped_without_a_change({.call = "stat", .path = "manifest.json", .error = EIO},
                                  "cannot read " + newest + "/manifest.json: Input/output");
  expect_stopped_without_a_change({.call = "open", .path = "/model.safetensors", .error = EMFILE},
                                  "cannot read " + newest + "/model.safetensors: Too many open");
  // Fails between the checks of size and checksum.
  expect_stopped_without_a_change(
      {.call = "open", .path = "/model.safetensors", .error = EMFILE, .pass = 1},
      "cannot read " + newest + "/model.safetensors: Too many open");
  for (const char* file : {"/manifest.json", "/model.safetensors"})
    expect_stopped_without_a_change({.call = "read", .path = file, .error = EIO},
                                    "cannot read " + newest + file + ": Input/output error");
  EXPECT_EQ(run_cohort(resume()).code, 0);
}

// The new checkpoint is complete, so the run continues, and removes nothing.
TEST_F(Disk, CheckpointsThatCannotBeListedAreNotRemoved) {
  const Output output = run_cohort_with(
      {.call = "lstat", .path = "/checkpoints/step-00000002", .error = EIO}, train());
  EXPECT_NE(output.err.find("old checkpoints are not removed: cannot read"), std::string::npos)
      << output.err;
  for (const char* step : {"2", "4", "6"})
    EXPECT_TRUE(fs::exists(run_ + "/checkpoints/step-0000000" + step)) << step;
}

// Otherwise generate would use a checkpoint of the previous stage.
TEST_F(Disk, UnreadableStagesAreNotSkipped) {
  ASSERT_EQ(run_cohort(train()).code, 0);
  fs::create_directory(run_ + "/1-sft");
  fs::rename(run_ + "/checkpoints", run_ + "/1-sft/checkpoints");
  fs::copy(run_ + "/1-sft", run_ + "/2-sft", fs::copy_options::recursive);
  for (const auto& [call, path] : {std::pair{"opendir", "/2-sft/checkpoints"},
                                   {"stat", "/2-sft/checkpoints"},
                                   {"readdir", "/run"}}) {
    const Output output =
        run_cohort_with({.call = call, .path = path, .error = EIO}, {"generate", run_, "1+1="});
    EXPECT_EQ(output.code, 1) << call << output.out;
    EXPECT_NE(output.err.find("cannot read " + run_), std::string::npos) << output.err;
  }
}

TEST_F(Disk, DirectoriesThatCannotBeFlushedAreAnError) {
  const Output output = run_cohort_with(
      {.call = "fsync", .path = "/.tmp-step-00000002", .error = EIO, .pass = 6}, train());
  EXPECT_EQ(output.code, 1) << output.err;
  EXPECT_NE(output.err.find("cannot flush the directory"), std::string::npos) << output.err;
}

TEST_F(Disk, CreationErrorsAreOneSentence) {
  const std::string step = "checkpoints/step-00000002";
  const std::tuple<const char*, const char*, int, std::string> faults[] = {
      {"mkdir", "/checkpoints", EDQUOT, "cannot create the directory RUN/checkpoints: Disk quota"},
      {"mkdir", "/.tmp-step-00000002", ENOSPC,
       "cannot create the directory RUN/checkpoints/.tmp-step-00000002: No space left on device"},
      {"rename", "/.tmp-step-00000002 ", EACCES,
       "cannot rename RUN/checkpoints/.tmp-step-00000002 to RUN/" + step + ": Permission denied"},
      {"close", "/config.yaml.tmp", ENOSPC, "cannot write RUN/config.yaml: No space left"}};
  for (const auto& [call, path, error, text] : faults) {
    const Output output = run_cohort_with({.call = call, .path = path, .error = error}, train());
    EXPECT_EQ(output.code, 1) << output.err;
    std::string expected = "cohort: " + text;
    for (size_t at; (at = expected.find("RUN")) != expected.npos;) expected.replace(at, 3, run_);
    EXPECT_NE(output.err.find(expected), std::string::npos) << output.err;
    fs::remove_all(run_);
  }
}

TEST_F(Disk, DataThatCannotBeReadAreNamed) {
  write_file(dir_.path("text.txt"), small_text());
  write_file(dir_.path("text.yaml"), std::string(kSmallModel) + kSmallPretrain);
  const std::vector<std::string> check{"check", dir_.path("text.yaml")};
  // Fingerprint, split of the text, characters, tokens.
  for (const auto& [call, pass] :
       {std::pair("read", 0), {"pread", 0}, {"pread", 1}, {"pread", 3}}) {
    const Output output =
        run_cohort_with({.call = call, .path = "text.txt", .error = EIO, .pass = pass}, check);
    EXPECT_NE(output.code, 0) << call << pass;
    EXPECT_NE(output.err.find(dir_.path("text.txt")), std::string::npos) << output.err;
    EXPECT_NE(output.err.find(": Input/output error"), std::string::npos) << output.err;
  }
  // A partial read is continued.
  EXPECT_EQ(run_cohort_with({.call = "pread", .path = "text.txt", .error = 0}, check).code, 0);
  // Only relative paths are checked beforehand; for others reading the data reports the error.
  const Output output = run_cohort_with({.call = "stat", .path = "text.txt", .error = EIO}, check);
  expect_bad_input(output, {"text.txt: cannot be opened: Input/output error"});
}

// The last checkpoint exists, and resuming saves no other.
TEST_F(Disk, AKillAfterTheLastCheckpointLeavesNothingBehind) {
  const std::string left = run_ + "/checkpoints/.tmp-step-00000002";
  EXPECT_EQ(
      run_cohort_with({.call = "unlinkat", .path = "/.tmp-step-00000002", .error = -1}, train())
          .code,
      128 + 9);
  ASSERT_TRUE(fs::exists(run_ + "/checkpoints/step-00000006/manifest.json"));
  ASSERT_TRUE(fs::exists(left));
  write_file(run_ + "/checkpoints/.tmp-other", "other");
  EXPECT_EQ(run_cohort({"train", "--resume", run_}).code, 0);
  EXPECT_FALSE(fs::exists(left));
  EXPECT_TRUE(fs::exists(run_ + "/checkpoints/.tmp-other"));
}

TEST_F(Disk, AKillBeforeOldCheckpointsAreRemovedLeavesThemUntilTheNextStart) {
  const std::string old = run_ + "/checkpoints/step-00000002";
  EXPECT_EQ(run_cohort_with({.call = "rename", .path = old + " ", .error = -1}, train()).code,
            128 + 9);
  ASSERT_TRUE(fs::exists(run_ + "/checkpoints/step-00000006/manifest.json"));
  ASSERT_TRUE(fs::exists(old));
  EXPECT_EQ(run_cohort({"train", "--resume", run_}).code, 0);
  EXPECT_FALSE(fs::exists(old));
  EXPECT_TRUE(fs::exists(run_ + "/checkpoints/step-00000004"));
}

TEST_F(Disk, LeftoversThatCannotBeRemovedAreNotPartOfACheckpoint) {
  const std::string step = run_ + "/checkpoints/step-00000002";
  EXPECT_EQ(
      run_cohort_with({.call = "rename", .path = "/.tmp-step-00000002 ", .error = -1}, train())
          .code,
      128 + 9);
  ASSERT_TRUE(fs::exists(run_ + "/checkpoints/.tmp-step-00000002/manifest.json"));
  const Output output = run_cohort_with(
      {.call = "unlinkat", .path = "/.tmp-step-00000002", .error = EBUSY, .fail = 1},
      {"train", "--resume", run_, "checkpoint.keep_last=9"});
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_NE(output.err.find("cannot remove "), std::string::npos) << output.err;
  verify_checkpoint(step);
}

// A kill during the creation of the run leaves no partial configuration.
TEST_F(Disk, TheConfigurationAppearsWhole) {
  const Output output =
      run_cohort_with({.call = "rename", .path = "/config.yaml", .error = -1}, train());
  EXPECT_EQ(output.code, 128 + 9) << output.err;
  EXPECT_FALSE(fs::exists(run_ + "/config.yaml"));
}

TEST_F(Disk, ClosedStandardStreamsAreNotTakenByFiles) {
  const std::string command = str(COHORT_BINARY, " train ", dir_.path("run.yaml"));
  EXPECT_EQ(std::system((command + " 0<&- 1>&- 2>&-").c_str()), 0);
  for (const auto& [path, text] : files())
    EXPECT_EQ(text.find("run directory"), std::string::npos) << path;
  // log.txt has the messages, without the progress lines of the terminal.
  EXPECT_EQ(read_file(run_ + "/log.txt").find(" elapsed"), std::string::npos);
  EXPECT_EQ(json_lines(run_ + "/metrics.jsonl").size(), 8u);
}

// ---- metrics.jsonl and completions.jsonl -------------------------------------------------------

// The lines of a log, reduced to fields that are equal in every run.
std::vector<std::string> steps_of(const std::string& log) {
  std::vector<std::string> out;
  for (const Json& line : json_lines(log)) {
    const Json* loss = line.find("loss");
    out.push_back(str(line.at("step").as_int(), line.find("eval") != nullptr ? " eval " : " ",
                      loss != nullptr ? loss->dump() : ""));
  }
  return out;
}

TEST_F(Disk, LinesThatCouldNotBeWrittenAreWrittenLater) {
  ASSERT_EQ(run_cohort(train()).code, 0);
  const auto metrics = steps_of(run_ + "/metrics.jsonl");
  const std::string completions = read_file(run_ + "/completions.jsonl");
  int number = 2;
  for (const char* file : {"metrics.jsonl", "completions.jsonl"})
    for (const int error : {ENOSPC, 0}) {  // 0: half a line is written
      SCOPED_TRACE(str(file, " ", error));
      const std::string run = str(run_, "-", number++);
      const Output output = run_cohort_with(
          {.call = "write", .path = file, .error = error, .pass = 1, .fail = 2}, train());
      EXPECT_EQ(output.code, 0) << output.err;
      const std::string warning = str("cannot write ", run, "/", file, ": ");
      const size_t at = output.err.find(warning);
      EXPECT_NE(at, std::string::npos) << output.err;
      EXPECT_EQ(output.err.find(warning, at + 1), std::string::npos) << "once: " << output.err;
      EXPECT_EQ(steps_of(run + "/metrics.jsonl"), metrics);
      EXPECT_EQ(read_file(run + "/completions.jsonl"), completions);
    }
}

TEST_F(Disk, LinesThatAreLostFailTheCommandAfterTheLastCheckpoint) {
  for (const int error : {ENOSPC, 0}) {
    const std::string run = error == 0 ? run_ + "-2" : run_;
    const Output output = run_cohort_with(
        {.call = "write", .path = "metrics.jsonl", .error = error, .pass = 3}, train());
    EXPECT_EQ(output.code, 1) << output.err;
    EXPECT_NE(output.err.find("cohort: cannot write " + run + "/metrics.jsonl: " +
                              (error == 0 ? "only" : "No space left on device")),
              std::string::npos)
        << output.err;
    EXPECT_NE(output.err.find("; its last 5 lines are lost"), std::string::npos) << output.err;
    EXPECT_TRUE(load_state(find_checkpoint(run)).finished);
    EXPECT_EQ(json_lines(run + "/metrics.jsonl").size(), 3u);
  }
}

// log.txt
TEST_F(Disk, MessagesThatCouldNotBeWrittenAreWrittenLaterOrFailTheCommand) {
  ASSERT_EQ(run_cohort(train()).code, 0);
  const auto lines = [](const std::string& run) {
    const std::string log = read_file(run + "/log.txt");
    return std::count(log.begin(), log.end(), '\n');
  };
  const Output late = run_cohort_with(
      {.call = "write", .path = "log.txt", .error = ENOSPC, .pass = 1, .fail = 2}, train());
  EXPECT_EQ(late.code, 0) << late.err;
  const std::string warning = "cannot write " + run_ + "-2/log.txt: No space left on device";
  EXPECT_NE(late.err.find(warning + "; its lines are kept and retried"), std::string::npos)
      << late.err;
  EXPECT_EQ(lines(run_ + "-2"), lines(run_));
  const Output lost =
      run_cohort_with({.call = "write", .path = "log.txt", .error = ENOSPC, .pass = 1}, train());
  EXPECT_EQ(lost.code, 1) << lost.err;
  EXPECT_NE(lost.err.find("/run-3/log.txt: No space left on device; its last "), std::string::npos)
      << lost.err;
  EXPECT_TRUE(load_state(find_checkpoint(run_ + "-3")).finished);
}

TEST_F(Disk, LogsThatCannotBeReadStopTheCommand) {
  ASSERT_EQ(run_cohort(train()).code, 0);
  for (const char* file : {"/metrics.jsonl", "/completions.jsonl"})
    expect_stopped_without_a_change({.call = "read", .path = file, .error = EIO},
                                    "cannot read " + run_ + file + ": Input/output error");
}

}  // namespace
}  // namespace cohort::test
