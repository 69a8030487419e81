// attention_backward on CUDA, after FlashAttention-2 (Dao 2023): the scores are computed again,
// tile by tile, from lse.
//
//   P  = exp2(S c - lse log2(e)),  c = scale log2(e),  S = Q K^T
//   dP = keep / (1 - p) (dO V^T),  delta = rowsum(dO O),  dS = P (dP - delta)
//   dV = dropout(P)^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// A small kernel first makes delta from O as stored. Then one pass owns tiles of keys and makes dK
// and dV, another owns tiles of queries and makes dQ (backward.cuh). That is seven products where
// one pass with atomic sums would need five, but every element of a gradient is the sum of one
// block in one order: over ascending queries, head after head of the group (dK, dV), or ascending
// keys (dQ). So the bits neither change between runs nor depend on the other sequences.
//
// bf16: products on the tensor cores with f32 sums; rounded to bf16 are dropout(P) and dS as
// factors and the gradients as stored, once, the old value of an accumulated one included. f32: fma
// chains.
#include "kernels/attention/backward.cuh"
#include "kernels/raw.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kDeltaThreads = 256;
constexpr int kLaneElements = 8;  // of a row per thread

template <class T>
__device__ void load_elements(float (&x)[kLaneElements], const T* p, int live, bool wide) {
  constexpr int N = kPackSize<T>;
#pragma unroll
  for (int e = 0; e < kLaneElements; e += N) {
    const bool whole = wide && e + N <= live;
    const Raw<T, N> raw = whole ? load_raw<N>(p + e) : load_some<N>(p + e, live - e);
#pragma unroll
    for (int n = 0; n < N; ++n) x[e + n] = element(raw, n);
  }
}

// `lanes` neighbouring threads, a power of two, have the row of a token and head.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const BackwardArgs<T> args, int lanes) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kDeltaThreads + threadIdx.x;
  const int64_t row = thread / lanes, rows = args.tokens * args.heads;
  const int lane = static_cast<int>(thread % lanes);
  const int live = row < rows ? args.head_dim - lane * kLaneElements : 0;
  const int64_t start = (row < rows ? row : 0) * args.head_dim + lane * kLaneElements;
  float a[kLaneElements], b[kLaneElements], sum = 0;
  load_elements(a, args.dout + start, live, args.wide);
  load_elements(b, args.o + start, live, args.wide);
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) sum = __fmaf_rn(a[e], b[e], sum);
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (lane > 0 || row >= rows) return;
  const int64_t token = row / args.heads, head = row % args.heads;
  const int64_t at = head * args.tokens + token;
  args.delta[at] = sum;
  args.reference[at] = args.lse[at] * kLog2e;
  if (args.streams != nullptr && head == 0) args.streams[token] = args.dropout.row(token);
}

template <class T>
void make_deltas(const BackwardArgs<T>& args, Device device) {
  int lanes = 1;
  while (lanes * kLaneElements < args.head_dim) lanes *= 2;
  const int64_t threads = args.tokens * args.heads * lanes;
  launch("attention_backward_delta", delta_kernel<T>,
         {blocks_for(threads, kDeltaThreads), kDeltaThreads}, device, args, lanes);
}

}  // namespace

void attention_backward(Tensor& dq, Grad mode_q, Tensor& dk, Grad mode_k, Tensor& dv, Grad mode_v,
                        const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& o, const Tensor& lse, const Tensor& cu_seqlens,
                        const AttentionDesc& desc) {
  const int64_t tokens = q.dim(0), heads = q.dim(1), dim = q.dim(2);
  const Device device = q.device();
  Tensor statistics = Tensor::empty({2, heads, tokens}, DType::kF32, device);
  Tensor streams;
  if (desc.dropout.p > 0) streams = Tensor::empty({tokens}, DType::kI64, device);
  dispatch_device(q.dtype(), "attention_backward", [&]<class T>() {
    BackwardArgs<T> args{.dq = pointer<T>(dq),
                         .dk = pointer<T>(dk),
                         .dv = pointer<T>(dv),
                         .dout = pointer<T>(dout),
                         .q = pointer<T>(q),
                         .k = pointer<T>(k),
                         .v = pointer<T>(v),
                         .o = pointer<T>(o),
                         .lse = pointer<float>(lse),
                         .cu = pointer<int32_t>(cu_seqlens),
                         .reference = pointer<float>(statistics),
                         .delta = pointer<float>(statistics) + heads * tokens,
                         .streams = pointer<uint64_t>(streams),
                         .tokens = tokens,
                         .sequences = static_cast<int>(cu_seqlens.numel() - 1),
                         .heads = static_cast<int>(heads),
                         .kv_heads = static_cast<int>(k.dim(1)),
                         .head_dim = static_cast<int>(dim),
                         .accumulate_q = mode_q == Grad::kAccumulate,
                         .accumulate_k = mode_k == Grad::kAccumulate,
                         .accumulate_v = mode_v == Grad::kAccumulate,
                         .causal = desc.mask == Mask::kCausal,
                         .wide = false,
                         .scale = static_cast<float>(softmax_scale(desc, dim)),
                         .exponent = exponent_scale(desc, dim),
                         .dropout = ProbabilityDropout(desc.dropout)};
    args.wide =
        wide_heads<T>(dim, args.dq, args.dk, args.dv, args.dout, args.q, args.k, args.v, args.o);
    make_deltas(args, device);
    if constexpr (sizeof(T) == 4)
      run_backward_f32(args, device);
    else
      dispatch_head_dim(dim, [&]<int kDim>() { run_backward_bf16<kDim>(args, device); });
  });
}

}  // namespace cohort::kernels::cuda
