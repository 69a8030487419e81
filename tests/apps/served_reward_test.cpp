// Runs whose rewards come from a server that is killed, slow or gone, or is sent a key.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "sys/sockets.h"
#include "tests/apps/process.h"
#include "tests/job/small_configs.h"
#include "tests/support/answer_server.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class ServedRuns : public testing::Test {
 protected:
  // The arguments of a run of 4 steps of 24 completions.
  std::vector<std::string> run(const std::string& name, const std::string& rewards) const {
    write_file(dir_.path(name + ".yaml"),
               str(kSmallModel, kSmallData, "trainer: grpo\nsteps: 4\nprompts_per_step: 4\n",
                   "num_generations: 6\nlr_schedule: constant\ncheckpoint: {every: 1}\n",
                   "rewards: ", rewards, "\noutput_dir: ", name, "\n"));
    return {"train", dir_.path(name + ".yaml")};
  }
  std::string judge(const AnswerServer& server, const std::string& keys = "") const {
    return str("[{name: judge, url: '", server.url("chat:NSEED"), "', model: m, concurrent: 2, ",
               "prompt: '{completion} {prompt}', votes: 2, scale: [0, 100]", keys, "}]");
  }
  TempDir dir_;
};

// The text of all answers, as hashes of the bodies.
std::multiset<std::string> bodies(const AnswerServer& server) {
  std::multiset<std::string> out;
  for (const Json& one : server.requests()) out.insert(one.at("body").dump());
  return out;
}

TEST_F(ServedRuns, AKilledStepAsksForNothingThatWasAnswered) {
  const AnswerServer undisturbed;
  const std::string rewards =
      str("[{name: http, url: '", undisturbed.url("ok:0.01"), "', concurrent: 2}]");
  const Output whole = run_cohort(run("whole", rewards));
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_EQ(undisturbed.requests().size(), 3u + 4 * 24);  // and those of the gold answers
  for (const size_t killed_at : {20, 40, 70}) {
    const AnswerServer server;
    const std::string name = str("killed_", killed_at);
    Process process(
        run(name, str("[{name: http, url: '", server.url("ok:0.01"), "', concurrent: 2}]")));
    while (process.running() && server.requests().size() < 3 + killed_at) ::usleep(1000);
    process.signal(SIGKILL);
    EXPECT_EQ(process.wait().code, 128 + SIGKILL);
    const auto answered = json_lines(dir_.path(name + "/judge.jsonl")).size();
    const Output resumed = run_cohort(
        fs::exists(dir_.path(name + "/checkpoints"))
            ? std::vector<std::string>{"train", "--resume", dir_.path(name)}
            : std::vector<std::string>{"train", "--continue", dir_.path(name + ".yaml")});
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_EQ(checkpoint_bytes(dir_.path(name)), checkpoint_bytes(dir_.path("whole")));
    const auto asked = bodies(server);
    size_t twice = 0;  // those that were on their way, and the gold answers of a new start
    for (const std::string& body : asked) twice += asked.count(body) > 1;
    EXPECT_LE(twice, 2 * (2 + 3u)) << killed_at;
    EXPECT_GE(answered + 2, killed_at - 3) << killed_at;
  }
}

TEST_F(ServedRuns, AnOutageEndsTheRunAndItsResumptionContinues) {
  const int port = free_port();
  auto server = std::make_unique<AnswerServer>(port);
  ASSERT_EQ(run_cohort(run("whole", judge(*server))).code, 0);
  const std::string reward = judge(*server, ", outage_minutes: 0.03");
  Process process(run("cut", reward));
  while (process.running() && !fs::exists(dir_.path("cut/checkpoints/step-00000002")))
    ::usleep(1000);
  server.reset();
  const Output cut = process.wait();
  if (cut.code == 0) GTEST_SKIP() << "the run ended before its server";
  EXPECT_EQ(cut.code, 2) << cut.err;
  EXPECT_NE(cut.err.find("has answered nothing for 0.03 minutes"), std::string::npos) << cut.err;
  EXPECT_NE(cut.err.find("cohort train --resume"), std::string::npos) << cut.err;
  server = std::make_unique<AnswerServer>(port);
  const Output resumed = run_cohort({"train", "--resume", dir_.path("cut")});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(checkpoint_bytes(dir_.path("cut")), checkpoint_bytes(dir_.path("whole")));
}

TEST_F(ServedRuns, AReplayAsksNoServer) {
  auto server = std::make_unique<AnswerServer>();
  ASSERT_EQ(run_cohort(run("run", judge(*server))).code, 0);
  server.reset();
  const Output replay = run_cohort({"replay", dir_.path("run"), "--step", "3"});
  EXPECT_EQ(replay.code, 0) << replay.err;
}

TEST_F(ServedRuns, AKeyReachesOnlyTheServer) {
  const AnswerServer server;
  const std::string key = "a-key-of-4711";
  ::setenv("COHORT_TEST_KEY", key.c_str(), 1);
  write_file(dir_.path("look.py"),
             "import os, sys\n"
             "def reward(completions, **fields):\n"
             "    print(sorted(os.environ), list(os.environ.values()), file=sys.stderr)\n"
             "    return [0 for c in completions]\n");
  const fs::path root = fs::path(__FILE__).parent_path().parent_path().parent_path();
  std::string rewards =
      judge(server,
            ", headers_env: {Authorization: 'Bearer ${COHORT_TEST_KEY}', X: '${COHORT_TEST_KEY}'}");
  rewards.back() = ',';
  rewards += str("{name: command, run: 'python3 ", (root / "scripts/cohort_reward.py").string(),
                 " look.py'}]");
  const Output done = run_cohort(run("run", rewards));
  ::unsetenv("COHORT_TEST_KEY");
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_EQ(server.requests().at(0).at("key").as_string(), "Bearer " + key);
  EXPECT_EQ((done.out + done.err).find(key), std::string::npos);
  EXPECT_NE(read_file(dir_.path("run/workers.log")).find("PATH"), std::string::npos);
  for (const auto& entry : fs::recursive_directory_iterator(dir_.path("run"))) {
    if (!entry.is_regular_file()) continue;
    EXPECT_EQ(read_file(entry.path().string()).find(key), std::string::npos) << entry.path();
  }
  const Output again = run_cohort({"train", "--resume", dir_.path("run"), "steps=5"});
  EXPECT_EQ(again.code, 2);
  EXPECT_NE(again.err.find("COHORT_TEST_KEY of the environment is not set"), std::string::npos)
      << again.err;
}

}  // namespace
}  // namespace cohort::test
