// GRPO with data.curriculum: online: problems without a signal are passed over and come again, the
// same ones on any number of ranks and across a resume.
#include <atomic>
#include <map>

#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

// Eight problems. No completion has the answer of the first four, which are always solved by the
// reward of the format alone; the completions of the others differ.
class OnlineCurriculum : public testing::Test {
 protected:
  OnlineCurriculum() {
    std::string lines;
    for (int i = 0; i < 8; ++i)
      lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"", i < 4 ? "123456789" : "1", "\"}\n");
    write_file(dir_.path("data.jsonl"), lines);
  }
  RunPlan plan(const std::string& name, std::vector<std::string> overrides = {}) {
    overrides.insert(overrides.begin(),
                     {"steps=30", "log_completions=1000",
                      "rewards=[{name: format, pattern: '(?s).*'}, {name: contains}]",
                      "eval={at_start: false, correct: {reward: contains}}"});
    return small_plan(dir_, name,
                      std::string(kSmallModel) + kSmallGrpo +
                          "data: {curriculum: online, jsonl: {path: data.jsonl, "
                          "held_out_fraction: 0}}\n",
                      overrides);
  }
  static TrainState state_of(const std::string& run) { return load_state(find_checkpoint(run)); }
  // The sum of a metric over the steps.
  static double total(const std::string& run, const std::string& name) {
    double sum = 0;
    for (const Json& line : json_lines(run + "/metrics.jsonl"))
      if (line.find("eval") == nullptr) sum += metric(line, name);
    return sum;
  }
  const TempDir dir_;
  const ExpectLog random_{"starts from random weights"}, truncated_{"end at the length limit"};
};

TEST_F(OnlineCurriculum, PassesOverSolvedProblemsWhichComeAgain) {
  const std::string run = train_new(plan("run", {"learning_rate=0"}));
  std::map<std::string, int64_t> groups;
  for (const Json& line : json_lines(run + "/completions.jsonl"))
    if (line.find("eval") == nullptr) ++groups[line.at("prompt").as_string()];
  int64_t drawn = 0;
  for (auto& [prompt, count] : groups) drawn += count /= 6;
  EXPECT_EQ(drawn, 30 * 4);
  EXPECT_EQ(static_cast<double>(state_of(run).data_position), drawn + total(run, "data/skipped"));
  // In some 25 epochs, in the epochs 0, 1, 3, 6, 11 and 20.
  for (const char* solved : {"0=", "1=", "2=", "3="}) {
    EXPECT_GE(groups[solved], 5);
    EXPECT_LE(groups[solved], 7);
  }
  for (const char* open : {"4=", "5=", "6=", "7="}) EXPECT_GE(groups[open], 15);
  const std::string none = train_new(plan("none", {"data.curriculum=none"}));
  EXPECT_EQ(state_of(none).data_position, drawn);
  EXPECT_EQ(json_lines(none + "/metrics.jsonl")[0].find("data/skipped"), nullptr);
}

TEST_F(OnlineCurriculum, ContinuesAcrossAResume) {
  for (const char* rounds : {"dynamic_sampling_rounds=0", "dynamic_sampling_rounds=2"}) {
    SCOPED_TRACE(rounds);
    const std::string whole = train_new(plan("whole", {rounds}));
    EXPECT_GT(total(whole, "data/skipped"), 0);
    const std::string run = train_interrupted(plan("run", {rounds}), 13);
    train_rest(run);
    for (const char* file : {"model.safetensors", "training/optimizer.safetensors"})
      EXPECT_TRUE(checkpoint_bytes(run, file) == checkpoint_bytes(whole, file)) << file;
    EXPECT_EQ(read_file(run + "/completions.jsonl"), read_file(whole + "/completions.jsonl"));
    EXPECT_EQ(state_of(run).curriculum.dump(), state_of(whole).curriculum.dump());
    EXPECT_EQ(state_of(run).data_position, state_of(whole).data_position);
  }
}

// In refilled steps the outcomes of the replaced groups count as well.
TEST_F(OnlineCurriculum, DrawsTheSameProblemsOnAnyNumberOfRanks) {
  const auto train = [&](const char* ranks, const char* rounds) {
    return train_new(plan("run", {"learning_rate=0", ranks, rounds}));
  };
  for (const char* rounds : {"dynamic_sampling_rounds=0", "dynamic_sampling_rounds=2"}) {
    const std::string one = train("ranks=1", rounds);
    for (const char* ranks : {"ranks=2", "ranks=3"}) {
      SCOPED_TRACE(str(ranks, " ", rounds));
      const std::string other = train(ranks, rounds);
      EXPECT_EQ(read_file(other + "/completions.jsonl"), read_file(one + "/completions.jsonl"));
      EXPECT_EQ(state_of(other).curriculum.dump(), state_of(one).curriculum.dump());
      EXPECT_EQ(state_of(other).data_position, state_of(one).data_position);
    }
  }
}

}  // namespace
}  // namespace cohort::test
