// Packed sequences as the kernels of the forward see them: which rows a block works on, and the
// keys that those see.
#pragma once

#include "kernels/attention/cuda/attend.cuh"

namespace cohort::kernels::cuda {

// Rows of one head of one sequence.
template <class T>
struct PackedRows {
  const T* q;      // of the head, at the sequence's first token
  const T *k, *v;  // at its first key's
  T* o;
  float* lse;
  int64_t stride, q_stride, kv_stride;  // elements from token to token: of o, q, and k and v
  int64_t begin;                        // the sequence's first token
  int64_t own_shift;                    // what lies between the prefix and the sequence's own keys
  int prefix;                           // keys of other tokens before its own
  int number;                           // of the head
  int first, count;                     // the rows are tokens begin + first and those after it
  int first_key, keys;                  // they see keys first_key .. keys - 1, each some of them
  int all_keys;                         // of the sequence, those of its prefix among them
  int prefix_begin, kv_head;            // the prefix's first token; the head of keys and values
  bool causal;

  __device__ const T* query(int r) const {
    return r < count ? q + (first + r) * q_stride : nullptr;
  }
  __device__ T* output(int r) const { return o + (first + r) * stride; }
  __device__ int visible(int r) const {
    return r >= count ? 1 : causal ? prefix + first + r + 1 : keys;
  }
  __device__ int64_t key_offset(int j) const {
    return j < keys ? j * kv_stride + (j < prefix ? 0 : own_shift) : -1;
  }
  __device__ int head() const { return number; }
  __device__ int64_t token(int r) const { return begin + first + r; }
  __device__ void store_lse(int r, float value) const { lse[first + r] = value; }
  __device__ int64_t joined_row(int r) const { return r; }
  // The first row among those of all heads.
  __device__ int64_t row0(int64_t tokens) const { return number * tokens + token(0); }
};

template <class T>
struct ForwardProblem {
  const T *q, *k, *v;
  T* o;
  float* lse;
  const int32_t *cu, *prefixes;         // prefixes: null, or [sequences, 2]
  int64_t tokens, q_stride, kv_stride;  // strides: elements from token to token
  int heads, kv_heads, sequences;
  int slots;  // of tiles; see find_tile()
  int run;    // heads that are worked on side by side
  bool causal;
  AttendParams params;
  JoinedChunks joined;  // for all heads and tokens, or null

  // The rows of block number `block`, at most `per_block`. Blocks of the same keys run close to
  // each other in time, and of each sequence those with the most keys first. False for an empty
  // slot.
  __device__ __forceinline__ bool find(int block, int per_block, PackedRows<T>& rows) const {
    const int run_size = slots * run, run_index = block / run_size, in_run = block % run_size;
    const int width = min(run, heads - run_index * run);
    const int head = run_index * run + in_run % width;
    const SequenceTile at = find_tile(cu, sequences, slots - 1 - in_run / width, per_block);
    const int tiles = (at.length + per_block - 1) / per_block;
    if (at.tile >= tiles) return false;
    // Blocks of 192 rows do not end where tiles of keys do: there the first has the fewest rows,
    // which see the fewest keys under a causal mask. All begin at a multiple of 64.
    const int missing = per_block % 128 == 0 ? 0 : (tiles * per_block - at.length) / 64 * 64;
    const int first = max(0, at.tile * per_block - missing);
    const int end = min(at.length, (at.tile + 1) * per_block - missing);
    const int64_t dim = params.head_dim, stride = heads * dim;
    int prefix_begin = at.begin, prefix = 0;
    if (prefixes != nullptr) {
      prefix = prefixes[2 * at.sequence + 1];
      if (prefix > 0) prefix_begin = prefixes[2 * at.sequence];
    }
    const int kv_head = head / (heads / kv_heads);
    const int64_t kv_start = prefix_begin * kv_stride + kv_head * dim;
    const int count = end - first;
    rows = {.q = q + at.begin * q_stride + head * dim,
            .k = k + kv_start,
            .v = v + kv_start,
            .o = o + at.begin * stride + head * dim,
            .lse = lse + head * tokens + at.begin,
            .stride = stride,
            .q_stride = q_stride,
            .kv_stride = kv_stride,
            .begin = at.begin,
            .own_shift = (at.begin - prefix - prefix_begin) * kv_stride,
            .prefix = prefix,
            .number = head,
            .first = first,
            .count = count,
            .first_key = causal ? max(0, prefix + first + 1 - params.window) : 0,
            .keys = causal ? prefix + first + count : at.length,
            .all_keys = prefix + at.length,
            .prefix_begin = prefix_begin,
            .kv_head = kv_head,
            .causal = causal};
    return true;
  }
};

// For head dims padded to kDim, in bf16, rows of 16-byte alignment, without dropout, on sm_90. A
// file for each compiles it.
template <int kDim>
void run_forward_hopper(ForwardProblem<__nv_bfloat16> problem, const AttentionForward& in);

}  // namespace cohort::kernels::cuda
