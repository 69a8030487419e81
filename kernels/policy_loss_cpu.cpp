// The clipped surrogate with its gradient: the checks, and the loop over tokens on the CPU.
#include <algorithm>

#include "kernels/cuda_dispatch.h"
#include "kernels/policy_token.h"

namespace cohort::kernels {

Tensor PolicyLossStats::zeros(Device device) {
  return Tensor::zeros({kSize}, DType::kF64, device);
}

PolicyLossStats PolicyLossStats::from(const Tensor& sums) {
  check_tensor(sums, {kSize}, DType::kF64, "policy_loss", "stats", sums.device());
  const Tensor here = sums.to(Device{});
  PolicyLossStats stats;
  static_assert(sizeof stats == kSize * sizeof(double));
  std::memcpy(&stats, here.raw(), sizeof stats);
  return stats;
}

COHORT_DECLARE_CUDA(policy_loss);
void policy_loss(Tensor& loss, Tensor& dlogprob, Tensor& stats, const Tensor& logprob,
                 const Tensor& old_logprob, const Tensor& ref_logprob, const Tensor& advantage,
                 const Tensor& weight, const PolicyLossDesc& desc) {
  constexpr const char* kOp = "policy_loss";
  COHORT_CHECK(logprob.rank() == 1, "[policy_loss] expected logprob [T], got ", logprob.str());
  COHORT_CHECK(desc.beta == 0 || ref_logprob.defined(), "[policy_loss] beta is ", desc.beta,
               " but there are no reference log-probs");
  const Shape& shape = logprob.shape();
  const DType dtype = logprob.dtype();
  const Device device = logprob.device();
  check_tensor(logprob, shape, dtype, kOp, "logprob", device);
  check_tensor(old_logprob, shape, dtype, kOp, "old_logprob", device);
  if (ref_logprob.defined()) check_tensor(ref_logprob, shape, dtype, kOp, "ref_logprob", device);
  check_tensor(advantage, shape, dtype, kOp, "advantage", device);
  check_tensor(weight, shape, dtype, kOp, "weight", device);
  check_tensor(dlogprob, shape, dtype, kOp, "dlogprob", device);
  check_tensor(loss, {1}, dtype, kOp, "loss", device);
  check_tensor(stats, {PolicyLossStats::kSize}, DType::kF64, kOp, "stats", device);
  COHORT_FORWARD_TO_CUDA(logprob, policy_loss(loss, dlogprob, stats, logprob, old_logprob,
                                              ref_logprob, advantage, weight, desc));
  dispatch_float(dtype, kOp, [&]<class T>() {
    const T* w = weight.data<T>();
    for (int64_t t = 0; t < shape[0]; ++t)
      COHORT_CHECK(w[t] >= 0, "[policy_loss] expected weights of 0 or more, got ", w[t],
                   " at token ", t);
    const PolicyTokens<T> tokens{
        .logprob = logprob.data<T>(),
        .old_logprob = old_logprob.data<T>(),
        .ref_logprob = ref_logprob.defined() ? ref_logprob.data<T>() : nullptr,
        .advantage = advantage.data<T>(),
        .weight = w};
    T* gradient = dlogprob.data<T>();
    PolicyLossStats batch;
    double total = 0;
    for (int64_t t = 0; t < shape[0]; ++t) {
      gradient[t] = 0;
      if (w[t] == 0) continue;
      const TokenLoss token = tokens.loss(t, desc, batch);
      total += token.loss;
      gradient[t] = static_cast<T>(token.gradient);
    }
    *loss.data<T>() = static_cast<T>(total);
    PolicyLossStats sums = PolicyLossStats::from(stats);
    add(sums, batch);
    std::memcpy(stats.raw(), &sums, sizeof sums);
  });
}

}  // namespace cohort::kernels
