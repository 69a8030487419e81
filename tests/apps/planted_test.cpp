// Configurations that another user has put beside or above a model: none of them is used, and none
// of their commands is executed.
#include <filesystem>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class Planted : public testing::Test {
 protected:
  // Trains `yaml` in the folder "lab/run", and returns its newest checkpoint.
  std::string train(const std::string& yaml) const {
    fs::create_directory(path("lab"));
    write_file(path("lab/run.yaml"), "output_dir: run\n" + yaml);
    const Output output = run_cohort({"train", path("lab/run.yaml")});
    EXPECT_EQ(output.code, 0) << output.err;
    return find_checkpoint(path("lab/run"));
  }
  // A configuration whose reward program leaves the file "owned".
  std::string attack() const {
    return str(kSmallData, kSmallSft, "rewards: [{name: command, run: touch ", path("owned"),
               "}]\neval: {size: 2, correct: {reward: command}}\n");
  }
  std::string path(const std::string& name) const { return dir_.path(name); }
  // Copies a checkpoint to a folder, and expects `eval` to ask for a file by name.
  void expect_no_run(const std::string& checkpoint, const std::string& folder) const {
    SCOPED_TRACE(folder);
    fs::create_directories(fs::path(folder).parent_path());
    fs::copy(checkpoint, folder, fs::copy_options::recursive);
    expect_bad_input(run_cohort({"eval", folder}),
                     {folder + " belongs to no run", "hint: ", "--rewards CONFIG.yaml"});
    EXPECT_FALSE(fs::exists(path("owned")));
  }

  const std::string sft_ = std::string(kSmallModel) + kSmallData + kSmallSft;
  TempDir dir_;
};

TEST_F(Planted, ConfigurationsAboveOrBesideAModelAreNotUsed) {
  const std::string checkpoint = train(sft_);
  for (const char* folder : {"", "models/", "models/mine/", "models/mine/checkpoints/",
                             "models/checkpoints/", "models/1-sfx/"}) {
    fs::create_directories(path(folder));
    write_file(path(folder) + "config.yaml", attack());
  }
  expect_no_run(checkpoint, path("models/mine/step-00000006"));
  expect_no_run(checkpoint, path("models/mine/checkpoints/6"));
  expect_no_run(checkpoint, path("models/mine/checkpoints/step-6"));
  expect_no_run(checkpoint, path("models/1-sfx/weights/step-00000006"));
  expect_no_run(checkpoint, path("models/0-sft/checkpoints/step-00000006"));
  expect_no_run(checkpoint, path("models/deep/in/checkpoints/step-00000006"));
  // A file inside the folder of the weights.
  fs::copy(checkpoint, path("models/whole"), fs::copy_options::recursive);
  write_file(path("models/whole/config.yaml"), attack());
  expect_bad_input(run_cohort({"eval", path("models/whole")}), {"belongs to no run"});
  EXPECT_FALSE(fs::exists(path("owned")));
  // The run itself, below all of them.
  const Output own = run_cohort({"eval", path("lab/run")});
  ASSERT_EQ(own.code, 0) << own.err;
  EXPECT_EQ(json_lines_of(own.out).at(0).at("config").as_string(), path("lab/run/config.yaml"));
  EXPECT_FALSE(fs::exists(path("owned")));
}

TEST_F(Planted, ConfigurationsAreNoTemplates) {
  const std::string checkpoint = train(sft_);
  fs::copy(checkpoint, path("model"), fs::copy_options::recursive);
  write_file(path("data.jsonl"), "{\"prompt\": \"1=\", \"answer\": \"1\"}\n");
  write_file(path("config.yaml"), str(kSmallSft, "data: {jsonl: {path: data.jsonl}}\n"));
  expect_bad_input(run_cohort({"generate", path("model"), "--template", "{\"prompt\": \"1=\"}"}),
                   {"model belongs to no run", "without --template"});
}

TEST_F(Planted, RunsAreFoundByTheirLayoutAndThroughLinks) {
  const std::string stages = str(kSmallModel, kSmallData, "batch_size: 8\nstages:\n",
                                 "  - {trainer: sft, steps: 1}\n  - {trainer: sft, steps: 2}\n");
  train(stages);
  const std::string run = path("lab/run");
  fs::create_directory_symlink(run, path("latest"));
  fs::create_directory_symlink(run + "/1-sft/checkpoints/step-00000001", path("model"));
  // The checkpoints on another disk.
  fs::rename(run + "/2-sft/checkpoints", path("scratch"));
  fs::create_directory_symlink(path("scratch"), run + "/2-sft/checkpoints");
  for (const std::string& model : {run, run + "/", run + "/1-sft", run + "/1-sft/checkpoints",
                                   run + "/2-sft/checkpoints/step-00000002", path("latest"),
                                   path("latest/1-sft/checkpoints/best"), path("model")}) {
    const Output output = run_cohort({"eval", model});
    ASSERT_EQ(output.code, 0) << model << ": " << output.err;
    const std::string config = json_lines_of(output.out).at(0).at("config").as_string();
    EXPECT_TRUE(fs::equivalent(config, run + "/config.yaml")) << config;
  }
}

TEST_F(Planted, FilesThatAreNamedAreUsedForAnyModel) {
  const std::string checkpoint = train(sft_);
  fs::copy(checkpoint, path("model"), fs::copy_options::recursive);
  write_file(path("mine.yaml"), sft_);
  const Output output = run_cohort({"eval", path("model"), "--rewards", path("mine.yaml")});
  ASSERT_EQ(output.code, 0) << output.err;
  EXPECT_EQ(json_lines_of(output.out).at(0).at("config").as_string(), path("mine.yaml"));
}

}  // namespace
}  // namespace cohort::test
