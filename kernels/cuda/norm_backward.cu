// Backward of the row norms on CUDA. Per row, with d = x - mean and g = dy w:
//   dx (+)= rstd (g - mean(g) - d mean(g d) rstd^2)     RMS norm: mean = mean(g) = 0,
//                                                       w is w + weight_offset
//   dw (+)= sum over rows of dy d rstd,  db (+)= sum over rows of dy
// One pass computes both: a fixed number of blocks stride over the rows, read each row once, and
// keep the column sums in registers; a second kernel adds the partial sums in order. Rows of more
// than 1024 packs of 16 bytes (8192 bf16 elements) leave no registers for that and have plain
// kernels.
#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/norm.h"

namespace cohort::kernels::cuda {
namespace {

// Resident threads per multiprocessor, with 80 registers each, and multiprocessors of an H100 or
// H200. Constant on all devices, because they determine the order of the weight gradients' sums.
constexpr int kThreadsPerSm = 768, kSms = 132;
constexpr int kPacks = 2;  // per thread: more would leave too few registers for the sums
template <class T>
using Slice = RowSlice<T, kPacks>;

template <class T>
struct NormBackward {
  const T *dy, *x, *w;
  const float *mean, *rstd;  // mean is null for an RMS norm
  T* dx;                     // may be null
  RowOffsets dy_rows, x_rows, dx_rows;
  bool accumulate;
  float weight_offset = 0;  // RMS norm only

  template <bool kLayer>
  __device__ __forceinline__ float weight(const Raw<T, Slice<T>::N>& pack, int n) const {
    return kLayer ? element(pack, n) : element(pack, n) + weight_offset;
  }
};

// Statistics of a row; zeros past the last row.
template <class T, bool kLayer>
struct RowStatistics {
  float mean = 0, rstd = 0;
  __device__ RowStatistics(const NormBackward<T>& p, const Slice<T>& at) {
    if (at.cols == 0) return;
    rstd = p.rstd[at.row];
    if constexpr (kLayer) mean = p.mean[at.row];
  }
};

// A thread's packs in shared memory: x and dy of the next row, which are loaded while this one is
// processed, the old dx, and w. They are private to the thread, so no barriers are needed.
template <class T>
class ThreadBuffer {
 public:
  static constexpr int N = Slice<T>::N;
  enum Array { kX, kDy, kW, kOld, kArrays };

  __device__ explicit ThreadBuffer(uint4* shared) : thread_base_(shared + threadIdx.x) {}

  // Starts copying the thread's slice of the row at `start`.
  __device__ __forceinline__ void fetch(Array array, const T* start, const Slice<T>& at) const {
    if (at.vectorized) {
#pragma unroll
      for (int u = 0; u < kPacks; ++u) {
        const int c = at.column(0, u);
        // Past the row the copy writes zeros; its address must still be valid.
        copy_async(shared_address(element_address(array, u)), c < at.cols ? start + c : start,
                   c < at.cols ? 16 : 0);
      }
    } else {
#pragma unroll 1  // saves registers
      for (int u = 0; u < kPacks; ++u) {
        const int c = at.column(0, u);
        store_raw(element_address(array, u), load_some<N>(start + c, at.cols - c));
      }
    }
  }
  __device__ __forceinline__ void commit() const {
    copy_async_commit();
  }
  // Waits until at most kPending groups are pending.
  template <int kPending>
  __device__ __forceinline__ void wait() const {
    copy_async_wait<kPending>();
    fence();
  }
  // Compiler fence: the compiler does not know that the copies write shared memory.
  __device__ __forceinline__ void fence() const {
    asm volatile("" ::: "memory");
  }
  __device__ __forceinline__ Raw<T, N> pack(Array array, int u) const {
    return load_raw<N>(element_address(array, u));
  }

