// The record of one rollout, from the sampler through rewards and advantages to packing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace cohort {

enum class StopReason {
  kStopToken,
  kStopString,
  kLength,     // max_completion_length
  kContext,    // the model has no room for more
  kCancelled,  // SampleCallbacks::on_token
};

// A prompt and what was sampled after it.
struct Trajectory {
  std::vector<int32_t> tokens;  // prompt and completion, the stop token included
  // Per token, of the size of `tokens`: 1 where the policy has drawn the token, 0 where it has only
  // seen it. There may be several spans of both.
  std::vector<uint8_t> loss_mask;
  // Per token: its log-prob when it was drawn, 0 where it was not. Doubles, because those of an f64
  // model must be kept to the bit as well: else the first ratio of an update were not exactly 1.
  std::vector<double> logprobs;
  int64_t prompt_length = 0;  // in tokens
  int64_t index = 0;          // within the step, over all ranks
  int64_t group = 0;          // the same of its prompt
  // Sums over the drawn tokens, when each was drawn: the entropy in nats of the full distribution
  // at the temperature (1 for greedy), and the probability that top_k and top_p left out.
  double entropy = 0, cut = 0;
  StopReason stop_reason = StopReason::kStopToken;
  std::string text;  // the completion, decoded; special tokens (end of sequence) give no text
  bool truncated() const {
    return stop_reason != StopReason::kStopToken && stop_reason != StopReason::kStopString;
  }
  // Tokens that were drawn.
  int64_t completion_length() const { return std::count(loss_mask.begin(), loss_mask.end(), 1); }
  void append_drawn(int32_t token, double logprob) {
    tokens.push_back(token);
    loss_mask.push_back(1);
    logprobs.push_back(logprob);
  }
};

}  // namespace cohort
