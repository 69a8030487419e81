// FP8 attention on sm_90: the kernel of forward.cuh over pages of keys and values in e4m3. For
// packed sequences they are made here; those of the cache are read in place.
#include "kernels/attention/cuda/paged.cuh"
#include "kernels/attention/cuda/sm90/forward.cuh"

namespace cohort::kernels::cuda {
namespace {

// Pages of packed sequences. A sequence has pages of its own for the keys from the last multiple of
// 16 in its prefix on, and reads those before in the pages of the sequence that is its prefix. The
// host knows no boundaries: sequence s owns the pages from cu[s] / 16 + 2 s on.
struct PackedPages {
  uint8_t *k, *v;  // [Hkv, count] pages
  int count;

  static constexpr int kOwn = 2;
  __device__ static int first(int begin, int sequence) {
    return begin / kPageTokens + kOwn * sequence;
  }
  __device__ int64_t offset(int kv_head, int page, int dim) const {
    return (int64_t{kv_head} * count + page) * (kPageTokens * dim);
  }
};

struct PackedPageRows : PackedRows<bf16> {
  int first_page, prefix_page;  // own pages and those of the prefix
};

struct PackedProblem : ForwardProblem<bf16> {
  using Rows = PackedPageRows;
  PackedPages pages;
  const float* key_scales;

  template <class Rule>
  __device__ __forceinline__ bool find(const Rule& rule, int block, int per_block,
                                       Rows& rows) const {
    if (!ForwardProblem<bf16>::find(rule, block, per_block, rows)) return false;
    const int lane = static_cast<int>(threadIdx.x % 32);
    int owner = rows.sequence_index;
    while (rows.sequence.prefix > 0 && owner > 0) {
      const int s = owner - 1 - lane;
      const uint32_t found = __ballot_sync(0xffffffffu, s >= 0 && !sequences.has_prefix(s));
      owner -= found != 0 ? __ffs(static_cast<int>(found)) : 32;
      if (found != 0) break;
    }
    rows.first_page = PackedPages::first(rows.sequence.begin, rows.sequence_index);
    rows.prefix_page = PackedPages::first(rows.sequence.prefix_begin, owner);
    return true;
  }
  // The page of the keys from key0 on; null: beyond the last one.
  __device__ __forceinline__ const uint8_t* page(const Rows& rows, int key0, bool is_values) const {
    if (key0 >= rows.keys.end) return nullptr;
    const int page = key0 / kPageTokens, shared = rows.sequence.prefix / kPageTokens;
    return (is_values ? pages.v : pages.k) +
           pages.offset(rows.kv_head,
                        page < shared ? rows.prefix_page + page : rows.first_page + page - shared,
                        format.head_dim);
  }
};

struct CacheProblem : PagedProblem<bf16, uint8_t> {
  static constexpr bool kPaged = true;
  const float* key_scales;

