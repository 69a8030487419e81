#include "rl/policy_batch.h"

#include <algorithm>

#include "data/parallel_try.h"
#include "nn/transformer.h"

namespace cohort {

PolicySequence policy_sequence(const Trajectory& t, double advantage) {
  COHORT_CHECK(t.prompt_length >= 1 && t.completion_length() >= 1,
               "[policy_sequence] expected a prompt and a completion in sequence ", t.index,
               ", got ", t.prompt_length, " and ", t.completion_length(), " tokens");
  COHORT_CHECK(t.logprobs.size() == t.tokens.size(), "[policy_sequence] sequence ", t.index,
               " has ", t.tokens.size(), " tokens and ", t.logprobs.size(), " log-probs");
  return {{.tokens = t.tokens, .loss_mask = t.loss_mask, .index = t.index},
          t.logprobs,
          std::vector(t.tokens.size(), advantage)};
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
  return 1 / entry_of(kLossTypes, type).denominator(sizes);
}

namespace {

// The sequence that the reference reads.
TokenSequence reference_sequence(const PolicySequence& s) {
  TokenSequence out = s;
  const auto first = std::ranges::find(s.loss_mask.begin() + 1, s.loss_mask.end(), 1);
  const auto begin = first - s.loss_mask.begin();
  out.tokens = s.reference_prompt;
  out.tokens.insert(out.tokens.end(), s.tokens.begin() + begin, s.tokens.end());
  out.loss_mask.assign(s.reference_prompt.size(), 0);
  out.loss_mask.insert(out.loss_mask.end(), first, s.loss_mask.end());
  if (s.prefix > 0) out.prefix = std::ssize(s.reference_prompt) - 1;
  return out;
}

}  // namespace

Minibatch pack_policy(std::vector<PolicySequence> sequences, const PackPolicyDesc& desc) {
  // Micro batches hold the longer of what policy and reference read.
  std::vector<TokenSequence> tokens, references, longer;
  for (PolicySequence& s : sequences) {
    if (!s.reference_prompt.empty()) references.push_back(reference_sequence(s));
    tokens.push_back(static_cast<TokenSequence&&>(s));
    if (references.empty()) continue;
    const bool is_longer = references.back().tokens.size() > tokens.back().tokens.size();
    longer.push_back(is_longer ? references.back() : tokens.back());
  }
  const std::vector<size_t> begins =
      split_micro_batches(references.empty() ? tokens : longer, desc.micro_batch_tokens);
  Minibatch out(begins.size() - 1);
  parallel_try(static_cast<int64_t>(out.size()), 1, [&](int64_t i) {
    const auto b = static_cast<size_t>(i);
    const size_t begin = begins[b], end = begins[b + 1];
    std::vector<double> old_logprob, ref_logprob, sampling_logprob, advantage, weight, distance;
    for (size_t s = begin; s < end; ++s) {
      const TokenSequence& sequence = tokens[s];
      const PolicySequence& policy = sequences[s];
      for (size_t t = 1; t < sequence.tokens.size(); ++t) {
        if (!sequence.loss_mask[t]) continue;
        old_logprob.push_back(policy.old_logprob[t]);
        if (!policy.ref_logprob.empty()) ref_logprob.push_back(policy.ref_logprob[t]);
        if (!policy.sampling_logprob.empty())
          sampling_logprob.push_back(policy.sampling_logprob[t]);
        const bool has_surrogate = policy.surrogate_mask.empty() || policy.surrogate_mask[t];
        advantage.push_back(has_surrogate ? policy.advantage[t] : 0);
        distance.push_back(policy.old_distance_coef.empty() ? 0 : policy.old_distance_coef[t]);
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
    PolicyBatch& batch = out[b];
    static_cast<PackedBatch&>(batch) = pack(std::span(tokens).subspan(begin, end - begin));
    if (!references.empty())
      batch.reference = pack(std::span(references).subspan(begin, end - begin));
    batch.old_logprob = column(old_logprob);
    batch.advantage = column(advantage);
    batch.weight = column(weight);
    batch.ref_logprob = optional(ref_logprob);
    batch.sampling_logprob = optional(sampling_logprob);
    if (std::ranges::any_of(distance, [](double c) { return c != 0; }))
      batch.old_distance_coef = column(distance);
  });
  return out;
}

void unpack_log_probs(std::span<const PolicyBatch> batches, std::span<PolicySequence> sequences) {
  const auto unpack = [&](Tensor PolicyBatch::*column, std::vector<double> PolicySequence::*to) {
    std::vector<double> values;
    for (const PolicyBatch& batch : batches) {
      const std::vector<double> part = (batch.*column).to_vector<double>();
      values.insert(values.end(), part.begin(), part.end());
    }
    auto next = values.begin();
    for (PolicySequence& s : sequences) {
      (s.*to).resize(s.tokens.size());
      for (size_t t = 1; t < s.tokens.size(); ++t)
        if (s.loss_mask[t]) (s.*to)[t] = *next++;
    }
  };
  if (batches.empty()) return;
  unpack(&PolicyBatch::old_logprob, &PolicySequence::old_logprob);
  if (std::ranges::all_of(batches, [](const auto& b) { return b.ref_logprob.defined(); }))
    unpack(&PolicyBatch::ref_logprob, &PolicySequence::ref_logprob);
}

PolicyBatch to_device(const PolicyBatch& batch, const Transformer& model) {
  PolicyBatch out;
  static_cast<PackedBatch&>(out) = model.to_device(batch);
  if (batch.reference) out.reference = model.to_device(*batch.reference);
  for (const auto column :
       {&PolicyBatch::old_logprob, &PolicyBatch::advantage, &PolicyBatch::weight,
        &PolicyBatch::ref_logprob, &PolicyBatch::sampling_logprob, &PolicyBatch::old_distance_coef})
    out.*column = (batch.*column).to(model.device());
  return out;
}

}  // namespace cohort
