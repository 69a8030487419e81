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
#include "text/json.h"
#include "text/utf8.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

// The purpose of rng_stream() for shuffled advantages.
constexpr uint64_t kAblationPurpose = 7;
// Likewise for Clip-Cov, with the update and the token.
constexpr uint64_t kCovariancePurpose = 13;

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

// A number of each completion of the step, by its index, over all ranks.
std::vector<double> gather(Communicator& comm, std::span<const Group> groups,
                           const BatchConfig& batch,
                           const std::function<double(const ScoredCompletion&)>& number) {
  std::vector<double> all(static_cast<size_t>(batch.completions_per_step()));
  for (const Group& group : groups)
    for (const ScoredCompletion& c : group.completions)
      all[static_cast<size_t>(c.index)] = number(c);
  return reduce_over_ranks(comm, all);
}

// Likewise the returns of its turns: that of turn k of completion i is at [k * completions + i],
// NaN where it has no such turn.
std::vector<double> gather_returns(const GrpoStep& in, std::span<const Group> groups) {
  double turns = 1;
  for (const Group& group : groups)
    for (const ScoredCompletion& c : group.completions)
      turns = std::max(turns, static_cast<double>(c.num_turns()));
  reduce_in_place(in.comm, {&turns}, Reduce::kMax);
  const auto count = static_cast<size_t>(in.config.batch.completions_per_step());
  std::vector<double> all(static_cast<size_t>(turns) * count);
  for (const Group& group : groups)
    for (const ScoredCompletion& c : group.completions) {
      std::vector<double> returns =
          turn_returns(c, in.rewards.names(), in.rewards.weights(), in.sampler.dialogue().discount);
      returns.resize(static_cast<size_t>(turns), std::nan(""));
      for (size_t k = 0; k < returns.size(); ++k)
        all[k * count + static_cast<size_t>(c.index)] = returns[k];
    }
  return reduce_over_ranks(in.comm, all);
}

// Sets an advantage of each of this rank's completions from such a list. With credit: turn it is
// the mean over the tokens, and turn_advantages are set too.
void scatter(std::span<Group> groups, std::span<const double> all, const GrpoSections& config,
             double ScoredCompletion::*number) {
  const auto count = static_cast<size_t>(config.batch.completions_per_step());
  for (Group& group : groups)
    for (ScoredCompletion& c : group.completions) {
      const auto index = static_cast<size_t>(c.index);
      c.*number = all[index];
      if (config.grpo.credit == Credit::kCompletion) continue;
      c.*number = 0;
      c.turn_advantages.clear();
      for (const int64_t length : c.turn_lengths()) {
        c.turn_advantages.push_back(all[c.turn_advantages.size() * count + index]);
        c.*number += c.turn_advantages.back() * static_cast<double>(length) /
                     static_cast<double>(c.completion_length());
      }
    }
}

// The tokens of each completion of the step that count in the loss.
std::vector<double> gather_loss_tokens(Communicator& comm, std::span<const Group> groups,
                                       const GrpoSections& config) {
  return gather(comm, groups, config.batch, [&](const ScoredCompletion& c) {
    return static_cast<double>(count_loss_tokens(c, config.grpo));
  });
}

// The entropy below which a token of the step has no surrogate (top_entropy_quantile): a quantile
// over the tokens of all ranks that count in the loss. Beyond the 20/80 Rule, Wang et al. 2025.
double entropy_threshold(Communicator& comm, std::span<const Group> groups,
                         const GrpoSections& config) {
  std::vector<size_t> begins{0};
  for (const double count : gather_loss_tokens(comm, groups, config))
    begins.push_back(begins.back() + static_cast<size_t>(count));
  std::vector<double> entropies(begins.back());
  for (const Group& group : groups)
    for (const ScoredCompletion& c : group.completions) {
      size_t at = begins[static_cast<size_t>(c.index)];
      for (size_t t = 0; t < c.tokens.size() && count_loss_tokens(c, config.grpo) > 0; ++t)
        if (c.loss_mask[t]) entropies[at++] = c.entropies[t];
    }
  return quantile(reduce_over_ranks(comm, entropies), 1 - config.grpo.top_entropy_quantile);
}

