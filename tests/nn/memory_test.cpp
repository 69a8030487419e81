// The parts of the memory estimate by hand; tests/trainers/learner_test.cpp and bench_step compare
// the whole with measurements.
#include "nn/memory.h"

#include "core/allocator.h"
#include "nn/kv_cache.h"
#include "tests/nn/models.h"

namespace cohort {
namespace {

const ModelConfig kModel = test::model_config("llama");

int64_t activations(DType dtype, int64_t tokens, Device device) {
  return estimate_memory(kModel, dtype, {.micro_batch_tokens = tokens, .device = device})
      .activations;
}

TEST(MemoryEstimate, Bf16KeepsStatisticsInF32) {
  const int64_t tokens = 512;  // no tensor needs rounding
  const Device gpu = Device::cuda();
  // Two norms and the attention per block, the last norm, and the weights of the loss. The head's
  // weight gradient is added to its leaf immediately.
  const int64_t statistics = tokens * (kModel.num_layers * (2 + kModel.num_heads) + 1 + 1);
  constexpr int64_t kLoss = 512;  // one element, rounded up
  EXPECT_EQ(2 * activations(DType::kBF16, tokens, gpu) - activations(DType::kF32, tokens, gpu),
            4 * statistics + kLoss);
}

// With sharded weights each block ends with a node, behind which a norm is kept, not recomputed.
TEST(MemoryEstimate, NormsAtTheEndOfShardedBlocksAreKept) {
  constexpr int64_t kTokens = 512;
  for (const NormPlace place : {NormPlace::kBefore, NormPlace::kAfter}) {
    ModelConfig config = kModel;
    config.norm_place = place;
    config.recompute = Recompute::kCheap;
    const auto kept = [&](int64_t weights) {
      return estimate_memory(config, DType::kF32,
                             {.micro_batch_tokens = kTokens, .weights = weights})
          .activations;
    };
    const int64_t norms = place == NormPlace::kAfter ? config.num_layers - 1 : 0;
    EXPECT_EQ(kept(1) - kept(0), norms * kTokens * config.d_model * 4);
  }
}

// On CUDA the head's matrix and its gradient are padded to 64 rows, which no count shows.
TEST(MemoryEstimate, CountsThePaddingOfTheHead) {
  ModelConfig config = kModel, padded = kModel;
  config.vocab_size = 961;
  padded.vocab_size = 1024;
  const auto bytes = [](const ModelConfig& c, Device device) {
    const MemoryEstimate memory = estimate_memory(c, DType::kF32, {.device = device});
    return std::pair{memory.parameters, memory.gradients};
  };
  ASSERT_FALSE(config.tie_embeddings);  // the table of an untied model is not padded
  const int64_t table = 63 * config.d_model * 4;
  // Allocations are rounded up to 512 bytes.
  EXPECT_NEAR(bytes(padded, Device::cuda()).first - bytes(config, Device::cuda()).first, table,
              512);
  EXPECT_NEAR(bytes(padded, Device::cuda()).second - bytes(config, Device::cuda()).second, table,
              512);
  EXPECT_GT(bytes(padded, {}).second - bytes(config, {}).second, table);  // both tables
  config.tie_embeddings = padded.tie_embeddings = true;
  EXPECT_EQ(bytes(config, Device::cuda()), bytes(padded, Device::cuda()));
  EXPECT_EQ(model_size(padded).parameters - model_size(config).parameters, 63 * config.d_model);
}

TEST(MemoryEstimate, CountsConstantTablesOfPositions) {
  ModelConfig config = kModel;
  config.context = 4096;
  const auto parameters = [&](PositionType position, Device device) {
    config.position = position;
    return estimate_memory(config, DType::kF32, {.device = device}).parameters;
  };
  for (const Device device : {Device{}, Device::cuda()}) {
    const int64_t none = parameters(PositionType::kNone, device);
    EXPECT_NEAR(parameters(PositionType::kSinusoidal, device) - none, 4096 * config.d_model * 4,
                512);
    EXPECT_NEAR(parameters(PositionType::kExposb, device) - none, 4096 * 2 * config.head_dim * 4,
                512);
  }
}

// A head on a tenth of the positions keeps a tenth of the rows, of which its input is the largest.
TEST(MemoryEstimate, CountsTheRowsOfTargets) {
  ModelConfig config = kModel;
  config.mask = MaskType::kFull;
  config.head = HeadType::kMaskedToken;
  const auto kept = [&](double targets) {
    return static_cast<double>(
        estimate_memory(config, DType::kF32,
                        {.micro_batch_tokens = 10000, .targets = targets, .device = Device::cuda()})
            .activations);
  };
  EXPECT_GT(kept(1) - kept(0.1), 9000.0 * 2 * static_cast<double>(config.d_model) * 4);
  EXPECT_NEAR((kept(1) - kept(0.6)) / (kept(0.5) - kept(0.1)), 1, 0.01);
}

TEST(MemoryEstimate, RoundsAsTheDevicesAllocatorDoes) {
  EXPECT_EQ(activations(DType::kF32, 1, Device::cuda()) % 512, 0);
  EXPECT_NE(activations(DType::kF32, 1, {}) % 512, 0);
  EXPECT_GT(activations(DType::kF32, 1, Device::cuda()), activations(DType::kF32, 1, {}));
}

TEST(MemoryEstimate, SizesThatOverflowAreRefused) {
  ModelConfig config = kModel;
  config.num_layers = 1000;
  config.d_ff = 1 << 22;
  EXPECT_GT(estimate_memory(config, DType::kF64, {.micro_batch_tokens = 1 << 16}).peak(), 1e15);
  EXPECT_THROW_WITH(estimate_memory(config, DType::kF64, {.micro_batch_tokens = int64_t{1} << 40}),
                    InputError, "hint: smaller sizes");
  EXPECT_THROW_WITH(
      estimate_memory(
          config, DType::kF32,
          {.micro_batch_tokens = 1, .rollout_sequences = 1 << 20, .rollout_length = 1 << 24}),
      InputError, "memory: this model and batch");
}

TEST(MemoryEstimate, RolloutsNeedTheCacheAndLogits) {
  ModelConfig config = kModel;
  config.vocab_size = 50000;
  const MemoryShape shape{.rollout_sequences = 3,
                          .rollout_length = 40,
                          .rollout_prefill_tokens = 6,
                          .device = Device::cuda()};
  const int64_t cache = KVCache::bytes({.num_layers = config.num_layers,
                                        .num_kv_heads = config.num_kv_heads,
                                        .head_dim = config.head_dim,
                                        .num_sequences = 3,
                                        .max_length = 40},
                                       DType::kBF16);
  const MemoryEstimate memory = estimate_memory(config, DType::kBF16, shape);
  EXPECT_EQ(memory.cache, cache);
  EXPECT_EQ(memory.rollout, 3 * 50048 * 4);  // logits in padded rows
  EXPECT_EQ(memory.peak(),
            memory.persistent() + std::max(memory.gradients, memory.rollout + cache));
  // A limit, rounded down to blocks of 16 tokens; a sequence and one block more always fit.
  MemoryShape limited = shape;
  for (const auto& [tokens, blocks] : {std::pair(100, 6), {1, 4}, {1000, 9}}) {
    limited.max_cache_tokens = tokens;
    EXPECT_EQ(estimate_memory(config, DType::kBF16, limited).cache, cache / 9 * blocks) << tokens;
  }
}

TEST(MemoryEstimate, RolloutsNeedTheStatesOfTheirSequences) {
  const ModelConfig config = test::delta_cases()[0].config;
  MemoryShape shape{.rollout_sequences = 16, .rollout_length = 40, .rollout_prefill_tokens = 6};
  const MemoryEstimate memory = estimate_memory(config, DType::kF32, shape);
  EXPECT_EQ(memory.sequences, 16);
  EXPECT_EQ(memory.states, 18 * state_bytes(config, DType::kF32));
  EXPECT_EQ(memory.cache, memory.states + 16 * 3 * block_bytes(config, DType::kF32));
  // One layer of four has keys and values, which a limit is about.
  EXPECT_EQ(block_bytes(config, DType::kF32), 2 * 16 * config.num_kv_heads * config.head_dim * 4);
  shape.max_cache_tokens = 100;
  const MemoryEstimate limited = estimate_memory(config, DType::kF32, shape);
  EXPECT_EQ(limited.states, memory.states);
  EXPECT_EQ(limited.cache, memory.states + 6 * block_bytes(config, DType::kF32));
  ModelConfig huge = config;
  huge.num_layers = 1000;
  huge.delta.key_heads = huge.delta.value_heads = 1 << 12;
  huge.delta.key_dim = huge.delta.value_dim = 1 << 10;
  shape.rollout_sequences = 1 << 20;
  EXPECT_THROW_WITH(estimate_memory(huge, DType::kF32, shape), InputError,
                    "memory: this model and batch");
}

// On CUDA an update's gradients and activations use the memory of the idle cache.
TEST(MemoryEstimate, TheCacheIsReleasedOnCuda) {
  MemoryShape shape{.micro_batch_tokens = 4000,
                    .rollout_sequences = 3,
                    .rollout_length = 40,
                    .rollout_prefill_tokens = 6,
                    .device = Device::cuda()};
  const auto beyond_weights = [&] {
    const MemoryEstimate memory = estimate_memory(kModel, DType::kF32, shape);
    EXPECT_GT(memory.activations, memory.cache + memory.rollout);
    return std::tuple{memory.peak() - memory.persistent(), memory.update(), memory.cache};
  };
  const auto [on_cuda, step, cache] = beyond_weights();
  EXPECT_EQ(on_cuda, step);
  shape.device = Device{};
  const auto [on_cpu, cpu_step, cpu_cache] = beyond_weights();
  EXPECT_EQ(on_cpu, cpu_step + cpu_cache);
}

}  // namespace
}  // namespace cohort
