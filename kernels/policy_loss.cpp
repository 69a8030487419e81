#include "kernels/policy_loss.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

static_assert(PolicyLossStats::kSize == 7);  // the specs below

Tensor PolicyLossStats::zeros(Device device) {
  return Tensor::zeros({kSize}, DType::kF64, device);
}

PolicyLossStats PolicyLossStats::from(const Tensor& sums) {
  ArgumentCheck("policy_loss")("f64 [7] stats", sums);
  const Tensor here = sums.to(Device{});
  PolicyLossStats stats;
  static_assert(sizeof stats == kSize * sizeof(double));
  std::memcpy(&stats, here.raw(), sizeof stats);
  return stats;
}

void policy_loss_terms(const PolicyLossTerms& args) {
  ArgumentCheck check("policy_loss");
  check.require(
      args.desc.beta == 0 ||
          (is_divergence(args.desc.kl) ? args.divergence : args.constants.ref_logprob).defined(),
      "beta is ", args.desc.beta, " but there are no reference log-probs, or no divergences");
  check.require(!args.desc.needs_sequences() || args.sequence_means.defined(),
                "a ratio or mask of sequences needs their means");
  check.require((args.desc.entropy_coef != 0) == args.entropy.defined() &&
                    args.entropy.defined() == args.dentropy.defined(),
                "entropies and their gradient belong to an entropy bonus, whose "
                "coefficient is ",
                args.desc.entropy_coef);
  check("[T] logprob, old_logprob, advantage, weight, dlogprob", args.logprob,
        args.constants.old_logprob, args.constants.advantage, args.constants.weight, args.dlogprob);
  check("[T] ref_logprob?, sampling_logprob?, entropy?, dentropy?, divergence?, old_distance_coef?",
        args.constants.ref_logprob, args.constants.sampling_logprob, args.entropy, args.dentropy,
        args.divergence, args.constants.old_distance_coef);
  check("f64 [T, 4] sequence_means?; f64 [T, 8] terms", args.sequence_means, args.terms);
  check.require(args.begin >= 0 && args.count >= 0 && args.begin + args.count <= check["T"],
                "tokens from ", args.begin, ", ", args.count, " of ", check["T"]);
  on_device<cpu::policy_loss_terms, cuda::policy_loss_terms>(args.logprob.device(), args);
}

void policy_sequence_means(const PolicySequenceMeans& args) {
  ArgumentCheck check("policy_sequence_means");
  check(
      "[T] logprob, old_logprob, sampling_logprob?, advantage, weight; i32 [T] segments; "
      "f64 [T, 4] means",
      args.logprob, args.constants.old_logprob, args.constants.sampling_logprob,
      args.constants.advantage, args.constants.weight, args.segments, args.means);
  on_device<cpu::policy_sequence_means, cuda::policy_sequence_means>(args.logprob.device(), args);
}

void policy_loss_sums(const PolicyLossSums& args) {
  ArgumentCheck check("policy_loss");
  check("f64 [T, 8] terms; any [1] loss; f64 [7] stats", args.terms, args.loss, args.stats);
  on_device<cpu::policy_loss_sums, cuda::policy_loss_sums>(args.terms.device(), args);
}

}  // namespace cohort::kernels
