// Shared by the two passes of the attention backward, in both precisions. backward.cu has an
// overview.
#pragma once

#include "kernels/attention/cuda/attention.cuh"

namespace cohort::kernels::cuda {

// Selects the gradients of a kernel. A block owns a tile of rows of one sequence and head, and
// streams the rows of the other side in ascending steps:
//   kKeys     owns keys (K, V) of a key head, streams queries (Q, dO) of the heads of its group one
//             after the other, or of a slice of them; dK and dV
//   kQueries  owns queries (Q, dO) of a head, streams keys (K, V); dQ
enum class Pass { kKeys, kQueries };

// Rows of one head: row r is token r of a sequence, or key r; keys from `own` on are offset by
// `shift` elements from the position right after the prefix.
template <class T>
struct HeadRows {
  T* data;
  int64_t stride;
  int own = 0;
  int64_t shift = 0;

  __device__ T* row(int r) const { return data + r * stride + (r < own ? 0 : shift); }
};

// A tensor [T, heads, head_dim] with a token stride of `stride` elements.
template <class T>
struct Heads {
  T* data = nullptr;
  int64_t stride = 0;

  // Rows of a head, from token `begin` on.
  __device__ HeadRows<T> rows(int begin, int head, int head_dim) const {
    return {data + begin * stride + static_cast<int64_t>(head) * head_dim, stride};
  }
};

// q, dout, o, dq: [T, heads, head_dim]; k, v, dk, dv: [T, kv_heads, head_dim].
template <class T>
struct BackwardArgs {
  Heads<T> dq, dk, dv;
  Heads<const T> dout, q, k, v;
  const T* o;                    // contiguous, as dout
  const float* lse;              // [heads, T]
  const int32_t *cu, *prefixes;  // prefixes: null, or [sequences, 2]
  float *lse_log2, *delta;       // [heads, T]: lse log2(e), dO . O; null on sm_90
  uint64_t* streams;             // [T]: dropout stream per query
  // [head_slices, T, kv_heads, head_dim]: dk and dv per slice; null for a single slice.
  float *dk_slices, *dv_slices;
  int64_t tokens;
  int sequences, heads, kv_heads, head_dim;
  int head_slices;  // slices of the heads of a group; each has its own block per tile of keys
  bool accumulate_q, accumulate_k, accumulate_v;
  bool causal, vectorized;  // vectorized: 16-byte accesses to every row
  int window;               // maximum number of keys a query sees
  float scale, exponent;    // softmax scale, and that times log2(e)
  DropoutMask dropout;

