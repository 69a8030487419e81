// Runs whose requests for memory fail: they continue with smaller micro batches, or end with a
// message and a checkpoint.
#include <map>

#include "core/allocator.h"
#include "job/replay.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

// Sequences of up to 10 tokens, in micro batches of several.
const std::string kModel = std::string(kSmallModel) + kSmallData + "dtype: f64\n";
const std::string kSft = kModel + kSmallSft + "micro_batch_tokens: 40\n";
const std::string kGrpo = kModel + kSmallGrpo + "micro_batch_tokens: 60\nbeta: 0.1\n";

// A run, and the requests for memory after its step `after`.
struct Faulty {
  std::string dir;
  std::string error;  // empty: it has finished
  int64_t requests = 0;
};
Faulty train_with_faults(const RunPlan& plan, int64_t after, int64_t first, int64_t count) {
  Faulty out;
  const Device device = device_named(plan.stages[0].device, "device");
  std::optional<AllocationFaults> faults;
  Recorder recorder;
  recorder.on_step = [&](int64_t step) {
    if (step == after) faults.emplace(device, first, count);
  };
  const std::atomic<bool> stop{false};
  Run run = Run::create(plan);
  out.dir = run.dir();
  try {
    EXPECT_EQ(run.execute(recorder, stop).end, StageEnd::kFinished);
  } catch (const OutOfMemoryError& e) {
    out.error = e.what();
  }
  out.requests = faults ? faults->requests() : 0;
  return out;
}

// "step 4: out of memory; micro_batch_tokens: 40 -> 20" lines of log.txt: step and new number.
std::vector<std::pair<int64_t, int64_t>> shrinks(const std::string& run) {
  std::vector<std::pair<int64_t, int64_t>> out;
  std::istringstream log(read_file(run + "/log.txt"));
  for (std::string line; std::getline(log, line);) {
    const size_t at = line.find(": out of memory; micro_batch_tokens: ");
    if (at == line.npos) continue;
    const size_t step = line.rfind("step ", at), arrow = line.find(" -> ", at);
    out.emplace_back(std::atoll(line.c_str() + step + 5), std::atoll(line.c_str() + arrow + 4));
  }
  return out;
}

class OutOfMemory {
 public:
  // `tolerance`: for the weights beside those of an undisturbed run.
  OutOfMemory(std::string yaml, double tolerance) : yaml_(std::move(yaml)), tolerance_(tolerance) {
    plan_ = small_plan(dir_, "plain", yaml_);
    plain_ = train_new(plan_);
    requests_ = fault(int64_t{1} << 40, 1).requests;
  }

  // Requests for memory after the second step, evaluations and checkpoints included.
  int64_t requests() const { return requests_; }

  // Lets `count` requests fail from number `first` on and checks how the run ends.
  void check(int64_t first, int64_t count) {
    SCOPED_TRACE(str("requests ", first, " to ", first + count - 1, " of ", requests_));
    const Faulty run = fault(first, count);
    const auto changes = shrinks(run.dir);
    const int64_t recorded = load_plan(run.dir + "/config.yaml", {}).stages[0].batch.micro_batch();
    EXPECT_EQ(recorded,
              changes.empty() ? plan_.stages[0].batch.micro_batch() : changes.back().second);
    if (run.error.empty()) {
      finished_ += 1;
      shrunk_ += !changes.empty();
      EXPECT_EQ(checkpoint_bytes(run.dir), checkpoint_bytes(reference(changes)));
      if (plan_.stages[0].batch.trainer == TrainerType::kGrpo) {  // each step in its micro batches
        EXPECT_NO_THROW(replay_run({.run = run.dir, .step = 4}, [](const std::string&) {}));
      }
    } else {
      failed_ += 1;
      EXPECT_NE(run.error.find("out of memory"), run.error.npos) << run.error;
      train_rest(run.dir);
    }
    EXPECT_LT(relative_error(final_weights(run.dir), final_weights(plain_)), tolerance_);
    std::filesystem::remove_all(run.dir);
  }

  int finished() const { return finished_; }
  int shrunk() const { return shrunk_; }
  int failed() const { return failed_; }

 private:
  Faulty fault(int64_t first, int64_t count) {
    return train_with_faults(small_plan(dir_, str("fault-", ++runs_), yaml_), 2, first, count);
  }

  // The run with these numbers of tokens from these steps on.
  std::string reference(const std::vector<std::pair<int64_t, int64_t>>& changes) {
    if (changes.empty()) return plain_;
    const auto found = references_.find(changes);
    if (found != references_.end()) return found->second;
    const std::string run = train_interrupted(
        small_plan(dir_, str("reference-", references_.size()), yaml_), changes.front().first - 1);
    // Several failures of one step count with the last number.
    EXPECT_EQ(changes.front().first, changes.back().first);
    train_rest(run, {str("micro_batch_tokens=", changes.back().second)});
    return references_[changes] = run;
  }

  const TempDir dir_;
  const std::string yaml_;
  const double tolerance_;
  RunPlan plan_;
  std::string plain_;
  int64_t requests_ = 0;
  int runs_ = 0, finished_ = 0, shrunk_ = 0, failed_ = 0;
  std::map<std::vector<std::pair<int64_t, int64_t>>, std::string> references_;
};

