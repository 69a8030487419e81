// A run of several processes, started as by torchrun: one run directory, the same weights as with
// threads as ranks, and if a rank fails all end with a message that names it.
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <thread>

#include "runs/config.h"
#include "sys/sockets.h"
#include "tests/apps/process.h"
#include "tests/runs/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class RankProcesses : public testing::Test {
 protected:
  // Writes `yaml` to run.yaml, for runs in the folder "run".
  void write_config(const std::string& yaml) {
    write_file(dir_.path("run.yaml"), "output_dir: run\n" + yaml);
  }

  using Arguments = std::vector<std::string>;
  using ArgumentsOfRank = std::function<Arguments(int rank)>;

  // Starts `size` processes of one run, with their own rendezvous port.
  std::vector<std::unique_ptr<Process>> start(int size, const ArgumentsOfRank& arguments) {
    const int port = free_port();
    std::vector<std::unique_ptr<Process>> out;
    for (int rank = 0; rank < size; ++rank) {
      const std::pair<const char*, std::string> variables[] = {
          {"RANK", std::to_string(rank)},        {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", std::to_string(rank)},  {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}, {"COHORT_RENDEZVOUS_TIMEOUT", "20"}};
      for (const auto& [name, value] : variables) setenv(name, value.c_str(), 1);
      out.push_back(std::make_unique<Process>(arguments(rank)));
      for (const auto& [name, value] : variables) unsetenv(name);
    }
    return out;
  }
  std::vector<std::unique_ptr<Process>> start(int size, const Arguments& arguments) {
    return start(size, [&](int) { return arguments; });
  }
  std::vector<Output> run(int size, const auto& arguments) {
    std::vector<Output> out;
    for (const auto& process : start(size, arguments)) out.push_back(process->wait());
    return out;
  }
  std::vector<std::string> train(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"train", dir_.path("run.yaml")});
    return more;
  }
  std::string model_of(const std::string& run) const { return checkpoint_bytes(dir_.path(run)); }

  const std::string sft_ = std::string(kSmallModel) + kSmallData + kSmallSft;
  const std::string grpo_ = std::string(kSmallModel) + kSmallData + kSmallGrpo;
  TempDir dir_;
};

TEST_F(RankProcesses, TrainTheSameWeightsAsThreads) {
  for (const std::string& yaml : {sft_, grpo_}) {
    write_config(yaml);
    const Output threads = run_cohort(train({"ranks=3", "output_dir=" + dir_.path("threads")}));
    ASSERT_EQ(threads.code, 0) << threads.err;
    const auto outputs = run(3, train());
    for (const Output& output : outputs) EXPECT_EQ(output.code, 0) << output.err;
    EXPECT_TRUE(model_of("run") == model_of("threads"));
    EXPECT_EQ(read_file(dir_.path("run/completions.jsonl")),
              read_file(dir_.path("threads/completions.jsonl")));
    EXPECT_FALSE(fs::exists(dir_.path("run-2")));
    for (const int rank : {1, 2}) EXPECT_EQ(outputs[static_cast<size_t>(rank)].err, "");
    fs::remove_all(dir_.path("run"));
    fs::remove_all(dir_.path("threads"));
  }
}

TEST_F(RankProcesses, ChooseTheSameMicroBatches) {
  write_config(sft_);
  for (const Output& output : run(2, train({"micro_batch_tokens=auto"})))
    ASSERT_EQ(output.code, 0) << output.err;
  const auto tokens =
      load_plan(dir_.path("run/config.yaml"), {}).stages[0].batch.micro_batch_tokens.value();
  for (const Output& output :
       run(2, train({str("micro_batch_tokens=", tokens), "output_dir=" + dir_.path("number")})))
    ASSERT_EQ(output.code, 0) << output.err;
  EXPECT_TRUE(model_of("run") == model_of("number"));
}

TEST_F(RankProcesses, StopOnSignalsAndResume) {
  write_config(sft_);
  for (const Output& output : run(2, train({"steps=400", "output_dir=" + dir_.path("whole")})))
    ASSERT_EQ(output.code, 0) << output.err;
  auto processes = start(2, train({"steps=400"}));
  const std::string metrics = dir_.path("run/metrics.jsonl");
  ASSERT_TRUE(wait_for_path(metrics, *processes[0]));
  while (read_file(metrics).find("\"grad_norm\"") == std::string::npos && processes[0]->running())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  processes[1]->signal(SIGTERM);  // the ranks agree to stop
  for (const auto& process : processes) {
    const Output output = process->wait();
    EXPECT_EQ(output.code, 130) << output.err;
  }
  for (const Output& output : run(2, Arguments{"train", "--resume", dir_.path("run")}))
    EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_TRUE(model_of("run") == model_of("whole"));
}

