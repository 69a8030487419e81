// Trajectories of the sampler: their text, stop reasons, entropies and truncated masses.
#include "rl/engine/rollout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/rl/tiny_policy.h"
#include "tests/support/byte_fallback.h"

namespace cohort {
namespace {

using namespace test;

class RolloutTest : public testing::Test {
 protected:
  RolloutTest()
      : tokenizer_(make_char_tokenizer("0123456789")), model_(tiny_model(), DType::kF64, 1) {
    for (const char* prompt : {"3", "0123", "98", "55555"})
      prompts_.push_back({.prompt = prompt, .answer = "", .solution = "", .fields = {}});
  }
  // Few concurrent sequences, so that some start while others continue.
  std::vector<Trajectory> sample(SamplingConfig config) const {
    config.max_completion_length = 8;
    Engine engine(model_, {.max_concurrent = 5});
    return Sampler(engine, *tokenizer_, config).sample(prompts_, 6, {.seed = 2});
  }
  TokenLogProbs trained(const Trajectory& c, double temperature) const {
    NoGradGuard no_grad;
    return policy_log_probs(model_, batch_of(c), temperature);
  }
  static PackedBatch batch_of(const Trajectory& c) {
    const TokenSequence sequence{
        .tokens = c.tokens, .loss_mask = std::vector<uint8_t>(c.tokens.size(), 1), .index = 0};
    return pack({&sequence, 1});
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  Transformer model_;
  std::vector<Example> prompts_;
};

// Tokens of text may be stop tokens.
TEST_F(RolloutTest, AStopTokenIsNoPartOfTheText) {
  SamplingConfig config;
  config.stop_tokens = {7, 4};
  int by_text = 0, by_end = 0, truncated = 0;
  for (const Trajectory& c : sample(config)) {
    const auto length = static_cast<size_t>(c.completion_length());
    ASSERT_FALSE(c.tokens.empty());
    const int32_t last = c.tokens.back();
    if (c.truncated()) {
      ++truncated;
      EXPECT_EQ(c.text.size(), length);
    } else if (last == kEos) {
      ++by_end;
      EXPECT_EQ(c.text.size(), length - 1);
    } else {
      ++by_text;
      EXPECT_TRUE(last == 7 || last == 4);
      EXPECT_EQ(c.text.size(), length - 1);
      EXPECT_EQ(c.text.find_first_of("47"), c.text.npos);
    }
  }
  EXPECT_GT(by_text, 2);
  EXPECT_GT(by_end, 0);
  EXPECT_GT(truncated, 0);
}

TEST_F(RolloutTest, EntropyIsTheTrainersSummedOverTheCompletion) {
  for (const double temperature : {1.0, 0.7, 0.0}) {
    SamplingConfig config;
    config.temperature = temperature;
    config.top_k = temperature == 0.7 ? 3 : 0;
    for (const Trajectory& c : sample(config)) {
      const auto entropies =
          trained(c, temperature == 0 ? 1 : temperature).entropy.value().to_vector<double>();
      double sum = 0;
      for (size_t t = static_cast<size_t>(c.prompt_length) - 1; t < entropies.size(); ++t)
        sum += entropies[t];
      EXPECT_EQ(c.entropy(), sum);
      EXPECT_GT(c.entropy(), 0);
      ASSERT_EQ(c.entropies.size(), c.tokens.size());
    }
  }
}

TEST_F(RolloutTest, TruncatedMassIsWhatTopKExcludesSummedOverTheCompletion) {
  SamplingConfig config;
  config.top_k = 3;
  config.temperature = 0.7;
  for (const Trajectory& c : sample(config)) {
    NoGradGuard no_grad;
    const Tensor logits = linear(model_.forward(batch_of(c)), model_.head().weight).value();
    double sum = 0;
    for (int64_t t = c.prompt_length - 1; t < logits.dim(0); ++t) {
      auto z = logits.select(0, t).to_vector<double>();
      std::sort(z.rbegin(), z.rend());
      double kept = 0, all = 0;
      for (size_t v = 0; v < z.size(); ++v) {
        const double mass = std::exp((z[v] - z[0]) / config.temperature);
        all += mass;
        if (v < 3) kept += mass;
      }
      sum += 1 - kept / all;
    }
    EXPECT_NEAR(c.truncated_mass, sum, 1e-12);
    EXPECT_GT(c.truncated_mass, 1e-3);
  }
  for (const int64_t off : {0, -1}) {
    config.top_k = off;
    EXPECT_FALSE(config.restricts());
    for (const Trajectory& c : sample(config)) {
      EXPECT_EQ(c.truncated_mass, 0);
      EXPECT_EQ(c.sampling_logprobs, c.logprobs);
    }
  }
}

TEST_F(RolloutTest, ReportsEachCompletionWhenItEnds) {
  SamplingConfig config;
  config.max_completion_length = 8;
  std::vector<Trajectory> finished;
  Engine engine(model_, {.max_concurrent = 5});
  const Sampler sampler(engine, *tokenizer_, config);
  const auto all = sampler.sample(
      prompts_, 6, {.seed = 2},
      {.on_finished = [&](const Example&, const Trajectory& t) { finished.push_back(t); }});
  ASSERT_EQ(finished.size(), all.size());
  std::vector<int64_t> order;
  for (const Trajectory& t : finished) {
    order.push_back(t.index);
    const Trajectory& returned = all[static_cast<size_t>(t.index)];
    EXPECT_EQ(t.tokens, returned.tokens);
    EXPECT_EQ(t.text, returned.text);
    EXPECT_EQ(t.index / 6, t.group);
  }
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], static_cast<int64_t>(i));
}

TEST_F(RolloutTest, ReportsEachTokenAndEndsCancelledCompletions) {
  SamplingConfig config;
  config.max_completion_length = 8;
  Engine engine(model_, {});
  const Sampler sampler(engine, *tokenizer_, config);
  const auto all = sampler.sample(prompts_, 6, {.seed = 2});
  const auto cancelled = sampler.sample(
      prompts_, 6, {.seed = 2}, {.on_finished = nullptr, .on_token = [](const Trajectory& t) {
                                   return t.index % 2 == 0 || t.completion_length() < 3;
                                 }});
  for (size_t i = 0; i < all.size(); ++i) {
    std::vector<int32_t> wanted = all[i].tokens;
    if (i % 2 == 1 && all[i].completion_length() > 3) {
      wanted.resize(static_cast<size_t>(all[i].prompt_length) + 3);
      EXPECT_EQ(cancelled[i].stop_reason, StopReason::kCancelled);
      EXPECT_TRUE(all[i].text.starts_with(cancelled[i].text));
    } else {
      EXPECT_EQ(cancelled[i].text, all[i].text);
    }
    EXPECT_EQ(cancelled[i].tokens, wanted);
  }
}

TEST_F(RolloutTest, StopStringsEndACompletionWhichKeepsThem) {
  const std::vector<Trajectory> all = sample({});
  SamplingConfig config;
  config.stop_strings = {"77", "4"};
  const std::vector<Trajectory> ended = sample(config);
  int stopped = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const size_t two = all[i].text.find("77"), one = all[i].text.find('4');
    const size_t first = std::min(two == std::string::npos ? two : two + 2,
                                  one == std::string::npos ? one : one + 1);
    const bool has = first != std::string::npos;
    EXPECT_EQ(ended[i].text, all[i].text.substr(0, first));
    EXPECT_EQ(ended[i].stop_reason == StopReason::kStopString, has);
    if (!has) {
      EXPECT_EQ(ended[i].tokens, all[i].tokens);
    }
    EXPECT_FALSE(has && ended[i].truncated());
    stopped += has ? 1 : 0;
  }
  EXPECT_GT(stopped, 3);
  EXPECT_LT(stopped, 24);
}

