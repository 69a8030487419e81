// Learning from preference pairs without a reward model: DPO (Rafailov et al. 2023, arXiv
// 2305.18290) and its relatives. For the chosen and the rejected answer of a pair
//
//   u = sum over the answer's tokens of lp - lp_ref    (reference: none: lp_ref = 0)
//   d = u_chosen - u_rejected                          (length_normalized, ipo: means over tokens)
//   h = beta d - margin
//
//   sigmoid  -(1 - e) log s(h) - e log s(-h), e: label_smoothing (conservative DPO: Mitchell 2023)
//   robust   (-(1 - e) log s(h) + e log s(-h)) / (1 - 2 e) (Chowdhury et al. 2024, arXiv
//            2403.00409)
//   hinge    max(0, 1 - h) (SLiC: Zhao et al. 2023, arXiv 2305.10425)
//   ipo      (d - 1 / (2 beta))^2 (Azar et al. 2023, arXiv 2310.12036; by token, as TRL)
//
// where s is the logistic function. The loss of an update is the mean over its pairs, plus
// sft_weight times the mean of -lp over the tokens of its chosen answers. Without a reference,
// length-normalized, sigmoid is SimPO (Meng et al. 2024, arXiv 2405.14734).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "config/visitor.h"
#include "data/packing.h"

namespace cohort {

enum class PreferenceLoss : uint8_t { kSigmoid, kHinge, kIpo, kRobust };
inline constexpr EnumName<PreferenceLoss> kPreferenceLosses[] = {
    {PreferenceLoss::kSigmoid, "sigmoid"},
    {PreferenceLoss::kHinge, "hinge"},
    {PreferenceLoss::kIpo, "ipo"},
    {PreferenceLoss::kRobust, "robust"}};

// The reference policy: the model at the start of the stage, the base of its adapters, or none.
enum class PairReferenceType : uint8_t { kStart, kBase, kNone };
inline constexpr EnumName<PairReferenceType> kPairReferenceTypes[] = {
    {PairReferenceType::kStart, "start"},
    {PairReferenceType::kBase, "base"},
    {PairReferenceType::kNone, "none"}};

struct PreferenceConfig {
  PreferenceLoss loss = PreferenceLoss::kSigmoid;
  double beta = 0.1, label_smoothing = 0;
  bool length_normalized = false;
  double margin = 0, sft_weight = 0;
  PairReferenceType reference = PairReferenceType::kStart;
  void visit(ConfigVisitor& v) {
    v.choice("loss", loss, kPreferenceLosses,
             "loss of a pair: sigmoid (DPO), hinge (SLiC), ipo, or robust (to wrong labels)");
    v.field("beta", beta, "scale of log-ratios: a larger one keeps the policy at the reference",
            {.min = 1e-6, .max = 1e6});
    v.field("label_smoothing", label_smoothing,
            "(sigmoid, robust) assumed fraction of pairs whose answers are swapped",
            {.min = 0, .max = 0.5});
    v.field("length_normalized", length_normalized,
            "log-ratios are means over the tokens of an answer, in place of sums");
    v.field("margin", margin, "subtracted from beta times the difference of the log-ratios",
            {.min = 0, .max = 1e6});
    v.field("sft_weight", sft_weight,
            "weight of the mean loss of the chosen answers' tokens, beside the loss of the pairs",
            {.min = 0, .max = 1e6});
    v.choice("reference", reference, kPairReferenceTypes,
             "reference policy: the model at the start of the stage; base: without lora's "
             "adapters; none");
  }
  // Throws InputError naming the keys that contradict each other.
  void validate(bool has_adapters) const;
  // One line per key that has no effect, or not the one that its name suggests.
  std::vector<std::string> warnings() const;
};

// The sums of an answer's log-probs, under the policy and under the reference, over its tokens.
struct AnswerLogProbs {
  double policy = 0, reference = 0, tokens = 0;
};
struct PairTerms {
  double loss = 0;
  double excess = 0;  // over the loss at d = 0, where the policy is the reference
  // Gradients of the loss by the log-prob of any token of the answer.
  double chosen_gradient = 0, rejected_gradient = 0;
  // beta u; by means over tokens with length_normalized and without a reference.
  double chosen_reward = 0, rejected_reward = 0;
};
PairTerms pair_terms(const PreferenceConfig& config, const AnswerLogProbs& chosen,
                     const AnswerLogProbs& rejected);

// The reference's log-probs of a pair.
struct PairReference {
  double chosen = 0, rejected = 0;
  bool operator==(const PairReference&) const = default;
};
// Sums over pairs, in f64 and in their order.
struct PairSums {
  double pairs = 0, excess = 0, chosen_rewards = 0, rejected_rewards = 0, accurate = 0;
  double chosen_logprobs = 0, rejected_logprobs = 0, chosen_tokens = 0;
  // Adds a pair. `accurate`: the chosen answer's reward is the larger one.
  void add(const PairTerms& terms, const AnswerLogProbs& chosen, const AnswerLogProbs& rejected);
  // The loss of an update or of held-out pairs with these sums over all ranks; exactly that of
  // d = 0 if every pair has it.
  double mean_loss(const PreferenceConfig& config) const;
};

// Shared by the micro batches of an update. The denominators are over all ranks.
struct PairUpdate {
  const PreferenceConfig& config;
  double pairs = 0, chosen_tokens = 0;
};
// A micro batch's part of an update's loss, with its gradients. Sequences 2 k and 2 k + 1 of
// `batch` (on the device of `hidden`) are the chosen and the rejected answer of the pair of
// references[k]. Adds the pairs to `sums`. Two passes over the logits: the first gives the
// log-probs, which are copied to the host.
HeadLoss preference_loss(const Variable& hidden, const HeadWeights& head, const PackedBatch& batch,
                         std::span<const PairReference> references, const PairUpdate& update,
                         PairSums& sums);

}  // namespace cohort
