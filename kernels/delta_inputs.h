// Inputs of the gated delta rule (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464; Qwen3.5):
// queries, keys and values from a short causal convolution, decays g and write strengths beta.
//
//   c[t] = silu(w[0] x[t - 3] + w[1] x[t - 2] + w[2] x[t - 1] + w[3] x[t])   per channel
//   q, k = c / sqrt(sum(c^2) + 1e-6)  per head,  v = c
//   g    = -exp(a_log) softplus(a + dt_bias),  softplus(z) = z for z > 20, else log1p(exp(z))
//   beta = sigmoid(b)
//
// The channels of x are those of q, k and v, in this order: C = 2 Hk D + Hv D. A convolution is an
// fma chain from +0 with the oldest input first; inputs before the start of a sequence are +0. The
// sum of squares is in ascending order, and q and k are c (1 / sqrt(...)). The bits of a row depend
// on the weights and on its own four inputs, b and a only, so that a NaN reaches no other sequence
// than those that continue its own.
//
// On CUDA, heads have 64 or 128 dims, sums of a head and of weight gradients have another fixed
// order, in bf16 c is rounded before its norm, and input values are not checked: invalid offsets
// cause out-of-bounds accesses, and tokens of a state that is not below N are idle. In mode
// kAccumulate a sum is added to the gradient as one.
#pragma once

#include "kernels/gated_delta/gated_delta.h"

namespace cohort::kernels {

// Their sources. x, b and a may be columns of wider matrices.
struct DeltaSources {
  Tensor x;               // [T, C]
  Tensor w;               // [C, 4]
  Tensor b, a;            // [T, Hv]
  Tensor a_log, dt_bias;  // [Hv], accumulate_dtype(x)
};
// Packed sequences: sequence s is tokens [cu_seqlens[s], cu_seqlens[s + 1]); empty ones are
// allowed. Shared prefixes are those of AttentionDesc::prefixes: the inputs before the first token
// of a sequence are the last ones of its prefix. Other cu_seqlens or prefixes than those
// throw Error before anything is written.
struct DeltaInputs {
  DeltaTensors& out;  // q, k and v of x's dtype
  const DeltaSources& in;
  const Tensor& cu_seqlens;  // [S + 1] i32, ascending from 0 to T
  Tensor prefixes = {};      // [S, 2] i32: first token and length (0: none), or undefined
};
COHORT_KERNEL(void delta_inputs(const DeltaInputs& args));

// Inputs that are kept of a sequence in progress.
inline constexpr int64_t kDeltaRing = 8;
// Prefill and decode: token t is the one at positions[t] of the sequence whose earlier inputs are
// in ring states[t], that of position p at p % 8 (kDeltaRing); positions below 0 are not read.
// Tokens of a state are adjacent and ascending. The call writes its tokens to the ring. The bits
// are those of the packed call for any division of a sequence into calls. The next call may
// continue at up to five positions before the end of this one. A token is idle if its state or
// position is negative: it gives zeros, and neither reads nor writes a ring. Throws Error before
// anything is written for a state that is not below N, or that has tokens elsewhere in the call.
struct DeltaInputsCached {
  Tensor& ring;       // [N, 8, C], of x's dtype; ring[i] has any stride
  DeltaTensors& out;  // as in DeltaInputs, also below
  const DeltaSources& in;
  const Tensor &states, &positions;  // [T] i32
  bool is_decode = false;            // no state has two tokens, which CUDA computes faster
};
COHORT_KERNEL(void delta_inputs_cached(const DeltaInputsCached& args));

// Gradients of delta_inputs(); any of them may be undefined. Each is a sum over tokens in ascending
// order, so that an input in a prefix gets the terms of its own sequence first and then those of
// the sequences that continue it. In mode kAccumulate the terms are added one by one. Throws Error
// before anything is written where delta_inputs() does.
struct DeltaInputsBackward {
  GradOut dx;                // [T, C]; may be columns of a wider matrix; must not overlap x
  GradOut dw;                // [C, 4], accumulate_dtype(x)
  GradOut db, da;            // [T, Hv]; may be columns of a wider matrix
  GradOut da_log, ddt_bias;  // [Hv], accumulate_dtype(x)
  const DeltaTensors& dout;  // the gradients of q, k, v, g and beta
  const DeltaSources& in;
  const Tensor& cu_seqlens;
  Tensor prefixes = {};
};
COHORT_KERNEL(void delta_inputs_backward(const DeltaInputsBackward& args));

}  // namespace cohort::kernels