// Prompts that end in a byte token, with tokenizers that hold back bytes of incomplete characters.
class ByteFallbackRollout : public testing::Test {
 protected:
  ByteFallbackRollout() : tokenizer_(test::byte_fallback_tokenizer()) {
    ModelConfig config = tiny_model();
    config.vocab_size = tokenizer_->vocab_size();
    model_ = std::make_unique<Transformer>(config, DType::kF64, 1);
  }
  // A completion that consists of `token` only.
  Trajectory sample(const std::string& prompt, int32_t token,
                    std::vector<std::string> stop_strings = {}) {
    SamplingConfig config;
    config.max_completion_length = 3;
    config.stop_strings = std::move(stop_strings);
    config.logit_bias = {str(token, ":1000")};
    Engine engine(*model_, {});
    const Example example{.prompt = prompt};
    return Sampler(engine, *tokenizer_, config).sample({&example, 1}, 1, {}).at(0);
  }
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Transformer> model_;
};

TEST_F(ByteFallbackRollout, TextIsWhatFollowsThePrompt) {
  for (int byte = 1; byte < 128; ++byte)
    if (byte != 'a' && byte != 'b' && byte != ' ') {
      const std::string prompt = std::string("a") + static_cast<char>(byte);
      ASSERT_EQ(tokenizer_->encode(prompt).back(), byte_token(static_cast<unsigned>(byte)));
      EXPECT_EQ(sample(prompt, 261).text, "bbb") << byte;
      EXPECT_EQ(sample(prompt, byte_token('\n')).text, "\n\n\n") << byte;
    }
}

