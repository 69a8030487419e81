// Runs whose environment fails dialogues of evaluations, or of training.
#include <filesystem>

#include "job/training.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

// An environment that fails dialogues of evaluations while `failing` is true, and gives reward 1.
class RunsWithFailures : public testing::Test {
 protected:
  RunResult train(const std::vector<std::string>& overrides, const std::string& resume = "") {
    const std::string yaml =
        str("model: {num_layers: 1, d_model: 16, num_heads: 2, context: 40, init_std: 0.1}\n"
            "num_threads: 1\ntrainer: grpo\nsteps: 4\nprompts_per_step: 2\nnum_generations: 2\n"
            "max_completion_length: 4\nstop_strings: ['0', '1', '2', '3', '4', '5', '6', '7', '8', "
            "'9', '+', '=']\neval: {every: 1, size: 4, at_start: no, correct: {reward: "
            "environment}}\ncheckpoint: {every: 1, "
            "keep_last: 9}\nrewards: [{name: environment}]\n",
            kSmallData, "environment: {name: mine}\noutput_dir: ", dir_.path("run"), "\n");
    TrainRequest request{.config = "run", .yaml = yaml, .overrides = overrides};
    if (!resume.empty()) request = {.resume = resume, .overrides = overrides};
    const Callback mine = [&](std::span<const Json> requests) {
      std::vector<Json> out;
      for (const Json& r : requests) {
        // Evaluations after step s have the step -1 - s.
        const int64_t step = -1 - r.at("step").as_int();
        if (fails_(step, r.at("index").as_int()))
          out.push_back(Json().set("error", "no answer"));
        else
          out.push_back(Json().set("done", true).set("reward", 1));
      }
      return out;
    };
    return run_training(
        request,
        {.reporter = recorder_, .stop = stop_, .callbacks = {.environments = {{"mine", mine}}}});
  }
  TrainState state() const { return load_state(find_checkpoint(dir_.path("run"))); }

  TempDir dir_;
  Recorder recorder_;
  std::atomic<bool> stop_{false};
  std::function<bool(int64_t step, int64_t index)> fails_;
};

TEST_F(RunsWithFailures, ChooseNoBestAndDoNotStopByThem) {
  const ExpectLog warning(
      "evaluation: 1 of 4 completions could not be judged, and count in no "
      "score; the first: environment: it reports: 'no answer'");
  for (const char* ranks : {"ranks=1", "ranks=2"}) {
    fails_ = [](int64_t step, int64_t index) { return step != 2 && step > 0 && index == 0; };
    train({ranks});
    EXPECT_EQ(state().best_step, 2) << "the only whole one";
    EXPECT_EQ(state().best, 1);
    const std::string run = dir_.path("run");
    EXPECT_EQ(std::filesystem::read_symlink(run + "/checkpoints/best"), "step-00000002");
    EXPECT_TRUE(std::ranges::any_of(recorder_.messages, [](const std::string& text) {
      return text.find("after GRPO (held-out pass@1 (environment) 1.000, completions failed):") !=
             text.npos;
    }));
    const Json last = json_lines(run + "/metrics.jsonl").back();
    EXPECT_EQ(last.at("problems").dump() + last.at("eval/failed").dump(), "31");
    // A finished stage whose last score had failures has not reached stop_at.
    train({"steps=5", "eval.stop_at=0.5"}, run);
    EXPECT_EQ(state().step, 5);
    std::filesystem::remove_all(run);
    fails_ = [](int64_t step, int64_t index) { return step > 0 && step < 3 && index == 0; };
    train({"eval.stop_at=0.5", ranks});
    EXPECT_EQ(state().step, 3) << "the first whole evaluation";
    EXPECT_TRUE(state().finished);
    std::filesystem::remove_all(run);
  }
}

TEST_F(RunsWithFailures, CountStepsWithoutAnAnswerAcrossAResume) {
  const ExpectLog failed(": the environment has failed 4 of 4 dialogues"),
      none("rewards: none applies to any of the 4 completions of step ");
  fails_ = [](int64_t step, int64_t) { return step < -1; };  // training, but for its first step
  recorder_.on_step = [&](int64_t step) { stop_ = step == 6; };
  train({"steps=30", "eval.every=0"});
  EXPECT_EQ(state().step, 6);
  EXPECT_EQ(state().unanswered_steps, 5);
  stop_ = false;
  EXPECT_THROW_WITH(train({}, dir_.path("run")), InputError,
                    "step 11: the environment has failed 4 of 4 dialogues, which take no part in "
                    "the update; the first: it reports: 'no answer'; it has answered no turn; so "
                    "it was in 10 steps in a row; hint: ");
  fails_ = [](int64_t step, int64_t) { return step <= -12; };
  recorder_.on_step = [&](int64_t step) { stop_ = step == 11; };
  train({}, dir_.path("run"));
  EXPECT_EQ(state().unanswered_steps, 0);
}

}  // namespace
}  // namespace cohort::test
