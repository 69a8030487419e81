// The log-probs of a micro batch under the policy, and its loss.
#pragma once

#include "nn/transformer.h"
#include "rl/policy_batch.h"

namespace cohort {

// Log-prob and entropy of each target under the policy at `temperature`, by a forward of the packed
// tokens.
TokenLogProbs policy_log_probs(const Transformer& model, const PackedBatch& batch,
                               double temperature, Adapters adapters = Adapters::kOn);
// Contribution of this micro batch to the step's loss, with sums for metrics: the policy loss of
// its targets under the softmax of `hidden` [L, C] and `head` [V, C] at `temperature`. `on_policy`
// and `teacher`: see PolicyLossInputs.
HeadLoss grpo_loss(const Variable& hidden, const HeadWeights& head, const PolicyBatch& batch,
                   const GrpoConfig& config, double temperature, bool on_policy = false,
                   std::optional<HeadTeacher> teacher = {});

// The loss of the function `name` of the calling program, checked: throws InputError naming it
// where a loss or a gradient is not finite and, in the first micro batch, unless it is a sum over
// sequences.
HostLoss checked_loss(std::string name, HostLoss loss);

}  // namespace cohort
