// Tokenizers in which <think> is a special token: completions have the text that the chat template
// spells, in training, in its stop strings, and where solutions are judged before it.
#include <gtest/gtest.h>

#include <cmath>

#include "rl/engine/rollout.h"
#include "rl/reward.h"
#include "tests/rl/tiny_policy.h"

namespace cohort {
namespace {

using namespace test;

// Ids: 'a' to 'z' and '<', '/', '>', then the special tokens in this order.
constexpr const char* kSpecial[] = {"<think>", "</think>", "<|eot|>",  "<|end|>",
                                    "<|bos|>", "<|pad|>",  "<|tool|>", "<|unk|>"};
constexpr int32_t kThink = 29, kThinkEnd = 30, kEndOfTurn = 31, kEnd = 32, kBos = 33, kPad = 34;

std::unique_ptr<Tokenizer> think_tokenizer() {
  Json::Object vocab;
  for (const char c : std::string("abcdefghijklmnopqrstuvwxyz</>"))
    vocab.emplace_back(std::string(1, c), static_cast<int64_t>(vocab.size()));
  Json::Array added;
  for (const char* text : kSpecial)
    added.push_back(Json()
                        .set("id", static_cast<int64_t>(vocab.size() + added.size()))
                        .set("content", text)
                        .set("special", true));
  Json json;
  json.set("added_tokens", std::move(added))
      .set("decoder", Json().set("type", "ByteLevel"))
      .set("model",
           Json().set("type", "BPE").set("vocab", std::move(vocab)).set("merges", Json::Array{}));
  const Json config = Json()
                          .set("bos_token", "<|bos|>")
                          .set("eos_token", Json().set("content", "<|end|>"))
                          .set("pad_token", "<|pad|>")
                          .set("unk_token", "<|unk|>");
  return make_tokenizer({{"tokenizer.json", json.dump()}, {"tokenizer_config.json", config.dump()}},
                        "test");
}

double score(const RewardConfig& config, const Example& example, const Trajectory& trajectory) {
  const RewardSet::Scores scores =
      RewardSet({config}, nullptr).score({&example, 1}, {&trajectory, 1});
  return scores.total[0];
}

class SpecialTokensOfAnswers : public testing::Test {
 protected:
  SpecialTokensOfAnswers() : tokenizer_(think_tokenizer()) {
    ModelConfig config = tiny_model();
    config.vocab_size = tokenizer_->vocab_size();
    model_ = std::make_unique<Transformer>(config, DType::kF64, 1);
    sampling_.max_completion_length = 3;
    sampling_.stop_tokens = {kEndOfTurn};
  }
  // A completion that consists of `token` only.
  Trajectory sample(int32_t token, std::vector<std::string> stop_strings = {}) {
    SamplingConfig config = sampling_;
    config.stop_strings = std::move(stop_strings);
    config.logit_bias = {str(token, ":1000")};
    Engine engine(*model_, {});
    const Example example{.prompt = "<|bos|>ab<think>"};
    return Sampler(engine, *tokenizer_, config).sample({&example, 1}, 1, {}).at(0);
  }
  Trajectory written(const std::string& text) const {
    return as_sampled(text, *tokenizer_, sampling_);
  }
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Transformer> model_;
  SamplingConfig sampling_;
};

TEST_F(SpecialTokensOfAnswers, AreSpelledUnlessTheyControlTheText) {
  EXPECT_EQ(sample(kThink).text, "<think><think><think>");
  EXPECT_EQ(sample(kThinkEnd).text, "</think></think></think>");
  EXPECT_EQ(sample(35).text, "<|tool|><|tool|><|tool|>");
  for (const int32_t id : {kBos, kPad, 36}) {
    EXPECT_EQ(sample(id).text, "") << id;
    EXPECT_EQ(sample(id).completion_length(), 3);
  }
  for (const int32_t id : {kEnd, kEndOfTurn}) {
    const Trajectory ended = sample(id);
    EXPECT_EQ(ended.text, "") << id;
    EXPECT_EQ(ended.stop_reason, StopReason::kStopToken);
    EXPECT_EQ(ended.tokens.back(), id);
  }
}

TEST_F(SpecialTokensOfAnswers, MayBeStopStrings) {
  const Trajectory ended = sample(kThinkEnd, {"</think>"});
  EXPECT_EQ(ended.stop_reason, StopReason::kStopString);
  EXPECT_EQ(ended.text, "</think>");
  EXPECT_THROW_WITH(sample(kThinkEnd, {"a<|end|>"}), InputError,
                    "'<|end|>' is a special token, which gives no text; hint: stop_tokens: [32]");
}

// Whatever tells a right form from a wrong one: patterns, searches and the numbers of both.
TEST_F(SpecialTokensOfAnswers, AreSeenByRewards) {
  const Example example{.prompt = "ab", .answer = "<think>"};
  for (const RewardConfig& config :
       {RewardConfig{.name = "format", .pattern = "(<think>)+"}, RewardConfig{.name = "contains"},
        RewardConfig{.name = "exact_match", .pattern = "^<think>"}}) {
    EXPECT_EQ(score(config, example, sample(kThink)), 1) << config.name;
    EXPECT_EQ(score(config, example, sample(kThinkEnd)), 0) << config.name;
  }
}

TEST_F(SpecialTokensOfAnswers, AreSeenByCallbacks) {
  std::string seen;
  const Callback callback = [&](std::span<const Json> requests) {
    seen = requests[0].at("completion").as_string();
    return std::vector<Json>(requests.size(), 1.0);
  };
  const RewardConfig config{.name = "mine",
                            .program = {.callback = std::make_shared<const Callback>(callback)}};
  EXPECT_EQ(score(config, {.prompt = "ab"}, sample(kThink)), 1);
  EXPECT_EQ(seen, "<think><think><think>");
}

// Solutions are judged as completions of their tokens would be.
TEST_F(SpecialTokensOfAnswers, AreSeenInSolutions) {
  const Trajectory gold = written("<think>abc</think>xyz<|end|>");
  EXPECT_EQ(gold.text, "<think>abc</think>xyz");
  EXPECT_EQ(gold.tokens, tokenizer_->encode("<think>abc</think>xyz<|end|>"));
  EXPECT_EQ(score({.name = "format", .pattern = "<think>.*</think>xyz"}, {.prompt = "ab"}, gold),
            1);
  EXPECT_EQ(score({.name = "think_format"}, {.prompt = "ab"}, gold), 1);
  EXPECT_EQ(written("xyz<|eot|>abc").text, "xyz");  // the end of a turn ends the completion
  EXPECT_EQ(written("x<|pad|>y<|bos|>z").text, "xyz");
  const Trajectory unknown = as_sampled("x y", *make_char_tokenizer("xy"), sampling_);
  EXPECT_EQ(unknown.text, "x y");  // a blank has no token
  EXPECT_TRUE(unknown.tokens.empty());
  sampling_.stop_strings = {"</think>", "q"};
  EXPECT_EQ(written("<think>a</think>b").text, "<think>a</think>");
  EXPECT_EQ(written("xqy").tokens.size(), 2);
}

// Templates may end the prompt with <think>: then the completion has the rest of the block.
TEST(ThinkFormat, KnowsPromptsThatOpenTheBlock) {
  const RewardFn reward = make_reward({.name = "think_format"}, nullptr);
  const auto value = [&](const std::string& prompt, const std::string& completion) {
    const Example example{.prompt = prompt};
    return reward({example, completion});
  };
  for (const char* prompt : {"<|im_start|>assistant\n<think>\n", "ab<think>", "<think> \n\n"}) {
    EXPECT_EQ(value(prompt, "a</think>b"), 1) << prompt;
    EXPECT_EQ(value(prompt, "</think>b"), 1) << prompt;
    EXPECT_EQ(value(prompt, "a</think>"), 1) << prompt;
    EXPECT_EQ(value(prompt, "<think>a</think>b"), 0) << prompt;
    EXPECT_EQ(value(prompt, "a</think>b<think>"), 0) << prompt;
    EXPECT_EQ(value(prompt, "ab"), 0) << prompt;
    EXPECT_EQ(value(prompt, ""), 0) << prompt;
  }
  for (const char* prompt : {"assistant\n", "<think></think>\n\n", "Write <think> first.", ""}) {
    EXPECT_EQ(value(prompt, "<think>a</think>b"), 1) << prompt;
    EXPECT_EQ(value(prompt, "a</think>b"), 0) << prompt;
    EXPECT_EQ(value(prompt, "<think><think>a</think>b"), 0) << prompt;
  }
}

}  // namespace
}  // namespace cohort