// Spreads `count` failures over the requests of a run; every fourth lets three requests fail.
void expect_runs_survive(const std::string& yaml, int64_t count, double tolerance = 1e-12) {
  const ExpectLog warnings("out of memory");
  OutOfMemory test(yaml, tolerance);
  EXPECT_GT(test.requests(), 500);
  for (int64_t i = 0; i < count; ++i) test.check(i * test.requests() / count, i % 4 == 3 ? 3 : 1);
  EXPECT_GT(test.shrunk(), count / 4);
  EXPECT_LT(test.failed(), count / 4);
}

TEST(OutOfMemory, SftContinuesWithSmallerMicroBatches) {
  expect_runs_survive(kSft, 24);
}
TEST(OutOfMemory, GrpoContinuesWithSmallerMicroBatches) {
  expect_runs_survive(kGrpo, 24);
}
TEST(OutOfMemorySlow, RunsContinueAfterAnyFailure) {
  for (const std::string& yaml : {kSft, kGrpo}) expect_runs_survive(yaml, 100);
}

// On a GPU bf16 and f32 differ by their rounding from the undisturbed run, which has other micro
// batches, and AdamW turns a rounding of a gradient near 0 into a step.
TEST(CudaOutOfMemory, RunsContinueAfterAnyFailure) {
  COHORT_REQUIRE_GPU(device);
  const auto on_gpu = [](std::string yaml, const char* keys) {
    return yaml.erase(yaml.find("dtype: f64\n"), 11) + "device: cuda\n" + keys;
  };
  expect_runs_survive(on_gpu(kSft, "dtype: f32\n"), 24, 0.1);
  expect_runs_survive(on_gpu(kGrpo, "dtype: bf16\noptimizer: {place: host}\n"), 24, 0.3);
}

// If nothing can be had any more, the last completed step is saved, and the message says so.
TEST(OutOfMemory, ARunWithoutMemoryIsSaved) {
  const ExpectLog warnings("out of memory");
  const TempDir dir;
  for (const auto& [name, yaml] : {std::pair("sft", kSft), {"grpo", kGrpo}}) {
    SCOPED_TRACE(name);
    const std::string plain = train_new(small_plan(dir, str(name, "-plain"), yaml));
    const RunPlan plan = small_plan(dir, name, yaml, {"checkpoint.every_minutes=0"});
    const Faulty run = train_with_faults(plan, 2, 0, 2000);
    EXPECT_NE(run.error.find("out of memory"), run.error.npos) << run.error;
    EXPECT_NE(run.error.find("step 2 "), run.error.npos) << run.error;
    train_rest(run.dir, {str("micro_batch_tokens=", plan.stages[0].batch.micro_batch())});
    EXPECT_EQ(checkpoint_bytes(run.dir), checkpoint_bytes(plain));
  }
}

// The evaluation of text has the same bits after a failure, and micro batches stay as they are.
TEST(OutOfMemory, AnEvaluationStartsAgain) {
  const TempDir dir;
  const auto trained = [&](const char* name, int64_t fault) {
    const std::string yaml = std::string(kSmallModel) + kSmallPretrain + "dtype: f64\n";
    const RunPlan plan = small_plan(dir, name, yaml);
    const Faulty run = train_with_faults(plan, 6, fault, 1);  // after the last step
    EXPECT_EQ(run.error, "");
    EXPECT_TRUE(shrinks(run.dir).empty());
    return std::pair(metric(json_lines(run.dir + "/metrics.jsonl").back(), "val_loss"),
                     run.requests);
  };
  const auto [loss, requests] = trained("plain", int64_t{1} << 40);
  ASSERT_GT(requests, 10);
  // All but the last ones, of the reduction and the checkpoint.
  for (const int64_t fault : {int64_t{0}, requests / 4, requests / 2})
    EXPECT_EQ(trained(str("fault-", fault).c_str(), fault).first, loss) << fault;
}

// Ranks that are threads share the memory: whichever fails, all of them start again, or all end.
TEST(OutOfMemory, RanksContinueTogether) {
  const ExpectLog warnings("out of memory");
  const TempDir dir;
  const std::string plain = train_new(small_plan(dir, "plain", kSft, {"ranks=2"}));
  const int64_t requests =
      train_with_faults(small_plan(dir, "count", kSft, {"ranks=2"}), 2, int64_t{1} << 40, 1)
          .requests;
  int finished = 0;
  for (int64_t i = 0; i < 12; ++i) {
    SCOPED_TRACE(i);
    const RunPlan plan = small_plan(dir, str("fault-", i), kSft, {"ranks=2"});
    Faulty run;
    try {
      run = train_with_faults(plan, 2, i * requests / 12, 1);
    } catch (const Error& e) {  // the rank that failed alone has been named
      run = {.dir = dir.path(str("fault-", i)), .error = e.what()};
    }
    if (!run.error.empty()) train_rest(run.dir);
    finished += run.error.empty();
    EXPECT_LT(relative_error(final_weights(run.dir), final_weights(plain)), 1e-12);
  }
  EXPECT_GT(finished, 6);
}

}  // namespace
}  // namespace cohort::test
