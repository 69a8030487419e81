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
    __syncwarp();  // each lane has written the same rows
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

// A consumer warpgroup in FP8. P V of a tile of keys has accumulators of its own, whose first part
// overlaps with exponentials. With heads of 256 there are no registers for that, and nothing
// overlaps within a warpgroup.
template <class Shape, class Problem>
class Fp8Consumer : public Consumer<Shape, Problem> {
  using Base = Consumer<Shape, Problem>;

 public:
  __device__ Fp8Consumer(const typename Problem::Rows& rows, const Problem& problem, char* memory,
                         const ForwardPipelines<Shape>& pipelines, int n)
      : Base(rows, problem, memory, pipelines, n) {
    // If no score is modified, with the factor of exponents.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = query_scale(thread_row() + 8 * r) * problem.key_scales[kv_head()];
      Base::score_factor_[r] = Base::Rule::kModifies ? scale : problem.rule.exponent * scale;
    }
  }
  __device__ __forceinline__ int run(const IndexRange<int>& tiles, int i) {
    return Base::run_with(tiles, i,
                          [&](int tile, int end, int n) { return compute(tile, end, n); });
  }

 private:
  using Base::begin_softmax, Base::end_chunk, Base::end_softmax, Base::ping_pong_arrive,
      Base::ping_pong_wait, Base::store, Base::thread_row, Base::tile_from;
  using Base::combined_, Base::group_, Base::o_, Base::p_, Base::pipelines_, Base::problem_,
      Base::rows_, Base::s_, Base::shared_, Base::state_;
  using Base::kChunkTiles, Base::kDim, Base::kGroups, Base::kKeys;
  static constexpr int kPartColumns = kDim > 128 ? 32 : 64;  // columns of O at a time
  static constexpr int kCoreMatrix = 128;                    // bytes; the stride along K of Q and K

  __device__ __forceinline__ int kv_head() const {
    return rows_.head(0) / (problem_.heads / problem_.kv_heads);
  }
  // The scale of the queries of a row of the block.
  __device__ __forceinline__ float query_scale(int row) const {
    return problem_.key_scales[rows_.head(row) - problem_.heads];
  }

  // Operands of S from a head dim on, a multiple of 16.
  __device__ __forceinline__ MatrixDescriptor queries(int dim) const {
    return matrix_descriptor(shared_ + group_ * Shape::kQueryBytes, kCoreMatrix)
        .plus(dim / 16 * kCoreMatrix);
  }
  __device__ __forceinline__ MatrixDescriptor keys(const PipelineState<kStages>& state,
                                                   int dim) const {
    return matrix_descriptor(shared_ + Shape::kKeyTiles + state.index * Shape::kTileBytes,
                             kCoreMatrix)
        .plus(dim / 16 * kCoreMatrix);
  }
  // Issues S = Q K^T of the first 128 head dims.
  __device__ __forceinline__ void issue_scores(int i) {
    const PipelineState<kStages> state(i);
    pipelines_.keys.consumer_wait(state);
    wgmma_fence();
#pragma unroll
    for (int dim = 0; dim < std::min(kDim, 128); dim += 32)
      wgmma_e4m3<8 * kDim, 8 * kDim>(s_, queries(dim), keys(state, dim), dim > 0);
    wgmma_commit();
  }
  template <int kPending>
  __device__ __forceinline__ void complete_scores(int i) {
    wgmma_wait<kPending>();
    wgmma_fence_operand(s_);
    if constexpr (kDim > 128) add_later_scores(i);
    pipelines_.keys.consumer_release_warp(i);
  }
  // Adds the sums over the head dims from 128 on, of 32 keys at a time for fewer registers.
  __device__ __forceinline__ void add_later_scores(int i) {
    const PipelineState<kStages> state(i);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float later[4][4];
      set_zero(later);
      wgmma_fence_operand(later);
      wgmma_fence();
#pragma unroll
      for (int dim = 128; dim < kDim; dim += 32)
        wgmma_e4m3<8 * kDim, 8 * kDim>(later, queries(dim),
                                       keys(state, dim).plus(half * (32 * kDim)), dim > 128);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_fence_operand(later);
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s_[4 * half + n][e] += later[n][e];
    }
  }

  // Rounds the queries of the warpgroup to e4m3, in core matrices.
  __device__ __forceinline__ void load_queries() {
    const int lane = static_cast<int>(threadIdx.x % 32), quad = lane % 4;
    named_barrier(4 + group_, kWarpgroup);  // the previous queries have been read
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = thread_row() + 8 * r;
      // Rows that do not exist have the queries of the first one: their results are not stored.
      const bf16* const q = rows_.query(at < rows_.count ? at : 0) + 2 * quad;
      const float inverse = 1 / query_scale(at);
      const uint32_t to =
          shared_ + group_ * Shape::kQueryBytes + at % 64 / 8 * (8 * kDim) + at % 8 * 16 + 4 * quad;
      Pack<bf16, 2> x[kDim / 8];
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) x[n] = load_pack<2>(q + 8 * n);
#pragma unroll
      for (int cell = 0; cell < kDim / 16; ++cell) {
        const Pack<bf16, 2>&low = x[2 * cell], &high = x[2 * cell + 1];
        const uint32_t word =
            pack_e4m3(to_float(high.v[0]) * inverse, to_float(low.v[0]) * inverse,
                      to_float(high.v[1]) * inverse, to_float(low.v[1]) * inverse);
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(to + kCoreMatrix * cell), "r"(word)
                     : "memory");
      }
    }
    fence_proxy_async();
    named_barrier(4 + group_, kWarpgroup);
  }

  // Waits for the values of a tile, and zeroes those that no row of the block sees in the page of
  // the last key: P is 0 for them, but the bytes of another sequence may be NaN.
  __device__ __forceinline__ void wait_for_values(int i, int tile) {
    const PipelineState<kStages> state(i);
    pipelines_.values.consumer_wait(state);
    if constexpr (Problem::kPaged) {
      const int keys = rows_.keys.end - tile * kKeys;
      if (keys >= kKeys || keys % kPageTokens == 0) return;
      const uint32_t page = shared_ + Shape::kValueTiles + state.index * Shape::kTileBytes +
                            keys / kPageTokens * (kPageTokens * kDim);
#pragma unroll 1
      for (int d = static_cast<int>(threadIdx.x) % kWarpgroup; d < kDim; d += kWarpgroup)
        for (int key = keys % kPageTokens; key < kPageTokens; ++key)
          asm volatile("st.shared.u8 [%0], %1;\n" ::"r"(page + 16 * d + cell_position(key)), "r"(0)
                       : "memory");
      fence_proxy_async();
      named_barrier(4 + group_, kWarpgroup);
    }
  }
  // Issues P V of the columns of a part, from zero.
  __device__ __forceinline__ void issue_part(int i, int part) {
    const int stage = PipelineState<kStages>(i).index;
    const MatrixDescriptor values =
        matrix_descriptor(shared_ + Shape::kValueTiles + stage * Shape::kTileBytes, 16 * kDim)
            .plus(16 * kPartColumns * part);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kGroups / 2; ++k)
      wgmma_e4m3<128>(part_, p_[k], values.plus(32 * kDim * k), k > 0);
    wgmma_commit();
  }
  // Waits for a part, and O = alpha O + P V.
  __device__ __forceinline__ void add_part(int part, const float (&alpha)[2]) {
    wgmma_wait<0>();
    wgmma_fence_operand(part_);
#pragma unroll
    for (int n = 0; n < kPartColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& o = o_[kPartColumns / 8 * part + n][e];
        o = __fmaf_rn(o, alpha[e / 2], part_[n][e]);
      }
  }
  // Adds the parts from kFirst on, which has been issued.
  template <int kFirst>
  __device__ __forceinline__ void add_parts(int i, const float (&alpha)[2]) {
#pragma unroll
    for (int part = kFirst; part < kDim / kPartColumns; ++part) {
      add_part(part, alpha);
      if (part + 1 < kDim / kPartColumns) issue_part(i, part + 1);
    }
    pipelines_.values.consumer_release_warp(i);
  }

  // Rounds P. The order within 16 keys is that of the pages of values.
  __device__ __forceinline__ void round_probabilities() {
#pragma unroll
    for (int k = 0; k < kGroups / 2; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 4 * k + i / 2 * 2, e = i % 2 * 2;
        p_[k][i] = pack_e4m3(s_[n + 1][e], s_[n][e], s_[n + 1][e + 1], s_[n][e + 1]);
      }
  }

  // As that of the base.
  __device__ __forceinline__ int compute(int tile, int end, int i) {
    constexpr bool kOverlaps = kDim <= 128;
    constexpr int kLater = kDim > 64 ? 1 : 0;  // the first part that overlaps with the second row
    set_zero(o_);
    const int first_chunk = tile / kChunkTiles;
    float alpha[2];
    load_queries();
    ping_pong_wait();
    issue_scores(i);
    ping_pong_arrive();
    complete_scores<0>(i);
    end_softmax(begin_softmax(tile, alpha));
    round_probabilities();
    int next = tile_from(tile + 1, end);
#pragma unroll 1
    for (int following;; tile = next, next = following, ++i) {
      const float o_factors[2] = {alpha[0], alpha[1]};
      if (!kOverlaps || next >= end) {
        wait_for_values(i, tile);
        issue_part(i, 0);
        add_parts<0>(i, o_factors);
        if (next >= end) break;
      }
      ping_pong_wait();
      issue_scores(i + 1);
      if constexpr (kOverlaps) {
        wait_for_values(i, tile);
        issue_part(i, 0);
      }
      following = tile_from(next + 1, end);
      complete_scores<kOverlaps ? 1 : 0>(i + 1);
      ping_pong_arrive();  // later than in bf16, so that the exponentials of the two alternate
      const bool ends_chunk = next / kChunkTiles > tile / kChunkTiles;
      bool added = !kOverlaps;
      if (ends_chunk) {
        if (!added) add_parts<0>(i, o_factors);
        added = true;
        end_chunk(tile / kChunkTiles, first_chunk);
      }
      float safe_row_max = begin_softmax(next, alpha);
      if (kLater > 0 && !added) {
        add_part(0, o_factors);
        issue_part(i, 1);
      }
      // A dependency that keeps the exponentials of the second row behind the matmuls of part 1.
      safe_row_max = __shfl_sync(0xffffffffu, safe_row_max, static_cast<int>(threadIdx.x % 32));
      end_softmax(safe_row_max);
      if (!added) add_parts<kLater>(i, o_factors);
      round_probabilities();
    }
    reduce_l(state_);
    if (tile / kChunkTiles > first_chunk)
      combine_chunk<Shape>(o_, state_, rows_, combined_, thread_row());
    const float scale = problem_.key_scales[problem_.kv_heads + kv_head()];
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) o_[n][e] *= scale;
    store();
    return i + 1;
  }

  float part_[kPartColumns / 8][4];  // P V of a part
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
          launch(name, forward_sm90_kernel<Shape, Call, Fp8Consumer<Shape, Call>>,
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
