// Shared by the two passes of the attention backward, in both precisions. backward.cu has an
// overview.
#pragma once

#include "kernels/attention/cuda/attention.cuh"

namespace cohort::kernels::cuda {

// Pass selects the gradients of a kernel. A block owns a tile of rows of one sequence and head, and
// streams the rows of the other side in ascending steps:
//   kKeys     owns keys (K, V) of a key head, streams queries (Q, dO) of the heads of its group one
//             after the other, or of a slice of them; dK and dV
//   kQueries  owns queries (Q, dO) of a head, streams keys (K, V); dQ

// Rows of one head: row r is token r of a sequence, or key r.
template <class T>
struct HeadRows {
  T* data;
  KeyOffsets offset;

  __device__ T* row(int r) const { return data + offset(r); }
};

// A tensor [T, heads, head_dim] with these strides of tokens and heads, in elements.
template <class T>
struct Heads {
  T* data = nullptr;
  int64_t stride = 0, head_stride = 0;

  // Rows of a head, from token `begin` on.
  __device__ HeadRows<T> rows(int begin, int head) const {
    return {data + begin * stride + head * head_stride, {stride}};
  }
  // The keys of a sequence.
  __device__ HeadRows<T> keys(const PackedSequence& sequence, int head) const {
    HeadRows<T> of_head = rows(sequence.first_token(), head);
    of_head.offset = sequence.offsets(stride);
    return of_head;
  }
};

template <class T, class AnyTensor>
auto heads_of(AnyTensor& t) {
  return Heads<std::remove_pointer_t<decltype(pointer<T>(t))>>{pointer<T>(t), t.strides()[0],
                                                               t.strides()[1]};
}

// q, dout, o, dq: [T, heads, head_dim]; k, v, dk, dv: [T, kv_heads, head_dim].
template <class T>
struct BackwardArgs {
  Heads<T> dq, dk, dv;
  Heads<const T> dout, q, k, v, o;
  const float* lse;  // [heads, T]
  PackedSequences sequences;
  float *lse_log2, *delta;  // [heads, T]: lse log2(e), dO . O; null on sm_90
  uint64_t* streams;        // [T]: Philox stream per query, or null
  // [head_slices, T, kv_heads, head_dim]: dk and dv per slice; null for a single slice.
  float *dk_slices, *dv_slices;
  int64_t tokens;
  int heads, kv_heads, head_dim;
  int head_slices;  // slices of the heads of a group; each has its own block per tile of keys
  bool accumulate_q, accumulate_k, accumulate_v;
  bool vectorized;  // 16-byte accesses to every row

