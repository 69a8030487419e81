// Flash attention over packed sequences: the scores [T, T] are never materialized. The forward
// stores O and the log-sum-exp; the backward recomputes S tile by tile (Dao 2023). In bf16, P is
// rounded to bf16 as an operand of P V, and O once at the end; attention_bf16.cuh describes the
// CUDA kernels.
//
//   S = scale Q K^T (masked),  lse = log sum exp S,  P = exp(S - lse),  O = dropout(P) V
//
// A call may modify the score z of the query at position i and the key at position j of head h.
// The parts of this formula that are in use apply in this order, in f32, to the product of query
// and key before the scale (so that cap, slope and bias are divided by it):
//
//   z = cap tanh(z / cap)                                     soft cap
//   z = z (floor + (1 - floor) exp(-rate |i - j|))            distance factor
//   z = z - slope[h] |i - j|                                  linear bias
//   z = z + bias[h, min(max(j - i, -R), R) + R]               relative bias
//
// A sink adds exp(sink[h]) to the sum of a row's exponentials, as a key with a value of zero does.
//
// Canonical order (bit-identical in training forward, prefill and decode): keys in chunks of 4,096
// and in tiles of 128 (64 for head dims over 128), both counted from key 0, ascending; one running
// (m, l, O) per query row and chunk; P = exp2(fma(S, c, -m c)), c = scale log2(e), with the running
// max of the chunk including this tile; O and l are rescaled by alpha = exp2(m_old c - m c), each
// product rounded; l is kept as four partial sums by (key mod 8) / 2, combined as (l0 + l1) + (l2 +
// l3) at the end of the chunk. Chunks are combined in ascending order, one by one, skipping those
// of which the row sees no key: with r = m c, and l and O of the chunks so far (T) and of the next
// chunk (C),
//
//   r = max(rT, rC),  a = exp2(rT - r),  b = exp2(rC - r)
//   l = fma(lC, b, lT a),  O = fma(OC, b, OT a),  lT a and OT a rounded
//
// At the end O (1 / l); lse = fma(r, ln 2, log l). A sink of t = sink[h] log2(e) first makes that
// r' = max(r, t), a = exp2(r - r'), l' = fma(l, a, exp2(t - r')), and the result O (a (1 / l')).
// A row that sees no key has O = 0 and an lse of -infinity (with a sink: sink[h]). S is accumulated
// over head dims and O over keys, ascending: one element at a time, in bf16 on CUDA in steps of 16,
// each accumulated as mma.m16n8k16 does. The bits of a row depend on its own query and keys only.
// Chunks may be computed in parallel, as decoding of few rows with long contexts does.
//
// FP8 attention (desc.fp8_scales; after FlashAttention-3, Shah et al. 2024): queries, keys and
// values are multiples of e4m3 numbers, r = fma(m, c, -8) replaces m c, so that P is at most 2^8,
// and P is rounded to e4m3 after it has been added to l. On CUDA, S is accumulated as
// wgmma.m64nNk32 does in e4m3, in ascending steps of 32 head dims, for heads of 256 in two sums of
// 128, which are added. P V of a tile of keys is accumulated so from zero, in steps of 32 keys, and
// then O = fma(O, alpha, P V), because those sums keep 13 bits. The order within a step has no
// effect. On the CPU, sums have the dtype of the call. The backward is that of P before rounding.
//
// Int8 attention (q and k in i8; after SageAttention, Zhang et al. 2025): S is the exact sum of
// integers (on the CPU in f32 up to 1,040 head dims), z = S k_scales[j, g] of the key head g of h
// replaces the score, and c = (scale log2(e)) q_scales[i, h] replaces c, each product rounded. The
// rest is as in v's dtype, which on the CPU sums have. There is no backward.
#pragma once

#include <cmath>
#include <optional>
#include <span>
#include <utility>

#include "kernels/dropout.h"

