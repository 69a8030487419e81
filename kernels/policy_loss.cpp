#include "kernels/policy_loss.h"

#include "core/with_cuda.h"

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

void policy_loss(const PolicyLoss& args) {
  constexpr const char* kOp = "policy_loss";
  COHORT_CHECK(args.logprob.rank() == 1, "[policy_loss] expected logprob [T], got ",
               args.logprob.str());
  COHORT_CHECK(args.desc.beta == 0 || args.ref_logprob.defined(), "[policy_loss] beta is ",
               args.desc.beta, " but there are no reference log-probs");
  const Shape& shape = args.logprob.shape();
  const DType dtype = args.logprob.dtype();
  const Device device = args.logprob.device();
  check_tensor(args.logprob, shape, dtype, kOp, "logprob", device);
  check_tensor(args.old_logprob, shape, dtype, kOp, "old_logprob", device);
  if (args.ref_logprob.defined())
    check_tensor(args.ref_logprob, shape, dtype, kOp, "ref_logprob", device);
  check_tensor(args.advantage, shape, dtype, kOp, "advantage", device);
  check_tensor(args.weight, shape, dtype, kOp, "weight", device);
  check_tensor(args.dlogprob, shape, dtype, kOp, "dlogprob", device);
  check_tensor(args.loss, {1}, dtype, kOp, "loss", device);
  check_tensor(args.stats, {PolicyLossStats::kSize}, DType::kF64, kOp, "stats", device);
  on_device<cpu::policy_loss, cuda::policy_loss>(args.logprob.device(), args);
}

}  // namespace cohort::kernels
