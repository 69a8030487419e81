// The fused head on CUDA: chunk by chunk the logits by the row-independent product, then one block
// per token over its row. Where gradients come beside the log-probs (bf16, sm_90), a cluster of
// blocks reads the row once and holds it in registers: statistics first, then gradients, while the
// next row is on its way. They cannot contain dlogprob yet, which the caller computes from the
// log-probs; what it multiplies is a token's row of x and of dx:
//   dz[t, :] = dlogprob[t] d[t, :],  dx[t, :] = dlogprob[t] (d w)[t, :],  dw = d^T (dlogprob x)
#include "kernels/head.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/row_softmax.cuh"
#include "kernels/cuda/tma.cuh"
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

// Blocks that a multiprocessor's registers have room for.
template <int kPacks>
constexpr int kPartBlocks = kPacks <= 8    ? 4
                            : kPacks <= 20 ? 2
                                           : 1;

// What the blocks of a cluster tell each other about a row; each of them receives all of it. One
// place serves all rows: nobody goes on before the numbers of all warps are there, and a warp whose
// sums are there has used the row's largest logits, one whose next largest logit is there its sums.
struct SharedRow {
  float largest[kParts * kPartWarps];  // of each warp
  double2 sums[kRowWarps];             // of each run: of e^d, of e^d d
};

// Statistics of each token, as row_softmax() gives them, and d[t, v] = ([v = target] - p_v) /
// temperature in bf16. kPacks: packs of four logits that a thread holds at most.
//
// Each cluster takes every so many-th token. While its threads compute, with a token's logits in
// registers, the copy engine brings the next token's to shared memory, `next`.
template <int kPacks>
__global__ void __launch_bounds__(kPartThreads, kPartBlocks<kPacks>)
    logprob_gradient_kernel(Statistics out, __nv_bfloat16* d, const float* logits,
                            const int32_t* targets, int tokens, int vocab,
                            float inverse_temperature) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) float next[];
  __shared__ SharedRow shared;
  __shared__ float sums[kPartWarps][32], weighted[kPartWarps][32];
  __shared__ uint64_t barriers[3];
  const uint32_t next_is_there = shared_address(&barriers[0]),
                 largest_are_there = shared_address(&barriers[1]),
                 sums_are_there = shared_address(&barriers[2]);
  let_next_start();
  if (threadIdx.x == 0)
    for (uint64_t& barrier : barriers) barrier_init(shared_address(&barrier), 1);
  wait_for_previous();
  cluster_sync();

  const int clusters = static_cast<int>(gridDim.x) / kParts;
  const int first_token = static_cast<int>(blockIdx.x) / kParts, part = blockIdx.x % kParts;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float exponent = inverse_temperature * kLog2e;
  // The block's part of a row; in it the thread's first pack, and what its run has left from there.
  const int run = static_cast<int>(run_length(vocab)), part_begin = part * kPartRuns * run;
  const int part_size = max(0, min(vocab - part_begin, kPartRuns * run));
  const int first = warp / kChains * run + warp % kChains * kWarpTile + 4 * lane;
  const int left = min(part_size, (warp / kChains + 1) * run) - first;
  constexpr int kStep = kChains * kWarpTile;
  // By one thread.
  const auto bring = [&](int t) {
    if (t >= tokens) return;
    const int bytes = part_size * static_cast<int>(sizeof(float));
    barrier_arrive_expect(next_is_there, bytes);
    if (bytes > 0)
      bulk_load(shared_address(next), logits + int64_t{t} * vocab + part_begin, bytes,
                next_is_there);
  };
  if (threadIdx.x == 0) bring(first_token);

  uint32_t parity = 0;