 private:
  // Layout [array, pack, thread]: the threads of a warp have adjacent 16-byte packs, without bank
  // conflicts.
  __device__ __forceinline__ T* element_address(Array array, int u) const {
    return reinterpret_cast<T*>(thread_base_ + (array * kPacks + u) * blockDim.x);
  }
  uint4* thread_base_;
};

// Adds the sums of the threads with the same columns, and stores the block's partial sums. `shared`
// holds the sums of all threads.
template <int N>
__device__ __forceinline__ void store_partial(float* partial, float* shared,
                                              const float (&sums)[kPacks][N],
                                              const RowLayout& layout) {
  const int group = 1 << layout.group_log2, width = group * kPacks * N;
  const int lane = threadIdx.x & (group - 1), rows = blockDim.x >> layout.group_log2;
  // Shared memory is [concurrent rows of the block, columns]: each thread stores its sums, then one
  // thread per column adds them in ascending order of rows.
  __syncthreads();
#pragma unroll
  for (int u = 0; u < kPacks; ++u)
    store_floats(shared + (threadIdx.x >> layout.group_log2) * width + (u * group + lane) * N,
                 sums[u]);
  __syncthreads();
  for (int c = threadIdx.x; c < layout.cols; c += blockDim.x) {
    float total = 0;
    for (int r = 0; r < rows; ++r) total += shared[r * width + c];
    partial[int64_t{blockIdx.x} * layout.cols + c] = total;
  }
}

// Elements of a row in a thread's registers, and the values shared by all threads of the row.
template <class T>
struct RowValues {
  typename Slice<T>::Packs x, dy;
  float mean = 0, rstd = 0;
  float scaled_dot = 0, mean_g = 0;  // scaled_dot: mean(g d) rstd^2
};
// A thread's column sums over the rows of its block.
template <int N>
struct ColumnSums {
  float dw[kPacks][N] = {}, db[kPacks][N] = {};
};

// Adds the thread's part of sum(g d) and, for a layer norm, of sum(g).
template <int kSums, class T>
__device__ __forceinline__ void add_dots(const NormBackward<T>& p, const ThreadBuffer<T>& buffer,
                                         const Slice<T>& at, const RowValues<T>& row,
                                         float (&dots)[kSums]) {
  constexpr int N = Slice<T>::N;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    if (at.column(0, u) >= at.cols) continue;
    const auto w = buffer.pack(ThreadBuffer<T>::kW, u);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float g = element(row.dy[u], n) * p.template weight<kSums == 2>(w, n);
      dots[0] = fmaf(g, element(row.x[u], n) - row.mean, dots[0]);
      if constexpr (kSums == 2) dots[1] += g;
    }
  }
}

// Stores the thread's part of dx, whose row begins at `start`, and adds the row's terms to dw and
// db.
template <bool kLayer, class T>
__device__ __forceinline__ void finish_row(const NormBackward<T>& p, int64_t start,
                                           const ThreadBuffer<T>& buffer, const Slice<T>& at,
                                           const RowValues<T>& row, ColumnSums<Slice<T>::N>& sums) {
  constexpr int N = Slice<T>::N;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    if (at.column(0, u) >= at.cols) continue;
    const auto w = buffer.pack(ThreadBuffer<T>::kW, u);
    float dx[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float grad = element(row.dy[u], n), d = element(row.x[u], n) - row.mean;
      dx[n] =
          row.rstd * fmaf(-d, row.scaled_dot, grad * p.template weight<kLayer>(w, n) - row.mean_g);
      sums.dw[u][n] = fmaf(grad, d * row.rstd, sums.dw[u][n]);
      if constexpr (kLayer) sums.db[u][n] += grad;
    }
    if (p.accumulate) {
      const auto old = buffer.pack(ThreadBuffer<T>::kOld, u);
#pragma unroll
      for (int n = 0; n < N; ++n) dx[n] += element(old, n);
    }
    if (p.dx != nullptr) at.store(p.dx + start, 0, u, to_raw<T>(dx));
  }
}

