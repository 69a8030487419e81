// The fused head on CUDA: chunk by chunk the logits by the row-independent product, then one block
// per token over its row. Where gradients come beside the log-probs (bf16, sm_90), it is a cluster
// of blocks that read the row once and hold it in registers: statistics first, then gradients. They
// cannot contain dlogprob yet, which the caller computes from the log-probs; what it multiplies is
// a token's row of x and of dx:
//   dz[t, :] = dlogprob[t] d[t, :],  dx[t, :] = dlogprob[t] (d w)[t, :],  dw = d^T (dlogprob x)
#include "kernels/head.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/row_softmax.cuh"
#include "kernels/matmul.h"

namespace cohort::kernels::cuda {
namespace {

// The tokens of one chunk.
struct Statistics {
  float *logprob, *entropy, *lse;
};

// One block per token: all threads reduce the token's row of logits, [vocab] f32 in global memory,
// then thread 0 writes three numbers. A target outside the vocabulary gives NaN.
__global__ void __launch_bounds__(kRowThreads)
    logprob_kernel(Statistics out, const float* logits, const int32_t* targets, int64_t vocab,
                   float inverse_temperature) {
  const int64_t t = blockIdx.x;
  const int32_t target = targets[t];
  const float* z = logits + t * vocab;
  __shared__ double sum_of_warp[kRowWarps];
  const RowSoftmax row = row_softmax(z, vocab, inverse_temperature, sum_of_warp);
  if (threadIdx.x > 0) return;
  // One thread writes what all threads know by now; the target's logit is a second read of one
  // float.
  const bool known = target >= 0 && target < vocab;
  const float nan = __int_as_float(0x7fc00000);
  out.logprob[t] = known ? row.logprob(z[target]) : nan;
  out.entropy[t] = known ? row.entropy() : nan;
  out.lse[t] = known ? row.lse() : nan;
}

// The tokens of one chunk; dentropy may be null.
struct TokenGrads {
  const float *dlogprob, *dentropy, *lse, *entropy;
  const int32_t* targets;
};

// What a token's logits have in common, and the gradient of one of them.
struct LogitGrad {
  float inverse_temperature, lse, entropy, dlogprob, dentropy;
  int64_t target;

