// Dialogues of the sampler: turns, observations, limits, and that tokens depend on nothing else.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/rng.h"
#include "rl/engine/rollout.h"
#include "tests/rl/tiny_policy.h"
#include "text/chat.h"

namespace cohort {
namespace {

using namespace test;

// Observes tokens that depend on the turn, and replies after a random number of polls, in random
// order.
class ScriptedEnvironment : public Environment {
 public:
  explicit ScriptedEnvironment(uint64_t delays, int64_t last_turn = 1000)
      : delays_(delays, rng_stream(kTestPurpose, 71)), last_turn_(last_turn) {}

  void submit(const Example&, const Trajectory& t, int64_t) override {
    EXPECT_TRUE(t.loss_mask.back() == 1);
    ++submitted_;
    EnvironmentReply reply{.index = t.index, .done = t.num_turns() >= last_turn_};
    const int32_t sum = std::accumulate(t.tokens.begin(), t.tokens.end(), 0);
    if (reply.done)
      reply.reward = sum % 3;
    else
      for (int32_t i = 0; i <= sum % 4; ++i) reply.tokens.push_back((sum + 3 * i) % 10);
    if (!reply.done) reply.messages = Json::Array{make_message("tool", str(sum))};
    if (t.num_turns() == 2) reply.reward = 1;
    waiting_.push_back(std::move(reply));
  }
  std::vector<EnvironmentReply> poll(bool wait) override {
    std::vector<EnvironmentReply> out;
    for (size_t i = waiting_.size(); i-- > 0;) {
      if (delays_.below(4) != 0 && !(wait && out.empty() && i == 0)) continue;
      out.push_back(std::move(waiting_[i]));
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return out;
  }
  void cancel_all() override { waiting_.clear(); }
  int64_t submitted() const { return submitted_; }

 private:
  Rng delays_;
  int64_t last_turn_;
  int64_t submitted_ = 0;
  std::vector<EnvironmentReply> waiting_;
};

// Without layers with the gated delta rule, and with them.
class DialogueTest : public testing::TestWithParam<int64_t> {
 protected:
  DialogueTest() : tokenizer_(make_char_tokenizer("0123456789")) {
    ModelConfig config = tiny_model();
    config.context = 96;
    if (std::exchange(config.delta.full_every, GetParam()) != GetParam()) {
      config.delta.key_heads = 1;
      config.delta.value_heads = 2;
      config.delta.key_dim = config.delta.value_dim = 4;
    }
    config.resolve();
    model_ = std::make_unique<Transformer>(config, DType::kF64, 1);
    for (const char* prompt : {"3", "0123", "98", "55555", "0123012301230123012"})
      prompts_.push_back({.prompt = prompt});
    sampling_.max_completion_length = 40;
    sampling_.stop_tokens = {7};
  }
  std::vector<Trajectory> sample(Environment* environment, const EngineConfig& engine_config = {},
                                 DialogueOptions options = {}) {
    Engine engine(*model_, engine_config);
    options.environment = environment;
    auto out = Sampler(engine, *tokenizer_, sampling_, options).sample(prompts_, 6, {.seed = 2});
    stats_ = engine.stats();
    EXPECT_EQ(stats_.used_blocks, 0);
    return out;
  }
  static void expect_equal(const std::vector<Trajectory>& a, const std::vector<Trajectory>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].tokens, b[i].tokens) << i;
      EXPECT_EQ(a[i].loss_mask, b[i].loss_mask);
      EXPECT_EQ(a[i].logprobs, b[i].logprobs);
      EXPECT_EQ(a[i].entropies, b[i].entropies);
      EXPECT_EQ(a[i].text, b[i].text);
      EXPECT_EQ(a[i].stop_reason, b[i].stop_reason);
      EXPECT_EQ(a[i].transcript.dump(), b[i].transcript.dump());
      EXPECT_TRUE(a[i].environment_reward == b[i].environment_reward ||
                  (std::isnan(a[i].environment_reward) && std::isnan(b[i].environment_reward)));
    }
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Transformer> model_;
  std::vector<Example> prompts_;
  SamplingConfig sampling_;
  EngineStats stats_;
};

// Prompts of 1 to 300 tokens, so that completions fork at every position of a chunk, with
// completions of up to three chunks in a cache that preempts, and dialogues of up to 8 turns.
class DialogueOfChunks : public DialogueTest {
 protected:
  void expect_logprobs_of_the_packed_forward(DType dtype, int64_t stride, int64_t tokens) {
    ModelConfig config = model_->config();
    config.context = 500;
    model_ = std::make_unique<Transformer>(config, dtype, 1);
    int64_t sampled = 0, turns = 0, wrong = 0, preemptions = 0;
    for (const bool plain : {true, false}) {
      prompts_.clear();
      for (int64_t length = 1; length <= 300; length += stride) {
        std::string text;
        for (int64_t i = 0; i < length; ++i) text += static_cast<char>('0' + (i * i + length) % 10);
        prompts_.push_back({.prompt = text});
      }
      sampling_.max_completion_length = 200;
      sampling_.stop_tokens = plain ? std::vector<int64_t>{} : std::vector<int64_t>{7};
      ScriptedEnvironment environment(1);
      const EngineConfig cache{.max_concurrent = 20, .max_cache_tokens = 2000};
      for (const Trajectory& t : sample(plain ? nullptr : &environment, cache)) {
        const std::vector<double> trained = completion_logprobs(*model_, t);
        turns = std::max(turns, t.num_turns());
        for (size_t i = 0; i < t.tokens.size(); ++i) {
          if (t.loss_mask[i] == 0) continue;
          wrong += t.logprobs[i] == trained[i] ? 0 : 1;
          ++sampled;
        }
      }
      preemptions += stats_.preemptions;
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_GT(sampled, tokens);
    EXPECT_EQ(turns, 8);
    EXPECT_GT(preemptions, 5);
  }
};
class DialogueOfChunksSlow : public DialogueOfChunks {};
INSTANTIATE_TEST_SUITE_P(Models, DialogueOfChunks, testing::Values(2));
INSTANTIATE_TEST_SUITE_P(Models, DialogueOfChunksSlow, testing::Values(2));

TEST_P(DialogueOfChunks, LogProbsAreThoseOfThePackedForward) {
  expect_logprobs_of_the_packed_forward(DType::kF32, 19, 10000);
}

TEST_P(DialogueOfChunksSlow, AHundredThousandLogProbsAreThoseOfThePackedForward) {
  for (const DType dtype : {DType::kF32, DType::kF64})
    expect_logprobs_of_the_packed_forward(dtype, 1, 100000);
}

INSTANTIATE_TEST_SUITE_P(Models, DialogueTest, testing::Values(0, 2),
                         [](const auto& info) { return info.param == 0 ? "attention" : "hybrid"; });

TEST_P(DialogueTest, LogProbsAreThoseOfThePackedForward) {
  ScriptedEnvironment environment(1);
  int64_t tokens = 0, turns = 0;
  for (const Trajectory& t : sample(&environment)) {
    ASSERT_EQ(t.tokens.size(), t.loss_mask.size());
    ASSERT_EQ(t.tokens.size(), t.logprobs.size());
    turns = std::max(turns, t.num_turns());
    const std::vector<double> trained = completion_logprobs(*model_, t);
    for (size_t i = 0; i < t.tokens.size(); ++i) {
      EXPECT_EQ(t.logprobs[i], t.loss_mask[i] == 1 ? trained[i] : 0) << i;
      tokens += t.loss_mask[i];
    }
  }
  EXPECT_EQ(turns, 8);
  EXPECT_GT(tokens, 300);
}

TEST_P(DialogueTest, NothingDependsOnReplyOrderOrTheCache) {
  for (const double penalty : {0.0, 0.5}) {
    sampling_.frequency_penalty = penalty;
    sampling_.repetition_penalty = 1 + penalty;
    ScriptedEnvironment first(1);
    const std::vector<Trajectory> expected = sample(&first);
    EXPECT_EQ(stats_.preemptions, 0);
    for (uint64_t delays = 2; delays < 5; ++delays)
      for (const EngineConfig& config :
           {EngineConfig{.max_concurrent = 3}, EngineConfig{.max_cache_tokens = 160},
            EngineConfig{.max_concurrent = 7, .max_cache_tokens = 112}, EngineConfig{}}) {
        ScriptedEnvironment environment(delays);
        expect_equal(sample(&environment, config), expected);
        EXPECT_EQ(environment.submitted(), first.submitted());
      }
  }
}

// With room for all, a prefill computes each prompt once and each observation once.
TEST_P(DialogueTest, ComputesNothingTwice) {
  ScriptedEnvironment environment(1);
  int64_t expected = 0;
  for (const Trajectory& t : sample(&environment)) {
    const int64_t prompt = t.index % 6 == 0 ? t.prompt_length : 0;
    expected += prompt + std::ssize(t.tokens) - t.prompt_length - t.completion_length();
  }
  EXPECT_EQ(stats_.prefilled_tokens, expected);
}

TEST_P(DialogueTest, ADialogueOfOneTurnIsAnOrdinaryCompletion) {
  ScriptedEnvironment environment(1, 1);
  std::vector<Trajectory> plain = sample(nullptr), dialogues = sample(&environment);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_EQ(dialogues[i].transcript.as_array().size(), 1U);
    dialogues[i].transcript = {};
    const bool ended = !plain[i].truncated();
    EXPECT_EQ(std::isnan(dialogues[i].environment_reward), !ended);
    dialogues[i].environment_reward = plain[i].environment_reward;
  }
  expect_equal(dialogues, plain);
}

TEST_P(DialogueTest, LimitsTruncate) {
  const auto count = [&](StopReason reason, const DialogueOptions& options) {
    ScriptedEnvironment environment(1);
    int64_t found = 0;
    for (const Trajectory& t : sample(&environment, {}, options)) {
      EXPECT_LE(t.num_turns(), options.max_turns);
      EXPECT_LE(std::ssize(t.tokens),
                options.max_sequence_length > 0 ? options.max_sequence_length : 96);
      EXPECT_LE(t.completion_length(), sampling_.max_completion_length);
      EXPECT_EQ(t.loss_mask.back(), 1);  // an observation is there for a turn that follows
      found += t.stop_reason == reason;
    }
    return found;
  };
  EXPECT_GT(count(StopReason::kTurns, {.max_turns = 2}), 15);
  EXPECT_GT(count(StopReason::kContext, {.max_turns = 50, .max_sequence_length = 32}), 15);
  sampling_.max_completion_length = 12;
  EXPECT_GT(count(StopReason::kLength, {.max_turns = 50}), 15);
}

TEST_P(DialogueTest, RepliesAreReportedInTheOrderOfTurns) {
  ScriptedEnvironment environment(1);
  std::map<int64_t, std::vector<int32_t>> reported;
  DialogueOptions options;
  options.on_reply = [&](const EnvironmentReply& r) {
    reported[r.index].insert(reported[r.index].end(), r.tokens.begin(), r.tokens.end());
  };
  size_t count = 0;
  for (const Trajectory& t : sample(&environment, {}, options)) {
    std::vector<int32_t> observed, &all = reported[t.index];
    for (size_t i = static_cast<size_t>(t.prompt_length); i < t.tokens.size(); ++i)
      if (t.loss_mask[i] == 0) observed.push_back(t.tokens[i]);
    ASSERT_LE(observed.size(), all.size());  // the last reply need not fit
    EXPECT_TRUE(std::equal(observed.begin(), observed.end(), all.begin())) << t.index;
    count += observed.size();
  }
  EXPECT_GT(count, 0u);
}

TEST_P(DialogueTest, RewardsAreDiscountedByTurn) {
  ScriptedEnvironment environment(1, 3);
  int64_t found = 0;
  for (const Trajectory& t : sample(&environment, {}, {.discount = 0.5})) {
    if (t.num_turns() < 3 || t.truncated()) continue;
    const int32_t sum = std::accumulate(t.tokens.begin(), t.tokens.end(), 0);
    EXPECT_EQ(t.environment_reward, 0.5 + 0.25 * (sum % 3));
    ++found;
  }
  EXPECT_GT(found, 5);
}

// A stop string of the host ends a turn that the device would continue.
TEST_P(DialogueTest, StopStringsEndTurns) {
  sampling_.stop_tokens = {};
  sampling_.stop_strings = {"4", "13"};
  ScriptedEnvironment first(1);
  const std::vector<Trajectory> expected = sample(&first);
  int64_t turns = 0;
  for (const Trajectory& t : expected) {
    turns += t.num_turns();
    const std::vector<double> trained = completion_logprobs(*model_, t);
    for (size_t i = 0; i < t.tokens.size(); ++i)
      EXPECT_EQ(t.logprobs[i], t.loss_mask[i] == 1 ? trained[i] : 0);
    if (t.stop_reason == StopReason::kStopString) {
      EXPECT_TRUE(t.text.ends_with("4") || t.text.ends_with("13"));
    }
  }
  EXPECT_GT(turns, 60);
  for (const EngineConfig& config :
       {EngineConfig{.max_concurrent = 4}, EngineConfig{.max_cache_tokens = 112}}) {
    ScriptedEnvironment environment(9);
    expect_equal(sample(&environment, config), expected);
  }
}

class FailingEnvironment : public ScriptedEnvironment {
 public:
  using ScriptedEnvironment::ScriptedEnvironment;
  std::vector<EnvironmentReply> poll(bool wait) override {
    std::vector<EnvironmentReply> out = ScriptedEnvironment::poll(wait);
    for (EnvironmentReply& reply : out)
      if (reply.index % 2 == 0) reply = {.index = reply.index, .error = "it has ended"};
    return out;
  }
};

TEST_P(DialogueTest, AFailureEndsTheDialogueAlone) {
  FailingEnvironment environment(1);
  ScriptedEnvironment sound(1);
  const std::vector<Trajectory> all = sample(&sound), some = sample(&environment);
  for (size_t i = 0; i < all.size(); ++i) {
    if (i % 2 == 1) {
      EXPECT_EQ(some[i].tokens, all[i].tokens);
    } else if (!some[i].environment_error.empty()) {
      EXPECT_EQ(some[i].environment_error, "it has ended");
      EXPECT_EQ(some[i].stop_reason, StopReason::kFailed);
      EXPECT_EQ(some[i].num_turns(), 1);
    }
  }
}

class ThrowingEnvironment : public ScriptedEnvironment {
 public:
  using ScriptedEnvironment::ScriptedEnvironment;
  std::vector<EnvironmentReply> poll(bool wait) override {
    if (submitted() > 10) throw Error("no more");
    return ScriptedEnvironment::poll(wait);
  }
};

TEST_P(DialogueTest, AnExceptionLeavesNothingBehind) {
  Engine engine(*model_, {});
  ThrowingEnvironment environment(1);
  const Sampler sampler(engine, *tokenizer_, sampling_, {.environment = &environment});
  EXPECT_THROW(sampler.sample(prompts_, 6, {.seed = 2}), Error);
  EXPECT_EQ(engine.stats().used_blocks, 0);
  EXPECT_FALSE(engine.step());
  ScriptedEnvironment sound(1);
  const auto expected = sample(&sound);
  ScriptedEnvironment again(3);
  expect_equal(Sampler(engine, *tokenizer_, sampling_, {.environment = &again})
                   .sample(prompts_, 6, {.seed = 2}),
               expected);
}

}  // namespace
}  // namespace cohort
