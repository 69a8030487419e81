// Policy loss on CUDA: one thread per token, then sums in a fixed order: one set per block of
// tokens, and one block that adds the sets.
#include "kernels/cuda/device.cuh"
#include "kernels/policy_token.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;  // tokens per set of sums

using Sums = PolicyTerms;

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
                                    .kl_to_reference = shuffled(s.kl_to_reference),
                                    .importance = shuffled(s.importance)}};
    add(sums, other_sums);
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
    add(total, other_sums);
  }
  return total;
}

// A warp whose token is the first of its sequence computes the sequence's means: lane i adds tokens
// i, i + 32, ....
__global__ void __launch_bounds__(kThreads)
    sequence_means_kernel(SequenceLogRatios<float> ratios, const int32_t* segments, int64_t count) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (first >= count) return;
  const int32_t segment = segments[first];
  if (first > 0 && segments[first - 1] == segment) return;
  LogRatioSums sums;
  const auto for_lane = [&](const auto& work) {
    for (int64_t t = first + threadIdx.x % 32; t < count && segments[t] == segment; t += 32)
      work(t);
  };
  for_lane([&](int64_t t) { ratios.add(sums, t); });
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    for (double* sum :
         {&sums.tokens, &sums.to_old, &sums.to_sampling, &sums.clipped, &sums.with_advantage})
      *sum += __shfl_xor_sync(0xffffffffu, *sum, offset);
  for_lane([&](int64_t t) { ratios.set(t, sums); });
}

// A thread computes the terms and the gradient of one token.
__global__ void __launch_bounds__(kThreads)
    terms_kernel(PolicyTokens<float> tokens, int64_t begin, int64_t end, PolicyLossDesc desc) {
  const int64_t t = begin + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (t < end) tokens.compute(t, desc);
}

// partial[b] = sums over the tokens of block b, in f64.
__global__ void __launch_bounds__(kThreads)
    block_sums_kernel(Sums* partial, const Sums* terms, int64_t count) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  // Threads past the last token must participate in the barrier of block_total().
  const Sums total = block_total(t < count ? terms[t] : Sums{});
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// One block adds the partial sums: thread i adds i, i + kThreads, .... The loss is overwritten, the
// statistics are accumulated.
__global__ void __launch_bounds__(kThreads)
    total_kernel(float* loss, PolicyLossStats* stats, const Sums* partial, int64_t count) {
  Sums thread_sums;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) add(thread_sums, partial[i]);
  const Sums total = block_total(thread_sums);
  if (threadIdx.x > 0) return;
  *loss = static_cast<float>(total.loss);
  add(*stats, total.stats);
}

}  // namespace

void policy_loss_terms(const PolicyLossTerms& args) {
  COHORT_CHECK(args.logprob.dtype() == DType::kF32,
               "[policy_loss] expected f32 log-probs on a CUDA device, got ", args.logprob.str());
  launch("policy_loss", terms_kernel, {blocks_for(args.count, kThreads), kThreads},
         args.logprob.device(), PolicyTokens<float>(args), args.begin, args.begin + args.count,
         args.desc);
}

void policy_sequence_means(const PolicySequenceMeans& args) {
  COHORT_CHECK(args.logprob.dtype() == DType::kF32,
               "[policy_sequence_means] expected f32 log-probs on a CUDA device, got ",
               args.logprob.str());
  const int64_t count = args.segments.numel();
  launch("policy_sequence_means", sequence_means_kernel,
         {blocks_for(32 * count, kThreads), kThreads}, args.logprob.device(),
         SequenceLogRatios<float>(args), args.segments.data<int32_t>(), count);
}

void policy_loss_sums(const PolicyLossSums& args) {
  const Device device = args.terms.device();
  const int64_t count = args.terms.rows();
  const unsigned blocks = blocks_for(count, kThreads);
  Tensor partial =
      Tensor::empty({int64_t{blocks} * static_cast<int64_t>(sizeof(Sums))}, DType::kU8, device);
  Sums* const sums = pointer<Sums>(partial);
  launch("policy_loss_sums", block_sums_kernel, {blocks, kThreads}, device, sums,
         static_cast<const Sums*>(args.terms.raw()), count);
  launch("policy_loss_total", total_kernel, {1, kThreads}, device, pointer<float>(args.loss),
         pointer<PolicyLossStats>(args.stats), static_cast<const Sums*>(sums), int64_t{blocks});
}

}  // namespace cohort::kernels::cuda
