// Table lookup and its gradient on CUDA. The gradient needs the tokens of each id together and in
// order, without a count on the host and without float atomics:
//   1. sort: every token counts how many come before it by (id, position), and goes there;
//   2. segments: every sorted token finds where its id begins and ends by bisection;
//   3. sum: the tokens of an id in groups of kGroup; the only group of an id adds to the table,
//      groups of a more frequent one go to scratch rows;
//   4. join: adds the scratch rows of frequent ids to the table.
#include <climits>
#include <cmath>

#include "kernels/embedding.h"
#include "kernels/rows.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 64;  // tokens summed one after the other; embedding.h promises it

template <class T>
__global__ void __launch_bounds__(kMaxGroup)
    lookup_kernel(T* y, const T* table, const int32_t* ids, int64_t vocab, const RowLayout layout) {
  constexpr int N = RowShare<T>::N;
  const RowShare<T> at(layout);
  if (at.cols == 0) return;
  const int id = ids[at.row];
  const bool known = id >= 0 && id < vocab;
  for (int tile = 0; tile < layout.tiles; ++tile) {
    typename RowShare<T>::Packs packs;
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

// A block places 32 tokens; each of its warps compares them with an eighth of all tokens. The
// number of comparisons is the square of the number of tokens: 0.1 ms for 16k of them.
__global__ void __launch_bounds__(kThreads)
    sort_kernel(const int32_t* ids, int tokens, int vocab, const Sorted sorted) {
  constexpr int kTile = 1024, kWarps = kThreads / 32;
  __shared__ int4 tile[kTile / 4];
  __shared__ int counts[kWarps][32];
  const auto key_of = [&](int t) {
    const int id = ids[t];
    return id >= 0 && id < vocab ? id : vocab;
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.x * 32, mine = first + lane;
  const int key = mine < tokens ? key_of(mine) : 0;
  int before = 0;
  for (int begin = 0; begin < tokens; begin += kTile) {
    __syncthreads();
    for (int i = threadIdx.x; i < kTile; i += kThreads)
      reinterpret_cast<int*>(tile)[i] = begin + i < tokens ? key_of(begin + i) : INT_MAX;
    __syncthreads();
#pragma unroll 4
    for (int i = warp; i < kTile / 4; i += kWarps) {
      const int4 other = tile[i];
      const int t = begin + 4 * i;
      // An equal id counts where its token comes earlier.
      if (t >= first && t < first + 32) {
        before += (other.x < key + (t < mine)) + (other.y < key + (t + 1 < mine)) +
                  (other.z < key + (t + 2 < mine)) + (other.w < key + (t + 3 < mine));
      } else {
        const int bound = key + (t < first);
        before += (other.x < bound) + (other.y < bound) + (other.z < bound) + (other.w < bound);
      }
    }
  }
  counts[warp][lane] = before;
  __syncthreads();
  if (warp > 0 || mine >= tokens) return;
  for (int w = 1; w < kWarps; ++w) before += counts[w][lane];
  sorted.order[before] = mine;
  sorted.ids[before] = key;
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

// Block x: the group that starts at sorted token x, if one does. Each thread has N columns.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    group_sum_kernel(float* dtable, float* scratch, const T* dy, const Sorted sorted, int vocab,
                     int cols) {
  const int i = blockIdx.x, id = sorted.ids[i];
  const int2 segment = sorted.segment[i];
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (id == vocab || (i - segment.x) % kGroup != 0 || c >= cols) return;
  const int count = min(segment.y - i, kGroup);
  float sum[N] = {};
#pragma unroll 4
  for (int k = 0; k < count; ++k) {
    const auto row = load_raw<N>(dy + int64_t{sorted.order[i + k]} * cols + c);
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] += element(row, n);
  }
  if (segment.y - segment.x <= kGroup)
    add_to(dtable + int64_t{id} * cols + c, sum);
  else
    store_floats(scratch + scratch_row(i, segment) * cols + c, sum);
}

// Block x: the frequent id that begins among kGroup sorted tokens from kGroup x on; there is at
// most one.
template <int N>
__global__ void __launch_bounds__(kThreads)
    join_groups_kernel(float* dtable, const float* scratch, const Sorted sorted, int tokens,
                       int vocab, int cols) {
  __shared__ int begin;
  if (threadIdx.x == 0) begin = -1;
  __syncthreads();
  for (int k = threadIdx.x; k < kGroup; k += blockDim.x) {
    const int i = blockIdx.x * kGroup + k;
    if (i >= tokens || sorted.ids[i] == vocab) continue;
    const int2 segment = sorted.segment[i];
    if (segment.x == i && segment.y - i > kGroup) begin = i;
  }
  __syncthreads();
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (begin < 0 || c >= cols) return;
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
  unsigned threads = 32;
  while (threads < kThreads && static_cast<int>(threads) * N < cols) threads *= 2;
  const unsigned across = blocks_for(cols, int64_t{threads} * N);
  auto* out = pointer<float>(dtable);
  launch("embedding_sum", group_sum_kernel<T, N>,
         {{static_cast<unsigned>(tokens), across}, threads}, device, out, pointer<float>(scratch),
         pointer<T>(dy), sorted, vocab, cols);
  launch("embedding_join", join_groups_kernel<N>, {{groups, across}, threads}, device, out,
         pointer<float>(scratch), sorted, tokens, vocab, cols);
}

}  // namespace

void embedding_forward(Tensor& y, const Tensor& table, const Tensor& ids) {
  dispatch_device(table.dtype(), "embedding", [&]<class T>() {
    const T* in = pointer<T>(table);
    T* out = pointer<T>(y);
    const int64_t cols = table.dim(1);
    const RowLayout layout = row_layout<T>(y.rows(), cols, wide_rows(cols, in, out));
    launch("embedding", lookup_kernel<T>, layout.launch_shape(), table.device(), out, in,
           pointer<int32_t>(ids), table.dim(0), layout);
  });
}

void embedding_backward(Tensor& dtable, const Tensor& dy, const Tensor& ids, Grad mode) {
  if (mode == Grad::kOverwrite) dtable.zero_();
  const int64_t tokens = dy.dim(0), cols = dy.dim(1), vocab = dtable.dim(0);
  COHORT_CHECK(tokens < (1 << 30) && cols < (1 << 30) && vocab < (1 << 30),
               "[embedding_backward] sizes are too large: ", dtable.str(), " and ", dy.str());
  if (dy.numel() == 0 || vocab == 0) return;
  const Device device = dy.device();
  const auto count = static_cast<int>(tokens);
  Tensor order = Tensor::empty({2, tokens}, DType::kI32, device);
  Tensor segments = Tensor::empty({tokens}, DType::kI64, device);
  const Sorted sorted{.order = pointer<int32_t>(order),
                      .ids = pointer<int32_t>(order) + tokens,
                      .segment = pointer<int2>(segments)};
  launch("embedding_sort", sort_kernel, {blocks_for(tokens, 32), kThreads}, device,
         pointer<int32_t>(ids), count, static_cast<int>(vocab), sorted);
  launch("embedding_segments", segment_kernel, {blocks_for(tokens, kThreads), kThreads}, device,
         sorted, count);
  dispatch_device(dy.dtype(), "embedding_backward", [&]<class T>() {
    constexpr int kWidth = kPackSize<T>;
    if (cols % kWidth == 0 && aligned(pointer<T>(dy), pointer<float>(dtable)))
      sum_segments<T, kWidth>(dtable, dy, sorted);
    else
      sum_segments<T, 1>(dtable, dy, sorted);
  });
}

}  // namespace cohort::kernels::cuda
