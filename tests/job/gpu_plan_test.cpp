// Plans for GPUs that this machine does not have, and the estimate behind them beside measured
// peaks of bench/results/h200.md.
#include "job/memory_plan.h"

#include "kernels/head.h"
#include "tests/job/bench_shapes.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

struct Measured {
  const char* shape;
  int64_t vocab;
  std::vector<std::string> overrides;
  double gb;  // peak of live tensors, where the head held gradients of 4,096 rows of logits
};

void expect_peak(const Measured& measured, const GpuPlan& plan, double tolerance) {
  using namespace kernels;
  const int64_t chunk = head_chunk_tokens(measured.vocab, 0, Device::cuda()),
                fewer_rows = 4096 - head_gradient_tokens(4096, measured.vocab, chunk);
  const double gb = measured.gb - static_cast<double>(2 * measured.vocab * fewer_rows) / 1e9;
  EXPECT_NEAR(static_cast<double>(plan.memory.peak()) / 1e9 / gb, 1, tolerance)
      << measured.shape << " " << join(measured.overrides, " ") << ": " << mib(plan.memory.peak());
  EXPECT_TRUE(plan.runs);
}

// Training steps on an H200, of commits since ce0ac02, where the head's weight gradient became
// part of the others. Workspaces of cuBLASLt are not in the estimate.
TEST(GpuPlans, PeaksOfTrainingStepsAreTheMeasuredOnes) {
  const Measured measured[] = {
      {"gpt2_124m", 50304, {}, 12.72},
      {"gpt2_124m", 50304, {"model.recompute=cheap"}, 9.10},
      {"gpt2_124m", 50304, {"model.recompute=cheap", "micro_batch_tokens=16384"}, 5.99},
      {"qwen2_0_5b", 151936, {}, 25.52},
      {"qwen2_0_5b", 151936, {"model.recompute=cheap"}, 20.29},
      {"qwen2_0_5b", 151936, {"model.recompute=cheap", "micro_batch_tokens=8192"}, 14.90},
      {"qwen2_0_5b", 151936, {"model.recompute=cheap", "micro_batch_tokens=4096"}, 12.20},
      {"qwen2_1_5b", 151936, {"model.recompute=cheap", "micro_batch_tokens=8192"}, 37.80},
      {"qwen2_1_5b", 151936, {"model.recompute=cheap", "micro_batch_tokens=4096"}, 32.12},
      {"llama_8b", 128256, {"model.recompute=cheap"}, 110.61},
  };
  for (const Measured& m : measured) {
    const TrainConfig config = bench_config(m.shape, m.overrides);
    const StagePreview stage = described(config, m.vocab, 1, config.model.context);
    expect_peak(m, plan_for_gpu(config, stage, 1, gpu_named("h200")), 0.015);
  }
}

// An update computes logits for completions only, where the estimate has them for all tokens.
TEST(GpuPlans, PeaksOfGrpoStepsAreTheMeasuredOnes) {
  const Measured measured[] = {
      {"qwen2_0_5b", 151936, {}, 24.77},
      {"qwen2_0_5b", 151936, {"model.recompute=cheap", "micro_batch_tokens=15700"}, 19.78},
      {"qwen2_0_5b", 151936, {"model.recompute=cheap", "micro_batch_tokens=8800"}, 15.24},
      {"qwen2_0_5b", 151936, {"model.recompute=cheap", "micro_batch_tokens=5000"}, 12.79},
  };
  for (const Measured& m : measured) {
    const TrainConfig config = bench_grpo(m.shape, m.overrides);
    const StagePreview stage = described(config, m.vocab, 128, 256);
    expect_peak(m, plan_for_gpu(config, stage, 1, gpu_named("h200")), 0.05);
  }
}

