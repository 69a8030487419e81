// Flash-attention over packed sequences: the scores [T, T] are never held. Forward stores O and the
// log-sum-exp; backward recomputes S tile by tile (Dao 2023). In bf16, P is rounded to bf16 where
// it meets V, and O once at the end; attend.cuh says how the CUDA kernels go about it.
//
//   S = scale Q K^T (masked),  lse = log sum exp S,  P = exp(S - lse),  O = dropout(P) V
//
// Canonical order (the same bits in training forward, prefill and decode): keys in chunks of 4,096
// and in tiles of 128 (64 for head dims over 128), both counted from key 0, ascending; one running
// (m, l, O) per query row and chunk; P = exp2(fma(S, c, -m c)), c = scale log2(e), with the running
// max of the chunk that includes this tile; O and l scaled by alpha = exp2(m_old c - m c), each
// product rounded; l as four partial sums by (key mod 8) / 2, joined as (l0 + l1) + (l2 + l3) at
// the chunk's end. Chunks are joined in ascending order, one by one, those in which the row sees no
// key left out: with r = m c, l and O of the chunks so far (T) and of the next (C),
//
//   r = max(rT, rC),  a = exp2(rT - r),  b = exp2(rC - r)
//   l = fma(lC, b, lT a),  O = fma(OC, b, OT a),  lT a and OT a rounded
//
// In the end O (1 / l); lse = fma(r, ln 2, log l). S is summed over head dims and O over keys,
// ascending: one by one, in bf16 on CUDA in steps of 16, each joined as mma.m16n8k16 does. A row's
// bits depend on its own query and keys only. Chunks may be computed side by side, which is what
// decoding of few rows on long contexts needs.
#pragma once

#include <cmath>

#include "kernels/dropout.h"

