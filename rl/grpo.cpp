// Advantages, packing of one optimiser update into micro batches, and the loss of one of them.
// Group statistics are computed over the sorted rewards, so that permuting the samples of a group
// permutes the advantages exactly. Each token has its final weight, one over the denominator of the
// whole update, so that the losses and gradients of micro batches and ranks add up.
#include "rl/grpo.h"

#include <algorithm>
#include <cmath>

#include "data/parallel_try.h"

namespace cohort {

namespace {

double scale_factor(AdvantageScale scale, const GroupStatistics& group) {
  for (const AdvantageScaleEntry& entry : kAdvantageScales)
    if (entry.value == scale) return entry.factor(group);
  throw Error("[advantage] expected a scale of kAdvantageScales");
}

// The rewards that are not NaN, sorted.
std::vector<double> valid_rewards(std::span<const double> rewards) {
  std::vector<double> valid;
  std::copy_if(rewards.begin(), rewards.end(), std::back_inserter(valid),
               [](double r) { return !std::isnan(r); });
  std::sort(valid.begin(), valid.end());
  return valid;
}

double mean_of(const std::vector<double>& values) {
  double mean = 0;
  for (const double v : values) mean += v / static_cast<double>(values.size());
  return mean;
}

// Statistics of sorted values without NaN. size: the largest of their absolute values.
struct Statistics {
  double size = 0, mean = 0, std = 0;
  explicit Statistics(const std::vector<double>& values) {
    if (values.empty()) return;
    size = std::max(std::abs(values.front()), std::abs(values.back()));
    mean = without_rounding(mean_of(values), size);
    // The mean of equal values may differ from them by rounding, which a scale would amplify.
    if (equal_rewards(values.front(), values.back())) return;
    double squares = 0;
    for (const double v : values) squares += (v - mean) * (v - mean);
    std = std::sqrt(squares / static_cast<double>(values.size() - 1));
  }
  double centred(double value) const { return without_rounding(value - mean, size); }
};

void group_advantages(std::span<double> out, std::span<const double> rewards, AdvantageScale scale,
                      double batch_std) {
  const std::vector<double> valid = valid_rewards(rewards);
  const Statistics group(valid);
  if (group.std == 0) return;
  const double factor = scale_factor(scale, {.n = static_cast<double>(valid.size()),
                                             .mean = group.mean,
                                             .std = group.std,
                                             .batch_std = batch_std});
  for (size_t i = 0; i < rewards.size(); ++i)
    if (!std::isnan(rewards[i])) out[i] = group.centred(rewards[i]) * factor;
}

// The bounds of importance weights by default: TRL's and verl's cap, IcePop's, SkyRL's.
std::pair<double, double> default_importance_bounds(kernels::Importance mode) {
  switch (mode) {
    case kernels::Importance::kMask:
      return {0.5, 5};
    case kernels::Importance::kSequenceMask:
      return {0.99, 1.01};
    default:
      return {0, 2};
  }
}

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

std::string surrogate_name(kernels::Surrogate surrogate) {
  for (const auto& [value, name] : kSurrogates)
    if (value == surrogate) return name;
  throw Error("[surrogate] expected one of kSurrogates");
}

}  // namespace

bool equal_rewards(double a, double b) {
  constexpr double kRelative = 1e-9, kAbsolute = 0x1p-48;
  return std::abs(a - b) <= std::max(kAbsolute, kRelative * std::max(std::abs(a), std::abs(b)));
}

double without_rounding(double sum, double size) {
  constexpr double kRounding = 1e-12;
  return std::abs(sum) < kRounding * size ? 0 : sum;
}

double weighted_sum(std::span<const double> weights, std::span<const double> values) {
  double sum = 0, size = 0;
  bool any = false;
  for (size_t k = 0; k < weights.size(); ++k) {
    if (std::isnan(values[k])) continue;
    const double term = weights[k] * values[k];
    sum += term;
    size += std::abs(term);
    any = true;
  }
  return any ? without_rounding(sum, size) : std::nan("");
}

void GrpoConfig::apply_preset() {
  for (const PresetEntry& entry : kPresets)
    if (entry.value == preset)
      read_config(*this, parse_yaml(str("{", entry.keys, "}"), entry.name));
}

kernels::PolicyLossDesc GrpoConfig::loss_desc() const {
  constexpr double kOff = kernels::PolicyLossDesc::kOff;
  const auto [lowest, largest] = default_importance_bounds(importance_weights);
  return {.epsilon_low = epsilon,
          .epsilon_high = epsilon_high.value_or(epsilon),
          .beta = kl_in == KlPlace::kLoss ? beta : 0,
          .surrogate = surrogate,
          .level = importance_sampling_level,
          .importance = importance_weights,
          .importance_min = importance_min.value_or(lowest),
          .importance_max = importance_max.value_or(largest),
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
      throw InputError(str(key, ": belongs to surrogate: ", surrogate_name(of), ", not to ",
                           surrogate_name(surrogate), "; hint: leave ", key, " out"));
  };
  require_surrogate("dual_clip", dual_clip.has_value(), Surrogate::kClip);
  require_surrogate("delta", delta.has_value(), Surrogate::kClip);
  require_surrogate("sapo_tau_pos", sapo_tau_pos != GrpoConfig().sapo_tau_pos, Surrogate::kSapo);
  require_surrogate("sapo_tau_neg", sapo_tau_neg != GrpoConfig().sapo_tau_neg, Surrogate::kSapo);
  if (dual_clip && delta)
    throw InputError(
        "delta: bounds the ratio where A < 0, and so does dual_clip; hint: leave one of them out");
  if (dual_clip && *dual_clip <= 1)
    throw InputError(str("dual_clip: expected a number above 1, got ", *dual_clip));
  const kernels::PolicyLossDesc desc = loss_desc();
  if (desc.importance_min > 1 || desc.importance_max < 1)
    throw InputError(
        str("importance_min, importance_max: expected bounds around 1, the weight of "
            "a token drawn from the policy itself, got ",
            desc.importance_min, " and ", desc.importance_max));
  if (kl_target && beta == 0)
    throw InputError(
        "kl_target: adapts beta, which is 0; hint: beta=0.05, the value to start from");
  if (penalizes_rewards() && multi_objective_aggregation != RewardAggregation::kSumThenNormalize)
    throw InputError(
        "kl_in: the KL is subtracted from the sum of the rewards, which "
        "multi_objective_aggregation: normalize_then_sum does not use; hint: kl_in=loss");
  if (penalizes_rewards() && kl_unbiased)
    throw InputError("kl_unbiased: the gradient of a KL in the loss; hint: kl_in=loss");
  const double high = epsilon_high.value_or(epsilon);
  if (delta && *delta <= 1 + high)
    throw InputError(str("delta: expected a number above 1 + epsilon_high = ", 1 + high, ", got ",
                         *delta, "; hint: a larger delta, or a smaller epsilon_high"));
}

std::vector<std::string> GrpoConfig::warnings() const {
  using kernels::Surrogate, kernels::KlEstimator;
  std::vector<std::string> out;
  if (preset != Preset::kNone && !uses_preset(*this))
    out.push_back(
        "preset: does nothing, as all keys that it sets are given; hint: leave them out; a run's "
        "config.yaml has them all");
  GrpoConfig with_preset{.preset = preset};  // what it sets is no mistake
  with_preset.apply_preset();
  const auto given = [&](auto GrpoConfig::*key) {
    return this->*key != GrpoConfig().*key && this->*key != with_preset.*key;
  };
  const auto without_kl = [&](const char* key, bool given) {
    if (given && beta == 0)
      out.push_back(str(key, ": does nothing with beta: 0; hint: beta=0.01, or leave it out"));
  };
  without_kl("reference", given(&GrpoConfig::reference));
  without_kl("kl_estimator", given(&GrpoConfig::kl_estimator));
  without_kl("kl_unbiased", kl_unbiased);
  without_kl("ref_sync_every", ref_sync_every > 0);
  if (ref_sync_every == 0 && ref_sync_alpha != GrpoConfig().ref_sync_alpha)
    out.push_back(
        "ref_sync_alpha: does nothing with ref_sync_every: 0; hint: ref_sync_every=512, or leave "
        "it out");
  if (!kl_target && kl_horizon != GrpoConfig().kl_horizon)
    out.push_back(
        "kl_horizon: does nothing without kl_target; hint: kl_target=0.01, or leave it out");
  without_kl("kl_in", given(&GrpoConfig::kl_in));
  if (penalizes_rewards() && kl_estimator != KlEstimator::kK1)
    out.push_back(
        "kl_estimator: in the reward, only k1 has the gradient of the KL as its mean; hint: "
        "kl_estimator=k1");
  if (beta > 0 && kl_in == KlPlace::kLoss && kl_estimator == KlEstimator::kK1 && !kl_unbiased)
    out.push_back(
        "kl_estimator: the gradient of k1 in the loss has mean 0, so that beta adds noise only; "
        "hint: kl_unbiased=true, or kl_estimator=k2");
  const bool clips = surrogate == Surrogate::kClip || surrogate == Surrogate::kCispo;
  if (given(&GrpoConfig::epsilon_high) && !clips)
    out.push_back(str("epsilon_high: does nothing with surrogate: ", surrogate_name(surrogate),
                      ", which clips no ratio; hint: leave it out"));
  const auto needs_updates = [&](const char* key, bool given) {
    if (given && updates_per_step() == 1)
      out.push_back(str(key,
                        ": does nothing with one update a step, whose ratio is exactly 1; hint: "
                        "num_minibatches or num_iterations above 1, or leave it out"));
  };
  needs_updates("epsilon_high", given(&GrpoConfig::epsilon_high) && clips);
  needs_updates("dual_clip", dual_clip.has_value());
  needs_updates("delta", delta.has_value());
  needs_updates("surrogate", given(&GrpoConfig::surrogate));
  needs_updates("importance_sampling_level", given(&GrpoConfig::importance_sampling_level));
  if (importance_weights == kernels::Importance::kNone && (importance_min || importance_max))
    out.push_back(
        "importance_min, importance_max: do nothing with importance_weights: none; hint: "
        "importance_weights=truncate, or leave them out");
  return out;
}

std::vector<double> group_advantages(std::span<const double> rewards, int64_t group_size,
                                     AdvantageScale scale, double batch_std) {
  const auto count = static_cast<int64_t>(rewards.size());
  COHORT_CHECK(group_size > 0 && count % group_size == 0, "[advantage] expected groups of ",
               group_size, ", got ", count, " values");
  const auto size = static_cast<size_t>(group_size);
  std::vector<double> advantages(rewards.size(), 0.0);
  for (size_t begin = 0; begin < rewards.size(); begin += size)
    group_advantages(std::span(advantages).subspan(begin, size), rewards.subspan(begin, size),
                     scale, batch_std);
  return advantages;
}

void whiten_advantages(std::span<double> advantages, std::span<const double> tokens) {
  double count = 0, mean = 0, squares = 0;
  std::vector<double> counted;
  for (size_t i = 0; i < advantages.size(); ++i)
    if (tokens[i] > 0) {
      count += tokens[i];
      counted.push_back(advantages[i]);
    }
  std::sort(counted.begin(), counted.end());
  const Statistics samples(counted);
  if (count < 2 || samples.std == 0) return;
  for (size_t i = 0; i < advantages.size(); ++i) mean += tokens[i] / count * advantages[i];
  mean = without_rounding(mean, samples.size);
  for (size_t i = 0; i < advantages.size(); ++i)
    squares += tokens[i] * (advantages[i] - mean) * (advantages[i] - mean);
  for (size_t i = 0; i < advantages.size(); ++i)
    if (tokens[i] > 0)
      advantages[i] = without_rounding(advantages[i] - mean, samples.size) /
                      std::sqrt(squares / (count - 1) + 1e-8);
}

void standardize(std::span<double> advantages, const std::vector<bool>& has_reward) {
  std::vector<double> values(advantages.begin(), advantages.end());
  for (size_t i = 0; i < values.size(); ++i)
    if (!has_reward[i]) values[i] = std::nan("");
  const Statistics step(valid_rewards(values));
  for (size_t i = 0; i < advantages.size(); ++i)
    advantages[i] =
        has_reward[i] && step.std > 0 ? step.centred(advantages[i]) / (step.std + 1e-4) : 0;
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return -HUGE_VAL;
  const double place = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<ptrdiff_t>(place);
  std::nth_element(values.begin(), values.begin() + below, values.end());
  const double low = values[static_cast<size_t>(below)];
  if (place == static_cast<double>(below)) return low;
  const double high = *std::min_element(values.begin() + below + 1, values.end());
  return low + (place - static_cast<double>(below)) * (high - low);
}

double reward_std(std::span<const double> rewards) {
  return Statistics(valid_rewards(rewards)).std;
}

PolicySequence policy_sequence(const Trajectory& t, double advantage) {
  COHORT_CHECK(t.prompt_length >= 1 && t.completion_length() >= 1,
               "[policy_sequence] expected a prompt and a completion in sequence ", t.index,
               ", got ", t.prompt_length, " and ", t.completion_length(), " tokens");
  COHORT_CHECK(t.logprobs.size() == t.tokens.size(), "[policy_sequence] sequence ", t.index,
               " has ", t.tokens.size(), " tokens and ", t.logprobs.size(), " log-probs");
  return {{.tokens = t.tokens, .loss_mask = t.loss_mask, .index = t.index}, t.logprobs, advantage};
}

StepTotals count_totals(std::span<const PolicySequence> sequences) {
  StepTotals totals{.sequences = static_cast<double>(sequences.size())};
  for (const PolicySequence& s : sequences) totals.tokens += static_cast<double>(s.num_targets());
  return totals;
}

double token_weight(LossType type, const StepTotals& totals, int64_t length,
                    int64_t max_completion_length) {
  // All totals are 0 if every token is masked.
  const LossSizes sizes = {
      .sequences = std::max(totals.sequences, 1.0),
      .tokens = std::max(totals.tokens, 1.0),
      .length = static_cast<double>(std::max<int64_t>(length, 1)),
      .max_completion_length = static_cast<double>(std::max<int64_t>(max_completion_length, 1))};
  for (const LossTypeEntry& entry : kLossTypes)
    if (entry.value == type) return 1 / entry.denominator(sizes);
  throw Error("[token_weight] expected a loss type of kLossTypes");
}

Minibatch pack_policy(std::vector<PolicySequence> sequences, const PackPolicyDesc& desc) {
  std::vector<TokenSequence> tokens;
  for (PolicySequence& s : sequences) tokens.push_back(static_cast<TokenSequence&&>(s));
  const std::vector<size_t> begins = split_micro_batches(tokens, desc.micro_batch_tokens);
  Minibatch out(begins.size() - 1);
  parallel_try(static_cast<int64_t>(out.size()), 1, [&](int64_t i) {
    const auto b = static_cast<size_t>(i);
    const size_t begin = begins[b], end = begins[b + 1];
    std::vector<double> old_logprob, ref_logprob, sampling_logprob, advantage, weight;
    for (size_t s = begin; s < end; ++s) {
      const TokenSequence& sequence = tokens[s];
      const PolicySequence& policy = sequences[s];
      for (size_t t = 1; t < sequence.tokens.size(); ++t) {
        if (!sequence.loss_mask[t]) continue;
        old_logprob.push_back(policy.old_logprob[t]);
        if (!policy.ref_logprob.empty()) ref_logprob.push_back(policy.ref_logprob[t]);
        if (!policy.sampling_logprob.empty())
          sampling_logprob.push_back(policy.sampling_logprob[t]);
        const bool silent = !policy.surrogate_mask.empty() && !policy.surrogate_mask[t];
        advantage.push_back(silent ? 0 : policy.advantage);
      }
      weight.resize(old_logprob.size(),
                    token_weight(desc.loss_type, desc.totals, sequence.num_targets(),
                                 desc.max_completion_length));
    }
    const auto column = [&](const std::vector<double>& values) {
      return Tensor::from(values).to(desc.dtype);
    };
    const auto optional = [&](const std::vector<double>& values) {
      return values.empty() ? Tensor() : column(values);
    };
    out[b] = {pack(std::span(tokens).subspan(begin, end - begin)),
              column(old_logprob),
              column(advantage),
              column(weight),
              optional(ref_logprob),
              optional(sampling_logprob)};
  });
  return out;
}

void unpack_log_probs(std::span<const PolicyBatch> batches, std::span<PolicySequence> sequences) {
  if (batches.empty()) return;
  const bool has_reference = std::all_of(
      batches.begin(), batches.end(), [](const PolicyBatch& b) { return b.ref_logprob.defined(); });
  std::vector<double> old_values, ref_values;
  const auto append = [](std::vector<double>& all, const Tensor& column) {
    const std::vector<double> values = column.to_vector<double>();
    all.insert(all.end(), values.begin(), values.end());
  };
  for (const PolicyBatch& batch : batches) {
    append(old_values, batch.old_logprob);
    if (has_reference) append(ref_values, batch.ref_logprob);
  }
  size_t at = 0;
  for (PolicySequence& s : sequences) {
    s.ref_logprob.resize(has_reference ? s.tokens.size() : 0);
    for (size_t t = 1; t < s.tokens.size(); ++t) {
      if (!s.loss_mask[t]) continue;
      s.old_logprob[t] = old_values.at(at);
      if (has_reference) s.ref_logprob[t] = ref_values.at(at);
      ++at;
    }
  }
}

PolicyBatch to_device(const PolicyBatch& batch, const Transformer& model) {
  const Device device = model.device();
  return {model.to_device(batch),  batch.old_logprob.to(device), batch.advantage.to(device),
          batch.weight.to(device), batch.ref_logprob.to(device), batch.sampling_logprob.to(device)};
}

TokenLogProbs policy_log_probs(const Transformer& model, const PackedBatch& batch,
                               double temperature, Adapters adapters) {
  return token_log_probs(
      model.hidden_at_targets(batch, {.mode = Mode::kEval, .adapters = adapters}), model.head(),
      batch.targets, {.temperature = temperature});
}

HeadLoss grpo_loss(const Variable& hidden, const Variable& head, const PolicyBatch& batch,
                   const GrpoConfig& config, double temperature, bool on_policy) {
  return policy_loss(hidden, head, batch.targets,
                     {.old_logprob = batch.old_logprob,
                      .ref_logprob = batch.ref_logprob,
                      .advantage = batch.advantage,
                      .weight = batch.weight,
                      .sampling_logprob = batch.sampling_logprob,
                      .segments = batch.segments,
                      .on_policy = on_policy},
                     config.loss_desc(), {.temperature = temperature});
}

}  // namespace cohort
