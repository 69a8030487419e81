// What the two passes of the attention backward share, in both precisions. backward.cu tells the
// story.
#pragma once

#include "kernels/attention/cuda/attention.cuh"

namespace cohort::kernels::cuda {

// Which gradients a kernel makes. A block owns a tile of rows of one sequence and head, and streams
// the rows on the other side past it, in ascending steps:
//   kKeys     owns keys (K, V) of a key head, streams queries (Q, dO) of the heads of its group in
//             turn, or of a slice of them; dK and dV
//   kQueries  owns queries (Q, dO) of a head, streams keys (K, V); dQ
enum class Pass { kKeys, kQueries };

// Rows of one head: row r is token r of a sequence, or key r, of which those from `own` on lie
// `shift` elements further than they would if they followed the prefix.
template <class T>
struct HeadRows {
  T* data;
  int64_t stride;
  int own = 0;
  int64_t shift = 0;

  __device__ T* row(int r) const { return data + r * stride + (r < own ? 0 : shift); }
};

// A tensor [T, heads, head_dim] whose tokens are `stride` elements apart.
template <class T>
struct Heads {
  T* data = nullptr;
  int64_t stride = 0;

  // Of a head, from token `begin` on.
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
  float *lse_log2, *delta;       // [heads, T]: lse log2(e), and dO . O; null on sm_90
  uint64_t* streams;             // [T]: the dropout's draws of a query
  // [slices, T, kv_heads, head_dim]: dk and dv of each slice; null if there is one.
  float *slices_k, *slices_v;
  int64_t tokens;
  int sequences, heads, kv_heads, head_dim;
  int slices;  // of the heads of a group, each with a block of its own for a tile of keys
  bool accumulate_q, accumulate_k, accumulate_v;
  bool causal, vectorized;  // vectorized: 16-byte accesses to every row
  int window;               // how many keys a query sees at most
  float scale, exponent;    // of the softmax; that times log2(e)
  ProbabilityDropout dropout;

