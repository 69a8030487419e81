// GRPO: sample completions, score them, compare each with its group, update. Sampler and trainer
// share weights and kernels, so the recorded log-probs are the old policy's exactly and the first
// minibatch's ratio is 1.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/log.h"
#include "data/loader.h"
#include "trainers/grpo_metrics.h"
#include "trainers/loops.h"

namespace cohort {
namespace {

// A rank's prompts of one step. The step's prompts are cut into minibatches first and each
// minibatch over the ranks, so that the same prompts share an update for any number of ranks.
struct PromptShare {
  std::vector<Example> prompts;
  std::vector<int64_t> numbers;          // within the step
  std::vector<int64_t> minibatch_begin;  // index into prompts of each minibatch, and the end
};

PromptShare next_prompts(Stage& stage, ShuffledOrder& order) {
  const int64_t count = stage.config().prompts_per_step,
                parts = stage.config().grpo.num_minibatches;
  const int64_t rank = stage.comm().rank(), ranks = stage.comm().size();
  std::vector<int64_t> examples;
  for (int64_t i = 0; i < count; ++i) examples.push_back(order.next());
  PromptShare share;
  for (int64_t m = 0; m < parts; ++m) {
    share.minibatch_begin.push_back(static_cast<int64_t>(share.prompts.size()));
    const int64_t begin = count * m / parts, size = count * (m + 1) / parts - begin;
    for (int64_t i = begin + size * rank / ranks; i < begin + size * (rank + 1) / ranks; ++i) {
      share.prompts.push_back(stage.data().train->get(examples[static_cast<size_t>(i)]));
      share.numbers.push_back(i);
    }
  }
  share.minibatch_begin.push_back(static_cast<int64_t>(share.prompts.size()));
  return share;
}

// The control experiment: the same advantages, dealt to the wrong completions.
void shuffle(std::vector<double>& values, uint64_t seed, int64_t step) {
  Rng rng(seed, rng_stream(RngPurpose::kAblation, static_cast<uint64_t>(step)));
  for (auto i = static_cast<int64_t>(values.size()) - 1; i > 0; --i)
    std::swap(values[static_cast<size_t>(i)], values[static_cast<size_t>(rng.below(i + 1))]);
}

// The micro batches of each optimiser update, with the denominators of the whole update over all
// ranks.
std::vector<Minibatch> pack_minibatches(Stage& stage, const Rollouts& rollouts,
                                        const std::vector<double>& rewards,
                                        const std::vector<double>& advantages,
                                        const PromptShare& share) {
  const TrainConfig& config = stage.config();
  const int64_t group = config.num_generations;
  std::vector<Minibatch> out;
  for (size_t m = 0; m + 1 < share.minibatch_begin.size(); ++m) {
    std::vector<PolicySequence> all, useful;
    for (int64_t k = share.minibatch_begin[m] * group; k < share.minibatch_begin[m + 1] * group;
         ++k) {
      const auto i = static_cast<size_t>(k);
      if (std::isnan(rewards[i])) continue;  // no reward applies: it counts nowhere
      const int64_t prompt = rollouts.prompt_numbers[i / static_cast<size_t>(group)];
      all.push_back(
          {.completion = &rollouts.samples[i],
           .advantage = advantages[i],
           .group = prompt,
           .number = prompt * group + k % group,
           .masked = config.grpo.mask_truncated_completions && rollouts.samples[i].truncated});
      // Without a KL term a zero advantage gives an exactly zero gradient: leave its forward and
      // backward out.
      if (!all.back().masked && (advantages[i] != 0 || config.grpo.beta > 0))
        useful.push_back(all.back());
    }
    const StepTotals mine = count_totals(all);
    const std::vector<double> totals =
        reduce_over_ranks(stage.comm(), {mine.sequences, mine.tokens});
    Minibatch minibatch =
        pack_policy(useful, {.loss_type = config.grpo.loss_type,
                             .totals = {totals[0], totals[1]},
                             .max_completion_length = config.sampling.max_completion_length,
                             .micro_batch_tokens = config.micro_batch_tokens,
                             .policy_version = rollouts.policy_version,
                             .dtype = accumulate_dtype(config.dtype)});
    for (PolicyBatch& batch : minibatch) batch = place(stage.model(), batch);
    out.push_back(std::move(minibatch));
  }
  return out;
}

void add_reference_log_probs(Stage& stage, std::vector<Minibatch>& minibatches) {
  if (stage.reference() == nullptr) return;
  NoGradGuard no_grad;
  for (Minibatch& minibatch : minibatches)
    for (PolicyBatch& batch : minibatch)
      batch.ref_logprob =
          policy_log_probs(*stage.reference(), batch.packed, stage.config().sampling.temperature)
              .logprob.value();
}

void log_samples(Stage& stage, const Rollouts& rollouts, const std::vector<double>& rewards) {
  for (int64_t g = 0; g < std::min<int64_t>(2, static_cast<int64_t>(rollouts.samples.size()));
       ++g) {
    const auto i = static_cast<size_t>(g);
    Json line;
    line.set("step", stage.step() + 1)
        .set("prompt", rollouts.prompts[0].prompt)
        .set("completion", rollouts.samples[i].text);
    line.set("answer", rollouts.prompts[0].answer).set("reward", rewards[i]);
    stage.log_completion(line);
  }
}

}  // namespace

StageEnd train_grpo(Stage& stage) {
  const TrainConfig& config = stage.config();
  const RewardSet rewards(config.rewards, stage.data().task);
  const Sampler sampler(stage.model(), *stage.data().tokenizer, config.sampling);
  if (config.sampling.top_k > 0 || config.sampling.top_p < 1)
    logging::warn(
        "top_k and top_p restrict sampling only: the update treats samples as if drawn from the "
        "full distribution");
  ShuffledOrder order(stage.data().train->size(), static_cast<uint64_t>(config.seed));
  order.seek(stage.state().data_position);

  while (stage.more()) {
    const PromptShare share = next_prompts(stage, order);
    Rollouts rollouts = sampler.sample(share.prompts, config.num_generations,
                                       {.seed = static_cast<uint64_t>(config.seed),
                                        .step = stage.step(),
                                        .prompt_numbers = share.numbers});
    rollouts.policy_version = stage.learner().optimizer().updates();
    const RewardSet::Scores scores = rewards.score(rollouts);
    std::vector<double> advantages =
        group_advantages(scores.total, config.num_generations, config.grpo.scale_rewards);
    if (config.grpo.shuffle_advantages)
      shuffle(advantages, static_cast<uint64_t>(config.seed), stage.step());
    auto minibatches = pack_minibatches(stage, rollouts, scores.total, advantages, share);
    add_reference_log_probs(stage, minibatches);

    GrpoMetrics metrics(stage.model().head().value().device());
    const double rate = stage.learning_rate();
    for (int64_t iteration = 0; iteration < config.grpo.num_iterations; ++iteration)
      for (const Minibatch& minibatch : minibatches) {
        const auto loss = [&](int64_t i) {
          const PolicyBatch& batch = minibatch[static_cast<size_t>(i)];
          const TokenLogProbs policy =
              policy_log_probs(stage.model(), batch.packed, config.sampling.temperature);
          metrics.add_batch(policy.entropy.value(), batch);
          return grpo_loss(policy.logprob, batch, config.grpo, metrics.policy_stats());
        };
        metrics.add_update(
            stage.learner().update(static_cast<int64_t>(minibatch.size()), loss, rate));
      }

    stage.state().data_position = order.position();
    log_samples(stage, rollouts, scores.total);
    stage.end_step(
        metrics.summary(stage.comm(), rollouts, scores, rewards.names(), advantages, rate));
  }
  return stage.finish();
}

}  // namespace cohort