namespace cohort::kernels {

enum class Mask { kCausal, kFull };

struct AttentionDesc {
  double scale = 0;  // 0: 1 / sqrt(D)
  Mask mask = Mask::kCausal;
  // Sliding window (Beltagy et al. 2020): a causal query sees this many keys, its own the last; 0:
  // all before it. Tiles of keys that no query of a block sees are not visited.
  int64_t window = 0;
  // On the probabilities; element = head * 2^32 + key position in its sequence.
  DropoutSpec dropout;
  // Of packed sequences that go on from the same beginning, [S, 2] i32: where that begins and how
  // many tokens it has. The keys of sequence s are tokens [begin, begin + length), then its own,
  // and its first query is at position `length`. A beginning is the whole of the last sequence
  // before it that has none itself (a length of 0). Undefined: no sequence has one. Causal, without
  // dropout.
  Tensor prefixes;
};

// The scale that `desc` stands for.
inline double softmax_scale(const AttentionDesc& desc, int64_t head_dim) {
  return desc.scale > 0 ? desc.scale : 1 / std::sqrt(static_cast<double>(head_dim));
}

// Calls of forward and backward so far that the portable CUDA kernels took on a GPU that has faster
// ones; the log says why, for each head dim.
int64_t portable_attention_calls();
// Counts one.
void count_portable_attention();

// The largest head dim of the CUDA kernels.
inline constexpr int64_t kMaxCudaHeadDim = 256;

// Keys per tile in the canonical order.
inline int64_t attention_tile(int64_t head_dim) {
  return head_dim > 128 ? 64 : 128;
}

// Keys per chunk in the canonical order, a multiple of every tile.
inline constexpr int64_t kAttentionChunk = 4096;

// Queries, keys and values, and their gradients, may be heads of wider tensors, such as [T, H + 2
// Hkv, D]: the tokens of each lie any distance apart, one for keys and values.
//
// Sequence s is tokens [cu_seqlens[s], cu_seqlens[s + 1]) of the packed tensors; empty ones are
// allowed. H is a multiple of Hkv (grouped-query attention). Any D >= 1 (up to kMaxCudaHeadDim on
// CUDA). Query i sees keys j <= i of its own sequence (causal; with a window only those with j > i
// - window) or all of them (full). On CUDA cu_seqlens is not checked, and a bad one reads and
// writes outside of the tensors; and an infinite or NaN value can reach rows of its own sequence
// and tile that do not see it, by way of 0 times it; no other sequence's.
struct AttentionForward {
  Tensor& o;                 // [T, H, D]
  Tensor& lse;               // [H, T] natural log, accumulate_dtype(q), kept for the backward
  const Tensor& q;           // [T, H, D]
  const Tensor &k, &v;       // [T, Hkv, D]
  const Tensor& cu_seqlens;  // [S + 1] i32, ascending from 0 to T
  AttentionDesc desc = {};
};
void attention_forward(const AttentionForward& args);

// Deterministic for any thread count. Scratch is of the size of a tile per thread, in both
// directions; on CUDA the backward allocates two f32 per token and head, and with dropout 8 bytes
// per token. In bf16 rounded are P and dS as factors of products, and dq, dk, dv once at the end.
// On CUDA, a value that is not finite can reach any gradient of its sequence; no other sequence's.
struct AttentionBackward {
  GradOut dq, dk, dv;  // all wanted
  const Tensor& dout;  // [T, H, D]
  const Tensor &q, &k, &v, &o, &lse, &cu_seqlens;
  AttentionDesc desc = {};
};
void attention_backward(const AttentionBackward& args);

// A paged key/value cache of one layer: k, v: [blocks, block_tokens, Hkv, D]. Token p of sequence s
// lives in block block_table[s, p / block_tokens], slot p % block_tokens. block_table: [S,
// max_blocks] i32, -1 where unused.
struct PagedKV {
  Tensor k, v, block_table;
};

// What lies between the product that makes queries, keys and values and attention_paged(): rotates
// new tokens' queries where they are, and writes their rotated keys and their values to the cache.
// The bits are those of rope() and of copies. A token is idle if its sequence or its position is
// negative: nothing is written for it. Throws before writing if a token's block is missing from the
// block table, or its position from the rotary table; CUDA writes no keys for the former, and NaN
// for the latter.
struct RopeKvWrite {
  PagedKV& cache;
  Tensor& qkv;              // [T, H + 2 Hkv, D]: a token's queries, keys and values
  const Tensor& sequences;  // [T] i32, rows of the block table
  const Tensor& positions;  // [T] i32
  const Tensor& table;      // of rope_table(), [rows, D]; undefined: nothing is rotated
};
void rope_kv_write(const RopeKvWrite& args);

// Prefill and decode in one: query token t of sequence sequences[t] at positions[t] attends to
// cached keys 0..positions[t], or the window's last of them. Bits equal attention_forward's
// (causal, no dropout; any other desc throws) for the same row. Tokens of a sequence that stand
// together share the work of reading its keys. An idle token, whose sequence or position is
// negative, gets zeros. On CUDA, where nothing is checked, so does a token whose sequence is not in
// the table, a position beyond the table counts as its last one, and keys without a block count as
// zeros.
struct AttentionPaged {
  Tensor& o;        // [T, H, D]
  const Tensor& q;  // [T, H, D], the tokens any distance apart
  const PagedKV& cache;
  const Tensor &sequences, &positions;  // [T] i32
  AttentionDesc desc = {};
};
void attention_paged(const AttentionPaged& args);

// A decode step: rope_kv_write() and attention_paged() of one token of each of several sequences,
// with their bits and for idle tokens, too. Tokens that are not idle must be of different
// sequences. Whether the queries in qkv are rotated afterwards is not specified.
struct AttentionDecode {
  Tensor& o;  // [T, H, D]
  PagedKV& cache;
  Tensor& qkv;                          // [T, H + 2 Hkv, D]
  const Tensor &sequences, &positions;  // [T] i32
  const Tensor& table;                  // of rope_table(), [rows, D]; undefined: nothing is rotated
  AttentionDesc desc = {};
};
void attention_decode(const AttentionDecode& args);

namespace cpu {
void attention_forward(const AttentionForward& args);
void attention_backward(const AttentionBackward& args);
void rope_kv_write(const RopeKvWrite& args);
void attention_paged(const AttentionPaged& args);
}  // namespace cpu

namespace cuda {
void attention_forward(const AttentionForward& args);
void attention_backward(const AttentionBackward& args);
void rope_kv_write(const RopeKvWrite& args);
void attention_paged(const AttentionPaged& args);
// In one kernel, if it takes the call; otherwise it does nothing and returns false.
bool attention_decode(const AttentionDecode& args);
}  // namespace cuda

}  // namespace cohort::kernels
