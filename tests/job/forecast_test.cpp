// Forecasts of steps beside those that were measured.
#include "job/forecast.h"

#include "tests/job/bench_shapes.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

// The error that a forecast may have where the step was measured.
constexpr double kPromised = 0.15;

StagePreview stage_of(const TrainConfig& config, int64_t vocab, int64_t prompt,
                      int64_t completion) {
  StagePreview stage = described(config, vocab, prompt, completion);
  stage.model.recompute = config.model.recompute;
  stage.model.lora = config.model.lora;
  return stage;
}

StepForecast forecast_of(const TrainConfig& config, const StagePreview& stage, const char* gpu,
                         int64_t ranks = 1, int64_t hosts = 1) {
  return forecast_step(config, stage, memory_of(config, stage, ranks),
                       {.gpu = gpu_named(gpu), .ranks = ranks, .hosts = hosts})
      .value();
}

// Tokens per second of steps on whole windows of text (bench/results/h200.md, and for 8B with
// 16,384 tokens and for two GPUs the runs of the same bench that it does not list yet).
TEST(Forecasts, OfTrainingStepsAreTheMeasuredOnes) {
  const struct {
    const char* shape;
    int64_t vocab;
    std::vector<std::string> overrides;
    const char* gpu;
    int64_t ranks;
    double tokens;
  } measured[] = {
      {"qwen2_0_5b", 151936, {}, "h200", 1, 149900},
      {"qwen2_0_5b", 151936, {"batch_size=16"}, "h200", 2, 284251},
      {"qwen2_0_5b", 151936, {"model.recompute=cheap"}, "h200", 1, 146167},
      {"qwen2_0_5b",
       151936,
       {"model.recompute=cheap", "micro_batch_tokens=4096"},
       "h200",
       1,
       135071},
      {"gpt2_124m", 50304, {}, "h200", 1, 556031},
      {"qwen2_1_5b",
       151936,
       {"model.recompute=cheap", "micro_batch_tokens=8192"},
       "h200",
       1,
       51720},
      {"llama_8b", 128256, {"model.recompute=cheap", "batch_size=4"}, "h200", 1, 11881},
      {"llama_8b", 128256, {"model.recompute=cheap"}, "h200", 1, 10442},
      {"llama_8b", 128256, {"model.recompute=block"}, "h200", 1, 7849},
      {"llama_8b",
       128256,
       {"model.recompute=cheap", "batch_size=16", "optimizer.place=host"},
       "h100",
       1,
       10155},
  };
  for (const auto& m : measured) {
    const TrainConfig config = bench_config(m.shape, m.overrides);
    const StagePreview stage = stage_of(config, m.vocab, 1, config.model.context);
    const StepForecast f = forecast_of(config, stage, m.gpu, m.ranks);
    EXPECT_NEAR(f.tokens / m.tokens, 1, kPromised)
        << m.shape << " " << join(m.overrides, " ") << " on " << m.ranks << ": " << f.tokens;
  }
}

TEST(Forecasts, OfGrpoStepsAreTheMeasuredOnes) {
  const struct {
    const char* shape;
    int64_t vocab;
    std::vector<std::string> overrides;
    const char* gpu;
    double rollout, update;  // seconds
  } measured[] = {
      {"llama_8b", 128256, {"model.recompute=cheap"}, "h200", 5.24, 10.86},
      {"llama_8b", 128256, {"model.recompute=cheap", "optimizer.place=host"}, "h100", 5.40, 12.09},
      {"qwen2_0_5b", 151936, {}, "h200", 0.570, 0.872},
  };
  for (const auto& m : measured) {
    const TrainConfig config = bench_grpo(m.shape, m.overrides);
    const StagePreview stage = stage_of(config, m.vocab, 128, 256);
    const StepForecast f = forecast_of(config, stage, m.gpu);
    SCOPED_TRACE(str(m.shape, " ", join(m.overrides, " ")));
    EXPECT_NEAR(f.rollout / m.rollout, 1, kPromised) << f.rollout;
    EXPECT_NEAR((f.update + f.optimizer) / m.update, 1, kPromised) << f.update;
    EXPECT_NEAR(f.step() / (m.rollout + m.update), 1, kPromised);
  }
}

StagePreview llama(TrainConfig& config, Sharding sharding, std::vector<std::string> overrides) {
  overrides.insert(overrides.end(), {"model.recompute=cheap", "optimizer.place=device"});
  config = bench_config("llama_8b", overrides);
  config.optimizer.sharding = sharding;
  return stage_of(config, 128256, 1, config.model.context);
}

// The shape has 8,030,261,248 parameters: f32 gradients, bf16 weights.
TEST(Forecasts, CountTheBytesThatRanksSend) {
  constexpr double kParameters = 8.03e9, kOthers = 7.0 / 8;
  for (const Sharding sharding : {Sharding::kNone, Sharding::kOptimizer, Sharding::kGradients}) {
    SCOPED_TRACE(entry_of(kShardingNames, sharding).name);
    TrainConfig config;  // two micro batches of a rank
    const StagePreview stage = llama(config, sharding, {"batch_size=16"});
    const UpdateTraffic traffic = update_traffic(config, stage, 8);
    const double gradients = kOthers * 4 * kParameters,
                 weights = sharding == Sharding::kNone ? 0 : kOthers * 2 * kParameters;
    const auto sent = static_cast<double>(traffic.gradients);
    EXPECT_NEAR(sent, (sharding == Sharding::kOptimizer ? 1 : 2) * gradients, 0.001 * sent);
    EXPECT_NEAR(static_cast<double>(traffic.weights), weights, 0.001 * weights);
    EXPECT_EQ(traffic.far, 0);
  }
}