  __device__ float operator()(float logit, int64_t v) const {
    // d log-prob / dz is one_hot - p, d entropy / dz is -p (log p + H), both over the temperature.
    // The entropy's part is left out where nobody asks for it, and where p is 0 while log p is
    // infinite.
    const float log_p = logit * inverse_temperature - lse, p = expf(log_p);
    const float curve = dentropy != 0 && p > 0 ? dentropy * (log_p + entropy) : 0;
    const float dz = -p * (dlogprob + curve) * inverse_temperature;
    return v == target ? dz + dlogprob * inverse_temperature : dz;
  }
};

// dz may be the logits' own memory. kVector: rows are 16-byte aligned.
template <bool kVector, class T>
__device__ void write_row(T* dz, const float* logits, int64_t vocab, const LogitGrad& grad) {
  constexpr int kN = kVector ? kPackSize<T> : 1, kLoad = kVector ? 4 : 1;
  for (int64_t v = kN * threadIdx.x; v < vocab; v += kN * kRowThreads) {
    // A pack of T is 16 bytes: one access of f32 logits, or two for bf16 gradients.
    Pack<float, kLoad> z[kN / kLoad];
    Pack<T, kN> out;
#pragma unroll
    for (int i = 0; i < kN / kLoad; ++i) z[i] = load_pack<kLoad>(logits + v + i * kLoad);
#pragma unroll
    for (int i = 0; i < kN; ++i) out.v[i] = from_float<T>(grad(z[i / kLoad].v[i % kLoad], v + i));
    store_pack(dz + v, out);
  }
}

// One block per token turns its row of logits into their gradients. Every element depends on itself
// and on the token's numbers only, which the forward has kept: no reduction, and so no barrier. f32
// gradients overwrite the logits, each thread the elements that it has just read.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    logits_backward_kernel(T* dz, const float* logits, TokenGrads tokens, int64_t vocab,
                           float inverse_temperature) {
  const int64_t t = blockIdx.x;
  dz += t * vocab;
  logits += t * vocab;
  // The token's numbers, read by every thread from the same addresses, stay in registers for the
  // whole row.
  const LogitGrad grad{.inverse_temperature = inverse_temperature,
                       .lse = tokens.lse[t],
                       .entropy = tokens.entropy[t],
                       .dlogprob = tokens.dlogprob[t],
                       .dentropy = tokens.dentropy != nullptr ? tokens.dentropy[t] : 0,
                       .target = tokens.targets[t]};
  // Rows of a vocabulary that is no multiple of a pack start at odd addresses.
  const auto bits = reinterpret_cast<uintptr_t>(dz) | reinterpret_cast<uintptr_t>(logits);
  if (bits % 16 == 0 && vocab % kPackSize<T> == 0)
    write_row<true>(dz, logits, vocab, grad);
  else
    write_row<false>(dz, logits, vocab, grad);
}

// A row over the blocks of a cluster: each has some of the runs of row_softmax(), and each of its
// warps one chain of one run.
constexpr int kParts = 8, kPartRuns = kRowWarps / kParts, kPartWarps = kPartRuns * kChains;
constexpr int kPartThreads = 32 * kPartWarps;

// What the blocks of a cluster show each other.
struct PartSums {
  float largest[kPartWarps];
  double sum[kPartRuns], weighted[kPartRuns];
};

// The sum over all runs, in ascending order, of one value of each run.
template <class ValueOf>
__device__ double sum_of_runs(ValueOf&& value_of) {
  const int run = threadIdx.x % kRowWarps;
  const double mine = *in_block(value_of(run % kPartRuns), run / kPartRuns);
  double total = __shfl_sync(0xffffffffu, mine, 0);
  for (int r = 1; r < kRowWarps; ++r) total += __shfl_sync(0xffffffffu, mine, r);
  return total;
}

// Statistics of each token, as row_softmax() gives them, and d[t, v] = ([v = target] - p_v) /
// temperature in bf16. kPacks: packs of four logits that a thread holds at most.
template <int kPacks>
__global__ void __launch_bounds__(kPartThreads)
    logprob_gradient_kernel(Statistics out, __nv_bfloat16* d, const float* logits,
                            const int32_t* targets, int vocab, float inverse_temperature) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ PartSums shared;
  __shared__ float sums[kPartWarps][32], weighted[kPartWarps][32];
  const int64_t t = blockIdx.x / kParts;
  const int part = blockIdx.x % kParts, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  logits += t * vocab;
  d += t * vocab;
  const float exponent = inverse_temperature * kLog2e;
  const int run = static_cast<int>(run_length(vocab));
  const int begin = (part * kPartRuns + warp / kChains) * run, end = min(vocab, begin + run);
  const int first = begin + warp % kChains * kWarpTile + 4 * lane;
  constexpr int kStep = kChains * kWarpTile;

  // A pack is in the vocabulary, which is a multiple of 4, or behind it.
  Pack<float, 4> z[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i)
    if (first + i * kStep < end) z[i] = load_pack<4>(logits + first + i * kStep);
  PartialSoftmax own;
#pragma unroll
  for (int i = 0; i < kPacks; ++i)
    if (first + i * kStep < end) own.add(z[i], exponent);