  __host__ __device__ int group() const { return heads / kv_heads; }
  // First head of a slice, relative to its group.
  __device__ int slice_begin(int slice) const { return slice * group() / head_slices; }
};

// Compute dk and dv, then dq.
template <int kDim>  // the padded head dim
void run_backward_bf16(const BackwardArgs<bf16>& args, const AttentionDesc& desc, Device device);
void run_backward_f32(const BackwardArgs<float>& args, const AttentionDesc& desc, Device device);
// Overloads for sm_90 (supports_sm90()); wide: over 128 columns.
template <int kDim>
void run_backward_sm90(const BackwardArgs<bf16>& args, const AttentionBackward& in);
template <int kDim>
void run_backward_wide(const BackwardArgs<bf16>& args, const AttentionBackward& in);
// Computes the gradients of the bias and the sinks that `in` wants.
template <class T>
void run_term_gradients(const BackwardArgs<T>& args, const AttentionBackward& in);

// The first step from `step` on with streamed rows that see own keys, or that own queries see, by
// the tile mask.
template <Pass kPass, class Rule>
__device__ __forceinline__ int next_step(const Rule& rule, const IndexRange<int>& own, int step,
                                         int end, int per_step) {
  if constexpr (!Rule::kMasks) return step;
  const int row = step * per_step, end_row = end * per_step;
  if constexpr (Rule::kMasks)
    step = (kPass == Pass::kKeys ? rule.next_query(own, row, end_row)
                                 : rule.next_key(own, row, end_row)) /
           per_step;
  return min(step, end);
}

// Streamed rows of a sequence: its queries, or its keys.
struct BackwardStream {
  int begin, length;      // the queries' tokens [begin, begin + length), or `length` keys
  int position;           // position of the first query, where own key 0 is at 0
  IndexRange<int> steps;  // tiles of rows that see own keys, or that own queries see; maybe none
};

// Work of a block.
struct BackwardSlice {
  PackedSequence sequence;
  int index;           // the number of the sequence
  int own;             // first own row, within the sequence; at least its length if empty
  int head;            // head of the own rows
  int head_slice = 0;  // slice of the streamed heads
  BackwardStream stream;
};

// Number of blocks per tile.
template <Pass kPass, class T>
__host__ __device__ __forceinline__ int tile_blocks(const BackwardArgs<T>& args) {
  return kPass == Pass::kKeys ? args.kv_heads * args.head_slices : args.heads;
}

// The sequences; the compiler knows that those of a plain rule have no prefix.
template <class Args>
__device__ __forceinline__ PackedSequences sequences_of(const Args& args) {
  PackedSequences sequences = args.sequences;
  if (args.rule.kPlain) sequences.prefixes = nullptr;
  return sequences;
}

// Adjacent blocks have the same tile in different heads; all tiles of `at_once` heads come before
// those of the next. Under a causal mask the first keys and the last queries have the most work, so
// they come first; with kLastKeysFirst the last keys come first. All lanes of a warp must call it.
template <Pass kPass, bool kLastKeysFirst = false, class Args>
__device__ __forceinline__ BackwardSlice find_slice(const Args& args, int block, int per_tile,
                                                    int per_step, int at_once) {
  const int blocks = tile_blocks<kPass>(args);
  const int slots = static_cast<int>(gridDim.x) / blocks;
  const int first_head = block / (slots * at_once) * at_once, in_batch = block % (slots * at_once);
  const int heads = min(at_once, blocks - first_head);
  const int order = in_batch / heads;
  const int slot = kPass == Pass::kKeys && !kLastKeysFirst ? order : slots - 1 - order;
  const SequenceTile tile = find_tile(sequences_of(args), slot, per_tile);
  const PackedSequence& sequence = tile.sequence;
  BackwardSlice slice{.sequence = sequence,
                      .index = tile.index,
                      .own = tile.tile * per_tile,
                      .head = first_head + in_batch % heads,
                      .stream = {.begin = sequence.begin, .position = 0}};
  BackwardStream& stream = slice.stream;
  const IndexRange<int> own{slice.own, slice.own + per_tile};
  const auto& rule = args.rule.bind(slice.index, 0, sequence.keys());
  if (kPass == Pass::kKeys) {
    slice.head_slice = slice.head % args.head_slices;
    slice.head /= args.head_slices;
    stream.length = sequence.length;
    stream.steps = rule.positions_of(own, stream.length).tiles(per_step);
  } else {
    stream.length = sequence.keys();
    IndexRange<int> keys =
        rule.keys_of({sequence.position(own.first), sequence.position(own.end)}, stream.length);
    keys.end = min(keys.end, stream.length);
    stream.steps = keys.tiles(per_step);
  }
  stream.steps.first =
      next_step<kPass>(args.rule, own, stream.steps.first, stream.steps.end, per_step);
  return slice;
}

// Advances to the queries of the next sequence whose prefix is the slice's sequence, and which sees
// some of its keys. Returns false if there is none. Such sequences directly follow their prefix.
template <class Args>
__device__ __forceinline__ bool next_stream(const Args& args, const BackwardSlice& slice,
                                            int& index, BackwardStream& stream, int per_tile,
                                            int per_step) {
  const PackedSequences sequences = sequences_of(args);
  if (sequences.prefixes == nullptr || slice.sequence.prefix > 0) return false;
  while (++index < sequences.count && sequences.has_prefix(index)) {
    const PackedSequence next = sequences[index];
    const IndexRange<int> queries =
        next.rows(args.rule.positions_of({slice.own, slice.own + per_tile}, next.keys()));
    stream = {.begin = next.begin,
              .length = next.length,
              .position = next.position(0),
              .steps = queries.tiles(per_step)};
    if (stream.steps.end > 0) return true;
  }
  return false;
}

// Number of blocks of a pass.
template <Pass kPass, class T>
unsigned backward_blocks(const BackwardArgs<T>& args, int64_t per_tile) {
  return blocks_for(
      tile_slots(args.tokens, args.sequences.count, per_tile) * tile_blocks<kPass>(args), 1);
}

}  // namespace cohort::kernels::cuda
