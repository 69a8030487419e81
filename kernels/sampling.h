// Drawing tokens. Top-k and top-p only restrict what may be drawn; the recorded log-prob is always
// that of the full distribution at the temperature, by the same row function as the fused head.
// Top-k applies first, top-p to what it leaves, renormalised; equal logits count as more probable
// the lower their id. A row whose logits hold NaN or +inf throws Error naming it.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

struct SamplingDesc {
  double temperature =
      1;              // 0: greedy (the lowest id among equals); log-probs are then at temperature 1
  int64_t top_k = 0;  // 0: off
  double top_p = 1;   // nucleus mass (Holtzman et al. 2020); 1: off
  uint64_t seed = 0;
  int64_t chunk_tokens = 128;  // logits held at a time; no result depends on it
};

// One draw per row: x: [n, C] hidden states, w: [V, C] head. Row i uses the Philox address
// (seed, rng_stream[i], rng_index[i]), both [n] i64, by inverting the CDF in ascending id order.
// tokens: [n] i32, logprob: [n].
void head_sample(Tensor& tokens, Tensor& logprob, const Tensor& x, const Tensor& w,
                 const Tensor& rng_stream, const Tensor& rng_index, const SamplingDesc& desc);

// The same from logits [n, V] (already computed; not divided by the temperature).
void sample_logits(Tensor& tokens, Tensor& logprob, const Tensor& logits, const Tensor& rng_stream,
                   const Tensor& rng_index, const SamplingDesc& desc);

}  // namespace cohort::kernels
