// Embedding lookup and its gradient on CUDA. The gradient adds the tokens of each id in order,
// without host synchronisation and without float atomics:
//   1. sort: stable sort by id, so that the tokens of an id keep their order;
//   2. segments: every sorted token finds the segment of its id by binary search;
//   3. sum: adds the tokens of an id in groups of kGroup; the only group of an id accumulates to
//      the table, the groups of a frequent id write scratch rows;
//   4. reduce: accumulates the scratch rows of frequent ids to the table.
#include <bit>
#include <cmath>

#include "kernels/cuda/rows.cuh"
#include "kernels/embedding.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 64;  // tokens summed sequentially, as documented in embedding.h

// A block has one row of y, or several short ones; a thread copies packs of the table's row. An
// out-of-range id gives a row of NaN.
template <class T>
__global__ void __launch_bounds__(kMaxGroup)
    lookup_kernel(T* y, const T* table, const int32_t* ids, int64_t vocab, const RowLayout layout) {
  wait_on_dependent_grids();
  launch_dependent_grids();  // not earlier: see embedding.h
  constexpr int N = RowSlice<T>::N;
  const RowSlice<T> at(layout);
  if (at.cols == 0) return;
  const int id = ids[at.row];
  const bool is_valid = id >= 0 && id < vocab;
  for (int tile = 0; tile < layout.tiles; ++tile) {
    typename RowSlice<T>::Packs packs;
    if (is_valid) at.load(table + int64_t{id} * layout.cols, tile, packs);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u) {
      if (!is_valid) {
        float nan[N];
#pragma unroll
        for (int n = 0; n < N; ++n) nan[n] = NAN;
        packs[u] = to_raw<T>(nan);
      }
      at.store(y + at.row * layout.cols, tile, u, packs[u]);
    }
  }
}

// Tokens sorted by (id, position), with their ids; out-of-range ids are last, as `vocab`.
struct Sorted {
  int32_t *order, *ids;
  int2* segment;  // begin and end of the sorted tokens with the same id
};

constexpr int kSortThreads = 1024;
constexpr int kMaxDigitBits = 9;  // 1 << kMaxDigitBits blocks read all keys

// One pass of a stable radix sort: block d scatters the keys whose digit is d, after those of
// smaller digits. It reads all keys twice, for counting and for scattering, mostly from cache. A
// warp has a range of adjacent keys.
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(int32_t* to_keys, int32_t* to_order, const int32_t* keys, const int32_t* order,
                int tokens, int vocab, int shift, int digits) {
  constexpr int kWarps = kSortThreads / 32;
  __shared__ int below_counts[kWarps], equal_counts[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Rounded up to whole steps of 32 lanes.
  const int keys_per_warp = (tokens + kSortThreads - 1) / kSortThreads * 32;
  const int begin = min(warp * keys_per_warp, tokens), end = min(begin + keys_per_warp, tokens);
  const auto key_of = [&](int i) {
    const int id = keys[i];
    return id >= 0 && id < vocab ? id : vocab;
  };
  const auto digit_of = [&](int key) { return (key >> shift) & (digits - 1); };
  const int block_digit = blockIdx.x;

  // Count the keys of the warp's range with a smaller digit and with the block's digit.
  int below = 0, equal = 0;
  // Independent loads, eight in flight.
#pragma unroll 8
  for (int i = begin + lane; i < end; i += 32) {
    const int digit = digit_of(key_of(i));
    below += digit < block_digit;
    equal += digit == block_digit;
  }
  below = __reduce_add_sync(0xffffffffu, below);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (lane == 0) {
    below_counts[warp] = below;
    equal_counts[warp] = equal;
  }
  __syncthreads();
  // Without a key of this digit the warp is done; its counts are in shared memory.
  if (equal == 0) return;
  // Output offset of the warp's first key: after all keys of smaller digits and the keys of this
  // digit in previous warps. Lane l contributes the counts of warp l.
  int offset =
      __reduce_add_sync(0xffffffffu, below_counts[lane] + (lane < warp ? equal_counts[lane] : 0));
  for (int first = begin; first < end; first += 32) {
    const int i = first + lane, key = i < end ? key_of(i) : 0;
    const bool matches = i < end && digit_of(key) == block_digit;
    // Keys are scattered in lane order, which is input order, so the sort is stable.
    const unsigned match_mask = __ballot_sync(0xffffffffu, matches);
    if (matches) {
      const int to = offset + __popc(match_mask & ((1u << lane) - 1));
      to_keys[to] = key;
      to_order[to] = order != nullptr ? order[i] : i;
    }
    offset += __popc(match_mask);
  }
}

// Index of the first of n ascending values that is not below `bound`.
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

// One thread per sorted token. Binary search over the cached ids avoids passes that depend on each
// other.
__global__ void __launch_bounds__(kThreads) segment_kernel(const Sorted sorted, int tokens) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= tokens) return;
  const int id = sorted.ids[i];
  sorted.segment[i] = {lower_bound(sorted.ids, tokens, id),
                       lower_bound(sorted.ids, tokens, id + 1)};
}

