// The sequences of an optimiser update, and the micro batches that they are packed into. Each token
// has its final weight, one over the denominator of the whole update, so that the losses and
// gradients of micro batches and ranks add up.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "data/packing.h"
#include "rl/engine/trajectory.h"
#include "rl/grpo_config.h"

namespace cohort {

class Transformer;

// A sequence of an update with the sampler's log-prob and the advantage of each of its tokens and,
// unless empty, the reference's log-probs.
struct PolicySequence : TokenSequence {
  std::vector<double> old_logprob, advantage;
  std::vector<double> ref_logprob = {};
  // One element per token, or empty: its log-prob under the distribution that it was drawn from
  // (empty: old_logprob), and 0 if it has no surrogate (empty: all have one).
  std::vector<double> sampling_logprob = {};
  std::vector<uint8_t> surrogate_mask = {};
  // Coefficients as in the policy loss; empty: 0.
  std::vector<double> old_distance_coef = {};
  // The reference reads this in place of the tokens before the first target; empty: the same.
  std::vector<int32_t> reference_prompt = {};
};
// Converts a trajectory to the input of an update; all its tokens get the advantage. Callers skip
// trajectories without a reward (all are NaN); a trajectory that only counts in the totals has an
// empty loss mask.
PolicySequence policy_sequence(const Trajectory& trajectory, double advantage);

// A micro batch with the constants of the policy loss, [L] each: one value per target. Its weights
// are one over the denominator of the whole update.
struct PolicyBatch : PackedBatch, kernels::PolicyLossConstants {
  // The reference reads this, with the same targets in the same order; nullopt: this batch.
  std::optional<PackedBatch> reference;
  const PackedBatch& of_reference() const { return reference ? *reference : *this; }
};
// Transformer::to_device() with the constants.
PolicyBatch to_device(const PolicyBatch& batch, const Transformer& model);
// The micro batches of one optimiser update.
using Minibatch = std::vector<PolicyBatch>;

// Sums over the ranks of one optimiser update. Denominators use at least 1 of each.
// As in TRL, a sequence without a token in its loss mask counts as a sequence.
struct StepTotals {
  double sequences = 0, tokens = 0;
};

StepTotals count_totals(std::span<const PolicySequence> sequences);
// The weight of each token of a sequence with `length` of them in its loss mask.
double token_weight(LossType type, const StepTotals& totals, int64_t length,
                    int64_t max_completion_length);

struct PackPolicyDesc {
  LossType loss_type = LossType::kDapo;
  StepTotals totals;
  int64_t max_completion_length = 0, micro_batch_tokens = 0;
  DType dtype = DType::kF32;
};
// Packs the sequences with the weights of their tokens. Callers leave out sequences that cannot
// change the update (zero advantage or an empty loss mask).
Minibatch pack_policy(std::vector<PolicySequence> sequences, const PackPolicyDesc& desc);
// The inverse for log-probs: sets old_logprob and, if all batches have it, ref_logprob of each
// target of the sequences that `batches` were packed from to the values there.
void unpack_log_probs(std::span<const PolicyBatch> batches, std::span<PolicySequence> sequences);

}  // namespace cohort
