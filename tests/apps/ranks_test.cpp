// A run of several processes, started as by torchrun: one run directory, the same weights as with
// threads as ranks, and if a rank fails all end with a message that names it.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <thread>

#include "distributed/launcher.h"
#include "job/config.h"
#include "sys/sockets.h"
#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

// A network without others, for the processes that are started in it. It is gone with the last of
// them and this object, even if the test is killed.
class Network {
 public:
  Network() : home_(current()) {
    if (unshare(CLONE_NEWNET) != 0)
      throw Error(str("cannot make a network namespace: ", std::strerror(errno)));
    own_ = current();
    leave();
  }
  ~Network() {
    close(own_);
    close(home_);
  }
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // Processes that this thread starts in between are in the network.
  void enter() const { EXPECT_EQ(setns(own_, CLONE_NEWNET), 0); }
  void leave() const { EXPECT_EQ(setns(home_, CLONE_NEWNET), 0); }
  // Throws Error if `ip ARGUMENTS`, called in the network, fails.
  void ip(const std::string& arguments) const {
    enter();
    const int status = std::system(("ip " + arguments).c_str());
    leave();
    if (status != 0) throw Error("`ip " + arguments + "` fails");
  }
  std::string path() const { return str("/proc/", getpid(), "/fd/", own_); }

 private:
  static int current() { return open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC); }
  int home_ = -1, own_ = -1;
};

class RankProcesses : public testing::Test {
 protected:
  // Writes `yaml` to run.yaml, for runs in the folder "run".
  void write_config(const std::string& yaml) {
    write_file(dir_.path("run.yaml"), "output_dir: run\n" + yaml);
  }

  using Arguments = std::vector<std::string>;
  using ArgumentsOfRank = std::function<Arguments(int rank)>;

