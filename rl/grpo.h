// GRPO: its configuration, the advantages of groups, and its loss over packed batches. Differences
// from the papers:
//   1. Every denominator (tokens, sequences) is that of the whole optimiser step, over all micro
//      batches and ranks. Therefore `bnpo`, whose denominator is by definition that of a local
//      batch, equals `dapo` here.
//   2. The old policy is the sampler: its recorded log-probs are exact, no forward recomputes them.
//   3. KL is an estimate added to the loss, by default k3; its gradient is that of the estimate
//      itself (as TRL, DeepSeekMath) unless kl_unbiased.
//   4. The log of the ratio is clamped to +-20, and the argument of the KL estimate to 20 from
//      above.
#pragma once

#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/visitor.h"
#include "data/packing.h"
#include "nn/transformer.h"
#include "rl/engine/trajectory.h"

namespace cohort {

// Group-relative advantages: A = (r - mean) times a scale of the group.
//
// A sample with a NaN reward is left out of the statistics and has advantage 0. A group whose
// rewards are all equal_rewards() has advantages of exactly 0, since scaling would turn rounding
// errors into +-1; so has a reward that is the mean, and a mean that is rounding counts as 0.
// Permuting the samples of a group permutes its advantages, to the bit.

// True if two rewards differ by rounding only: by at most 1e-9 of the larger, or 2^-48, some
// roundings of a sum of terms near 1. 0.3 and 0.1 + 0.2 are equal; so are 0 and 0.1 + 0.2 - 0.3.
bool equal_rewards(double a, double b);
// Returns 0 for a sum of at most 1e-12 of the size of its terms, which is rounding; else the sum.
double without_rounding(double sum, double size);
// without_rounding() the sum over k of weights[k] * values[k]. Leaves out values of NaN; NaN if
// there is no other.
double weighted_sum(std::span<const double> weights, std::span<const double> values);

// Statistics of the n rewards of a group. std: of the group, over n - 1 as in TRL and verl;
// batch_std: of all rewards of the step.
struct GroupStatistics {
  double n = 0, mean = 0, std = 0, batch_std = 0;
};

enum class AdvantageScale { kGroup, kBatch, kNone, kLeaveOneOut, kMaxRl };

// A new scale is an enumerator and a line in kAdvantageScales: its name in a configuration, and its
// factor.
//   group          GRPO (Shao et al. 2024); the 1e-4 keeps groups of almost equal rewards from
//                  being scaled up to unit variance
//   batch          group means, and the std of the whole step ("Tricks or Traps?", Liu et al. 2025)
//   none           Dr. GRPO (Liu et al. 2025)
//   leave_one_out  r - mean of the others: RLOO (Ahmadian et al. 2024)
//   maxrl          (r - mean) / |mean|, 0 if the mean is 0: with rewards of 0 and 1, problems count
//                  more the less often they are solved (MaxRL, as in prime-rl)
struct AdvantageScaleEntry {
  AdvantageScale value;
  const char* name;
  double (*factor)(const GroupStatistics& group);
};
inline constexpr AdvantageScaleEntry kAdvantageScales[] = {
    {AdvantageScale::kGroup, "group",
     [](const GroupStatistics& group) { return 1 / (group.std + 1e-4); }},
    {AdvantageScale::kBatch, "batch",
     [](const GroupStatistics& group) { return 1 / (group.batch_std + 1e-4); }},
    {AdvantageScale::kNone, "none", [](const GroupStatistics&) { return 1.0; }},
    {AdvantageScale::kLeaveOneOut, "leave_one_out",
     [](const GroupStatistics& group) { return group.n / (group.n - 1); }},
    {AdvantageScale::kMaxRl, "maxrl",
     [](const GroupStatistics& group) { return group.mean == 0 ? 0 : 1 / std::abs(group.mean); }},
};

// rewards: `group_size` consecutive elements per group; batch_std: see GroupStatistics, for `batch`
// only. Throws Error unless the number of rewards is a multiple of group_size.
std::vector<double> group_advantages(std::span<const double> rewards, int64_t group_size,
                                     AdvantageScale scale, double batch_std = 0);
// Whitens advantages over the tokens of a step: sample i counts tokens[i] times, and
// A = (A - mean) / sqrt(variance + 1e-8) with the variance over n - 1 (REINFORCE++, Hu et al. 2025,
// as verl's masked_whiten). Samples without tokens keep their advantage, and so do all of them if
// there are fewer than two tokens or if all advantages are equal. Advantages of 0 stay exactly 0 if
// the mean is rounding.
void whiten_advantages(std::span<double> advantages, std::span<const double> tokens);
// The standard deviation (n - 1) of the rewards that are not NaN; 0 for fewer than two, and where
// they are equal_rewards().
double reward_std(std::span<const double> rewards);
// Brings the advantages that `has_reward` selects to mean 0 and a standard deviation of 1:
// (A - mean) / (std + 1e-4), the last step of GDPO. Equal ones become 0, and 0 stays exactly 0 if
// the mean is rounding, as it is for sums of the advantages of groups.
void standardize(std::span<double> advantages, const std::vector<bool>& has_reward);
// The q-quantile of values, linearly interpolated; minus infinity without values. 0 <= q <= 1.
double quantile(std::vector<double> values, double q);

// Sums over the ranks of one optimiser update. Denominators use at least 1 of each.
// As in TRL, a sequence without a token in its loss mask counts as a sequence.
struct StepTotals {
  double sequences = 0, tokens = 0;
};

enum class LossType { kGrpo, kDapo, kDrGrpo, kBnpo, kSequenceSum };

// Numbers that the denominator of a token's loss may use, all at least 1: the totals of the update,
// the tokens of its sequence in the loss mask, and the longest completion that is allowed.
struct LossSizes {
  double sequences, tokens, length, max_completion_length;
};

// A new loss type is an enumerator and a line in kLossTypes: its name in a configuration, and the
// denominator of a token's loss.
//   grpo          mean over tokens, then over sequences (Shao et al. 2024)
//   dapo          mean over all tokens of the update (Yu et al. 2025)
//   dr_grpo       a constant number of tokens per sequence (Liu et al. 2025)
//   bnpo          mean over the tokens of a batch; see 1. above
//   sequence_sum  sum over tokens, mean over sequences: the log-prob of the whole completion
//                 (REINFORCE, Williams 1992)
struct LossTypeEntry {
  LossType value;
  const char* name;
  double (*denominator)(const LossSizes& n);
};
inline constexpr LossTypeEntry kLossTypes[] = {
    {LossType::kGrpo, "grpo", [](const LossSizes& n) { return n.sequences * n.length; }},
    {LossType::kDapo, "dapo", [](const LossSizes& n) { return n.tokens; }},
    {LossType::kDrGrpo, "dr_grpo",
     [](const LossSizes& n) { return n.sequences * n.max_completion_length; }},
    {LossType::kBnpo, "bnpo", [](const LossSizes& n) { return n.tokens; }},
    {LossType::kSequenceSum, "sequence_sum", [](const LossSizes& n) { return n.sequences; }},
};

// The choices for a token's loss; formulas in kernels/policy_loss.h.
inline constexpr EnumName<kernels::Surrogate> kSurrogates[] = {
    {kernels::Surrogate::kClip, "clip"},
    {kernels::Surrogate::kCispo, "cispo"},
    {kernels::Surrogate::kReinforce, "reinforce"},
    {kernels::Surrogate::kSapo, "sapo"},
};
inline constexpr EnumName<kernels::KlEstimator> kKlEstimators[] = {
    {kernels::KlEstimator::kK1, "k1"},
    {kernels::KlEstimator::kK2, "k2"},
    {kernels::KlEstimator::kK3, "k3"},
};

inline constexpr EnumName<kernels::RatioLevel> kRatioLevels[] = {
    {kernels::RatioLevel::kToken, "token"},
    {kernels::RatioLevel::kSequence, "sequence"},
};
inline constexpr EnumName<kernels::Importance> kImportanceModes[] = {
    {kernels::Importance::kNone, "none"},
    {kernels::Importance::kTruncate, "truncate"},
    {kernels::Importance::kMask, "mask"},
    {kernels::Importance::kSequenceMask, "sequence_mask"},
};
// The penalty beta KL is a term of the loss, or subtracted from the rewards, summed over tokens.
enum class KlPlace : uint8_t { kLoss, kReward };
inline constexpr EnumName<KlPlace> kKlPlaces[] = {{KlPlace::kLoss, "loss"},
                                                  {KlPlace::kReward, "reward"}};
// Several rewards: advantages of their weighted sum, or the weighted sum of each one's advantages,
// standardised over the step (GDPO, Liu et al. 2026).
enum class RewardAggregation : uint8_t { kSumThenNormalize, kNormalizeThenSum };
inline constexpr EnumName<RewardAggregation> kRewardAggregations[] = {
    {RewardAggregation::kSumThenNormalize, "sum_then_normalize"},
    {RewardAggregation::kNormalizeThenSum, "normalize_then_sum"},
};

// The reference policy of a model with adapters: the base without them, or those of the stage's
// start.
enum class ReferenceType : uint8_t { kBase, kStart };
inline constexpr EnumName<ReferenceType> kReferenceTypes[] = {{ReferenceType::kBase, "base"},
                                                              {ReferenceType::kStart, "start"}};

// Published algorithms as defaults of other keys. A new preset is an enumerator and a line in
// kPresets: its name in a configuration, and the keys that it sets, in YAML. docs/grpo.md has their
// papers and what differs.
enum class Preset : uint8_t {
  kNone,
  kGrpo,
  kDapo,
  kDrGrpo,
  kGspo,
  kCispo,
  kRloo,
  kReinforcePp,
  kSapo,
  kLuspo,
  kGdpo,
  kMaxRl
};
struct PresetEntry {
  Preset value;
  const char* name;
  const char* keys;
};
inline constexpr PresetEntry kPresets[] = {
    {Preset::kNone, "none", ""},
    {Preset::kGrpo, "grpo", "loss_type: grpo, beta: 0.04"},
    {Preset::kDapo, "dapo", "epsilon: 0.2, epsilon_high: 0.28, refill_rounds: 10"},
    {Preset::kDrGrpo, "dr_grpo", "loss_type: dr_grpo, scale_rewards: none"},
    {Preset::kGspo, "gspo",
     "importance_sampling_level: sequence, loss_type: grpo, epsilon: 3e-4, epsilon_high: 4e-4"},
    {Preset::kCispo, "cispo", "surrogate: cispo, epsilon: 1, epsilon_high: 4"},
    {Preset::kRloo, "rloo",
     "surrogate: reinforce, loss_type: sequence_sum, scale_rewards: leave_one_out, beta: 0.05, "
     "kl_in: reward, kl_estimator: k1"},
    {Preset::kReinforcePp, "reinforce_pp",
     "scale_rewards: none, whiten_advantages: true, beta: 0.01, kl_estimator: k2"},
    {Preset::kSapo, "sapo", "surrogate: sapo, loss_type: grpo"},
    {Preset::kLuspo, "luspo",
     "importance_sampling_level: sequence, loss_type: sequence_sum, epsilon: 2e-3, "
     "epsilon_high: 2.5e-3"},
    {Preset::kGdpo, "gdpo", "multi_objective_aggregation: normalize_then_sum"},
    {Preset::kMaxRl, "maxrl", "scale_rewards: maxrl"},
};

struct GrpoConfig {
  Preset preset = Preset::kNone;
  kernels::Surrogate surrogate = kernels::Surrogate::kClip;
  kernels::RatioLevel importance_sampling_level = kernels::RatioLevel::kToken;
  double epsilon = 0.2;
  std::optional<double> epsilon_high;      // none: epsilon
  std::optional<double> dual_clip, delta;  // none: no bound where A < 0
  double sapo_tau_pos = 1, sapo_tau_neg = 1.05;
  double beta = 0;                  // KL to the reference; 0: no reference is loaded
  std::optional<double> kl_target;  // beta adapts to it, from its configured value on; none: fixed
  int64_t kl_horizon = 10000;       // completions
  KlPlace kl_in = KlPlace::kLoss;
  kernels::KlEstimator kl_estimator = kernels::KlEstimator::kK3;
  bool kl_unbiased = false;
  ReferenceType reference = ReferenceType::kBase;  // used with adapters
  // After every ref_sync_every-th step, ref = ref_sync_alpha policy + (1 - ref_sync_alpha) ref.
  int64_t ref_sync_every = 0;
  double ref_sync_alpha = 0.6;
  LossType loss_type = LossType::kDapo;
  AdvantageScale scale_rewards = AdvantageScale::kGroup;
  RewardAggregation multi_objective_aggregation = RewardAggregation::kSumThenNormalize;
  int64_t refill_rounds = 0;  // at most so often, groups without a signal are replaced
  bool whiten_advantages = false;
  std::optional<double> advantage_clip;  // after scaling and whitening; none: unlimited
  double entropy_coef = 0;
  double top_entropy_quantile = 1;  // the fraction of tokens, by entropy, that have a surrogate
  kernels::Importance importance_weights = kernels::Importance::kNone;
  std::optional<double> importance_min, importance_max;  // none: importance_bounds()
  int64_t num_iterations = 1;                            // passes over each step's rollouts
  int64_t num_minibatches = 1;                           // optimiser updates per pass
  // Every ratio_check_every steps the ratios of all minibatches are checked before the first
  // update. In the other steps, and in all of them with 0, only those of the first minibatch are.
  int64_t ratio_check_every = 20;
  int64_t kl_check_every = 20;  // steps between measurements of update/kl; 0: none
  bool mask_truncated_completions = false;
  bool shuffle_advantages = false;  // ablation: the control experiment of the tests
  void visit(ConfigVisitor& v) {
    const Preset before = preset;
    v.choice("preset", preset, kPresets,
             "a published algorithm, as the defaults of other keys (docs/grpo.md)");
    if (preset != before) apply_preset();
    visit_loss(v);
    visit_advantages(v);
    visit_updates(v);
  }
  void visit_loss(ConfigVisitor& v) {
    v.choice("surrogate", surrogate, kSurrogates,
             "loss of a token: clip: PPO's; cispo: log-prob weighted by the clipped ratio; "
             "reinforce: log-prob; sapo: a sigmoid of the ratio");
    v.choice("importance_sampling_level", importance_sampling_level, kRatioLevels,
             "the ratio is that of a token, or the geometric mean over its sequence (GSPO)");
    v.field("epsilon", epsilon, "the ratio is clipped below 1 - epsilon", {.min = 0, .max = 1});
    v.field("epsilon_high", epsilon_high,
            "the ratio is clipped above 1 + epsilon_high; none: epsilon", {.min = 0});
    v.field("dual_clip", dual_clip,
            "(clip) the loss of a token with A < 0 is at most -A dual_clip; none: no bound",
            {.min = 1});
    v.field("delta", delta,
            "(clip) the ratio of a token with A < 0 is bounded by delta, above 1 + epsilon_high; "
            "none: no bound",
            {.min = 1});
    v.field("sapo_tau_pos", sapo_tau_pos, "(sapo) temperature where A > 0",
            {.min = 0.01, .max = 100});
    v.field("sapo_tau_neg", sapo_tau_neg, "(sapo) temperature where A < 0",
            {.min = 0.01, .max = 100});
    v.field("beta", beta, "weight of the KL to the start model, with lora to `reference`; 0: none",
            {.min = 0});
    v.field("kl_target", kl_target,
            "value to which beta, adapted after each step, steers the metric kl (Ziegler et al. "
            "2019); none: beta is fixed",
            {.min = 1e-9});
    v.field("kl_horizon", kl_horizon,
            "(kl_target) completions in which beta changes by at most about 20 %", {.min = 1});
    v.choice("kl_in", kl_in, kKlPlaces,
             "beta KL is a term of the loss, or subtracted from rewards, summed over the tokens");
    v.choice("kl_estimator", kl_estimator, kKlEstimators,
             "estimate of the KL from x = lp_ref - lp: k1: -x; k2: x^2 / 2; k3: exp(x) - x - 1");
    v.field("kl_unbiased", kl_unbiased,
            "the KL's gradient is that of its mean under the policy, with the ratio as weight");
    v.choice("reference", reference, kReferenceTypes,
             "(with lora) what beta refers to: base: the model without adapters; start: with those "
             "of the stage's start");
    v.field("ref_sync_every", ref_sync_every,
            "steps between moves of the reference towards the policy; 0: it never moves",
            {.min = 0});
    v.field("ref_sync_alpha", ref_sync_alpha,
            "weight of the policy in a move: alpha policy + (1 - alpha) reference",
            {.min = 0, .max = 1});
    v.choice("loss_type", loss_type, kLossTypes, "how token losses are averaged");
  }
  void visit_advantages(ConfigVisitor& v) {
    v.choice("scale_rewards", scale_rewards, kAdvantageScales,
             "advantage: group: (r - mean) / (std + 1e-4) of the group; batch: the same with the "
             "std of all rewards of the step; none: r - mean; leave_one_out: r - mean of the "
             "others; maxrl: (r - mean) / |mean|");
    v.choice(
        "multi_objective_aggregation", multi_objective_aggregation, kRewardAggregations,
        "several rewards: sum_then_normalize: advantages of their sum; normalize_then_sum: the "
        "sum of the advantages of each, standardised over the step (GDPO)");
    v.field("refill_rounds", refill_rounds,
            "times at most that groups without a signal are replaced by new prompts (dynamic "
            "sampling, DAPO); 0: never",
            {.min = 0, .max = 1000});
    v.field("whiten_advantages", whiten_advantages,
            "brings advantages to mean 0 and variance 1 over the tokens of the step (REINFORCE++)");
    v.field("advantage_clip", advantage_clip,
            "limits advantages, after whitening, to this absolute value; none: unlimited",
            {.min = 1e-3});
    v.field("entropy_coef", entropy_coef,
            "weight of the entropy of each token's distribution, an addition to the objective",
            {.min = 0});
    v.field("top_entropy_quantile", top_entropy_quantile,
            "only this fraction of the step's tokens, those of the highest entropy, has a "
            "surrogate; 1: all",
            {.min = 1e-6, .max = 1});
    v.choice("importance_weights", importance_weights, kImportanceModes,
             "weights for the difference to the distribution that was sampled from: truncate: "
             "clipped to the bounds; mask: tokens outside of them have no surrogate; "
             "sequence_mask: sequences whose geometric mean is outside have none");
    v.field("importance_min", importance_min,
            "lower bound; none: 0 for truncate, 0.5 for mask, 0.99 for sequence_mask", {.min = 0});
    v.field("importance_max", importance_max,
            "upper bound; none: 2 for truncate, 5 for mask, 1.01 for sequence_mask", {.min = 0});
  }
  void visit_updates(ConfigVisitor& v) {
    v.field("num_iterations", num_iterations, "passes over each step's completions",
            {.min = 1, .max = 1000});
    v.field("num_minibatches", num_minibatches, "optimiser updates per pass",
            {.min = 1, .max = 100000});
    v.field("ratio_check_every", ratio_check_every,
            "steps between checks on every minibatch, before the first update, that the ratio is "
            "exactly 1 (a forward pass of all but the first); 0: only the first is ever checked",
            {.min = 0});
    v.field("kl_check_every", kl_check_every,
            "steps between measurements of the KL between the policies before and after the step, "
            "on a micro batch (a forward pass of it); 0: never",
            {.min = 0});
    v.field("mask_truncated_completions", mask_truncated_completions,
            "completions truncated at the length limit have no loss");
    v.field("shuffle_advantages", shuffle_advantages,
            "control experiment: advantages of random other completions");
  }
  int64_t updates_per_step() const { return num_iterations * num_minibatches; }
  bool penalizes_rewards() const { return beta > 0 && kl_in == KlPlace::kReward; }
  // True if completions with an advantage of 0 change the update.
  bool needs_all_completions() const { return beta > 0 || entropy_coef > 0; }
  // Sets the keys of `preset`.
  void apply_preset();
  kernels::PolicyLossDesc loss_desc() const;
  // Throws InputError naming the keys that contradict each other.
  void validate() const;
  // One line per key that has no effect, or not the one that its name suggests.
  std::vector<std::string> warnings() const;
};

// A sequence of an update with the sampler's log-prob of each of its tokens, its advantage and,
// unless empty, the reference's log-probs.
struct PolicySequence : TokenSequence {
  std::vector<double> old_logprob;
  double advantage = 0;
  std::vector<double> ref_logprob = {};
  // One element per token, or empty: its log-prob under the distribution that it was drawn from
  // (empty: old_logprob), and 0 if it has no surrogate (empty: all have one).
  std::vector<double> sampling_logprob = {};
  std::vector<uint8_t> surrogate_mask = {};
};
// Converts a trajectory to the input of an update. Callers skip trajectories without a reward (all
// are NaN); a trajectory that only counts in the totals has an empty loss mask.
PolicySequence policy_sequence(const Trajectory& trajectory, double advantage);

// A micro batch with the constants of the policy loss, [L] each: one value per target.
struct PolicyBatch : PackedBatch {
  Tensor old_logprob, advantage;
  Tensor weight;            // one over the denominator of the whole update
  Tensor ref_logprob;       // undefined: no reference
  Tensor sampling_logprob;  // undefined: old_logprob
};
// Transformer::to_device() with the constants.
PolicyBatch to_device(const PolicyBatch& batch, const Transformer& model);
// The micro batches of one optimiser update.
using Minibatch = std::vector<PolicyBatch>;

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

// Log-prob and entropy of each target under the policy at `temperature`, by a forward of the packed
// tokens.
TokenLogProbs policy_log_probs(const Transformer& model, const PackedBatch& batch,
                               double temperature, Adapters adapters = Adapters::kOn);
// Contribution of this micro batch to the step's loss, with sums for metrics: the policy loss of
// its targets under the softmax of `hidden` [L, C] and `head` [V, C] at `temperature`. `on_policy`:
// see PolicyLossInputs.
HeadLoss grpo_loss(const Variable& hidden, const Variable& head, const PolicyBatch& batch,
                   const GrpoConfig& config, double temperature, bool on_policy = false);

}  // namespace cohort