// The advantages of a step's completions by their rewards alone; with credit: turn, those of
// turns, as gather_returns() has them. `rewards`: the sums.
std::vector<double> relative_advantages(const GrpoStep& in, std::span<const Group> groups,
                                        std::span<const double> rewards) {
  const GrpoConfig& grpo = in.config.grpo;
  const auto advantages_of = [&](std::span<const double> values) {
    if (grpo.baseline != Baseline::kNone)
      return group_advantages(
          values,
          grpo.baseline == Baseline::kGroup ? in.config.batch.num_generations : std::ssize(values),
          grpo.scale_rewards, reward_std(values));
    std::vector<double> out;
    for (const double value : values) out.push_back(std::isnan(value) ? 0 : value);
    return out;
  };
  if (grpo.credit == Credit::kTurn) {
    std::vector<double> out = gather_returns(in, groups);
    for (auto turn = out.begin(); turn != out.end(); turn += std::ssize(rewards))
      std::ranges::copy(advantages_of({turn, rewards.size()}), turn);
    return out;
  }
  if (grpo.multi_objective_aggregation == RewardAggregation::kSumThenNormalize)
    return advantages_of(rewards);
  std::vector<std::vector<double>> each;
  for (size_t k = 0; k < in.rewards.names().size(); ++k)
    each.push_back(advantages_of(
        gather(in.comm, groups, in.config.batch, [k](const auto& c) { return c.rewards[k]; })));
  std::vector<double> out, of_rewards(each.size());
  for (size_t i = 0; i < rewards.size(); ++i) {
    for (size_t k = 0; k < each.size(); ++k) of_rewards[k] = each[k][i];
    out.push_back(weighted_sum(in.rewards.weights(), of_rewards));
  }
  return out;
}