TEST_F(ByteFallbackRollout, StopStringsAreJudgedOnTheCompletionAtOnce) {
  // The prompt's line break does not count.
  EXPECT_EQ(sample("a\n", 261, {"\n"}).stop_reason, StopReason::kLength);
  // The completion ends with the token that writes the stop string, without another one after it.
  const Trajectory line = sample("a\n", byte_token('\n'), {"\n"});
  EXPECT_EQ(line.stop_reason, StopReason::kStopString);
  EXPECT_EQ(line.completion_length(), 1);
  EXPECT_EQ(line.text, "\n");
  EXPECT_EQ(sample("a\n", byte_token('\n'), {"\n\n"}).completion_length(), 2);
  EXPECT_EQ(sample("a", 262, {"a a"}).completion_length(), 2);
}

TEST_F(ByteFallbackRollout, StopStringsThatAreSpecialTokensAreRefused) {
  for (const char* text : {"</s>", "b</s>\n"})
    EXPECT_THROW_WITH(sample("a", 260, {text}), InputError,
                      "'</s>' is a special token, which gives no text; hint: stop_tokens: [2]");
}

TEST_F(RolloutTest, ABiasedAwayTokenIsNeverSampledAndStaysInTheLogProbs) {
  SamplingConfig config;
  config.logit_bias = {"3:-inf", "4:5"};
  double fours = 0;
  for (const Trajectory& c : sample(config)) {
    const auto logprobs = trained(c, 1).logprob.value().to_vector<double>();
    for (size_t t = static_cast<size_t>(c.prompt_length); t < c.tokens.size(); ++t) {
      EXPECT_NE(c.tokens[t], 3);
      fours += c.tokens[t] == 4 ? 1 : 0;
      EXPECT_EQ(c.logprobs[t], logprobs[t - 1]);
    }
  }
  EXPECT_GT(fours, 50);
}

TEST_F(RolloutTest, InvalidOptionsAreInputErrors) {
  Engine engine(model_, {});
  const auto refused = [&](const char* text, const auto& change) {
    SamplingConfig config;
    change(config);
    EXPECT_THROW_WITH(Sampler(engine, *tokenizer_, config), InputError, text);
  };
  refused("stop_tokens: 11 is outside", [](auto& c) { c.stop_tokens = {11}; });
  refused("logit_bias: 11 is outside", [](auto& c) { c.logit_bias = {"11:1"}; });
  for (const char* bias :
       {"", "3", "3:", ":3", "3:x", "3:1 ", "-1:2", "3:nan", "3:inf", "99999999999999999999:1"})
    refused("expected ID:BIAS", [&](auto& c) { c.logit_bias = {bias}; });
  refused("stop_strings: an empty text", [](auto& c) { c.stop_strings = {"a", ""}; });
}

TEST_F(RolloutTest, NonFiniteLogitsAreANonFiniteError) {
  Tensor head = model_.head().weight.value();
  head.fill_(NAN);
  EXPECT_THROW_WITH(sample({}), NonFiniteError, "the logits hold NaN or infinity");
}

}  // namespace
}  // namespace cohort
