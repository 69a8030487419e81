// attention_forward on CUDA: one block per (tile of query rows, head). Algorithms:
// attention_bf16.cuh (bf16), sm90/forward.cuh (bf16 on sm_90), attention_f32.cuh (f32).
#include "kernels/attention/cuda/attention_f32.cuh"
#include "kernels/attention/cuda/forward.cuh"

namespace cohort::kernels::cuda {
namespace {

template <int kDim>
using ForwardShape = Bf16Shape<kDim, kDim <= 128 ? 8 : 4, 2>;

// A block has up to 128 query rows (64 for head dims over 128) of one head of one sequence, 16 per
// warp, and loops over the tiles of keys that they see. Shared memory holds the queries and two
// stages of keys and values: the next tile is loaded while the current one is processed. S, P and O
// stay in registers. Head dims of 64 leave shared memory for a second block on the multiprocessor,
// whose matmuls hide the exponentials of this one.
template <int kDim, bool kDropout>
__global__ void __launch_bounds__(ForwardShape<kDim>::kThreads, kDim == 64 ? 2 : 1)
    attention_forward_kernel(const __grid_constant__ ForwardProblem<bf16> problem) {
  extern __shared__ __align__(128) char shared[];
  PackedRows<bf16> rows;
  if (!problem.find(static_cast<int>(blockIdx.x), ForwardShape<kDim>::kRows, rows)) return;
  using Shape = ForwardShape<kDim>;
  auto* const after = reinterpret_cast<float*>(shared + Shape::kSharedBytes);
  attention_bf16<Shape, kDropout>(
      rows, problem.params, shared,
      kCombinesInShared ? CombinedChunks{.o = after, .states = after + Shape::kRows * kDim}
                        : problem.combined.from(rows.row0(problem.tokens), kDim));
}

// f32: 64 rows, one stage, which holds the keys of a tile first and then its values.
template <int kDim>
__global__ void __launch_bounds__(kFloatThreads)
    attention_forward_float_kernel(const __grid_constant__ ForwardProblem<float> problem) {
  extern __shared__ __align__(128) char shared[];
  PackedRows<float> rows;
  if (!problem.find(static_cast<int>(blockIdx.x), kFloatRows, rows)) return;
  attention_f32<kDim>(rows, problem.params, reinterpret_cast<float*>(shared),
                      problem.combined.from(rows.row0(problem.tokens), kDim));
}

// Number of heads whose keys and values fit in the L2 cache together.
int heads_in_l2(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t row_bytes) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int64_t fit = kCacheBytes / std::max<int64_t>(2 * tokens * row_bytes, 1);
  return static_cast<int>(std::clamp<int64_t>(fit, 1, kv_heads) * (heads / kv_heads));
}

// `slots` and `combined` depend on the kernel and are still to be set.
template <class T>
ForwardProblem<T> make_problem(const AttentionForward& args) {
  const int64_t tokens = args.q.dim(0), heads = args.q.dim(1), dim = args.q.dim(2),
                kv_heads = args.k.dim(1);
  return {
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
      .sequences = static_cast<int>(args.cu_seqlens.numel() - 1),
      .heads_at_once = heads_in_l2(tokens, heads, kv_heads, dim * static_cast<int64_t>(sizeof(T))),
      .causal = args.desc.mask == Mask::kCausal,
      .params = {.c = exponent_scale(args.desc, dim),
                 .window = key_window(args.desc),
                 .head_dim = static_cast<int>(dim),
                 .vectorized = vectorized_heads<T>(args.q, args.k, args.v, args.o),
                 .dropout = DropoutMask(args.desc.dropout)}};
}

}  // namespace

void attention_forward(const AttentionForward& args) {
  const int64_t tokens = args.q.dim(0), heads = args.q.dim(1), dim = args.q.dim(2);
  dispatch_device(args.q.dtype(), "attention_forward", [&]<class T>() {
    constexpr bool kFloat = std::is_same_v<T, float>;
    auto problem = make_problem<T>(args);
    const auto run = [&](auto* kernel, int rows, int threads, size_t shared, int kernel_dim) {
      Tensor scratch;
      if (::cohort::cuda::is_compiled_for_sm90(reinterpret_cast<const void*>(kernel),
                                               args.q.device()))
        shared += combined_bytes(rows, kernel_dim);
      else if (tokens > kAttentionChunk)
        scratch = combined_scratch(problem.combined, tokens * heads, kernel_dim, args.q.device());
      const int64_t slots = tile_slots(tokens, problem.sequences, rows);
      problem.slots = static_cast<int>(slots);
      launch("attention_forward", kernel,
             {blocks_for(slots * heads, 1), static_cast<unsigned>(threads), shared},
             args.q.device(), problem);
    };
    const bool hopper =
        !kFloat && supports_sm90("attention_forward", dim, problem.params.vectorized,
                                 args.desc.dropout.p > 0, args.q.device());
    if constexpr (!kFloat)
      if (hopper)
        return dispatch_sm90_dim(dim, [&]<int kDim>() { run_forward_sm90<kDim>(problem, args); });
    dispatch_head_dim(dim, [&]<int kDim>() {
      using Shape = ForwardShape<kDim>;
      if constexpr (kFloat)
        run(attention_forward_float_kernel<kDim>, kFloatRows, kFloatThreads,
            FloatShape<kDim>::kSharedBytes, kDim);
      else
        run(args.desc.dropout.p > 0 ? attention_forward_kernel<kDim, true>
                                    : attention_forward_kernel<kDim, false>,
            Shape::kRows, Shape::kThreads, Shape::kSharedBytes, kDim);
    });
  });
}

}  // namespace cohort::kernels::cuda
