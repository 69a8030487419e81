// Paged key/value cache on CUDA: writes, and attention over it.
//
// In attention a block takes adjacent tokens of one sequence in the batch, with up to 64 of the
// query heads that share a key head: up to 64 rows. Only the device knows these tokens: a token
// leads a block if its index is a multiple of the tokens per block, or its sequence differs from
// that of the previous token; the blocks of all other tokens exit at once. The host reads no value,
// so a call can be captured in a graph. Decode steps have their own kernel (decode.cu) where it
// supports them.
#include <limits>

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
      rotate<N>(y, x, dim / 2, Angles<N>(p.rope, position, pair), 1.0f, false);
    } else if (slot >= 0) {
      // Offset from the first key of the token.
      const int at = (rotates ? width : 0) + (i - rotated) * N;
      store_raw(at < width ? keys + at : values + (at - width),
                load_raw<N>(q + p.heads * dim + at));
    }
  }
}

// Rows (token, head), with the heads of a token adjacent.
template <class T>
struct PagedRows {
  const T *q, *k, *v;        // q: first row; k, v: key head in slot 0
  T* o;                      // first row
  const int32_t* positions;  // from the token of the first row on
  const int32_t* blocks;     // block table row of the sequence
  PageTable table;
  int64_t row0;                           // index of the first row, token * all_heads + head
  int64_t q_stride, kv_stride, o_stride;  // token strides of q and o, and slot stride, in elements
  int all_heads, heads, first_head;       // heads of a token, and heads in this block
  int head_dim, count;
  IndexRange<int> keys;  // each row sees some of these keys
  int first_position;    // the lowest of the rows

  __device__ const T* query(int r) const {
    return r < count ? q + r / heads * q_stride + static_cast<int64_t>(r % heads) * head_dim
                     : nullptr;
  }
  __device__ int64_t combined_row(int r) const {
    return row0 + static_cast<int64_t>(r / heads) * all_heads + r % heads;
  }
  __device__ T* output(int r) const { return o + r / heads * o_stride + r % heads * head_dim; }
  template <class Rule>
  __device__ int end_key(const Rule&, int r) const {
    return r >= count ? 1 : table.keys_of(positions[r / heads]);
  }
  __device__ int64_t key_offset(int j) const {
    if (j >= keys.end) return -1;
    const int64_t slot = table.slot(blocks, j);
    return slot < 0 ? -1 : slot * kv_stride;
  }
  template <class Rule>
  __device__ typename Rule::Bound bind(const Rule& rule, int r) const {
    return rule.bind(0, head(r), Rule::kAllKeys);
  }
  __device__ int head(int r) const { return first_head + r % heads; }
  __device__ int position(int r) const {
    return r >= count ? 0 : table.keys_of(positions[r / heads]) - 1;
  }
  __device__ IndexRange<int> positions_range() const { return {first_position, keys.end}; }
  __device__ int64_t token(int) const { return 0; }  // for dropout, which no call has
  __device__ void store_lse(int, float) const {}
};

constexpr int kPagedRows = 64;

template <class T>
struct PagedProblem {
  const T *q, *k, *v;
  T* o;
  const int32_t *sequences, *positions;
  PageTable table;
  int64_t tokens, q_stride, o_stride;
  int heads, kv_heads;
  int parts;  // blocks per group of heads
  RowFormat format;
  CombinedChunks combined;  // for all tokens and heads, or null

  // Sequence of a token; -1 if idle.
  __device__ int sequence_of(int64_t token) const {
    return positions[token] < 0 ? -1 : sequences[token];
  }

