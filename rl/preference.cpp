#include "rl/preference.h"

#include <algorithm>
#include <cmath>

namespace cohort {
namespace {

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
// log s(x), without overflow.
double log_sigmoid(double x) {
  return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x)));
}

struct LossOfDifference {
  double value, slope;  // by d
};
LossOfDifference loss_of(const PreferenceConfig& config, double d) {
  if (config.loss == PreferenceLoss::kIpo) {
    const double x = d - 1 / (2 * config.beta);
    return {x * x, 2 * x};
  }
  const double h = config.beta * d - config.margin;
  if (config.loss == PreferenceLoss::kHinge)
    return {std::max(0.0, 1 - h), h < 1 ? -config.beta : 0};
  const double e = config.label_smoothing;
  const bool robust = config.loss == PreferenceLoss::kRobust;
  const double swapped = robust ? -e : e, scale = robust ? 1 / (1 - 2 * e) : 1;
  const double value = -(1 - e) * log_sigmoid(h) - swapped * log_sigmoid(-h);
  const double slope = -(1 - e) * sigmoid(-h) + swapped * sigmoid(h);
  return {scale * value, scale * config.beta * slope};
}

}  // namespace

void PreferenceConfig::validate(bool has_adapters) const {
  const auto require = [](bool ok, const char* message) {
    if (!ok) throw InputError(message);
  };
  require(reference != PairReferenceType::kBase || has_adapters,
          "preference.reference: base is the model without adapters, and there are none; hint: "
          "preference.reference=start, or lora.rank=16");
  require(
      label_smoothing < 0.5,
      "preference.label_smoothing: with half of the labels swapped nothing can be learned; hint: "
      "less than "
      "0.5");
}

std::vector<std::string> PreferenceConfig::warnings() const {
  std::vector<std::string> out;
  const bool smooth = loss == PreferenceLoss::kSigmoid || loss == PreferenceLoss::kRobust;
  const bool ipo = loss == PreferenceLoss::kIpo;
  for (const auto& [given, text] :
       {std::pair(label_smoothing > 0 && !smooth,
                  "label_smoothing: does nothing with loss hinge and ipo"),
        {length_normalized && ipo,
         "length_normalized: does nothing with loss ipo, which takes means over tokens anyway"},
        {margin > 0 && ipo, "margin: does nothing with loss ipo"},
        {loss == PreferenceLoss::kRobust && label_smoothing == 0,
         "loss: robust is sigmoid at label_smoothing 0"}})
    if (given) out.push_back(str("preference.", text, "; hint: leave it out"));
  return out;
}

PairTerms pair_terms(const PreferenceConfig& config, const AnswerLogProbs& chosen,
                     const AnswerLogProbs& rejected) {
  const bool means = config.length_normalized || config.loss == PreferenceLoss::kIpo;
  const double chosen_size = means ? chosen.tokens : 1, rejected_size = means ? rejected.tokens : 1;
  const double u_chosen = chosen.policy - chosen.reference,
               u_rejected = rejected.policy - rejected.reference;
  const auto [loss, slope] = loss_of(config, u_chosen / chosen_size - u_rejected / rejected_size);
  // As TRL reports them: DPOTrainer sums, and CPOTrainer means for SimPO.
  const bool mean_rewards =
      config.length_normalized && config.reference == PairReferenceType::kNone;
  return {.loss = loss,
          .excess = loss - loss_of(config, 0).value,
          .chosen_gradient = slope / chosen_size,
          .rejected_gradient = -slope / rejected_size,
          .chosen_reward = config.beta * u_chosen / (mean_rewards ? chosen.tokens : 1),
          .rejected_reward = config.beta * u_rejected / (mean_rewards ? rejected.tokens : 1)};
}

void PairSums::add(const PairTerms& terms, const AnswerLogProbs& chosen,
                   const AnswerLogProbs& rejected) {
  pairs += 1;
  excess += terms.excess;
  chosen_rewards += terms.chosen_reward;
  rejected_rewards += terms.rejected_reward;
  accurate += terms.chosen_reward > terms.rejected_reward;
  chosen_logprobs += chosen.policy;
  rejected_logprobs += rejected.policy;
  chosen_tokens += chosen.tokens;
}

double PairSums::mean_loss(const PreferenceConfig& config) const {
  const double mean = loss_of(config, 0).value + excess / pairs;
  return config.sft_weight > 0 ? mean - config.sft_weight * chosen_logprobs / chosen_tokens : mean;
}

HeadLoss preference_loss(const Variable& hidden, const HeadWeights& head, const PackedBatch& batch,
                         std::span<const PairReference> references, const PairUpdate& update,
                         PairSums& sums) {
  std::vector<double> logprobs;
  {
    const NoGradGuard no_grad;
    logprobs = token_log_probs(hidden, head, batch.targets).logprob.value().to_vector<double>();
  }
  const std::vector<int32_t> segments = batch.segments.to_vector<int32_t>();
  std::vector<AnswerLogProbs> answers(2 * references.size());
  for (size_t t = 0; t < logprobs.size(); ++t) {
    AnswerLogProbs& answer = answers.at(static_cast<size_t>(segments[t]));
    answer.policy += logprobs[t];
    answer.tokens += 1;
  }
  std::vector<double> gradients(answers.size());  // by the log-prob of any token of an answer
  double loss = 0;
  for (size_t k = 0; k < references.size(); ++k) {
    AnswerLogProbs &chosen = answers[2 * k], &rejected = answers[2 * k + 1];
    COHORT_CHECK(chosen.tokens > 0 && rejected.tokens > 0, "[preference_loss] pair ", k,
                 " has an answer without targets");
    chosen.reference = references[k].chosen;
    rejected.reference = references[k].rejected;
    const PairTerms terms = pair_terms(update.config, chosen, rejected);
    sums.add(terms, chosen, rejected);
    const double sft = update.config.sft_weight / update.chosen_tokens;
    loss += terms.loss / update.pairs - sft * chosen.policy;
    gradients[2 * k] = terms.chosen_gradient / update.pairs - sft;
    gradients[2 * k + 1] = terms.rejected_gradient / update.pairs;
  }
  std::vector<double> weights;
  for (const int32_t segment : segments)
    weights.push_back(-gradients[static_cast<size_t>(segment)]);
  const Device device = hidden.value().device();
  const DType dtype = accumulate_dtype(hidden.value().dtype());
  HeadLoss out =
      cross_entropy(hidden, head, batch.targets, Tensor::from(weights).to(dtype).to(device));
  out.loss = Tensor::full({1}, loss, dtype, device);
  return out;
}

}  // namespace cohort
