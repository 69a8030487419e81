// Stick-breaking attention (Tan et al. 2025): a query breaks a stick of length 1 from its closest
// key on; each key takes the share beta of what the later ones have left, and the rest of the stick
// is given to no value. It needs no positions, and no maximum of the scores. Query i sees the keys
// j < i of its sequence, not its own one, so that the first token of a sequence gets zeros:
//
//   z_ij = scale q_i . k_j,  beta_ij = sigmoid(z_ij)
//   A_ij = beta_ij prod_{j < k < i} (1 - beta_ik),  o_i = sum_{j < i} A_ij v_j
//
// Canonical order (bit-identical in training forward, prefill and decode): with x = z log2(e) and
// log2(1 - beta) = -L(x), L(x) = max(x, 0) + log2(1 + 2^-|x|), keys in tiles of 64 counted from key
// 0, descending, and
//
//   A = exp2(min(x, 0) - log2(1 + 2^-|x|) - (E + C))
//
// where C is the sum of L over the later tiles and E that over the later keys of the tile. A tile
// is summed as groups of 8 keys, four pairs each: p0 .. p3 are the sums of the pairs, the total of
// a group is (p0 + p1) + (p2 + p3), and the totals of later groups are added in descending order.
// To this come the later pairs of the key's own group, which are p1 + (p2 + p3), p2 + p3, p3 or
// nothing, and then the other key of its pair if that is later. Keys that a row does not see have L
// = 0 and A = 0, and tiles of which it sees no key leave it unchanged. O is accumulated over the
// keys of a tile ascending, and over tiles descending, one element at a time, in bf16 on CUDA in
// steps of 16 as mma.m16n8k16 does, with A rounded to bf16. The bits of a row depend on its own
// query and keys only.
#pragma once

#include "kernels/attention/attention.h"

namespace cohort::kernels {

struct StickBreakingDesc {
  double scale = 0;  // 0: 1 / sqrt(D)
  Tensor prefixes;   // [S, 2] i32, shared prefixes as in AttentionDesc; undefined: none
};

// Sequences and head dims are those of AttentionForward. Every tensor may have a token stride of
// its own, except that keys and values share one; the heads of a token are contiguous.
struct StickBreakingForward {
  Tensor& o;                 // [T, H, D], any token stride
  const Tensor& q;           // [T, H, D]
  const Tensor &k, &v;       // [T, Hkv, D]
  const Tensor& cu_seqlens;  // [S + 1] i32, ascending from 0 to T
  StickBreakingDesc desc = {};
};
COHORT_KERNEL(void stick_breaking_forward(const StickBreakingForward& args));

// Recomputes the scores; needs no result of the forward. With dA = dO V^T and w = A dA,
//
//   dz_ik = (1 - beta_ik) w_ik - beta_ik sum_{j < k} w_ij
//   dQ = scale dz K,  dK = scale dz^T Q,  dV = A^T dO
//
// The sum is over the earlier keys: as a difference of dO . O and the later keys, it would have the
// error of the whole sum at every key that the stick does not reach. So a first sweep over the
// tiles of a row is descending and keeps C of each, and a second one is ascending. Deterministic
// for any thread count. Scratch memory on CUDA: C and the sum of w before each tile, in f32, about
// T^2 / 64 values per query head, for as many key heads at a time as take at most 64 MB, or for
// one. In bf16, A and dz are rounded as matmul operands, and dq, dk, dv once at the end.
struct StickBreakingBackward {
  GradOut dq, dk, dv;                    // all required
  const Tensor& dout;                    // [T, H, D]
  const Tensor &q, &k, &v, &cu_seqlens;  // as in the forward
  StickBreakingDesc desc = {};
};
COHORT_KERNEL(void stick_breaking_backward(const StickBreakingBackward& args));

// Prefill and decode over keys and values that rope_kv_write() has written, which rotates nothing
// without a table: query token t of sequence sequences[t] at positions[t] attends to cached keys 0
// .. positions[t] - 1. Bit-identical to stick_breaking_forward() for the same row; a desc with
// prefixes throws. Idle tokens, and on CUDA invalid ones, are treated as in AttentionPaged.
struct StickBreakingPaged {
  Tensor& o;        // [T, H, D], any token stride
  const Tensor& q;  // as o
  const PagedKV& cache;
  const Tensor &sequences, &positions;  // [T] i32
  StickBreakingDesc desc = {};
};
COHORT_KERNEL(void stick_breaking_paged(const StickBreakingPaged& args));

}  // namespace cohort::kernels
