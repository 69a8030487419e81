// The language model head fused with log-prob and entropy over chunks of tokens: the logits [T, V]
// are never materialised as a whole. Cross-entropy is minus the log-prob of the target; the sampler
// records log-probs by the same row function, so sampled and trained log-probs agree to the bit.
//
//   z[t, :] = x[t, :] w^T / temperature
//   lse[t] = log sum exp z[t, :],  logprob[t] = z[t, target] - lse[t]
//   entropy[t] = lse[t] - sum_v p_v z[t, v]
#pragma once

#include <functional>

#include "kernels/common.h"

namespace cohort::kernels {

struct HeadDesc {
  double temperature = 1;  // > 0
  // Rows of logits held at a time, rounded up to a multiple of 128; 0: the device's default. No
  // result depends on it, except for the rounding of dx and dw on CUDA, where bf16 gradients of
  // logits are collected up to kHeadGradientTokens rows.
  int64_t chunk_tokens = 0;
};

// Tokens per GEMM for dx and dw on CUDA in bf16.
inline constexpr int64_t kHeadGradientTokens = 4096;

// Gradients of x and w for a loss that is a sum over tokens, from the same logits as the log-probs.
struct HeadLossGradients {
  GradOut dx;              // [T, C]
  GradOut dw;              // [V, C], a weight gradient
  const Tensor& dlogprob;  // [T], statistics
  // Sets dlogprob of tokens [begin, begin + count); called in ascending order, when their log-probs
  // are known. May be empty if dlogprob is set already.
  std::function<void(int64_t begin, int64_t count)> set_dlogprob;
};

// A target outside [0, V) throws Error on the CPU and gives NaN on CUDA. Logits have
// accumulate_dtype(x).
struct HeadLogprobForward {
  Tensor &logprob, &entropy, &lse;  // [T], statistics
  const Tensor& x;                  // [T, C]
  const Tensor& w;                  // [V, C]
  const Tensor& targets;            // [T] i32
  HeadDesc desc = {};
  const HeadLossGradients* gradients = nullptr;
};
COHORT_KERNEL(void head_logprob_forward(const HeadLogprobForward& args));

// Recomputes the logits chunk by chunk. HeadLossGradients follow the same formula, without
// dentropy.
//   dz[t, v] = (dlogprob[t] ([v = target] - p_v) - dentropy[t] p_v (log p_v + entropy[t]))
//              / temperature
// dz is rounded to x's dtype; with HeadLossGradients in bf16, dz / dlogprob and dlogprob x may be
// rounded instead (cuda/head.cu). On CUDA dx may use split-K over V, so its bits depend on the
// chunk; dw is summed over chunks in ascending order.
struct HeadLogprobBackward {
  GradOut dx;  // [T, C]
  GradOut dw;  // [V, C], a weight gradient
  const Tensor& dlogprob;
  const Tensor& dentropy;  // may be undefined: zero
  const Tensor &x, &w, &targets, &lse, &entropy;
  HeadDesc desc = {};
};
COHORT_KERNEL(void head_logprob_backward(const HeadLogprobBackward& args));

// Rows of logits held at a time for HeadDesc::chunk_tokens = `wanted`.
int64_t head_chunk_tokens(int64_t vocab, int64_t wanted, Device device);

// Tokens whose bf16 gradients of logits are held at a time, for logits in chunks of `rows`: a
// multiple of `rows`, or all.
int64_t head_gradient_tokens(int64_t tokens, int64_t rows);

// Calls fn(begin, logits) for chunks of at most `rows` tokens in ascending order with the logits
// x w^T of tokens from `begin` on, in accumulate_dtype(x). All chunks use the same memory.
void for_logit_chunks(const Tensor& x, const Tensor& w, int64_t rows,
                      const std::function<void(int64_t begin, Tensor& logits)>& fn);

// Workspace bytes of a pass with gradients over `tokens`, for the memory estimate; `dtype` is x's.
int64_t head_workspace_bytes(int64_t tokens, int64_t vocab, DType dtype, const HeadDesc& desc,
                             Device device = {});

}  // namespace cohort::kernels
