// The policy loss of a few tokens, given as numbers.
#pragma once

#include "tests/kernels/kernel_test.h"
#include "tests/support/policy_loss_call.h"

namespace cohort::kernels::policy_test {

struct Tokens {
  std::vector<double> logprob, old, ref, advantage, weight;
};

struct Result {
  double loss;
  std::vector<double> gradient;
  PolicyLossStats stats;
};

inline Result run(const Tokens& t, const PolicyLossDesc& desc, DType dtype = DType::kF64) {
  const auto tensor = [&](const std::vector<double>& v) { return Tensor::from(v).to(dtype); };
  const auto n = static_cast<int64_t>(t.logprob.size());
  Tensor loss = Tensor::full({1}, NAN, dtype), dlogprob = Tensor::full({n}, NAN, dtype);
  Result result{};
  Tensor stats = PolicyLossStats::zeros();
  policy_loss({loss, dlogprob, stats, tensor(t.logprob), tensor(t.old),
               t.ref.empty() ? Tensor() : tensor(t.ref), tensor(t.advantage), tensor(t.weight),
               desc});
  result.loss = loss.item();
  result.stats = PolicyLossStats::from(stats);
  result.gradient = dlogprob.to_vector<double>();
  return result;
}

inline Result run_one(double logprob, double old, double advantage,
                      const PolicyLossDesc& desc = {}) {
  return run({{logprob}, {old}, {}, {advantage}, {1}}, desc);
}

inline Result run_segments(const Tokens& t, const std::vector<int32_t>& segments,
                           const PolicyLossDesc& desc, const std::vector<double>& sampling = {}) {
  const Tensor lp = Tensor::from(t.logprob);
  Tensor loss = Tensor::empty({1}, DType::kF64), gradient = Tensor::empty_like(lp);
  Tensor stats = PolicyLossStats::zeros();
  policy_loss({.loss = loss,
               .dlogprob = gradient,
               .stats = stats,
               .logprob = lp,
               .old_logprob = Tensor::from(t.old),
               .ref_logprob = {},
               .advantage = Tensor::from(t.advantage),
               .weight = Tensor::from(t.weight),
               .desc = desc,
               .sampling_logprob = sampling.empty() ? Tensor() : Tensor::from(sampling),
               .segments = Tensor::from(segments)});
  return {loss.item(), gradient.to_vector<double>(), PolicyLossStats::from(stats)};
}

}  // namespace cohort::kernels::policy_test
