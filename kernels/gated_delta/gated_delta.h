// The gated delta rule (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464) over packed sequences
// and over states of sequences in progress. A head has a matrix S [D, D], from zero, and for the
// token at position t
//
//   S_t = exp(g_t) S_(t-1) + k_t u_t^T,  u_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t)
//   o_t = scale S_t^T q_t
//
// Canonical order (bit-identical in training, prefill and decode): chunks of 64 positions, counted
// from token 0 of a sequence. With S the matrix at the start of the chunk of t, sums over i of this
// chunk, and G_t the sum of log2(e) g_i for i <= t, added in ascending order from 0,
//
//   u_t = beta_t (v_t - 2^G_t S^T k_t - sum_(i<t) 2^(G_t - G_i) (k_t k_i) u_i)
//   o_t = scale (2^G_t S^T q_t + sum_(i<=t) 2^(G_t - G_i) (q_t k_i) u_i)
//
// where terms are added one by one in ascending i, each by a fused multiply-add, and u is as
// stored, rounded: its error is then corrected by the rule itself. log2(e) g is rounded before it
// is added; products of rows, S^T k and S^T q are fma chains from 0 over ascending head dims. When
// the first token of the next chunk comes, the chunk is folded into its matrix:
//
//   S' = 2^G_63 S + D,  D = sum_i k_i (2^(G_63 - G_i) u_i)^T
//
// So the state of a sequence is a matrix and the open rows (k, u, G) of a chunk, which are only
// appended to, and a row's bits depend on the tokens of its sequence up to its own. g is finite; as
// G counts from the start of a chunk, a g of -1e4 costs its later rows in f32 1e-3 of their values.
//
// On CUDA, heads have 64 or 128 dims, tensors are aligned to 16 bytes, powers of 2 are within two
// ulp, and 0 below 2^-126, and a sum of o_t that is -0 becomes 0. f32 needs a GPU with
// kDeltaF32SharedMemory. In bf16, arithmetic is in f32 but for operands of tensor cores: the S of
// S^T k and S^T q is its high half (master_parts() of kernels/adamw.h), and the factors of u_i in
// o_t and the rows 2^(G_63 - G_i) u_i are rounded. Products of rows, S^T k, S^T q, the sum over i
// of o_t and D are accumulated as mma.m16n8k16 does, in ascending steps of 16, with factors of 0 in
// the rest of the last step of o_t; u_t is as above, rounded once. Input values are not checked:
// invalid offsets cause out-of-bounds accesses, and tokens of a state that is not below N are idle.
// A value that is not finite can reach all rows of its chunk and those after it, but no other
// sequence. The backward's operands of tensor cores are rounded; dbeta is 0 where beta is, and
// loses precision where beta is below 2^-63.
#pragma once

#include <cmath>

#include "kernels/common.h"

namespace cohort::kernels {

// Positions of a chunk.
inline constexpr int64_t kDeltaChunk = 64;

struct GatedDeltaDesc {
  double scale = 0;  // 0: 1 / sqrt(D)
  // [S, 2] i32, shared prefixes as in AttentionDesc; undefined: no sequence has one.
  Tensor prefixes = {};
};
inline constexpr bool is_gpu_delta_dim(int64_t head_dim) {
  return head_dim == 64 || head_dim == 128;
}
// Shared memory per block that f32 needs on a GPU; bf16 fits all supported ones.
inline constexpr int64_t kDeltaF32SharedMemory = 160 << 10;
inline double delta_scale(const GatedDeltaDesc& desc, int64_t head_dim) {
  return desc.scale > 0 ? desc.scale : 1 / std::sqrt(static_cast<double>(head_dim));
}

// Hv is a positive multiple of Hk: head h of v reads head h / (Hv / Hk) of q and k.
struct DeltaTensors {
  Tensor q, k;     // [T, Hk, D]
  Tensor v;        // [T, Hv, D]
  Tensor g, beta;  // [T, Hv] in accumulate_dtype(v)
};
struct GatedDelta {
  Tensor &o, &u;  // [T, Hv, D]; u is kept for the backward
  const DeltaTensors& in;
  const Tensor& cu_seqlens;  // [S + 1] i32, ascending from 0 to T
  const GatedDeltaDesc& desc = {};
};
COHORT_KERNEL(void gated_delta(const GatedDelta& args));

// Deterministic for any number of threads. A prefix gets the gradients of the sequences that
// continue it in their order. Gradients must not overlap inputs: on CUDA dv is written before the
// last reads of dout, u, q and k.
struct GatedDeltaBackward {
  GradOut dq, dk, dv, dg, dbeta;  // all required
  const Tensor& dout;             // [T, Hv, D]
  const DeltaTensors& in;         // as in the forward
  const Tensor &u, &cu_seqlens;   // as in the forward
  const GatedDeltaDesc& desc = {};
};
COHORT_KERNEL(void gated_delta_backward(const GatedDeltaBackward& args));

// States of N sequences: the matrix at the start of the chunk of the latest token, and the rows of
// that chunk, at position % 64. Rows of later positions are ignored, so that any token of this
// chunk may become the latest one again; to those before it a sequence cannot go back, but to
// position 0.
struct DeltaState {
  Tensor s;  // [N, Hv, D, D] in accumulate_dtype(k); with k in bf16, the bytes of a head's matrix
             // are two planes [D, D] of 16 bits, high and low halves as in master_parts()
  Tensor k, u;   // [N, 64, Hk, D], [N, 64, Hv, D]
  Tensor decay;  // G: [N, 64, Hv] in accumulate_dtype(k)
};
// Prefill and decode: token t is the one at positions[t] of state states[t], whose state has all
// tokens before. Tokens of a state are adjacent and ascending. A token is idle if its state or
// position is negative: it gets zeros, and changes nothing. The state at position 0 need not be
// initialised. Bit-identical to gated_delta().
struct GatedDeltaCached {
  Tensor& o;          // [T, Hv, D]
  DeltaState& state;  // advanced by the tokens
  const DeltaTensors& in;
  const Tensor &states, &positions;  // [T] i32
  double scale = 0;
  bool is_decode = false;  // no state has two tokens, which CUDA computes faster
};
COHORT_KERNEL(void gated_delta_cached(const GatedDeltaCached& args));

}  // namespace cohort::kernels
