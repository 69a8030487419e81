// attention_forward on CUDA: a block per (tile of query rows, head); see attend.cuh for what it
// does in bf16 and attend_float.cuh for f32.
#include "kernels/attention/cuda/attend.cuh"
#include "kernels/attention/cuda/attend_float.cuh"

namespace cohort::kernels::cuda {
namespace {

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

  // The block's rows, at most `per_block`. Blocks of the same keys run close to each other in time,
  // and of each sequence those with the most keys first. False for an empty slot.
  __device__ __forceinline__ bool find(int per_block, PackedRows<T>& rows) const {
    const int run_size = slots * run, run_index = static_cast<int>(blockIdx.x) / run_size;
    const int in_run = static_cast<int>(blockIdx.x) % run_size;
    const int width = min(run, heads - run_index * run);
    const int head = run_index * run + in_run % width;
    const SequenceTile at = find_tile(cu, sequences, slots - 1 - in_run / width, per_block);
    const int first = at.tile * per_block;
    if (first >= at.length) return false;
    const int64_t dim = params.head_dim, stride = heads * dim;
    int prefix_begin = at.begin, prefix = 0;
    if (prefixes != nullptr) {
      prefix = prefixes[2 * at.sequence + 1];
      if (prefix > 0) prefix_begin = prefixes[2 * at.sequence];
    }
    const int64_t kv_start = prefix_begin * kv_stride + head / (heads / kv_heads) * dim;
    const int count = min(per_block, at.length - first);
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
            .causal = causal};
    return true;
  }
};

template <int kDim>
using ForwardShape = AttendShape<kDim, kDim <= 128 ? 8 : 4, 2>;

// A block has up to 128 query rows (64 for head dims over 128) of one head of one sequence, 16 for
// each warp, and goes over the tiles of keys that they see. In shared memory lie the queries, and
// two stages of keys and values: the next tile is on its way while this one is worked on. S, P and
// O stay in registers. Head dims of 64 leave room for a second block on the multiprocessor, whose
// products hide this one's exponentials.
template <int kDim, bool kDropout>
__global__ void __launch_bounds__(ForwardShape<kDim>::kThreads, kDim == 64 ? 2 : 1)
    attention_forward_kernel(const __grid_constant__ ForwardProblem<__nv_bfloat16> problem) {
  extern __shared__ __align__(128) char shared[];
  PackedRows<__nv_bfloat16> rows;
  if (!problem.find(ForwardShape<kDim>::kRows, rows)) return;
  using Shape = ForwardShape<kDim>;
  auto* const after = reinterpret_cast<float*>(shared + Shape::kSharedBytes);
  attend<Shape, kDropout>(rows, problem.params, shared,
                          kJoinsInShared
                              ? JoinedChunks{.o = after, .states = after + Shape::kRows * kDim}
                              : problem.joined.from(rows.row0(problem.tokens), kDim));
}

// The same in f32: 64 rows, one stage, which holds the tile's keys first and then its values.
template <int kDim>
__global__ void __launch_bounds__(kFloatThreads)
    attention_forward_float_kernel(const __grid_constant__ ForwardProblem<float> problem) {
  extern __shared__ __align__(128) char shared[];
  PackedRows<float> rows;
  if (!problem.find(kFloatRows, rows)) return;
  attend_float<kDim>(rows, problem.params, reinterpret_cast<float*>(shared),
                     problem.joined.from(rows.row0(problem.tokens), kDim));
}

// As many heads side by side as let their keys and values stay in the L2 cache.
int heads_in_run(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t row_bytes) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int64_t fit = kCacheBytes / std::max<int64_t>(2 * tokens * row_bytes, 1);
  return static_cast<int>(std::clamp<int64_t>(fit, 1, kv_heads) * (heads / kv_heads));
}

}  // namespace

void attention_forward(const AttentionForward& args) {
  const int64_t tokens = args.q.dim(0), heads = args.q.dim(1), dim = args.q.dim(2),
                kv_heads = args.k.dim(1);
  const int64_t sequences = args.cu_seqlens.numel() - 1;
  dispatch_device(args.q.dtype(), "attention_forward", [&]<class T>() {
    constexpr bool kFloat = std::is_same_v<T, float>;
    ForwardProblem<T> problem{
        .q = pointer<T>(args.q),
        .k = pointer<T>(args.k),
        .v = pointer<T>(args.v),
        .o = pointer<T>(args.o),
        .lse = pointer<float>(args.lse),
        .cu = pointer<int32_t>(args.cu_seqlens),
        .prefixes = pointer<int32_t>(args.desc.prefixes),
        .tokens = tokens,
        .q_stride = args.q.strides()[0],
        .kv_stride = args.k.strides()[0],
        .heads = static_cast<int>(heads),
        .kv_heads = static_cast<int>(kv_heads),
        .sequences = static_cast<int>(sequences),
        .slots = 0,
        .run = heads_in_run(tokens, heads, kv_heads, dim * static_cast<int64_t>(sizeof(T))),
        .causal = args.desc.mask == Mask::kCausal,
        .params = {.c = exponent_scale(args.desc, dim),
                   .window = key_window(args.desc),
                   .head_dim = static_cast<int>(dim),
                   .vectorized = vectorized_heads<T>(args.q, args.k, args.v, args.o),
                   .dropout = ProbabilityDropout(args.desc.dropout)},
        .joined = {}};
    const auto start = [&](auto* kernel, int rows, int threads, size_t shared, int kernel_dim) {
      Tensor scratch;
      if (::cohort::cuda::is_for_hopper(reinterpret_cast<const void*>(kernel), args.q.device()))
        shared += joined_bytes(rows, kernel_dim);
      else if (tokens > kAttentionChunk)
        scratch = joined_scratch(problem.joined, tokens * heads, kernel_dim, args.q.device());
      const int64_t slots = tile_slots(tokens, sequences, rows);
      problem.slots = static_cast<int>(slots);
      launch("attention_forward", kernel,
             {blocks_for(slots * heads, 1), static_cast<unsigned>(threads), shared},
             args.q.device(), problem);
    };
    dispatch_head_dim(dim, [&]<int kDim>() {
      using Shape = ForwardShape<kDim>;
      if constexpr (kFloat)
        start(attention_forward_float_kernel<kDim>, kFloatRows, kFloatThreads,
              FloatShape<kDim>::kSharedBytes, kDim);
      else
        start(args.desc.dropout.p > 0 ? attention_forward_kernel<kDim, true>
                                      : attention_forward_kernel<kDim, false>,
              Shape::kRows, Shape::kThreads, Shape::kSharedBytes, kDim);
    });
  });
}

}  // namespace cohort::kernels::cuda
