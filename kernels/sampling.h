// Drawing tokens. Top-k and top-p only restrict what may be drawn; the recorded log-prob is always
// that of the full distribution at the temperature, by the same row function as the fused head.
// Top-k applies first, top-p to what it leaves, renormalised; equal logits count as more probable
// the lower their id. A row whose logits hold NaN or +inf, or only -inf, throws NonFiniteError
// naming it on the CPU; on CUDA its token is -1 and its other outputs are NaN.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

struct SamplingDesc {
  // 0: greedy (the lowest id among equals); log-probs and entropies are then at temperature 1, and
  // nothing is cut.
  double temperature = 1;
  int64_t top_k = 0;  // 0: off
  double top_p = 1;   // nucleus mass (Holtzman et al. 2020); 1: off
  uint64_t seed = 0;
  // Logits held at a time, 0: what suits the device. No result depends on it.
  int64_t chunk_tokens = 0;
};

// What is drawn, one per row. All are [n]: tokens i32, the others statistics (accumulate_dtype()).
struct Draws {
  Tensor tokens;
  Tensor logprob;  // of the token
  Tensor entropy;  // of the full distribution at the temperature, nats; the head's to the bit
  Tensor cut;      // the probability that top-k and top-p leave out; exactly 0 without them
};

// One draw per row: x: [n, C] hidden states, w: [V, C] head. Row i uses the Philox address
// (seed, rng_stream[i], rng_index[i]), both [n] i64, by inverting the CDF in ascending id order.
// On CUDA V is at most 2^20, and the masses of the CDF are integers (sampling.cu), so that a draw
// on the edge between two tokens may differ from the CPU's.
void head_sample(Draws& out, const Tensor& x, const Tensor& w, const Tensor& rng_stream,
                 const Tensor& rng_index, const SamplingDesc& desc);

// The same from logits [n, V] (already computed; not divided by the temperature); f32 on CUDA.
void sample_logits(Draws& out, const Tensor& logits, const Tensor& rng_stream,
                   const Tensor& rng_index, const SamplingDesc& desc);

}  // namespace cohort::kernels
