// micro_batch_tokens: auto.
#include <filesystem>

#include "job/memory_plan.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

int64_t peak_of(const TrainConfig& config, const StagePreview& stage, int64_t ranks) {
  return memory_of(config, stage, ranks).peak();
}

TEST(MicroBatches, AreAsLargeAsTheMemoryAllows) {
  const TempDir dir;
  const RunPlan plan = small_plan(dir, "run", kSmallCommon + kSmallSft,
                                  {"micro_batch_tokens=auto", "batch_size=100000"});
  const TrainConfig& asked = plan.stages[0];
  ASSERT_FALSE(asked.batch.micro_batch_tokens.has_value());
  const StagePreview stage = preview_plan(plan)[0];
  constexpr int64_t kRanks = 2;
  int64_t tokens = 0;
  Recompute recompute = Recompute::kNone;
  int sizes = 0, policies = 1;
  const int64_t longest = stage.lengths.longest_sequence - 1;
  for (double available = 1e9; available > 1e3; available /= 1.03) {
    TrainConfig config = asked;
    const auto bytes = static_cast<int64_t>(available);
    const std::string chosen =
        choose_by_memory(config, stage, kRanks, {.device = bytes}).micro_batch;
    const int64_t now = *config.batch.micro_batch_tokens;
    SCOPED_TRACE(chosen);
    EXPECT_TRUE(chosen.starts_with(str(now, " tokens, model.recompute: ")));
    const bool fits = peak_of(config, stage, kRanks) <= static_cast<int64_t>(0.9 * available);
    EXPECT_EQ(chosen.ends_with("too little"), !fits);
    if (tokens == 0) {
      EXPECT_EQ(now, 32768);
      EXPECT_EQ(config.model.recompute, Recompute::kNone);
    } else if (config.model.recompute == recompute) {
      EXPECT_LE(now, tokens);
      sizes += now < tokens;
    } else {
      EXPECT_GT(config.model.recompute, recompute);
      ++policies;
    }
    // More does not fit.
    TrainConfig more = config;
    more.batch.micro_batch_tokens = now + 1024;
    if (now < 32768) {
      EXPECT_GT(peak_of(more, stage, kRanks), static_cast<int64_t>(0.9 * available));
    }
    if (!fits) {
      EXPECT_EQ(now, longest);
    }
    tokens = now;
    recompute = config.model.recompute;
  }
  EXPECT_EQ(recompute, Recompute::kBlock);
  EXPECT_EQ(tokens, longest);
  EXPECT_EQ(policies, 3);
  EXPECT_GT(sizes, 5);
}

TEST(MicroBatches, NeverHaveMoreThanARanksTokens) {
  const TempDir dir;
  const RunPlan plan =
      small_plan(dir, "run", kSmallCommon + kSmallGrpo + "micro_batch_tokens: auto\n");
  const StagePreview stage = preview_plan(plan)[0];
  for (const int64_t ranks : {1, 2, 4}) {
    TrainConfig config = plan.stages[0];
    choose_by_memory(config, stage, ranks, {.device = int64_t{1} << 40});
    const int64_t all = step_size(config, stage, ranks).tokens;
    EXPECT_EQ(*config.batch.micro_batch_tokens, (all + ranks - 1) / ranks);
  }
}

// On CUDA an update uses the memory of the cache, whose size follows what is free: many sequences
// are no reason for smaller micro batches.
TEST(MicroBatches, DoNotDependOnTheSequencesOfARolloutOnCuda) {
  const TempDir dir;
  const auto chosen = [&](const char* name, const char* concurrent) {
    const RunPlan plan = small_plan(dir, name, kSmallCommon + kSmallGrpo,
                                    {"micro_batch_tokens=auto", "device=cuda", "dtype=bf16",
                                     "num_generations=4096", concurrent});
    TrainConfig config = plan.stages[0];
    choose_by_memory(config, preview_plan(plan)[0], 1, {.device = 12'000'000});
    return std::pair{*config.batch.micro_batch_tokens, config.model.recompute};
  };
  const auto few = chosen("few", "max_concurrent=1");
  EXPECT_GT(few.first, 8192);
  EXPECT_EQ(few, chosen("many", "max_concurrent=65536"));
}

TEST(MicroBatches, GivenAsNumbersAreUnchanged) {
  const TempDir dir;
  const RunPlan plan =
      small_plan(dir, "run", kSmallCommon + kSmallSft + "micro_batch_tokens: 40\n");
  TrainConfig config = plan.stages[0];
  EXPECT_EQ(choose_by_memory(config, preview_plan(plan)[0], 1, {.device = 1}).micro_batch, "");
  EXPECT_EQ(config.batch.micro_batch_tokens, 40);
  EXPECT_EQ(config.model.recompute, Recompute::kNone);
}

// The choice at the start is stored in the run's configuration and used by a resumed run.
TEST(MicroBatches, AreChosenOnce) {
  const TempDir dir;
  const std::string yaml = kSmallCommon + kSmallSft;
  const std::string run =
      train_interrupted(small_plan(dir, "auto", yaml, {"micro_batch_tokens=auto", "ranks=2"}), 3);
  const RunPlan recorded = load_plan(run + "/config.yaml", {});
  ASSERT_TRUE(recorded.stages[0].batch.micro_batch_tokens.has_value());
  const int64_t tokens = *recorded.stages[0].batch.micro_batch_tokens;
  EXPECT_NE(read_file(run + "/log.txt")
                .find(str("sft: micro_batch_tokens: auto: ", tokens, " tokens, model.recompute: ")),
            std::string::npos);
  train_rest(run);
  EXPECT_NE(read_file(run + "/log.txt").find("memory of cpu: at most "), std::string::npos);
  const std::string same =
      train_new(small_plan(dir, "number", yaml, {str("micro_batch_tokens=", tokens), "ranks=2"}));
  EXPECT_TRUE(checkpoint_bytes(run) == checkpoint_bytes(same));
  // Another start may ask for another choice.
  train_rest(run, {"steps=8", "micro_batch_tokens=auto"});
  EXPECT_TRUE(load_plan(run + "/config.yaml", {}).stages[0].batch.micro_batch_tokens.has_value());
}

}  // namespace
}  // namespace cohort::test
