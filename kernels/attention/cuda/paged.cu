// The paged key/value cache on CUDA: writing it, and attention over it.
//
// In attention a block takes tokens of one sequence that stand together in the batch, with up to
// 64 of the query heads that share a key head: up to 64 rows. Which tokens these are only the
// device knows: a token leads a block if its number is a multiple of what a block holds, or its
// sequence is not that of the token before; the other tokens' blocks end at once. No value is read
// by the host, so that a call can be captured in a graph. Decode steps have a kernel of their own
// (decode.cu) where it takes them.
#include <limits>

#include "kernels/attention/cuda/attend.cuh"
#include "kernels/attention/cuda/attend_float.cuh"
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

// A block has one token, and a thread N elements at a time. First come the packs that are rotated:
// the queries, which stay in their place, and the keys, which go to the token's slot of the cache.
// Then those that are copied there: values, and keys that are not rotated.
template <class T, int N>
__global__ void __launch_bounds__(kWriteThreads)
    rope_kv_write_kernel(const __grid_constant__ WriteProblem<T> p) {
  start_beside_previous();
  const int64_t token = blockIdx.x;
  const int sequence = p.sequences[token], position = p.positions[token];
  if (sequence < 0 || position < 0) return;  // idle
  const int64_t slot =
      p.table.has(sequence) ? p.table.slot(p.table.row(sequence), position) : int64_t{-1};
  const int dim = p.head_dim, width = p.kv_heads * dim;  // of a slot
  T* const q = p.qkv + token * (p.heads * dim + 2 * width);
  T* const keys = p.k_cache + slot * width;
  T* const values = p.v_cache + slot * width;
  const bool rotates = p.rope.data != nullptr;
  const int packs = dim / 2 / N;  // of pairs, of a head
  const int rotated = rotates ? (p.heads + p.kv_heads) * packs : 0;
  const int copied = (rotates ? width : 2 * width) / N;
  for (int i = static_cast<int>(threadIdx.x); i < rotated + copied; i += kWriteThreads) {
    if (i < rotated) {
      const int head = i / packs, pair = (i - head * packs) * N;
      T* const x = q + head * dim + pair;
      if (head >= p.heads && slot < 0) continue;
      T* const y = head < p.heads ? x : keys + (head - p.heads) * dim + pair;
      rotate<N>(y, x, dim / 2, Angles<N>(p.rope, position, pair), 1.0f, false);
    } else if (slot >= 0) {
      // Counted from the token's first key.
      const int at = (rotates ? width : 0) + (i - rotated) * N;
      store_raw(at < width ? keys + at : values + (at - width),
                load_raw<N>(q + p.heads * dim + at));
    }
  }
}

// Rows (token, head): the heads of a token side by side.
template <class T>
struct PagedRows {
  const T *q, *k, *v;  // q: of the first row's token and head; k, v: of the key head, in slot 0
  T* o;
  const int32_t* positions;  // of the first row's token on
  const int32_t* blocks;     // the sequence's row of the table
  PageTable table;
  int64_t row0;                 // the first row's token and head, counted together
  int64_t q_stride, kv_stride;  // elements from token to token of q, from slot to slot
  int all_heads, heads;         // of a token, and those of them in this block
  int head_dim, count;
  int first_key, keys;  // the rows see keys first_key .. keys - 1, each some of them

  __device__ const T* query(int r) const {
    return r < count ? q + r / heads * q_stride + static_cast<int64_t>(r % heads) * head_dim
                     : nullptr;
  }
  __device__ int64_t joined_row(int r) const {
    return row0 + static_cast<int64_t>(r / heads) * all_heads + r % heads;
  }
  __device__ T* output(int r) const { return o + joined_row(r) * head_dim; }
  __device__ int visible(int r) const {
    return r >= count ? 1 : table.keys_of(positions[r / heads]);
  }
  __device__ int64_t key_offset(int j) const {
    if (j >= keys) return -1;
    const int64_t slot = table.slot(blocks, j);
    return slot < 0 ? -1 : slot * kv_stride;
  }
  // Dropout, which there is none of here, would ask for these.
  __device__ int head() const { return 0; }
  __device__ int64_t token(int) const { return 0; }
  __device__ void store_lse(int, float) const {}
};