  __host__ __device__ int group() const { return heads / kv_heads; }
  // The first head of a slice, counted in its group.
  __device__ int slice_begin(int slice) const { return slice * group() / slices; }
};

// dk and dv, then dq.
template <int kDim>  // the padded head dim
void run_backward_bf16(const BackwardArgs<__nv_bfloat16>& args, Device device);
void run_backward_f32(const BackwardArgs<float>& args, Device device);
// The same with 16-byte accesses, without dropout, on sm_90.
template <int kDim>
void run_backward_hopper(const BackwardArgs<__nv_bfloat16>& args, const AttentionBackward& in);
template <>
void run_backward_hopper<192>(const BackwardArgs<__nv_bfloat16>& args, const AttentionBackward& in);
template <>
void run_backward_hopper<256>(const BackwardArgs<__nv_bfloat16>& args, const AttentionBackward& in);

// Streamed rows of a sequence: its queries, or its keys with those of its prefix.
struct BackwardStream {
  int begin, length;  // the queries' tokens [begin, begin + length), or `length` keys
  int position;       // of the first query
  int first, end;     // the steps that a block meets
};

// A block's share of the work.
struct BackwardShare {
  int begin, length;         // its sequence: tokens [begin, begin + length)
  int prefix_begin, prefix;  // the tokens of keys before its own
  int sequence;
  int own;        // its first own row, counted in the sequence; at least `length` if empty
  int head;       // its own head
  int slice = 0;  // of the heads that it streams
  BackwardStream stream;
};

// Blocks of a tile.
template <Pass kPass, class T>
__host__ __device__ __forceinline__ int tile_blocks(const BackwardArgs<T>& args) {
  return kPass == Pass::kKeys ? args.kv_heads * args.slices : args.heads;
}

// Neighbouring blocks have the same tile in different heads; all tiles of `at_once` heads come
// before those of the next. Under a causal mask the first keys and the last queries have the most
// work, so they come first; with kLastKeysFirst the last keys do.
template <Pass kPass, bool kLastKeysFirst = false, class T>
__device__ __forceinline__ BackwardShare find_share(const BackwardArgs<T>& args, int per_tile,
                                                    int per_step, int at_once) {
  const int blocks = tile_blocks<kPass>(args), block = static_cast<int>(blockIdx.x);
  const int slots = static_cast<int>(gridDim.x) / blocks;
  const int first_head = block / (slots * at_once) * at_once, among = block % (slots * at_once);
  const int heads = min(at_once, blocks - first_head);
  const int order = among / heads;
  const int slot = kPass == Pass::kKeys && !kLastKeysFirst ? order : slots - 1 - order;
  const SequenceTile tile = find_tile(args.cu, args.sequences, slot, per_tile);
  BackwardShare share{.begin = tile.begin,
                      .length = tile.length,
                      .prefix_begin = tile.begin,
                      .prefix = 0,
                      .sequence = tile.sequence,
                      .own = tile.tile * per_tile,
                      .head = first_head + among % heads,
                      .stream = {.begin = tile.begin, .length = tile.length}};
  if (args.prefixes != nullptr && args.prefixes[2 * tile.sequence + 1] > 0) {
    share.prefix_begin = args.prefixes[2 * tile.sequence];
    share.prefix = args.prefixes[2 * tile.sequence + 1];
  }
  if (kPass == Pass::kKeys) {
    share.slice = share.head % args.slices;
    share.head /= args.slices;
  }
  BackwardStream& stream = share.stream;
  if (kPass == Pass::kQueries) stream.length += share.prefix;
  int seen = stream.length;
  const int window = min(args.window, seen);
  if (args.causal && kPass == Pass::kKeys) {
    stream.first = share.own / per_step;
    seen = min(seen, share.own + per_tile - 1 + window);
  }
  if (args.causal && kPass == Pass::kQueries) {
    stream.first = max(0, share.prefix + share.own + 1 - window) / per_step;
    seen = min(seen, share.prefix + share.own + per_tile);
  }
  stream.end = (seen + per_step - 1) / per_step;
  return share;
}

// The keys that the share's queries see, from key 0 on.
template <class T>
__device__ __forceinline__ HeadRows<T> key_rows(const Heads<T>& tensor, const BackwardShare& share,
                                                int head, int head_dim) {
  HeadRows<T> rows = tensor.rows(share.prefix_begin, head, head_dim);
  rows.own = share.prefix;
  rows.shift = (share.begin - share.prefix - share.prefix_begin) * rows.stride;
  return rows;
}

// Moves on to the queries of the next sequence whose prefix is the share's own, and which sees some
// of its keys. False if there is none. Such sequences stand behind the one that they go on from.
template <class T>
__device__ __forceinline__ bool next_stream(const BackwardArgs<T>& args, const BackwardShare& share,
                                            int& sequence, BackwardStream& stream, int per_tile,
                                            int per_step) {
  if (args.prefixes == nullptr || share.prefix > 0) return false;
  while (++sequence < args.sequences && args.prefixes[2 * sequence + 1] > 0) {
    const int begin = args.cu[sequence], length = args.cu[sequence + 1] - begin;
    const int position = args.prefixes[2 * sequence + 1];
    const int64_t seen = int64_t{share.own} + per_tile - 1 + args.window - position;
    stream = {.begin = begin,
              .length = length,
              .position = position,
              .first = 0,
              .end = static_cast<int>((max(int64_t{0}, min(int64_t{length}, seen)) + per_step - 1) /
                                      per_step)};
    if (stream.end > 0) return true;
  }
  return false;
}

// Blocks of a pass.
template <Pass kPass, class T>
unsigned backward_blocks(const BackwardArgs<T>& args, int64_t per_tile) {
  return blocks_for(tile_slots(args.tokens, args.sequences, per_tile) * tile_blocks<kPass>(args),
                    1);
}

}  // namespace cohort::kernels::cuda