// Rows of one tile. Block b has the rows of RowSlice(layout, b), (layout, b + gridDim.x), ..., and
// writes its sums to row b of dw_partial and db_partial: [blocks, cols], null if not wanted.
//
// A thread has the same columns of every row, so it keeps the sums of dw and db in registers, and w
// in its buffer. x and dy of a row are copied while the previous row is processed, the old dx from
// the end of the previous row until the end of its own reduction. These are separate commit groups
// in this order, so that waiting for one leaves the other pending.
template <class T, bool kLayer>
__global__ void __launch_bounds__(kThreadsPerSm, 1)
    norm_backward_kernel(const NormBackward<T> p, float* dw_partial, float* db_partial,
                         const RowLayout layout, unsigned steps) {
  constexpr int kSums = kLayer ? 2 : 1;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[2][32 * kSums];
  const ThreadBuffer<T> buffer(shared);
  using Buffer = ThreadBuffer<T>;
  const float per_column = 1.0f / static_cast<float>(layout.cols);
  ColumnSums<Slice<T>::N> sums;

  Slice<T> next(layout);
  const auto fetch_inputs = [&] {
    buffer.fetch(Buffer::kX, p.x + p.x_rows(next.row), next);
    buffer.fetch(Buffer::kDy, p.dy + p.dy_rows(next.row), next);
    buffer.commit();
  };
  const auto fetch_old = [&] {
    if (p.accumulate) buffer.fetch(Buffer::kOld, p.dx + p.dx_rows(next.row), next);
    buffer.commit();
  };
  buffer.fetch(Buffer::kW, p.w, next);
  fetch_inputs();
  fetch_old();
  RowStatistics<T, kLayer> next_statistics(p, next);
  int scratch_index = 0;  // alternates, because a warp may be one reduction ahead of another
  for (unsigned step = blockIdx.x; step < steps; step += gridDim.x) {
    RowValues<T> row;
    buffer.template wait<1>();  // x and dy; the old dx may be pending
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      row.x[u] = buffer.pack(Buffer::kX, u);
      row.dy[u] = buffer.pack(Buffer::kDy, u);
    }
    buffer.fence();
    // The buffers of x and dy are free: the next row's copies overlap this row's arithmetic.
    const Slice<T> at = next;
    row.mean = next_statistics.mean;
    row.rstd = next_statistics.rstd;
    next = Slice<T>(layout, step + gridDim.x);
    fetch_inputs();
    next_statistics = RowStatistics<T, kLayer>(p, next);

    float dots[kSums] = {};
    add_dots(p, buffer, at, row, dots);
    group_reduce(dots, at.group, scratch[scratch_index], Plus{});
    scratch_index ^= 1;
    row.scaled_dot = dots[0] * row.rstd * row.rstd * per_column;
    row.mean_g = kLayer ? dots[kSums - 1] * per_column : 0.0f;

    buffer.template wait<1>();  // the old dx; the next row's x and dy may be pending
    finish_row<kLayer>(p, p.dx_rows(at.row), buffer, at, row, sums);
    buffer.fence();
    fetch_old();
  }

  buffer.template wait<0>();  // the memory is reused below
  auto* const floats = reinterpret_cast<float*>(shared);
  if (dw_partial != nullptr) store_partial(dw_partial, floats, sums.dw, layout);
  if (kLayer && db_partial != nullptr) store_partial(db_partial, floats, sums.db, layout);
}

// dx of either norm for rows that do not fit into registers. A block has one row, and reads it
// twice: for the sums and for dx.
template <class T>
__global__ void __launch_bounds__(kMaxGroup) long_rows_kernel(const NormBackward<T> p, int cols) {
  __shared__ float scratch[2][kMaxGroup / 32];
  const int64_t row = blockIdx.x;
  const T *dy = p.dy + p.dy_rows(row), *x = p.x + p.x_rows(row);
  T* dx = p.dx + p.dx_rows(row);
  const float mean = p.mean != nullptr ? p.mean[row] : 0.0f, rstd = p.rstd[row];
  const auto gradient = [&](int c) {
    return to_float(dy[c]) * (to_float(p.w[c]) + p.weight_offset);
  };
  float dot = 0, sum_g = 0;
  for (int c = threadIdx.x; c < cols; c += kMaxGroup) {
    dot = fmaf(gradient(c), to_float(x[c]) - mean, dot);
    sum_g += gradient(c);
  }
  dot = block_reduce<kMaxGroup>(dot, scratch[0], Plus{});
  sum_g = block_reduce<kMaxGroup>(sum_g, scratch[1], Plus{});
  const float scaled_dot = dot * rstd * rstd / static_cast<float>(cols);
  const float mean_g = p.mean != nullptr ? sum_g / static_cast<float>(cols) : 0.0f;
  for (int c = threadIdx.x; c < cols; c += kMaxGroup) {
    const float old = p.accumulate ? to_float(dx[c]) : 0.0f, d = to_float(x[c]) - mean;
    dx[c] = from_float<T>(old + rstd * fmaf(-d, scaled_dot, gradient(c) - mean_g));
  }
}

