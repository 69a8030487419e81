#include "trainers/step_advantages.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "core/rng.h"
#include "text/json.h"
#include "text/utf8.h"
#include "trainers/grpo_step.h"

namespace cohort {
namespace {

// The purpose of rng_stream() for Clip-Cov, with the update and the token.
constexpr uint64_t kCovariancePurpose = 13;

// The returns of the turns of the step's completions, over all ranks: that of turn k of completion
// i is at [k * completions + i], NaN where it has no such turn.
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

// The tokens of each completion of the step that count in the loss.
std::vector<double> gather_loss_tokens(Communicator& comm, std::span<const Group> groups,
                                       const GrpoSections& config) {
  return gather(comm, groups, config.batch, [&](const ScoredCompletion& c) {
    return static_cast<double>(count_loss_tokens(c, config.grpo));
  });
}

// The request of a step to the function of advantages. Its lists have an element for each of the
// completions: rewards (the sums, null where none applies), each (by the name of the reward), group
// (the index of the prompt), lengths (sampled tokens), turn_rewards (a list of the rewards of
// turns), mean_logprob, fields (those of the problem).
Json advantage_request(const GrpoStep& in, std::span<const Group> groups,
                       std::span<const double> rewards, std::span<const double> lengths) {
  const BatchConfig& batch = in.config.batch;
  const auto list = [](std::span<const double> values) {
    return Json::Array(values.begin(), values.end());
  };
  const auto all_of = [&](const auto& number) { return gather(in.comm, groups, batch, number); };
  Json each = Json::Object{};
  for (size_t k = 0; k < in.rewards.names().size(); ++k)
    each.set(in.rewards.names()[k], list(all_of([k](const auto& c) { return c.rewards[k]; })));
  std::vector<std::string> texts(rewards.size());
  for (const Group& group : groups)
    for (const ScoredCompletion& c : group.completions)
      texts[static_cast<size_t>(c.index)] =
          Json(Json::Array{list(c.turn_rewards), group.example.fields}).dump();
  Json::Array turn_rewards, fields, group, tokens;
  for (const std::string& text : gather_texts(in.comm, texts)) {
    group.emplace_back(std::ssize(group) / batch.num_generations);
    const Json::Array both = parse_json(text, "advantage").as_array();
    turn_rewards.push_back(both[0]);
    fields.push_back(both[1]);
  }
  for (const double length : lengths) tokens.emplace_back(static_cast<int64_t>(length));
  Json request;
  request.set("step", in.step).set("rewards", list(rewards)).set("each", std::move(each));
  request.set("group", std::move(group)).set("lengths", std::move(tokens));
  request.set("turn_rewards", std::move(turn_rewards)).set("fields", std::move(fields));
  return request.set("mean_logprob", list(all_of([](const ScoredCompletion& c) {
                       double sum = 0, count = 0;
                       for (size_t t = 0; t < c.tokens.size(); ++t)
                         if (c.loss_mask[t]) sum += c.logprobs[t], ++count;
                       return sum / count;
                     })));
}

// Reads the answers, a number to each completion or a list of one per sampled token, into one list
// per completion. Those without a reward, which are not trained on, keep zeros. Throws InputError.
std::vector<std::vector<double>> read_advantages(const std::string& name,
                                                 std::span<const Json> answers,
                                                 std::span<const double> rewards,
                                                 std::span<const double> lengths) {
  const auto refuse = [&](const auto&... what) {
    throw InputError(str("advantage ", name, ": it returned ", what..., "; hint: a list of ",
                         rewards.size(), " numbers, or lists of one number per sampled token"));
  };
  if (answers.size() != rewards.size()) refuse(answers.size(), " values");
  std::vector<std::vector<double>> out;
  for (size_t i = 0; i < answers.size(); ++i) {
    const auto length = static_cast<size_t>(lengths[i]);
    std::vector<double>& values = out.emplace_back();
    if (!std::isnan(rewards[i]) && answers[i].is_number()) values.push_back(answers[i].as_double());
    if (!std::isnan(rewards[i]) && answers[i].is_array())
      for (const Json& value : answers[i].as_array())
        values.push_back(value.is_number() ? value.as_double() : std::nan(""));
    if (!std::isnan(rewards[i]) && values.size() != (answers[i].is_array() ? length : 1))
      refuse(excerpt(answers[i].dump()), " for completion ", i, ", which has ", length,
             " sampled tokens");
    const auto is_finite = [](double a) { return std::isfinite(static_cast<float>(a)); };
    if (!std::ranges::all_of(values, is_finite))
      refuse("a number that is not finite for completion ", i);
    values.resize(length, values.empty() ? 0 : values[0]);
  }
  return out;
}

// Sets host_advantages of this rank's completions, and returns the means of all of the step. Rank 0
// calls the function.
std::vector<double> host_advantages(const GrpoStep& in, std::span<Group> groups,
                                    std::span<const double> rewards) {
  const std::vector<double> lengths =
      gather(in.comm, groups, in.config.batch,
             [](const ScoredCompletion& c) { return static_cast<double>(c.completion_length()); });
  const Json request = advantage_request(in, groups, rewards, lengths);
  std::vector<std::vector<double>> all(rewards.size());
  on_all_ranks(in.comm, [&] {
    if (in.comm.rank() == 0)
      all = read_advantages(in.config.grpo.advantage,
                            (*in.config.grpo.advantage_function)({&request, 1}), rewards, lengths);
  });
  all = gather_numbers(in.comm, all);
  std::vector<double> means;
  for (const std::vector<double>& of : all) {
    const bool is_constant = std::ranges::adjacent_find(of, std::not_equal_to()) == of.end();
    means.push_back(of.empty() ? 0
                    : is_constant
                        ? of[0]
                        : std::reduce(of.begin(), of.end()) / static_cast<double>(of.size()));
  }
  for (Group& group : groups)
    for (ScoredCompletion& c : group.completions)
      c.host_advantages = all[static_cast<size_t>(c.index)];
  return means;
}

}  // namespace

std::vector<double> gather(Communicator& comm, std::span<const Group> groups,
                           const BatchConfig& batch,
                           const std::function<double(const ScoredCompletion&)>& number) {
  std::vector<double> all(static_cast<size_t>(batch.completions_per_step()));
  for (const Group& group : groups)
    for (const ScoredCompletion& c : group.completions)
      all[static_cast<size_t>(c.index)] = number(c);
  return reduce_over_ranks(comm, all);
}

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

std::vector<double> step_advantages(const GrpoStep& in, std::span<Group> groups,
                                    std::span<const double> rewards) {
  const GrpoConfig& grpo = in.config.grpo;
  if (grpo.advantage_function != nullptr) return host_advantages(in, groups, rewards);
  std::vector<double> out = relative_advantages(in, groups, rewards);
  if (grpo.multi_objective_aggregation == RewardAggregation::kNormalizeThenSum)
    standardize(out, rewards);
  if (grpo.whiten_advantages)
    whiten_advantages(out, gather_loss_tokens(in.comm, groups, in.config));
  if (grpo.advantage_clip)
    for (double& a : out) a = std::clamp(a, -*grpo.advantage_clip, *grpo.advantage_clip);
  return out;
}

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

namespace {

// The number of tokens in the loss over all ranks, and means over them. The sums are those over
// each completion, added by index: equal for any number of ranks.
struct TokenMeans {
  double count = 0, advantage = 0, logprob = 0;
};
TokenMeans token_means(Communicator& comm, std::span<const PolicySequence> sequences,
                       int64_t completions) {
  std::vector<std::vector<double>> sums(static_cast<size_t>(completions));
  for (const PolicySequence& s : sequences)
    for (size_t t = 1; t < s.tokens.size(); ++t) {
      if (!s.loss_mask[t]) continue;
      std::vector<double>& own = sums[static_cast<size_t>(s.index)];
      own.resize(3);
      own[0] += 1;
      own[1] += s.advantage[t];
      own[2] += s.old_logprob[t];
    }
  TokenMeans out;
  for (const std::vector<double>& own : gather_numbers(comm, sums)) {
    if (own.empty()) continue;
    out.count += own[0];
    out.advantage += own[1];
    out.logprob += own[2];
  }
  return {out.count, out.advantage / out.count, out.logprob / out.count};
}

using CandidateKey = std::pair<double, double>;

// The `wanted` least keys of those of all ranks, in any order.
std::vector<CandidateKey> least_keys(Communicator& comm, std::vector<CandidateKey> keys,
                                     size_t wanted) {
  const auto keep = [&] {
    const size_t kept = std::min(keys.size(), wanted);
    std::ranges::nth_element(keys, keys.begin() + static_cast<ptrdiff_t>(kept));
    keys.resize(kept);
  };
  keep();
  std::vector<std::vector<double>> parts(static_cast<size_t>(comm.size()));
  std::vector<double>& own = parts[static_cast<size_t>(comm.rank())];
  for (const auto& [first, second] : keys) own.insert(own.end(), {first, second});
  keys.clear();
  for (const std::vector<double>& part : gather_numbers(comm, parts))
    for (size_t i = 0; i < part.size(); i += 2) keys.emplace_back(part[i], part[i + 1]);
  keep();
  return keys;
}

}  // namespace

void limit_covariance(Communicator& comm, std::vector<PolicySequence>& sequences,
                      const GrpoSections& config, int64_t update) {
  const bool clips = config.grpo.covariance == Covariance::kClip;
  const auto for_tokens = [&](const auto& fn) {
    for (PolicySequence& s : sequences)
      for (size_t t = 1; t < s.tokens.size(); ++t)
        if (s.loss_mask[t]) fn(s, t);
  };
  const TokenMeans means = token_means(comm, sequences, config.batch.completions_per_step());
  // Calls fn(sequence, token, key) for the candidates, of which those with the least keys are
  // taken: the negative covariance of kl, then a draw by the sequence's index.
  const auto for_candidates = [&](const auto& fn) {
    for_tokens([&](PolicySequence& s, size_t t) {
      const double covariance =
          (s.advantage[t] - means.advantage) * (s.old_logprob[t] - means.logprob);
      const bool is_masked = !s.surrogate_mask.empty() && !s.surrogate_mask[t];
      if (is_masked || (clips && !(covariance > 1 && covariance < 5))) return;
      Rng rng(config.seed, rng_stream(kCovariancePurpose, static_cast<uint64_t>(update),
                                      static_cast<uint64_t>(s.index) << 32 | t));
      fn(s, t,
         CandidateKey{clips ? 0 : -covariance, static_cast<double>(rng.below(int64_t{1} << 52))});
    });
  };
  std::vector<CandidateKey> keys;
  for_candidates(
      [&](const PolicySequence&, size_t, const CandidateKey& key) { keys.push_back(key); });
  keys =
      least_keys(comm, std::move(keys),
                 static_cast<size_t>(std::max(1.0, config.grpo.covariance_fraction * means.count)));
  if (keys.empty()) return;
  const CandidateKey last = *std::ranges::max_element(keys);
  for_candidates([&](PolicySequence& s, size_t t, const CandidateKey& key) {
    if (key > last) return;
    s.surrogate_mask.resize(s.tokens.size(), 1);
    s.old_distance_coef.resize(s.tokens.size(), 0);
    if (clips)
      s.surrogate_mask[t] = 0;
    else
      s.old_distance_coef[t] = config.grpo.covariance_kl_coef;
  });
}

}  // namespace cohort
