// A disk that fails: nothing that was saved or logged is lost, and nothing is decided by what could
// not be read.
#include <filesystem>
#include <map>

#include "tests/apps/process.h"
#include "tests/trainers/small_configs.h"

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

TEST_F(Disk, CheckpointsThatCannotBeReadAreNotTakenForNone) {
  ASSERT_EQ(run_cohort(train()).code, 0);
  const std::string checkpoints = run_ + "/checkpoints";
  for (const char* call : {"opendir", "readdir"})
    expect_stopped_without_a_change(
        {.call = call, .path = "/checkpoints", .error = EIO},
        "cannot read " + checkpoints + ": Input/output error; hint: nothing was changed");
  // One entry has been read by then.
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
  for (const char* file : {"/manifest.json", "/model.safetensors"})
    expect_stopped_without_a_change({.call = "read", .path = file, .error = EIO},
                                    "cannot read " + newest + file + ": Input/output error");
  EXPECT_EQ(run_cohort(resume()).code, 0);
}

// What has just been saved is there: the run goes on, and removes nothing.
TEST_F(Disk, CheckpointsThatCannotBeListedAreNotRemoved) {
  const Output output = run_cohort_with(
      {.call = "lstat", .path = "/checkpoints/step-00000002", .error = EIO}, train());
  EXPECT_NE(output.err.find("old checkpoints are not removed: cannot read"), std::string::npos)
      << output.err;
  for (const char* step : {"2", "4", "6"})
    EXPECT_TRUE(fs::exists(run_ + "/checkpoints/step-0000000" + step)) << step;
}

// generate would answer from a checkpoint of the stage before.
TEST_F(Disk, StagesThatCannotBeReadAreNotPassedOver) {
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

}  // namespace
}  // namespace cohort::test
