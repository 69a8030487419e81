// attention_forward on CUDA: one block per (tile of query rows, head). Algorithms:
// attention_bf16.cuh (bf16, and int8 attention), sm90/forward.cuh (bf16 on sm_90),
// attention_f32.cuh (f32).
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
  typename Problem::Rows rows;
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

// Rows of int8 attention. In shared memory the scales of keys 4 i to 4 i + 3 of a tile are behind
// the first half of row i. Rows and scales from keys.end on are those of the last key, and masked.
struct Int8Rows : PackedRows<bf16> {
  const int8_t* k;
  const float* k_scales;  // [T, kv_heads]
  int kv_heads;
  float exponents[2];

  template <class Shape, class C>
  __device__ __forceinline__ void load(int tile, const TileLoad<C>& load) const {
    if constexpr (std::is_same_v<C, bf16>)
      return load_tile<Shape>(*this, tile, RowFormat{Shape::kDim, true}, load);
    constexpr int kChunks = Shape::kDim / 16;
    int thread;  // read again for each tile, so that no address of it takes a register meanwhile
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const auto key_of = [&](int row) { return min(tile * Shape::kKeys + row, keys.end - 1); };
#pragma unroll
    for (int i = 0; i < Shape::kKeys; i += Shape::kThreads / kChunks) {
      const int row = i + thread / kChunks, chunk = thread % kChunks;
      copy_async(load.to + chunk_offset<Shape::kDim>(row, chunk),
                 load.from + key_offsets(key_of(row)) + 16 * chunk, 16);
    }
    if (thread < Shape::kKeys)
      copy_async_small<4>(scale_address<Shape::kDim>(load.to, thread),
                          k_scales + int64_t{sequence.begin + key_of(thread)} * kv_heads + kv_head,
                          4);
  }
  template <int kDim, int kN>
  __device__ __forceinline__ void scale_scores(float (&s)[kN][4], uint32_t tile) const {
    const uint32_t first = scale_address<kDim>(tile, static_cast<int>(threadIdx.x % 4) * 2);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      // The difference of scale_address() to that of the key 8 n before is the same in all threads.
      const uint32_t at = first + scale_address<kDim>(0, 8 * n) - scale_address<kDim>(0, 0);
      const auto pair = *static_cast<const float2*>(__cvta_shared_to_generic(at));
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = (s[n][e] - kIntegers) * (e % 2 == 0 ? pair.x : pair.y);
    }
  }
  template <int kDim>
  static __device__ __forceinline__ uint32_t scale_address(uint32_t tile, int key) {
    return tile + chunk_offset<kDim>(key / 4, kDim / 16) + key % 4 * 4;
  }
};

struct Int8Problem : ForwardProblem<bf16> {
  using Rows = Int8Rows;
  const int8_t* keys;
  const float *q_scales, *k_scales;

  template <class Rule>
  __device__ __forceinline__ bool find(const Rule& rule, int block, int per_block,
                                       Int8Rows& rows) const {
    if (!ForwardProblem<bf16>::find(rule, block, per_block, rows)) return false;
    rows.k = keys + rows.sequence.begin * kv_stride + rows.kv_head * head_strides.k;
    rows.k_scales = k_scales;
    rows.kv_heads = kv_heads;
    const int row = static_cast<int>(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t token = rows.token(min(row + 8 * r, rows.count - 1));
      rows.exponents[r] = rule.exponent * q_scales[token * heads + rows.head_index];
    }
    return true;
  }
};

void forward_int8(const AttentionForward& args) {
  const int64_t dim = args.q.dim(2);
  COHORT_CHECK(
      args.v.dtype() == DType::kBF16 && (dim == 64 || dim == 128) &&
          vectorized_heads<int8_t>(args.q, args.k) && vectorized_heads<bf16>(args.v, args.o),
      "[attention_forward] int8 attention on CUDA needs v in bf16, heads of 64 or 128, and "
      "rows aligned to 16 bytes, got ",
      args.v.str());
  Int8Problem problem{forward_problem<bf16>(args), pointer<int8_t>(args.k),
                      pointer<float>(args.desc.q_scales), pointer<float>(args.desc.k_scales)};
  problem.q_stride /= 2;  // in pairs
  problem.head_strides.q /= 2;
  const WithRule<Int8Problem, PlainRule<float>> call{problem, {args.desc, dim}};
  const Device device = args.q.device();
  dim == 64 ? run_generic<bf16, 64>(call, device) : run_generic<bf16, 128>(call, device);
}

}  // namespace

void attention_forward(const AttentionForward& args) {
  const int64_t dim = args.q.dim(2);
  const Device device = args.q.device();
  if (args.desc.fp8_scales.defined()) return attention_forward_fp8(args);
  if (args.q.dtype() == DType::kI8) return forward_int8(args);
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