  __host__ __device__ int group() const { return heads / kv_heads; }
  // First head of a slice, relative to its group.
  __device__ int slice_begin(int slice) const { return slice * group() / head_slices; }
};

// Compute dk and dv, then dq.
template <int kDim>  // the padded head dim
void run_backward_bf16(const BackwardArgs<bf16>& args, Device device);
void run_backward_f32(const BackwardArgs<float>& args, Device device);
// Overload for sm_90: 16-byte aligned rows, without dropout.
template <int kDim>
void run_backward_sm90(const BackwardArgs<bf16>& args, const AttentionBackward& in);
template <>
void run_backward_sm90<192>(const BackwardArgs<bf16>& args, const AttentionBackward& in);
template <>
void run_backward_sm90<256>(const BackwardArgs<bf16>& args, const AttentionBackward& in);

// Streamed rows of a sequence: its queries, or its keys including those of its prefix.
struct BackwardStream {
  int begin, length;  // the queries' tokens [begin, begin + length), or `length` keys
  int position;       // position of the first query
  int first, end;     // range of steps
};

// Work of a block.
struct BackwardSlice {
  int begin, length;         // its sequence: tokens [begin, begin + length)
  int prefix_begin, prefix;  // first token and length of its prefix
  int sequence;
  int own;             // first own row, within the sequence; at least `length` if empty
  int head;            // head of the own rows
  int head_slice = 0;  // slice of the streamed heads
  BackwardStream stream;
};

// Number of blocks per tile.
template <Pass kPass, class T>
__host__ __device__ __forceinline__ int tile_blocks(const BackwardArgs<T>& args) {
  return kPass == Pass::kKeys ? args.kv_heads * args.head_slices : args.heads;
}

// Adjacent blocks have the same tile in different heads; all tiles of `at_once` heads come before
// those of the next. Under a causal mask the first keys and the last queries have the most work, so
// they come first; with kLastKeysFirst the last keys come first.
template <Pass kPass, bool kLastKeysFirst = false, class T>
__device__ __forceinline__ BackwardSlice find_slice(const BackwardArgs<T>& args, int per_tile,
                                                    int per_step, int at_once) {
  const int blocks = tile_blocks<kPass>(args), block = static_cast<int>(blockIdx.x);
  const int slots = static_cast<int>(gridDim.x) / blocks;
  const int first_head = block / (slots * at_once) * at_once, in_batch = block % (slots * at_once);
  const int heads = min(at_once, blocks - first_head);
  const int order = in_batch / heads;
  const int slot = kPass == Pass::kKeys && !kLastKeysFirst ? order : slots - 1 - order;
  const SequenceTile tile = find_tile(args.cu, args.sequences, slot, per_tile);
  BackwardSlice slice{.begin = tile.begin,
                      .length = tile.length,
                      .prefix_begin = tile.begin,
                      .prefix = 0,
                      .sequence = tile.sequence,
                      .own = tile.tile * per_tile,
                      .head = first_head + in_batch % heads,
                      .stream = {.begin = tile.begin, .length = tile.length}};
  if (args.prefixes != nullptr && args.prefixes[2 * tile.sequence + 1] > 0) {
    slice.prefix_begin = args.prefixes[2 * tile.sequence];
    slice.prefix = args.prefixes[2 * tile.sequence + 1];
  }
  if (kPass == Pass::kKeys) {
    slice.head_slice = slice.head % args.head_slices;
    slice.head /= args.head_slices;
  }
  BackwardStream& stream = slice.stream;
  if (kPass == Pass::kQueries) stream.length += slice.prefix;
  int visible = stream.length;
  const int window = min(args.window, visible);
  if (args.causal && kPass == Pass::kKeys) {
    stream.first = slice.own / per_step;
    visible = min(visible, slice.own + per_tile - 1 + window);
  }
  if (args.causal && kPass == Pass::kQueries) {
    stream.first = max(0, slice.prefix + slice.own + 1 - window) / per_step;
    visible = min(visible, slice.prefix + slice.own + per_tile);
  }
  stream.end = (visible + per_step - 1) / per_step;
  return slice;
}

// Keys visible to the queries of the slice, from key 0 on.
template <class T>
__device__ __forceinline__ HeadRows<T> key_rows(const Heads<T>& tensor, const BackwardSlice& slice,
                                                int head, int head_dim) {
  HeadRows<T> rows = tensor.rows(slice.prefix_begin, head, head_dim);
  rows.own = slice.prefix;
  rows.shift = (slice.begin - slice.prefix - slice.prefix_begin) * rows.stride;
  return rows;
}

// Advances to the queries of the next sequence whose prefix is the slice's sequence, and which sees
// some of its keys. Returns false if there is none. Such sequences directly follow their prefix.
template <class T>
__device__ __forceinline__ bool next_stream(const BackwardArgs<T>& args, const BackwardSlice& slice,
                                            int& sequence, BackwardStream& stream, int per_tile,
                                            int per_step) {
  if (args.prefixes == nullptr || slice.prefix > 0) return false;
  while (++sequence < args.sequences && args.prefixes[2 * sequence + 1] > 0) {
    const int begin = args.cu[sequence], length = args.cu[sequence + 1] - begin;
    const int position = args.prefixes[2 * sequence + 1];
    const int64_t visible = int64_t{slice.own} + per_tile - 1 + args.window - position;
    stream = {.begin = begin,
              .length = length,
              .position = position,
              .first = 0,
              .end = static_cast<int>(
                  (max(int64_t{0}, min(int64_t{length}, visible)) + per_step - 1) / per_step)};
    if (stream.end > 0) return true;
  }
  return false;
}

// Number of blocks of a pass.
template <Pass kPass, class T>
unsigned backward_blocks(const BackwardArgs<T>& args, int64_t per_tile) {
  return blocks_for(tile_slots(args.tokens, args.sequences, per_tile) * tile_blocks<kPass>(args),
                    1);
}

}  // namespace cohort::kernels::cuda
