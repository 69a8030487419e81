// Paged key/value cache on CUDA: writes, and attention over it.
#include "kernels/attention/cuda/attention_bf16.cuh"
#include "kernels/attention/cuda/attention_f32.cuh"
#include "kernels/attention/cuda/paged.cuh"
#include "kernels/cuda/e4m3.cuh"
#include "kernels/cuda/rotate.cuh"

namespace cohort::kernels::cuda {
namespace {

// C: the type of the cache, T or e4m3.
template <class T, class C = T>
struct WriteProblem {
  C *k_cache, *v_cache;
  T* qkv;
  const float*
      scales;  // from the first key head on, behind those of queries; null: none are rounded
  bool rounds_queries;
  const int32_t *sequences, *positions;
  PageTable table;
  RopeTable rope;
  int heads, kv_heads, head_dim;

  // Slot of a token that is not idle; negative if it has none.
  __device__ int64_t slot(int sequence, int position) const {
    return table.has(sequence) ? table.slot(table.row(sequence), position) : int64_t{-1};
  }
};

constexpr int kWriteThreads = 128;

// A block has one token, and a thread N elements at a time. First come the packs to rotate:
// queries, in place, and keys, into the cache slot of the token. Then those to copy to the cache:
// values, and keys that are not rotated; before them queries that are only rounded.
template <class T, int N>
__global__ void __launch_bounds__(kWriteThreads)
    rope_kv_write_kernel(const __grid_constant__ WriteProblem<T> p) {
  launch_dependents_and_wait();
  const int64_t token = blockIdx.x;
  const int sequence = p.sequences[token], position = p.positions[token];
  if (sequence < 0 || position < 0) return;  // idle
  const int64_t slot = p.slot(sequence, position);
  const int dim = p.head_dim, width = p.kv_heads * dim;  // elements per slot
  T* const q = p.qkv + token * (p.heads * dim + 2 * width);
  T* const keys = p.k_cache + slot * width;
  T* const values = p.v_cache + slot * width;
  const bool rotates = p.rope.data != nullptr;
  const int packs = dim / 2 / N;  // packs of pairs per head
  const int rotated = rotates ? (p.heads + p.kv_heads) * packs : 0;
  // Offset from the first key of the token.
  const int first = rotates ? width : p.rounds_queries ? -p.heads * dim : 0;
  const int copied = (2 * width - first) / N;
  for (int i = static_cast<int>(threadIdx.x); i < rotated + copied; i += kWriteThreads) {
    if (i < rotated) {
      const int head = i / packs, pair = (i - head * packs) * N;
      T* const x = q + head * dim + pair;
      if (head >= p.heads && slot < 0) continue;
      T* const y = head < p.heads ? x : keys + (head - p.heads) * dim + pair;
      const RopeAt to{p.rope, position, pair};
      if (head < p.heads ? p.rounds_queries : p.scales != nullptr)
        rotate<N>(y, x, to, E4m3Rounding(p.scales[head - p.heads]));
      else
        rotate<N>(y, x, to);
    } else if (const int at = first + (i - rotated) * N; at < 0 || slot >= 0) {
      T* const x = q + p.heads * dim + at;
      auto raw = load_raw<N>(x);
      if (p.scales != nullptr)
        raw = E4m3Rounding(p.scales[(p.heads * dim + at) / dim - p.heads])(raw);
      store_raw(at < 0 ? x : at < width ? keys + at : values + (at - width), raw);
    }
  }
}

// Writes a cache in e4m3 likewise. The keys of the token are rotated in shared memory.
template <int N>
__global__ void __launch_bounds__(kWriteThreads)
    rope_kv_write_kernel(const __grid_constant__ WriteProblem<bf16, uint8_t> p) {
  extern __shared__ __align__(128) char shared[];  // attention_paged_kernel() has the same symbol
  launch_dependents_and_wait();
  const int64_t token = blockIdx.x;
  const int sequence = p.sequences[token], position = p.positions[token];
  if (sequence < 0 || position < 0) return;  // idle
  const int64_t slot = p.slot(sequence, position);
  const int dim = p.head_dim, width = p.kv_heads * dim;
  bf16* const q = p.qkv + token * (p.heads * dim + 2 * width);
  const bf16 *keys = q + p.heads * dim, *const values = keys + width;
  if (p.rope.data != nullptr) {
    const int packs = dim / 2 / N;
    for (int i = static_cast<int>(threadIdx.x); i < (p.heads + p.kv_heads) * packs;
         i += kWriteThreads) {
      const int head = i / packs, pair = (i - head * packs) * N;
      bf16* const x = q + head * dim + pair;
      bf16* const y =
          head < p.heads ? x : reinterpret_cast<bf16*>(shared) + (head - p.heads) * dim + pair;
      if (head < p.heads && p.rounds_queries)
        rotate<N>(y, x, {p.rope, position, pair}, E4m3Rounding(p.scales[head - p.heads]));
      else
        rotate<N>(y, x, {p.rope, position, pair});
    }
    keys = reinterpret_cast<const bf16*>(shared);
    __syncthreads();
  } else if (p.rounds_queries) {
    for (int i = static_cast<int>(threadIdx.x); i < p.heads * dim; i += kWriteThreads)
      q[i] = from_float<bf16>(E4m3Grid(p.scales[i / dim - p.heads])(to_float(q[i])));
  }
  if (slot < 0) return;
  const Pages pages{p.kv_heads, dim};
  const int t = static_cast<int>(slot % kPageTokens);
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kWriteThreads) {
    const int head = i / dim, d = i - head * dim;
    const int64_t page = pages.page(slot, head);
    const E4m3Grid k_grid(p.scales[head]), v_grid(p.scales[p.kv_heads + head]);
    p.k_cache[page + Pages::key_cell(t, d / 16, dim) + cell_position(d % 16)] =
        k_grid.quantize(to_float(keys[i])).bits;
    p.v_cache[page + Pages::value(t, d, dim)] = v_grid.quantize(to_float(values[i])).bits;
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
  const auto problem_of = [&]<class T, class C>() -> WriteProblem<T, C> {
    return {.k_cache = pointer<C>(args.cache.k),
            .v_cache = pointer<C>(args.cache.v),
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
  };
  LaunchShape shape{
      .grid = blocks_for(tokens, 1), .block = kWriteThreads, .start = Start::kProgrammatic};
  dispatch_device(qkv.dtype(), "rope_kv_write", [&]<class T>() {
    constexpr int kWidth = kPackSize<T>;
    if constexpr (std::is_same_v<T, bf16>) {
      if (args.cache.k.dtype() == DType::kE4M3) {
        const auto problem = problem_of.template operator()<T, uint8_t>();
        shape.shared_bytes = static_cast<size_t>(kv_heads * dim) * sizeof(T);
        return launch("rope_kv_write",
                      aligned(problem.qkv, problem.rope.data) ? rope_kv_write_kernel<kWidth>
                                                              : rope_kv_write_kernel<1>,
                      shape, qkv.device(), problem);
      }
    }
    const auto problem = problem_of.template operator()<T, T>();
    const bool vectorized = dim % (2 * kWidth) == 0 && aligned(problem.k_cache, problem.v_cache,
                                                               problem.qkv, problem.rope.data);
    launch("rope_kv_write",
           vectorized ? rope_kv_write_kernel<T, kWidth> : rope_kv_write_kernel<T, 1>, shape,
           qkv.device(), problem);
  });
}

void attention_paged(const AttentionPaged& args) {
  const int64_t dim = args.q.dim(2);
  if (args.desc.fp8_scales.defined()) return attention_paged_fp8(args);
  if (args.cache.k.dtype() == DType::kE4M3) {
    const auto problem = paged_problem<bf16, uint8_t>(args);
    return with_rule<WindowRule<float>, ModifyRule<float>>(
        problem, args.desc, dim, problem.tokens, [&](const auto& call) {
          dispatch_head_dim(dim, [&]<int kDim>() {
            if constexpr (kDim == 64 || kDim == 128 || kDim == 256)
              run_paged<bf16, kDim>(call, args.q.device());
          });
        });
  }
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
