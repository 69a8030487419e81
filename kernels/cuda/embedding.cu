// Table lookup and its gradient on CUDA. The gradient needs the tokens of each id together and in
// order, without a count on the host and without float atomics:
//   1. sort: by id, stably, so that the tokens of an id keep their order;
//   2. segments: every sorted token finds where its id begins and ends by bisection;
//   3. sum: the tokens of an id in groups of kGroup; the only group of an id adds to the table,
//      groups of a more frequent one go to scratch rows;
//   4. reduce: adds the scratch rows of frequent ids to the table.
#include <bit>
#include <cmath>

#include "kernels/cuda/rows.cuh"
#include "kernels/embedding.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 64;  // tokens summed one after the other; embedding.h promises it

// A block has one row of y, or several short ones; a thread moves packs of the table's row. An id
// outside the table gives a row of NaN.
template <class T>
__global__ void __launch_bounds__(kMaxGroup)
    lookup_kernel(T* y, const T* table, const int32_t* ids, int64_t vocab, const RowLayout layout) {
  wait_for_previous();
  let_next_start();  // only now: see embedding.h
  constexpr int N = RowSlice<T>::N;
  const RowSlice<T> at(layout);
  if (at.cols == 0) return;
  const int id = ids[at.row];
  // All threads of the row read the same id. Rows of the table lie anywhere, but each is read as
  // one run of memory, by vectorized accesses where the table is aligned.
  const bool known = id >= 0 && id < vocab;
  for (int tile = 0; tile < layout.tiles; ++tile) {
    typename RowSlice<T>::Packs packs;
    if (known) at.load(table + int64_t{id} * layout.cols, tile, packs);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u) {
      if (!known) {
        float nothing[N];
#pragma unroll
        for (int n = 0; n < N; ++n) nothing[n] = NAN;
        packs[u] = to_raw<T>(nothing);
      }
      at.store(y + at.row * layout.cols, tile, u, packs[u]);
    }
  }
}

// Tokens in the order of (id, position), with their ids; ids outside the table come last, as
// `vocab`. Of each sorted token: where its id's tokens begin and end.
struct Sorted {
  int32_t *order, *ids;
  int2* segment;
};

constexpr int kSortThreads = 1024;
constexpr int kDigitBits = 9;  // at most; 1 << kDigitBits blocks read all keys

// One pass of a radix sort: block d places the keys whose digit is d, behind those of the blocks
// before it and in their order. It reads all keys twice, to count and to place; they come from the
// caches. A warp has a stretch of neighbouring keys.
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(int32_t* to_keys, int32_t* to_order, const int32_t* keys, const int32_t* order,
                int tokens, int vocab, int shift, int digits) {
  constexpr int kWarps = kSortThreads / 32;
  __shared__ int below_of_warp[kWarps], equal_of_warp[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Keys of a warp: as many for each, rounded up to whole steps of 32 lanes.
  const int stretch = (tokens + kSortThreads - 1) / kSortThreads * 32;
  const int begin = min(warp * stretch, tokens), end = min(begin + stretch, tokens);
  const auto key_of = [&](int i) {
    const int id = keys[i];
    return id >= 0 && id < vocab ? id : vocab;
  };
  const auto digit_of = [&](int key) { return (key >> shift) & (digits - 1); };
  const int mine = blockIdx.x;

  // Count: how many keys of the warp's stretch have a smaller digit, and how many the block's own.
  int below = 0, equal = 0;
  // Only counts, so the loads are independent and eight are under way.
#pragma unroll 8
  for (int i = begin + lane; i < end; i += 32) {
    const int digit = digit_of(key_of(i));
    below += digit < mine;
    equal += digit == mine;
  }
  below = __reduce_add_sync(0xffffffffu, below);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (lane == 0) {
    below_of_warp[warp] = below;
    equal_of_warp[warp] = equal;
  }
  __syncthreads();
  // A warp without a key of this digit has nothing to place. Its counts are in shared memory.
  if (equal == 0) return;
  // Where the warp's first key goes: behind all keys of smaller digits and behind those of the same
  // digit in the warps before it. Lane l adds up what warp l has counted.
  int place =
      __reduce_add_sync(0xffffffffu, below_of_warp[lane] + (lane < warp ? equal_of_warp[lane] : 0));
  for (int first = begin; first < end; first += 32) {
    const int i = first + lane, key = i < end ? key_of(i) : 0;
    const bool hit = i < end && digit_of(key) == mine;
    // Lanes place their keys in the order of lanes, which is that of the input: the sort is stable.
    const unsigned hits = __ballot_sync(0xffffffffu, hit);
    if (hit) {
      // Behind the hits of the lanes below.
      const int to = place + __popc(hits & ((1u << lane) - 1));
      to_keys[to] = key;
      to_order[to] = order != nullptr ? order[i] : i;
    }
    place += __popc(hits);
  }
}

// The first of n ascending values that is not below `bound`.
__device__ int lower_bound(const int32_t* values, int n, int bound) {
  int begin = 0;
  while (n > 0) {
    const int half = n / 2;
    if (values[begin + half] < bound) {
      begin += half + 1;
      n -= half + 1;
    } else {
      n = half;
    }
  }
  return begin;
}

// One thread per sorted token. Bisection over the sorted ids, which are in the cache, needs no pass
// over them that waits for another.
__global__ void __launch_bounds__(kThreads) segment_kernel(const Sorted sorted, int tokens) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= tokens) return;
  const int id = sorted.ids[i];
  sorted.segment[i] = {lower_bound(sorted.ids, tokens, id),
                       lower_bound(sorted.ids, tokens, id + 1)};
}

