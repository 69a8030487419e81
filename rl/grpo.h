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

#include <span>
#include <vector>

#include "core/config.h"
#include "data/packing.h"
#include "nn/transformer.h"
#include "rl/advantage.h"
#include "rl/rollout.h"

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

// Packed tokens with what the policy loss needs. Per token [T]: old_logprob, ref_logprob (undefined
// without a reference), advantage, weight (loss mask over the step's denominator); 0 where the next
// token is no completion token.
struct PolicyBatch {
  PackedBatch packed;
  Tensor old_logprob, ref_logprob, advantage, weight;
  Tensor policy_version;         // [T] i32: optimiser updates the sampling weights had seen
  std::vector<int64_t> groups;   // per sequence: prompt number
  std::vector<int64_t> parents;  // per sequence: a sequence whose prefix it shares, or -1
};
using Minibatch = std::vector<PolicyBatch>;  // micro batches of one optimiser update

// The batch on the model's device, checked as Transformer::place() does.
PolicyBatch place(const Transformer& model, const PolicyBatch& batch);

// What one sequence contributes; built from rollouts and advantages. A sequence without a reward
// (all are NaN) counts nowhere, so there is none for it.
struct PolicySequence {
  const Trajectory* trajectory = nullptr;
  double advantage = 0;
  int64_t number = 0;   // of the sequence within the step
  bool masked = false;  // truncated and masked: its tokens are in no loss and no sum
  int64_t inputs() const { return static_cast<int64_t>(trajectory->tokens.size()) - 1; }
};

// Sums over the ranks of one optimiser update, from which the denominators follow. As in TRL, a
// masked sequence counts as a sequence, and its tokens do not count.
struct StepTotals {
  double sequences = 0, tokens = 0;
};
StepTotals count_totals(std::span<const PolicySequence> sequences);
// The weight of each token of a sequence with `length` completion tokens.
double token_weight(LossType type, const StepTotals& totals, int64_t length,
                    int64_t max_completion_length);

struct PackPolicyDesc {
  LossType loss_type = LossType::kDapo;
  StepTotals totals;
  int64_t max_completion_length = 0, micro_batch_tokens = 0, policy_version = 0;
  DType dtype = DType::kF32;
};
// Micro batches of at most micro_batch_tokens tokens, in order. Sequences that cannot change the
// update (zero advantage or masked) are the caller's to leave out.
Minibatch pack_policy(std::span<const PolicySequence> sequences, const PackPolicyDesc& desc);

// Log-prob and entropy of each target under the policy at `temperature`: the exact forward of the
// packed tokens.
TokenLogProbs policy_log_probs(const Transformer& model, const PackedBatch& batch,
                               double temperature);
// [1]: this micro batch's share of the step's loss; adds its tokens to `stats` (see
// kernels::PolicyLossStats).
Variable grpo_loss(const Variable& logprob, const PolicyBatch& batch, const GrpoConfig& config,
                   Tensor& stats);

}  // namespace cohort
