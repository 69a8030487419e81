// stick_breaking_forward and stick_breaking_paged on CUDA: a block has 64 query rows, 16 per warp,
// and takes the tiles of keys that they see in descending order. In bf16 the keys of the next tile
// are loaded while the values of this one are processed, and its values during the scores.
#include "kernels/attention/cuda/paged.cuh"
#include "kernels/attention/cuda/stick_breaking.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kStickRows = kPagedRows;

// Shared memory: queries, keys, values, and in f32 A.
template <class T, int kDim>
struct StickLayout {
  static constexpr int kSplit = kDim > 128 ? 2 : 1;  // warps that share rows, each with its columns
  static constexpr int kThreads = 2 * kStickRows * kSplit, kWidth = kDim / kSplit;
  using Warp = StickWarp<T, kDim, kWidth, kThreads>;
  static constexpr int kKeys = kStickRows * Warp::kRowBytes;
  static constexpr int kValues = kKeys + kStickKeys * Warp::kRowBytes;
  static constexpr int kWeights = kValues + kStickKeys * Warp::kRowBytes;
  static constexpr size_t kBytes =
      kWeights + (Warp::kFloat ? kThreads / 2 * Warp::kWeightBytes : 0);
};

template <class T, int kDim, class Rows>
__device__ __forceinline__ void stick_rows(const Rows& rows, const StickRule<float>& rule,
                                           const RowFormat& format, unsigned char* shared) {
  using L = StickLayout<T, kDim>;
  const typename L::Warp warp{shared, format};
  const int index = static_cast<int>(threadIdx.x / 32), row = index % 4 * 16,
            column = index / 4 * L::kWidth;
  const int ends[2] = {rows.end_key(rule, row + warp.group),
                       rows.end_key(rule, row + warp.group + 8)};
  const int max_end = __reduce_max_sync(0xffffffffu, max(ends[0], ends[1]));
  typename L::Warp::Columns o = {};
  float later[2] = {};
  int tile = rows.keys.tiles(kStickKeys).end - 1;
  warp.load(0, kStickRows, [&](int r) { return rows.query(r); });
  if (tile >= 0) warp.load_keys(L::kKeys, rows, rows.k, tile);
  copy_async_commit();
  if (tile >= 0) warp.load_keys(L::kValues, rows, rows.v, tile);
  copy_async_commit();
#pragma unroll 1
  for (; tile >= 0; --tile) {
    const int key0 = tile * kStickKeys;
    const bool sees = max_end > key0;  // uniform in a warp
    StickScores s;
    typename L::Warp::Weights weights;
    copy_async_wait<1>();
    __syncthreads();
    if (sees) warp.scores(s, 0, row, L::kKeys);
    __syncthreads();  // every warp has finished with the keys
    if (tile > 0) warp.load_keys(L::kKeys, rows, rows.k, tile - 1);
    copy_async_commit();
    if (sees)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        StickRow a;
        stick_weights(a, s, r, rule, ends[r] - key0, later[r]);
        warp.put(weights, L::kWeights, 16 * index, r, a);
      }
    copy_async_wait<1>();
    __syncthreads();
    if (sees) warp.accumulate(o, weights, L::kWeights, 16 * index, L::kValues, column);
    __syncthreads();  // every warp has finished with the values
    if (tile > 0) warp.load_keys(L::kValues, rows, rows.v, tile - 1);
    copy_async_commit();
  }
  warp.store(
      o, [&](int i) { return row + i < rows.count ? rows.output(row + i) : nullptr; }, column, 1.0f,
      false);
}

template <class T, int kDim, class Problem>
__global__ void __launch_bounds__(StickLayout<T, kDim>::kThreads)
    stick_breaking_forward_kernel(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) unsigned char shared[];
  PackedRows<T> rows;
  if (!problem.find(problem.rule, static_cast<int>(blockIdx.x), kStickRows, rows)) return;
  stick_rows<T, kDim>(rows, problem.rule, problem.format, shared);
}

template <class T, int kDim, class Problem>
__global__ void __launch_bounds__(StickLayout<T, kDim>::kThreads)
    stick_breaking_paged_kernel(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) unsigned char shared[];
  PagedRows<T> rows;
  if (!problem.find(problem.rule, rows)) return;
  stick_rows<T, kDim>(rows, problem.rule, problem.format, shared);
}

}  // namespace

void stick_breaking_forward(const StickBreakingForward& args) {
  const int64_t dim = args.q.dim(2);
  dispatch_device(args.q.dtype(), "stick_breaking_forward", [&]<class T>() {
    using Problem = WithRule<ForwardProblem<T>, StickRule<float>>;
    Problem problem{forward_problem<T>(args), StickRule<float>(args.desc, dim)};
    const int64_t slots = tile_slots(problem.tokens, problem.sequences.count, kStickRows);
    problem.slots = static_cast<int>(slots);
    dispatch_head_dim(dim, [&]<int kDim>() {
      launch("stick_breaking_forward", stick_breaking_forward_kernel<T, kDim, Problem>,
             {blocks_for(slots * problem.heads, 1), StickLayout<T, kDim>::kThreads,
              StickLayout<T, kDim>::kBytes},
             args.q.device(), problem);
    });
  });
}

void stick_breaking_paged(const StickBreakingPaged& args) {
  const int64_t dim = args.q.dim(2);
  dispatch_device(args.q.dtype(), "stick_breaking_paged", [&]<class T>() {
    using Problem = WithRule<PagedProblem<T>, StickRule<float>>;
    const Problem problem{paged_problem<T>(args), StickRule<float>(args.desc, dim)};
    const dim3 grid(blocks_for(problem.tokens, 1),
                    static_cast<unsigned>(problem.kv_heads * problem.parts));
    dispatch_head_dim(dim, [&]<int kDim>() {
      launch("stick_breaking_paged", stick_breaking_paged_kernel<T, kDim, Problem>,
             {grid, StickLayout<T, kDim>::kThreads, StickLayout<T, kDim>::kBytes}, args.q.device(),
             problem);
    });
  });
}

}  // namespace cohort::kernels::cuda
