// A GRPO step as a function: rollouts, rewards, advantages, updates, metrics. Independent of files,
// reporters and signals; every rank makes the same calls.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "rl/engine/rollout.h"
#include "rl/policy_batch.h"
#include "trainers/balance.h"
#include "trainers/grpo_metrics.h"

namespace cohort {

// The indices of a rank's prompts within a step, ascending. The step's prompts are split into
// minibatches first and each minibatch over the ranks, so that the same prompts share an update for
// any number of ranks.
std::vector<int64_t> shard_prompts(const Communicator& comm, const GrpoSections& config,
                                   int64_t step);

// The policy that the KL term refers to: a model, or the learner's with other adapters.
struct ReferencePolicy {
  const Transformer* model = nullptr;  // nullptr: none
  Adapters adapters = Adapters::kOn;   // kOff: the learner's base
  // Transformer::adapters() to use in place of the learner's; nullptr: none.
  const std::vector<Tensor>* start = nullptr;
  // Tokens of the prompt that it reads for a problem; empty: the policy's.
  std::function<std::vector<int32_t>(const Example&)> prompt = {};
};
// The reference follows the policy (Gorbatovski et al. 2024, as TRL's sync_ref_model): reference =
// alpha policy + (1 - alpha) reference in place, in the accumulation dtype, rounded once. Tensors
// at the same position are contiguous and of one shape; all are of one dtype and on one device.
// Throws Error for other shapes. Nothing has changed if it throws OutOfMemoryError.
void mix_weights(std::span<const Tensor> reference, std::span<const Tensor> policy, double alpha);

// beta after a step of so many completions, with the step's metric `kl` (NaN: not measured):
// beta (1 + clip(kl / kl_target - 1, -0.2, 0.2) completions / kl_horizon), from 1e-30 to 1e30
// (Ziegler et al. 2019, section 2.2; verl's AdaptiveKLController). `config` has the beta of the
// step, and a kl_target; the KL is the mean over tokens of k3, not Ziegler's sum.
double next_beta(const GrpoConfig& config, double kl, int64_t completions);

struct GrpoStep;

// Observes the steps of a rank: records them (job/journal.h), or compares them with a record and
// gives its scores (job/replay.h). Every rank makes the same calls.
class StepJournal {
 public:
  virtual ~StepJournal() = default;
  // Called once, with the dialogues of training. Their environment must outlive the journal.
  virtual void attach(DialogueOptions& dialogue) = 0;
  // True if add() gives the scores: no reward is asked.
  virtual bool has_scores() const { return false; }
  // False: the step ends without an update.
  virtual bool updates_weights() const { return true; }
  // A step begins, before it samples.
  virtual void begin(const GrpoStep& step) = 0;
  // The groups of the step's prompts, and then those of each further round, with their scores
  // unless has_scores(). The indices of their completions are unique within the step.
  virtual void add(std::span<Group> groups) = 0;
  // The step has ended, with its updates.
  virtual void end(const GrpoStep& step, std::span<const Group> groups) = 0;
};

struct GrpoStep {
  Communicator& comm;
  GrpoSections config;
  const Sampler& sampler;  // samples from the learner's model
  const RewardSet& rewards;
  Learner& learner;
  ReferencePolicy reference;
  // The next `count` prompts of the data, of which it returns those at `positions`: of the step,
  // then of each further round. Every rank calls it with the same count.
  std::function<std::vector<Example>(int64_t count, std::span<const int64_t> positions)>
      next_prompts;
  int64_t step = 0;  // address of the random numbers
  double learning_rate = 0;
  StepJournal* journal = nullptr;  // nullptr: none
};
struct GrpoStepResult {
  Metrics metrics = {};          // over all ranks, under the names of docs/grpo.md, section 9
  ScoredRollouts rollouts = {};  // this rank's
  int64_t rewarded_count = 0;    // completions of all ranks to which a reward applies; 0: no update
  // group_outcome(), by the rewards, of all prompts drawn in the step, in their order; 0
  // without a reward.
  std::vector<double> outcomes = {};
};
// Throws NonFiniteError on all ranks if one of them meets a non-finite number.
GrpoStepResult grpo_step(const GrpoStep& in);

// ---- Its parts

// The control experiment: shuffles the advantages of all completions of a step. The permutation
// depends on seed and step only.
void shuffle_advantages(std::span<double> advantages, uint64_t seed, int64_t step);

// The sequences of an optimiser update, and the micro batches on the model's device that they are
// packed into, with the denominators of the whole update over all ranks.
struct PolicyUpdate {
  std::vector<PolicySequence> sequences;
  RankLoad load;
  // Tokens that this rank has sampled: those in the loss, and of them those without a surrogate.
  double tokens = 0, masked = 0;
  PackPolicyDesc desc;  // how `batches` are packed; no micro_batch_tokens: they are not
  Minibatch batches;
  // Packs the sequences into micro batches of at most `tokens` tokens, unless they are already.
  void pack(int64_t tokens, const Transformer& model);
  // Copies the log-probs of the micro batches back into the sequences, which may then be changed.
  void unpack();
};

// Inputs of the updates of a step besides their minibatches.
struct UpdateContext {
  int64_t step = 0;                // address of the random numbers
  ReferencePolicy reference = {};  // its prompts are packed; needed if config.grpo.distills()
};

// The optimiser updates of a step, after balance(), packed. An update without a token in the loss
// mask of any rank is left out. `advantages`: those of all completions of the step, by their index;
// with credit: turn those of the turns that the groups have count.
std::vector<PolicyUpdate> pack_minibatches(Communicator& comm, Learner& learner,
                                           std::span<const Group> groups,
                                           std::span<const double> advantages,
                                           const GrpoSections& config,
                                           const UpdateContext& context = {});

// num_iterations passes over the minibatches. Before the first update the weights are those that
// sampled, so the ratios of its minibatch must be exactly 1, and so must those of the other
// minibatches, which are checked every config.grpo.ratio_check_every steps. If they are not, the
// recorded log-probs are wrong: they are recomputed for all minibatches before the update is made.
// Every config.grpo.kl_check_every steps UpdateSums::step_kl is measured after the last update, on
// each rank's first micro batch. All of it is within memory (Learner::within_memory()): minibatches
// may be packed anew.
UpdateSums update_policy(Communicator& comm, Learner& learner,
                         std::vector<PolicyUpdate>& minibatches, const GrpoSections& config,
                         double learning_rate, const UpdateContext& context = {});

}  // namespace cohort