// Sets host_advantages of this rank's completions, and returns the means of all of the step. Rank
// 0 calls the function, with one request for the step, whose lists have an element for each of its
// completions: rewards (the sums, null where none applies), each (by the name of the reward), group (the index of the
// prompt), lengths (sampled tokens), turn_rewards (a list of the rewards of turns), mean_logprob,
// fields (those of the problem). It answers a number to each, or a list of one per sampled token.
std::vector<double> host_advantages(const GrpoStep& in, std::span<Group> groups,
                                    std::span<const double> rewards) {
  const BatchConfig& batch = in.config.batch;
  const auto list = [](std::span<const double> values) {
    return Json::Array(values.begin(), values.end());
  };
  const auto all_of = [&](const auto& number) { return gather(in.comm, groups, batch, number); };
  const std::vector<double> lengths =
      all_of([](const ScoredCompletion& c) { return static_cast<double>(c.completion_length()); });
  Json each = Json::Object{};
  for (size_t k = 0; k < in.rewards.names().size(); ++k)
    each.set(in.rewards.names()[k], list(all_of([k](const auto& c) { return c.rewards[k]; })));
  std::vector<std::string> texts(rewards.size());
  for (const Group& group : groups)
    for (const ScoredCompletion& c : group.completions)
      texts[static_cast<size_t>(c.index)] =
          Json(Json::Array{list(c.turn_rewards), group.example.fields}).dump();
  Json::Array turn_rewards, fields, group;
  for (const std::string& text : gather_texts(in.comm, texts)) {
    group.emplace_back(std::ssize(group) / batch.num_generations);
    const Json::Array both = parse_json(text, "advantage").as_array();
    turn_rewards.push_back(both[0]);
    fields.push_back(both[1]);
  }
  Json request;
  request.set("step", in.step).set("rewards", list(rewards)).set("each", std::move(each));
  Json::Array tokens;
  for (const double length : lengths) tokens.emplace_back(static_cast<int64_t>(length));
  request.set("group", std::move(group)).set("lengths", std::move(tokens));
  request.set("turn_rewards", std::move(turn_rewards)).set("fields", std::move(fields));
  request.set("mean_logprob", list(all_of([](const ScoredCompletion& c) {
                double sum = 0, count = 0;
                for (size_t t = 0; t < c.tokens.size(); ++t)
                  if (c.loss_mask[t]) sum += c.logprobs[t], ++count;
                return sum / count;
              })));
  // One number per completion that has one for all tokens, or one per token.
  std::vector<size_t> begins{0};
  for (const double length : lengths)
    begins.push_back(begins.back() + 1 + static_cast<size_t>(length));
  std::vector<double> flat(begins.back());
  const auto call = [&] {
    if (in.comm.rank() != 0) return;
    const std::string& name = in.config.grpo.advantage;
    const std::vector<Json> answers = (*in.config.grpo.advantage_function)({&request, 1});
    const auto refuse = [&](const auto&... what) {
      throw InputError(str("advantage ", name, ": it returned ", what..., "; hint: a list of ",
                           rewards.size(), " numbers, or lists of one number per sampled token"));
    };
    if (answers.size() != rewards.size()) refuse(answers.size(), " values");
    for (size_t i = 0; i < answers.size(); ++i) {
      const size_t length = begins[i + 1] - begins[i] - 1;
      if (std::isnan(rewards[i]) || length == 0) continue;  // it is not trained on
      std::vector<double> values;
      if (answers[i].is_number()) values.push_back(answers[i].as_double());
      if (answers[i].is_array())
        for (const Json& value : answers[i].as_array())
          values.push_back(value.is_number() ? value.as_double() : std::nan(""));
      if (values.size() != (answers[i].is_array() ? length : 1))
        refuse(excerpt(answers[i].dump()), " for completion ", i, ", which has ", length,
               " sampled tokens");
      const auto is_finite = [](double a) { return std::isfinite(static_cast<float>(a)); };
      if (!std::ranges::all_of(values, is_finite))
        refuse("a number that is not finite for completion ", i);
      flat[begins[i]] = answers[i].is_array();
      values.resize(length, values[0]);
      std::ranges::copy(values, flat.begin() + static_cast<ptrdiff_t>(begins[i]) + 1);
    }
  };
  on_all_ranks(in.comm, call);
  flat = reduce_over_ranks(in.comm, flat);
  std::vector<double> means;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto values = std::span(flat).subspan(begins[i] + 1, begins[i + 1] - begins[i] - 1);
    means.push_back(flat[begins[i]] == 0 ? (values.empty() ? 0 : values[0])
                                         : std::reduce(values.begin(), values.end()) /
                                               static_cast<double>(values.size()));
  }
  for (Group& own : groups)
    for (ScoredCompletion& c : own.completions) {
      const auto i = static_cast<size_t>(c.index);
      c.host_advantages.assign(flat.begin() + static_cast<ptrdiff_t>(begins[i]) + 1,
                               flat.begin() + static_cast<ptrdiff_t>(begins[i + 1]));
    }
  return means;
}

