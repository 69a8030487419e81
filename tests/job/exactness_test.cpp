// The log-prob recorded while sampling is bitwise equal to the trainer's for any batch composition;
// and samples depend on their address alone.
#include <algorithm>

#include "rl/grpo_loss.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

class Exactness : public testing::Test {
 protected:
  // Two layers, grouped heads, a context of more than one tile of 128 keys, and weights that give
  // every log-prob from near 0 to -10.
  static ModelConfig config() {
    ModelConfig c;
    c.num_layers = 2;
    c.d_model = 32;
    c.num_heads = 4;
    c.num_kv_heads = 2;
    c.context = 160;
    c.init_std = 0.3;
    return c;
  }
  explicit Exactness(ModelConfig c = config()) : tokenizer_(make_char_tokenizer("0123456789+=")) {
    c.vocab_size = tokenizer_->vocab_size();
    c.resolve();
    config_ = c;
    // Lengths from 1 to over a tile of 128 keys, so that prefills and decodes of all kinds meet.
    for (const size_t length : {1, 5, 2, 131, 17, 64, 3}) {
      std::string text;
      for (size_t i = 0; i < length; ++i) text += "0123456789+="[(i * 7 + length) % 12];
      prompts_.push_back({.prompt = text, .answer = "", .solution = "", .fields = {}});
    }
  }

  void SetUp() override { build(DType::kF32, {}); }
  void build(DType dtype, Device device) {
    model_ = std::make_unique<Transformer>(config_, dtype, 3, device);
  }

  // On bases in 8 and 4 bits, with adapters that have an effect.
  void expect_equal_logprobs_of_quantized_bases(DType dtype, Device device) {
    config_.d_model = 128;
    config_.head_dim = 32;
    config_.lora.rank = 4;
    config_.resolve();
    for (const auto base : {kernels::WeightFormat::kInt8, kernels::WeightFormat::kNf4}) {
      config_.precision.base = base;
      build(dtype, device);
      uint64_t seed = 9;
      for (const NamedParameter& p : model_->parameters())
        if (p.role == ParameterRole::kAdapter)
          Tensor(p.value).copy_(random_tensor(p.value.shape(), DType::kF32, ++seed, 0.1).to(dtype));
      model_->update_derived();
      expect_equal_logprobs(1);
    }
  }

  std::vector<Trajectory> sample(double temperature, int64_t max_concurrent = 256) const {
    Engine engine(*model_, {.max_concurrent = max_concurrent});
    return Sampler(engine, *tokenizer_, sampling(temperature))
        .sample(prompts_, generations_, {.seed = 11, .step = 4, .prompt_indices = {}});
  }
  static SamplingConfig sampling(double temperature) {
    SamplingConfig sampling;
    sampling.temperature = temperature;
    sampling.max_completion_length = 24;
    return sampling;
  }

  // Log-probs per token (0 for the prompt's) from training forwards of `order`'s completions, at
  // most `budget` tokens together.
  std::vector<std::vector<double>> forward(const std::vector<Trajectory>& rollouts,
                                           const std::vector<size_t>& order, int64_t budget,
                                           double temperature) const {
    NoGradGuard no_grad;
    std::vector<TokenSequence> sequences;
    for (const size_t i : order) sequences.push_back(policy_sequence(rollouts[i], 0));
    std::vector<double> all;
    for (const PackedBatch& packed : pack_micro_batches(sequences, budget)) {
      const PackedBatch batch = model_->to_device(packed);
      const auto some =
          policy_log_probs(*model_, batch, temperature).logprob.value().to_vector<double>();
      all.insert(all.end(), some.begin(), some.end());
    }
    std::vector<std::vector<double>> out(rollouts.size());
    auto at = all.begin();
    for (const size_t i : order) {
      out[i].assign(static_cast<size_t>(rollouts[i].prompt_length), 0);
      out[i].insert(out[i].end(), at, at + rollouts[i].completion_length());
      at += rollouts[i].completion_length();
    }
    return out;
  }

