// The whole path of one optimiser update on a tiny transformer in f64: packing, forward, head,
// loss, backward.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "autograd/gradcheck.h"
#include "core/parallel.h"
#include "core/trace.h"
#include "tests/rl/tiny_policy.h"

namespace cohort {
namespace {

using namespace test;

// Shifts the recorded log-probs, so that the ratios are about exp(-shift): 0.61, 0.74, 1, 1.16 and
// 1.57, on both sides of the clip range with epsilon 0.2 and away from its edges.
void shift_logprobs(std::vector<Trajectory>& completions) {
  constexpr double kShifts[] = {0.5, 0.3, 0, -0.15, -0.45};
  size_t i = 0;
  for (Trajectory& c : completions)
    for (size_t t = 0; t < c.tokens.size(); ++t)
      if (c.loss_mask[t] != 0) c.logprobs[t] += kShifts[i++ % 5];
}

// The loss of a token at a ratio from its definition.
double naive_surrogate(const GrpoConfig& config, double lp, double ratio, double a) {
  const double clipped = std::min(std::max(ratio, 1 - config.epsilon),
                                  1 + config.epsilon_high.value_or(config.epsilon));
  const double tau = a > 0 ? config.sapo_tau_pos : config.sapo_tau_neg;
  if (config.importance_sampling_level == kernels::RatioLevel::kClipped) return -a * ratio;
  switch (config.surrogate) {
    case kernels::Surrogate::kCispo:
      return -clipped * a * lp;
    case kernels::Surrogate::kReinforce:
      return -a * lp;
    case kernels::Surrogate::kSapo:
      return -a * 4 / tau / (1 + std::exp(-tau * (ratio - 1)));
    case kernels::Surrogate::kVespo:
      return a > 0 ? -a * std::pow(ratio, 2) * std::exp(3 * (1 - ratio)) * lp
                   : -a * std::pow(ratio, 3) * std::exp(2 * (1 - ratio)) * lp;
    case kernels::Surrogate::kClip:
      break;
  }
  const double bounded = config.delta ? std::min(ratio, *config.delta) : ratio;
  const double loss = -std::min(bounded * a, clipped * a);
  return config.dual_clip && a < 0 ? std::min(loss, -*config.dual_clip * a) : loss;
}

double naive_kl(kernels::KlEstimator estimator, double x) {
  switch (estimator) {
    case kernels::KlEstimator::kK1:
      return -x;
    case kernels::KlEstimator::kK2:
      return x * x / 2;
    default:
      break;
  }
  return std::exp(x) - x - 1;
}

// The factors exp(mean of lp - lp_old) of each completion, by which GSPO replaces the ratios; GMPO,
// of the clipped log ratios.
double geometric_ratio(const std::vector<double>& lp, const Trajectory& c, double low = HUGE_VAL,
                       double high = HUGE_VAL) {
  double sum = 0;
  for (size_t t = 0; t < lp.size(); ++t)
    if (c.loss_mask[t]) sum += std::min(std::max(lp[t] - c.logprobs[t], -low), high);
  return std::exp(sum / static_cast<double>(c.completion_length()));
}

// Loss of an update from its definition, completion by completion.
double naive_loss(const Transformer& model, const Transformer* reference,
                  const std::vector<Trajectory>& completions, const std::vector<double>& advantages,
                  Truncated truncated, LossType type, const GrpoConfig& config) {
  double numerator = 0, tokens = 0, count = 0;
  for (size_t i = 0; i < completions.size(); ++i) {
    const Trajectory& c = completions[i];
    count += 1;
    if (truncated == Truncated::kMask && c.truncated()) continue;
    const auto lp = completion_logprobs(model, c);
    const auto ref = reference ? completion_logprobs(*reference, c) : lp;
    double sum = 0;
    for (size_t t = 0; t < lp.size(); ++t) {
      if (c.loss_mask[t] == 0) continue;
      double ratio = std::exp(lp[t] - c.logprobs[t]);
      if (config.surrogate == kernels::Surrogate::kVespo)
        ratio = std::pow(geometric_ratio(lp, c), static_cast<double>(c.completion_length()));
      else if (config.importance_sampling_level == kernels::RatioLevel::kSequence)
        ratio = geometric_ratio(lp, c);
      else if (config.importance_sampling_level == kernels::RatioLevel::kClipped)
        ratio = geometric_ratio(lp, c, advantages[i] < 0 ? config.epsilon : HUGE_VAL,
                                advantages[i] > 0 ? config.epsilon : HUGE_VAL);
      sum += config.beta * naive_kl(config.kl_estimator, ref[t] - lp[t]) +
             naive_surrogate(config, lp[t], ratio, advantages[i]);
    }
    const auto length = static_cast<double>(c.completion_length());
    numerator += type == LossType::kGrpo ? sum / length : sum;
    tokens += length;
  }
  if (type == LossType::kGrpo || type == LossType::kSequenceSum) return numerator / count;
  return numerator / (type == LossType::kDrGrpo ? count * kMaxCompletion : tokens);
}

double gradient_error(const UpdateResult& a, const UpdateResult& b) {
  double worst = 0;
  for (size_t i = 0; i < a.gradients.size(); ++i)
    worst = std::max(worst, relative_error(a.gradients[i], b.gradients[i]));
  return worst;
}

class GrpoUpdate : public testing::Test {
 protected:
  GrpoUpdate() : model_(tiny_model(), DType::kF64, 1), reference_(tiny_model(), DType::kF64, 2) {
    completions_ = random_completions(12, 3);
    record_logprobs(model_, completions_);
    advantages_ = random_advantages(completions_.size(), 4);
  }
  Minibatch minibatch(LossType type, Truncated truncated, int64_t micro_batch_tokens) const {
    const auto sequences = sequences_of(completions_, advantages_, truncated);
    Minibatch batches = pack_policy(sequences, pack_desc(type, sequences, micro_batch_tokens));
    for (PolicyBatch& batch : batches) add_reference(batch, reference_);
    return batches;
  }