// The scratch row for the group of a frequent id that starts at sorted token i. Groups that do not
// begin an id are kGroup apart or more, and so are those that do; hence two rows for kGroup tokens.
__device__ __forceinline__ int64_t scratch_row(int i, const int2& segment) {
  return 2 * int64_t{i / kGroup} + (i > segment.x);
}

template <int N>
__device__ __forceinline__ void add_to(float* out, const float (&sum)[N]) {
  float value[N];
  load_floats(out, value);
#pragma unroll
  for (int n = 0; n < N; ++n) value[n] += sum[n];
  store_floats(out, value);
}

// Block x: the group that starts at sorted token x, if one does. Each thread has N columns. What it
// reads first depends on x only, and the table's row comes together with the gradients'.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    group_sum_kernel(float* dtable, float* scratch, const T* dy, const Sorted sorted, int vocab,
                     int cols) {
  const int i = blockIdx.x, id = sorted.ids[i], first = sorted.order[i];
  const int2 segment = sorted.segment[i];
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (id == vocab || (i - segment.x) % kGroup != 0 || c >= cols) return;
  // What this block adds up: at most kGroup tokens of the id, one after the other, in the order of
  // their positions. An id with no other group ends here: its sum is added to the table.
  const int count = min(segment.y - i, kGroup);
  // Whether this group is all of its id.
  const bool whole = segment.y - segment.x <= kGroup;
  // f32 rows either way: of the table's gradient, or of scratch.
  float* out =
      whole ? dtable + int64_t{id} * cols + c : scratch + scratch_row(i, segment) * cols + c;
  float sum[N] = {}, old[N] = {};
  const auto add = [&](int row) {
    const auto grad = load_raw<N>(dy + int64_t{row} * cols + c);
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] += element(grad, n);
  };
  // The table's old row is loaded with the first gradient, and added last.
  if (whole) load_floats(out, old);
  add(first);
#pragma unroll 4
  for (int k = 1; k < count; ++k) add(sorted.order[i + k]);
#pragma unroll
  for (int n = 0; n < N; ++n) sum[n] += old[n];
  store_floats(out, sum);
}

// Block x: the frequent id that begins among kGroup sorted tokens from kGroup x on; there is at
// most one.
template <int N>
__global__ void __launch_bounds__(kThreads)
    reduce_groups_kernel(float* dtable, const float* scratch, const Sorted sorted, int tokens,
                         int vocab, int cols) {
  // Find it: each thread looks at some of the sorted tokens. One of them at most begins a frequent
  // id, because such an id is longer than the stretch.
  __shared__ int begin;
  if (threadIdx.x == 0) begin = -1;
  __syncthreads();
  for (int k = threadIdx.x; k < kGroup; k += blockDim.x) {
    const int i = blockIdx.x * kGroup + k;
    // Ids outside the table come last and have no row.
    if (i >= tokens || sorted.ids[i] == vocab) continue;
    const int2 segment = sorted.segment[i];
    if (segment.x == i && segment.y - i > kGroup) begin = i;
  }
  __syncthreads();
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (begin < 0 || c >= cols) return;
  // Then each thread adds the scratch rows of its N columns in the order of groups, and the sum to
  // the table. No other block writes this row.
  const int2 segment = sorted.segment[begin];
  float sum[N] = {};
#pragma unroll 8
  for (int i = begin; i < segment.y; i += kGroup) {
    float part[N];
    load_floats(scratch + scratch_row(i, segment) * cols + c, part);
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] += part[n];
  }
  add_to(dtable + int64_t{sorted.ids[begin]} * cols + c, sum);
}

