// Paged key/value cache on CUDA: writes, and attention over it.
#include "kernels/attention/cuda/attention_bf16.cuh"
#include "kernels/attention/cuda/attention_f32.cuh"
#include "kernels/attention/cuda/paged.cuh"
#include "kernels/cuda/e4m3.cuh"
#include "kernels/cuda/rotate.cuh"

namespace cohort::kernels::cuda {
namespace {

template <class T>
struct WriteProblem {
  void *k_cache, *v_cache;
  T* qkv;
  // From the first key head on, behind those of queries; null: none are rounded.
  const float* scales;
  bool rounds_queries;
  const int32_t *sequences, *positions;
  PageTable table;
  RopeTable rope;
  int heads, kv_heads, head_dim;
};

constexpr int kWriteThreads = 128;

// A block has one token, and a thread N elements at a time. First come the packs to rotate:
// queries, in place, and keys, into the cache slot of the token. Then what a narrow table does not
// reach of them, and what is copied to the cache: values, and keys that are not rotated; before
// these, queries that are only rounded. With a cache in e4m3, the keys go to shared memory, and
// then they and the values to the cache byte by byte.
template <class T, bool kIsE4m3, int N>
__global__ void __launch_bounds__(kWriteThreads)
    rope_kv_write_kernel(const __grid_constant__ WriteProblem<T> p) {
  extern __shared__ __align__(128) char shared[];  // attention_paged_kernel() has the same symbol
  launch_dependents_and_wait();
  const int64_t token = blockIdx.x;
  const int sequence = p.sequences[token], position = p.positions[token];
  if (sequence < 0 || position < 0) return;  // idle
  const int64_t slot = p.table.has(sequence) ? p.table.slot(p.table.row(sequence), position) : -1;
  const int dim = p.head_dim, width = p.kv_heads * dim;  // elements per slot
  T* const source = p.qkv + token * (p.heads * dim + 2 * width) + p.heads * dim;  // the first key
  T* const keys =
      kIsE4m3 ? reinterpret_cast<T*>(shared) : static_cast<T*>(p.k_cache) + slot * width;
  // Writes elements from offset `at` of `source` on; queries are before the keys.
  const auto store = [&](int at, const Raw<T, N>& x) {
    if (at >= 0 && slot < 0) return;
    T* const to = at < 0       ? source + at
                  : at < width ? keys + at
                               : static_cast<T*>(p.v_cache) + slot * width + (at - width);
    const bool rounds = at < 0 ? p.rounds_queries : !kIsE4m3 && p.scales != nullptr;
    store_raw(to, rounds ? round_to_e4m3(x, p.scales[(p.heads * dim + at) / dim - p.heads]) : x);
  };
  const bool rotates = p.rope.data != nullptr;
  const int packs = p.rope.half / N;  // packs of pairs per head
  const int rotated = rotates ? (p.heads + p.kv_heads) * packs : 0;
  const int rest = rotates ? dim / N - 2 * packs : 0, unreached = (p.heads + p.kv_heads) * rest;
  const int first = rotates ? width : p.rounds_queries ? -p.heads * dim : 0;
  const int copied = ((kIsE4m3 ? width : 2 * width) - first) / N;
  for (int i = static_cast<int>(threadIdx.x); i < rotated + unreached + copied;
       i += kWriteThreads) {
    if (i < rotated) {
      const int head = i / packs, pair = (i - head * packs) * N, at = (head - p.heads) * dim + pair;
      rotate<N>(source + at, {p.rope, position, pair},
                [&](int offset, float(&x)[N]) { store(at + offset, to_raw<T>(x)); });
    } else {
      const int k = i - rotated, head = k < unreached ? k / rest : 0;
      const int at = k < unreached
                         ? (head - p.heads) * dim + 2 * p.rope.half + (k - head * rest) * N
                         : first + (k - unreached) * N;
      store(at, load_raw<N>(source + at));
    }
  }
  if constexpr (kIsE4m3) {
    __syncthreads();
    if (slot < 0) return;
    const Pages pages{p.kv_heads, dim};
    const int t = static_cast<int>(slot % kPageTokens);
    auto* const k_cache = static_cast<uint8_t*>(p.k_cache);
    auto* const v_cache = static_cast<uint8_t*>(p.v_cache);
    for (int i = static_cast<int>(threadIdx.x); i < width; i += kWriteThreads) {
      const int head = i / dim, d = i - head * dim;
      const int64_t page = pages.page(slot, head);
      const E4m3Grid k_grid(p.scales[head]), v_grid(p.scales[p.kv_heads + head]);
      k_cache[page + Pages::key_cell(t, d / 16, dim) + cell_position(d % 16)] =
          k_grid.quantize(to_float(keys[i])).bits;
      v_cache[page + Pages::value(t, d, dim)] = v_grid.quantize(to_float(source[width + i])).bits;
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
  typename Problem::Rows rows;
  if (!problem.find(problem.rule, blockIdx.x, static_cast<int>(blockIdx.y), kPagedRows,
                    static_cast<int>(blockDim.x), rows))
    return;
  attention_rows<Shape>(rows, problem.rule, problem.format, shared, problem.combined);
}

// Launches the kernel for a padded head dim.
template <class T, int kDim, class Problem>
void run_paged(Problem problem, Device device) {
  const dim3 grid(blocks_for(problem.tokens, 1), static_cast<unsigned>(problem.blocks_per_token()));
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
  LaunchShape shape{
      .grid = blocks_for(tokens, 1), .block = kWriteThreads, .start = Start::kProgrammatic};
  dispatch_device(qkv.dtype(), "rope_kv_write", [&]<class T>() {
    const WriteProblem<T> problem{.k_cache = pointer<void>(args.cache.k),
                                  .v_cache = pointer<void>(args.cache.v),
                                  .qkv = pointer<T>(args.qkv),
                                  .scales = key_scales(args.cache),
                                  .rounds_queries = args.cache.scales.numel() > 2 * kv_heads,
                                  .sequences = pointer<int32_t>(args.sequences),
                                  .positions = pointer<int32_t>(args.positions),
                                  .table = page_table(args.cache),
                                  .rope = RopeTable(args.table, dim),
                                  .heads = static_cast<int>(qkv.dim(1) - 2 * kv_heads),
                                  .kv_heads = static_cast<int>(kv_heads),
                                  .head_dim = static_cast<int>(dim)};
    constexpr int kWidth = kPackSize<T>;
    const bool vectorized =
        dim % kWidth == 0 && problem.rope.half % kWidth == 0 &&
        aligned(problem.k_cache, problem.v_cache, problem.qkv, problem.rope.data);
    auto kernel =
        vectorized ? rope_kv_write_kernel<T, false, kWidth> : rope_kv_write_kernel<T, false, 1>;
    if constexpr (std::is_same_v<T, bf16>)
      if (args.cache.k.dtype() == DType::kE4M3) {
        kernel =
            vectorized ? rope_kv_write_kernel<T, true, kWidth> : rope_kv_write_kernel<T, true, 1>;
        shape.shared_bytes = static_cast<size_t>(kv_heads * dim) * sizeof(T);
      }
    launch("rope_kv_write", kernel, shape, qkv.device(), problem);
  });
}

void attention_paged(const AttentionPaged& args) {
  const int64_t dim = args.q.dim(2);
  if (args.desc.fp8_scales.defined()) return attention_paged_fp8(args);
  const auto run = [&]<class T, class C>() {
    const auto problem = paged_problem<T, C>(args);
    const auto run_with = [&](const auto& call) {
      dispatch_head_dim(dim, [&]<int kDim>() { run_paged<T, kDim>(call, args.q.device()); });
    };
    // As in the forward, f32 kernels are compiled for any call.
    if constexpr (std::is_same_v<T, float>)
      with_rule<DropoutRule<float>>(problem, args.desc, dim, problem.tokens, run_with);
    else
      with_rule<WindowRule<float>, ModifyRule<float>>(problem, args.desc, dim, problem.tokens,
                                                      run_with);
  };
  if (args.cache.k.dtype() == DType::kE4M3) return run.template operator()<bf16, uint8_t>();
  dispatch_device(args.q.dtype(), "attention_paged",
                  [&]<class T>() { run.template operator()<T, T>(); });
}

}  // namespace cohort::kernels::cuda
