#include "trainers/grpo_step.h"

#include <cmath>

#include "core/log.h"
#include "core/rng.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

// Sets one column of log-probs of all micro batches to those under `model`.
void set_log_probs(std::vector<Minibatch>& minibatches, Tensor PolicyBatch::*column,
                   const Transformer& model, double temperature) {
  NoGradGuard no_grad;
  for (Minibatch& minibatch : minibatches)
    for (PolicyBatch& batch : minibatch)
      batch.*column = policy_log_probs(model, batch.packed, temperature).logprob.value();
}

}  // namespace

PromptShare share_prompts(const Communicator& comm, const TrainConfig& config, int64_t step) {
  const int64_t count = config.prompts_per_step, parts = config.grpo.num_minibatches;
  PromptShare out;
  for (int64_t m = 0; m < parts; ++m) {
    out.minibatch_begin.push_back(static_cast<int64_t>(out.numbers.size()));
    const int64_t begin = count * m / parts, end = count * (m + 1) / parts;
    const RankShare mine = share_of(end - begin, comm.rank(), comm.size(), step * parts + m);
    for (int64_t i = mine.begin; i < mine.end; ++i) out.numbers.push_back(begin + i);
  }
  out.minibatch_begin.push_back(static_cast<int64_t>(out.numbers.size()));
  return out;
}

int64_t count_rewarded(Communicator& comm, const RewardSet::Scores& scores) {
  double count = 0;
  for (const double reward : scores.total) count += !std::isnan(reward);
  reduce_in_place(comm, {&count});
  return static_cast<int64_t>(count);
}

std::vector<double> shuffled_advantages(Communicator& comm, const std::vector<double>& advantages,
                                        const PromptShare& share, const TrainConfig& config,
                                        int64_t step) {
  const auto group = static_cast<size_t>(config.num_generations);
  const auto place = [&](size_t i) {
    return static_cast<size_t>(share.numbers[i / group]) * group + i % group;
  };
  std::vector<double> all(static_cast<size_t>(config.prompts_per_step) * group);
  for (size_t i = 0; i < advantages.size(); ++i) all[place(i)] = advantages[i];
  all = reduce_over_ranks(comm, all);
  Rng rng(static_cast<uint64_t>(config.seed),
          rng_stream(RngPurpose::kAblation, static_cast<uint64_t>(step)));
  for (auto i = static_cast<int64_t>(all.size()) - 1; i > 0; --i)
    std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(rng.below(i + 1))]);
  std::vector<double> dealt;
  for (size_t i = 0; i < advantages.size(); ++i) dealt.push_back(all[place(i)]);
  return dealt;
}

std::vector<Minibatch> pack_minibatches(Communicator& comm, const Transformer& model,
                                        const ScoredRollouts& scored,
                                        std::span<const double> advantages,
                                        const PromptShare& share, const TrainConfig& config) {
  const int64_t group = config.num_generations;
  const std::vector<Trajectory>& samples = scored.rollouts.samples;
  std::vector<Minibatch> out;
  for (size_t m = 0; m + 1 < share.minibatch_begin.size(); ++m) {
    std::vector<PolicySequence> all, useful;
    for (int64_t k = share.minibatch_begin[m] * group; k < share.minibatch_begin[m + 1] * group;
         ++k) {
      const auto i = static_cast<size_t>(k);
      if (std::isnan(scored.scores.total[i])) continue;
      all.push_back({.trajectory = &samples[i],
                     .advantage = advantages[i],
                     .number = samples[i].group * group + k % group,
                     .masked = config.grpo.mask_truncated_completions && samples[i].truncated()});
      // Without a KL term a zero advantage gives an exactly zero gradient: leave its forward and
      // backward out.
      if (!all.back().masked && (advantages[i] != 0 || config.grpo.beta > 0))
        useful.push_back(all.back());
    }
    StepTotals totals = count_totals(all);
    reduce_in_place(comm, {&totals.sequences, &totals.tokens});
    // Not even with a zero gradient: AdamW's decay and momentum would move the weights.
    if (totals.tokens == 0) continue;
    Minibatch minibatch =
        pack_policy(useful, {.loss_type = config.grpo.loss_type,
                             .totals = totals,
                             .max_completion_length = config.sampling.max_completion_length,
                             .micro_batch_tokens = config.micro_batch_tokens,
                             .policy_version = scored.rollouts.policy_version,
                             .dtype = accumulate_dtype(config.dtype)});
    for (PolicyBatch& batch : minibatch) batch = place(model, batch);
    out.push_back(std::move(minibatch));
  }
  return out;
}

void add_reference_log_probs(const Transformer& reference, std::vector<Minibatch>& minibatches,
                             double temperature) {
  set_log_probs(minibatches, &PolicyBatch::ref_logprob, reference, temperature);
}

UpdateSums update_policy(Communicator& comm, Learner& learner, std::vector<Minibatch>& minibatches,
                         const TrainConfig& config, double learning_rate) {
  const double temperature = config.sampling.temperature;
  Tensor stats = kernels::PolicyLossStats::zeros(learner.model().device());
  const auto update = [&](const Minibatch& minibatch, const std::function<bool()>& accept) {
    stats.zero_();
    const auto loss = [&](int64_t i) {
      const PolicyBatch& batch = minibatch[static_cast<size_t>(i)];
      const TokenLogProbs policy = policy_log_probs(learner.model(), batch.packed, temperature);
      return grpo_loss(policy.logprob, batch, config.grpo, stats);
    };
    return learner.update(static_cast<int64_t>(minibatch.size()), loss, learning_rate, accept);
  };
  const auto deviation = [&] { return kernels::PolicyLossStats::from(stats).max_ratio_deviation; };
  const std::function<bool()> is_on_policy = [&] { return deviation() == 0; };
  UpdateSums sums;
  for (int64_t iteration = 0; iteration < config.grpo.num_iterations; ++iteration)
    for (size_t m = 0; m < minibatches.size(); ++m) {
      const bool first = iteration == 0 && m == 0;
      Learner::Update done = update(minibatches[m], first ? is_on_policy : nullptr);
      if (!done.made) {
        sums.ratio_deviation = deviation();
        reduce_in_place(comm, {&sums.ratio_deviation}, Reduce::kMax);
        set_log_probs(minibatches, &PolicyBatch::old_logprob, learner.model(), temperature);
        done = update(minibatches[m], nullptr);
        if (comm.rank() == 0)
          logging::warn("the sampler's log-probs differ from the trainer's: max |ratio - 1| = ",
                        sums.ratio_deviation,
                        " on the first minibatch; it was repeated with old log-probs that the "
                        "trainer computed");
      }
      sums.add(done, kernels::PolicyLossStats::from(stats));
    }
  return sums;
}

}  // namespace cohort