#pragma unroll 1
  for (int t = first_token; t < tokens; t += clusters, parity ^= 1) {
    // A pack is in the run, whose length is a multiple of 4, or behind it.
    Pack<float, 4> z[kPacks];
    barrier_wait(next_is_there, parity);
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (i * kStep < left) z[i] = load_pack<4>(next + first + i * kStep);
    PartialSoftmax own;
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (i * kStep < left) own.add(z[i], exponent);

    // The largest logit of all warps of the cluster, two of which each lane looks at.
    float largest = own.largest;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    if (threadIdx.x == 0) barrier_arrive_expect(largest_are_there, sizeof(shared.largest));
    if (lane < kParts)
      store_in_block(lane, &shared.largest[part * kPartWarps + warp], largest, largest_are_there);
    barrier_wait(largest_are_there, parity);
    // All warps of the block have used what `next` had, or they would not know their largest.
    if (threadIdx.x == 0) bring(t + clusters);
    static_assert(kParts * kPartWarps == 64);
    largest = fmaxf(shared.largest[lane], shared.largest[32 + lane]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));

    const int32_t target = targets[t];
    const bool known = target >= 0 && target < vocab;
    const bool has_statistics = part == 0 && threadIdx.x == 0;
    const float nan = __int_as_float(0x7fc00000);
    const float of_target = known && has_statistics ? logits[int64_t{t} * vocab + target] : nan;

    // A run's sums: over its chains, then over the lanes, then over the runs.
    own.rebase(largest, exponent);
    sums[warp][lane] = own.sum;
    weighted[warp][lane] = own.weighted;
    __syncthreads();
    if (threadIdx.x == 0) barrier_arrive_expect(sums_are_there, sizeof(shared.sums));
    if (warp % kChains == 0) {
      double2 total{0, 0};
#pragma unroll
      for (int c = 0; c < kChains; ++c) {
        total.x += static_cast<double>(sums[warp + c][lane]);
        total.y += static_cast<double>(weighted[warp + c][lane]);
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        total.x += __shfl_xor_sync(0xffffffffu, total.x, offset);
        total.y += __shfl_xor_sync(0xffffffffu, total.y, offset);
      }
      if (lane < kParts)
        store_in_block(lane, &shared.sums[part * kPartRuns + warp / kChains], total,
                       sums_are_there);
    }
    barrier_wait(sums_are_there, parity);

    // p_v / temperature = 2^(exponent z_v - offset). The gradients' rounding to bf16 hides that of
    // these sums, whose order is not row_softmax()'s.
    auto sum = static_cast<float>(shared.sums[lane % kRowWarps].x);
#pragma unroll
    for (int offset = kRowWarps / 2; offset > 0; offset /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const float offset = __fmaf_rn(largest, exponent, __log2f(sum) - __log2f(inverse_temperature));
    const int own_target = target - (part_begin + first);
    __nv_bfloat16* const own_d = d + int64_t{t} * vocab + (part_begin + first);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (i * kStep >= left) continue;
      float grad[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) grad[n] = -fast_exp2(__fmaf_rn(z[i].v[n], exponent, -offset));
      if (const auto at = static_cast<uint32_t>(own_target - i * kStep); at < 4) {
#pragma unroll
        for (uint32_t n = 0; n < 4; ++n)
          if (n == at) grad[n] += inverse_temperature;
      }
      store_pack(reinterpret_cast<uint32_t*>(own_d + i * kStep),
                 Pack<uint32_t, 2>{pack_bf16(grad[0], grad[1]), pack_bf16(grad[2], grad[3])});
    }
    if (!has_statistics) continue;
    RowSoftmax row{.largest = largest,
                   .inverse_temperature = inverse_temperature,
                   .sum = shared.sums[0].x,
                   .weighted = shared.sums[0].y};
    for (int r = 1; r < kRowWarps; ++r) {
      row.sum += shared.sums[r].x;
      row.weighted += shared.sums[r].y;
    }
    row.weighted *= static_cast<double>(inverse_temperature);
    out.logprob[t] = known ? row.logprob(of_target) : nan;
    out.entropy[t] = known ? row.entropy() : nan;
    out.lse[t] = known ? row.lse() : nan;
  }
#endif
}