  // The largest logit of all warps of the cluster, two of which each lane looks at.
  float largest = own.largest;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  if (lane == 0) shared.largest[warp] = largest;
  cluster_sync();
  static_assert(kParts * kPartWarps == 64);
  const float* const of_warp = &shared.largest[lane % kPartWarps];
  largest = fmaxf(*in_block(of_warp, lane / kPartWarps),
                  *in_block(of_warp, lane / kPartWarps + kParts / 2));
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));

  // A run's sums: over its chains, then over the lanes, then over the runs.
  own.rebase(largest, exponent);
  sums[warp][lane] = own.sum;
  weighted[warp][lane] = own.weighted;
  __syncthreads();
  if (warp % kChains == 0) {
    double sum = 0, weighted_sum = 0;
#pragma unroll
    for (int c = 0; c < kChains; ++c) {
      sum += static_cast<double>(sums[warp + c][lane]);
      weighted_sum += static_cast<double>(weighted[warp + c][lane]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      weighted_sum += __shfl_xor_sync(0xffffffffu, weighted_sum, offset);
    }
    if (lane == 0) {
      shared.sum[warp / kChains] = sum;
      shared.weighted[warp / kChains] = weighted_sum;
    }
  }
  cluster_sync();
  const RowSoftmax row{
      .largest = largest,
      .inverse_temperature = inverse_temperature,
      .sum = sum_of_runs([&](int r) { return &shared.sum[r]; }),
      .weighted = static_cast<double>(inverse_temperature) *
                  sum_of_runs([&](int r) { return &shared.weighted[r]; }),
  };
  cluster_arrive();
  const int32_t target = targets[t];
  if (part == 0 && threadIdx.x == 0) {
    const bool known = target >= 0 && target < vocab;
    const float nan = __int_as_float(0x7fc00000);
    out.logprob[t] = known ? row.logprob(logits[target]) : nan;
    out.entropy[t] = known ? row.entropy() : nan;
    out.lse[t] = known ? row.lse() : nan;
  }
  // p_v / temperature = 2^(exponent z_v - offset).
  const float offset = row.lse() * kLog2e - log2f(inverse_temperature);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int v = first + i * kStep;
    if (v >= end) continue;
    float grad[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) grad[n] = -fast_exp2(__fmaf_rn(z[i].v[n], exponent, -offset));
    if (v <= target && target < v + 4) {
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (v + n == target) grad[n] += inverse_temperature;
    }
    store_pack(reinterpret_cast<uint32_t*>(d + v),
               Pack<uint32_t, 2>{pack_bf16(grad[0], grad[1]), pack_bf16(grad[2], grad[3])});
  }
  cluster_wait();  // no block ends while another reads its sums
#endif
}

using LogprobGradient = void (*)(Statistics, __nv_bfloat16*, const float*, const int32_t*, int,
                                 float);
// The kernel for rows of `vocab` logits; null where there is none.
LogprobGradient logprob_gradient(int64_t vocab, DType dtype, Device device) {
  if (dtype != DType::kBF16 || vocab % 4 != 0) return nullptr;
  const auto holds = [&](int64_t packs) {
    return vocab <= packs * kRowWarps * kChains * kWarpTile;
  };
  const LogprobGradient kernel = holds(8)    ? logprob_gradient_kernel<8>
                                 : holds(20) ? logprob_gradient_kernel<20>
                                 : holds(32) ? logprob_gradient_kernel<32>
                                             : nullptr;
  const bool runs = kernel != nullptr &&
                    ::cohort::cuda::is_for_hopper(reinterpret_cast<const void*>(kernel), device);
  return runs ? kernel : nullptr;
}

// out[t, c] (+)= factor[t] in[t, c], rounded once.
template <class Out, class In>
__global__ void scale_rows_kernel(Out* out, const In* in, const float* factor, int64_t count,
                                  int64_t cols, bool accumulate) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float scaled = factor[i / cols] * to_float(in[i]);
  out[i] = from_float<Out>(accumulate ? to_float(out[i]) + scaled : scaled);
}
template <class Out, class In>
void scale_rows(Tensor& out, const Tensor& in, const float* factor, Grad mode) {
  constexpr int kThreads = 256;
  launch("scale_rows", scale_rows_kernel<Out, In>, {blocks_for(in.numel(), kThreads), kThreads},
         in.device(), pointer<Out>(out), pointer<In>(in), factor, in.numel(), in.cols(),
         mode == Grad::kAccumulate);
}

