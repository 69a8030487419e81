// `cohort replay`: its output and exit codes.
#include <bit>
#include <filesystem>

#include "core/text.h"
#include "job/journal.h"
#include "sys/files.h"
#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class ReplayCommand : public testing::Test {
 protected:
  // Trains with a program as the reward, and removes the program.
  ReplayCommand() {
    write_file(
        dir_.path("reward.py"),
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    r = json.loads(line)\n"
        "    print(json.dumps({'index': r['index'], 'reward': float('1' in r['completion'])}),\n"
        "          flush=True)\n");
    write_file(dir_.path("run.yaml"),
               str(kSmallModel, kSmallData, "trainer: grpo\nsteps: 6\nprompts_per_step: 4\n",
                   "num_generations: 6\nlr_schedule: constant\ncheckpoint: {every: 4}\n",
                   "rewards:\n  - {name: command, run: python3 reward.py}\noutput_dir: run\n"));
    const Output trained = run_cohort({"train", dir_.path("run.yaml")});
    EXPECT_EQ(trained.code, 0) << trained.err;
    fs::remove(dir_.path("reward.py"));
  }
  Output replay(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), {"replay", run_});
    return run_cohort(arguments);
  }
  TempDir dir_;
  const std::string run_ = dir_.path("run");
};

TEST_F(ReplayCommand, AsksNoProgramAndSaysThatStepsAreEqual) {
  const std::string log = fs::exists(run_ + "/workers.log") ? read_file(run_ + "/workers.log") : "";
  const Output output = replay({"--step", "6"});
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_EQ(output.out.find("step 5: equal: 24 rollouts, "), 0u) << output.out;
  EXPECT_NE(output.out.find("\nstep 6: equal: 24 rollouts, "), std::string::npos) << output.out;
  EXPECT_NE(output.out.find(" tokens, log-probs, advantages, update\n"), std::string::npos);
  EXPECT_EQ(output.err, "");
  EXPECT_EQ(fs::exists(run_ + "/workers.log") ? read_file(run_ + "/workers.log") : "", log);
}

TEST_F(ReplayCommand, PrintsACompletionAndAToken) {
  const Output all = replay({"--step", "2", "--prompt", "3", "--completion", "5"});
  ASSERT_EQ(all.code, 0) << all.err;
  const StepRecord record = read_record(journal_path(run_ + "/journal", 2, 0, 1));
  const RecordedCompletion& c = record.completions.back();
  for (const std::string& text :
       {std::string("prompt:\n"), std::string("turn 1:\n"),
        str("reward command: ", c.rewards[0], "\n"), str("reward total: ", c.total, "\n"),
        str("advantage: ", format_double(record.advantages.back()), "\n")})
    EXPECT_NE(all.out.find(text), std::string::npos) << text << " in " << all.out;
  const size_t last = c.tokens.size() - 1;
  const Output one = replay(
      {"--step", "2", "--prompt", "3", "--completion", "5", "--token", std::to_string(last)});
  ASSERT_EQ(one.code, 0) << one.err;
  const auto bits = std::bit_cast<uint64_t>(c.logprobs[last]);
  EXPECT_NE(one.out.find(str("sampled   log-prob ", format_double(c.logprobs[last]), " (",
                             hex(bits), "), entropy ")),
            std::string::npos)
      << one.out;
  expect_bad_input(replay({"--step", "2", "--prompt", "3", "--completion", "5", "--token", "99"}),
                   {"--token 99: the sequence has 0 to "});
}

TEST_F(ReplayCommand, FailsWithTheFirstDifference) {
  const std::string path = journal_path(run_ + "/journal", 3, 0, 1);
  StepRecord record = read_record(path);
  double& logprob = record.completions[13].logprobs.back();
  const double now = logprob;
  logprob = std::bit_cast<double>(std::bit_cast<uint64_t>(logprob) ^ 1u << 29);  // a bit of f32
  write_file(path, encode_record(record));
  const Output output = replay({"--step", "3"});
  EXPECT_EQ(output.code, 1) << output.err;
  const size_t token = record.completions[13].tokens.size() - 1;
  EXPECT_NE(output.out.find(str("\nstep 3: prompt 2, completion 1, token ", token, ": log-prob ",
                                format_double(now), " (", hex(std::bit_cast<uint64_t>(now)),
                                "), recorded ", format_double(logprob), " (",
                                hex(std::bit_cast<uint64_t>(logprob)), ")\n")),
            std::string::npos)
      << output.out;
}

TEST_F(ReplayCommand, RefusesWhatIsNotThere) {
  expect_bad_input(replay({"--step", "7"}), {"--step 7", "these can be replayed: 1 to 6"});
  expect_bad_input(replay({"--step", "1", "--prompt", "4", "--completion", "0"}),
                   {"--prompt 4: a step has 0 to 3"});
  const std::string path = journal_path(run_ + "/journal", 1, 0, 1);
  std::string text = read_file(path);
  text[text.size() / 2] ^= 1;
  write_file(path, text);
  expect_bad_input(replay({"--step", "2"}), {"step-00000001", "damaged"});
  expect_bad_input(run_cohort({"replay", dir_.path("other"), "--step", "1"}), {"is no run"});
}

}  // namespace
}  // namespace cohort::test