constexpr int kPagedRows = 64;

template <class T>
struct PagedProblem {
  const T *q, *k, *v;
  T* o;
  const int32_t *sequences, *positions;
  PageTable table;
  int64_t tokens, q_stride;
  int heads, kv_heads;
  int parts;  // blocks that the heads of a group need
  AttendParams params;
  JoinedChunks joined;  // for all tokens and heads, or null

  // The sequence of a token that takes part.
  __device__ int sequence_of(int64_t token) const {
    return positions[token] < 0 ? -1 : sequences[token];
  }

  // The block's rows. False if its token leads no block. A token of no sequence gets zeros.
  __device__ __forceinline__ bool find(PagedRows<T>& rows) const {
    const int kv_head = static_cast<int>(blockIdx.y) / parts, group = heads / kv_heads;
    const int in_group = static_cast<int>(blockIdx.y) % parts * kPagedRows;
    const int width = min(kPagedRows, group - in_group), per_block = kPagedRows / width;
    const int64_t first = blockIdx.x;
    const int in_block = static_cast<int>(first % per_block), sequence = sequence_of(first);
    if (in_block != 0 && sequence_of(first - 1) == sequence) return false;
    const int64_t dim = params.head_dim, head = kv_head * group + in_group;
    rows = {.q = q + first * q_stride + head * dim,
            .k = k + kv_head * dim,
            .v = v + kv_head * dim,
            .o = o,
            .positions = positions + first,
            .blocks = table.has(sequence) ? table.row(sequence) : nullptr,
            .table = table,
            .row0 = first * heads + head,
            .q_stride = q_stride,
            .kv_stride = kv_heads * dim,
            .all_heads = heads,
            .heads = width,
            .head_dim = params.head_dim,
            .count = 0,
            .first_key = 0,
            .keys = 0};
    // The first token after these that is of another sequence ends the block.
    const int limit =
        static_cast<int>(min(static_cast<int64_t>(per_block - in_block), tokens - first));
    const int lane = static_cast<int>(threadIdx.x % 32);
    int count = limit;
    for (int i = lane; i - lane < limit && count == limit; i += 32) {
      const uint32_t others =
          __ballot_sync(0xffffffffu, i < limit && sequence_of(first + i) != sequence);
      if (others != 0) count = i - lane + __ffs(static_cast<int>(others)) - 1;
    }
    int fewest = std::numeric_limits<int>::max();
    for (int i = lane; i - lane < count; i += 32) {
      const int keys = table.keys_of(rows.positions[min(i, count - 1)]);
      rows.keys = max(rows.keys, __reduce_max_sync(0xffffffffu, keys));
      fewest = min(fewest, __reduce_min_sync(0xffffffffu, keys));
    }
    rows.first_key = max(0, fewest - params.window);
    rows.count = count * width;
    if (rows.blocks != nullptr) return true;
    for (int r = 0; r < rows.count; ++r)
      for (int d = static_cast<int>(threadIdx.x); d < params.head_dim;
           d += static_cast<int>(blockDim.x))
        rows.output(r)[d] = from_float<T>(0.0f);
    return false;
  }
};

template <int kDim>
using PagedShape = AttendShape<kDim, 4, 1>;

// A block has the rows that PagedProblem::find() gives it, 16 for each warp. One stage of keys
// leaves room for other blocks on the multiprocessor; the next tile is loaded while the softmax is
// under way.
template <int kDim>
__global__ void __launch_bounds__(PagedShape<kDim>::kThreads, kDim == 64    ? 3
                                                              : kDim == 128 ? 2
                                                                            : 1)
    attention_paged_kernel(const __grid_constant__ PagedProblem<__nv_bfloat16> problem) {
  extern __shared__ __align__(128) char shared[];
  start_beside_previous();
  PagedRows<__nv_bfloat16> rows;
  if (!problem.find(rows)) return;
  attend<PagedShape<kDim>, false>(rows, problem.params, shared, problem.joined);
}