// The advantages of a step's completions.
std::vector<double> step_advantages(const GrpoStep& in, std::span<const Group> groups,
                                    std::span<const double> rewards) {
  const GrpoConfig& grpo = in.config.grpo;
  std::vector<double> out = relative_advantages(in, groups, rewards);
  if (grpo.multi_objective_aggregation == RewardAggregation::kNormalizeThenSum)
    standardize(out, rewards);
  if (grpo.whiten_advantages)
    whiten_advantages(out, gather_loss_tokens(in.comm, groups, in.config));
  if (grpo.advantage_clip)
    for (double& a : out) a = std::clamp(a, -*grpo.advantage_clip, *grpo.advantage_clip);
  return out;
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

// Clip-Cov (Cui et al. 2025, arXiv 2505.22617, as in verl): of the update's tokens of all ranks,
// covariance_clip of them, one at least, lose their surrogate: an addressed draw from those whose
// (A - mean A) (lp_old - mean lp_old) is between 1 and 5. `update`: its number, for the draw.
void clip_covariance(Communicator& comm, std::vector<PolicySequence>& sequences,
                     const GrpoSections& config, int64_t update) {
  const auto for_tokens = [&](const auto& fn) {
    for (PolicySequence& s : sequences)
      for (size_t t = 1; t < s.tokens.size(); ++t)
        if (s.loss_mask[t]) fn(s, t);
  };
  double count = 0, advantage = 0, logprob = 0;
  for_tokens([&](const PolicySequence& s, size_t t) {
    ++count;
    advantage += s.advantage[t];
    logprob += s.old_logprob[t];
  });
  reduce_in_place(comm, {&count, &advantage, &logprob});
  // The draw of each candidate, by the index of its sequence: equal for any number of ranks.
  std::vector<std::vector<double>> draws(static_cast<size_t>(config.batch.completions_per_step()));
  const auto draw_of = [&](const PolicySequence& s, size_t t) {
    Rng rng(config.seed, rng_stream(kCovariancePurpose, static_cast<uint64_t>(update),
                                    static_cast<uint64_t>(s.index) << 32 | t));
    return static_cast<double>(rng.below(int64_t{1} << 52));
  };
  const auto is_candidate = [&](const PolicySequence& s, size_t t) {
    const double covariance =
        (s.advantage[t] - advantage / count) * (s.old_logprob[t] - logprob / count);
    return covariance > 1 && covariance < 5;
  };
  for_tokens([&](const PolicySequence& s, size_t t) {
    if (is_candidate(s, t)) draws[static_cast<size_t>(s.index)].push_back(draw_of(s, t));
  });
  std::vector<double> all;
  for (const std::vector<double>& of : gather_numbers(comm, draws))
    all.insert(all.end(), of.begin(), of.end());
  const auto clipped =
      std::min(all.size(), static_cast<size_t>(std::max(1.0, config.grpo.covariance_clip * count)));
  if (clipped == 0) return;
  std::ranges::nth_element(all, all.begin() + static_cast<ptrdiff_t>(clipped) - 1);
  const double last = all[clipped - 1];
  for_tokens([&](PolicySequence& s, size_t t) {
    if (!is_candidate(s, t) || draw_of(s, t) > last) return;
    s.surrogate_mask.resize(s.tokens.size(), 1);
    s.surrogate_mask[t] = 0;
  });
}

// True if a sequence can change the update. Without a KL term, an entropy bonus and a move from the
// sampler that old_kl_coef penalises, a zero advantage gives an exactly zero gradient.
bool has_gradient(const PolicySequence& sequence, const GrpoConfig& config) {
  return sequence.num_targets() > 0 &&
         (config.needs_all_completions() ||
          (config.old_kl_coef > 0 && sequence.sampling_logprob != sequence.old_logprob) ||
          std::ranges::any_of(sequence.advantage, [](double advantage) { return advantage != 0; }));
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
    out = learner.update(std::ssize(minibatch.batches), loss_of, learning_rate, accept);
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
    std::vector<double> all = config.grpo.advantage_function != nullptr
                                  ? host_advantages(in, groups, rewards)
                                  : step_advantages(in, groups, rewards);
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
    if (config.grpo.covariance_clip > 0)
      clip_covariance(comm, sequences, config, context.step * parts + m);
    std::erase_if(sequences, [&](const auto& s) { return !has_gradient(s, config.grpo); });
    const RankLoad load =
        balance(comm, learner.model(), sequences, config.batch.completions_per_step());
    out.push_back({.sequences = std::move(sequences),
                   .load = load,
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
