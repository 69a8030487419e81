// The configuration of GRPO: the choices of its loss and its advantages, and its keys. Differences
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

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "autograd/ops.h"
#include "config/visitor.h"
#include "kernels/policy_loss.h"
#include "rl/advantage.h"
#include "rl/caller.h"

namespace cohort {

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
using kernels::kSurrogates;
inline constexpr EnumName<kernels::KlEstimator> kKlEstimators[] = {
    {kernels::KlEstimator::kK1, "k1"},           {kernels::KlEstimator::kK2, "k2"},
    {kernels::KlEstimator::kK3, "k3"},           {kernels::KlEstimator::kReverse, "reverse"},
    {kernels::KlEstimator::kForward, "forward"}, {kernels::KlEstimator::kJsd, "jsd"},
};

inline constexpr EnumName<kernels::RatioLevel> kRatioLevels[] = {
    {kernels::RatioLevel::kToken, "token"},
    {kernels::RatioLevel::kSequence, "sequence"},
    {kernels::RatioLevel::kClipped, "clipped"},
};
// With the default bounds of the weights: TRL's and verl's cap, IcePop's, SkyRL's.
struct ImportanceEntry {
  kernels::Importance value;
  const char* name;
  double lowest, largest;
};
inline constexpr ImportanceEntry kImportanceModes[] = {
    {kernels::Importance::kNone, "none", 0, 2},
    {kernels::Importance::kTruncate, "truncate", 0, 2},
    {kernels::Importance::kMask, "mask", 0.5, 5},
    {kernels::Importance::kReject, "sequence_mask", 0.99, 1.01},  // earlier versions' name
    {kernels::Importance::kReject, "reject", 0.99, 1.01},
};
// auto: of tokens; with reject, geometric.
inline constexpr EnumName<std::optional<kernels::ImportanceLevel>> kImportanceLevels[] = {
    {std::nullopt, "auto"},
    {kernels::ImportanceLevel::kToken, "token"},
    {kernels::ImportanceLevel::kSequence, "sequence"},
    {kernels::ImportanceLevel::kGeometric, "geometric"},
};
// With the default of its bounds: verl's, prime-rl's.
struct TrustRegionEntry {
  kernels::TrustRegion value;
  const char* name;
  double bound;
};
inline constexpr TrustRegionEntry kTrustRegions[] = {{kernels::TrustRegion::kNone, "none", 0.2},
                                                     {kernels::TrustRegion::kTv, "tv", 0.2},
                                                     {kernels::TrustRegion::kKl, "kl", 0.2},
                                                     {kernels::TrustRegion::kIpo, "ipo", 0.1}};
// Tokens whose advantage and log-prob vary together most lose their surrogate (Clip-Cov), or have a
// penalty on |lp - lp_old| (KL-Cov; both Cui et al. 2025, arXiv 2505.22617).
enum class Covariance : uint8_t { kNone, kClip, kKl };
inline constexpr EnumName<Covariance> kCovariances[] = {
    {Covariance::kNone, "none"}, {Covariance::kClip, "clip"}, {Covariance::kKl, "kl"}};
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

// The tokens that share an advantage: all of a completion, or those of a turn of a dialogue.
enum class Credit : uint8_t { kCompletion, kTurn };
inline constexpr EnumName<Credit> kCredits[] = {{Credit::kCompletion, "completion"},
                                                {Credit::kTurn, "turn"}};
// Rewards are compared with those of the group, with those of the step, or with nothing.
enum class Baseline : uint8_t { kGroup, kBatch, kNone };
inline constexpr EnumName<Baseline> kBaselines[] = {
    {Baseline::kGroup, "group"}, {Baseline::kBatch, "batch"}, {Baseline::kNone, "none"}};

// The policy that beta refers to: the model at the stage's start, where it has adapters without
// them (kBase) or with those of the start; the policy itself without a gradient; the model in a
// folder, a teacher.
enum class ReferenceType : uint8_t { kBase, kStart, kPolicy, kFolder };
// The names; any other text is a folder.
inline constexpr EnumName<ReferenceType> kReferenceTypes[] = {{ReferenceType::kBase, "base"},
                                                              {ReferenceType::kStart, "start"},
                                                              {ReferenceType::kPolicy, "policy"}};

// Published algorithms as defaults of other keys. A new preset is a line in kPresets: its name in a
// configuration, and the keys that it sets, in YAML. docs/grpo.md has their papers and what
// differs.
struct PresetEntry {
  std::string_view name;
  const char* keys;
  std::string_view value = name;
};
inline constexpr PresetEntry kPresets[] = {
    {"none", ""},
    {"grpo", "loss_type: grpo, beta: 0.04"},
    {"dapo", "epsilon: 0.2, epsilon_high: 0.28, dynamic_sampling_rounds: 10"},
    {"dr_grpo", "loss_type: dr_grpo, scale_rewards: none"},
    {"gspo",
     "importance_sampling_level: sequence, loss_type: grpo, epsilon: 3e-4, epsilon_high: 4e-4"},
    {"cispo", "surrogate: cispo, epsilon: 1, epsilon_high: 4"},
    {"rloo",
     "surrogate: reinforce, loss_type: sequence_sum, scale_rewards: leave_one_out, beta: 0.05, "
     "kl_in: reward, kl_estimator: k1"},
    {"reinforce_pp", "scale_rewards: none, whiten_advantages: true, beta: 0.01, kl_estimator: k2"},
    {"sapo", "surrogate: sapo, loss_type: grpo"},
    {"luspo",
     "importance_sampling_level: sequence, loss_type: sequence_sum, epsilon: 2e-3, "
     "epsilon_high: 2.5e-3"},
    {"gdpo", "multi_objective_aggregation: normalize_then_sum"},
    {"maxrl", "scale_rewards: maxrl"},
    {"prime_rl",
     "epsilon: 1, epsilon_high: 1e9, trust_region: tv, old_kl_coef: 1e-3, scale_rewards: none"},
    {"dppo", "surrogate: cispo, epsilon: 1, epsilon_high: 19, trust_region: tv"},
    {"vespo", "surrogate: vespo"},
    {"gmpo", "importance_sampling_level: clipped, epsilon: 0.4, loss_type: grpo"},
    {"clip_cov", "covariance: clip"},
    {"kl_cov", "covariance: kl, epsilon: 1, epsilon_high: 1e9"},
    {"opd", "beta: 1, kl_estimator: reverse"},
};

ReferenceType reference_type(std::string_view reference);

struct GrpoConfig {
  std::string_view preset = "none";  // a name of kPresets
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
  double jsd_weight = 0.5;
  int64_t kl_top_k = 0;
  std::string reference = "base";  // a name of kReferenceTypes, or a folder
  // A template over a problem's fields; empty: the reference reads the policy's prompts.
  std::string reference_prompt;
  // After every ref_sync_every-th step, ref = ref_sync_alpha policy + (1 - ref_sync_alpha) ref.
  int64_t ref_sync_every = 0;
  double ref_sync_alpha = 0.6;
  LossType loss_type = LossType::kDapo;
  // Names of functions of the calling program; empty: built in. What has no key is set by
  // bind_callbacks(). The request for advantages is described at host_advantages() in
  // trainers/grpo_step.cpp.
  std::string loss, advantage;
  std::shared_ptr<const HostLoss> loss_function = nullptr;
  std::shared_ptr<const Callback> advantage_function = nullptr;
  bool has_functions() const { return !loss.empty() || !advantage.empty(); }
  AdvantageScale scale_rewards = AdvantageScale::kGroup;
  Baseline baseline = Baseline::kGroup;
  Credit credit = Credit::kCompletion;
  RewardAggregation multi_objective_aggregation = RewardAggregation::kSumThenNormalize;
  int64_t dynamic_sampling_rounds = 0;  // at most so often, groups without a signal are replaced
  bool whiten_advantages = false;
  std::optional<double> advantage_clip;  // after scaling and whitening; none: unlimited
  double entropy_coef = 0;
  std::optional<double> entropy_target;  // entropy_coef adapts to it; none: fixed
  double top_entropy_quantile = 1;  // the fraction of tokens, by entropy, that have a surrogate
  kernels::Importance importance_weights = kernels::Importance::kNone;
  std::optional<kernels::ImportanceLevel> importance_level;
  std::optional<double> importance_min, importance_max;  // none: as kImportanceModes
  kernels::TrustRegion trust_region = kernels::TrustRegion::kNone;
  std::optional<double> trust_low, trust_high;  // none: as kTrustRegions
  std::optional<double> off_policy_mask;
  std::vector<std::string> rejection;  // rules, see reject_tokens() in rl/rejection.h
  Covariance covariance = Covariance::kNone;
  double covariance_fraction = 2e-4, covariance_kl_coef = 1;
  double old_kl_coef = 0;
  int64_t num_iterations = 1;   // passes over each step's rollouts
  int64_t num_minibatches = 1;  // optimiser updates per pass
  // Every ratio_check_every steps the ratios of all minibatches are checked before the first
  // update. In the other steps, and in all of them with 0, only those of the first minibatch are.
  int64_t ratio_check_every = 20;
  int64_t kl_check_every = 20;  // steps between measurements of update/kl; 0: none
  bool mask_truncated_completions = false;
  bool shuffle_advantages = false;  // ablation: the control experiment of the tests
  void visit(ConfigVisitor& v);
  ReferenceType reference_type() const { return cohort::reference_type(reference); }
  // True if the loss has the divergence from the reference's whole distribution.
  bool distills() const {
    return beta > 0 && kl_in == KlPlace::kLoss && kernels::is_divergence(kl_estimator);
  }
  // True if the trained model is also the reference of such a divergence, so that a micro batch has
  // two forwards of it.
  bool distills_itself(bool has_adapters) const {
    return distills() && reference_type() != ReferenceType::kFolder &&
           (has_adapters || reference_type() == ReferenceType::kPolicy);
  }
  // True if the reference knows what the start of the policy does not, so that no reward is needed.
  bool has_teacher() const {
    return beta > 0 && kl_in == KlPlace::kLoss &&
           (reference_type() >= ReferenceType::kPolicy || !reference_prompt.empty());
  }
  int64_t updates_per_step() const { return num_iterations * num_minibatches; }
  bool penalizes_rewards() const { return beta > 0 && kl_in == KlPlace::kReward; }
  // True if completions with an advantage of 0 change the update; those with old_kl_coef do where
  // the policy is not the one that sampled.
  bool needs_all_completions() const {
    return beta > 0 || entropy_coef > 0 || !loss.empty() ||
           (old_kl_coef > 0 && updates_per_step() > 1);
  }
  // True if the loss compares the policy with the distribution that tokens were drawn from.
  bool needs_sampling_log_probs() const {
    return importance_weights != kernels::Importance::kNone ||
           trust_region != kernels::TrustRegion::kNone || off_policy_mask || old_kl_coef > 0 ||
           !rejection.empty() || !loss.empty();
  }
  // True if some tokens are chosen to have no surrogate.
  bool masks_tokens() const {
    return top_entropy_quantile < 1 || !rejection.empty() || covariance == Covariance::kClip;
  }
  // Sets the keys of `preset`.
  void apply_preset();
  kernels::PolicyLossDesc loss_desc() const;
  kernels::DivergenceDesc divergence_desc() const { return {kl_estimator, jsd_weight, kl_top_k}; }
  // Throws InputError naming the keys that contradict each other.
  void validate() const;
  // One line per key that has no effect, or not the one that its name suggests. `restricted`: the
  // sampler's distribution is not the policy's; `rewarded`: there are rewards.
  std::vector<std::string> warnings(bool restricted = false, bool rewarded = true) const;
  // One line per combination of keys that docs/grpo.md advises against.
  std::vector<std::string> advice() const;

 private:
  void validate_reference() const;
  void validate_functions() const;
  void validate_corrections() const;
  // Warnings of keys of what functions or a teacher are in place of.
  std::vector<std::string> unused_keys(bool rewarded) const;
  // Warnings of keys of the KL. `with_preset`: what the preset sets.
  std::vector<std::string> kl_warnings(const GrpoConfig& with_preset) const;
  void visit_loss(ConfigVisitor& v);
  void visit_advantages(ConfigVisitor& v);
  void visit_corrections(ConfigVisitor& v);
  void visit_updates(ConfigVisitor& v);
};

}  // namespace cohort
