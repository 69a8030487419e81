// head_divergence() with the gradients of a loss that is the sum of the divergences.
#pragma once

#include <vector>

#include "kernels/head.h"

namespace cohort::kernels::test {

struct DivergenceOutputs {
  Tensor divergence, gradient;  // [n]; [n, V]
};

inline DivergenceOutputs run_divergence(const Tensor& logits, const Tensor& teacher,
                                        const DivergenceDesc& desc, double temperature,
                                        Tensor dz = {}) {
  const int64_t count = logits.dim(0);
  const Tensor zeros = Tensor::zeros({count}, logits.dtype(), logits.device());
  const Tensor targets = Tensor::zeros({count}, DType::kI32, logits.device());
  Tensor logprob = zeros.clone(), entropy = zeros.clone(), lse = zeros.clone(),
         teacher_lse = zeros.clone(),
         ones = Tensor::full({count}, 1, zeros.dtype(), zeros.device());
  head_statistics({logprob, entropy, lse, logits, targets, 0, temperature});
  Tensor ignored = zeros.clone();
  head_statistics({ignored, ignored, teacher_lse, teacher, targets, 0, temperature});
  Tensor rows = Tensor::full({count, 5}, 7, zeros.dtype(), zeros.device());
  DivergenceOutputs out{zeros.clone(), dz.defined() ? dz : logits.clone()};
  const HeadDivergence call{out.divergence, rows, logits,      teacher, lse,
                            teacher_lse,    0,    temperature, desc};
  head_divergence(call);
  const Tensor& source = dz.defined() ? logits : out.gradient;
  head_logit_gradients(
      {out.gradient, source, zeros, {}, lse, entropy, targets, 0, temperature, &call, ones});
  return out;
}

inline std::vector<DivergenceDesc> divergence_kinds() {
  std::vector<DivergenceDesc> out;
  for (const int64_t top_k : {0, 1, 6, 22})
    for (const auto& [kind, weight] : {std::pair{KlEstimator::kReverse, 0.5},
                                       {KlEstimator::kForward, 0.5},
                                       {KlEstimator::kJsd, 0.1},
                                       {KlEstimator::kJsd, 0.5},
                                       {KlEstimator::kJsd, 0.9}})
      out.push_back({kind, weight, top_k});
  return out;
}

}  // namespace cohort::kernels::test
