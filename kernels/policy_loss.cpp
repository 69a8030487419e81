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

void policy_loss_terms(const PolicyLossTerms& args) {
  constexpr const char* kOp = "policy_loss";
  COHORT_CHECK(args.logprob.rank() == 1, "[policy_loss] expected logprob [T], got ",
               args.logprob.str());
  COHORT_CHECK(args.desc.beta == 0 || args.ref_logprob.defined(), "[policy_loss] beta is ",
               args.desc.beta, " but there are no reference log-probs");
  const Shape& shape = args.logprob.shape();
  const Device device = args.logprob.device();
  for (const auto& [t, name] : {std::pair{&args.logprob, "logprob"},
                                {&args.old_logprob, "old_logprob"},
                                {&args.ref_logprob, "ref_logprob"},
                                {&args.advantage, "advantage"},
                                {&args.weight, "weight"},
                                {&std::as_const(args.dlogprob), "dlogprob"}})
    if (t->defined() || t != &args.ref_logprob)
      check_tensor(*t, shape, args.logprob.dtype(), kOp, name, device);
  check_tensor(args.terms, {shape.numel(), 1 + PolicyLossStats::kSize}, DType::kF64, kOp, "terms",
               device);
  COHORT_CHECK(args.begin >= 0 && args.count >= 0 && args.begin + args.count <= shape.numel(),
               "[policy_loss] tokens from ", args.begin, ", ", args.count, " of ", shape.numel());
  on_device<cpu::policy_loss_terms, cuda::policy_loss_terms>(device, args);
}

void policy_loss_sums(const PolicyLossSums& args) {
  constexpr const char* kOp = "policy_loss";
  const Device device = args.terms.device();
  check_tensor(args.terms, {args.terms.rows(), 1 + PolicyLossStats::kSize}, DType::kF64, kOp,
               "terms", device);
  check_tensor(args.loss, {1}, args.loss.dtype(), kOp, "loss", device);
  check_tensor(args.stats, {PolicyLossStats::kSize}, DType::kF64, kOp, "stats", device);
  on_device<cpu::policy_loss_sums, cuda::policy_loss_sums>(device, args);
}

}  // namespace cohort::kernels