// The parts of a plan say the same.
void expect_consistent(const GpuPlan& plan, const GpuProperties& gpu) {
  const bool fits = plan.memory.peak() <= plan.usable;
  EXPECT_LT(plan.usable, gpu.memory);
  EXPECT_EQ(fits, plan.shortage.empty()) << plan.shortage;
  EXPECT_EQ(plan.runs, fits && plan.changes.empty()) << plan.changes;
  EXPECT_EQ(plan.shortage.find("; hint: ") == std::string::npos, fits) << plan.shortage;
}

TEST(GpuPlansSlow, WhatRunsOnAGpuRunsOnOneWithMoreMemory) {
  for (const bool grpo : {false, true})
    for (const char* micro : {"micro_batch_tokens=auto", "micro_batch_tokens=8192"})
      for (const auto& [shape, vocab] : {std::pair{"gpt2_124m", 50257}, {"qwen2_1_5b", 151936}}) {
        TrainConfig config = bench_config(shape, {micro});
        if (grpo) config.batch.trainer = TrainerType::kGrpo;
        config.sampling.max_completion_length = 768;
        const StagePreview stage = described(config, vocab, 256, 768);
        int rank = 0;  // 0: does not run, 1: with changes, 2: as configured
        int64_t tokens = 0;
        for (const int gib : {2, 6, 8, 12, 16, 24, 32, 48, 80, 141}) {
          const GpuProperties gpu = gpu_named(str("GiB=", gib, ",sm=89"));
          const GpuPlan plan = plan_for_gpu(config, stage, 1, gpu);
          SCOPED_TRACE(str(shape, " ", micro, " ", gib));
          expect_consistent(plan, gpu);
          const int now = plan.runs ? 2 : plan.changes.empty() ? 0 : 1;
          EXPECT_GE(now, rank);
          rank = now;
          const InferencePlan inference = plan_inference(stage.model, 1024, gpu);
          EXPECT_GE(inference.cache_tokens, tokens);
          tokens = inference.cache_tokens;
        }
        EXPECT_EQ(rank, 2);
        EXPECT_GT(tokens, 1024 * 100);
      }
}

// They have no base in fewer bits, so that none is suggested; an inference with delta layers alone
// is bounded by its states.
TEST(GpuPlans, LargeModelsWithDeltaLayersAreSaidNotToFit) {
  TrainConfig config = bench_config("qwen3_5_0_8b", {"model.num_layers=500"});
  config.batch.trainer = TrainerType::kGrpo;
  StagePreview stage = described(config, 248320, 256, 768);
  const GpuProperties gpu = gpu_named("rtx4090");
  const GpuPlan plan = plan_for_gpu(config, stage, 1, gpu);
  expect_consistent(plan, gpu);
  EXPECT_FALSE(plan.shortage.empty());
  stage.model.num_layers = 24;
  stage.model.delta.full_every = 100;
  const InferencePlan inference = plan_inference(stage.model, 1024, gpu);
  EXPECT_GT(inference.sequences, 10);
  EXPECT_EQ(inference.cache_tokens, 1024 * inference.sequences);
}

TEST(GpuPlans, ChangesMakeTheStageFit) {
  const GpuProperties gpu = gpu_named("rtx4090");
  const TrainConfig config =
      bench_config("qwen2_1_5b", {"micro_batch_tokens=16384", "optimizer.place=device"});
  const StagePreview stage = described(config, 151936, 1, 2048);
  const GpuPlan plan = plan_for_gpu(config, stage, 1, gpu);
  EXPECT_FALSE(plan.runs);
  ASSERT_NE(plan.changes.find(" optimizer.moments=bf16"), std::string::npos) << plan.changes;
  std::vector<std::string> overrides{"optimizer.place=device"};
  std::istringstream words(plan.changes);
  for (std::string word; words >> word;) overrides.push_back(word);
  const TrainConfig changed = bench_config("qwen2_1_5b", overrides);
  const GpuPlan again = plan_for_gpu(changed, described(changed, 151936, 1, 2048), 1, gpu);
  EXPECT_TRUE(again.runs);
  EXPECT_EQ(again.memory.peak(), plan.memory.peak());
}

