// GRPO's configuration and loss over packed batches. The maths as implemented, and what differs
// from the papers:
//   1. Every denominator (tokens, sequences) is that of the whole optimiser step, over all micro
//      batches and ranks. So `bnpo`, whose denominator is by definition that of a local batch,
//      equals `dapo` here.
//   2. The old policy is the sampler: its recorded log-probs are exact, no forward recomputes them.
//   3. KL is the k3 estimator, added to the loss; its gradient is that of k3 itself (as TRL,
//      DeepSeekMath).
//   4. Before exp, the log of the ratio is clamped to +-20 and the argument of k3 to 20 from above.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "core/config.h"
#include "data/packing.h"
#include "nn/transformer.h"
#include "rl/advantage.h"
#include "rl/trajectory.h"

namespace cohort {

enum class LossType { kGrpo, kDapo, kDrGrpo, kBnpo };

struct GrpoConfig {
  double epsilon = 0.2;
  std::optional<double> epsilon_high;  // none: epsilon
  double beta = 0;                     // KL to the frozen reference; 0: no reference is loaded
  LossType loss_type = LossType::kDapo;
  AdvantageScale scale_rewards = AdvantageScale::kGroup;
  int64_t num_iterations = 1;   // passes over each step's rollouts
  int64_t num_minibatches = 1;  // optimiser updates per pass
  bool mask_truncated_completions = false;
  bool shuffle_advantages = false;  // ablation: the control experiment of the tests
  void visit(ConfigVisitor& v);
  kernels::PolicyLossDesc loss_desc() const {
    return {epsilon, epsilon_high.value_or(epsilon), beta};
  }
};

// Micro batches of one optimiser update. Their columns are what the policy loss needs besides the
// policy: "old_logprob", "ref_logprob" (where there is a reference), "advantage" and "weight" (one
// over the denominator of the whole update).
using Minibatch = std::vector<PackedBatch>;

// What a trajectory brings to an update: tokens and loss mask, "old_logprob" and "advantage". A
// trajectory without a reward (all are NaN) counts nowhere, so there is no sequence for it; one
// that is only to be counted has an empty loss mask.
TokenSequence policy_sequence(const Trajectory& trajectory, double advantage);

// Sums over the ranks of one optimiser update, from which the denominators follow. As in TRL, a
// sequence without a token in its loss mask counts as a sequence.
struct StepTotals {
  double sequences = 0, tokens = 0;
};
StepTotals count_totals(std::span<const TokenSequence> sequences);
// The weight of each token of a sequence with `length` of them in its loss mask.
double token_weight(LossType type, const StepTotals& totals, int64_t length,
                    int64_t max_completion_length);

struct PackPolicyDesc {
  LossType loss_type = LossType::kDapo;
  StepTotals totals;
  int64_t max_completion_length = 0, micro_batch_tokens = 0;
  DType dtype = DType::kF32;
};
// Weighs the tokens and packs them. Sequences that cannot change the update (zero advantage or an
// empty loss mask) are the caller's to leave out.
Minibatch pack_policy(std::vector<TokenSequence> sequences, const PackPolicyDesc& desc);

// Log-prob and entropy of each target under the policy at `temperature`: the exact forward of the
// packed tokens.
TokenLogProbs policy_log_probs(const Transformer& model, const PackedBatch& batch,
                               double temperature);
// This micro batch's share of the step's loss, with its sums for metrics.
LossAndStats grpo_loss(const Variable& logprob, const PackedBatch& batch, const GrpoConfig& config);

}  // namespace cohort
