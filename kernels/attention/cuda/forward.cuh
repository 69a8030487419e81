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
  int64_t o_stride, q_stride;  // token strides in elements
  KeyOffsets key_offsets;
  PackedSequence sequence;
  int sequence_index, head_index, kv_head;
  int first, count;      // the rows are those from `first` on of the sequence
  IndexRange<int> keys;  // each row sees some of these keys

  __device__ const T* query(int r) const {
    return r < count ? q + (first + r) * q_stride : nullptr;
  }
  __device__ T* output(int r) const { return o + (first + r) * o_stride; }
  template <class Rule>
  __device__ int end_key(const Rule& rule, int r) const {
    return r >= count ? 1 : bind(rule, r).end_key(sequence.position(first + r), keys.end);
  }
  template <class Rule>
  __device__ typename Rule::Bound bind(const Rule& rule, int) const {
    return rule.bind(sequence_index, head_index, sequence.keys());
  }
  __device__ int position(int r) const { return sequence.position(first + min(r, count - 1)); }
  __device__ IndexRange<int> positions_range() const {
    return {sequence.position(first), sequence.position(first + count)};
  }
  __device__ int64_t key_offset(int j) const { return j < keys.end ? key_offsets(j) : -1; }
  __device__ int head(int) const { return head_index; }
  __device__ int64_t token(int r) const { return sequence.begin + first + r; }
  __device__ void store_lse(int r, float value) const { lse[first + r] = value; }
};

// Strides from a head to the next, in elements.
struct HeadStrides {
  int64_t q, k, v, o;
};

template <class T>
struct ForwardProblem {
  using Rows = PackedRows<T>;
  static constexpr bool kPaged = false;
  const T *q, *k, *v;
  T* o;
  float* lse;
  PackedSequences sequences;
  int64_t tokens, q_stride, kv_stride, o_stride;  // token strides in elements
  HeadStrides head_strides;
  int heads, kv_heads;
  int slots;          // tile slots; see find_tile()
  int heads_at_once;  // see find()
  RowFormat format;
  CombinedScratch combined;

  __device__ int blocks() const { return slots * heads; }
  // Finds the rows of block `block`, at most `per_block`. All blocks of `heads_at_once` heads come
  // before those of the next, so that blocks with the same keys run close in time; within them, the
  // last tiles, which see the most keys, come first. Returns false for an empty slot.
  template <class Rule>
  __device__ __forceinline__ bool find(const Rule& rule, int block, int per_block,
                                       PackedRows<T>& rows) const {
    const int batch_blocks = slots * heads_at_once;
    const int first_head = block / batch_blocks * heads_at_once, in_batch = block % batch_blocks;
    const int width = min(heads_at_once, heads - first_head);
    const int head = first_head + in_batch % width;
    const SequenceTile at = find_tile(sequences, slots - 1 - in_batch / width, per_block);
    const PackedSequence& sequence = at.sequence;
    const int tiles = (sequence.length + per_block - 1) / per_block;
    if (at.tile >= tiles) return false;
    // Blocks of 192 rows do not end at tile boundaries of keys: the first block of a sequence has
    // the fewest rows, since it sees the fewest keys under a causal mask. All blocks begin at a
    // multiple of 64.
    const int missing = per_block % 128 == 0 ? 0 : (tiles * per_block - sequence.length) / 64 * 64;
    const int first = max(0, at.tile * per_block - missing);
    const int end = min(sequence.length, (at.tile + 1) * per_block - missing);
    const int kv_head = head / (heads / kv_heads);
    const int64_t kv_start = sequence.first_token() * kv_stride;
    rows = {
        .q = q + sequence.begin * q_stride + head * head_strides.q,
        .k = k + kv_start + kv_head * head_strides.k,
        .v = v + kv_start + kv_head * head_strides.v,
        .o = o + sequence.begin * o_stride + head * head_strides.o,
        .lse = lse + head * tokens + sequence.begin,
        .o_stride = o_stride,
        .q_stride = q_stride,
        .key_offsets = sequence.offsets(kv_stride),
        .sequence = sequence,
        .sequence_index = at.index,
        .head_index = head,
        .kv_head = kv_head,
        .first = first,
        .count = end - first,
        .keys = rule.bind(at.index, head, sequence.keys())
                    .keys_of({sequence.position(first), sequence.position(end)}, sequence.keys())};
    return true;
  }
};

// `slots` and `combined` depend on the kernel and are still to be set.
template <class T>
ForwardProblem<T> forward_problem(const AttentionForward& args) {
  const int64_t tokens = args.q.dim(0), heads = args.q.dim(1), dim = args.q.dim(2),
                kv_heads = args.k.dim(1);
  const int64_t key_bytes = 2 * tokens * dim * static_cast<int64_t>(sizeof(T));  // and values
  return {.q = pointer<T>(args.q),
          .k = pointer<T>(args.k),
          .v = pointer<T>(args.v),
          .o = pointer<T>(args.o),
          .lse = pointer<float>(args.lse),
          .sequences = PackedSequences(args.cu_seqlens, args.desc),
          .tokens = tokens,
          .q_stride = args.q.strides()[0],
          .kv_stride = args.k.strides()[0],
          .o_stride = args.o.strides()[0],
          .head_strides = {args.q.strides()[1], args.k.strides()[1], args.v.strides()[1],
                           args.o.strides()[1]},
          .heads = static_cast<int>(heads),
          .kv_heads = static_cast<int>(kv_heads),
          .heads_at_once = heads_in_l2(key_bytes, kv_heads) * static_cast<int>(heads / kv_heads),
          .format = {.head_dim = static_cast<int>(dim),
                     .vectorized = vectorized_heads<T>(args.q, args.k, args.v, args.o)}};
}

// bf16 on sm_90 (supports_sm90()), for head dims padded to kDim. One translation unit per kDim.
template <int kDim>
void run_forward_sm90(ForwardProblem<bf16> problem, const AttentionForward& in);
// FP8 attention in bf16 on sm_90; throws for other devices and for head dims that it does not have.
void attention_forward_fp8(const AttentionForward& args);

}  // namespace cohort::kernels::cuda