  void expect_equal_logprobs(double temperature) const {
    const std::vector<Trajectory> rollouts = sample(temperature);
    const size_t n = rollouts.size();
    std::vector<size_t> forwards(n), backwards(n), mixed(n);
    for (size_t i = 0; i < n; ++i) {
      forwards[i] = i;
      backwards[i] = n - 1 - i;
      mixed[i] = (i * 11 + 5) % n;  // 11 has no common divisor with 21 and 70
    }
    for (const auto& order : {forwards, backwards, mixed})
      for (const int64_t budget : {1, 100, 100000})
        for (const int threads : {1, 2, 3}) {
          const Threads guard(threads);
          const auto logprobs = forward(rollouts, order, budget, temperature);
          for (size_t i = 0; i < n; ++i)
            EXPECT_EQ(logprobs[i], rollouts[i].logprobs)
                << "completion " << i << ", budget " << budget << ", threads " << threads;
        }
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  ModelConfig config_;
  std::unique_ptr<Transformer> model_;
  std::vector<Example> prompts_;
  int64_t generations_ = 3;
};

TEST_F(Exactness, SamplerLogProbsEqualAnyPackedForwardToTheBit) {
  expect_equal_logprobs(1);
}

TEST_F(Exactness, SamplerLogProbsOfQuantizedBasesEqualAnyPackedForwardToTheBit) {
  expect_equal_logprobs_of_quantized_bases(DType::kF32, {});
}

TEST_F(Exactness, SamplerLogProbsEqualAnyPackedForwardToTheBitAtOtherTemperatures) {
  expect_equal_logprobs(0.7);
  // The temperature is part of the distribution: without it the log-probs differ.
  const std::vector<Trajectory> rollouts = sample(0.7);
  EXPECT_NE(forward(rollouts, {0}, 1, 1.0)[0], rollouts[0].logprobs);
}

void expect_same_samples(const std::vector<Trajectory>& a, const std::vector<Trajectory>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].tokens, b[i].tokens) << i;
    EXPECT_EQ(a[i].logprobs, b[i].logprobs) << i;
    EXPECT_EQ(a[i].sampling_logprobs, b[i].sampling_logprobs) << i;
    EXPECT_EQ(a[i].entropies, b[i].entropies) << i;
    EXPECT_EQ(a[i].truncated_mass, b[i].truncated_mass) << i;
    EXPECT_EQ(a[i].text, b[i].text) << i;
    EXPECT_EQ(a[i].truncated(), b[i].truncated()) << i;
  }
}

// On a GPU: prefills, decodes in graphs with idle rows, and training forwards of any split.
class CudaExactness : public Exactness, public testing::WithParamInterface<DType> {
 protected:
  void SetUp() override {
    COHORT_REQUIRE_GPU(device);
    build(GetParam(), device);
  }
};

TEST_P(CudaExactness, SamplerLogProbsEqualAnyPackedForwardToTheBit) {
  expect_equal_logprobs(1);
  expect_equal_logprobs(0.7);
}

TEST_P(CudaExactness, SamplerLogProbsOfQuantizedBasesEqualAnyPackedForwardToTheBit) {
  expect_equal_logprobs_of_quantized_bases(GetParam(), model_->device());
}

TEST_P(CudaExactness, SamplesDoNotDependOnConcurrency) {
  const std::vector<Trajectory> together = sample(1);
  for (const int64_t max_concurrent : {1, 3}) {
    SCOPED_TRACE(max_concurrent);
    expect_same_samples(sample(1, max_concurrent), together);
  }
}

// As sequences end, decoding continues with decoders of 128, 64, 32 rows and fewer.
TEST_P(CudaExactness, SeventySequencesKeepTheirBitsFromOneDecoderToTheNext) {
  generations_ = 10;
  ASSERT_EQ(sample(1).size(), 70u);
  expect_equal_logprobs(1);
  expect_same_samples(sample(1, 5), sample(1));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CudaExactness, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return dtype_name(info.param); });

TEST_F(Exactness, SamplesAreOfEveryKind) {
  const std::vector<Trajectory> rollouts = sample(1);
  int truncated = 0, stopped = 0;
  for (const Trajectory& c : rollouts) {
    ASSERT_EQ(c.logprobs.size(), c.tokens.size());
    ASSERT_EQ(c.loss_mask.size(), c.tokens.size());
    EXPECT_EQ(c.completion_length() + c.prompt_length, static_cast<int64_t>(c.tokens.size()));
    (c.truncated() ? truncated : stopped) += 1;
    EXPECT_EQ(c.tokens.back() == tokenizer_->eos_id(), !c.truncated());
  }
  EXPECT_GT(truncated, 2);
  EXPECT_GT(stopped, 2);
}

TEST_F(Exactness, SamplesDoNotDependOnConcurrency) {
  const std::vector<Trajectory> together = sample(1);
  for (const int64_t max_concurrent : {1, 3}) {
    SCOPED_TRACE(max_concurrent);
    expect_same_samples(sample(1, max_concurrent), together);
  }
}

TEST_F(Exactness, SamplesDoNotDependOnThreads) {
  const std::vector<Trajectory> reference = sample(1);
  for (const int threads : {1, 2, 3}) {
    SCOPED_TRACE(threads);
    const Threads guard(threads);
    expect_same_samples(sample(1), reference);
  }
}