// Steps 3 and 4.
template <class T, int N>
void sum_segments(Tensor& dtable, const Tensor& dy, const Sorted& sorted) {
  const Device device = dy.device();
  const auto tokens = static_cast<int>(dy.dim(0)), cols = static_cast<int>(dy.dim(1));
  const auto vocab = static_cast<int>(dtable.dim(0));
  const unsigned groups = blocks_for(tokens, kGroup);
  Tensor scratch = Tensor::empty({2 * int64_t{groups}, cols}, DType::kF32, device);
  // Enough threads for a row of columns, in blocks of at most kThreads; longer rows get several
  // blocks along y.
  unsigned threads = 32;
  while (threads < kThreads && static_cast<int>(threads) * N < cols) threads *= 2;
  const unsigned across = blocks_for(cols, int64_t{threads} * N);
  auto* out = pointer<float>(dtable);
  launch("embedding_sum", group_sum_kernel<T, N>,
         {{static_cast<unsigned>(tokens), across}, threads}, device, out, pointer<float>(scratch),
         pointer<T>(dy), sorted, vocab, cols);
  launch("embedding_reduce", reduce_groups_kernel<N>, {{groups, across}, threads}, device, out,
         pointer<float>(scratch), sorted, tokens, vocab, cols);
}

// Step 1. `a` and `b` are [2, tokens], keys and order; the last pass leaves its result in `a`.
void sort_tokens(const Tensor& ids, int vocab, int32_t* a, int32_t* b) {
  const auto tokens = static_cast<int>(ids.numel());
  const int bits = std::bit_width(static_cast<unsigned>(vocab));  // `vocab` is a key, too
  const int passes = (bits + kDigitBits - 1) / kDigitBits, digit = (bits + passes - 1) / passes;
  const int32_t *keys = pointer<int32_t>(ids), *order = nullptr;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = pass * digit;
    const unsigned blocks = std::min(1u << digit, (static_cast<unsigned>(vocab) >> shift) + 1);
    int32_t* to = (passes - pass) % 2 == 1 ? a : b;
    launch("embedding_sort", sort_kernel, {blocks, kSortThreads}, ids.device(), to, to + tokens,
           keys, order, tokens, vocab, shift, 1 << digit);
    keys = to;
    order = to + tokens;
  }
}

}  // namespace

void embedding_forward(const EmbeddingForward& args) {
  dispatch_device(args.table.dtype(), "embedding", [&]<class T>() {
    const T* in = pointer<T>(args.table);
    T* out = pointer<T>(args.y);
    const int64_t cols = args.table.dim(1);
    const RowLayout layout = row_layout<T>(args.y.rows(), cols, vectorized_rows(cols, in, out));
    launch("embedding", lookup_kernel<T>, layout.launch_shape(Start::kBesidePrevious),
           args.table.device(), out, in, pointer<int32_t>(args.ids), args.table.dim(0), layout);
  });
}

void embedding_backward(const EmbeddingBackward& args) {
  dispatch_device(args.dy.dtype(), "embedding_backward", [&]<class T>() {
    const int64_t tokens = args.dy.dim(0), cols = args.dy.dim(1), vocab = args.dtable.tensor.dim(0);
    COHORT_CHECK(tokens < (1 << 30) && cols < (1 << 30) && vocab < (1 << 30),
                 "[embedding_backward] sizes are too large: ", args.dtable.tensor.str(), " and ",
                 args.dy.str());
    if (args.dtable.mode == Grad::kOverwrite) args.dtable.tensor.zero_();
    if (args.dy.numel() == 0 || vocab == 0) return;
    const Device device = args.dy.device();
    Tensor keys = Tensor::empty({2, tokens}, DType::kI32, device), spare = Tensor::empty_like(keys);
    Tensor segments = Tensor::empty({tokens}, DType::kI64, device);
    const Sorted sorted{.order = pointer<int32_t>(keys) + tokens,
                        .ids = pointer<int32_t>(keys),
                        .segment = pointer<int2>(segments)};
    sort_tokens(args.ids, static_cast<int>(vocab), sorted.ids, pointer<int32_t>(spare));
    launch("embedding_segments", segment_kernel, {blocks_for(tokens, kThreads), kThreads}, device,
           sorted, static_cast<int>(tokens));
    constexpr int kWidth = kPackSize<T>;
    if (cols % kWidth == 0 && aligned(pointer<T>(args.dy), pointer<float>(args.dtable.tensor)))
      sum_segments<T, kWidth>(args.dtable.tensor, args.dy, sorted);
    else
      sum_segments<T, 1>(args.dtable.tensor, args.dy, sorted);
  });
}

}  // namespace cohort::kernels::cuda
