// Models with trained weights (data/models: stories260K, tiny_random_gpt2) against reference
// results in f64: texts, ids, log-probs and logits.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/matmul.h"
#include "nn/model_folder.h"
#include "rl/engine/rollout.h"
#include "rl/grpo_loss.h"
#include "sys/input_file.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using namespace test;

constexpr double kTolerance = 1e-4;

std::vector<int32_t> ids_of(const Json& json) {
  std::vector<int32_t> ids;
  for (const Json& id : json.as_array()) ids.push_back(static_cast<int32_t>(id.as_int()));
  return ids;
}
std::vector<double> numbers_of(const Json& json) {
  std::vector<double> values;
  for (const Json& value : json.as_array()) values.push_back(value.as_double());
  return values;
}

class RealModel {
 public:
  RealModel(const std::string& dir, DType dtype, Device device)
      : model_(load_config(dir), dtype, std::nullopt, device),
        golden_(parse_json(read_input_file(dir + "/golden.json"), "golden.json")) {
    load_weights(model_, dir);
  }

  const Json& golden() const { return golden_; }
  const Transformer& model() const { return model_; }
  // Logits over the vocabulary after each of these tokens.
  std::vector<std::vector<double>> logits(std::vector<int32_t> ids) const {
    NoGradGuard no_grad;
    const auto rows = static_cast<int64_t>(ids.size());
    ids.push_back(ids.back());  // the last token of a sequence has no row
    const Tensor hidden = model_.forward(model_.to_device(batch_of(ids))).value();
    Tensor out = Tensor::empty({rows, model_.config().vocab_size}, hidden.dtype(), hidden.device());
    kernels::linear_forward({.y = out, .x = hidden, .w = model_.head().weight.value(), .bias = {}});
    std::vector<std::vector<double>> all;
    for (int64_t t = 0; t < rows; ++t) all.push_back(out.narrow(0, t, 1).to_vector<double>());
    return all;
  }
  std::vector<double> log_probs(const std::vector<int32_t>& ids) const {
    NoGradGuard no_grad;
    return policy_log_probs(model_, model_.to_device(batch_of(ids)), 1)
        .logprob.value()
        .to_vector<double>();
  }

 private:
  static PackedBatch batch_of(const std::vector<int32_t>& ids) {
    const TokenSequence sequence{
        .tokens = ids, .loss_mask = std::vector<uint8_t>(ids.size(), 1), .index = 0};
    return pack({&sequence, 1});
  }
  Transformer model_;
  Json golden_;
};

void expect_near(const std::vector<double>& got, const std::vector<double>& expected,
                 const char* name) {
  ASSERT_GE(got.size(), expected.size()) << name;
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(got[i], expected[i], kTolerance) << name << " " << i;
}

void expect_stories(const std::string& dir, Device device) {
  const RealModel real(dir, DType::kF32, device);
  const Json& golden = real.golden();
  const auto tokenizer = load_tokenizer(dir);
  SamplingConfig config;
  config.temperature = 0;
  config.max_completion_length = 200;
  const Example empty{.prompt = ""};
  Engine engine(real.model(), {});
  const std::vector<Trajectory> greedy =
      Sampler(engine, *tokenizer, config).sample({&empty, 1}, 1, {});
  EXPECT_EQ(greedy[0].tokens, ids_of(golden.at("greedy_ids")));
  EXPECT_EQ(greedy[0].text, golden.at("expected_greedy_text").as_string());
  // The log-probs of greedy samples are those of temperature 1.
  expect_near(real.log_probs(greedy[0].tokens), numbers_of(golden.at("greedy_logprobs")), "greedy");
  const auto rows = real.logits(greedy[0].tokens);
  for (const Json& row : golden.at("full_logits").as_array())
    expect_near(rows[static_cast<size_t>(row.at("pos").as_int())], numbers_of(row.at("logits")),
                "logits");
  for (const Json& forced : golden.at("teacher_forced").as_array()) {
    const std::vector<int32_t> ids =
        tokenizer->encode(forced.at("text").as_string(), SpecialTokens::kAdd);
    EXPECT_EQ(ids, ids_of(forced.at("ids")));
    expect_near(real.log_probs(ids), numbers_of(forced.at("token_logprobs")), "forced");
  }
}

void expect_gpt2(const std::string& dir, Device device) {
  const RealModel real(dir, DType::kF32, device);
  for (const Json& expected : real.golden().at("cases").as_array()) {
    std::vector<int32_t> ids = ids_of(expected.at("ids"));
    const auto rows = real.logits(ids);
    for (auto t = static_cast<size_t>(expected.at("prompt_len").as_int()); t < ids.size(); ++t) {
      const auto& row = rows[t - 1];
      EXPECT_EQ(ids[t], std::max_element(row.begin(), row.end()) - row.begin()) << t;
    }
    const Json::Array& first = expected.at("logits_first16").as_array();
    for (size_t t = 0; t < first.size(); ++t) expect_near(rows[t], numbers_of(first[t]), "first");
    expect_near(rows.back(), numbers_of(expected.at("logits_last")), "last");
  }
}

TEST(RealModels, Stories260KIsAsPublished) {
  COHORT_REQUIRE_DATA(data);
  expect_stories(data + "/models/stories260K", {});
}

TEST(CudaRealModels, Stories260KIsAsPublished) {
  COHORT_REQUIRE_GPU(device);
  COHORT_REQUIRE_DATA(data);
  expect_stories(data + "/models/stories260K", device);
}

TEST(RealModels, TinyGpt2IsAsPublished) {
  COHORT_REQUIRE_DATA(data);
  expect_gpt2(data + "/models/tiny_random_gpt2", {});
}

TEST(CudaRealModels, TinyGpt2IsAsPublished) {
  COHORT_REQUIRE_GPU(device);
  COHORT_REQUIRE_DATA(data);
  expect_gpt2(data + "/models/tiny_random_gpt2", device);
}

TEST(CudaRealModels, BFloat16IsNear) {
  COHORT_REQUIRE_GPU(device);
  COHORT_REQUIRE_DATA(data);
  const RealModel real(data + "/models/stories260K", DType::kBF16, device);
  const std::vector<int32_t> ids = ids_of(real.golden().at("greedy_ids"));
  const std::vector<double> expected = numbers_of(real.golden().at("greedy_logprobs")),
                            got = real.log_probs(ids);
  double difference = 0;
  for (size_t i = 0; i < expected.size(); ++i) difference += std::abs(got[i] - expected[i]);
  EXPECT_LE(difference / static_cast<double>(expected.size()), 0.02);
  // The largest logit must agree if its lead over the second exceeds the rounding errors.
  const RealModel exact(data + "/models/stories260K", DType::kF32, device);
  const auto rows = real.logits(ids), exact_rows = exact.logits(ids);
  for (size_t t = 0; t < rows.size(); ++t) {
    std::vector<double> sorted = exact_rows[t];
    std::sort(sorted.rbegin(), sorted.rend());
    if (sorted[0] - sorted[1] <= 0.1) continue;
    const auto first = [](const std::vector<double>& row) {
      return std::max_element(row.begin(), row.end()) - row.begin();
    };
    EXPECT_EQ(first(rows[t]), first(exact_rows[t])) << t;
  }
}

}  // namespace
}  // namespace cohort
