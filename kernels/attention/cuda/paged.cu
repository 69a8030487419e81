// Paged key/value cache on CUDA: writes, and attention over it.
#include "kernels/attention/cuda/attention_bf16.cuh"
#include "kernels/attention/cuda/attention_f32.cuh"
#include "kernels/attention/cuda/paged.cuh"
#include "kernels/cuda/rotate.cuh"

namespace cohort::kernels::cuda {
namespace {

template <class T>
struct WriteProblem {
  T *k_cache, *v_cache, *qkv;
  const int32_t *sequences, *positions;
  PageTable table;
  RopeTable rope;
  int heads, kv_heads, head_dim;
};

constexpr int kWriteThreads = 128;

// A block has one token, and a thread N elements at a time. First come the packs to rotate:
// queries, in place, and keys, into the cache slot of the token. Then those to copy to the cache:
// values, and keys that are not rotated.
template <class T, int N>
__global__ void __launch_bounds__(kWriteThreads)
    rope_kv_write_kernel(const __grid_constant__ WriteProblem<T> p) {
  launch_dependents_and_wait();
  const int64_t token = blockIdx.x;
  const int sequence = p.sequences[token], position = p.positions[token];
  if (sequence < 0 || position < 0) return;  // idle
  const int64_t slot =
      p.table.has(sequence) ? p.table.slot(p.table.row(sequence), position) : int64_t{-1};
  const int dim = p.head_dim, width = p.kv_heads * dim;  // elements per slot
  T* const q = p.qkv + token * (p.heads * dim + 2 * width);
  T* const keys = p.k_cache + slot * width;
  T* const values = p.v_cache + slot * width;
  const bool rotates = p.rope.data != nullptr;
  const int packs = dim / 2 / N;  // packs of pairs per head
  const int rotated = rotates ? (p.heads + p.kv_heads) * packs : 0;
  const int copied = (rotates ? width : 2 * width) / N;
  for (int i = static_cast<int>(threadIdx.x); i < rotated + copied; i += kWriteThreads) {
    if (i < rotated) {
      const int head = i / packs, pair = (i - head * packs) * N;
      T* const x = q + head * dim + pair;
      if (head >= p.heads && slot < 0) continue;
      T* const y = head < p.heads ? x : keys + (head - p.heads) * dim + pair;
      rotate<N>(y, x, {p.rope, position, pair});
    } else if (slot >= 0) {
      // Offset from the first key of the token.
      const int at = (rotates ? width : 0) + (i - rotated) * N;
      store_raw(at < width ? keys + at : values + (at - width),
                load_raw<N>(q + p.heads * dim + at));
    }
  }
}

template <class T, int kDim, Tiles kTiles, class Rule>
struct PagedShape : RowsShape<T, kDim, paged_tiles(kDim, kTiles), false> {
  // As in forward.cu.
  static constexpr int kBlocks = std::is_same_v<T, float>     ? 0
                                 : Rule::kMasks || kDim > 128 ? 1
                                 : kDim == 64                 ? 3
                                                              : 2;
};

// A block has the rows of PagedProblem::find(), in bf16 16 per warp. The next tile is loaded during
// the softmax.
template <class T, int kDim, Tiles kTiles, class Problem>
__global__ void __launch_bounds__(PagedShape<T, kDim, kTiles, decltype(Problem::rule)>::kThreads,
                                  PagedShape<T, kDim, kTiles, decltype(Problem::rule)>::kBlocks)
    attention_paged_kernel(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) char shared[];
  using Shape = PagedShape<T, kDim, kTiles, decltype(Problem::rule)>;
  static_assert(Shape::kRows == kPagedRows);
  if constexpr (std::is_same_v<T, bf16>) launch_dependents_and_wait();
  PagedRows<T> rows;
  if (!problem.find(problem.rule, rows)) return;
  attention_rows<Shape>(rows, problem.rule, problem.format, shared, problem.combined);
}

// Launches the kernel for a padded head dim.
template <class T, int kDim, class Problem>
void run_paged(Problem problem, Device device) {
  const dim3 grid(blocks_for(problem.tokens, 1),
                  static_cast<unsigned>(problem.kv_heads * problem.parts));
  constexpr auto kSharedBytes = rows_shared_bytes<T, kDim, paged_tiles>;
  dispatch_tiles<kSharedBytes>(device, [&]<Tiles kTiles>() {
    const auto kernel = attention_paged_kernel<T, kDim, kTiles, Problem>;
    const LaunchShape shape{
        .grid = grid,
        .block = PagedShape<T, kDim, kTiles, decltype(Problem::rule)>::kThreads,
        .shared_bytes = kSharedBytes(kTiles),
        .start = std::is_same_v<T, float> ? Start::kAfterPrevious : Start::kProgrammatic};
    std::array<Tensor, 2> scratch;
    if (problem.table.capacity() > kAttentionChunk)
      scratch = combined_scratch(problem.combined, kernel, shape, kPagedRows, kDim, device);
    launch("attention_paged", kernel, shape, device, problem);
  });
}

}  // namespace

void rope_kv_write(const RopeKvWrite& args) {
  const Tensor& qkv = args.qkv;
  const int64_t tokens = qkv.dim(0), dim = qkv.dim(2), kv_heads = args.cache.k.dim(2);
  COHORT_CHECK(qkv.dim(1) * dim < (1 << 30), "[rope_kv_write] tokens of ", qkv.str(),
               " are too large");
  dispatch_device(qkv.dtype(), "rope_kv_write", [&]<class T>() {
    WriteProblem<T> problem{.k_cache = pointer<T>(args.cache.k),
                            .v_cache = pointer<T>(args.cache.v),
                            .qkv = pointer<T>(args.qkv),
                            .sequences = pointer<int32_t>(args.sequences),
                            .positions = pointer<int32_t>(args.positions),
                            .table = page_table(args.cache),
                            .rope = RopeTable(args.table, dim),
                            .heads = static_cast<int>(qkv.dim(1) - 2 * kv_heads),
                            .kv_heads = static_cast<int>(kv_heads),
                            .head_dim = static_cast<int>(dim)};
    constexpr int kWidth = kPackSize<T>;
    const bool vectorized = dim % (2 * kWidth) == 0 && aligned(problem.k_cache, problem.v_cache,
                                                               problem.qkv, problem.rope.data);
    launch("rope_kv_write",
           vectorized ? rope_kv_write_kernel<T, kWidth> : rope_kv_write_kernel<T, 1>,
           {.grid = blocks_for(tokens, 1), .block = kWriteThreads, .start = Start::kProgrammatic},
           qkv.device(), problem);
  });
}

void attention_paged(const AttentionPaged& args) {
  const int64_t dim = args.q.dim(2);
  dispatch_device(args.q.dtype(), "attention_paged", [&]<class T>() {
    const auto problem = paged_problem<T>(args);
    const auto run = [&](const auto& call) {
      dispatch_head_dim(dim, [&]<int kDim>() { run_paged<T, kDim>(call, args.q.device()); });
    };
    // As in the forward, f32 kernels are compiled for any call.
    if constexpr (std::is_same_v<T, float>)
      with_rule<DropoutRule<float>>(problem, args.desc, dim, problem.tokens, run);
    else
      with_rule<WindowRule<float>, ModifyRule<float>>(problem, args.desc, dim, problem.tokens, run);
  });
}

}  // namespace cohort::kernels::cuda
