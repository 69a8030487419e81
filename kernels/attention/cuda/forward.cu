// attention_forward on CUDA: one block per (tile of query rows, head). Algorithms:
// attention_bf16.cuh (bf16), sm90/forward.cuh (bf16 on sm_90), attention_f32.cuh (f32).
#include "kernels/attention/cuda/attention_f32.cuh"
#include "kernels/attention/cuda/forward.cuh"

namespace cohort::kernels::cuda {
namespace {

template <class T, int kDim, Tiles kTiles, class Rule>
struct ForwardShape : RowsShape<T, kDim, forward_tiles(kDim, kTiles), true> {
  // At least so many on a multiprocessor; 0: no minimum.
  static constexpr int kBlocks = std::is_same_v<T, float> ? 0 : kDim == 64 && !Rule::kMasks ? 2 : 1;
};

// bf16: a block has up to 128 query rows (64 for head dims over 128) of one head of one sequence,
// 16 per warp, and loops over the tiles of keys that they see. Shared memory holds the queries and
// two stages of keys and values: the next tile is loaded while the current one is processed. S, P
// and O stay in registers. Head dims of 64 leave shared memory for a second block on the
// multiprocessor, whose matmuls hide the exponentials of this one. With small tiles there is one
// stage: the values are loaded during the scores, the next keys after them. f32: 64 rows, one
// stage, which holds some keys or values of a tile at a time.
template <class T, int kDim, Tiles kTiles, class Problem>
__global__ void __launch_bounds__(ForwardShape<T, kDim, kTiles, decltype(Problem::rule)>::kThreads,
                                  ForwardShape<T, kDim, kTiles, decltype(Problem::rule)>::kBlocks)
    attention_forward_kernel(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) char shared[];
  using Shape = ForwardShape<T, kDim, kTiles, decltype(Problem::rule)>;
  PackedRows<T> rows;
  if (!problem.find(problem.rule, static_cast<int>(blockIdx.x), Shape::kRows, rows)) return;
  attention_rows<Shape>(rows, problem.rule, problem.format, shared, problem.combined);
}

// Launches the generic kernel for a padded head dim.
template <class T, int kDim, class Problem>
void run_generic(Problem problem, Device device) {
  constexpr auto kSharedBytes = rows_shared_bytes<T, kDim, forward_tiles>;
  dispatch_tiles<kSharedBytes>(device, [&]<Tiles kTiles>() {
    using Shape = ForwardShape<T, kDim, kTiles, decltype(Problem::rule)>;
    const int64_t slots = tile_slots(problem.tokens, problem.sequences.count, Shape::kRows);
    problem.slots = static_cast<int>(slots);
    const auto kernel = attention_forward_kernel<T, kDim, kTiles, Problem>;
    const LaunchShape shape{blocks_for(slots * problem.heads, 1), Shape::kThreads,
                            kSharedBytes(kTiles)};
    std::array<Tensor, 2> scratch;
    if (problem.tokens > kAttentionChunk)
      scratch = combined_scratch(problem.combined, kernel, shape, Shape::kRows, kDim, device);
    launch("attention_forward", kernel, shape, device, problem);
  });
}

}  // namespace

void attention_forward(const AttentionForward& args) {
  const int64_t dim = args.q.dim(2);
  const Device device = args.q.device();
  if (args.desc.fp8_scales.defined()) return attention_forward_fp8(args);
  dispatch_device(args.q.dtype(), "attention_forward", [&]<class T>() {
    const auto problem = forward_problem<T>(args);
    const auto run = [&](const auto& call) {
      dispatch_head_dim(dim, [&]<int kDim>() { run_generic<T, kDim>(call, device); });
    };
    if constexpr (!std::is_same_v<T, float>) {
      if (supports_sm90("attention_forward", args.desc, dim, problem.format.vectorized, device))
        return dispatch_sm90_dim(dim, [&]<int kDim>() { run_forward_sm90<kDim>(problem, args); });
      return with_rule<WindowRule<float>, DropoutRule<float>>(problem, args.desc, dim,
                                                              problem.tokens, run);
    }
    with_rule<DropoutRule<float>>(problem, args.desc, dim, problem.tokens, run);
  });
}

}  // namespace cohort::kernels::cuda
