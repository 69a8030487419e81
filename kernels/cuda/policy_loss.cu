// Policy loss on CUDA in two passes of fixed order: one thread per token with one set of sums per
// block, then one block that adds the sets in order.
#include "kernels/cuda/device.cuh"
#include "kernels/policy_token.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;  // tokens per set of sums

struct Sums {
  double loss = 0;
  PolicyLossStats stats;
};

// Sums over the lanes of a warp by a butterfly, so that all lanes get the same bits.
__device__ Sums warp_total(Sums sums) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const auto shuffled = [&](double x) { return __shfl_xor_sync(0xffffffffu, x, offset); };
    const PolicyLossStats& s = sums.stats;
    const Sums other_sums{.loss = shuffled(sums.loss),
                          .stats = {.tokens = shuffled(s.tokens),
                                    .max_ratio_deviation = shuffled(s.max_ratio_deviation),
                                    .clipped_low = shuffled(s.clipped_low),
                                    .clipped_high = shuffled(s.clipped_high),
                                    .kl_to_old = shuffled(s.kl_to_old),
                                    .kl_to_reference = shuffled(s.kl_to_reference)}};
    sums.loss += other_sums.loss;
    add(sums.stats, other_sums.stats);
  }
  return sums;
}

// Sums over a block, valid in thread 0.
__device__ Sums block_total(const Sums& thread_sums) {
  __shared__ double scratch[kThreads / 32][sizeof(Sums) / sizeof(double)];
  const Sums warp_sums = warp_total(thread_sums);
  if (threadIdx.x % 32 == 0) *reinterpret_cast<Sums*>(scratch[threadIdx.x / 32]) = warp_sums;
  __syncthreads();
  // Only thread 0 uses the result, so one barrier suffices.
  Sums total = *reinterpret_cast<const Sums*>(scratch[0]);
  for (int w = 1; w < kThreads / 32; ++w) {
    const Sums& other_sums = *reinterpret_cast<const Sums*>(scratch[w]);
    total.loss += other_sums.loss;
    add(total.stats, other_sums.stats);
  }
  return total;
}

// A thread has one token and stores its gradient; the terms of the loss and the statistics are
// summed over the block in f64. partial[b] are the sums of block b.
__global__ void __launch_bounds__(kThreads)
    token_kernel(Sums* partial, float* gradient, PolicyTokens<float> tokens, int64_t count,
                 PolicyLossDesc desc) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  Sums thread_sums;
  // A token of weight 0 is not part of the loss; its log-probs are not read.
  if (t < count) {
    float token_gradient = 0;
    const float weight = tokens.weight[t];
    if (weight > 0) {
      const TokenLoss token = tokens.loss(t, desc, thread_sums.stats);
      thread_sums.loss = token.loss;
      token_gradient = static_cast<float>(token.gradient);
    } else if (weight != 0) {  // negative or NaN
      thread_sums.loss = token_gradient = __int_as_float(0x7fc00000);
    }
    gradient[t] = token_gradient;
  }
  // Threads past the last token must participate in the barrier of block_total().
  const Sums total = block_total(thread_sums);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// One block adds the partial sums: thread i adds i, i + kThreads, .... The loss is overwritten, the
// statistics are accumulated.
__global__ void __launch_bounds__(kThreads)
    total_kernel(float* loss, PolicyLossStats* stats, const Sums* partial, int64_t count) {
  Sums thread_sums;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    thread_sums.loss += partial[i].loss;
    add(thread_sums.stats, partial[i].stats);
  }
  const Sums total = block_total(thread_sums);
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
  launch("policy_loss", token_kernel, {blocks, kThreads}, device, sums,
         pointer<float>(args.dlogprob), PolicyTokens<float>(args), count, args.desc);
  launch("policy_loss_total", total_kernel, {1, kThreads}, device, pointer<float>(args.loss),
         pointer<PolicyLossStats>(args.stats), static_cast<const Sums*>(sums), int64_t{blocks});
}

}  // namespace cohort::kernels::cuda
