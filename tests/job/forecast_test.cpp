// The bytes that ranks send in an update.
#include "job/forecast.h"

#include "tests/job/bench_shapes.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

StagePreview stage_of(const TrainConfig& config, int64_t vocab, int64_t prompt,
                      int64_t completion) {
  StagePreview stage = described(config, vocab, prompt, completion);
  stage.model.recompute = config.model.recompute;
  stage.model.lora = config.model.lora;
  return stage;
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
  }
}

}  // namespace
}  // namespace cohort::test