// Turns logits into the gradients of x and w, chunk by chunk in ascending order. bf16 gradients of
// logits are kept until there are enough for long products: one of few tokens would read and write
// all of dw for little work.
class HeadBackward {
 public:
  struct Args {
    const Tensor &x, &w, &targets;
    GradOut dx, dw;
    int64_t rows;  // of a chunk
    float inverse_temperature;
  };
  explicit HeadBackward(const Args& args) : args_(args) {
    Tensor& dw = args_.dw.tensor;
    if (args.x.dim(0) == 0 && dw.defined() && args.dw.mode == Grad::kOverwrite) dw.zero_();
    if (args.x.dtype() == accumulate_dtype(args.x.dtype())) return;
    const int64_t kept = head_gradient_tokens(args.x.dim(0), args.rows);
    kept_ = Tensor::empty({kept, args.w.dim(0)}, args.x.dtype(), args.x.device());
  }

  // `logits` of the tokens from `begin` on, which may be overwritten; `tokens` are theirs.
  void add(int64_t begin, Tensor& logits, const TokenGrads& tokens) {
    const int64_t count = logits.dim(0), vocab = logits.dim(1);
    Tensor dz = kept_.defined() ? waiting(begin, count) : logits;
    dispatch_device(args_.x.dtype(), "head_backward", [&]<class T>() {
      launch("head_logits_backward", logits_backward_kernel<T>, {blocks_for(count, 1), kRowThreads},
             args_.x.device(), pointer<T>(dz), pointer<float>(std::as_const(logits)), tokens, vocab,
             args_.inverse_temperature);
    });
    if (kept_.defined())
      added(begin + count, nullptr);
    else
      products(begin, dz, nullptr);
  }

  // Where the bf16 gradients of the logits of `count` tokens from `begin` on are to be written.
  Tensor waiting(int64_t begin, int64_t count) {
    return kept_.narrow(0, begin % kept_.dim(0), count);
  }
  // They are there up to `end`. dlogprob, of all tokens, is what they are still to be multiplied
  // by; null: nothing.
  void added(int64_t end, const float* dlogprob) {
    if (end % kept_.dim(0) != 0 && end != args_.x.dim(0)) return;
    const int64_t first = (end - 1) / kept_.dim(0) * kept_.dim(0);
    products(first, kept_.narrow(0, 0, end - first), dlogprob);
  }

 private:
  void products(int64_t begin, const Tensor& dz, const float* dlogprob) {
    const int64_t count = dz.dim(0);
    // The wgrad adds up over the parts: the first overwrites or adds as asked, the others add.
    if (args_.dw.tensor.defined()) {
      Tensor x = args_.x.narrow(0, begin, count);
      if (dlogprob != nullptr) {
        const Tensor plain = x;
        x = Tensor::empty_like(plain);
        scale_rows<__nv_bfloat16, __nv_bfloat16>(x, plain, dlogprob + begin, Grad::kOverwrite);
      }
      matmul(
          {.c = args_.dw.tensor,
           .a = dz,
           .b = x,
           .desc = {.a = Transpose::kYes, .out = begin == 0 ? args_.dw.mode : Grad::kAccumulate}});
    }
    if (args_.dx.tensor.defined()) {
      Tensor dx = args_.dx.tensor.narrow(0, begin, count);
      // This dgrad has few rows and a sum over the whole vocabulary: split-K is allowed, so that it
      // fills the device. No log-prob depends on it.
      MatmulDesc desc{.out = args_.dx.mode, .split_k = SplitK::kAllowed};
      if (dlogprob == nullptr) return matmul({.c = dx, .a = dz, .b = args_.w, .desc = desc});
      desc.out = Grad::kOverwrite;
      Tensor sums = Tensor::empty(dx.shape(), DType::kF32, dx.device());
      matmul({.c = sums, .a = dz, .b = args_.w, .desc = desc});
      scale_rows<__nv_bfloat16, float>(dx, sums, dlogprob + begin, args_.dx.mode);
    }
  }

