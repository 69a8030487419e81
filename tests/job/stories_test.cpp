// GRPO on a pretrained external model: configs/stories_grpo.yaml raises the mean reward, and its
// checkpoint has the same tokenizer.
#include <filesystem>
#include <numeric>

#include "job/checkpoint.h"
#include "nn/model_folder.h"
#include "sys/input_file.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

TEST(StoriesSlow, RewardRises) {
  COHORT_REQUIRE_DATA(data);
  const TempDir dir;
  const auto source = fs::path(__FILE__).parent_path().parent_path().parent_path();
  const std::string model = data + "/models/stories260K";
  const std::vector<std::string> overrides = {"model.path=" + model, "steps=25",
                                              "output_dir=" + dir.path("run")};
  RunPlan plan = load_plan((source / "configs" / "stories_grpo.yaml").string(), overrides);
  Recorder recorder;
  const std::atomic<bool> stop{false};
  // At first the stories do not end within the limit.
  const ExpectLog lengths("end at the length limit");
  const RunResult result = cohort::Run::create(plan).execute(recorder, stop);
  std::vector<double> rewards;
  for (const Json& line : json_lines(result.run_dir + "/metrics.jsonl")) {
    if (line.find("eval") != nullptr) continue;
    rewards.push_back(metric(line, "reward"));
    EXPECT_EQ(metric(line, "ratio_deviation"), 0) << line.dump();
  }
  ASSERT_EQ(rewards.size(), 25u);
  const auto mean = [&](size_t begin) {
    return std::accumulate(rewards.begin() + static_cast<std::ptrdiff_t>(begin),
                           rewards.begin() + static_cast<std::ptrdiff_t>(begin + 5), 0.0) /
           5;
  };
  EXPECT_LT(mean(0), 0.9);
  EXPECT_GT(mean(20), mean(0) + 0.4);

  const std::string saved = find_checkpoint(result.run_dir);
  EXPECT_EQ(read_input_file(saved + "/tokenizer.json"), read_input_file(model + "/tokenizer.json"));
  EXPECT_EQ(load_config(saved).vocab_size, 512);
}

}  // namespace
}  // namespace cohort::test
