// The policy loss on CUDA in two fixed passes: one thread per token and one set of sums per block,
// then one block that adds the sets in order.
#include "kernels/cuda/device.cuh"
#include "kernels/policy_token.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;  // tokens per set of sums

struct Sums {
  double loss = 0;
  PolicyLossStats stats;
};

// Adds `sums` over the lanes of a warp as a butterfly, so that all lanes get the same bits.
__device__ Sums warp_total(Sums sums) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const auto other = [&](double x) { return __shfl_xor_sync(0xffffffffu, x, offset); };
    const PolicyLossStats& s = sums.stats;
    const Sums more{.loss = other(sums.loss),
                    .stats = {.tokens = other(s.tokens),
                              .max_ratio_deviation = other(s.max_ratio_deviation),
                              .clipped_low = other(s.clipped_low),
                              .clipped_high = other(s.clipped_high),
                              .kl_to_old = other(s.kl_to_old),
                              .kl_to_reference = other(s.kl_to_reference)}};
    sums.loss += more.loss;
    add(sums.stats, more.stats);
  }
  return sums;
}

// The sums over a block, valid in thread 0.
__device__ Sums block_total(const Sums& own) {
  __shared__ double scratch[kThreads / 32][sizeof(Sums) / sizeof(double)];
  const Sums of_warp = warp_total(own);
  if (threadIdx.x % 32 == 0) *reinterpret_cast<Sums*>(scratch[threadIdx.x / 32]) = of_warp;
  __syncthreads();
  // Only thread 0 uses the result, so one barrier is enough; the warps' sums are added in ascending
  // order.
  Sums total = *reinterpret_cast<const Sums*>(scratch[0]);
  for (int w = 1; w < kThreads / 32; ++w) {
    const Sums& more = *reinterpret_cast<const Sums*>(scratch[w]);
    total.loss += more.loss;
    add(total.stats, more.stats);
  }
  return total;
}

// A block has kThreads tokens, a thread one of them: its gradient goes straight to memory, its
// terms of the loss and the statistics are summed over the block, in f64. partial[b] are the sums
// of block b: addresses, not time, decide what is added when.
__global__ void __launch_bounds__(kThreads)
    token_kernel(Sums* partial, float* gradient, PolicyTokens<float> tokens, int64_t count,
                 PolicyLossDesc desc) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  Sums own;
  // A token of weight 0 is outside the loss: its log-probs are not looked at, whatever they are.
  if (t < count) {
    float slope = 0;
    const float weight = tokens.weight[t];
    if (weight > 0) {
      const TokenLoss token = tokens.loss(t, desc, own.stats);
      own.loss = token.loss;
      slope = static_cast<float>(token.gradient);
    } else if (weight != 0) {  // negative or NaN
      own.loss = slope = __int_as_float(0x7fc00000);
    }
    gradient[t] = slope;
  }
  // All threads come here, also those past the last token, as block_total() has a barrier.
  const Sums total = block_total(own);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// One block adds the blocks' sums: thread i those of i, i + kThreads and so on. The statistics are
// added to what is there, the loss is written.
__global__ void __launch_bounds__(kThreads)
    total_kernel(float* loss, PolicyLossStats* stats, const Sums* partial, int64_t count) {
  Sums own;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    own.loss += partial[i].loss;
    add(own.stats, partial[i].stats);
  }
  // One thread writes: no atomics, and the same bits in every run.
  const Sums total = block_total(own);
  if (threadIdx.x > 0) return;
  *loss = static_cast<float>(total.loss);
  add(*stats, total.stats);
}

}  // namespace

void policy_loss(const PolicyLoss& args) {
  COHORT_CHECK(args.logprob.dtype() == DType::kF32,
               "[policy_loss] expected f32 log-probs on a CUDA device, got ", args.logprob.str());
  const Device device = args.logprob.device();
  const int64_t count = args.logprob.numel();
  const unsigned blocks = blocks_for(count, kThreads);
  Tensor partial =
      Tensor::empty({int64_t{blocks} * static_cast<int64_t>(sizeof(Sums))}, DType::kU8, device);
  Sums* const sums = pointer<Sums>(partial);
  const PolicyTokens<float> tokens{.logprob = pointer<float>(args.logprob),
                                   .old_logprob = pointer<float>(args.old_logprob),
                                   .ref_logprob = pointer<float>(args.ref_logprob),
                                   .advantage = pointer<float>(args.advantage),
                                   .weight = pointer<float>(args.weight)};
  launch("policy_loss", token_kernel, {blocks, kThreads}, device, sums,
         pointer<float>(args.dlogprob), tokens, count, args.desc);
  launch("policy_loss_total", total_kernel, {1, kThreads}, device, pointer<float>(args.loss),
         pointer<PolicyLossStats>(args.stats), static_cast<const Sums*>(sums), int64_t{blocks});
}

}  // namespace cohort::kernels::cuda
