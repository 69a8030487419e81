// The parts of the language model head: logits z[t, :] = x[t, :] w^T + bias by the row-independent
// matmul over chunks of tokens, so that [T, V] is never materialised as a whole, and row ops on
// them. The loop over the chunks is head_logprob_forward() in autograd/ops_loss.cpp.
// The sampler records log-probs by the same row function, so sampled and trained log-probs agree to
// the bit.
#pragma once

#include <functional>

#include "kernels/common.h"
#include "kernels/policy_loss.h"

namespace cohort::kernels {

struct HeadDesc {
  double temperature = 1;  // > 0
  // Rows of logits held at a time, rounded up to a multiple of 128; 0: the device's default. No
  // result depends on it, except for the rounding of dx and dw on CUDA, where bf16 gradients of
  // logits are collected up to head_gradient_tokens() rows.
  int64_t chunk_tokens = 0;
};

// Tokens per GEMM for dx and dw on CUDA in bf16, for vocabularies of up to 131,072.
inline constexpr int64_t kHeadGradientTokens = 4096;

// The tokens [begin, begin + n) of a call, where n is the number of rows of its logits.
//   lse[t] = log sum exp(z[t, :] / temperature),  logprob[t] = z[t, target] / temperature - lse[t]
//   entropy[t] = lse[t] - sum_v p_v z[t, v] / temperature
// A target outside [0, V) throws Error on the CPU and gives NaN on CUDA. Logits and statistics have
// the same dtype.
struct HeadStatistics {
  Tensor &logprob, &entropy, &lse;  // [T]
  const Tensor& logits;             // [n, V], rows with any stride
  const Tensor& targets;            // [T] i32
  int64_t begin = 0;
  double temperature = 1;
  // Output [n, V] bf16, undefined unless has_unit_gradients(): ([v = target] - p_v) / temperature.
  // Rows with any stride. In rows with a finite lse, up to three elements after V may become zero.
  Tensor unit_gradients = {};
};
COHORT_KERNEL(void head_statistics(const HeadStatistics& args));

// True if head_statistics() computes unit gradients of for_logit_chunks() with the head `w` in the
// pass that reads the logits.
bool has_unit_gradients(const Tensor& w);
namespace cuda {
bool has_unit_gradients(const Tensor& w);
}  // namespace cuda

// The divergence of tokens [begin, begin + n) from a teacher, see kernels/divergence.h. Equal
// logits give exactly 0, and no gradient.
struct HeadDivergence {
  Tensor &divergence, &rows;              // [T]; [T, 5]: DivergenceRow, for the gradients
  const Tensor &logits, &teacher_logits;  // [n, V], rows with any stride
  const Tensor &lse, &teacher_lse;        // [T], as head_statistics() has them
  int64_t begin = 0;
  double temperature = 1;
  DivergenceDesc desc = {};
};
COHORT_KERNEL(void head_divergence(const HeadDivergence& args));

// Gradients of the logits of tokens [begin, begin + n) from those of log-probs, entropies and
// divergences.
//   dz[t, v] = (dlogprob[t] ([v = target] - p_v) - dentropy[t] p_v (log p_v + entropy[t]))
//              / temperature + ddivergence[t] dD[t]/dz[t, v]
struct HeadLogitGradients {
  Tensor& dz;            // [n, V], rows with any stride; bf16, or the logits themselves
  const Tensor& logits;  // [n, V], rows with any stride
  const Tensor &dlogprob, &dentropy, &lse, &entropy;  // [T]; dentropy may be undefined: zero
  const Tensor& targets;                              // [T] i32
  int64_t begin = 0;
  double temperature = 1;
  // The call of head_divergence() for these tokens, and the gradient [T]; null: no divergence.
  const HeadDivergence* divergence = nullptr;
  Tensor ddivergence = {};
};
COHORT_KERNEL(void head_logit_gradients(const HeadLogitGradients& args));

// y[t, :] (+)= factor[t] x[t, :], rounded once; CUDA only: y is bf16, x bf16 or f32, factor f32.
struct ScaleRows {
  Tensor& y;             // [n, C]
  const Tensor& x;       // [n, C]
  const Tensor& factor;  // [n]
  Grad mode = Grad::kOverwrite;
};
void scale_rows(const ScaleRows& args);
namespace cuda {
void scale_rows(const ScaleRows& args);
}  // namespace cuda

// Rows of logits held at a time for HeadDesc::chunk_tokens = `wanted`.
int64_t head_chunk_tokens(int64_t vocab, int64_t wanted, Device device);

// Tokens whose bf16 gradients of `columns` logits are held at a time, for logits in chunks of
// `rows`: all, or a multiple of `rows` up to kHeadGradientTokens and 1 GiB, at least one.
int64_t head_gradient_tokens(int64_t tokens, int64_t columns, int64_t rows);

// Rows in memory of a head's matrix for `vocab` tokens. On CUDA matmuls over a vocabulary that is
// not a multiple of 8 are several times slower, so the matrix has padding up to a multiple of 64;
// the CPU gains nothing.
int64_t head_rows(int64_t vocab, Device device);

struct Logits {
  const Tensor& x;   // [T, C]
  const Tensor& w;   // [V, C]
  Tensor bias = {};  // [V]; undefined: none
};
// Calls fn(begin, logits) for chunks of at most `rows` tokens in ascending order with the logits
// x w^T + bias [n, V] of tokens from `begin` on, in accumulate_dtype(x), where the product is
// added to the bias. All chunks use the same memory. The padding of w's rows and the bias
// (Tensor::with_padding()), which is zero, becomes that of the logits' columns: no result depends
// on it, and zeros there stand for its gradients.
void for_logit_chunks(const Logits& args, int64_t rows,
                      const std::function<void(int64_t begin, Tensor& logits)>& fn);

}  // namespace cohort::kernels