// Scratch row of the group of a frequent id that starts at sorted token i. First groups of ids are
// at least kGroup tokens apart, and so are the other groups; hence two rows per kGroup tokens.
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

// Block x: the group that starts at sorted token x, if any. Each thread has N columns. The first
// loads depend on x only, and the table's row is loaded together with the gradients.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    group_sum_kernel(float* dtable, float* scratch, const T* dy, const Sorted sorted, int vocab,
                     int cols) {
  const int i = blockIdx.x, id = sorted.ids[i], first = sorted.order[i];
  const int2 segment = sorted.segment[i];
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (id == vocab || (i - segment.x) % kGroup != 0 || c >= cols) return;
  // At most kGroup tokens of the id, in the order of their positions. The sum of an id with a
  // single group is added to the table.
  const int count = min(segment.y - i, kGroup);
  const bool is_only_group = segment.y - segment.x <= kGroup;
  float* out = is_only_group ? dtable + int64_t{id} * cols + c
                             : scratch + scratch_row(i, segment) * cols + c;
  float sum[N] = {}, old[N] = {};
  const auto add = [&](int row) {
    const auto grad = load_raw<N>(dy + int64_t{row} * cols + c);
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] += element(grad, n);
  };
  // The table's old row is loaded with the first gradient and added last.
  if (is_only_group) load_floats(out, old);
  add(first);
#pragma unroll 4
  for (int k = 1; k < count; ++k) add(sorted.order[i + k]);
#pragma unroll
  for (int n = 0; n < N; ++n) sum[n] += old[n];
  store_floats(out, sum);
}

// Block x: the frequent id whose segment begins in sorted tokens [kGroup x, kGroup (x + 1)), if
// any. There is at most one, because such a segment is longer than kGroup.
template <int N>
__global__ void __launch_bounds__(kThreads)
    reduce_groups_kernel(float* dtable, const float* scratch, const Sorted sorted, int tokens,
                         int vocab, int cols) {
  __shared__ int begin;
  if (threadIdx.x == 0) begin = -1;
  __syncthreads();
  for (int k = threadIdx.x; k < kGroup; k += blockDim.x) {
    const int i = blockIdx.x * kGroup + k;
    // Out-of-range ids are last and have no row.
    if (i >= tokens || sorted.ids[i] == vocab) continue;
    const int2 segment = sorted.segment[i];
    if (segment.x == i && segment.y - i > kGroup) begin = i;
  }
  __syncthreads();
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (begin < 0 || c >= cols) return;
  // Each thread adds its N columns of the scratch rows in group order, and the sum to the table. No
  // other block writes this row.
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

// Steps 3 and 4 of the gradient.
template <class T, int N>
void sum_segments(Tensor& dtable, const Tensor& dy, const Sorted& sorted) {
  const Device device = dy.device();
  const auto tokens = static_cast<int>(dy.dim(0)), cols = static_cast<int>(dy.dim(1));
  const auto vocab = static_cast<int>(dtable.dim(0));
  const unsigned groups = blocks_for(tokens, kGroup);
  Tensor scratch = Tensor::empty({2 * int64_t{groups}, cols}, DType::kF32, device);
  // Enough threads for a row, at most kThreads per block; longer rows have several blocks along y.
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

// Step 1 of the gradient. `a` and `b` are [2, tokens], keys and order; the last pass writes to `a`.
void sort_tokens(const Tensor& ids, int vocab, int32_t* a, int32_t* b) {
  const auto tokens = static_cast<int>(ids.numel());
  const int bits = std::bit_width(static_cast<unsigned>(vocab));  // `vocab` is also a key
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits,
            digit = (bits + passes - 1) / passes;
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
    launch("embedding", lookup_kernel<T>, layout.launch_shape(Start::kProgrammatic),
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
