// Updates that compute a shared prompt once against updates that repeat it per completion, for
// prompts around the sizes of tiles and groups of one to many completions.
#include <gtest/gtest.h>

#include "tests/rl/tiny_policy.h"

namespace cohort {
namespace {

using namespace test;

// One layer with heads of 64, as in real models, and a context for the longest prompt.
ModelConfig model_config() {
  ModelConfig config = tiny_model();
  config.num_layers = 1;
  config.d_model = 64;
  config.head_dim = 64;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.context = 2200;
  config.init_std = 0.1;
  config.resolve();
  return config;
}

struct Group {
  int64_t prompt, completions;
};

// Groups with completions of 1 to 40 tokens.
std::vector<Trajectory> make_completions(const std::vector<Group>& groups) {
  Rng rng(9, rng_stream(kTestPurpose, 4));
  std::vector<Trajectory> out;
  for (size_t group = 0; group < groups.size(); ++group) {
    std::vector<int32_t> prompt;
    for (int64_t t = 0; t < groups[group].prompt; ++t)
      prompt.push_back(static_cast<int32_t>(rng.below(kEos)));
    for (int64_t g = 0; g < groups[group].completions; ++g) {
      Trajectory c{.tokens = prompt,
                   .prompt_length = groups[group].prompt,
                   .index = static_cast<int64_t>(out.size()),
                   .group = static_cast<int64_t>(group)};
      for (int64_t t = rng.between(1, 40); t > 0; --t)
        c.tokens.push_back(static_cast<int32_t>(rng.below(kEos)));
      c.loss_mask.assign(c.tokens.size(), 1);
      std::fill_n(c.loss_mask.begin(), groups[group].prompt, 0);
      out.push_back(c);
    }
  }
  return out;
}

class SharedPrompts {
 public:
  SharedPrompts(DType dtype, Device device, const std::vector<Group>& groups)
      : model_(model_config(), dtype, 1, device), completions_(make_completions(groups)) {}

  Transformer& model() { return model_; }
  // An update that computes each prompt once (`shared`) or repeats it per completion.
  UpdateResult update(bool shared, int64_t micro_batch_tokens) {
    if (completions_[0].logprobs.empty()) record_logprobs(model_, completions_);
    std::vector<PolicySequence> sequences =
        sequences_of(completions_, random_advantages(completions_.size(), 3));
    PackPolicyDesc desc = pack_desc(LossType::kDapo, sequences, micro_batch_tokens);
    desc.dtype = accumulate_dtype(model_.dtype());
    for (size_t i = 0; shared && i < sequences.size(); ++i) {
      sequences[i].group = completions_[i].group;
      sequences[i].prefix = completions_[i].prompt_length - 1;
    }
    Minibatch batches = pack_policy(sequences, desc);
    for (PolicyBatch& batch : batches) batch = to_device(batch, model_);
    return run_update(model_, batches, {});
  }

 private:
  Transformer model_;
  std::vector<Trajectory> completions_;
};

const std::vector<std::vector<Group>> kCases = {
    {{1, 64}, {2, 3}}, {{100, 8}, {1, 1}}, {{128, 4}, {129, 2}}, {{2050, 2}, {3, 5}}};

void expect_same_gradients(DType dtype, Device device, double tolerance) {
  for (const auto& groups : kCases) {
    SharedPrompts policy(dtype, device, groups);
    const UpdateResult repeated = policy.update(false, 10000);
    for (const int64_t tokens : {300, 10000}) {  // with and without a split within a group
      const UpdateResult shared = policy.update(true, tokens);
      for (const UpdateResult* result : {&repeated, &shared})
        for (const double d : result->max_ratio_deviations) EXPECT_EQ(d, 0) << groups[0].prompt;
      for (size_t i = 0; i < repeated.gradients.size(); ++i)
        EXPECT_LE(relative_error(shared.gradients[i], repeated.gradients[i]), tolerance)
            << policy.model().parameters()[i].name << ", prompt of " << groups[0].prompt
            << ", micro batches of " << tokens;
    }
  }
}

TEST(SharedPromptsSlow, GiveTheSameGradients) {
  expect_same_gradients(DType::kF64, {}, 1e-12);
  expect_same_gradients(DType::kF32, {}, 1e-6);
}

TEST(CudaSharedPrompts, GiveTheSameGradients) {
  COHORT_REQUIRE_GPU(device);
  expect_same_gradients(DType::kF32, device, 1e-6);
}

// In bf16 both have rounding errors: those of shared prompts are not larger.
TEST(CudaSharedPrompts, AreAsExactInBf16AsRepeatedOnes) {
  COHORT_REQUIRE_GPU(device);
  for (const auto& groups : kCases) {
    SharedPrompts half(DType::kBF16, device, groups), exact(DType::kF64, {}, groups);
    for (size_t i = 0; i < half.model().parameters().size(); ++i) {
      Tensor value = exact.model().parameters()[i].value;
      value.copy_(half.model().parameters()[i].value.to(Device{}).to(DType::kF64));
    }
    const UpdateResult truth = exact.update(false, 10000), repeated = half.update(false, 10000),
                       shared = half.update(true, 10000);
    for (const UpdateResult* result : {&repeated, &shared})
      for (const double d : result->max_ratio_deviations) EXPECT_EQ(d, 0) << groups[0].prompt;
    double repeated_error = 0, shared_error = 0;
    for (size_t i = 0; i < truth.gradients.size(); ++i) {
      repeated_error += relative_error(repeated.gradients[i].to(Device{}), truth.gradients[i]);
      shared_error += relative_error(shared.gradients[i].to(Device{}), truth.gradients[i]);
    }
    EXPECT_LE(shared_error, 1.1 * repeated_error) << groups[0].prompt;
  }
}

TEST(CudaSharedPrompts, TwentyUpdatesHaveTheSameBits) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    SharedPrompts policy(dtype, device, {{100, 8}, {129, 3}, {300, 20}});
    const UpdateResult first = policy.update(true, 1000);
    for (int run = 1; run < 20; ++run) {
      const UpdateResult next = policy.update(true, 1000);
      for (size_t i = 0; i < first.gradients.size(); ++i)
        ASSERT_TRUE(bit_equal(next.gradients[i].to(Device{}), first.gradients[i].to(Device{})))
            << policy.model().parameters()[i].name << ", run " << run;
    }
  }
}

}  // namespace
}  // namespace cohort
