// Models with gated delta rule layers between those with attention.
#include "nn/gated_delta.h"

#include "core/parallel.h"
#include "nn/merge.h"
#include "nn/model_folder.h"
#include "tests/nn/models.h"

namespace cohort {
namespace {

ModelConfig hybrid_config() {
  ModelConfig c = test::model_config("llama");
  c.num_layers = 4;
  c.vocab_size = 11;
  c.context = 200;
  c.delta = {.full_every = 3, .key_heads = 1, .value_heads = 2, .key_dim = 4, .value_dim = 4};
  c.resolve();
  return c;
}

PackedBatch batch_of(const std::vector<int64_t>& lengths) {
  return pack(test::random_sequences(lengths, hybrid_config().vocab_size, 2));
}

TEST(HybridModels, EveryGradientMatchesDifferences) {
  const Transformer model(hybrid_config(), DType::kF64, 1);
  test::expect_gradients_of_differences(model, batch_of({5, 1, 70}), {.step = 1e-4, .elements = 6});
}

// transformers 5.24: Qwen3_5ForCausalLM with these weights, of which the norms are stored less 1.
TEST(HybridModels, LogProbsAreThoseOfTransformers) {
  ModelConfig c = hybrid_config();
  c.num_layers = 2;
  c.d_model = 8;
  c.num_heads = c.num_kv_heads = 2;
  c.head_dim = 4;
  c.d_ff = 12;
  c.delta = {.full_every = 9, .key_heads = 2, .value_heads = 4, .key_dim = 4, .value_dim = 4};
  const Transformer model(c, DType::kF64, 1);
  for (const NamedParameter& p : model.parameters()) {
    int64_t key = 0;
    for (const char letter : p.name) key += letter;
    std::vector<double> values(static_cast<size_t>(p.value.numel()));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = 0.5 * std::sin(1.7 * static_cast<double>(i) + static_cast<double>(key));
      if (p.name.find("norm") != std::string::npos) values[i] = 1 + 0.5 * values[i];
    }
    Tensor(p.value).copy_(Tensor::from(values, p.value.shape()));
  }
  TokenSequence text{.tokens = {}, .loss_mask = std::vector<uint8_t>(140, 1)};
  for (int32_t t = 0; t < 140; ++t) text.tokens.push_back((7 * t * t + 3 * t) % 11);
  const PackedBatch batch = pack({&text, 1});
  const NoGradGuard no_grad;
  const TokenLogProbs found =
      token_log_probs(model.hidden_at_targets(batch), model.head(), batch.targets);
  const auto logprob = found.logprob.value().to_vector<double>();
  ASSERT_EQ(logprob.size(), 139u);
  for (const auto& [t, expected] : std::vector<std::pair<size_t, double>>{{0, -6.067439833},
                                                                          {1, -3.301443625},
                                                                          {5, -4.547283847},
                                                                          {63, -4.725822842},
                                                                          {64, -3.065771998},
                                                                          {65, -1.203912056},
                                                                          {127, -1.558573916},
                                                                          {128, -5.770467886},
                                                                          {138, -1.558580132}})
    EXPECT_NEAR(logprob[t], expected, 2e-5) << t;
}

TEST(HybridModels, HaveTheirParameters) {
  const ModelConfig c = hybrid_config();
  const Transformer model(c, DType::kF64, 1);
  int found = 0;
  for (const NamedParameter& p : model.parameters()) {
    const bool is_delta = p.name.starts_with("model.layers.0.") ||
                          p.name.starts_with("model.layers.1.") ||
                          p.name.starts_with("model.layers.3.");
    EXPECT_EQ(p.name.find("self_attn") != std::string::npos && is_delta, false) << p.name;
    if (p.name.find("linear_attn") == std::string::npos) continue;
    ++found;
    EXPECT_TRUE(is_delta) << p.name;
    const auto values = p.value.to_vector<double>();
    const auto [low, high] = std::ranges::minmax(values);
    EXPECT_FALSE(p.name.ends_with("norm.weight") && (low != 1 || high != 1));
    if (p.name.ends_with("conv1d.weight")) {
      EXPECT_EQ(p.value.shape(), (Shape{2 * 4 + 8, 4}));
      EXPECT_TRUE(low > -0.5 && low < -0.2 && high < 0.5 && high > 0.2);
    }
    if (p.name.ends_with("A_log")) {
      EXPECT_TRUE(high < std::log(16.0) && low > std::log(1e-5) && low != high);
    }
    if (p.name.ends_with("dt_bias")) {
      for (const double x : values) {
        EXPECT_TRUE(std::log1p(std::exp(x)) > 0.00099 && std::log1p(std::exp(x)) < 0.1001);
      }
    }
  }
  EXPECT_EQ(found, 3 * 9);
}

// A_log, dt_bias and the norm of a head, but not the convolution.
TEST(HybridModels, SomeParametersStayInF32) {
  const auto stays = [](const std::string& name) {
    return name.ends_with("A_log") || name.ends_with("dt_bias") ||
           name.ends_with("linear_attn.norm.weight");
  };
  const Transformer model(hybrid_config(), DType::kBF16, 1);
  for (const NamedParameter& p : model.parameters()) {
    EXPECT_EQ(p.value.dtype(), stays(p.name) ? DType::kF32 : DType::kBF16) << p.name;
    EXPECT_EQ(p.grad().dtype(), DType::kF32) << p.name;
    // Without weight decay.
    EXPECT_TRUE(p.use == ParameterUse::kVector ||
                !(stays(p.name) || p.name.ends_with("conv1d.weight")));
  }
  const test::TempDir folder;
  save_weights(model, folder.path());
  EXPECT_EQ(stored_dtype(folder.path()), "bfloat16");
  const SafetensorsFile file(folder.path("model.safetensors"));
  Transformer read(hybrid_config(), DType::kBF16, 2);
  load_weights(read, folder.path());
  Transformer wide(hybrid_config(), DType::kF32, std::nullopt);
  load_weights(wide, folder.path());
  round_weights(wide, "BF16");  // changes nothing
  int kept = 0;
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    const NamedParameter& p = model.parameters()[i];
    EXPECT_EQ(file.stored_dtype(p.name), std::string(stays(p.name) ? "F32" : "BF16"));
    EXPECT_TRUE(test::bit_equal(read.parameters()[i].value, p.value)) << p.name;
    EXPECT_TRUE(test::bit_equal(wide.parameters()[i].value, p.value.to(DType::kF32))) << p.name;
    kept +=
        test::bit_equal(p.value.to(DType::kBF16).to(DType::kF32), p.value.to(DType::kF32)) ? 0 : 1;
  }
  EXPECT_EQ(kept, 2 * 3);  // bf16 could not hold A_log and dt_bias
  // In f64 models they are f64.
  const Transformer f64(hybrid_config(), DType::kF64, 1);
  for (const NamedParameter& p : f64.parameters()) EXPECT_EQ(p.value.dtype(), DType::kF64);
}