namespace cohort::kernels {

enum class Mask { kCausal, kFull };

// Block-sparse masks (BigBird, Zaheer et al. 2020; strided, Child et al. 2019): a query sees a key
// only if their tile, of kMaskTile queries by kMaskTile keys of a sequence, is visible, and the
// rest of the mask shows the key. Invisible tiles cost nothing. Positions beyond the last tile see,
// and are seen by, nothing.
inline constexpr int64_t kMaskTile = 128;
// The mask whose visible tiles are the pairs (tile of queries, tile of keys), each from 0 to
// `tiles` - 1, in any order; the same for all sequences and heads: [tiles, ceil(tiles / 32)] i32,
// where bit c % 32 of word c / 32 of row r is set if the tile of queries r and keys c is visible.
// Bits beyond the last tile are ignored. Throws for a pair out of range.
Tensor make_tile_mask(std::span<const std::pair<int64_t, int64_t>> visible, int64_t tiles,
                      Device device = {});
// The mask with queries and keys exchanged.
struct TileMaskTranspose {
  Tensor& to;          // [tiles, words] i32
  const Tensor& from;  // as `to`
};
COHORT_KERNEL(void transpose_tile_mask(const TileMaskTranspose& args));

// Multiplies a score by floor + (1 - floor) exp(-rate |i - j|), with floor in [0, 1] and rate >= 0.
struct DistanceFactor {
  double floor = 1, rate = 0;
};

struct AttentionDesc {
  double scale = 0;  // 0: 1 / sqrt(D)
  Mask mask = Mask::kCausal;
  // Sliding window (Beltagy et al. 2020): a query sees this many keys up to its own, which counts;
  // 0: all of them. Key tiles that no query of a block sees are skipped.
  int64_t window = 0;
  // Keys after its own that a query sees under a full mask; -1: all of them.
  int64_t window_right = -1;
  // Applied to the probabilities; element = head * 2^32 + key position in its sequence.
  DropoutSpec dropout;
  // Shared prefixes, [S, 2] i32: first token and length of the prefix of each packed sequence. The
  // keys of sequence s are tokens [begin, begin + length), then its own tokens, and its first query
  // is at position `length`. A prefix is the whole of the closest preceding sequence without a
  // prefix (length 0). Undefined: no sequence has a prefix. Requires a causal mask and no dropout.
  Tensor prefixes;
  // Prefix-LM (Raffel et al. 2020), [S] i32: all queries of a sequence see its first so many keys,
  // and those of a causal mask. Requires a causal mask, no window, shared prefixes or tiles.
  Tensor prefix_lm;
  // Visible tiles, of make_tile_mask(); undefined: all. Requires no shared prefixes.
  Tensor tiles;
  Tensor tiles_by_key;  // the transpose, made by attention_backward()
  // Modifications of scores; see above. 0, or an undefined tensor: none. The tensors have the dtype
  // of the statistics.
  double soft_cap = 0;           // Gemma 2 (Riviere et al. 2024)
  DistanceFactor distance = {};  // ExpoSB's
  Tensor slopes;                 // [H]: ALiBi (Press et al. 2022)
  Tensor bias;                   // [H, 2 R + 1]: T5's, by distance
  Tensor sinks;                  // [H] (Xiao et al. 2024; gpt-oss)
  // FP8 attention: scales of the heads of queries, keys and values, which are multiples of e4m3
  // numbers by them (kv_scales()), [H + 2 Hkv] f32; undefined: none. Requires no dropout.
  Tensor fp8_scales;
  // Int8 attention: positive scales of the rows of queries and keys, or NaN, [T, H] and [T, Hkv]
  // f32: those of quantize() of [T H, D] and [T Hkv, D]. A NaN reaches the rows that see it.
  // Undefined: none. Requires a causal or full mask alone: no window, dropout, prefixes, prefix_lm,
  // tiles, modifications of scores, sinks or fp8_scales.
  Tensor q_scales, k_scales;
};

// Effective softmax scale.
inline double softmax_scale(const AttentionDesc& desc, int64_t head_dim) {
  return desc.scale > 0 ? desc.scale : 1 / std::sqrt(static_cast<double>(head_dim));
}

// Largest head dim of the CUDA kernels.
inline constexpr int64_t kMaxCudaHeadDim = 256;

// Keys per tile in the canonical order.
constexpr int64_t attention_tile(int64_t head_dim) {
  return head_dim > 128 ? 64 : 128;
}

// Keys per chunk in the canonical order, a multiple of every tile.
inline constexpr int64_t kAttentionChunk = 4096;

// Queries, keys and values, their gradients, and the output may be views of wider tensors, such as
// the heads of [T, H + 2 Hkv, D], or of [T, 3, H, D] and [T, H, 3, D]: each has its own strides, of
// which the last is 1. On CUDA the forward copies keys and values that differ in token stride.
//
// Sequence s is tokens [cu_seqlens[s], cu_seqlens[s + 1]) of the packed tensors; empty sequences
// are allowed. H is a multiple of Hkv (grouped-query attention). Any D >= 1 (up to kMaxCudaHeadDim
// on CUDA). Query i sees keys j <= i of its own sequence (causal) or all of them (full), less what
// AttentionDesc hides. On CUDA cu_seqlens is not checked: invalid offsets cause
// out-of-bounds accesses. On CUDA an infinite or NaN value can also reach rows of its own sequence
// and tile that do not see it, as 0 times it, but no other sequence.
struct AttentionForward {
  Tensor& o;                 // [T, H, D]
  Tensor& lse;               // [H, T] natural log, accumulate_dtype(v), kept for the backward
  const Tensor& q;           // [T, H, D]
  const Tensor &k, &v;       // [T, Hkv, D]; q and k may be i8, on CUDA with v in bf16, heads of 64
                             // or 128, and rows aligned to 16 bytes
  const Tensor& cu_seqlens;  // [S + 1] i32, ascending from 0 to T
  AttentionDesc desc = {};
};
COHORT_KERNEL(void attention_forward(const AttentionForward& args));

// Deterministic for any thread count. Scratch memory is one tile per thread, in both directions; on
// CUDA the backward allocates two f32 per token and head, and with dropout 8 bytes per token. In
// bf16, P and dS are rounded as matmul operands, and dq, dk, dv once at the end. On CUDA, a
// non-finite value can reach any gradient of its sequence, but no other sequence.
struct AttentionBackward {
  GradOut dq, dk, dv;                              // all required
  const Tensor& dout;                              // [T, H, D]
  const Tensor &q, &k, &v, &o, &lse, &cu_seqlens;  // as in the forward
  AttentionDesc desc = {};
  // Gradients of desc.bias and desc.sinks, summed over tokens in a fixed order.
  std::optional<GradOut> dbias = {}, dsinks = {};
};
COHORT_KERNEL(void attention_backward(const AttentionBackward& args));

// Paged key/value cache of one layer: k, v: [blocks, block_tokens, Hkv, D]. Token p of sequence s
// is in block block_table[s, p / block_tokens], slot p % block_tokens. block_table: [S, max_blocks]
// i32, -1 where unused.
//
// With scales, rounded keys and values are multiples of e4m3 numbers (E4m3Grid). In bf16 on CUDA
// the cache then holds bytes, k and v have DType::kE4M3 and block_tokens is a multiple of 16; the
// bytes are not in the order above: page g of 16 tokens, g = slot / 16, holds 16 D bytes for each
// key head. The keys are [2][D / 16][8 keys][16 dims], the values [D / 8][8 dims][16 keys], and 16
// adjacent bytes are in the order 8 0 9 1 10 2 ... 15 7. So the 8 x 16 bytes of a core matrix of
// wgmma are contiguous, and a 32-bit word holds both registers of a lane's operand B of
// mma.m16n8k16. Other dtypes keep the order above and their own type.
struct PagedKV {
  Tensor k, v, block_table;
  // kv_scales(): of keys and values, [2 Hkv] f32, or for FP8 attention, which rounds queries too,
  // [H + 2 Hkv]; undefined: nothing is rounded.
  Tensor scales = {};
};

// Step between the QKV projection and attention_paged(): rotates the queries of new tokens in
// place, and writes their rotated keys and their values to the cache; heads that have a scale are
// rounded.
// Bit-identical to rope() and copies. A token is idle if its sequence or its position is negative:
// nothing is written for it. Throws before writing if the block of a token is missing from the
// block table, or its position from the rotary table; CUDA skips the keys in the former case and
// writes NaN in the latter.
struct RopeKvWrite {
  PagedKV& cache;
  Tensor& qkv;              // [T, H + 2 Hkv, D]: queries, keys and values
  const Tensor& sequences;  // [T] i32, block table rows
  const Tensor& positions;  // [T] i32
  const Tensor& table;      // rope_table(), of any width; undefined: no rotation
};
COHORT_KERNEL(void rope_kv_write(const RopeKvWrite& args));

// Prefill and decode: query token t of sequence sequences[t] at positions[t] attends to cached keys
// 0..positions[t], less what desc hides. Bit-identical to attention_forward() (causal, no dropout,
// no prefix-LM; any other desc throws) for the same row. Adjacent tokens of a sequence share the
// reads of its keys. An idle token, whose sequence or position is negative, gets zeros. CUDA checks
// nothing: a token whose sequence is not in the table gets zeros too, a position beyond the table
// counts as its last one, and keys without a block count as zeros.
struct AttentionPaged {
  Tensor& o;        // [T, H, D], any token stride
  const Tensor& q;  // as o
  const PagedKV& cache;
  const Tensor &sequences, &positions;  // [T] i32
  AttentionDesc desc = {};
};
COHORT_KERNEL(void attention_paged(const AttentionPaged& args));

// Decode step: rope_kv_write() and attention_paged() for one token of each of several sequences,
// bit-identical to the two calls, including idle tokens. Non-idle tokens must belong to different
// sequences. It is unspecified whether the queries in qkv are rotated afterwards.
struct AttentionDecode {
  Tensor& o;  // [T, H, D], any token stride
  PagedKV& cache;
  Tensor& qkv;                          // [T, H + 2 Hkv, D]
  const Tensor &sequences, &positions;  // [T] i32
  const Tensor& table;                  // rope_table(), of any width; undefined: no rotation
  AttentionDesc desc = {};
};
void attention_decode(const AttentionDecode& args);

namespace cuda {
// Runs as one kernel if the call is supported; otherwise does nothing and returns false.
bool attention_decode(const AttentionDecode& args);
}  // namespace cuda

}  // namespace cohort::kernels