  Args args_;
  Tensor kept_;  // gradients of logits that wait; undefined where they take the logits' place
};

}  // namespace

void head_logprob_forward(const HeadLogprobForward& args) {
  const auto inverse_temperature = static_cast<float>(1 / args.desc.temperature);
  const int64_t vocab = args.w.dim(0);
  const int64_t rows = head_chunk_tokens(vocab, args.desc.chunk_tokens, args.x.device());
  std::optional<HeadBackward> backward;
  if (args.gradients != nullptr)
    backward.emplace(HeadBackward::Args{.x = args.x,
                                        .w = args.w,
                                        .targets = args.targets,
                                        .dx = args.gradients->dx,
                                        .dw = args.gradients->dw,
                                        .rows = rows,
                                        .inverse_temperature = inverse_temperature});
  const LogprobGradient with_gradient =
      backward ? logprob_gradient(vocab, args.x.dtype(), args.x.device()) : nullptr;
  for_logit_chunks(args.x, args.w, rows, [&](int64_t begin, Tensor& logits) {
    const int64_t count = logits.dim(0);
    const Statistics out{.logprob = pointer<float>(args.logprob) + begin,
                         .entropy = pointer<float>(args.entropy) + begin,
                         .lse = pointer<float>(args.lse) + begin};
    const int32_t* const targets = pointer<int32_t>(args.targets) + begin;
    if (with_gradient != nullptr) {
      Tensor d = backward->waiting(begin, count);
      launch("head_logprob_gradient", with_gradient,
             {.grid = blocks_for(count * kParts, 1), .block = kPartThreads, .cluster = kParts},
             args.x.device(), out, pointer<__nv_bfloat16>(d), pointer<float>(std::as_const(logits)),
             targets, static_cast<int>(vocab), inverse_temperature);
      if (args.gradients->set_dlogprob) args.gradients->set_dlogprob(begin, count);
      return backward->added(begin + count, pointer<float>(args.gradients->dlogprob));
    }
    launch("head_logprob", logprob_kernel, {blocks_for(count, 1), kRowThreads}, args.x.device(),
           out, pointer<float>(std::as_const(logits)), targets, vocab, inverse_temperature);
    if (!backward) return;
    if (args.gradients->set_dlogprob) args.gradients->set_dlogprob(begin, count);
    backward->add(begin, logits,
                  {.dlogprob = pointer<float>(args.gradients->dlogprob) + begin,
                   .dentropy = nullptr,
                   .lse = out.lse,
                   .entropy = out.entropy,
                   .targets = targets});
  });
}

void head_logprob_backward(const HeadLogprobBackward& args) {
  const int64_t vocab = args.w.dim(0);
  const int64_t rows = head_chunk_tokens(vocab, args.desc.chunk_tokens, args.x.device());
  HeadBackward backward({.x = args.x,
                         .w = args.w,
                         .targets = args.targets,
                         .dx = args.dx,
                         .dw = args.dw,
                         .rows = rows,
                         .inverse_temperature = static_cast<float>(1 / args.desc.temperature)});
  for_logit_chunks(args.x, args.w, rows, [&](int64_t begin, Tensor& logits) {
    backward.add(
        begin, logits,
        {.dlogprob = pointer<float>(args.dlogprob) + begin,
         .dentropy = args.dentropy.defined() ? pointer<float>(args.dentropy) + begin : nullptr,
         .lse = pointer<float>(args.lse) + begin,
         .entropy = pointer<float>(args.entropy) + begin,
         .targets = pointer<int32_t>(args.targets) + begin});
  });
}

}  // namespace cohort::kernels::cuda