TEST(HybridModels, ASequenceDoesNotDependOnThePacking) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Transformer model(hybrid_config(), dtype, 1);
    const std::vector<int64_t> lengths = {64, 3, 130, 1};
    const Tensor all = model.forward(batch_of(lengths)).value();
    int64_t begin = 0, index = 0;
    for (const int64_t length : lengths) {
      const auto sequences = test::random_sequences(lengths, 11, 2);
      const Tensor alone =
          model.forward(pack(std::span(sequences).subspan(static_cast<size_t>(index++), 1)))
              .value();
      EXPECT_TRUE(test::bit_equal(alone, test::rows_of(all, begin, length))) << length;
      begin += length;
    }
  }
}

TEST(HybridModels, RecomputationChangesNoBit) {
  std::vector<std::vector<double>> gradients;
  for (const Recompute recompute : {Recompute::kNone, Recompute::kCheap, Recompute::kBlock}) {
    ModelConfig c = hybrid_config();
    c.recompute = recompute;
    const Transformer model(c, DType::kF32, 1);
    backward(test::mean_loss(model, batch_of({70, 5})));
    gradients.emplace_back();
    for (const NamedParameter& p : model.parameters())
      for (const double g : p.grad().to_vector<double>()) gradients.back().push_back(g);
  }
  EXPECT_EQ(gradients[0], gradients[1]);
  EXPECT_EQ(gradients[0], gradients[2]);
}

TEST(HybridModels, ConfigurationsAreReadAsTheyAreWritten) {
  const ModelConfig c = hybrid_config(), read = ModelConfig::from_json(c.to_json());
  EXPECT_EQ(c.to_json().at("model_type").as_string(), "cohort");
  EXPECT_EQ(dump_config(c), dump_config(read));
  EXPECT_TRUE(read.is_delta(0) && read.is_delta(1) && !read.is_delta(2) && read.is_delta(3));
  // With the sums of three delta layers, and of one with attention.
  EXPECT_EQ(
      train_flops_per_token(c, 100) - 6.0 * static_cast<double>(model_size(c).matmul_parameters),
      6.0 * 3 * 8 * (3 * 4 + 128) + 12.0 * 50 * static_cast<double>(c.num_heads * c.head_dim));
}

TEST(HybridModels, WhatIsNotThereIsRefusedByKey) {
  const auto refused = [](const std::function<void(ModelConfig&)>& change, const char* message) {
    ModelConfig c = hybrid_config();
    change(c);
    EXPECT_THROW_WITH(c.resolve(), InputError, message);
  };
  refused([](ModelConfig& c) { c.delta.full_every = 1; }, "model.delta.full_every: 1");
  refused([](ModelConfig& c) { c.delta.key_heads = 3; },
          "model.delta.value_heads: 2 is no multiple of key_heads, 3");
  refused([](ModelConfig& c) { c.delta.value_dim = 8; },
          "model.delta.value_dim: 8 is not key_dim, 4");
  refused([](ModelConfig& c) { c.mask = MaskType::kFull; }, "model.mask: delta layers need causal");
  // Keys that a run adds to the model that it starts from.
  for (const auto& change : std::vector<std::function<void(ModelConfig&)>>{
           [](ModelConfig& c) { c.precision.base = kernels::WeightFormat::kInt8; },
           [](ModelConfig& c) { c.precision.cache = CachePrecision::kFp8; }}) {
    ModelConfig c = hybrid_config();
    change(c);
    EXPECT_THROW_WITH(Transformer(c, DType::kF32, 1), InputError, "model.delta: there is no");
  }
  EXPECT_THROW_WITH(hybrid_config().check_device(Device::cuda(0), DType::kF32), InputError,
                    "model.delta.key_dim: expected 64 or 128 on a GPU");
  EXPECT_THROW_WITH(hybrid_config().check_gpu(89, DType::kF32), InputError,
                    "dtype: f32 with model.delta needs a GPU with 160 KiB of shared memory");
  EXPECT_NO_THROW(hybrid_config().check_gpu(89, DType::kBF16));
  EXPECT_NO_THROW(hybrid_config().check_gpu(80, DType::kF32));
}

}  // namespace
}  // namespace cohort
