#include "rl/grpo_config.h"

#include "data/field_template.h"
#include "rl/rejection.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// True if a key has the value that the preset sets, and not its default.
bool uses_preset(const GrpoConfig& config) {
  GrpoConfig preset{.preset = config.preset};
  preset.apply_preset();
  const ConfigFields defaults = config_fields(GrpoConfig{.preset = config.preset}),
                     with_preset = config_fields(preset), fields = config_fields(config);
  for (size_t i = 0; i < fields.size(); ++i)
    if (with_preset[i] != defaults[i] && fields[i] == with_preset[i]) return true;
  return false;
}

}  // namespace

void GrpoConfig::visit(ConfigVisitor& v) {
  const std::string_view before = preset;
  v.choice("preset", preset, kPresets,
           "a published algorithm, as the defaults of other keys (docs/grpo.md)");
  if (preset != before) apply_preset();
  visit_loss(v);
  visit_advantages(v);
  visit_corrections(v);
  visit_updates(v);
}

void GrpoConfig::visit_loss(ConfigVisitor& v) {
  v.choice("surrogate", surrogate, kSurrogates,
           "loss of a token: clip: PPO's; cispo: log-prob weighted by the clipped ratio; "
           "reinforce: log-prob; sapo: a sigmoid of the ratio; vespo: log-prob weighted by a "
           "function of the product of the sequence's ratios");
  v.choice("importance_sampling_level", importance_sampling_level, kRatioLevels,
           "the ratio is that of a token, or the geometric mean over its sequence (GSPO); clipped: "
           "of ratios with logs clipped at -epsilon and epsilon_high (GMPO)");
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
  v.field("beta", beta, "weight of the KL to `reference`; 0: none", {.min = 0});
  v.field("kl_target", kl_target,
          "value to which beta, adapted after each step, steers the metric kl (Ziegler et al. "
          "2019); none: beta is fixed",
          {.min = 1e-9});
  v.field("kl_horizon", kl_horizon,
          "(kl_target) completions in which beta changes by at most about 20 %", {.min = 1});
  v.choice("kl_in", kl_in, kKlPlaces,
           "beta KL is a term of the loss, or subtracted from rewards, summed over the tokens");
  v.choice("kl_estimator", kl_estimator, kKlEstimators,
           "estimate of the KL from x = lp_ref - lp: k1: -x; k2: x^2 / 2; k3: exp(x) - x - 1; or "
           "the divergence over the whole vocabulary: reverse: KL(policy, ref); forward: KL(ref, "
           "policy); jsd: to a mixture of both");
  v.field("jsd_weight", jsd_weight,
          "(jsd) weight b of b KL(ref, m) + (1 - b) KL(policy, m), m = (1 - b) policy + b ref",
          {.min = 1e-3, .max = 0.999});
  v.field(
      "kl_top_k", kl_top_k,
      "(reverse, forward, jsd) only the reference's likeliest tokens have entries of their own, "
      "the rest share one; 0: all have, which is faster",
      {.min = 0});
  v.field("kl_unbiased", kl_unbiased,
          "the KL's gradient is that of its mean under the policy, with the ratio as weight");
  v.field("reference", reference,
          "what beta refers to: base: the stage's start, with lora the model without adapters; "
          "start: with lora, those of the stage's start; policy: the policy itself, which reads "
          "reference_prompt; or the folder of a model, a teacher");
  v.field("reference_prompt", reference_prompt,
          "template of the prompt that the reference reads, over a problem's fields and {prompt}, "
          "the prompt or last message of the user; empty: the policy's prompt");
  v.field("ref_sync_every", ref_sync_every,
          "steps between moves of the reference towards the policy; 0: it never moves", {.min = 0});
  v.field("ref_sync_alpha", ref_sync_alpha,
          "weight of the policy in a move: alpha policy + (1 - alpha) reference",
          {.min = 0, .max = 1});
  v.choice("loss_type", loss_type, kLossTypes, "how token losses are averaged");
}

