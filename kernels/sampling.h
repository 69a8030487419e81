// Drawing tokens. Top-k and top-p only restrict what may be drawn; the recorded log-prob is always
// that of the full distribution at the temperature, by the same row function as the fused head.
// Top-k applies first, top-p to what it leaves, renormalised; equal logits count as more probable
// the lower their id. A row whose logits hold NaN or +inf, or only -inf, throws Error naming it on
// the CPU; on CUDA its token is -1 and its log-prob NaN.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

struct SamplingDesc {
  // 0: greedy (the lowest id among equals); log-probs are then at temperature 1.
  double temperature = 1;
  int64_t top_k = 0;  // 0: off
  double top_p = 1;   // nucleus mass (Holtzman et al. 2020); 1: off
  uint64_t seed = 0;
  // Logits held at a time, 0: what suits the device. No result depends on it.
  int64_t chunk_tokens = 0;
};

// One draw per row: x: [n, C] hidden states, w: [V, C] head. Row i uses the Philox address
// (seed, rng_stream[i], rng_index[i]), both [n] i64, by inverting the CDF in ascending id order.
// tokens: [n] i32, logprob: [n], a statistic. On CUDA V is at most 2^20, and the masses of the CDF
// are integers (sampling.cu), so that a draw on the edge between two tokens may differ from the
// CPU's.
void head_sample(Tensor& tokens, Tensor& logprob, const Tensor& x, const Tensor& w,
                 const Tensor& rng_stream, const Tensor& rng_index, const SamplingDesc& desc);

// The same from logits [n, V] (already computed; not divided by the temperature); f32 on CUDA.
void sample_logits(Tensor& tokens, Tensor& logprob, const Tensor& logits, const Tensor& rng_stream,
                   const Tensor& rng_index, const SamplingDesc& desc);

}  // namespace cohort::kernels