// The kernel for rows of some size, and how many of its clusters run at the same time.
struct LogprobGradient {
  void (*kernel)(Statistics, __nv_bfloat16*, const float*, const int32_t*, int, int,
                 float) = nullptr;
  LaunchShape shape;  // of one cluster
  int64_t clusters = 0;
};
// Without a kernel where there is none for rows of `vocab` logits.
LogprobGradient logprob_gradient(int64_t vocab, DType dtype, Device device) {
  if (dtype != DType::kBF16 || vocab % 4 != 0) return {};
  const auto holds = [&](int64_t packs) {
    return vocab <= packs * kRowWarps * kChains * kWarpTile;
  };
  LogprobGradient out{.kernel = holds(8)    ? logprob_gradient_kernel<8>
                                : holds(20) ? logprob_gradient_kernel<20>
                                : holds(32) ? logprob_gradient_kernel<32>
                                            : nullptr};
  const auto* const code = reinterpret_cast<const void*>(out.kernel);
  if (out.kernel == nullptr || !::cohort::cuda::is_for_hopper(code, device)) return {};
  out.shape = {.grid = kParts,
               .block = kPartThreads,
               .shared_bytes = static_cast<size_t>(kPartRuns * run_length(vocab)) * sizeof(float),
               .start = Start::kBesidePrevious,
               .cluster = kParts};
  ::cohort::cuda::allow_shared_memory("head_logprob_gradient", code, out.shape.shared_bytes,
                                      device);
  cudaLaunchAttribute cluster{.id = cudaLaunchAttributeClusterDimension};
  cluster.val.clusterDim = {kParts, 1, 1};
  cudaLaunchConfig_t config{.gridDim = out.shape.grid,
                            .blockDim = out.shape.block,
                            .dynamicSmemBytes = out.shape.shared_bytes};
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  COHORT_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, out.kernel, &config));
  out.clusters = std::max(clusters, 1);  // a launch that cannot be had says so
  return out;
}

// out[t, c] (+)= factor[t] in[t, c], rounded once.
template <class Out, class In>
__global__ void scale_rows_kernel(Out* out, const In* in, const float* factor, int64_t count,
                                  int64_t cols, bool accumulate) {
  start_beside_previous();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float scaled = factor[i / cols] * to_float(in[i]);
  out[i] = from_float<Out>(accumulate ? to_float(out[i]) + scaled : scaled);
}
template <class Out, class In>
void scale_rows(Tensor& out, const Tensor& in, const float* factor, Grad mode) {
  constexpr int kThreads = 256;
  launch("scale_rows", scale_rows_kernel<Out, In>,
         {.grid = blocks_for(in.numel(), kThreads),
          .block = kThreads,
          .start = Start::kBesidePrevious},
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
  const Device device = args.x.device();
  const int64_t rows = head_chunk_tokens(vocab, args.desc.chunk_tokens, device);
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
      backward ? logprob_gradient(vocab, args.x.dtype(), device) : LogprobGradient{};
  for_logit_chunks(args.x, args.w, rows, [&](int64_t begin, Tensor& logits) {
    const int64_t count = logits.dim(0);
    const Statistics out{.logprob = pointer<float>(args.logprob) + begin,
                         .entropy = pointer<float>(args.entropy) + begin,
                         .lse = pointer<float>(args.lse) + begin};
    const int32_t* const targets = pointer<int32_t>(args.targets) + begin;
    if (with_gradient.kernel != nullptr) {
      Tensor d = backward->waiting(begin, count);
      LaunchShape shape = with_gradient.shape;
      shape.grid = blocks_for(kParts * std::min(count, with_gradient.clusters), 1);
      launch("head_logprob_gradient", with_gradient.kernel, shape, device, out,
             pointer<__nv_bfloat16>(d), pointer<float>(std::as_const(logits)), targets,
             static_cast<int>(count), static_cast<int>(vocab), inverse_temperature);
      if (args.gradients->set_dlogprob) args.gradients->set_dlogprob(begin, count);
      return backward->added(begin + count, pointer<float>(args.gradients->dlogprob));
    }
    launch("head_logprob", logprob_kernel, {blocks_for(count, 1), kRowThreads}, device, out,
           pointer<float>(std::as_const(logits)), targets, vocab, inverse_temperature);
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
