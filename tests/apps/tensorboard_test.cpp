// Event files of runs that are killed or cannot write them, also read by TensorBoard's own reader.
// COHORT_TEST_PYTHON names a Python that has the package `tensorboard`.
#include <cerrno>
#include <cstdlib>

#include "tests/apps/process.h"
#include "tests/job/event_reader.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

constexpr const char* kCompare = R"(
import json, struct, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
reader = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
reader.Reload()
seen = {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
logged = {}
for line in map(json.loads, open(sys.argv[1] + "/metrics.jsonl")):
    for name, value in line.items():
        if name != "step" and type(value) in (int, float):
            single = struct.unpack("f", struct.pack("f", value))[0]
            logged.setdefault(name, []).append((line["step"], single))
for tag in sorted(set(seen) | set(logged)):
    if seen.get(tag) != logged.get(tag):
        sys.exit(f"{tag}: TensorBoard has {seen.get(tag)}, metrics.jsonl has {logged.get(tag)}")
print(len(seen))
)";

class TensorBoard : public testing::Test {
 protected:
  TensorBoard() {
    write_file(dir_.path("run.yaml"),
               std::string(kSmallModel) + kSmallData + kSmallGrpo +
                   "output_dir: run\ncheckpoint: {every: 2, keep_last: 9}\n");
  }
  Output train(const Fault& fault) const {
    return run_cohort_with(fault, {"train", dir_.path("run.yaml"), "steps=8", "eval.every=3"});
  }
  // Trains until the process is killed, after step 5 and the checkpoint of step 4, then to the end.
  void train_killed_and_resumed() const {
    ASSERT_EQ(train({.call = "write", .path = "/metrics.jsonl", .error = -1, .pass = 7}).code, 137);
    const Output rest = run_cohort({"train", "--resume", run_});
    ASSERT_EQ(rest.code, 0) << rest.err;
    ASSERT_EQ(event_files(run_).size(), 2u);
    EXPECT_EQ(read_events(event_files(run_)[0]).back().step, 5);
  }
  // The number of metric values in metrics.jsonl.
  size_t num_logged() const {
    size_t count = 0;
    for (const Json& line : json_lines(run_ + "/metrics.jsonl"))
      for (const auto& [name, value] : line.as_object())
        count += value.is_number() && name != "step";
    return count;
  }

  TempDir dir_;
  const std::string run_ = dir_.path("run");
};

TEST_F(TensorBoard, ItsReaderSeesWhatMetricsJsonlHas) {
  const char* named = std::getenv("COHORT_TEST_PYTHON");
  const std::string python = named != nullptr ? named : "python3";
  if (!have_tool("tensorboard", python + " -c 'import tensorboard'"))
    GTEST_SKIP() << python << " has no tensorboard: set COHORT_TEST_PYTHON to run this test";
  train_killed_and_resumed();
  write_file(dir_.path("compare.py"), kCompare);
  const std::string output = dir_.path("output");
  EXPECT_EQ(
      std::system(
          str(python, " ", dir_.path("compare.py"), " ", run_, " > ", output, " 2>&1").c_str()),
      0)
      << read_file(output);
}

TEST_F(TensorBoard, ARunThatIsKilledHasEachNumberOnce) {
  train_killed_and_resumed();
  EXPECT_EQ(read_scalars(run_).size(), num_logged());
}

// A record is written partially, or the disk is full: every record is complete or absent.
TEST_F(TensorBoard, RecordsAreWholeWhenTheDiskIsNot) {
  for (const int error : {0, ENOSPC}) {
    const Output output =
        train({.call = "write", .path = "tfevents", .error = error, .pass = 3, .fail = 2});
    EXPECT_EQ(output.code, 0) << output.err;
    const size_t first = output.err.find("TensorBoard lacks the skipped records");
    EXPECT_NE(first, std::string::npos) << output.err;
    EXPECT_EQ(output.err.find("TensorBoard lacks", first + 1), std::string::npos) << output.err;
    EXPECT_EQ(read_events(event_files(run_).at(0)).size(),
              2 + json_lines(run_ + "/metrics.jsonl").size() - 2);
    std::filesystem::remove_all(run_);
  }
}

TEST_F(TensorBoard, ARunTrainsToItsEndWithoutAnyEventFile) {
  const Output output = train({.call = "open", .path = "tfevents", .error = EACCES});
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_TRUE(event_files(run_).empty());
  EXPECT_EQ(json_lines(run_ + "/metrics.jsonl").back().at("step").as_int(), 8);
}

}  // namespace
}  // namespace cohort::test