TEST(GpuPlans, SeveralGpusShareTheBatchAndThreadsShareAGpu) {
  TrainConfig config = bench_config("qwen2_0_5b", {"micro_batch_tokens=auto"});
  const StagePreview stage = described(config, 151936, 1, 2048);
  const GpuProperties gpu = gpu_named("h100");
  const GpuPlan one = plan_for_gpu(config, stage, 1, gpu),
                two = plan_for_gpu(config, stage, 2, gpu);
  EXPECT_NEAR(static_cast<double>(one.usable - two.usable),
              0.95 * static_cast<double>(nccl_bytes(2)), 1);
  EXPECT_EQ(two.config.batch.micro_batch(), one.config.batch.micro_batch() / 2);
  config.ranks = 2;
  EXPECT_EQ(plan_for_gpu(config, stage, 2, gpu).usable, two.usable / 2);
}

// On eight H100 an all_to_all took 3.28 GB (NVIDIA/nccl#1685), and peers on other hosts add none.
TEST(GpuPlans, NcclTakesMemoryForEachGpuOfAHost) {
  EXPECT_EQ(nccl_bytes(1), 0);
  EXPECT_LT(nccl_bytes(2), nccl_bytes(4));
  EXPECT_NEAR(static_cast<double>(nccl_bytes(8)) / 3.28e9, 1, 0.05);
  EXPECT_EQ(nccl_bytes(64), nccl_bytes(8));
}

// The 8B shape on GPUs of 80 GB: with two, only sums of gradients in slices leave room for a micro
// batch (72.3 GB of weights, gradients and state otherwise).
TEST(GpuPlans, ShardingIsTheFirstKindThatFits) {
  const TrainConfig config = bench_config("llama_8b", {"model.recompute=cheap"});
  const StagePreview stage = described(config, 128256, 1, config.model.context);
  for (const auto& [ranks, sharding] :
       {std::pair(1, Sharding::kNone), {2, Sharding::kGradients}, {8, Sharding::kOptimizer}})
    EXPECT_EQ(plan_for_gpu(config, stage, ranks, gpu_named("h100")).config.optimizer.sharding,
              sharding)
        << ranks;
  // With 40 more blocks only slices of weights fit on four; lanes exclude them.
  const TrainConfig deep =
      bench_config("llama_8b", {"model.recompute=cheap", "model.num_layers=72"});
  const StagePreview deeper = described(deep, 128256, 1, deep.model.context);
  const GpuPlan plan = plan_for_gpu(deep, deeper, 4, gpu_named("h100"));
  EXPECT_EQ(plan.config.optimizer.sharding, Sharding::kFull);
  EXPECT_TRUE(plan.runs);
  TrainConfig lanes = deep;
  lanes.optimizer.reduction_lanes = 4;
  EXPECT_EQ(plan_for_gpu(lanes, deeper, 4, gpu_named("h100")).config.optimizer.sharding,
            Sharding::kOptimizer);
}

TEST(GpuPlans, SizesThatAreNoMultiplesOfEightAreNamed) {
  TrainConfig config = bench_config("gpt2_124m", {});
  EXPECT_TRUE(slow_sizes(config.model).empty());
  config.model.d_ff = 2730;
  config.model.num_kv_heads = 1;
  config.model.head_dim = 62;
  const std::vector<std::string> warnings = slow_sizes(config.model);
  EXPECT_EQ(warnings.size(), 2u);  // 12 heads of 62 are 744 wide
  EXPECT_TRUE(warnings[0].starts_with("model.d_ff: 2730 is no multiple of 8"));
  EXPECT_TRUE(warnings[0].ends_with("hint: 2736"));
  EXPECT_TRUE(warnings[1].starts_with("model.num_kv_heads * head_dim: 62 is no multiple of 8"));
}

}  // namespace
}  // namespace cohort::test
