// Token sampling, each row by its own parameters. Tokens are sampled from modified logits; the
// recorded log-prob and entropy are always those of the model's own logits at the temperature over
// the whole vocabulary, by the same row function as the fused head. The steps are, in this order:
//
//   1. logit bias:          z[v] += every bias of v
//   2. repetition penalty:  z[v] = z[v] > 0 ? z[v] / r : z[v] r    if v is in prompt or completion
//   3. frequency, presence: z[v] -= f count[v] + p [count[v] > 0]  of the completion alone
//   4. temperature:         z /= temperature; the softmax of this is the modified distribution
//   5. top-k:               the k largest logits
//   6. top-p:               of what is left, renormalised, the fewest tokens that reach top_p
//   7. min-p:               of what is left, tokens of at least min_p times the largest probability
//
// Greedy takes the largest logit after step 3. Equal logits count as more probable the lower their
// id. A row whose logits, its own or modified, hold NaN or +inf, or only -inf, throws
// NonFiniteError naming it on the CPU; on CUDA its token is -1 and its other outputs are NaN.
#pragma once

#include <span>

#include "kernels/common.h"
#include "kernels/sampling_params.h"

namespace cohort::kernels {

// Sampling state of S sequences ("slots") on the device that samples. Slots share no elements.
struct SamplingState {
  Tensor params;  // [S, sizeof(SamplingParams)] u8, rows of pack_params()
  // [S, V] i32, see kInPrompt: count_prompt() starts a row, sampling adds its token. Undefined: no
  // row has penalties.
  Tensor counts;
  // [S, B]: i32, and statistics (accumulate_dtype()). A row's first num_bias entries count; those
  // of one id add up in ascending order. Undefined: no row has biases.
  Tensor bias_ids, bias_values;
};

// [S, sizeof(SamplingParams)] u8 on the CPU. Throws Error for parameters out of range.
Tensor pack_params(std::span<const SamplingParams> params);

// Sampled tokens, one per row. All are [n]: tokens i32, the others statistics (accumulate_dtype()).
struct Samples {
  Tensor tokens;
  Tensor logprob;
  Tensor entropy;         // in nats, over the full distribution at the temperature; the head's bits
  Tensor truncated_mass;  // modified probability that steps 5 to 7 remove; exactly 0 without them
  // The token's log-prob under the modified distribution without what is removed; that of the
  // policy, to the bit, without any of the steps 1 to 3 and 5 to 7; 0 for greedy.
  Tensor sampling_logprob;
};

// Samples one token per row by inverting the CDF in ascending id order. Row i uses the state of
// slots[i] and the Philox address (seed, stream, rng_index[i]). A row of slot -1 is idle: none of
// its outputs is written. With counts, no two rows may have the same slot.
//
// The CPU throws Error before it samples if a slot, its parameters or the id of a bias is invalid.
// On CUDA a row with an invalid slot or parameters has the outputs of a row without a distribution,
// and a bias with an invalid id is ignored. There V is at most 2^20, and the probabilities of the
// CDF are rounded (cuda/sampling.cu), so that a random number on the boundary between two tokens
// may give another one than on the CPU.
struct HeadSample {
  Samples& out;
  SamplingState& state;     // its counts are updated
  const Tensor& x;          // hidden states [n, C]
  const Tensor& w;          // head [V, C]
  const Tensor& slots;      // [n] i32
  const Tensor& rng_index;  // [n] i64
  // Rows of logits held at a time; 0: the device's default. No result depends on it.
  int64_t chunk_tokens = 0;
  Tensor bias = {};  // [V]; undefined: none
};
COHORT_KERNEL(void head_sample(const HeadSample& args));

// Samples from computed logits, which are not yet divided by the temperature.
struct SampleLogits {
  Samples& out;
  SamplingState& state;
  const Tensor& logits;     // [n, V], rows with any stride; f32 on CUDA
  const Tensor& slots;      // [n] i32
  const Tensor& rng_index;  // [n] i64
};
COHORT_KERNEL(void sample_logits(const SampleLogits& args));

// Resets the counts of a sequence to zero and sets the prompt bit of its prompt's tokens. An id
// outside the vocabulary throws Error on the CPU and is ignored on CUDA.
struct CountPrompt {
  Tensor& counts;        // [S, V] i32
  const Tensor& tokens;  // [T] i32
  int64_t slot;
};
COHORT_KERNEL(void count_prompt(const CountPrompt& args));

}  // namespace cohort::kernels
