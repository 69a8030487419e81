// The record of one rollout, from the sampler through rewards and advantages to packing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "text/json.h"

namespace cohort {

enum class StopReason {
  kStopToken,
  kStopString,
  kLength,     // max_completion_length
  kContext,    // the model's context is full
  kCancelled,  // SampleCallbacks::on_token
  kTurns,      // max_turns of the environment
  kFailed,     // the environment has failed
};

// True if the completion did not end by itself.
constexpr bool is_truncated(StopReason reason) {
  return reason != StopReason::kStopToken && reason != StopReason::kStopString;
}

// Its name in files and in requests to reward programs.
constexpr const char* stop_reason_name(StopReason reason) {
  constexpr const char* kNames[] = {"stop_token", "stop_string", "length", "context",
                                    "cancelled",  "turns",       "failed"};
  return kNames[static_cast<size_t>(reason)];
}

// A prompt and its sampled completion.
struct Trajectory {
  std::vector<int32_t> tokens;  // prompt and completion, the stop token included
  // Per token, of the size of `tokens`: 1 if the policy has sampled the token, 0 if it is context.
  // There may be several spans of both.
  std::vector<uint8_t> loss_mask;
  // Per token: its log-prob when it was sampled, 0 for context. Doubles, so that the log-probs of
  // an f64 model are kept to the bit: otherwise the first ratio of an update would not be exactly
  // 1.
  std::vector<double> logprobs;
  // Likewise the log-prob under the distribution that the token was drawn from, which sampling
  // options may have changed, and the entropy in nats of the policy's distribution at the
  // temperature (1 for greedy). Both may be empty: unknown.
  std::vector<double> sampling_logprobs, entropies;
  int64_t prompt_length = 0;  // in tokens
  int64_t max_tokens = 0;     // max_completion_length; 0: unknown
  int64_t index = 0;          // within the step, over all ranks
  int64_t group = 0;          // index of its prompt within the step, over all ranks
  // Sum over the sampled tokens of the probability that truncation (top_k, top_p, min_p) excluded.
  double truncated_mass = 0;
  StopReason stop_reason = StopReason::kStopToken;
  // The completion as templates spell it: decoded by SpecialText::kHideControl, without the stop
  // token. Of a dialogue, the last turn.
  std::string text;
  // Dialogues (rl/engine/environment.h): the reward of each turn (NaN, or missing at the end: there
  // is none), their discounted sum (NaN: no turn has one), why the environment has failed (empty:
  // it has not), and the messages after the prompt: turns and observations (null: no dialogue).
  std::vector<double> turn_rewards = {};
  double environment_reward = std::numeric_limits<double>::quiet_NaN();
  std::string environment_error;
  Json transcript;
  bool truncated() const { return is_truncated(stop_reason); }
  // Number of sampled tokens.
  int64_t completion_length() const { return std::ranges::count(loss_mask, 1); }
  // The number of tokens of each turn: of each span of sampled tokens.
  std::vector<int64_t> turn_lengths() const {
    std::vector<int64_t> out;
    for (size_t i = 0; i < loss_mask.size(); ++i) {
      if (loss_mask[i] == 0) continue;
      if (i == 0 || loss_mask[i - 1] == 0) out.push_back(0);
      ++out.back();
    }
    return out;
  }
  int64_t num_turns() const { return std::ssize(turn_lengths()); }
  // The tokens of the last turn, if the last token is sampled.
  std::span<const int32_t> last_turn() const {
    size_t begin = tokens.size();
    while (begin > 0 && loss_mask[begin - 1] == 1) --begin;
    return std::span(tokens).subspan(begin);
  }
  double entropy() const { return std::accumulate(entropies.begin(), entropies.end(), 0.0); }
  void append_sampled(int32_t token, double logprob, double sampling_logprob, double entropy = 0) {
    tokens.push_back(token);
    loss_mask.push_back(1);
    logprobs.push_back(logprob);
    sampling_logprobs.push_back(sampling_logprob);
    entropies.push_back(entropy);
  }
  void append_observed(int32_t token) {
    append_sampled(token, 0, 0);
    loss_mask.back() = 0;
  }
  void append_sampled(int32_t token, double logprob) { append_sampled(token, logprob, logprob); }
};

}  // namespace cohort
