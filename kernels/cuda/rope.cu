// Rotary embedding on CUDA; a thread rotates N adjacent pairs. Threads along x share a token and
// its row of the table.
#include "kernels/cuda/e4m3.cuh"
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
  const float* scales;  // for the last `scaled` heads; see Rope
  int64_t tokens;
  int dim;                     // elements per head
  int rotated, plain, scaled;  // heads per token that are rotated, and that are only copied
  float sign;                  // factor of the sines
  bool accumulate;
};

// A block has blockDim.y tokens. The threads of a token stride over the packs of all rotated heads:
// pack k is head k / packs, pairs [(k mod packs) N, (k mod packs) N + N). The table's row is cached
// after the first head. What the table does not reach of these heads, and then the plain heads, are
// copied or accumulated; if y is x there is no copy.
template <class T, int N, bool kWide, bool kRounds>
__global__ void __launch_bounds__(kThreads) rope_kernel(const Rotation<T> p) {
  launch_dependents_and_wait();
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (token >= p.tokens) return;
  const int position = p.positions[token], half = p.table.half, dim = p.dim;
  const bool accumulates = !kRounds && p.accumulate;
  const auto add = [&](float(&x)[N], int64_t at) {
    const auto old = load_raw<N>(p.y + at);
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] += element(old, n);
  };
  const auto store = [&](unsigned head, int64_t at, Raw<T, N> values) {
    const int scaled = static_cast<int>(head) - (p.rotated + p.plain - p.scaled);
    if (kRounds && scaled >= 0) values = round_to_e4m3(values, p.scales[scaled]);
    store_raw(p.y + at, values);
  };
  const int64_t start = token * (p.rotated + p.plain) * dim;
  const unsigned packs = half / N, count = p.rotated * packs;  // per head, per token
  for (unsigned k = threadIdx.x; k < count; k += blockDim.x) {
    const unsigned head = k / packs, pair = (k - head * packs) * N;
    const int64_t at = start + int64_t{head} * dim + pair;
    rotate<N, kWide>(p.x + at, {p.table, position, static_cast<int>(pair)}, kRounds ? 1.0f : p.sign,
                     [&](int offset, float(&out)[N]) {
                       if (accumulates) add(out, at + offset);
                       store(head, at + offset, to_raw<T>(out));
                     });
  }
  if (!kRounds && p.y == p.x && !p.accumulate) return;
  const unsigned rest = (dim - 2 * half) / N, whole = dim / N;  // packs of a head
  for (unsigned k = threadIdx.x; k < p.rotated * rest + p.plain * whole; k += blockDim.x) {
    const unsigned behind = k - p.rotated * rest,
                   head = k < p.rotated * rest ? k / rest : p.rotated + behind / whole;
    const int64_t at = k < p.rotated * rest
                           ? start + int64_t{head} * dim + 2 * half + (k - head * rest) * N
                           : start + int64_t{p.rotated} * dim + int64_t{behind} * N;
    auto values = load_raw<N>(p.x + at);
    if (accumulates) {
      float sum[N];
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] = element(values, n);
      add(sum, at);
      values = to_raw<T>(sum);
    }
    store(head, at, values);
  }
}

template <class T, int N, bool kRounds>
void run(const Rotation<T>& p, Device device) {
  const int64_t packs =
      (p.rotated > 0 ? int64_t{p.rotated} * p.table.half : int64_t{p.plain} * p.dim) / N;
  unsigned across = 1;
  // The smallest power of two that covers a token's packs, and as many tokens as fill the block.
  while (across < kThreads && across < packs) across *= 2;
  const unsigned down = kThreads / across;
  launch(
      "rope", p.table.wide ? rope_kernel<T, N, true, kRounds> : rope_kernel<T, N, false, kRounds>,
      {.grid = blocks_for(p.tokens, down), .block = {across, down}, .start = Start::kProgrammatic},
      device, p);
}

}  // namespace

void rope(const Rope& args) {
  const int64_t heads = args.x.dim(1), dim = args.x.dim(2);
  const int64_t plain = args.table.defined() ? args.plain_heads : heads;
  COHORT_CHECK(heads * dim < (1 << 30), "[rope] tokens of ", args.x.str(), " are too large");
  if (args.x.numel() == 0) return;
  dispatch_device(args.x.dtype(), "rope", [&]<class T>() {
    const Rotation<T> p{.y = pointer<T>(args.y),
                        .x = pointer<T>(args.x),
                        .table = RopeTable(args.table, dim),
                        .positions = pointer<int32_t>(args.positions),
                        .scales = pointer<float>(args.scales),
                        .tokens = args.x.dim(0),
                        .dim = static_cast<int>(dim),
                        .rotated = static_cast<int>(heads - plain),
                        .plain = static_cast<int>(plain),
                        .scaled = args.scales.defined() ? static_cast<int>(args.scales.numel()) : 0,
                        .sign = args.direction == RopeDirection::kForward ? 1.0f : -1.0f,
                        .accumulate = args.mode == Grad::kAccumulate};
    constexpr int kWidth = kPackSize<T>;
    const bool vectorized =
        p.table.half % kWidth == 0 && dim % kWidth == 0 && aligned(p.x, p.y, p.table.data);
    const auto run_with = [&]<bool kRounds>() {
      vectorized ? run<T, kWidth, kRounds>(p, args.x.device())
                 : run<T, 1, kRounds>(p, args.x.device());
    };
    p.scaled > 0 ? run_with.template operator()<true>() : run_with.template operator()<false>();
  });
}

}  // namespace cohort::kernels::cuda