TEST_F(Exactness, SamplesDoNotDependOnHowPromptsAreSplitOverCalls) {
  const std::vector<Trajectory> together = sample(1);
  Engine engine(*model_, {});
  const Sampler sampler(engine, *tokenizer_, sampling(1));
  // Three calls, each with its prompts in a different order.
  std::vector<Trajectory> merged = together;
  for (const std::vector<int64_t>& part :
       {std::vector<int64_t>{6, 0}, std::vector<int64_t>{3}, std::vector<int64_t>{5, 2, 1, 4}}) {
    std::vector<Example> prompts;
    for (const int64_t i : part) prompts.push_back(prompts_[static_cast<size_t>(i)]);
    const std::vector<Trajectory> some =
        sampler.sample(prompts, 3, {.seed = 11, .step = 4, .prompt_indices = part});
    for (size_t i = 0; i < some.size(); ++i) EXPECT_EQ(some[i].group, part[i / 3]);
    for (size_t k = 0; k < some.size(); ++k)
      merged[static_cast<size_t>(part[k / 3]) * 3 + k % 3] = some[k];
  }
  expect_same_samples(merged, together);
}

TEST_F(Exactness, SamplesDependOnSeedStepPromptAndSample) {
  Engine engine(*model_, {});
  const Sampler sampler(engine, *tokenizer_, sampling(1));
  const std::vector<Example> prompt{prompts_[1]};
  const auto tokens = [&](uint64_t seed, int64_t step, int64_t index) {
    const std::vector<Trajectory> r =
        sampler.sample(prompt, 2, {.seed = seed, .step = step, .prompt_indices = {index}});
    EXPECT_NE(r[0].tokens, r[1].tokens);
    return r[0].tokens;
  };
  const auto first = tokens(11, 4, 1);
  EXPECT_NE(tokens(12, 4, 1), first);
  EXPECT_NE(tokens(11, 5, 1), first);
  EXPECT_NE(tokens(11, 4, 2), first);
}

// GPT-2's choices: LayerNorm, learned positions, GELU, biases, a tied table.
class ExactnessOfGpt2 : public Exactness {
 protected:
  static ModelConfig gpt2() {
    ModelConfig c = config();
    c.num_kv_heads = 0;
    c.norm = NormType::kLayer;
    c.position = PositionType::kLearned;
    c.mlp = MlpType::kGeluTanh;
    c.bias = c.tie_embeddings = true;
    return c;
  }
  ExactnessOfGpt2() : Exactness(gpt2()) {}
};

TEST_F(ExactnessOfGpt2, SamplerLogProbsEqualAnyPackedForwardToTheBit) {
  expect_equal_logprobs(1);
}

class ExactnessOfDelta : public Exactness {
 protected:
  static ModelConfig delta() {
    ModelConfig c = config();
    c.num_layers = 3;
    c.delta = {.full_every = 3, .key_heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 8};
    return c;
  }
  ExactnessOfDelta() : Exactness(delta()) {}
};

TEST_F(ExactnessOfDelta, SamplerLogProbsEqualAnyPackedForwardToTheBit) {
  expect_equal_logprobs(1);
  expect_same_samples(sample(1, 3), sample(1));
}

// In a run, the first minibatch's ratio is exactly 1 at every step, even if the policy has changed
// for later minibatches.
void expect_ratios_of_one(std::vector<std::string> overrides) {
  const TempDir dir;
  // A lower learning rate, so that no surrogate solves the task within the run.
  overrides.push_back("learning_rate=5e-3");
  const std::string run = train_new(small_plan(
      dir, "run",
      std::string(kSmallModel) + kSmallData + kSmallGrpo +
          "temperature: 0.8\nnum_iterations: 2\nnum_minibatches: 2\nmicro_batch_tokens: 40\n",
      overrides));
  int steps = 0;
  for (const Json& line : json_lines(run + "/metrics.jsonl")) {
    if (line.find("eval") != nullptr) continue;
    ++steps;
    EXPECT_EQ(metric(line, "ratio_deviation"), 0.0) << line.dump();
    EXPECT_GT(metric(line, "kl_old"), 0.0) << line.dump();
    EXPECT_LT(metric(line, "frac_reward_zero_std"), 1.0) << line.dump();
    EXPECT_GT(metric(line, "grad_norm"), 0.0) << line.dump();
  }
  EXPECT_EQ(steps, 4);
}

class ExactnessOfRun : public testing::TestWithParam<const char*> {};
TEST_P(ExactnessOfRun, FirstMinibatchRatioIsExactlyOne) {
  std::optional<ExpectLog> warning;
  if (GetParam() == std::string("reinforce")) warning.emplace("reinforce ignores the ratio");
  expect_ratios_of_one({str("surrogate=", GetParam())});
}
std::vector<const char*> surrogate_names() {
  std::vector<const char*> out;
  for (const auto& entry : kSurrogates) out.push_back(entry.name);
  return out;
}
INSTANTIATE_TEST_SUITE_P(Surrogates, ExactnessOfRun, testing::ValuesIn(surrogate_names()));

TEST(ExactnessOfDeltaRun, FirstMinibatchRatioIsExactlyOne) {
  expect_ratios_of_one(kSmallDelta);
}

}  // namespace
}  // namespace cohort::test
