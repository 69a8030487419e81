// Rotary embedding on CUDA; a thread rotates N neighbouring pairs. Threads along x share a token,
// and with it the row of the table.
#include "kernels/cuda/rotate.cuh"
#include "kernels/rope.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Rotation {
  T* y;
  const T* x;
  RopeTable table;
  const int32_t* positions;
  int64_t tokens;
  int rotated, plain;  // heads of a token that are, and that stay as they are
  float sign;          // of the sines
  bool accumulate;
};

// A block has blockDim.y tokens. The threads of a token go over the packs of all heads that are
// rotated: pack k is head k / packs, pairs from (k mod packs) N on. The table's row, in f32, is the
// same for all heads and comes from the caches but for the first. The heads after them are copied,
// or added, unless they are in their place already.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) rope_kernel(const Rotation<T> p) {
  start_beside_previous();
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (token >= p.tokens) return;
  const int position = p.positions[token], half = p.table.half;
  const int64_t start = token * (p.rotated + p.plain) * 2 * half;
  const unsigned packs = half / N, count = p.rotated * packs;  // of a head, of the token
  for (unsigned k = threadIdx.x; k < count; k += blockDim.x) {
    // Neighbouring threads have neighbouring packs of pairs, first of one head, then of the next.
    const unsigned head = k / packs, pair = (k - head * packs) * N;
    const int64_t at = start + int64_t{head} * 2 * half + pair;
    rotate<N>(p.y + at, p.x + at, half, Angles<N>(p.table, position, pair), p.sign, p.accumulate);
  }
  if (p.y == p.x && !p.accumulate) return;
  const int64_t first = start + int64_t{p.rotated} * 2 * half;
  for (unsigned k = threadIdx.x; k < p.plain * 2 * packs; k += blockDim.x) {
    const int64_t at = first + int64_t{k} * N;
    auto values = load_raw<N>(p.x + at);
    if (p.accumulate) {
      const auto old = load_raw<N>(p.y + at);
      float sum[N];
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] = element(values, n) + element(old, n);
      values = to_raw<T>(sum);
    }
    store_raw(p.y + at, values);
  }
}

template <class T, int N>
void run(const Rotation<T>& p, Device device) {
  const int64_t packs = int64_t{p.rotated} * p.table.half / N;
  unsigned across = 1;
  // Threads of a block: the least power of two that covers a token's packs, and as many tokens as
  // fill the block.
  while (across < kThreads && across < packs) across *= 2;
  const unsigned down = kThreads / across;
  launch("rope", rope_kernel<T, N>,
         {.grid = blocks_for(p.tokens, down),
          .block = {across, down},
          .start = Start::kBesidePrevious},
         device, p);
}

}  // namespace

void rope(const Rope& args) {
  const int64_t heads = args.x.dim(1), half = args.x.dim(2) / 2;
  COHORT_CHECK(heads * half < (1 << 30), "[rope] tokens of ", args.x.str(), " are too large");
  if (args.x.numel() == 0) return;
  dispatch_device(args.x.dtype(), "rope", [&]<class T>() {
    const Rotation<T> p{.y = pointer<T>(args.y),
                        .x = pointer<T>(args.x),
                        .table = {.data = pointer<float>(args.table),
                                  .rows = args.table.dim(0),
                                  .half = static_cast<int>(half)},
                        .positions = pointer<int32_t>(args.positions),
                        .tokens = args.x.dim(0),
                        .rotated = static_cast<int>(heads - args.plain_heads),
                        .plain = static_cast<int>(args.plain_heads),
                        .sign = args.direction == RopeDirection::kForward ? 1.0f : -1.0f,
                        .accumulate = args.mode == Grad::kAccumulate};
    constexpr int kWidth = kPackSize<T>;
    if (half % kWidth == 0 && aligned(p.x, p.y, p.table.data))
      run<T, kWidth>(p, args.x.device());
    else
      run<T, 1>(p, args.x.device());
  });
}

}  // namespace cohort::kernels::cuda