void GrpoConfig::visit_advantages(ConfigVisitor& v) {
  v.field("loss", loss,
          "name of a function of a Python program, cohort.train(loss=...), in place of the loss; "
          "empty: none");
  v.field("advantage", advantage,
          "name of a function of a Python program, cohort.train(advantage=...), which gives the "
          "advantages; empty: none");
  v.choice("scale_rewards", scale_rewards, kAdvantageScales,
           "advantage: group: (r - mean) / (std + 1e-4) of the group; batch: the same with the "
           "std of all rewards of the step; none: r - mean; leave_one_out: r - mean of the "
           "others; maxrl: (r - mean) / |mean|");
  v.choice("baseline", baseline, kBaselines,
           "what an advantage compares a reward r with: group: the completions of its prompt; "
           "batch: all of the step, which are one group for scale_rewards; none: the advantage is "
           "r");
  v.choice("credit", credit, kCredits,
           "completion: all its tokens share an advantage; turn: those of each turn of a dialogue "
           "do, by the discounted sum of the rewards from it on");
  v.choice("multi_objective_aggregation", multi_objective_aggregation, kRewardAggregations,
           "several rewards: sum_then_normalize: advantages of their sum; normalize_then_sum: the "
           "sum of the advantages of each, standardised over the step (GDPO)");
  v.field("dynamic_sampling_rounds", dynamic_sampling_rounds,
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
  v.field("entropy_target", entropy_target,
          "entropy, in nats, up to which the bonus acts: after each step entropy_coef grows by "
          "0.005 if the metric entropy is at most this, else it falls by as much, from 0 to 1; "
          "none: entropy_coef is fixed",
          {.min = 0});
  v.field("top_entropy_quantile", top_entropy_quantile,
          "only this fraction of the step's tokens, those of the highest entropy, has a "
          "surrogate; 1: all",
          {.min = 1e-6, .max = 1});
}

void GrpoConfig::visit_corrections(ConfigVisitor& v) {
  v.choice("importance_weights", importance_weights, kImportanceModes,
           "weights for the difference to the distribution that was sampled from: truncate: "
           "clipped to the bounds; mask: 0 outside of them; reject: 1, and 0 outside; "
           "sequence_mask: earlier name of reject");
  v.choice("importance_level", importance_level, kImportanceLevels,
           "the weight is that of a token, its product over the sequence, or its geometric mean "
           "there; auto: token, with reject geometric");
  v.field("importance_min", importance_min,
          "lower bound; none: 0 for truncate and sequences, 0.5 for mask, 0.99 for reject",
          {.min = 0});
  v.field("importance_max", importance_max,
          "upper bound; none: 2 for truncate, 5 for mask, 1.01 for reject, 3 for both by sequence",
          {.min = 0});
  v.choice(
      "trust_region", trust_region, kTrustRegions,
      "tokens whose probability has moved too far from the sampler's have no surrogate: tv: by "
      "its change in the direction of the advantage; kl: by the KL of the token against the "
      "rest; ipo: by its change in any direction");
  v.field("trust_low", trust_low, "(tv, kl) bound where A < 0; none: 0.2", {.min = 0});
  v.field("trust_high", trust_high, "bound where A > 0, of ipo always; none: 0.2, of ipo 0.1",
          {.min = 0});
  v.field(
      "off_policy_mask", off_policy_mask,
      "sequences with A < 0 have no surrogate if the sampler's log-probs are above the policy's "
      "by more than this on average (DeepSeek-V3.2); none: all have one",
      {.min = 0});
  v.field("rejection", rejection,
          "rules by which tokens and sequences have no surrogate, such as seq_mean_k3 > 0.002: "
          "token, seq_sum, seq_mean or seq_max, of the estimates k1, k2, k3 of the sampler's "
          "mismatch");
  v.choice("covariance", covariance, kCovariances,
           "the update's tokens whose advantage and log-prob vary together most: clip: a draw of "
           "them has no surrogate (Clip-Cov); kl: |lp - lp_old| of them is a term of the loss "
           "(KL-Cov)");
  v.field("covariance_fraction", covariance_fraction,
          "(covariance) their fraction of the update's tokens; one at least",
          {.min = 1e-9, .max = 1});
  v.field("covariance_kl_coef", covariance_kl_coef, "(covariance: kl) weight of |lp - lp_old|",
          {.min = 0});
  v.field("old_kl_coef", old_kl_coef,
          "weight of the squared log ratio to the sampler, a term of the loss", {.min = 0});
}

void GrpoConfig::visit_updates(ConfigVisitor& v) {
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

ReferenceType reference_type(std::string_view reference) {
  for (const auto& [value, name] : kReferenceTypes)
    if (reference == name) return value;
  return ReferenceType::kFolder;
}

void GrpoConfig::apply_preset() {
  const PresetEntry& entry = entry_of(kPresets, preset);
  read_config(*this, parse_yaml(str("{", entry.keys, "}"), std::string(preset)));
}

kernels::PolicyLossDesc GrpoConfig::loss_desc() const {
  if (!loss.empty()) return {.beta = beta, .surrogate = kernels::Surrogate::kReinforce};
  constexpr double kOff = kernels::PolicyLossDesc::kOff;
  using kernels::Importance, kernels::ImportanceLevel;
  const ImportanceLevel level = importance_level.value_or(importance_weights == Importance::kReject
                                                              ? ImportanceLevel::kGeometric
                                                              : ImportanceLevel::kToken);
  ImportanceEntry bounds = entry_of(kImportanceModes, importance_weights);
  if (importance_weights != Importance::kTruncate && level == ImportanceLevel::kSequence)
    bounds.lowest = 0, bounds.largest = 3;
  const double bound = entry_of(kTrustRegions, trust_region).bound;
  return {.epsilon_low = epsilon,
          .epsilon_high = epsilon_high.value_or(epsilon),
          .beta = kl_in == KlPlace::kLoss ? beta : 0,
          .surrogate = surrogate,
          .level = importance_sampling_level,
          .importance = importance_weights,
          .importance_level = level,
          .importance_min = importance_min.value_or(bounds.lowest),
          .importance_max = importance_max.value_or(bounds.largest),
          .trust_region = trust_region,
          .trust_low = trust_low.value_or(bound),
          .trust_high = trust_high.value_or(bound),
          .off_policy_mask = off_policy_mask.value_or(kOff),
          .old_kl_coef = old_kl_coef,
          .dual_clip = dual_clip.value_or(kOff),
          .delta = delta.value_or(kOff),
          .tau_pos = sapo_tau_pos,
          .tau_neg = sapo_tau_neg,
          .kl = kl_estimator,
          .kl_unbiased = kl_unbiased,
          .entropy_coef = entropy_coef};
}

void GrpoConfig::validate() const {
  using kernels::Surrogate;
  const auto require_surrogate = [&](const char* key, bool given, Surrogate of) {
    if (given && surrogate != of)
      throw InputError(str(key, ": belongs to surrogate: ", entry_of(kSurrogates, of).name,
                           ", not to ", entry_of(kSurrogates, surrogate).name, "; hint: leave ",
                           key, " out"));
  };
  require_surrogate("dual_clip", dual_clip.has_value(), Surrogate::kClip);
  require_surrogate("delta", delta.has_value(), Surrogate::kClip);
  require_surrogate("sapo_tau_pos", sapo_tau_pos != GrpoConfig().sapo_tau_pos, Surrogate::kSapo);
  require_surrogate("sapo_tau_neg", sapo_tau_neg != GrpoConfig().sapo_tau_neg, Surrogate::kSapo);
  const bool has_clipped_logs = importance_sampling_level == kernels::RatioLevel::kClipped;
  if (has_clipped_logs && (surrogate != Surrogate::kClip || dual_clip || delta))
    throw InputError(
        "importance_sampling_level: clipped is surrogate: clip without dual_clip and delta, whose "
        "bounds are those of the tokens' log ratios; hint: leave them out");
  if (dual_clip && delta)
    throw InputError(
        "delta: bounds the ratio where A < 0, and so does dual_clip; hint: leave one of them out");
  if (dual_clip && *dual_clip <= 1)
    throw InputError(str("dual_clip: expected a number above 1, got ", *dual_clip));
  if (kl_target && beta == 0)
    throw InputError(
        "kl_target: adapts beta, which is 0; hint: beta=0.05, the value to start from");
  if (penalizes_rewards() && multi_objective_aggregation != RewardAggregation::kSumThenNormalize)
    throw InputError(
        "kl_in: the KL is subtracted from the sum of the rewards, which "
        "multi_objective_aggregation: normalize_then_sum does not use; hint: kl_in=loss");
  validate_reference();
  validate_corrections();
  if (penalizes_rewards() && kl_unbiased)
    throw InputError("kl_unbiased: the gradient of a KL in the loss; hint: kl_in=loss");
  if (baseline != Baseline::kGroup && dynamic_sampling_rounds > 0)
    throw InputError(
        "dynamic_sampling_rounds: replaces groups whose completions have equal rewards, which only "
        "baseline: group compares; hint: dynamic_sampling_rounds=0");
  if (baseline == Baseline::kNone && scale_rewards != AdvantageScale::kNone)
    throw InputError(
        str("scale_rewards: ", entry_of(kAdvantageScales, scale_rewards).name,
            ": there is nothing to scale by with baseline: none, whose advantage is the reward; "
            "hint: scale_rewards=none"));
  const auto needs_completions = [&](const char* key, bool given) {
    if (given && credit == Credit::kTurn)
      throw InputError(str("credit: turn has an advantage per turn, and ", key,
                           " is for one per completion; hint: credit=completion"));
  };
  needs_completions("multi_objective_aggregation: normalize_then_sum",
                    multi_objective_aggregation != RewardAggregation::kSumThenNormalize);
  needs_completions("kl_in: reward", penalizes_rewards());
  needs_completions("whiten_advantages", whiten_advantages);
  needs_completions("shuffle_advantages", shuffle_advantages);
  validate_functions();
  const double high = epsilon_high.value_or(epsilon);
  if (delta && *delta <= 1 + high)
    throw InputError(str("delta: expected a number above 1 + epsilon_high = ", 1 + high, ", got ",
                         *delta, "; hint: a larger delta, or a smaller epsilon_high"));
}

void GrpoConfig::validate_corrections() const {
  const kernels::PolicyLossDesc desc = loss_desc();
  if (desc.importance_min > 1 || desc.importance_max < 1)
    throw InputError(
        str("importance_min, importance_max: expected bounds around 1, the weight of "
            "a token drawn from the policy itself, got ",
            desc.importance_min, " and ", desc.importance_max));
  for (const std::string& rule : rejection) parse_rejection(rule);
  if (penalizes_rewards() && covariance != Covariance::kNone)
    throw InputError(
        "covariance: goes by the advantages at packing, from which kl_in: reward has yet to "
        "subtract the KL; hint: kl_in=loss, or leave covariance out");
  if (entropy_target && entropy_coef > 1)
    throw InputError(
        str("entropy_coef: with entropy_target it stays from 0 to 1, got ", entropy_coef));
}

void GrpoConfig::validate_functions() const {
  const auto needs_builtin = [](const std::string& function, const char* of, const char* key,
                                bool given) {
    if (given && !function.empty())
      throw InputError(str(key, ": belongs to the built-in ", of, ", in whose place ", of, ": ",
                           function, " is; hint: leave one of them out"));
  };
  needs_builtin(loss, "loss", "kl_estimator", kernels::is_divergence(kl_estimator));
  needs_builtin(loss, "loss", "entropy_coef", entropy_coef > 0 || entropy_target);
  needs_builtin(loss, "loss", "kl_in: reward", penalizes_rewards());
  needs_builtin(advantage, "advantage", "dynamic_sampling_rounds", dynamic_sampling_rounds > 0);
  needs_builtin(advantage, "advantage", "credit: turn", credit == Credit::kTurn);
  needs_builtin(advantage, "advantage", "whiten_advantages", whiten_advantages);
  needs_builtin(advantage, "advantage", "advantage_clip", advantage_clip.has_value());
  needs_builtin(advantage, "advantage", "shuffle_advantages", shuffle_advantages);
  needs_builtin(advantage, "advantage", "kl_in: reward", penalizes_rewards());
}

void GrpoConfig::validate_reference() const {
  const ReferenceType type = reference_type();
  if (preset == "opd" && !has_teacher())
    throw InputError("preset: opd learns from a teacher; hint: reference=FOLDER");
  if (!reference_prompt.empty()) FieldTemplate("reference_prompt", reference_prompt);
  const char* estimator = entry_of(kKlEstimators, kl_estimator).name;
  if (reference.empty())
    throw InputError("reference: expected base, start, policy or the folder of a model");
  if (kernels::is_divergence(kl_estimator) && penalizes_rewards())
    throw InputError(str("kl_in: reward subtracts an estimate of the KL at sampled tokens, and ",
                         estimator, " is none; hint: kl_in=loss, or kl_estimator=k1"));
  if (kernels::is_divergence(kl_estimator) && kl_unbiased)
    throw InputError(str("kl_unbiased: corrects the gradient of an estimate, and ", estimator,
                         " is none; hint: leave it out"));
  if (type == ReferenceType::kPolicy && beta > 0 && reference_prompt.empty())
    throw InputError(
        "reference: policy is the policy itself, whose divergence from itself is 0; hint: "
        "reference_prompt=TEMPLATE, of a prompt with more than the policy's");
  if (type == ReferenceType::kPolicy && beta > 0 && updates_per_step() > 1)
    throw InputError(
        "reference: policy is that of the step, and later updates of a step have moved away from "
        "it; hint: num_minibatches=1 and num_iterations=1, or reference=start");
  if (ref_sync_every > 0 && type >= ReferenceType::kPolicy)
    throw InputError(
        str("ref_sync_every: moves the start of a stage towards the policy, and reference is ",
            reference, "; hint: leave it out, or reference=start"));
}

std::vector<std::string> GrpoConfig::advice() const {
  using enum AdvantageScale;
  std::vector<std::string> out;
  const auto warn_if = [&](bool applies, const std::string& warning) {
    if (applies) out.push_back(warning);
  };
  const AdvantageScale scale = scale_rewards;
  warn_if(surrogate == kernels::Surrogate::kReinforce && updates_per_step() > 1 &&
              importance_weights == kernels::Importance::kNone,
          "surrogate: reinforce ignores the ratio, so that the later updates of a step are biased; "
          "hint: importance_weights=truncate, or num_minibatches=1 and num_iterations=1");
  warn_if(surrogate == kernels::Surrogate::kVespo &&
              importance_sampling_level == kernels::RatioLevel::kSequence,
          "importance_sampling_level: does nothing with surrogate: vespo, whose ratio is the "
          "product over the sequence; hint: leave it out");
  const bool sums = multi_objective_aggregation == RewardAggregation::kSumThenNormalize;
  warn_if(whiten_advantages && (!sums || scale == kGroup || scale == kBatch),
          "whiten_advantages: scales advantages that are scaled by a deviation already; hint: "
          "scale_rewards=none and multi_objective_aggregation=sum_then_normalize, or leave it out");
  warn_if(penalizes_rewards() && (scale == kGroup || scale == kMaxRl),
          "kl_in: reward: groups with equal rewards differ in their KL only, which scale_rewards "
          "brings to full scale; hint: scale_rewards=none or leave_one_out");
  return out;
}

std::vector<std::string> GrpoConfig::unused_keys(bool rewarded) const {
  std::vector<std::string> out;
  GrpoConfig defaults{.preset = preset};
  defaults.apply_preset();
  const ConfigFields own = config_fields(*this), usual = config_fields(defaults);
  const auto warn = [&](const std::string& why, std::string_view keys) {
    for (size_t i = 0; i < own.size(); ++i)
      if (own[i] != usual[i] && has_word(keys, own[i].first))
        out.push_back(str(own[i].first, ": does nothing ", why, "; hint: leave it out"));
  };
  constexpr const char* kOfLoss =
      "surrogate importance_sampling_level epsilon epsilon_high dual_clip delta sapo_tau_pos "
      "sapo_tau_neg kl_estimator kl_unbiased importance_weights importance_level importance_min "
      "importance_max trust_region trust_low trust_high off_policy_mask covariance_kl_coef "
      "old_kl_coef";
  constexpr const char* kOfAdvantages = "scale_rewards baseline multi_objective_aggregation";
  constexpr const char* kOfRewards =
      "surrogate epsilon epsilon_high whiten_advantages advantage_clip top_entropy_quantile "
      "shuffle_advantages covariance";
  if (!loss.empty()) warn(str("with loss: ", loss), kOfLoss);
  if (!advantage.empty()) warn(str("with advantage: ", advantage), kOfAdvantages);
  if (!rewarded && advantage.empty()) {
    warn("without rewards", kOfAdvantages);
    warn("without rewards", kOfRewards);
  }
  return out;
}

std::vector<std::string> GrpoConfig::kl_warnings(const GrpoConfig& with_preset) const {
  using kernels::KlEstimator;
  std::vector<std::string> out;
  const auto warn_if = [&](bool applies, const std::string& warning) {
    if (applies) out.push_back(warning);
  };
  const auto given = [&](auto GrpoConfig::*key) {
    return this->*key != GrpoConfig().*key && this->*key != with_preset.*key;
  };
  const auto without_kl = [&](const char* key, bool given) {
    warn_if(given && beta == 0,
            str(key, ": does nothing with beta: 0; hint: beta=0.01, or leave it out"));
  };
  without_kl("reference", given(&GrpoConfig::reference));
  without_kl("kl_estimator", given(&GrpoConfig::kl_estimator));
  without_kl("kl_unbiased", kl_unbiased);
  without_kl("reference_prompt", !reference_prompt.empty());
  warn_if(kl_estimator != KlEstimator::kJsd && jsd_weight != GrpoConfig().jsd_weight,
          "jsd_weight: belongs to kl_estimator: jsd; hint: leave it out");
  warn_if(!kernels::is_divergence(kl_estimator) && kl_top_k > 0,
          "kl_top_k: does nothing with an estimate of the KL; hint: kl_estimator=reverse, or leave "
          "it out");
  without_kl("ref_sync_every", ref_sync_every > 0);
  warn_if(ref_sync_every == 0 && ref_sync_alpha != GrpoConfig().ref_sync_alpha,
          "ref_sync_alpha: does nothing with ref_sync_every: 0; hint: ref_sync_every=512, or leave "
          "it out");
  warn_if(!kl_target && kl_horizon != GrpoConfig().kl_horizon,
          "kl_horizon: does nothing without kl_target; hint: kl_target=0.01, or leave it out");
  without_kl("kl_in", given(&GrpoConfig::kl_in));
  warn_if(penalizes_rewards() && kl_estimator != KlEstimator::kK1,
          "kl_estimator: in the reward, only k1 has the gradient of the KL as its mean; hint: "
          "kl_estimator=k1");
  warn_if(beta > 0 && kl_in == KlPlace::kLoss && kl_estimator == KlEstimator::kK1 && !kl_unbiased,
          "kl_estimator: the gradient of k1 in the loss has mean 0, so that beta adds noise only; "
          "hint: kl_unbiased=true, or kl_estimator=k2");
  return out;
}

std::vector<std::string> GrpoConfig::warnings(bool restricted, bool rewarded) const {
  std::vector<std::string> out = unused_keys(rewarded);
  if (!out.empty()) return out;
  const auto warn_if = [&](bool applies, const std::string& warning) {
    if (applies) out.push_back(warning);
  };
  warn_if(preset != "none" && !uses_preset(*this),
          "preset: does nothing, as all keys that it sets are given; hint: leave them out; a run's "
          "config.yaml has them all");
  GrpoConfig with_preset{.preset = preset};  // what it sets is no mistake
  with_preset.apply_preset();
  const auto given = [&](auto GrpoConfig::*key) {
    return this->*key != GrpoConfig().*key && this->*key != with_preset.*key;
  };
  for (const std::string& warning : kl_warnings(with_preset)) out.push_back(warning);
  const bool clips = entry_of(kSurrogates, surrogate).clips;
  warn_if(given(&GrpoConfig::epsilon_high) && !clips,
          str("epsilon_high: does nothing with surrogate: ", entry_of(kSurrogates, surrogate).name,
              ", which clips no ratio; hint: leave it out"));
  const auto needs_updates = [&](const char* key, bool given) {
    warn_if(given && updates_per_step() == 1,
            str(key,
                ": does nothing with one update a step, whose ratio is exactly 1; hint: "
                "num_minibatches or num_iterations above 1, or leave it out"));
  };
  needs_updates("epsilon_high", given(&GrpoConfig::epsilon_high) && clips);
  needs_updates("dual_clip", dual_clip.has_value());
  needs_updates("delta", delta.has_value());
  needs_updates("surrogate", given(&GrpoConfig::surrogate));
  needs_updates("importance_sampling_level", given(&GrpoConfig::importance_sampling_level));
  needs_updates("trust_region", !restricted && given(&GrpoConfig::trust_region));
  needs_updates("off_policy_mask", !restricted && off_policy_mask);
  warn_if(!rejection.empty() && !restricted,
          "rejection: does nothing without top_k, top_p, min_p, penalties or logit_bias: the "
          "sampler's log-probs are the policy's; hint: leave it out");
  needs_updates("covariance: kl", given(&GrpoConfig::covariance) && covariance == Covariance::kKl);
  warn_if(
      covariance == Covariance::kNone && covariance_fraction != GrpoConfig().covariance_fraction,
      "covariance_fraction: does nothing with covariance: none; hint: covariance=clip");
  warn_if(covariance != Covariance::kKl && covariance_kl_coef != GrpoConfig().covariance_kl_coef,
          "covariance_kl_coef: belongs to covariance: kl; hint: leave it out");
  needs_updates("old_kl_coef", !restricted && given(&GrpoConfig::old_kl_coef));
  warn_if(importance_weights == kernels::Importance::kNone &&
              (importance_level || importance_min || importance_max),
          "importance_level, importance_min, importance_max: do nothing with importance_weights: "
          "none; hint: importance_weights=truncate, or leave them out");
  warn_if(trust_region == kernels::TrustRegion::kNone && (trust_low || trust_high),
          "trust_low, trust_high: do nothing with trust_region: none; hint: trust_region=tv");
  return out;
}

}  // namespace cohort