// The same in f32, for up to 64 rows.
template <int kDim>
__global__ void __launch_bounds__(kFloatThreads)
    attention_paged_float_kernel(const __grid_constant__ PagedProblem<float> problem) {
  extern __shared__ __align__(128) char shared[];
  PagedRows<float> rows;
  if (!problem.find(rows)) return;
  attend_float<kDim>(rows, problem.params, reinterpret_cast<float*>(shared), problem.joined);
}

static_assert(kPagedRows == PagedShape<64>::kRows && kPagedRows == kFloatRows);

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
                            .rope = {},
                            .heads = static_cast<int>(qkv.dim(1) - 2 * kv_heads),
                            .kv_heads = static_cast<int>(kv_heads),
                            .head_dim = static_cast<int>(dim)};
    if (args.table.defined())
      problem.rope = {.data = pointer<float>(args.table),
                      .rows = args.table.dim(0),
                      .half = static_cast<int>(dim / 2)};
    constexpr int kWidth = kPackSize<T>;
    const bool vectorized = dim % (2 * kWidth) == 0 && aligned(problem.k_cache, problem.v_cache,
                                                               problem.qkv, problem.rope.data);
    launch("rope_kv_write",
           vectorized ? rope_kv_write_kernel<T, kWidth> : rope_kv_write_kernel<T, 1>,
           {.grid = blocks_for(tokens, 1), .block = kWriteThreads, .start = Start::kBesidePrevious},
           qkv.device(), problem);
  });
}

void attention_paged(const AttentionPaged& args) {
  const int64_t tokens = args.q.dim(0), heads = args.q.dim(1), dim = args.q.dim(2),
                kv_heads = args.cache.k.dim(2);
  dispatch_device(args.q.dtype(), "attention_paged", [&]<class T>() {
    PagedProblem<T> problem{
        .q = pointer<T>(args.q),
        .k = pointer<T>(args.cache.k),
        .v = pointer<T>(args.cache.v),
        .o = pointer<T>(args.o),
        .sequences = pointer<int32_t>(args.sequences),
        .positions = pointer<int32_t>(args.positions),
        .table = page_table(args.cache),
        .tokens = tokens,
        .q_stride = args.q.strides()[0],
        .heads = static_cast<int>(heads),
        .kv_heads = static_cast<int>(kv_heads),
        .parts = static_cast<int>((heads / kv_heads + kPagedRows - 1) / kPagedRows),
        .params = {.c = exponent_scale(args.desc, dim),
                   .window = key_window(args.desc),
                   .head_dim = static_cast<int>(dim),
                   .vectorized = vectorized_heads<T>(args.q, args.cache.k, args.cache.v, args.o),
                   .dropout = {}},
        .joined = {}};
    const dim3 grid(blocks_for(tokens, 1), static_cast<unsigned>(kv_heads * problem.parts));
    dispatch_head_dim(dim, [&]<int kDim>() {
      constexpr bool kFloat = std::is_same_v<T, float>;
      const bool in_shared =
          kFloat &&
          ::cohort::cuda::is_for_hopper(
              reinterpret_cast<const void*>(attention_paged_float_kernel<kDim>), args.q.device());
      Tensor scratch;
      if (!in_shared && problem.table.capacity() > kAttentionChunk)
        scratch = joined_scratch(problem.joined, tokens * heads, kDim, args.q.device());
      if constexpr (kFloat) {
        const size_t joined = in_shared ? joined_bytes(kFloatRows, kDim) : 0;
        launch("attention_paged", attention_paged_float_kernel<kDim>,
               {grid, kFloatThreads, FloatShape<kDim>::kSharedBytes + joined}, args.q.device(),
               problem);
      } else {
        launch("attention_paged", attention_paged_kernel<kDim>,
               {.grid = grid,
                .block = PagedShape<kDim>::kThreads,
                .shared_bytes = PagedShape<kDim>::kSharedBytes,
                .start = Start::kBesidePrevious},
               args.q.device(), problem);
      }
    });
  });
}

}  // namespace cohort::kernels::cuda
