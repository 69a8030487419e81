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
  double top_p = 1;   // nucleus (Holtzman et al. 2020): the probability that is kept; 1: off
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

// One draw per row. Row i uses the Philox address (seed, rng_stream[i], rng_index[i]), by inverting
// the CDF in ascending id order. On CUDA V is at most 2^20, and the unnormalised probabilities of
// the CDF are integers (cuda/sampling.cu), so that a draw on the edge between two tokens may differ
// from the CPU's.
struct HeadSample {
  Draws& out;
  const Tensor& x;                       // hidden states [n, C]
  const Tensor& w;                       // head [V, C]
  const Tensor &rng_stream, &rng_index;  // [n] i64
  SamplingDesc desc = {};
};
void head_sample(const HeadSample& args);

// The same from logits that are already computed and not divided by the temperature.
struct SampleLogits {
  Draws& out;
  const Tensor& logits;                  // [n, V]; f32 on CUDA
  const Tensor &rng_stream, &rng_index;  // [n] i64
  SamplingDesc desc = {};
};
void sample_logits(const SampleLogits& args);

namespace cpu {
void head_sample(const HeadSample& args);
void sample_logits(const SampleLogits& args);
}  // namespace cpu

namespace cuda {
void head_sample(const HeadSample& args);
void sample_logits(const SampleLogits& args);
}  // namespace cuda

}  // namespace cohort::kernels