  // Starts `size` processes of one run, with their own rendezvous port; `fault` is that of a rank.
  // With per_host_ they are as on hosts of so many ranks, each in one of networks_, if any.
  std::vector<std::unique_ptr<Process>> start(int size, const ArgumentsOfRank& arguments,
                                              const std::pair<int, Fault>& fault = {-1, {}}) {
    const int port = free_port();
    std::vector<std::unique_ptr<Process>> out;
    for (int rank = 0; rank < size; ++rank) {
      const std::pair<const char*, std::string> variables[] = {
          {"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", std::to_string(per_host_ > 0 ? rank % per_host_ : rank)},
          {"LOCAL_WORLD_SIZE", per_host_ > 0 ? std::to_string(per_host_) : ""},
          {"MASTER_ADDR", per_host_ == 0 || networks_.empty() ? "127.0.0.1" : "10.203.0.1"},
          {"MASTER_PORT", std::to_string(port)},
          {"COHORT_RENDEZVOUS_TIMEOUT", "20"}};
      for (const auto& [name, value] : variables) setenv(name, value.c_str(), 1);
      const Network* network = nullptr;
      if (per_host_ > 0 && !networks_.empty())
        network = networks_[static_cast<size_t>(rank / per_host_)].get();
      if (network != nullptr) network->enter();
      out.push_back(std::make_unique<Process>(arguments(rank), "",
                                              rank == fault.first ? fault.second : Fault()));
      if (network != nullptr) network->leave();
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
  int per_host_ = 0;
  std::vector<std::unique_ptr<Network>> networks_;
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

// Two hosts of two ranks, which add their gradients inside hosts first.
TEST_F(RankProcesses, OfSeveralHostsTrainTheSameWeights) {
  for (const std::string& yaml : {sft_, grpo_})
    for (const char* sharding : {"sharding=none", "sharding=gradients"}) {
      write_config(yaml);
      const Output threads =
          run_cohort(train({"ranks=4", sharding, "output_dir=" + dir_.path("threads")}));
      ASSERT_EQ(threads.code, 0) << threads.err;
      per_host_ = 2;
      for (const Output& output : run(4, train({sharding})))
        EXPECT_EQ(output.code, 0) << output.err;
      EXPECT_TRUE(model_of("run") == model_of("threads"));
      fs::remove_all(dir_.path("run"));
      fs::remove_all(dir_.path("threads"));
    }
}

// Two hosts with a cable of their own between them.
class RankNetworksSlow : public RankProcesses {
 protected:
  void SetUp() override {
    try {
      for (int i = 0; i < 2; ++i) networks_.push_back(std::make_unique<Network>());
      const Network &a = *networks_[0], &b = *networks_[1];
      a.ip("link add cable type veth peer name cable netns " + b.path());
      a.ip("address add 10.203.0.1/30 dev cable");
      b.ip("address add 10.203.0.2/30 dev cable");
      for (const auto& network : networks_)
        for (const char* link : {"lo", "cable"}) network->ip(str("link set ", link, " up"));
    } catch (const Error& e) {
      networks_.clear();
      GTEST_SKIP() << e.what() << "; hint: root and the package iproute2 can";
    }
    write_config(sft_);
  }
};

TEST_F(RankNetworksSlow, TrainTheSameWeightsAsOnOneHost) {
  for (const int ranks : {2, 4}) {
    per_host_ = ranks / 2;
    for (const Output& output : run(ranks, train())) ASSERT_EQ(output.code, 0) << output.err;
    per_host_ = 0;
    for (const Output& output : run(ranks, train({"output_dir=" + dir_.path("one")})))
      ASSERT_EQ(output.code, 0) << output.err;
    EXPECT_TRUE(model_of("run") == model_of("one"));
    for (const char* run : {"run", "one"}) fs::remove_all(dir_.path(run));
  }
}

// Each names the other: neither can know which of them is gone.
TEST_F(RankNetworksSlow, EndWhenTheCableIsCut) {
  per_host_ = 1;
  const auto processes = start(2, train({"steps=100000000"}));
  ASSERT_TRUE(wait_for_path(dir_.path("run/metrics.jsonl"), *processes[0]));
  const auto start = std::chrono::steady_clock::now();
  networks_[0]->ip("link set cable down");
  for (size_t rank = 0; rank < 2; ++rank) {
    const Output output = processes[rank]->wait();
    EXPECT_EQ(output.code, 3) << output.err;
    EXPECT_NE(output.err.find(str("rank ", 1 - rank, " (")), std::string::npos) << output.err;
    EXPECT_NE(output.err.find(") sent no heartbeat for 20 s; is its host or the network down?"),
              std::string::npos)
        << output.err;
  }
  const auto time = std::chrono::steady_clock::now() - start;
  EXPECT_GE(time, std::chrono::seconds(15));
  EXPECT_LT(time, std::chrono::seconds(30));  // 20, and up to 5 to end
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

// After a first update that is not finite all processes return to the checkpoint that rank 0 names;
// the host of rank 1 sees another one too.
TEST_F(RankProcesses, ReturnToTheSameCheckpoint) {
  write_config(sft_);
  for (const Output& output : run(2, train({"steps=4", "checkpoint.every=2"})))
    ASSERT_EQ(output.code, 0) << output.err;
  const std::string bad = dir_.path("run/checkpoints/step-00000004");
  poison(dir_.path("run"), bad);
  const auto copy = [&](const std::string& from, const std::string& to) {
    fs::copy(dir_.path(from), dir_.path(to), fs::copy_options::recursive);
  };
  copy("run", "seen");
  copy("run/checkpoints/step-00000002", "seen/checkpoints/step-00000003");
  const auto outputs = run(2, [&](int rank) {
    return Arguments{"train", "--resume", dir_.path(rank == 0 ? "run" : "seen"), "steps=6"};
  });
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

// Every start has the same command line, as under torchrun.
TEST_F(RankProcesses, ContinueInOneDirectoryUntilTheRunIsDone) {
  write_config(sft_);
  for (const Output& output : run(2, train({"steps=300", "output_dir=" + dir_.path("whole")})))
    ASSERT_EQ(output.code, 0) << output.err;
  const auto command = train({"--continue", "steps=300", "checkpoint.every=20"});
  for (const size_t victim : {size_t{1}, size_t{0}}) {
    auto processes = start(2, command);
    const std::string metrics = dir_.path("run/metrics.jsonl");
    ASSERT_TRUE(wait_for_path(metrics, *processes[0]));
    const auto lines = [&] {
      const std::string text = read_file(metrics);
      return std::count(text.begin(), text.end(), '\n');
    };
    for (const auto before = lines(); lines() < before + 50 && processes[0]->running();)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    processes[victim]->signal(SIGKILL);
    for (const auto& process : processes) process->wait();
  }
  for (const char* log : {"", "is finished, at step 300"})
    for (const Output& output : run(2, command)) {
      EXPECT_EQ(output.code, 0) << output.err;
      if (output.out.empty()) continue;  // rank 1 prints nothing
      EXPECT_NE(output.err.find(log), std::string::npos) << output.err;
    }
  EXPECT_TRUE(model_of("run") == model_of("whole"));
  EXPECT_FALSE(fs::exists(dir_.path("run-2")));
}

// The ranks of `train --gpus 2 --restarts 3`, without GPUs: rank 1 is killed twice.
TEST_F(RankProcesses, LaunchedAgainContinueTheRun) {
  write_config(sft_);
  for (const Output& output : run(2, train({"steps=300", "output_dir=" + dir_.path("whole")})))
    ASSERT_EQ(output.code, 0) << output.err;
  const std::string script =
      "cd " + dir_.path() +
      "; train() { exec " COHORT_BINARY
      " train --continue run.yaml steps=300 checkpoint.every=20 > $RANK.txt 2>&1; }\n"
      "echo >> starts.$RANK; start=$(wc -l < starts.$RANK)\n"
      "test $RANK = 1 && test $start -lt 3 || train\n"
      "train & until test -e run/checkpoints/step-00000${start}00; do sleep 0.01; done\n"
      "kill -KILL $!; kill -KILL $$";
  std::vector<int> failures;
  const LaunchOptions options{
      .command = {"/bin/sh", "-c", script},
      .count = 2,
      .exit_code_of_peer = 3,
      .restarts = 3,
      .final_codes = {2, 130},
      .on_restart = [&](const LaunchResult& failed) { failures.push_back(failed.code); }};
  EXPECT_EQ(launch_ranks(options, false).code, 0) << read_file(dir_.path("0.txt"));
  EXPECT_EQ(failures, std::vector<int>(2, 128 + SIGKILL));
  EXPECT_TRUE(model_of("run") == model_of("whole"));
  EXPECT_FALSE(fs::exists(dir_.path("run-2")));
  EXPECT_TRUE(fs::exists(dir_.path("run/starts/3.yaml")));
}

TEST_F(RankProcesses, ContinueADirectoryWithoutACheckpoint) {
  write_config(sft_);
  fs::create_directory(dir_.path("run"));  // killed before there was a configuration
  write_file(dir_.path("run/log.txt"), "[2026-01-01 00:00:00.000 info] an earlier start\n");
  for (const Output& output : run(2, train({"--continue"})))
    EXPECT_EQ(output.code, 0) << output.err;
  const std::string first = model_of("run");
  fs::remove_all(dir_.path("run/checkpoints"));  // killed before the first checkpoint
  for (const Output& output : run(2, train({"--continue"})))
    EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_TRUE(model_of("run") == first);
  EXPECT_FALSE(fs::exists(dir_.path("run-2")));
}

TEST_F(RankProcesses, ContinueRefusesAnotherRunAndForeignFiles) {
  write_config(sft_);
  ASSERT_EQ(run_cohort(train({"--continue", "micro_batch_tokens=auto"})).code, 0);
  expect_bad_input(run_cohort(train({"--continue", "learning_rate=0.5"})),
                   {"run holds a run of another configuration: it has 'learning_rate: 0.01', this "
                    "one 'learning_rate: 0.5'; hint: "});
  for (const Output& output : run(2, train({"--continue", "learning_rate=0.5"}))) {
    EXPECT_TRUE(output.code == 2 || output.code == 3) << output.err;
    EXPECT_NE(output.err.find("'learning_rate: 0.5'"), std::string::npos) << output.err;
  }
  const Output longer = run_cohort(train({"--continue", "micro_batch_tokens=auto", "steps=8"}));
  EXPECT_EQ(longer.code, 0) << longer.err;
  EXPECT_EQ(json_lines(dir_.path("run/metrics.jsonl")).back().at("step").as_int(), 8);
  fs::create_directory(dir_.path("other"));
  write_file(dir_.path("other/notes.txt"), "");
  expect_bad_input(run_cohort(train({"--continue", "output_dir=" + dir_.path("other")})),
                   {"other holds no run, but notes.txt"});
  expect_bad_input(run_cohort(train({"--continue", "output_dir=" + dir_.path("run.yaml")})),
                   {"cannot create the run directory"});
  expect_bad_input(run_cohort(train({"--continue", "--resume", dir_.path("run")})),
                   {"--resume excludes --continue"});
}

// A launcher may start the command again before the killed process is gone.
TEST_F(RankProcesses, ContinueWaitsForTheProcessThatUsesTheDirectory) {
  write_config(sft_);
  Process owner(train({"--continue", "steps=100000000"}));
  ASSERT_TRUE(wait_for_path(dir_.path("run/metrics.jsonl"), owner));
  Process next(train({"--continue", "steps=2"}));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  owner.signal(SIGKILL);
  const Output output = next.wait();
  EXPECT_EQ(output.code, 0) << output.err;
}

// Three processes with a slice of the optimizer's state each: rank 0 writes the weights, the others
// the state.
class ShardedRankProcessesSlow : public RankProcesses {
 protected:
  static constexpr const char* kSave = ".tmp-step-00000004/";
  ShardedRankProcessesSlow() { write_config(sft_); }
  std::vector<std::string> sharded(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"sharding=optimizer", "model.num_layers=4", "checkpoint.every=2"});
    return train(more);
  }
  void expect_whole(const std::string& run, const std::string& whole) {
    EXPECT_TRUE(model_of(run) == model_of(whole));
    const auto state = [&](const std::string& name) {
      return SafetensorsFolder(training_folder(find_checkpoint(dir_.path(name))), "optimizer");
    };
    const SafetensorsFolder now = state(run), then = state(whole);
    EXPECT_EQ(now.names(), then.names());
    for (const std::string& name : now.names())
      EXPECT_TRUE(bit_equal(now.get(name).read(name), then.get(name).read(name))) << name;
  }
  // Runs three processes, of which the save of step 4 fails, and then resumes them. Returns the
  // outputs of the first start.
  std::vector<Output> fail_and_resume(int rank, const Fault& fault) {
    fs::remove_all(dir_.path("run"));
    std::vector<Output> out;
    for (const auto& process : start(3, [&](int) { return sharded(); }, {rank, fault}))
      out.push_back(process->wait());
    EXPECT_EQ(fs::path(find_checkpoint(dir_.path("run"))).filename(), "step-00000002");
    const bool is_killed = fault.error == -1 && rank == 0;  // who removes what is left
    EXPECT_EQ(fs::exists(dir_.path("run/checkpoints/.tmp-step-00000004")), is_killed);
    for (const Output& output : run(3, Arguments{"train", "--resume", dir_.path("run")}))
      EXPECT_EQ(output.code, 0) << output.err;
    EXPECT_FALSE(fs::exists(dir_.path("run/checkpoints/.tmp-step-00000004")));
    return out;
  }
};

// A rank is killed while it writes its file, or flushes or renames it, or at the very end.
TEST_F(ShardedRankProcessesSlow, KilledInASaveResumeFromTheCheckpointBefore) {
  for (const Output& output : run(3, sharded({"output_dir=" + dir_.path("whole")})))
    ASSERT_EQ(output.code, 0) << output.err;
  const std::pair<int, Fault> kills[] = {{0, {"write", kSave, -1, 1}},
                                         {1, {"write", kSave, -1, 1}},
                                         {2, {"fsync", kSave, -1}},
                                         {1, {"rename", kSave, -1}},
                                         {0, {"write", std::string(kSave) + "manifest", -1}}};
  for (const auto& [victim, fault] : kills) {
    SCOPED_TRACE(str(fault.call, " of rank ", victim));
    const auto outputs = fail_and_resume(victim, fault);
    for (int rank = 0; rank < 3; ++rank) {
      const Output& output = outputs[static_cast<size_t>(rank)];
      EXPECT_EQ(output.code, rank == victim ? 128 + SIGKILL : 3) << output.err;
      if (rank == victim) continue;
      EXPECT_NE(output.err.find(str("rank ", victim, " (")), std::string::npos) << output.err;
    }
    expect_whole("run", "whole");
  }
}

// Every rank says which file could not be written, and why.
TEST_F(ShardedRankProcessesSlow, AFullDiskOfOneWriterEndsAllAndLeavesNoHalfCheckpoint) {
  for (const Output& output : run(3, sharded({"output_dir=" + dir_.path("whole")})))
    ASSERT_EQ(output.code, 0) << output.err;
  const std::pair<int, Fault> failures[] = {{0, {"write", kSave, ENOSPC, 1}},
                                            {1, {"write", kSave, ENOSPC, 1}},
                                            {2, {"open", kSave, ENOSPC}},
                                            {1, {"fsync", kSave, ENOSPC}}};
  for (const auto& [full, fault] : failures) {
    SCOPED_TRACE(str(fault.call, " of rank ", full));
    const auto outputs = fail_and_resume(full, fault);
    const std::string file =
        dir_.path("run/checkpoints/") + kSave +
        (full == 0 ? "model.safetensors" : str("training/optimizer-0000", full));
    for (size_t rank = 0; rank < 3; ++rank) {
      const Output& output = outputs[rank];
      // The others learn of a failure of rank 0 as that of a peer.
      EXPECT_EQ(output.code, full == 0 && rank > 0 ? 3 : 1) << output.err;
      for (const std::string& text : {file, std::string("No space left on device")})
        EXPECT_NE(output.err.find(text), std::string::npos) << output.err;
      EXPECT_EQ(output.err.find("cannot remove"), std::string::npos) << output.err;
    }
    expect_whole("run", "whole");
  }
}

// The state of two processes is read by three, which continue as three threads do.
TEST_F(ShardedRankProcessesSlow, OfTwoAreResumedByThree) {
  const Fault killed{"write", ".tmp-step-00000006", -1};
  for (const auto& process : start(2, [&](int) { return sharded({"dtype=f64"}); }, {0, killed}))
    process->wait();
  ASSERT_EQ(fs::path(find_checkpoint(dir_.path("run"))).filename(), "step-00000004");
  for (const char* name : {"threads", "two"})
    fs::copy(dir_.path("run"), dir_.path(name), fs::copy_options::recursive);
  const auto resumed = [&](const std::string& name) {
    return Arguments{"train", "--resume", dir_.path(name)};
  };
  for (const Output& output : run(3, resumed("run"))) EXPECT_EQ(output.code, 0) << output.err;
  for (const Output& output : run(2, resumed("two"))) EXPECT_EQ(output.code, 0) << output.err;
  Arguments threads = resumed("threads");
  threads.emplace_back("ranks=3");
  const Output output = run_cohort(threads);
  EXPECT_EQ(output.code, 0) << output.err;
  expect_whole("run", "threads");
  EXPECT_LT(relative_error(final_weights(dir_.path("run")), final_weights(dir_.path("two"))), 1e-9);
}

// Hangs with a watchdog of 3 seconds. scripts/attack_hangs.py has more, at random.
class RankHangsSlow : public RankProcesses {
 protected:
  // Waits for all and expects that `culprit` is named as it hangs, with what it does.
  void expect_named(std::vector<std::unique_ptr<Process>> processes, int culprit,
                    const std::string& activity) {
    for (size_t rank = 0; rank < processes.size(); ++rank) {
      const Output output = processes[rank]->wait();
      EXPECT_EQ(output.code, static_cast<int>(rank) == culprit ? 4 : 3) << rank << output.err;
      const size_t last = output.err.rfind("cohort: ");
      ASSERT_NE(last, std::string::npos) << output.err;
      const std::string error = output.err.substr(last);
      EXPECT_NE(error.find(str("rank ", culprit, " (")), std::string::npos) << error;
      EXPECT_NE(error.find(") has made no progress for 3 s: " + activity), std::string::npos)
          << error;
    }
    const std::string log = read_file(dir_.path("run/log.txt"));
    EXPECT_NE(log.find("the run ends after 3 s"), std::string::npos);
    EXPECT_NE(log.find("the last calls:\n  call "), std::string::npos);
  }
  const std::vector<std::string> hanging_ =
      train({"steps=100000000", "watchdog_minutes=0.05", "checkpoint.every=50"});
};

TEST_F(RankHangsSlow, ARewardThatNeverAnswers) {
  write_file(dir_.path("reward.py"),
             "import json, os, sys, time\n"
             "for number, line in enumerate(sys.stdin):\n"
             "    if os.environ.get('RANK', '1') == '1' and number > 20: time.sleep(1000)\n"
             "    index = json.loads(line)['index']\n"
             "    print(json.dumps({'index': index, 'reward': number % 2}), flush=True)\n");
  write_config(std::string(kSmallModel) + kSmallData +
               "trainer: grpo\nprompts_per_step: 4\nnum_generations: 6\nrewards:\n"
               "  - {name: command, run: python3 reward.py, timeout: 1000}\n");
  expect_named(start(3, [&](int) { return hanging_; }), 1, "waiting for rewards, after call ");
  // A run of one process.
  auto one = hanging_;
  one.push_back("output_dir=" + dir_.path("one"));
  const Output output = run_cohort(one);
  EXPECT_EQ(output.code, 4) << output.err;
  EXPECT_NE(output.err.find("cohort: the run has made no progress for 3 s: waiting for rewards; "
                            "hint: watchdog_minutes is the limit"),
            std::string::npos)
      << output.err;
}

TEST_F(RankHangsSlow, AWriteThatNeverReturnsLeavesNoHalfCheckpoint) {
  write_config(sft_);
  const Fault stuck{"write", ".tmp-step-00000100", -2};
  expect_named(start(2, [&](int) { return hanging_; }, {0, stuck}), 0, "saving a checkpoint");
  EXPECT_EQ(fs::path(find_checkpoint(dir_.path("run"))).filename(), "step-00000050");
}

TEST_F(RankHangsSlow, AReadThatNeverReturnsOrALoop) {
  write_file(dir_.path("data.jsonl"), [] {
    std::string lines;
    for (int i = 0; i < 40; ++i) lines += str("{\"q\": \"", i, "+1=\", \"a\": \"", i + 1, "\"}\n");
    return lines;
  }());
  write_config(
      std::string(kSmallModel) + kSmallSft +
      "data: {tokenizer: byte, jsonl: {path: data.jsonl, prompt: '{q}', answer: '{a}'}}\n");
  for (const int error : {-2, -3}) {
    const Fault stuck{"pread", "data.jsonl", error, 1000};
    expect_named(start(2, [&](int) { return hanging_; }, {1, stuck}), 1, "training, after call ");
    fs::remove_all(dir_.path("run"));
  }
}

// The ranks that are awake, or only one, wait for the others: no rank hangs.
TEST_F(RankHangsSlow, AStopOfTenSecondsIsNoFailure) {
  write_config(sft_);
  for (const size_t awake : {size_t{0}, size_t{2}}) {
    auto processes = start(3, train({"steps=300", "watchdog_minutes=0.05"}));
    const std::string run = awake == 0 ? "run" : "run-2";
    ASSERT_TRUE(wait_for_path(dir_.path(run + "/metrics.jsonl"), *processes[0]));
    for (const int number : {SIGSTOP, SIGCONT}) {
      for (size_t rank = 0; rank < 3; ++rank)
        if (rank != awake) processes[rank]->signal(number);
      if (number == SIGSTOP) std::this_thread::sleep_for(std::chrono::seconds(10));
    }
    for (const auto& process : processes) {
      const Output output = process->wait();
      EXPECT_EQ(output.code, 0) << output.err;
    }
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
