// A text larger than the memory limit of a run.
#include <sys/resource.h>

#include <fstream>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

TEST(LargeTextSlow, StaysOnDisk) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer's own memory is counted";
#endif
  const TempDir dir;
  const std::string text = small_text();
  std::ofstream file(dir.path("text.txt"), std::ios::binary);
  constexpr int64_t kBytes = 500'000'000, kMostResident = 300'000'000;
  for (int64_t written = 0; written < kBytes; written += static_cast<int64_t>(text.size()))
    file << text;
  file.close();
  write_file(dir.path("run.yaml"), std::string(kSmallModel) + kSmallPretrain);
  const auto train = [&](const std::string& name) {
    return run_cohort({"train", dir.path("run.yaml"), "output_dir=" + dir.path(name),
                       "data.tokenizer=byte", "data.cache_dir=" + dir.path("cache"),
                       "eval.tokens=1000"});
  };
  for (const char* name : {"cold", "cached"}) {
    const Output output = train(name);
    ASSERT_EQ(output.code, 0) << output.err;
  }
  EXPECT_EQ(json_lines(dir.path("cold/metrics.jsonl")).back().at("val_loss").as_double(),
            json_lines(dir.path("cached/metrics.jsonl")).back().at("val_loss").as_double());
  rusage usage{};
  getrusage(RUSAGE_CHILDREN, &usage);
  EXPECT_LT(usage.ru_maxrss * 1024, kMostResident);
}

}  // namespace
}  // namespace cohort::test