// Partial sums of dw and db, [blocks, cols], for the same rows: a thread adds the rows of a block
// in one column. Grid: blocks of kLongRows rows, columns.
constexpr int kLongRows = 64, kLongThreads = 256;
template <class T>
__global__ void __launch_bounds__(kLongThreads)
    long_columns_kernel(const NormBackward<T> p, float* dw_partial, float* db_partial, int64_t rows,
                        int cols) {
  const int c = blockIdx.y * kLongThreads + threadIdx.x;
  if (c >= cols) return;
  float dw = 0, db = 0;
  const int64_t first = int64_t{blockIdx.x} * kLongRows, end = min(rows, first + kLongRows);
  for (int64_t row = first; row < end; ++row) {
    const float dy = to_float(p.dy[p.dy_rows(row) + c]), x = to_float(p.x[p.x_rows(row) + c]);
    const float mean = p.mean != nullptr ? p.mean[row] : 0.0f;
    dw = fmaf(dy, (x - mean) * p.rstd[row], dw);
    db += dy;
  }
  const int64_t i = int64_t{blockIdx.x} * cols + c;
  if (dw_partial != nullptr) dw_partial[i] = dw;
  if (db_partial != nullptr) db_partial[i] = db;
}

// `out`: dw and db.
template <bool kLayer, class T>
void launch_backward(const char* op, const Tensor& in, const NormBackward<T>& p,
                     const std::array<GradOut, 2>& out) {
  const Device device = in.device();
  const bool vectorized = vectorized_rows(in.cols(), p.dy, p.x, p.w, p.dx) &&
                          vectorized_starts<T>(p.dy_rows) && vectorized_starts<T>(p.x_rows) &&
                          vectorized_starts<T>(p.dx_rows);
  const RowLayout layout = row_layout<T, kPacks>(in.rows(), in.cols(), vectorized);
  const bool is_long = layout.tiles > 1;
  const auto threads = static_cast<unsigned>(layout.threads());
  const unsigned blocks = is_long ? blocks_for(in.rows(), kLongRows)
                                  : std::min(layout.blocks(), kSms * (kThreadsPerSm / threads));
  std::array<Tensor, 2> partial;
  for (size_t o = 0; o < 2; ++o)
    if (out[o].wanted()) partial[o] = Tensor::empty({blocks, in.cols()}, DType::kF32, device);
  float *const dw = pointer<float>(partial[0]), *const db = pointer<float>(partial[1]);
  if (is_long) {
    if (p.dx != nullptr)
      launch(op, long_rows_kernel<T>, {blocks_for(in.rows(), 1), kMaxGroup}, device, p,
             layout.cols);
    if (dw != nullptr || db != nullptr)
      launch(op, long_columns_kernel<T>,
             {{blocks, blocks_for(in.cols(), kLongThreads)}, kLongThreads}, device, p, dw, db,
             in.rows(), layout.cols);
  } else {
    static_assert(sizeof(uint4) * kMaxGroup * kPacks * ThreadBuffer<T>::kArrays <= size_t{96} << 10,
                  "exceeds the shared memory of a block on some GPUs");
    const size_t arrays = p.accumulate ? ThreadBuffer<T>::kArrays : ThreadBuffer<T>::kOld;
    launch(op, norm_backward_kernel<T, kLayer>,
           {blocks, threads, arrays * kPacks * sizeof(uint4) * threads}, device, p, dw, db, layout,
           layout.blocks());
  }
  reduce_partials(partial, out);
}

template <bool kLayer, class Args>
void norm_backward(const char* op, const Args& args, const GradOut& db) {
  dispatch_device(args.x.dtype(), op, [&]<class T>() {
    NormBackward<T> p{.dy = pointer<T>(args.dy),
                      .x = pointer<T>(args.x),
                      .w = pointer<T>(args.w),
                      .rstd = pointer<float>(args.rstd),
                      .dx = pointer<T>(args.dx.tensor),
                      .dy_rows = RowOffsets(args.dy),
                      .x_rows = RowOffsets(args.x),
                      .dx_rows = RowOffsets(args.dx.tensor),
                      .accumulate = args.dx.wanted() && args.dx.mode == Grad::kAccumulate};
    if constexpr (kLayer)
      p.mean = pointer<float>(args.mean);
    else
      p.weight_offset = static_cast<float>(args.weight_offset);
    launch_backward<kLayer>(op, args.x, p, {args.dw, db});
  });
}

}  // namespace

void rms_norm_backward(const RmsNormBackward& args) {
  Tensor none;
  norm_backward<false>("rms_norm_backward", args, {none});
}

void layer_norm_backward(const LayerNormBackward& args) {
  norm_backward<true>("layer_norm_backward", args, args.db);
}

}  // namespace cohort::kernels::cuda
