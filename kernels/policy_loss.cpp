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
  COHORT_CHECK(!args.desc.needs_sequences() || args.sequence_means.defined(),
               "[policy_loss] a ratio or mask of sequences needs their means");
  COHORT_CHECK((args.desc.entropy_coef != 0) == args.entropy.defined() &&
                   args.entropy.defined() == args.dentropy.defined(),
               "[policy_loss] entropies and their gradient belong to an entropy bonus, whose "
               "coefficient is ",
               args.desc.entropy_coef);
  const Shape& shape = args.logprob.shape();
  const Device device = args.logprob.device();
  for (const auto& [t, name] : {std::pair{&args.logprob, "logprob"},
                                {&args.old_logprob, "old_logprob"},
                                {&args.advantage, "advantage"},
                                {&args.weight, "weight"},
                                {&std::as_const(args.dlogprob), "dlogprob"}})
    check_tensor(*t, shape, args.logprob.dtype(), kOp, name, device);
  for (const auto& [t, name] : {std::pair{&args.ref_logprob, "ref_logprob"},
                                {&args.sampling_logprob, "sampling_logprob"},
                                {&args.entropy, "entropy"},
                                {&args.dentropy, "dentropy"}})
    if (t->defined()) check_tensor(*t, shape, args.logprob.dtype(), kOp, name, device);
  if (args.sequence_means.defined())
    check_tensor(args.sequence_means, {shape.numel(), 2}, DType::kF64, kOp, "sequence_means",
                 device);
  check_tensor(args.terms, {shape.numel(), 1 + PolicyLossStats::kSize}, DType::kF64, kOp, "terms",
               device);
  COHORT_CHECK(args.begin >= 0 && args.count >= 0 && args.begin + args.count <= shape.numel(),
               "[policy_loss] tokens from ", args.begin, ", ", args.count, " of ", shape.numel());
  on_device<cpu::policy_loss_terms, cuda::policy_loss_terms>(device, args);
}

void policy_sequence_means(const PolicySequenceMeans& args) {
  constexpr const char* kOp = "policy_sequence_means";
  COHORT_CHECK(args.logprob.rank() == 1, "[", kOp, "] expected logprob [T], got ",
               args.logprob.str());
  const Shape& shape = args.logprob.shape();
  const Device device = args.logprob.device();
  for (const auto& [t, name] : {std::pair{&args.logprob, "logprob"},
                                {&args.old_logprob, "old_logprob"},
                                {&args.sampling_logprob, "sampling_logprob"},
                                {&args.weight, "weight"}})
    if (t->defined() || t != &args.sampling_logprob)
      check_tensor(*t, shape, args.logprob.dtype(), kOp, name, device);
  check_tensor(args.segments, shape, DType::kI32, kOp, "segments", device);
  check_tensor(args.means, {shape.numel(), 2}, DType::kF64, kOp, "means", device);
  on_device<cpu::policy_sequence_means, cuda::policy_sequence_means>(device, args);
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
