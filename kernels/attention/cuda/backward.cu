// attention_backward on CUDA, after FlashAttention-2 (Dao 2023): the scores are recomputed tile by
// tile from lse.
//
//   P  = exp2(S c - lse log2(e)),  c = scale log2(e),  S = Q K^T
//   dP = keep / (1 - p) (dO V^T),  delta = rowsum(dO O),  dS = P (dP - delta)
//   dV = dropout(P)^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// sm_90 has its own kernels for bf16 (sm90/backward.cuh, backward_wide.cuh). The generic path
// starts with a small kernel that computes delta from O as stored. Then one pass owns tiles of keys
// and computes dK and dV, another owns tiles of queries and computes dQ (backward.cuh). That takes
// seven matmuls where a single pass with atomics would take five, but every element of a gradient
// is accumulated by one block in one order: over ascending queries, head after head of the group
// (dK, dV), or ascending keys (dQ). With few key heads, bf16 dK and dV are sums of several blocks,
// each with a slice of the heads of the group, added in ascending order by a final kernel. So bits
// do not change between runs, and do not depend on the other sequences.
//
// bf16: tensor core matmuls with f32 accumulators; dropout(P) and dS are rounded to bf16 as
// operands, and the gradients once as stored, including the old value of an accumulated one. f32:
// fma chains.
#include "kernels/attention/cuda/backward.cuh"
#include "kernels/cuda/raw.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kDeltaThreads = 256;
constexpr int kLaneElements = 8;  // row elements per thread

template <class T>
__device__ void load_elements(float (&x)[kLaneElements], const T* p, int live, bool vectorized) {
  constexpr int N = kPackSize<T>;
#pragma unroll
  for (int e = 0; e < kLaneElements; e += N) {
    const bool whole = vectorized && e + N <= live;
    const Raw<T, N> raw = whole ? load_raw<N>(p + e) : load_some<N>(p + e, live - e);
#pragma unroll
    for (int n = 0; n < N; ++n) x[e + n] = element(raw, n);
  }
}

// Computes delta = dO . O and lse in base 2 of every token and head, and the dropout stream of
// every token, which both passes read many times. `lanes` adjacent threads, a power of two, slice
// the row of a token and head, 8 elements each, and reduce by shuffles.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const BackwardArgs<T> args, const DropoutMask<float> dropout, int lanes) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kDeltaThreads + threadIdx.x;
  const int64_t row = thread / lanes, rows = args.tokens * args.heads;
  const int lane = static_cast<int>(thread % lanes);
  const int live = row < rows ? args.head_dim - lane * kLaneElements : 0;
  const int64_t token = row < rows ? row / args.heads : 0, head = row < rows ? row % args.heads : 0;
  const int64_t start = lane * kLaneElements;
  float a[kLaneElements], b[kLaneElements], sum = 0;
  const auto row_of = [&](const Heads<const T>& t) {
    return t.data + token * t.stride + head * t.head_stride + start;
  };
  load_elements(a, row_of(args.dout), live, args.vectorized);
  load_elements(b, row_of(args.o), live, args.vectorized);
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) sum = __fmaf_rn(a[e], b[e], sum);
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (lane > 0 || row >= rows) return;
  const int64_t at = head * args.tokens + token;
  args.delta[at] = sum;
  args.lse_log2[at] = args.lse[at] * kLog2e;
  if (args.streams != nullptr && head == 0) args.streams[token] = dropout.row(token);
}

// dk, or dv in the second row of blocks, as the sum of its slices. A thread has kN elements of a
// head.
template <int kN>
__global__ void __launch_bounds__(kDeltaThreads) add_slices_kernel(const BackwardArgs<bf16> args) {
  const bool values = blockIdx.y == 1;
  const float* const slices = values ? args.dv_slices : args.dk_slices;
  const Heads<bf16>& out = values ? args.dv : args.dk;
  const bool accumulate = values ? args.accumulate_v : args.accumulate_k;
  const int64_t width = int64_t{args.kv_heads} * args.head_dim, count = args.tokens * width;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kDeltaThreads + threadIdx.x) * kN;
  if (at >= count) return;
  Pack<float, kN> sum = load_pack<kN>(slices + at);
  for (int s = 1; s < args.head_slices; ++s) {
    const Pack<float, kN> more = load_pack<kN>(slices + s * count + at);
#pragma unroll
    for (int i = 0; i < kN; ++i) sum.v[i] += more.v[i];
  }
  const int64_t in_token = at % width;
  bf16* const to = out.data + at / width * out.stride + in_token / args.head_dim * out.head_stride +
                   in_token % args.head_dim;
#pragma unroll
  for (int i = 0; i < kN; ++i)
    to[i] = from_float<bf16>(accumulate ? sum.v[i] + to_float(to[i]) : sum.v[i]);
}

void add_slices(const BackwardArgs<bf16>& args, Device device) {
  const int64_t count = args.tokens * args.kv_heads * args.head_dim;
  const int per_thread = args.head_dim % 4 == 0 ? 4 : 1;
  const auto kernel = per_thread == 4 ? add_slices_kernel<4> : add_slices_kernel<1>;
  const dim3 blocks(blocks_for(count / per_thread, kDeltaThreads), 2);
  launch("attention_backward_slices", kernel, {blocks, kDeltaThreads}, device, args);
}

