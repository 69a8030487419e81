// Sampling parameters of a row, and the formulas of one logit that the CPU and CUDA share.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace cohort::kernels {

// A tensor of bytes holds those of many rows on the device that samples (pack_params()).
struct SamplingParams {
  // 0: greedy, the largest logit, the lowest id among equals. Nothing is truncated then, and
  // log-probs and entropies are those at temperature 1.
  double temperature = 1;
  int64_t top_k = 0;  // 0: off
  double top_p = 1;   // nucleus (Holtzman et al. 2020): the probability that is kept; 1: off
  double min_p = 0;   // (Nguyen et al. 2024) relative to the largest probability; 0: off
  float repetition_penalty = 1;  // > 0 (Keskar et al. 2019); 1: off
  float presence_penalty = 0, frequency_penalty = 0;
  int32_t num_bias = 0;           // entries of the row's biases in use
  uint64_t seed = 0, stream = 0;  // first parts of a token's Philox address
};
static_assert(sizeof(SamplingParams) == 64);

// A count of SamplingState is how often a token was sampled; this bit marks tokens of the prompt.
inline constexpr int32_t kInPrompt = int32_t{1} << 30;

COHORT_HD inline bool has_penalty(const SamplingParams& p) {
  return p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0;
}
// True if the row samples from other logits than the model's.
COHORT_HD inline bool changes_logits(const SamplingParams& p) {
  return has_penalty(p) || p.num_bias != 0;
}

// Expected value of the first invalid parameter; null if all are valid.
COHORT_HD inline const char* invalid_reason(const SamplingParams& p) {
  const struct {
    bool met;
    const char* expected;
  } rules[] = {
      {p.temperature >= 0 && p.temperature < INFINITY, "a temperature of 0 or more"},
      {p.top_k >= 0, "top_k of 0 or more"},
      {p.top_p > 0 && p.top_p <= 1, "top_p in (0, 1]"},
      {p.min_p >= 0 && p.min_p <= 1, "min_p in [0, 1]"},
      {p.repetition_penalty > 0 && p.repetition_penalty < INFINITY,
       "a finite repetition_penalty above 0"},
      {std::fabs(p.presence_penalty) < INFINITY, "a finite presence_penalty"},
      {std::fabs(p.frequency_penalty) < INFINITY, "a finite frequency_penalty"},
      {p.num_bias >= 0, "num_bias of 0 or more"},
  };
  for (const auto& rule : rules)
    if (!rule.met) return rule.expected;
  return nullptr;
}

// A logit, its bias added, after the penalties of a token with this count.
template <class T>
COHORT_HD inline T penalised(T logit, int32_t count, const SamplingParams& p) {
  if (count == 0) return logit;
  const T repetition = static_cast<T>(p.repetition_penalty);
  const T once = logit > 0 ? logit / repetition : logit * repetition;
  const int32_t sampled = count & (kInPrompt - 1);
  return once - static_cast<T>(p.frequency_penalty) * static_cast<T>(sampled) -
         (sampled > 0 ? static_cast<T>(p.presence_penalty) : T(0));
}

}  // namespace cohort::kernels
