// The language model head fused with log-prob and entropy over chunks of tokens: the logits [T, V]
// are never held whole. Cross-entropy is minus the chosen-token log-prob; the sampler records
// log-probs through the same row function, so sampled and trained log-probs agree to the bit.
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
  // Logits held at a time, rounded up to a multiple of 128; 0: what suits the device. No result
  // depends on it but the rounding of dx and dw on CUDA.
  int64_t chunk_tokens = 0;
};

// A target outside [0, V) throws Error on the CPU and gives NaN on CUDA. Logits are
// accumulate_dtype(x).
struct HeadLogprobForward {
  Tensor &logprob, &entropy, &lse;  // [T], statistics
  const Tensor& x;                  // [T, C]
  const Tensor& w;                  // [V, C]
  const Tensor& targets;            // [T] i32
  HeadDesc desc = {};
};
void head_logprob_forward(const HeadLogprobForward& args);

// Recomputes the logits chunk by chunk.
//   dz[t, v] = (dlogprob[t] ([v = target] - p_v) - dentropy[t] p_v (log p_v + entropy[t]))
//              / temperature
// dz is rounded to x's dtype. On CUDA dx's sum over V may be cut into parts, so its bits depend on
// the chunk; dw is summed over chunks in ascending order.
struct HeadLogprobBackward {
  GradOut dx;  // [T, C]
  GradOut dw;  // [V, C], a weight gradient
  const Tensor& dlogprob;
  const Tensor& dentropy;  // may be undefined: no gradient of the entropy
  const Tensor &x, &w, &targets, &lse, &entropy;
  HeadDesc desc = {};
};
void head_logprob_backward(const HeadLogprobBackward& args);

// Rows of logits held at a time where `wanted` are asked for, as in HeadDesc.
int64_t head_chunk_tokens(int64_t vocab, int64_t wanted, Device device);

// fn(begin, logits) for chunks of at most `rows` tokens in ascending order: logits of tokens from
// `begin` on, x w^T in accumulate_dtype(x). The chunks share their memory.
void for_logit_chunks(const Tensor& x, const Tensor& w, int64_t rows,
                      const std::function<void(int64_t begin, Tensor& logits)>& fn);

// Workspace bytes of forward / backward for the memory estimate; dtype: that of x.
int64_t head_workspace_bytes(int64_t vocab, DType dtype, const HeadDesc& desc, Device device = {});

namespace cpu {
void head_logprob_forward(const HeadLogprobForward& args);
void head_logprob_backward(const HeadLogprobBackward& args);
}  // namespace cpu

namespace cuda {
void head_logprob_forward(const HeadLogprobForward& args);
void head_logprob_backward(const HeadLogprobBackward& args);
}  // namespace cuda

}  // namespace cohort::kernels