// Number of slices of the heads of a group: enough to fill a device with few key heads. Depends on
// the model's shape only, so that bits do not depend on the batch.
int head_slices_of(int64_t heads, int64_t kv_heads) {
  constexpr int64_t kBlocksPerTile = 8;
  return static_cast<int>(std::clamp<int64_t>(kBlocksPerTile / kv_heads, 1, heads / kv_heads));
}

// Returns the memory of lse_log2 and delta, which it computes.
template <class T>
Tensor make_deltas(BackwardArgs<T>& args, const AttentionDesc& desc, Device device) {
  Tensor statistics = Tensor::empty(Shape{2, args.heads, args.tokens}, DType::kF32, device);
  args.lse_log2 = pointer<float>(statistics);
  args.delta = args.lse_log2 + args.heads * args.tokens;
  int lanes = 1;
  while (lanes * kLaneElements < args.head_dim) lanes *= 2;
  const int64_t threads = args.tokens * args.heads * lanes;
  launch("attention_backward_delta", delta_kernel<T>,
         {blocks_for(threads, kDeltaThreads), kDeltaThreads}, device, args,
         DropoutMask<float>(desc.dropout), lanes);
  return statistics;
}

// The arguments without slices; lse_log2 and delta are still to be computed.
template <class T>
BackwardArgs<T> make_problem(const AttentionBackward& args, Tensor& streams) {
  const int64_t dim = args.q.dim(2);
  return {.dq = heads_of<T>(args.dq.tensor),
          .dk = heads_of<T>(args.dk.tensor),
          .dv = heads_of<T>(args.dv.tensor),
          .dout = heads_of<T>(args.dout),
          .q = heads_of<T>(args.q),
          .k = heads_of<T>(args.k),
          .v = heads_of<T>(args.v),
          .o = heads_of<T>(args.o),
          .lse = pointer<float>(args.lse),
          .sequences = PackedSequences(args.cu_seqlens, args.desc),
          .streams = pointer<uint64_t>(streams),
          .tokens = args.q.dim(0),
          .heads = static_cast<int>(args.q.dim(1)),
          .kv_heads = static_cast<int>(args.k.dim(1)),
          .head_dim = static_cast<int>(dim),
          .head_slices = 1,
          .accumulate_q = args.dq.mode == Grad::kAccumulate,
          .accumulate_k = args.dk.mode == Grad::kAccumulate,
          .accumulate_v = args.dv.mode == Grad::kAccumulate,
          .vectorized = vectorized_heads<T>(args.dq.tensor, args.dk.tensor, args.dv.tensor,
                                            args.dout, args.q, args.k, args.v, args.o)};
}

// A thread has a word of the transpose.
__global__ void transpose_tile_mask_kernel(uint32_t* to, const uint32_t* from, int tiles,
                                           int words) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < tiles * words) to[i] = transposed_word(from, tiles, i / words, i % words);
}

}  // namespace

void transpose_tile_mask(const TileMaskTranspose& args) {
  constexpr int kThreads = 256;
  launch("transpose_tile_mask", transpose_tile_mask_kernel,
         {blocks_for(args.from.numel(), kThreads), kThreads}, args.from.device(),
         static_cast<uint32_t*>(args.to.raw()), static_cast<const uint32_t*>(args.from.raw()),
         static_cast<int>(args.from.dim(0)), static_cast<int>(args.from.dim(1)));
}

void attention_backward(const AttentionBackward& args) {
  const int64_t tokens = args.q.dim(0), heads = args.q.dim(1), dim = args.q.dim(2);
  const Device device = args.q.device();
  const int64_t kv_heads = args.k.dim(1);
  Tensor statistics, streams, slices;
  if (args.desc.dropout.p > 0) streams = Tensor::empty({tokens}, DType::kI64, device);
  dispatch_device(args.q.dtype(), "attention_backward", [&]<class T>() {
    auto problem = make_problem<T>(args, streams);
    if constexpr (sizeof(T) == 4) {
      statistics = make_deltas(problem, args.desc, device);
      run_backward_f32(problem, args.desc, device);
    } else {
      problem.head_slices = head_slices_of(heads, kv_heads);
      if (problem.head_slices > 1) {
        const int64_t slice_elements = problem.head_slices * tokens * kv_heads * dim;
        slices = Tensor::empty({2, slice_elements}, DType::kF32, device);
        problem.dk_slices = pointer<float>(slices);
        problem.dv_slices = problem.dk_slices + slice_elements;
      }
      if (supports_sm90("attention_backward", args.desc, dim, problem.vectorized, device)) {
        dispatch_sm90_dim(dim, [&]<int kDim>() {
          if constexpr (kDim <= 128)
            run_backward_sm90<kDim>(problem, args);
          else
            run_backward_wide<kDim>(problem, args);
        });
      } else {
        statistics = make_deltas(problem, args.desc, device);
        dispatch_head_dim(dim,
                          [&]<int kDim>() { run_backward_bf16<kDim>(problem, args.desc, device); });
      }
      if (problem.head_slices > 1) add_slices(problem, device);
    }
    if (args.dbias || args.dsinks) run_term_gradients(problem, args);
  });
}

}  // namespace cohort::kernels::cuda
