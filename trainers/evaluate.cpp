#include "trainers/evaluate.h"

#include <algorithm>

#include "kernels/head.h"

namespace cohort {

RewardFn correctness_of(const TrainConfig& config, const Task* task) {
  RewardConfig chosen;
  if (task != nullptr) {
    chosen.name = "task";
  } else if (!config.rewards.empty()) {
    chosen = *std::max_element(config.rewards.begin(), config.rewards.end(),
                               [](const auto& a, const auto& b) { return a.weight < b.weight; });
  } else {
    chosen.name = "exact_match";
  }
  for (const RewardEntry& entry : reward_table())
    if (chosen.name == entry.name) return entry.make(chosen, task);
  throw InputError(str("rewards: unknown reward '", chosen.name, "'"));
}

ProblemScores evaluate_problems(const Transformer& model, const Tokenizer& tokenizer,
                                std::span<const Example> problems, const RewardFn& correct,
                                const TrainConfig& config, int64_t step) {
  ProblemScores scores;
  const auto run = [&](double temperature, int64_t samples) {
    SamplingConfig sampling = config.sampling;
    sampling.temperature = temperature;
    return Sampler(model, tokenizer, sampling)
        .sample(problems, samples, {.seed = static_cast<uint64_t>(config.seed), .step = -1 - step});
  };
  const auto grade = [&](const Rollouts& rollouts) {
    std::vector<double> right;
    for (size_t i = 0; i < rollouts.samples.size(); ++i)
      right.push_back(correct({rollouts.prompts[i / static_cast<size_t>(rollouts.num_generations)],
                               rollouts.samples[i].text}));
    return right;
  };
  const Rollouts greedy = run(0, 1);
  const std::vector<double> right = grade(greedy);
  for (size_t i = 0; i < right.size(); ++i)
    scores.greedy.push_back(
        {problems[i].prompt, problems[i].answer, greedy.samples[i].text, right[i] >= 1});
  scores.metrics.emplace_back("pass@1", mean_pass_at_k(right, 1, 1));
  if (config.eval.num_samples > 0) {
    const double temperature = config.sampling.temperature > 0 ? config.sampling.temperature : 1;
    const std::vector<double> sampled = grade(run(temperature, config.eval.num_samples));
    for (const int64_t k : config.eval.k)
      scores.metrics.emplace_back(str("sampled_pass@", k),
                                  mean_pass_at_k(sampled, config.eval.num_samples, k));
  }
  return scores;
}

double evaluate_text(const Transformer& model, std::span<const int32_t> tokens,
                     int64_t micro_batch_tokens) {
  NoGradGuard no_grad;
  const int64_t context = model.config().context, total = static_cast<int64_t>(tokens.size()) - 1;
  std::vector<TokenSequence> windows;
  std::vector<int64_t> lengths;
  for (int64_t begin = 0; begin < total; begin += context) {
    const int64_t n = std::min(context, total - begin) + 1;
    const auto part = tokens.subspan(static_cast<size_t>(begin), static_cast<size_t>(n));
    windows.push_back(
        {.tokens = {part.begin(), part.end()}, .learn = std::vector<uint8_t>(part.size(), 1)});
    lengths.push_back(n - 1);
  }
  double loss = 0;
  const std::vector<int64_t> cuts = split_by_tokens(lengths, micro_batch_tokens);
  for (size_t b = 0; b + 1 < cuts.size(); ++b) {
    const PackedBatch batch = model.place(pack(std::span(windows).subspan(
        static_cast<size_t>(cuts[b]), static_cast<size_t>(cuts[b + 1] - cuts[b]))));
    const Variable hidden = model.forward(batch);
    for (const double lp :
         token_log_probs(hidden, model.head(), batch.targets).logprob.value().to_vector<double>())
      loss -= lp;
  }
  return total > 0 ? loss / static_cast<double>(total) : 0;
}

}  // namespace cohort
