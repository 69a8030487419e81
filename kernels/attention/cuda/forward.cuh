// Packed sequences for the forward kernels: the rows of a block, and the keys that they see.
#pragma once

#include "kernels/attention/cuda/attention_bf16.cuh"

namespace cohort::kernels::cuda {

// Rows of one head of one sequence.
template <class T>
struct PackedRows {
  const T* q;      // first token of the sequence, this head
  const T *k, *v;  // first key, this head
  T* o;
  float* lse;
  int64_t stride, q_stride, kv_stride;  // token strides of o, q, and k and v, in elements
  int64_t begin;                        // first token of the sequence
  int64_t suffix_shift;                 // extra offset of keys that follow the prefix, in elements
  int prefix;                           // number of prefix keys, which precede the own keys
  int head_index;
  int first, count;           // the rows are tokens [begin + first, begin + first + count)
  int first_key, keys;        // each row sees some of the keys [first_key, keys)
  int all_keys;               // number of keys of the sequence, with its prefix
  int prefix_begin, kv_head;  // first token of the prefix; head of keys and values
  bool causal;

  __device__ const T* query(int r) const {
    return r < count ? q + (first + r) * q_stride : nullptr;
  }
  __device__ T* output(int r) const { return o + (first + r) * stride; }
  __device__ int visible(int r) const {
    return r >= count ? 1 : causal ? prefix + first + r + 1 : keys;
  }
  __device__ int64_t key_offset(int j) const {
    return j < keys ? j * kv_stride + (j < prefix ? 0 : suffix_shift) : -1;
  }
  __device__ int head() const { return head_index; }
  __device__ int64_t token(int r) const { return begin + first + r; }
  __device__ void store_lse(int r, float value) const { lse[first + r] = value; }
  __device__ int64_t combined_row(int r) const { return r; }
  // Index of the first row over all heads.
  __device__ int64_t row0(int64_t tokens) const { return head_index * tokens + token(0); }
};

template <class T>
struct ForwardProblem {
  const T *q, *k, *v;
  T* o;
  float* lse;
  const int32_t *cu, *prefixes;         // prefixes: null or [sequences, 2]
  int64_t tokens, q_stride, kv_stride;  // token strides in elements
  int heads, kv_heads, sequences;
  int slots;          // tile slots; see find_tile()
  int heads_at_once;  // see find()
  bool causal;
  AttentionParams params;
  CombinedChunks combined;  // for all heads and tokens, or null

  // Finds the rows of block `block`, at most `per_block`. All blocks of `heads_at_once` heads come
  // before those of the next, so that blocks with the same keys run close in time; within them, the
  // last tiles, which see the most keys, come first. Returns false for an empty slot.
  __device__ __forceinline__ bool find(int block, int per_block, PackedRows<T>& rows) const {
    const int batch_blocks = slots * heads_at_once;
    const int first_head = block / batch_blocks * heads_at_once, in_batch = block % batch_blocks;
    const int width = min(heads_at_once, heads - first_head);
    const int head = first_head + in_batch % width;
    const SequenceTile at = find_tile(cu, sequences, slots - 1 - in_batch / width, per_block);
    const int tiles = (at.length + per_block - 1) / per_block;
    if (at.tile >= tiles) return false;
    // Blocks of 192 rows do not end at tile boundaries of keys: the first block of a sequence has
    // the fewest rows, since it sees the fewest keys under a causal mask. All blocks begin at a
    // multiple of 64.
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
            .suffix_shift = (at.begin - prefix - prefix_begin) * kv_stride,
            .prefix = prefix,
            .head_index = head,
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

// bf16 on sm_90, for head dims padded to kDim: 16-byte aligned rows, without dropout. One
// translation unit per kDim.
template <int kDim>
void run_forward_sm90(ForwardProblem<bf16> problem, const AttentionForward& in);

}  // namespace cohort::kernels::cuda
