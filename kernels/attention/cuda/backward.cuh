// What the two passes of the attention backward share, in both precisions. backward.cu tells the
// story.
#pragma once

#include "kernels/attention/cuda/attention.cuh"

namespace cohort::kernels::cuda {

// Which gradients a kernel makes. A block owns a tile of rows of one sequence and head, and streams
// the rows on the other side past it, in ascending steps:
//   kKeys     owns keys (K, V) of a key head, streams queries (Q, dO) of each head of its group in
//             turn; dK and dV
//   kQueries  owns queries (Q, dO) of a head, streams keys (K, V); dQ
enum class Pass { kKeys, kQueries };

// Rows of one head: row r is the sequence's token r.
template <class T>
struct HeadRows {
  T* data;
  int64_t stride;

  __device__ T* row(int r) const { return data + r * stride; }
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
  const T* o;        // contiguous, as dout
  const float* lse;  // [heads, T]
  const int32_t* cu;
  float *lse_log2, *delta;  // [heads, T]: lse log2(e), and dO . O
  uint64_t* streams;        // [T]: the dropout's draws of a query
  int64_t tokens;
  int sequences, heads, kv_heads, head_dim;
  bool accumulate_q, accumulate_k, accumulate_v;
  bool causal, vectorized;  // vectorized: 16-byte accesses to every row
  int window;               // how many keys a query sees at most
  float scale, exponent;    // of the softmax; that times log2(e)
  ProbabilityDropout dropout;

  __device__ int group() const { return heads / kv_heads; }
};

// dk and dv, then dq.
template <int kDim>  // the padded head dim
void run_backward_bf16(const BackwardArgs<__nv_bfloat16>& args, Device device);
void run_backward_f32(const BackwardArgs<float>& args, Device device);

// A block's share of the work.
struct BackwardShare {
  int begin, length;  // its sequence: tokens [begin, begin + length)
  int own;            // its first own row, counted in the sequence; at least `length` if empty
  int head;           // its own head
  int first, end;     // the steps of streamed rows that it meets
};

template <Pass kPass, class T>
__device__ __forceinline__ int own_heads(const BackwardArgs<T>& args) {
  return kPass == Pass::kKeys ? args.kv_heads : args.heads;
}

// Neighbouring blocks have the same tile in different heads. Under a causal mask the first keys and
// the last queries have the most work, so they come first.
template <Pass kPass, class T>
__device__ __forceinline__ BackwardShare find_share(const BackwardArgs<T>& args, int per_tile,
                                                    int per_step) {
  const int heads = own_heads<kPass>(args);
  const int order = static_cast<int>(blockIdx.x) / heads;
  const int slots = static_cast<int>(gridDim.x) / heads;
  const int slot = kPass == Pass::kKeys ? order : slots - 1 - order;
  const SequenceTile tile = find_tile(args.cu, args.sequences, slot, per_tile);
  BackwardShare share{.begin = tile.begin,
                      .length = tile.length,
                      .own = tile.tile * per_tile,
                      .head = static_cast<int>(blockIdx.x) % heads,
                      .first = 0,
                      .end = 0};
  int seen = tile.length;
  const int window = min(args.window, tile.length);
  if (args.causal && kPass == Pass::kKeys) {
    share.first = share.own / per_step;
    seen = min(seen, share.own + per_tile - 1 + window);
  }
  if (args.causal && kPass == Pass::kQueries) {
    share.first = max(0, share.own + 1 - window) / per_step;
    seen = min(seen, share.own + per_tile);
  }
  share.end = (seen + per_step - 1) / per_step;
  return share;
}

// Blocks of a pass.
template <Pass kPass, class T>
unsigned backward_blocks(const BackwardArgs<T>& args, int64_t per_tile) {
  const int64_t heads = kPass == Pass::kKeys ? args.kv_heads : args.heads;
  return blocks_for(tile_slots(args.tokens, args.sequences, per_tile) * heads, 1);
}

}  // namespace cohort::kernels::cuda
