// Rotary embedding on CUDA. A thread rotates N neighbouring pairs: N elements of a head's first
// half with those of its second half. Threads along x share a token, and with it the row of the
// table.
#include "kernels/cuda/raw.cuh"
#include "kernels/rope.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Rotation {
  T* y;
  const T* x;
  const float* table;
  const int32_t* positions;
  int64_t tokens, rows;  // of x and of the table
  int heads, half;       // half of the head size
  float sign;            // of the sines
  bool accumulate;
};

// y (+)= x at offsets i and i + half, rotated by the angles with these cosines and sines.
template <int N, class T>
__device__ __forceinline__ void rotate(const Rotation<T>& p, int64_t i, const float (&cos)[N],
                                       const float (&sin)[N]) {
  // Both halves are loaded before either is written: y may be x.
  const auto first = load_raw<N>(p.x + i), second = load_raw<N>(p.x + i + p.half);
  float y[2][N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float a = element(first, n), b = element(second, n), s = p.sign * sin[n];
    y[0][n] = a * cos[n] - b * s;
    y[1][n] = b * cos[n] + a * s;
  }
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    T* out = p.y + i + part * p.half;
    if (p.accumulate) {
      const auto old = load_raw<N>(out);
#pragma unroll
      for (int n = 0; n < N; ++n) y[part][n] += element(old, n);
    }
    store_raw(out, to_raw<T>(y[part]));
  }
}

// A block has blockDim.y tokens. The threads of a token go over the packs of all its heads: pack k
// is head k / packs, pairs from (k mod packs) N on. The table's row, [cos of half pairs, sin of
// half pairs] in f32, is the same for all heads and comes from the caches but for the first. A
// position outside the table has no angles: its outputs are NaN, where a wrong row would look
// right.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) rope_kernel(const Rotation<T> p) {
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (token >= p.tokens) return;
  const int position = p.positions[token];
  const bool known = position >= 0 && position < p.rows;
  const float* angles = p.table + int64_t{known ? position : 0} * 2 * p.half;
  const unsigned packs = p.half / N, count = p.heads * packs;  // of a head, of the token
  for (unsigned k = threadIdx.x; k < count; k += blockDim.x) {
    // Neighbouring threads have neighbouring packs of pairs, first of one head, then of the next.
    const unsigned head = k / packs, pair = (k - head * packs) * N;
    float cos[N], sin[N];
#pragma unroll
    for (int n = 0; n < N; ++n) cos[n] = sin[n] = NAN;
    if (known) {
      load_floats(angles + pair, cos);
      load_floats(angles + p.half + pair, sin);
    }
    rotate<N>(p, (token * p.heads + head) * 2 * p.half + pair, cos, sin);
  }
}

template <class T, int N>
void run(const Rotation<T>& p, Device device) {
  const int64_t packs = int64_t{p.heads} * p.half / N;
  unsigned across = 1;
  // Threads of a block: the least power of two that covers a token's packs, and as many tokens as
  // fill the block.
  while (across < kThreads && across < packs) across *= 2;
  const unsigned down = kThreads / across;
  launch("rope", rope_kernel<T, N>, {blocks_for(p.tokens, down), {across, down}}, device, p);
}

}  // namespace

void rope(const Rope& args) {
  const int64_t heads = args.x.dim(1), half = args.x.dim(2) / 2;
  COHORT_CHECK(heads * half < (1 << 30), "[rope] tokens of ", args.x.str(), " are too large");
  if (args.x.numel() == 0) return;
  dispatch_device(args.x.dtype(), "rope", [&]<class T>() {
    const Rotation<T> p{.y = pointer<T>(args.y),
                        .x = pointer<T>(args.x),
                        .table = pointer<float>(args.table),
                        .positions = pointer<int32_t>(args.positions),
                        .tokens = args.x.dim(0),
                        .rows = args.table.dim(0),
                        .heads = static_cast<int>(heads),
                        .half = static_cast<int>(half),
                        .sign = args.direction == RopeDirection::kForward ? 1.0f : -1.0f,
                        .accumulate = args.mode == Grad::kAccumulate};
    constexpr int kWidth = kPackSize<T>;
    if (half % kWidth == 0 && aligned(p.x, p.y, p.table))
      run<T, kWidth>(p, args.x.device());
    else
      run<T, 1>(p, args.x.device());
  });
}

}  // namespace cohort::kernels::cuda
