#include "trainers/grpo_step.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <numeric>

#include "core/log.h"
#include "core/on_exit.h"
#include "core/progress.h"
#include "core/rng.h"
#include "kernels/elementwise.h"
#include "kernels/policy_token.h"
#include "rl/grpo_loss.h"
#include "rl/rejection.h"
#include "trainers/across_ranks.h"
#include "trainers/step_advantages.h"

namespace cohort {
namespace {

// The purpose of rng_stream() for shuffled advantages.
constexpr uint64_t kAblationPurpose = 7;

// Calls Learner::within_memory() for work on `updates`, which are packed as it asks.
void within_memory(Learner& learner, std::span<PolicyUpdate> updates, const GrpoSections& config,
                   const std::function<void()>& work) {
  const auto pack = [&](int64_t tokens) {
    int64_t largest = 0;
    for (PolicyUpdate& update : updates) {
      update.pack(tokens, learner.model());
      for (const PolicyBatch& batch : update.batches) largest = std::max(largest, batch.size());
    }
    return largest;
  };
  learner.within_memory(config.batch.micro_batch(), pack, work);
}

// Calls fn() while the learner has the adapters of `policy`, without gradients.
void with_adapters(Learner& learner, const ReferencePolicy& policy,
                   const std::function<void()>& fn) {
  NoGradGuard no_grad;
  Transformer& trained = learner.model();
  std::vector<Tensor> own;  // adapters in whose place the policy has others
  const OnExit restore([&] {
    if (!own.empty()) trained.set_adapters(own);
  });
  if (policy.start != nullptr) {
    own = trained.adapters();
    trained.set_adapters(*policy.start);
  }
  fn();
}

// Sets one column of all micro batches to the log-probs under `policy`, within memory.
void set_log_probs(Communicator& comm, Learner& learner, std::span<PolicyUpdate> updates,
                   const GrpoSections& config, Tensor PolicyBatch::*column,
                   const ReferencePolicy& policy) {
  const auto set = [&] {
    for (PolicyUpdate& update : updates)
      for (PolicyBatch& batch : update.batches)
        batch.*column =
            policy_log_probs(*policy.model, policy.prompt ? batch.of_reference() : batch,
                             config.sampling.temperature, policy.adapters)
                .logprob.value();
  };
  within_memory(learner, updates, config,
                [&] { on_all_ranks(comm, [&] { with_adapters(learner, policy, set); }); });
}

// The reference as the teacher of a micro batch; nullopt without a divergence from one.
std::optional<HeadTeacher> teacher_of(Learner& learner, const PolicyBatch& batch,
                                      const GrpoConfig& config, const ReferencePolicy& reference) {
  if (!config.distills()) return {};
  COHORT_CHECK(reference.model != nullptr, "[grpo_step] a divergence needs a reference");
  HeadTeacher out{.desc = config.divergence_desc()};
  with_adapters(learner, reference, [&] {
    const Transformer& model = *reference.model;
    out.x = model
                .hidden_at_targets(batch.of_reference(),
                                   {.mode = Mode::kEval, .adapters = reference.adapters})
                .value();
    out.w = model.head().weight.value();
    out.bias = model.head().bias.value();
  });
  return out;
}

// The log of the ratio of each target of this rank in the first `limit` micro batches of each
// update: its log-prob less the recorded one. Within memory.
std::vector<double> log_ratios(Communicator& comm, Learner& learner,
                               std::span<PolicyUpdate> updates, const GrpoSections& config,
                               size_t limit) {
  std::vector<double> out;
  const auto measure = [&] {
    NoGradGuard no_grad;
    out.clear();
    for (const PolicyUpdate& update : updates)
      for (size_t b = 0; b < std::min(limit, update.batches.size()); ++b) {
        const PolicyBatch& batch = update.batches[b];
        const auto now = policy_log_probs(learner.model(), batch, config.sampling.temperature)
                             .logprob.value()
                             .to_vector<double>(),
                   old = batch.old_logprob.to_vector<double>();
        std::ranges::transform(now, old, std::back_inserter(out), std::minus<>());
      }
  };
  within_memory(learner, updates, config, [&] { on_all_ranks(comm, measure); });
  return out;
}

// Throws Error on all ranks if reward programs have failed for too many completions.
void check_failed(Communicator& comm, const RewardSet& rewards, const RewardSet::Scores& scores,
                  const GrpoSections& config) {
  std::vector<double> counts;
  for (const auto& count : scores.failed) counts.push_back(static_cast<double>(count.value_or(0)));
  counts = reduce_over_ranks(comm, counts);
  double failed = 0;
  std::string error;
  for (size_t k = 0; k < counts.size(); ++k) {
    if (counts[k] == 0) continue;
    failed += counts[k];
    error = str("reward ", rewards.names()[k], ": no value for ", counts[k],
                " completions; the first: ", first_text(comm, scores.first_error[k]));
    if (comm.rank() == 0) logging::warn(error, "; the step cannot be reproduced");
  }
  if (failed <= kMaxFailedFraction * static_cast<double>(config.batch.completions_per_step()))
    return;
  throw Error(str(error, "; hint: the programs' own messages are in workers.log of the run"));
}

// The sequence of a completion with a reward.
PolicySequence sequence_of(const ScoredCompletion& c, double advantage, double least_entropy,
                           const std::vector<int32_t>& reference_prompt,
                           const GrpoSections& config) {
  PolicySequence out = policy_sequence(c, advantage);
  auto next = c.host_advantages.begin();
  for (size_t t = 0; t < c.tokens.size() && next != c.host_advantages.end(); ++t)
    if (c.loss_mask[t]) out.advantage[t] = *next++;
  for (size_t t = 0, turn = 0; t < c.tokens.size() && !c.turn_advantages.empty(); ++t) {
    turn += c.loss_mask[t] && !c.loss_mask[t - 1];
    if (c.loss_mask[t]) out.advantage[t] = c.turn_advantages[turn - 1];
  }
  // The prompt's last token is not part of the shared prefix: its target is the completion's first.
  if (config.batch.num_generations > 1) {
    out.group = c.group;
    out.prefix = c.prompt_length - 1;
  }
  if (count_loss_tokens(c, config.grpo) == 0) out.loss_mask.assign(out.tokens.size(), 0);
  if (!reference_prompt.empty() && out.num_targets() > 0) out.reference_prompt = reference_prompt;
  if (config.grpo.needs_sampling_log_probs()) out.sampling_logprob = c.sampling_logprobs;
  if (config.grpo.top_entropy_quantile < 1)
    for (const double entropy : c.entropies) out.surrogate_mask.push_back(entropy >= least_entropy);
  if (!config.grpo.rejection.empty()) {
    out.surrogate_mask.resize(out.tokens.size(), 1);
    reject_tokens(config.grpo.rejection, out.old_logprob, c.sampling_logprobs, c.loss_mask,
                  out.surrogate_mask);
  }
  return out;
}

// True if a sequence can change the update. Without a KL term, an entropy bonus and a move from the
// sampler or from lp_old that is penalised, a zero advantage gives an exactly zero gradient.
bool has_gradient(const PolicySequence& sequence, const GrpoConfig& config) {
  return sequence.num_targets() > 0 &&
         (config.needs_all_completions() ||
          (config.old_kl_coef > 0 && sequence.sampling_logprob != sequence.old_logprob) ||
          (config.updates_per_step() > 1 &&
           std::ranges::any_of(sequence.old_distance_coef, std::identity())) ||
          std::ranges::any_of(sequence.advantage, std::identity()));
}

// Accepts an update whose ratios are exactly 1.
bool has_exact_ratios(const kernels::PolicyLossStats& stats) {
  return stats.max_ratio_deviation == 0;
}

// One optimiser update on a minibatch. `on_policy`: the weights are those that sampled. `accept`:
// see Learner::update().
Learner::Update update_on(Learner& learner, PolicyUpdate& minibatch, const GrpoSections& config,
                          const ReferencePolicy& reference, bool on_policy, double learning_rate,
                          const Learner::Accept& accept) {
  const Transformer& model = learner.model();
  const auto loss_of = [&](int64_t i) {
    const PolicyBatch& batch = minibatch.batches[static_cast<size_t>(i)];
    // Before the policy's activations are there.
    std::optional<HeadTeacher> teacher = teacher_of(learner, batch, config.grpo, reference);
    return grpo_loss(model.hidden_at_targets(batch, {.mode = Mode::kEval}), model.head(), batch,
                     config.grpo, config.sampling.temperature, on_policy, std::move(teacher));
  };
  Learner::Update out;
  within_memory(learner, {&minibatch, 1}, config, [&] {
    out = learner.update(std::ssize(minibatch.batches), loss_of, learning_rate, accept,
                         lanes_of(minibatch.batches));
  });
  return out;
}

// Seconds of a step on this rank.
struct StepTimes {
  double sampling = 0, rewards = 0;
};

// Samples and scores completions of this rank's prompts, whose indices address the random numbers.
// Adds to `counts` those of its scores.
std::vector<Group> sample_and_score(const GrpoStep& in, std::vector<Example> prompts,
                                    const std::vector<int64_t>& indices, StepTimes& times,
                                    std::map<std::string, int64_t>& counts) {
  const bool has_scores = in.journal != nullptr && in.journal->has_scores();
  std::vector<Trajectory> completions;
  RewardSet::Scores scores;
  Stopwatch clock;
  begin_activity("sampling completions");
  const auto submit = [&](const Example& example, const Trajectory& completion) {
    if (!has_scores) in.rewards.submit(example, completion, in.step);
  };
  const SampleAddress address{.seed = in.config.seed, .step = in.step, .prompt_indices = indices};
  on_all_ranks(in.comm, [&] {
    const int64_t count = in.config.batch.num_generations;
    prompts = in.sampler.begin(prompts, count, address);
    completions = in.sampler.sample(prompts, count, address, {.on_finished = submit});
  });
  times.sampling += clock.lap("sampling");
  begin_activity("waiting for rewards");
  if (!has_scores) {
    scores = in.rewards.score(prompts, completions, in.step);
    check_failed(in.comm, in.rewards, scores, in.config);
  }
  for (const auto& [name, count] : scores.counts) counts[name] += count;
  std::vector<Group> out = group_completions(prompts, std::move(completions), scores);
  if (in.journal != nullptr) in.journal->add(out);
  times.rewards += clock.lap("rewards");
  return out;
}

// Gives a group the completions of another round, at its position in the step.
void replace(Group& group, Group by) {
  by.index = group.index;
  int64_t index = by.index * std::ssize(by.completions);
  for (ScoredCompletion& c : by.completions) {
    c.group = by.index;
    c.index = index++;
  }
  group = std::move(by);
}

// Samples and scores the groups of a step. Then, up to dynamic_sampling_rounds times, replaces
// those without a signal by groups of new prompts. Which they are is known to all ranks, so that
// the same prompts come to the same positions in the step on any number of ranks: the k-th of a
// round, by position, has the address round * prompts_per_step + k. Returns the rewards of the
// step.
std::vector<double> sample_groups(const GrpoStep& in, GrpoStepResult& out, StepTimes& times) {
  const int64_t count = in.config.batch.prompts_per_step;
  const auto size = static_cast<size_t>(in.config.batch.num_generations);
  ScoredRollouts& rollouts = out.rollouts;
  for (const int64_t index : shard_prompts(in.comm, in.config, in.step))
    rollouts.groups.push_back({.index = index});
  // Position of each group's new prompt among those of the round; -1: the group is kept.
  std::vector<int64_t> drawn(static_cast<size_t>(count));
  std::iota(drawn.begin(), drawn.end(), 0);
  for (int64_t num_drawn = count;; ++rollouts.dynamic_sampling_rounds) {
    // This rank's groups that get other completions, and the positions of their prompts.
    std::vector<Group*> replaced;
    std::vector<int64_t> positions, addresses;
    for (Group& group : rollouts.groups) {
      const int64_t position = drawn[static_cast<size_t>(group.index)];
      if (position < 0) continue;
      replaced.push_back(&group);
      positions.push_back(position);
      addresses.push_back(rollouts.dynamic_sampling_rounds * count + position);
    }
    rollouts.num_prompts += num_drawn;
    std::vector<Group> found = sample_and_score(in, in.next_prompts(num_drawn, positions),
                                                addresses, times, rollouts.counts);
    for (size_t k = 0; k < replaced.size(); ++k) {
      rollouts.replaced.add(*replaced[k], in.config.criterion);
      replace(*replaced[k], std::move(found[k]));
    }
    Stopwatch clock;
    const std::vector<double> rewards =
        gather(in.comm, rollouts.groups, in.config.batch, &ScoredCompletion::reward);
    scatter(rollouts.groups, relative_advantages(in, rollouts.groups, rewards), in.config,
            &ScoredCompletion::reward_advantage);
    for (size_t i = 0; i < drawn.size(); ++i)
      if (drawn[i] >= 0)
        out.outcomes.push_back(
            group_outcome(std::span(rewards).subspan(i * size, size)).value_or(0));
    times.rewards += clock.lap("rewards");
    if (rollouts.dynamic_sampling_rounds == in.config.grpo.dynamic_sampling_rounds) return rewards;
    std::vector<double> signal(drawn.size());
    for (const Group& group : rollouts.groups)
      signal[static_cast<size_t>(group.index)] = has_signal(group, in.config.grpo);
    signal = reduce_over_ranks(in.comm, signal);
    num_drawn = 0;
    for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = signal[i] > 0 ? -1 : num_drawn++;
    if (num_drawn == 0) return rewards;
  }
}

// The KL to the reference of each completion of the step, by its index, over all ranks: the sum
// over its tokens in the loss mask.
std::vector<double> kl_of_completions(Communicator& comm, std::span<const PolicyUpdate> updates,
                                      const GrpoSections& config) {
  std::vector<double> kl(static_cast<size_t>(config.batch.completions_per_step()));
  for (const PolicyUpdate& update : updates)
    for (const PolicySequence& s : update.sequences)
      for (size_t t = 1; t < s.tokens.size(); ++t)
        if (s.loss_mask[t])
          kl[static_cast<size_t>(s.index)] +=
              kernels::kl_estimate(config.grpo.kl_estimator, s.ref_logprob[t] - s.old_logprob[t])
                  .value;
  return reduce_over_ranks(comm, kl);
}

}  // namespace

std::vector<int64_t> shard_prompts(const Communicator& comm, const GrpoSections& config,
                                   int64_t step) {
  const int64_t count = config.batch.prompts_per_step, parts = config.grpo.num_minibatches;
  std::vector<int64_t> out;
  for (int64_t m = 0; m < parts; ++m) {
    const int64_t begin = count * m / parts, end = count * (m + 1) / parts;
    const RankShard range = shard_of(end - begin, comm.rank(), comm.size(), step * parts + m);
    for (int64_t i = range.begin; i < range.end; ++i) out.push_back(begin + i);
  }
  return out;
}

double next_beta(const GrpoConfig& config, double kl, int64_t completions) {
  if (std::isnan(kl)) return config.beta;
  const double error = std::clamp(kl / *config.kl_target - 1, -0.2, 0.2);
  const double share = static_cast<double>(completions) / static_cast<double>(config.kl_horizon);
  return std::clamp(config.beta * (1 + error * share), 1e-30, 1e30);
}

void mix_weights(std::span<const Tensor> reference, std::span<const Tensor> policy, double alpha) {
  constexpr int64_t kPiece = 1 << 22;  // elements, which bounds the memory for sums
  COHORT_CHECK(reference.size() == policy.size(), "[mix_weights] expected ", reference.size(),
               " tensors, got ", policy.size());
  if (reference.empty()) return;
  const Tensor sums =
      Tensor::empty({kPiece}, accumulate_dtype(reference[0].dtype()), reference[0].device());
  for (size_t i = 0; i < reference.size(); ++i) {
    COHORT_CHECK(reference[i].shape() == policy[i].shape(), "[mix_weights] tensor ", i, ": ",
                 policy[i].str(), " into ", reference[i].str());
    const int64_t count = reference[i].numel();
    const Tensor old = reference[i].reshape({count}), now = policy[i].reshape({count});
    for (int64_t begin = 0; begin < count; begin += kPiece) {
      const int64_t length = std::min(kPiece, count - begin);
      Tensor sum = sums.narrow(0, 0, length), mixed = old.narrow(0, begin, length);
      kernels::scale({sum, mixed, 1 - alpha});
      kernels::scale({sum, now.narrow(0, begin, length), alpha, kernels::Grad::kAccumulate});
      kernels::scale({mixed, sum, 1});  // rounds
    }
  }
}

GrpoStepResult grpo_step(const GrpoStep& in) {
  const GrpoSections& config = in.config;
  GrpoStepResult out;
  std::vector<Group>& groups = out.rollouts.groups;
  StepTimes times;
  in.learner.check_weights();
  in.sampler.engine().reset_stats();
  if (in.journal != nullptr) in.journal->begin(in);
  std::vector<double> rewards = sample_groups(in, out, times);
  Stopwatch clock;
  // Sets the advantages; returns those of the update, which may be shuffled.
  const auto set_advantages = [&] {
    std::vector<double> all = step_advantages(in, groups, rewards);
    scatter(groups, all, config, &ScoredCompletion::advantage);
    if (config.grpo.shuffle_advantages) shuffle_advantages(all, config.seed, in.step);
    return all;
  };
  std::vector<double> advantages = set_advantages();
  out.rewarded_count =
      std::ranges::count_if(rewards, [](double reward) { return !std::isnan(reward); });
  times.rewards += clock.lap("rewards");
  begin_activity("updating the weights");
  UpdateSums updates;
  double packing_time = 0;
  const UpdateContext context{in.step, in.reference};
  const bool updates_weights = in.journal == nullptr || in.journal->updates_weights();
  if (out.rewarded_count > 0 && updates_weights) {
    std::vector<PolicyUpdate> minibatches =
        pack_minibatches(in.comm, in.learner, groups, advantages, config, context);
    packing_time = clock.lap("packing");
    if (in.reference.model != nullptr && !config.grpo.distills())
      set_log_probs(in.comm, in.learner, minibatches, config, &PolicyBatch::ref_logprob,
                    in.reference);
    if (config.grpo.penalizes_rewards()) {
      for (PolicyUpdate& update : minibatches) update.unpack();
      const std::vector<double> kl = kl_of_completions(in.comm, minibatches, config);
      for (size_t i = 0; i < kl.size(); ++i) rewards[i] -= config.grpo.beta * kl[i];
      advantages = set_advantages();
      for (PolicyUpdate& update : minibatches)
        for (PolicySequence& s : update.sequences)
          std::ranges::fill(s.advantage, advantages[static_cast<size_t>(s.index)]);
    }
    updates = update_policy(in.comm, in.learner, minibatches, config, in.learning_rate, context);
  }
  const double update_time = clock.lap("update");
  if (in.journal != nullptr) in.journal->end(in, groups);
  MetricSums sums =
      grpo_metrics(out.rollouts, in.rewards.names(), updates, config, in.learning_rate);
  if (in.sampler.dialogue().environment != nullptr) add_dialogue_metrics(sums, out.rollouts);
  add_rollout_metrics(sums, in.sampler.engine(), times.sampling);
  sums.add_local("time/sampling", times.sampling);
  sums.add_local("time/rewards", times.rewards);
  sums.add_local("time/packing", packing_time);
  sums.add_local("time/update", update_time);
  const double tokens = out.rollouts.count().tokens - out.rollouts.replaced.tokens;
  sums.add_sum("update/tokens_per_second", updates.made > 0 ? tokens / update_time : std::nan(""));
  out.metrics = sums.reduce(in.comm);
  return out;
}

void shuffle_advantages(std::span<double> advantages, uint64_t seed, int64_t step) {
  Rng rng(seed, rng_stream(kAblationPurpose, static_cast<uint64_t>(step)));
  for (auto i = std::ssize(advantages) - 1; i > 0; --i)
    std::swap(advantages[static_cast<size_t>(i)],
              advantages[static_cast<size_t>(rng.below(i + 1))]);
}

void PolicyUpdate::pack(int64_t tokens, const Transformer& model) {
  if (desc.micro_batch_tokens == tokens) return;
  unpack();  // some log-probs may have been recomputed
  PackPolicyDesc packed = desc;
  packed.micro_batch_tokens = tokens;
  Minibatch on_host = pack_policy(sequences, packed);
  for (PolicyBatch& batch : on_host) batch = to_device(batch, model);
  batches = std::move(on_host);
  desc = packed;
}

void PolicyUpdate::unpack() {
  unpack_log_probs(batches, sequences);
  batches.clear();
  desc.micro_batch_tokens = 0;
}

std::vector<PolicyUpdate> pack_minibatches(Communicator& comm, Learner& learner,
                                           std::span<const Group> groups,
                                           std::span<const double> advantages,
                                           const GrpoSections& config,
                                           const UpdateContext& context) {
  const int64_t parts = config.grpo.num_minibatches;
  const double least_entropy =
      config.grpo.top_entropy_quantile < 1 ? entropy_threshold(comm, groups, config) : 0;
  std::vector<PolicyUpdate> out;
  auto group = groups.begin();
  for (int64_t m = 0; m < parts; ++m) {
    std::vector<PolicySequence> sequences;
    const int64_t end = config.batch.prompts_per_step * (m + 1) / parts;  // prompts of the step
    for (; group != groups.end() && group->index < end; ++group) {
      std::vector<int32_t> prompt;
      if (context.reference.prompt) prompt = context.reference.prompt(group->example);
      for (const ScoredCompletion& c : group->completions)
        if (!std::isnan(c.reward))
          sequences.push_back(sequence_of(c, advantages[static_cast<size_t>(c.index)],
                                          least_entropy, prompt, config));
    }
    StepTotals totals = count_totals(sequences);
    reduce_in_place(comm, {&totals.sequences, &totals.tokens});
    // No update at all: even with a zero gradient AdamW's decay and momentum would move the
    // weights.
    if (totals.tokens == 0) continue;
    if (config.grpo.covariance != Covariance::kNone)
      limit_covariance(comm, sequences, config, context.step * parts + m);
    double masked = 0, local_tokens = 0;
    for (const PolicySequence& s : sequences)
      for (size_t t = 1; t < s.tokens.size(); ++t) {
        local_tokens += s.loss_mask[t];
        masked += s.loss_mask[t] && !s.surrogate_mask.empty() && !s.surrogate_mask[t];
      }
    std::erase_if(sequences, [&](const auto& s) { return !has_gradient(s, config.grpo); });
    const RankLoad load = balance(comm, learner.model(), sequences,
                                  config.batch.completions_per_step(), learner.reduction_lanes());
    out.push_back({.sequences = std::move(sequences),
                   .load = load,
                   .tokens = local_tokens,
                   .masked = masked,
                   .desc = {.loss_type = config.grpo.loss_type,
                            .totals = totals,
                            .max_completion_length = config.sampling.max_completion_length,
                            .dtype = accumulate_dtype(learner.model().dtype())},
                   .batches = {}});
  }
  within_memory(learner, out, config, [] {});  // packs them
  return out;
}

UpdateSums update_policy(Communicator& comm, Learner& learner,
                         std::vector<PolicyUpdate>& minibatches, const GrpoSections& config,
                         double learning_rate, const UpdateContext& context) {
  UpdateSums sums;
  for (const PolicyUpdate& update : minibatches) {
    sums.tokens += update.tokens;
    sums.masked += update.masked;
  }
  const auto correct_log_probs = [&](double deviation) {
    reduce_in_place(comm, {&deviation}, Reduce::kMax);
    if (deviation == 0) return;
    sums.ratio_deviation = deviation;
    set_log_probs(comm, learner, minibatches, config, &PolicyBatch::old_logprob,
                  {&learner.model()});
    if (comm.rank() == 0)
      logging::warn(
          "the sampler's log-probs differ from the trainer's: max |ratio - 1| = ", deviation,
          " before the first update, which uses log-probs recomputed by the ", "trainer instead");
  };
  // The ratios of the first minibatch are known with its loss.
  const int64_t every = config.grpo.ratio_check_every;
  if (every > 0 && context.step % every == 0 && minibatches.size() > 1) {
    double deviation = 0;
    for (const double log_ratio :
         log_ratios(comm, learner, std::span(minibatches).subspan(1), config, SIZE_MAX)) {
      const double from_one = std::abs(std::expm1(log_ratio));
      deviation = std::isnan(from_one) ? HUGE_VAL : std::max(deviation, from_one);
    }
    correct_log_probs(deviation);
  }
  for (int64_t iteration = 0; iteration < config.grpo.num_iterations; ++iteration)
    for (PolicyUpdate& minibatch : minibatches) {
      const bool on_policy = iteration == 0 && &minibatch == &minibatches.front();
      const auto update = [&](const Learner::Accept& accept) {
        return update_on(learner, minibatch, config, context.reference, on_policy, learning_rate,
                         accept);
      };
      Learner::Update done =
          update(on_policy && sums.ratio_deviation == 0 ? has_exact_ratios : nullptr);
      if (done.refused) {
        correct_log_probs(done.stats.max_ratio_deviation);
        done = update(nullptr);
      }
      sums.add(done);
      sums.load.add(minibatch.load);
    }
  const int64_t kl_every = config.grpo.kl_check_every;
  if (kl_every > 0 && (context.step + 1) % kl_every == 0 && !minibatches.empty())
    for (const double log_ratio :
         log_ratios(comm, learner, std::span(minibatches).first(1), config, 1))
      sums.step_kl.add(kernels::k3(log_ratio).value);
  return sums;
}

}  // namespace cohort