  void expect_finite_differences(const GrpoConfig& config);

  Transformer model_, reference_;
  std::vector<Trajectory> completions_;
  std::vector<double> advantages_;
};

TEST_F(GrpoUpdate, LossEqualsItsDefinition) {
  shift_logprobs(completions_);
  GrpoConfig config;
  config.epsilon_high = 0.28;
  config.beta = 0.1;
  for (const Truncated truncated : {Truncated::kKeep, Truncated::kMask})
    for (const auto& [type, name, denominator] : kLossTypes) {
      const double naive =
          naive_loss(model_, &reference_, completions_, advantages_, truncated, type, config);
      const double loss = run_update(model_, minibatch(type, truncated, 1000), config).loss;
      EXPECT_NEAR(loss, naive, 1e-12 * std::max(1.0, std::abs(naive)));
    }
}

TEST_F(GrpoUpdate, EverySurrogateAndEstimateEqualsItsDefinition) {
  shift_logprobs(completions_);
  const Minibatch batches = minibatch(LossType::kDapo, Truncated::kKeep, 40);
  const auto expect_definition = [&](const GrpoConfig& config) {
    config.validate();
    const double naive = naive_loss(model_, &reference_, completions_, advantages_,
                                    Truncated::kKeep, LossType::kDapo, config);
    EXPECT_NEAR(run_update(model_, batches, config).loss, naive,
                1e-12 * std::max(1.0, std::abs(naive)));
  };
  for (const auto& [surrogate, surrogate_name, surrogate_clips] : kSurrogates)
    for (const auto& [level, level_name] : kRatioLevels)
      for (const auto& [estimator, estimator_name] : kKlEstimators) {
        if (kernels::is_divergence(estimator) ||
            (level == kernels::RatioLevel::kClipped && surrogate != kernels::Surrogate::kClip))
          continue;
        SCOPED_TRACE(str(surrogate_name, " of a ", level_name, " with ", estimator_name));
        expect_definition({.surrogate = surrogate,
                           .importance_sampling_level = level,
                           .beta = 0.1,
                           .kl_estimator = estimator});
      }
  expect_definition({.dual_clip = 1.1});
  expect_definition({.delta = 1.3});
}

// At ratio 1 all surrogates have the gradients of the clip, to the bit.
TEST_F(GrpoUpdate, FirstUpdateIsTheSameUnderEverySurrogate) {
  const Minibatch batches = minibatch(LossType::kDapo, Truncated::kKeep, 40);
  const UpdateResult clip = run_update(model_, batches, {});
  for (const auto& [surrogate, name, clips] : kSurrogates)
    for (const auto& [level, level_name] : kRatioLevels)
      for (const auto& [importance, importance_name, lowest, largest] : kImportanceModes)
        for (const bool on_policy : {false, true}) {
          SCOPED_TRACE(str(name, ", ", level_name, ", ", importance_name, ", ", on_policy));
          const GrpoConfig config{.surrogate = surrogate,
                                  .importance_sampling_level = level,
                                  .importance_weights = importance};
          const UpdateResult result = run_update(model_, batches, config, on_policy);
          for (const double d : result.max_ratio_deviations) EXPECT_EQ(d, 0);
          for (size_t i = 0; i < clip.gradients.size(); ++i)
            EXPECT_TRUE(bit_equal(result.gradients[i], clip.gradients[i]));
        }
}

// The first update with ratios of sequences needs no second pass over the logits; a mask of
// sequences never does.
TEST_F(GrpoUpdate, LogProbsAreComputedTwiceForRatiosOfSequencesOnly) {
  const GrpoConfig ratios{.importance_sampling_level = kernels::RatioLevel::kSequence},
      mask{.importance_weights = kernels::Importance::kReject};
  const PolicyBatch batch = minibatch(LossType::kGrpo, Truncated::kKeep, 1000).at(0);
  const Variable hidden = model_.hidden_at_targets(batch);
  const auto passes = [&](const GrpoConfig& config, bool on_policy) {
    Trace trace(Device{});
    grpo_loss(hidden, model_.head(), batch, config, 1, on_policy);
    const std::vector<TraceEvent> events = trace.finish();
    return std::count_if(events.begin(), events.end(),
                         [](const TraceEvent& e) { return e.name == "head_logprob_forward"; });
  };
  EXPECT_EQ(passes(ratios, false), 2);
  EXPECT_EQ(passes(ratios, true), 1);
  EXPECT_EQ(passes(mask, false), 1);
  GrpoConfig reinforce = mask;
  reinforce.surrogate = kernels::Surrogate::kReinforce;
  EXPECT_EQ(passes(reinforce, false), 1);
  reinforce.importance_weights = kernels::Importance::kTruncate;
  reinforce.importance_level = kernels::ImportanceLevel::kSequence;
  EXPECT_EQ(passes(reinforce, false), 2);
}

TEST_F(GrpoUpdate, RatioIsExactlyOneOnTheSamplersOwnLogProbs) {
  // The log-probs come from forwards of single sequences: they do not depend on the batch.
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    Transformer model(tiny_model(), dtype, 1);
    auto completions = completions_;
    record_logprobs(model, completions);
    const auto sequences = sequences_of(completions, advantages_);
    for (const int64_t tokens : {1, 17, 1000}) {
      PackPolicyDesc desc = pack_desc(LossType::kDapo, sequences, tokens);
      desc.dtype = dtype;
      for (const double d :
           run_update(model, pack_policy(sequences, desc), {}).max_ratio_deviations)
        EXPECT_EQ(d, 0.0) << dtype_name(dtype) << ", micro batches of " << tokens;
    }
  }
}

TEST_F(GrpoUpdate, EqualRewardsGiveExactlyZeroGradients) {
  advantages_ = group_advantages(std::vector<double>(completions_.size(), 0.1 + 0.2), 4,
                                 AdvantageScale::kGroup);
  shift_logprobs(completions_);
  for (const auto& [type, name, denominator] : kLossTypes) {
    const UpdateResult result = run_update(model_, minibatch(type, Truncated::kKeep, 1000), {});
    EXPECT_EQ(result.loss, 0.0);
    for (size_t i = 0; i < result.gradients.size(); ++i)
      for (const double g : result.gradients[i].to_vector<double>())
        ASSERT_EQ(g, 0.0) << model_.parameters()[i].name;
  }
}

TEST_F(GrpoUpdate, MicroBatchSplitChangesNothing) {
  shift_logprobs(completions_);
  GrpoConfig config;
  config.beta = 0.1;
  for (const Truncated truncated : {Truncated::kKeep, Truncated::kMask})
    for (const auto& [type, name, denominator] : kLossTypes) {
      const UpdateResult whole = run_update(model_, minibatch(type, truncated, 1000), config);
      for (const int64_t tokens : {1, 30}) {
        const Minibatch batches = minibatch(type, truncated, tokens);
        ASSERT_GT(batches.size(), 1u);
        const UpdateResult split = run_update(model_, batches, config);
        EXPECT_NEAR(split.loss, whole.loss, 1e-12 * std::max(1.0, std::abs(whole.loss)));
        // Each gradient is a sum of a few hundred f64 terms of mixed sign, in a different order.
        EXPECT_LT(gradient_error(split, whole), 1e-12);
      }
    }
}

TEST_F(GrpoUpdate, SharedPromptsChangeNothingButTheirCost) {
  Rng rng(9, rng_stream(kTestPurpose, 4));
  std::vector<Trajectory> completions;
  for (const int64_t prompt : {1, 2, 6, 3})
    for (int64_t g = 0; g < prompt; ++g) {  // as many completions as the prompt has tokens
      Trajectory c{.prompt_length = prompt,
                   .index = static_cast<int64_t>(completions.size()),
                   .group = prompt};
      const int64_t length = prompt + rng.between(1, 5);
      for (int64_t t = 0; t < length; ++t) {
        const bool is_prompt = t < prompt;
        c.tokens.push_back(
            static_cast<int32_t>(is_prompt ? (prompt + 2 * t) % kEos : rng.below(kEos)));
        c.loss_mask.push_back(!is_prompt);
      }
      completions.push_back(c);
    }
  record_logprobs(model_, completions);
  const auto advantages = random_advantages(completions.size(), 3);
  std::vector<PolicySequence> repeated = sequences_of(completions, advantages), grouped = repeated;
  for (size_t i = 0; i < grouped.size(); ++i) {
    grouped[i].group = completions[i].group;
    grouped[i].prefix = completions[i].prompt_length - 1;
  }
  for (const int64_t tokens : {1, 12, 1000}) {
    const PackPolicyDesc desc = pack_desc(LossType::kDapo, repeated, tokens);
    const Minibatch shared = pack_policy(grouped, desc);
    int64_t rows = 0;
    for (const PolicyBatch& batch : shared) rows += batch.size();
    if (tokens == 1000) {
      EXPECT_EQ(rows, pack_policy(repeated, desc).at(0).size() - (1 * 1 + 5 * 5 + 2 * 2));
    }
    const UpdateResult a = run_update(model_, pack_policy(repeated, desc), {}),
                       b = run_update(model_, shared, {});
    for (const double d : b.max_ratio_deviations) EXPECT_EQ(d, 0) << tokens;
    EXPECT_NEAR(a.loss, b.loss, 1e-13);
    EXPECT_LT(gradient_error(a, b), 1e-12);
  }
}

TEST_F(GrpoUpdate, LeavingMaskedSequencesOutChangesNothing) {
  auto sequences = sequences_of(completions_, advantages_, Truncated::kMask);
  const PackPolicyDesc desc = pack_desc(LossType::kGrpo, sequences);
  const UpdateResult with = run_update(model_, pack_policy(sequences, desc), {});
  std::erase_if(sequences, [](const PolicySequence& s) { return s.num_targets() == 0; });
  ASSERT_LT(sequences.size(), completions_.size());
  const UpdateResult without = run_update(model_, pack_policy(sequences, desc), {});
  EXPECT_NEAR(with.loss, without.loss, 1e-14);
  EXPECT_LT(gradient_error(with, without), 1e-12);
}

TEST_F(GrpoUpdate, DoesNotDependOnTheNumberOfThreads) {
  GrpoConfig config;
  config.beta = 0.1;
  const int threads = num_threads();
  std::vector<UpdateResult> results;
  for (const int n : {1, 2, 3}) {
    set_num_threads(n);
    results.push_back(run_update(model_, minibatch(LossType::kDapo, Truncated::kKeep, 40), config));
  }
  set_num_threads(threads);
  for (const UpdateResult& r : results) {
    EXPECT_EQ(r.loss, results[0].loss);
    for (size_t i = 0; i < r.gradients.size(); ++i)
      EXPECT_TRUE(bit_equal(r.gradients[i], results[0].gradients[i]));
  }
}

TEST_F(GrpoUpdate, TokensOutsideTheMaskGetExactlyNoGradient) {
  const auto sequences = sequences_of(completions_, advantages_, Truncated::kMask);
  const PolicyBatch batch = pack_policy(sequences, pack_desc(LossType::kDapo, sequences)).at(0);
  const Variable hidden = Variable::parameter(random_tensor({batch.size(), 16}, DType::kF64, 5));
  const Variable at_targets = select_rows(hidden, batch.target_positions);
  backward(at_targets, grpo_loss(at_targets, model_.head(), batch, {}, 1).dhidden);
  std::set<int32_t> inside;
  for (const int32_t t : batch.target_positions.to_vector<int32_t>()) inside.insert(t);
  int64_t nonzero = 0;
  for (int32_t t = 0; t < batch.size(); ++t) {
    const auto row = hidden.grad().select(0, t).to_vector<double>();
    const bool zero = std::all_of(row.begin(), row.end(), [](double g) { return g == 0; });
    EXPECT_TRUE(inside.contains(t) || zero) << "token " << t;
    nonzero += !zero;
  }
  EXPECT_GT(nonzero, 5);  // some are clipped
}

TEST_F(GrpoUpdate, ReferenceEqualToThePolicyHasNoKl) {
  auto sequences = sequences_of(completions_, std::vector<double>(completions_.size(), 0.0));
  PolicyBatch batch = pack_policy(sequences, pack_desc(LossType::kDapo, sequences)).at(0);
  add_reference(batch, model_);
  GrpoConfig config;
  config.beta = 0.5;
  const UpdateResult result = run_update(model_, {batch}, config);
  EXPECT_EQ(result.loss, 0.0);
  EXPECT_EQ(result.stats.kl_to_reference, 0.0);
  EXPECT_EQ(result.stats.kl_to_old, 0.0);
  for (const Tensor& gradient : result.gradients)
    for (const double g : gradient.to_vector<double>()) ASSERT_EQ(g, 0.0);
}

TEST_F(GrpoUpdate, KlNeedsAReference) {
  const auto sequences = sequences_of(completions_, advantages_);
  const Minibatch batches = pack_policy(sequences, pack_desc(LossType::kDapo, sequences));
  GrpoConfig config;
  config.beta = 0.1;
  EXPECT_THROW_WITH(run_update(model_, batches, config), Error, "reference log-probs");
}

TEST_F(GrpoUpdate, LogProbsAreThoseOfLogitsOverTemperature) {
  const double temperature = 0.7;
  const Trajectory& c = completions_[2];
  const auto logprobs = completion_logprobs(model_, c, temperature);
  NoGradGuard no_grad;
  TokenSequence sequence{.tokens = c.tokens, .loss_mask = std::vector<uint8_t>(c.tokens.size(), 1)};
  const Variable hidden = model_.forward(pack({&sequence, 1}));
  const auto logits = linear(hidden, model_.head().weight).value().to_vector<double>();
  for (auto i = static_cast<size_t>(c.prompt_length); i < logprobs.size(); ++i) {
    const size_t t = i - 1;
    const double* z = &logits[t * kVocab];
    double sum = 0;
    for (int64_t v = 0; v < kVocab; ++v) sum += std::exp(z[v] / temperature);
    EXPECT_NEAR(logprobs[i], z[c.tokens[t + 1]] / temperature - std::log(sum), 1e-12);
  }
}

// The policy loss as a function of the model's parameters: copies them into the model, and returns
// the gradients of the model's own tape.
Variable loss_of_parameters(const Transformer& model, const PolicyBatch& batch,
                            const GrpoConfig& config, std::span<const Variable> in) {
  for (size_t i = 0; i < in.size(); ++i) {
    const NamedParameter& parameter = model.parameters()[i];
    Tensor value = parameter.value;
    value.copy_(in[i].value());
    parameter.grad().zero_();
  }
  const HeadLoss made = grpo_loss(model.hidden_at_targets(batch), model.head(), batch, config, 1);
  return make_node("loss_of_parameters", made.loss, in,
                   [&model, made](const Tensor& dy, Gradients& g) {
                     backward(made);
                     for (size_t i = 0; i < model.parameters().size(); ++i) {
                       const Variable gradient(model.parameters()[i].grad());
                       g.pass(static_cast<int>(i), scale(gradient, dy.item()).value());
                     }
                   });
}

TEST_F(GrpoUpdate, GradientPassesFiniteDifferences) {
  shift_logprobs(completions_);
  for (const auto& [level, name] : kRatioLevels) {
    SCOPED_TRACE(name);
    expect_finite_differences({.importance_sampling_level = level,
                               .epsilon = level == kernels::RatioLevel::kSequence ? 0.02 : 0.2,
                               .beta = 0.2,
                               .entropy_coef = 0.1});
  }
}

void GrpoUpdate::expect_finite_differences(const GrpoConfig& config) {
  const PolicyBatch batch = minibatch(LossType::kGrpo, Truncated::kMask, 1000).at(0);
  const UpdateResult at_start = run_update(model_, {batch}, config);
  ASSERT_GT(at_start.stats.clipped_low, 0);
  ASSERT_GT(at_start.stats.clipped_high, 0);
  ASSERT_LT(at_start.stats.clipped_low + at_start.stats.clipped_high, at_start.stats.tokens);
  std::vector<Tensor> parameters;
  for (const NamedParameter& p : model_.parameters()) parameters.push_back(p.value.clone());
  const GradcheckResult result = gradcheck(
      [&](std::span<const Variable> in) { return loss_of_parameters(model_, batch, config, in); },
      parameters, {.step = 2e-4, .elements = 8});
  EXPECT_TRUE(result.ok) << result.message;
}

}  // namespace
}  // namespace cohort