// After a first update that is not finite all processes return to the same checkpoint.
TEST_F(RankProcesses, ReturnToTheSameCheckpoint) {
  write_config(sft_);
  for (const Output& output : run(2, train({"steps=4", "checkpoint.every=2"})))
    ASSERT_EQ(output.code, 0) << output.err;
  const std::string bad = dir_.path("run/checkpoints/step-00000004");
  poison(dir_.path("run"), bad);
  const auto outputs = run(2, Arguments{"train", "--resume", dir_.path("run"), "steps=6"});
  for (const Output& output : outputs) EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_NE(
      outputs[0].err.find("the first update after resuming from " + bad + " failed (rank 0: "),
      std::string::npos)
      << outputs[0].err;
  EXPECT_NE(outputs[0].err.find("going back to "), std::string::npos);
  EXPECT_EQ(json_lines(dir_.path("run/metrics.jsonl")).back().at("step").as_int(), 6);
}

TEST_F(RankProcesses, EndWhenOneIsKilledAndNameIt) {
  write_config(sft_);
  for (const size_t victim : {size_t{1}, size_t{0}}) {
    auto processes = start(3, train({"steps=100000000"}));
    const std::string run = victim == 1 ? "run" : "run-2";
    ASSERT_TRUE(wait_for_path(dir_.path(run + "/metrics.jsonl"), *processes[0]));
    const auto start = std::chrono::steady_clock::now();
    processes[victim]->signal(SIGKILL);
    for (size_t rank = 0; rank < 3; ++rank) {
      const Output output = processes[rank]->wait();
      if (rank == victim) continue;
      EXPECT_EQ(output.code, 3) << output.err;
      EXPECT_NE(output.err.find(str("rank ", victim, " (")), std::string::npos) << output.err;
      EXPECT_NE(output.err.find("ended without a message"), std::string::npos) << output.err;
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  }
}

TEST_F(RankProcesses, BadDataOnRankZeroEndAll) {
  write_config(std::string(kSmallModel) + kSmallSft + "data: {jsonl: {path: absent.jsonl}}\n");
  const auto outputs = run(2, train());
  EXPECT_EQ(outputs[0].code, 2) << outputs[0].err;
  EXPECT_EQ(outputs[1].code, 3) << outputs[1].err;
  for (const Output& output : outputs)
    EXPECT_NE(output.err.find("absent.jsonl"), std::string::npos) << output.err;
  EXPECT_NE(outputs[1].err.find("rank 0 ("), std::string::npos) << outputs[1].err;
}

TEST_F(RankProcesses, WithDifferentConfigurationsAreRefused) {
  write_config(sft_);
  const auto outputs =
      run(2, [&](int rank) { return train({str("learning_rate=0.0", rank + 1)}); });
  for (const Output& output : outputs)
    expect_bad_input(output, {"the ranks have different configurations: rank 0 has "
                              "'learning_rate: 0.01', rank 1 has 'learning_rate: 0.02'"});
  EXPECT_FALSE(fs::exists(dir_.path("run")));
}

TEST_F(RankProcesses, RejectThreadsAsRanks) {
  write_config(sft_);
  for (const Output& output : run(2, train({"ranks=2"}))) {
    EXPECT_TRUE(output.code == 2 || output.code == 3) << output.err;
    EXPECT_NE(output.err.find("ranks: 2 threads were asked for, in a run of 2 processes"),
              std::string::npos)
        << output.err;
  }
}

TEST_F(RankProcesses, NeedACompleteEnvironment) {
  write_config(sft_);
  setenv("RANK", "0", 1);
  const Output output = run_cohort(train());
  unsetenv("RANK");
  expect_bad_input(output, {"WORLD_SIZE: not set"});
}

TEST_F(RankProcesses, UnavailableGpusAreBadInput) {
  write_config(sft_);
  expect_bad_input(run_cohort(train({"--gpus", "2"})), {"--gpus: expected device: cuda"});
  expect_bad_input(run_cohort(train({"--gpus", "1000", "device=cuda"})), {"CUDA"});
  for (const Output& output : run(2, train({"--gpus", "2", "device=cuda"})))
    expect_bad_input(output, {"--gpus: this process is already rank ",
                              " of 2 that torchrun started; hint: omit --gpus"});
}

}  // namespace
}  // namespace cohort::test