  // Finds the rows of the block. Returns false if its token does not lead a block, or belongs to no
  // sequence; in the latter case it gets zeros.
  template <class Rule>
  __device__ __forceinline__ bool find(const Rule& rule, PagedRows<T>& rows) const {
    const int kv_head = static_cast<int>(blockIdx.y) / parts, group = heads / kv_heads;
    const int in_group = static_cast<int>(blockIdx.y) % parts * kPagedRows;
    const int width = min(kPagedRows, group - in_group), per_block = kPagedRows / width;
    const int64_t first = blockIdx.x;
    const int in_block = static_cast<int>(first % per_block), sequence = sequence_of(first);
    if (in_block != 0 && sequence_of(first - 1) == sequence) return false;
    const int64_t dim = format.head_dim, head = kv_head * group + in_group;
    rows = {.q = q + first * q_stride + head * dim,
            .k = k + kv_head * dim,
            .v = v + kv_head * dim,
            .o = o + first * o_stride + head * dim,
            .positions = positions + first,
            .blocks = table.has(sequence) ? table.row(sequence) : nullptr,
            .table = table,
            .row0 = first * heads + head,
            .q_stride = q_stride,
            .kv_stride = kv_heads * dim,
            .o_stride = o_stride,
            .all_heads = heads,
            .heads = width,
            .first_head = static_cast<int>(head),
            .head_dim = format.head_dim,
            .count = 0,
            .keys = {0, 0},
            .first_position = 0};
    // The block ends before the first token of another sequence.
    const int limit =
        static_cast<int>(min(static_cast<int64_t>(per_block - in_block), tokens - first));
    const int lane = static_cast<int>(threadIdx.x % 32);
    int count = limit;
    for (int i = lane; i - lane < limit && count == limit; i += 32) {
      const uint32_t others =
          __ballot_sync(0xffffffffu, i < limit && sequence_of(first + i) != sequence);
      if (others != 0) count = i - lane + __ffs(static_cast<int>(others)) - 1;
    }
    int min_keys = std::numeric_limits<int>::max();
    for (int i = lane; i - lane < count; i += 32) {
      const int keys = table.keys_of(rows.positions[min(i, count - 1)]);
      rows.keys.end = max(rows.keys.end, __reduce_max_sync(0xffffffffu, keys));
      min_keys = min(min_keys, __reduce_min_sync(0xffffffffu, keys));
    }
    rows.keys.first = max(0, rule.first_key(min_keys));
    rows.first_position = min_keys - 1;
    rows.count = count * width;
    if (rows.blocks != nullptr) return true;
    for (int r = 0; r < rows.count; ++r)
      for (int d = static_cast<int>(threadIdx.x); d < format.head_dim;
           d += static_cast<int>(blockDim.x))
        rows.output(r)[d] = from_float<T>(0.0f);
    return false;
  }
};

template <class T, int kDim, Tiles kTiles, class Rule>
struct PagedShape : RowsShape<T, kDim, paged_tiles(kDim, kTiles), false> {
  // As in forward.cu.
  static constexpr int kBlocks = std::is_same_v<T, float>       ? 0
                                 : Rule::kGeneral || kDim > 128 ? 1
                                 : kDim == 64                   ? 3
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
  Tensor scratch;
  if (problem.table.capacity() > kAttentionChunk)
    scratch = combined_scratch(problem.combined, problem.tokens * problem.heads, kDim, device);
  constexpr auto kSharedBytes = rows_shared_bytes<T, kDim, paged_tiles>;
  dispatch_tiles<kSharedBytes>(device, [&]<Tiles kTiles>() {
    launch("attention_paged", attention_paged_kernel<T, kDim, kTiles, Problem>,
           {.grid = grid,
            .block = PagedShape<T, kDim, kTiles, decltype(Problem::rule)>::kThreads,
            .shared_bytes = kSharedBytes(kTiles),
            .start = std::is_same_v<T, float> ? Start::kAfterPrevious : Start::kProgrammatic},
           device, problem);
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
                            .rope = RopeTable(args.table),
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
  const int64_t tokens = args.q.dim(0), heads = args.q.dim(1), dim = args.q.dim(2),
                kv_heads = args.cache.k.dim(2);
  dispatch_device(args.q.dtype(), "attention_paged", [&]<class T>() {
    const PagedProblem<T> problem{
        .q = pointer<T>(args.q),
        .k = pointer<T>(args.cache.k),
        .v = pointer<T>(args.cache.v),
        .o = pointer<T>(args.o),
        .sequences = pointer<int32_t>(args.sequences),
        .positions = pointer<int32_t>(args.positions),
        .table = page_table(args.cache),
        .tokens = tokens,
        .q_stride = args.q.strides()[0],
        .o_stride = args.o.strides()[0],
        .heads = static_cast<int>(heads),
        .kv_heads = static_cast<int>(kv_heads),
        .parts = static_cast<int>((heads / kv_heads + kPagedRows - 1) / kPagedRows),
        .format = {.head_dim = static_cast<int>(dim),
                   .vectorized = vectorized_heads<T>(args.q, args.cache.k, args.cache.v, args.o)}};
    const auto run = [&](const auto& call) {
      dispatch_head_dim(dim, [&]<int kDim>() { run_paged<T, kDim>(call, args.q.device()); });
    };
    // As in the forward, f32 kernels are compiled for any call.
    if constexpr (std::is_same_v<T, float>)
      with_rule<AnyRule<float>>(problem, args.desc, dim, tokens, run);
    else
      with_rule<ScoreRule<float>, GeneralRule<float>>(problem, args.desc, dim, tokens, run);
  });
}

}  // namespace cohort::kernels::cuda