// 32 blocks of 218,112,000 parameters: the first micro batch gathers 32 forward and 30 backward,
// for which it still holds two, and the second one 30 and 30. In the end all are gathered.
TEST(Forecasts, CountTheGathersOfBlocks) {
  TrainConfig config;
  const StagePreview stage = llama(config, Sharding::kFull, {"batch_size=16"});
  const UpdateTraffic traffic = update_traffic(config, stage, 8);
  const double block = 7.0 / 8 * 2 * 218112000, all = 7.0 / 8 * 2 * 8.03e9,
               weights = all + (62 + 60) * block, blocks = 2 * 60 * block;
  EXPECT_NEAR(static_cast<double>(traffic.weights), weights, 0.001 * weights);
  EXPECT_NEAR(static_cast<double>(traffic.blocks), blocks, 0.001 * blocks);
  EXPECT_NEAR(static_cast<double>(traffic.gradients), 2 * 2 * all, 0.002 * all);
}

// A rank sends its share of the host's sums to the same place of each other host, and if hosts have
// three GPUs, its own gradients to the three ranks of the other.
TEST(Forecasts, OtherHostsReceiveSums) {
  TrainConfig config;
  const StagePreview stage = llama(config, Sharding::kOptimizer, {"batch_size=16"});
  const auto far = [&](int64_t ranks, int64_t hosts) {
    const UpdateTraffic traffic = update_traffic(config, stage, ranks, hosts);
    return static_cast<double>(traffic.gradients) * traffic.far / (4 * 8.03e9);
  };
  EXPECT_NEAR(far(8, 2), 1.0 / 8, 0.001);
  EXPECT_NEAR(far(16, 4), 3.0 / 16, 0.001);
  EXPECT_NEAR(far(6, 2), 3.0 / 6, 0.001);
}

// 8 H100 of two hosts, each sending 28.1 GB of gradients and 14.1 GB of weights: a seventh of the
// former and a quarter of the latter pass a network card of 50 GB/s, of which 73 % count.
// The sums of the tables, 6.5 %, and the gathers are not hidden; seconds.
TEST(Forecasts, HostsAreJoinedByTheirNetwork) {
  TrainConfig config;
  const StagePreview stage =
      llama(config, Sharding::kOptimizer, {"batch_size=64", "micro_batch_tokens=32768"});
  const double one = 0.0654 * 28.1 / 328.5 + 14.05 / 328.5,
               two = 0.0654 * 28.1 / 7 / 36.5 + 14.05 / 4 / 36.5, exchanges = 0.001;
  EXPECT_NEAR(forecast_of(config, stage, "h100", 8).communication, one, exchanges);
  EXPECT_NEAR(forecast_of(config, stage, "h100", 8, 2).communication, two, exchanges);
}

TEST(Forecasts, SeveralGpusAreFasterThanOneAndSlowerThanTheirNumber) {
  for (const Sharding sharding :
       {Sharding::kNone, Sharding::kOptimizer, Sharding::kGradients, Sharding::kFull})
    for (const char* gpu : {"a100-80", "h100", "h200", "b200"}) {
      TrainConfig config;
      const StagePreview stage = llama(config, sharding, {"batch_size=64"});
      double before = 1e9;
      for (const int64_t ranks : {1, 2, 4, 8}) {
        SCOPED_TRACE(str(entry_of(kShardingNames, sharding).name, ", ", ranks, " x ", gpu));
        const StepForecast f = forecast_of(config, stage, gpu, ranks);
        EXPECT_LT(f.step(), before);
        EXPECT_LE(f.scaling, 1.02 * static_cast<double>(ranks));  // a slice of AdamW
        EXPECT_EQ(f.communication == 0, ranks == 1);
        if (ranks > 1) {  // a slower way takes longer
          EXPECT_GT(forecast_of(config, stage, gpu, ranks, ranks).step(), f.step());
        }
        before = f.step();
      }
    }
}

TEST(Forecasts, ARankWithMorePromptsThanOthersIsWaitedFor) {
  TrainConfig config = bench_grpo("qwen2_0_5b", {});
  config.batch.prompts_per_step = 10;  // 2 prompts for two ranks, 1 for six
  const StagePreview stage = stage_of(config, 151936, 128, 256);
  EXPECT_DOUBLE_EQ(forecast_of(config, stage, "h100", 8).balance, 1.6);
  config.batch.prompts_per_step = 16;
  EXPECT_DOUBLE_EQ(forecast_of(config, stage, "h100", 8).balance, 1);
}

TEST(Forecasts, AreOfGpusOfKnownSpeedInBf16) {
  TrainConfig config = bench_config("qwen2_0_5b", {});
  const StagePreview stage = stage_of(config, 151936, 1, 2048);
  const auto forecast = [&](const char* gpu) {
    return forecast_step(config, stage, memory_of(config, stage, 1), {.gpu = gpu_named(gpu)});
  };
  EXPECT_TRUE(forecast("h100"));
  for (const char* gpu : {"rtx4090", "GiB=80,sm=90"}) EXPECT_FALSE(forecast(gpu)) << gpu;
  config.dtype = DType::kF32;
  EXPECT_FALSE(forecast("h100"));
}

}  // namespace
}  // namespace cohort::test