  __device__ int blocks() const { return static_cast<int>(tokens) * blocks_per_token(); }
  // The last tokens, which see the most keys, come first.
  template <class Rule>
  __device__ __forceinline__ bool find(const Rule& rule, int block, int per_block,
                                       Rows& rows) const {
    const int at = blocks() - 1 - block, columns = blocks_per_token();
    return PagedProblem<bf16, uint8_t>::find(rule, at / columns, at % columns, per_block, 32, rows);
  }
  __device__ __forceinline__ const uint8_t* page(const Rows& rows, int key0, bool is_values) const {
    const int64_t slot = key0 < rows.keys.end ? table.slot(rows.blocks, key0) : int64_t{-1};
    return slot < 0 ? nullptr
                    : (is_values ? rows.v : rows.k) + slot / kPageTokens * rows.pages.stride;
  }
};

constexpr int kPackThreads = 128;

// A block makes the pages of 16 keys of one head, and of their values. Those that the sequence does
// not have are zeros.
__global__ void __launch_bounds__(kPackThreads)
    pack_pages_kernel(const __grid_constant__ PackedProblem problem) {
  launch_dependents_and_wait();
  const int slot = static_cast<int>(blockIdx.x), kv_head = static_cast<int>(blockIdx.y),
            dim = problem.format.head_dim;
  const SequenceTile at = find_tile(problem.sequences, slot, kPageTokens, PackedPages::kOwn);
  const PackedSequence& sequence = at.sequence;
  const int key0 = (sequence.prefix / kPageTokens + at.tile) * kPageTokens;
  if (key0 >= sequence.keys()) return;
  const int64_t page = problem.pages.offset(kv_head, slot, dim);
  const bf16 *const k = problem.k + kv_head * problem.head_strides.k,
                    *const v = problem.v + kv_head * problem.head_strides.v;
  const auto row = [&](const bf16* from, int t) {
    return key0 + t < sequence.keys() ? from + sequence.token(key0 + t) * problem.kv_stride
                                      : nullptr;
  };
  const float k_inverse = 1 / problem.key_scales[kv_head],
              v_inverse = 1 / problem.key_scales[problem.kv_heads + kv_head];
  // Words of 16 numbers; value(e): number e.
  const auto store = [](uint8_t* to, const auto& value) {
    Pack<uint32_t, 4> words;
#pragma unroll
    for (int q = 0; q < 4; ++q)
      words.v[q] = pack_e4m3(value(2 * q + 8), value(2 * q), value(2 * q + 9), value(2 * q + 1));
    store_pack(reinterpret_cast<uint32_t*>(to), words);
  };
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kPackThreads) {
    const int t = i % kPageTokens, cell = i / kPageTokens;
    const bf16* const from = row(k, t);
    Pack<bf16, 8> x[2] = {};
    if (from != nullptr)
#pragma unroll
      for (int half = 0; half < 2; ++half) x[half] = load_pack<8>(from + 16 * cell + 8 * half);
    store(problem.pages.k + page + Pages::key_cell(t, cell, dim),
          [&](int e) { return to_float(x[e / 8].v[e % 8]) * k_inverse; });
  }
  for (int d = static_cast<int>(threadIdx.x); d < dim; d += kPackThreads) {
    float x[kPageTokens];
#pragma unroll
    for (int t = 0; t < kPageTokens; ++t) {
      const bf16* const from = row(v, t);
      x[t] = from == nullptr ? 0.0f : to_float(from[d]) * v_inverse;
    }
    store(problem.pages.v + page + 16 * d, [&](int e) { return x[e]; });
  }
}

// Launches the kernel with a problem of `blocks` row tiles at most.
template <class Problem>
void run(const char* name, const Problem& problem, const AttentionDesc& desc, int64_t dim,
         int64_t blocks, Device device) {
  Tensor scheduler = scheduler_state(device);
  const int64_t grid =
      std::min<int64_t>(blocks, ::cohort::cuda::gpu_properties(device).multiprocessors);
  with_rule<WindowRule<float>, ModifyRule<float>>(
      problem, desc, dim, problem.tokens, [&]<class Call>(const Call& call) {
        dispatch_head_dim(dim, [&]<int kDim>() {
          using Shape = Sm90Shape<kDim, 2, true>;
          launch(name, forward_sm90_kernel<Shape, Call>,
                 {.grid = blocks_for(grid, 1),
                  .block = Shape::kThreads,
                  .shared_bytes = Shape::template kSharedBytes<typename Call::Rows>,
                  .start = Start::kProgrammatic},
                 device, call, ForwardMaps{},
                 reinterpret_cast<SchedulerState*>(pointer<int32_t>(scheduler)));
        });
      });
}

// Throws for what the kernel does not support.
void check_support(const char* name, const Tensor& q, bool vectorized) {
  const int64_t dim = q.dim(2);
  COHORT_CHECK(q.dtype() == DType::kBF16 && (dim == 64 || dim == 128 || dim == 256) && vectorized,
               "[", name,
               "] FP8 attention on CUDA needs bf16, heads of 64, 128 or 256, and rows "
               "aligned to 16 bytes, got ",
               q.str());
  COHORT_CHECK(fits(kSm90a, ::cohort::cuda::gpu_properties(q.device())), "[", name,
               "] FP8 attention needs a GPU of compute capability 9.0; hint: only round the cache, "
               "with precision.cache: fp8");
}

}  // namespace

void attention_forward_fp8(const AttentionForward& args) {
  constexpr const char* kName = "attention_forward";
  check_support(kName, args.q, true);
  PackedProblem problem{forward_problem<bf16>(args), {}, nullptr};
  check_support(kName, args.q, problem.format.vectorized);
  if (problem.tokens == 0) return;
  const Device device = args.q.device();
  const int64_t dim = args.q.dim(2), kv_heads = args.k.dim(1);
  const int64_t pages =
      tile_slots(problem.tokens, PackedPages::kOwn * problem.sequences.count, kPageTokens);
  Tensor memory = Tensor::empty({2, kv_heads, pages, kPageTokens * dim}, DType::kE4M3, device);
  auto* const k_pages = pointer<uint8_t>(memory);
  problem.pages = {.k = k_pages,
                   .v = k_pages + kv_heads * pages * kPageTokens * dim,
                   .count = static_cast<int>(pages)};
  problem.key_scales = pointer<float>(args.desc.fp8_scales) + args.q.dim(1);
  problem.slots = static_cast<int>(
      tile_slots(problem.tokens, problem.sequences.count, Sm90Shape<64, 2>::kRows));
  launch("attention_pack_pages", pack_pages_kernel,
         {.grid = dim3(blocks_for(pages, 1), static_cast<unsigned>(kv_heads)),
          .block = kPackThreads,
          .start = Start::kProgrammatic},
         device, problem);
  run(kName, problem, args.desc, dim, int64_t{problem.slots} * problem.heads, device);
}

void attention_paged_fp8(const AttentionPaged& args) {
  constexpr const char* kName = "attention_paged";
  COHORT_CHECK(args.cache.k.dtype() == DType::kE4M3, "[", kName,
               "] FP8 attention on CUDA needs a cache in e4m3, got ", args.cache.k.str());
  CacheProblem problem{paged_problem<bf16, uint8_t>(args), nullptr};
  check_support(kName, args.q,
                problem.format.vectorized &&
                    aligned(pointer<uint8_t>(args.cache.k), pointer<uint8_t>(args.cache.v)));
  if (problem.tokens == 0) return;
  problem.key_scales = key_scales(args.cache);
  const int64_t blocks = problem.tokens * problem.blocks_per_token();
  COHORT_CHECK(blocks < (1 << 30), "[", kName, "] too many tokens and heads: ", args.q.str());
  run(kName, problem, args.desc, args.q.dim(2), blocks, args.q.device());
}

}  // namespace cohort::kernels::cuda
