// Drawing tokens, each row by its own parameters. What is drawn comes from modified logits; the
// recorded log-prob and entropy are always those of the model's own logits at the temperature over
// the whole vocabulary, by the same row function as the fused head. In this order:
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
#include "kernels/draw_params.h"

namespace cohort::kernels {

// Of S sequences ("slots"), where they are drawn. Slots do not share elements.
struct SamplingState {
  Tensor params;  // [S, sizeof(DrawParams)] u8, a row of pack_params() each
  // [S, V] i32, see kInPrompt: count_prompt() starts a row, a draw adds its token. Undefined: no
  // row has penalties.
  Tensor counts;
  // [S, B]: i32, and statistics (accumulate_dtype()). A row's first num_bias entries count; those
  // of one id add up in ascending order. Undefined: no row has biases.
  Tensor bias_ids, bias_values;
};

// [S, sizeof(DrawParams)] u8 on the CPU. Throws Error for parameters out of their range.
Tensor pack_params(std::span<const DrawParams> params);

// What is drawn, one per row. All are [n]: tokens i32, the others statistics (accumulate_dtype()).
struct Draws {
  Tensor tokens;
  Tensor logprob;  // of the token
  Tensor entropy;  // of the full distribution at the temperature, nats; the head's to the bit
  Tensor cut;  // what steps 5 to 7 leave out of the modified distribution; exactly 0 without them
};

// One draw per row. Row i draws by the state of slots[i] at the Philox address (seed, stream,
// rng_index[i]), by inverting the CDF in ascending id order. A row of slot -1 is idle: it draws
// nothing and none of its outputs is written. With counts, no two rows have the same slot.
//
// The CPU throws Error before the first draw for a slot, parameters or an id of a bias that cannot
// be. On CUDA a row of such a slot or such parameters has the outputs of a row without a
// distribution, and a bias of no token changes nothing. There V is at most 2^20, and the
// probabilities of the CDF are rounded (cuda/sampling.cu), so that a draw on the edge between two
// tokens may differ from the CPU's.
struct HeadSample {
  Draws& out;
  SamplingState& state;     // its counts grow
  const Tensor& x;          // hidden states [n, C]
  const Tensor& w;          // head [V, C]
  const Tensor& slots;      // [n] i32
  const Tensor& rng_index;  // [n] i64
  int64_t chunk_tokens =
      0;  // logits held at a time, 0: what suits the device; no result depends on it
};
void head_sample(const HeadSample& args);

// The same from logits that are already computed and not divided by the temperature.
struct SampleLogits {
  Draws& out;
  SamplingState& state;
  const Tensor& logits;     // [n, V]; f32 on CUDA
  const Tensor& slots;      // [n] i32
  const Tensor& rng_index;  // [n] i64
};
void sample_logits(const SampleLogits& args);

// Starts the counts of a sequence: zero, but for the bit of its prompt's tokens. An id outside the
// vocabulary throws Error on the CPU and is passed over on CUDA.
struct CountPrompt {
  Tensor& counts;        // [S, V] i32
  const Tensor& tokens;  // [T] i32
  int64_t slot;
};
void count_prompt(const CountPrompt& args);

namespace cpu {
void head_sample(const HeadSample& args);
void sample_logits(const SampleLogits& args);
void count_prompt(const CountPrompt& args);
}  // namespace cpu

namespace cuda {
void head_sample(const HeadSample& args);
void sample_logits(const SampleLogits& args);
void count_prompt(const CountPrompt& args);
}  // namespace cuda

}  // namespace cohort::kernels
