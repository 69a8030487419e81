// GRPO: sample completions, score them, compare each with its group, update. Sampler and trainer
// share weights and kernels, so the recorded log-probs are the old policy's exactly and the first
// minibatch's ratio is 1.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/log.h"
#include "job/stage.h"
#include "trainers/across_ranks.h"
#include "trainers/grpo_monitor.h"
#include "trainers/grpo_step.h"
#include "trainers/sampling.h"

namespace cohort {
namespace {

// Steps in a row without any reward that end a run.
constexpr int64_t kMaxUnrewardedSteps = 10;

void warn_of_few_prompts(Stage& stage) {
  const TrainConfig& config = stage.config();
  const int64_t smallest = config.batch.prompts_per_step / config.grpo.num_minibatches;
  if (smallest < stage.comm().size())
    logging::warn("prompts_per_step: a minibatch of ", smallest, " prompts leaves ",
                  stage.comm().size() - smallest, " of ", stage.comm().size(),
                  " ranks without work; hint: more prompts_per_step or fewer ",
                  config.grpo.num_minibatches > 1 ? "num_minibatches" : "ranks");
}

// Takes the next `count` examples of the order; returns those at `indices`.
std::vector<Example> next_prompts(Stage& stage, OnlineOrder& order, int64_t count,
                                  std::span<const int64_t> indices) {
  std::vector<int64_t> examples;
  for (int64_t i = 0; i < count; ++i) examples.push_back(order.next());
  std::vector<Example> prompts;
  for (const int64_t index : indices)
    prompts.push_back(stage.data().train->get(examples[static_cast<size_t>(index)]));
  return prompts;
}

// The order of the training problems, where the stage left off.
OnlineOrder order_of(Stage& stage) {
  const DataConfig& data = stage.config().data;
  const TrainState& state = stage.state();
  MixedOrder order = make_order(stage.config(), stage.data(), state.planned_steps);
  order.seek(state.data_position);
  const int64_t patience = data.curriculum == Curriculum::kOnline ? data.curriculum_patience : 0;
  return with_location(state.curriculum, "curriculum of the checkpoint's state.json", [&] {
    return OnlineOrder(std::move(order), stage.data().train->size(), patience, state.curriculum);
  });
}

// Records the outcomes of a step and where the order stands after it.
void record_outcomes(Stage& stage, OnlineOrder& order, GrpoStepResult& result) {
  stage.state().data_position = order.position();
  if (stage.config().data.curriculum != Curriculum::kOnline) return;
  order.record(result.outcomes);
  stage.state().curriculum = order.state();
  result.metrics.add("data/skipped", static_cast<double>(order.take_skipped()));
}

// Beta of the next step, where the stage left off unless the configured one has changed.
double beta_of(Stage& stage) {
  const GrpoConfig& grpo = stage.config().grpo;
  TrainState& state = stage.state();
  if (!grpo.kl_target || state.start_beta != grpo.beta) state.beta = 0;
  return state.beta > 0 ? state.beta : grpo.beta;
}

// With kl_target, logs the beta of the step and records that of the next one.
void adapt_beta(Stage& stage, GrpoConfig& present, Metrics& metrics) {
  if (!present.kl_target) return;
  metrics.add("beta", present.beta);
  present.beta = next_beta(present, metrics.at("kl"), stage.config().batch.completions_per_step());
  stage.state().beta = present.beta;
  stage.state().start_beta = stage.config().grpo.beta;
}

// With entropy_target, the entropy_coef of the next step: 0 above the target.
double entropy_coef_of(Stage& stage) {
  const GrpoConfig& configured = stage.config().grpo;
  const TrainState& state = stage.state();
  if (!configured.entropy_target || !state.entropy) return configured.entropy_coef;
  return *state.entropy <= *configured.entropy_target ? state.entropy_coef : 0;
}

// Adapts it after a step (TRL's adaptive entropy; Skywork-OR1, He et al. 2025, arXiv 2505.22312).
void adapt_entropy(Stage& stage, GrpoConfig& present, Metrics& metrics) {
  if (!present.entropy_target) {
    stage.state().entropy.reset();
    return;
  }
  constexpr double kStep = 0.005;
  TrainState& state = stage.state();
  metrics.add("entropy_coef", present.entropy_coef);
  const double entropy = metrics.at("entropy");
  if (std::isnan(entropy)) return;
  if (!state.entropy) state.entropy_coef = stage.config().grpo.entropy_coef;
  state.entropy = entropy;
  state.entropy_coef = std::clamp(
      state.entropy_coef + (entropy <= *present.entropy_target ? kStep : -kStep), 0.0, 1.0);
  present.entropy_coef = entropy_coef_of(stage);
}

// Throws InputError if the first step or the last kMaxUnrewardedSteps steps had no reward.
void check_rewarded(Stage& stage, int64_t rewarded_count) {
  int64_t& unrewarded = stage.state().unrewarded_steps;
  unrewarded = rewarded_count > 0 ? 0 : unrewarded + 1;
  if (unrewarded == 0) return;
  const std::string message =
      str("rewards: none applies to any of the ", stage.config().batch.completions_per_step(),
          " completions of step ", stage.step() + 1);
  if (stage.step() == 0 || unrewarded >= kMaxUnrewardedSteps)
    throw InputError(str(message,
                         unrewarded > 1 ? str(", the last of ", unrewarded, " in a row") : "",
                         "; hint: numeric needs a number as the answer, countdown the fields "
                         "numbers and target, code tests; a program's answer may be None"));
  if (stage.is_main()) logging::warn(message, "; the step is skipped");
}

// Logs how many dialogues the environment has failed in the step, and the first error. Throws
// InputError if it has failed all of the first step or of kMaxUnrewardedSteps in a row, or answered
// no turn of them.
void check_environment(Stage& stage, const GrpoStepResult& result) {
  if (stage.dialogue().environment == nullptr) return;
  double answered = 0, ended = 0;
  for (const Group& group : result.rollouts.groups)
    for (const ScoredCompletion& c : group.completions) {
      ended += c.environment_error.empty();
      answered += c.num_turns() > 1 || !c.truncated() || c.stop_reason == StopReason::kTurns;
    }
  const std::string first = first_text(stage.comm(), result.rollouts.count().first_error);
  reduce_in_place(stage.comm(), {&answered, &ended});
  int64_t& unanswered = stage.state().unanswered_steps;
  unanswered = first.empty() || (answered > 0 && ended > 0) ? 0 : unanswered + 1;
  if (first.empty()) return;
  const std::string message =
      str("step ", stage.step() + 1, ": the environment has failed ",
          result.metrics.at("environment/failed"), " of ",
          std::ssize(result.outcomes) * stage.config().batch.num_generations,
          " dialogues, which take no part in the update; the first: ", first);
  if (unanswered >= (stage.step() == 0 ? 1 : kMaxUnrewardedSteps))
    throw InputError(
        str(message, answered > 0 ? "" : "; it has answered no turn",
            unanswered > 1 ? str("; so it was in ", unanswered, " steps in a row") : "",
            "; hint: a program's own messages are in workers.log of the run"));
  stage.warn(message);
}

// The criterion of solved problems: eval.correct, where it is given or several rewards need it.
SuccessCriterion criterion_of(Stage& stage, const std::vector<std::string>& rewards) {
  const CorrectConfig& config = stage.config().eval.correct;
  const auto found = std::ranges::find(rewards, stage.correct().name);
  const bool given = !config.reward.empty() || config.threshold != CorrectConfig().threshold;
  if (found == rewards.end() || (!given && rewards.size() == 1)) return {};
  return {found - rewards.begin(), stage.correct().threshold};
}

// The line of completions.jsonl for a completion. `sample`: its position in the group.
Json completion_line(int64_t step, const Group& group, size_t sample,
                     const std::vector<std::string>& rewards) {
  const ScoredCompletion& c = group.completions[sample];
  Moments group_reward;
  for (const ScoredCompletion& each : group.completions) group_reward.add(each.reward);
  const double logprob = std::accumulate(c.logprobs.begin(), c.logprobs.end(), 0.0);
  Json each = Json(Json::Object{}), line;
  for (size_t k = 0; k < rewards.size(); ++k) each.set(rewards[k], c.rewards[k]);
  line.set("step", step)
      .set("prompt", group.example.prompt)
      .set("completion", c.text)
      .set("answer", group.example.answer)
      .set("reward", c.reward)
      .set("rewards", std::move(each))
      .set("advantage", c.advantage)
      .set("truncated", c.truncated())
      .set("stop_reason", stop_reason_name(c.stop_reason))
      .set("length", c.completion_length())
      .set("mean_logprob", logprob / static_cast<double>(c.completion_length()))
      .set("group", group.index)
      .set("sample", static_cast<int64_t>(sample))
      .set("group_reward", group_reward.mean());
  if (!c.turn_advantages.empty())
    line.set("turn_advantages", Json::Array(c.turn_advantages.begin(), c.turn_advantages.end()));
  if (!c.transcript.is_null()) line.set("transcript", c.transcript);
  if (!c.environment_error.empty()) line.set("error", c.environment_error);
  return line;
}

// Logs completions of the step over all ranks: the first of each prompt, in the order of the
// prompts, then the second of each, and so on.
void log_completions(Stage& stage, std::span<const Group> groups, const RewardSet& rewards) {
  const TrainConfig& config = stage.config();
  std::vector<std::string> lines(
      static_cast<size_t>(std::min(config.log_completions, config.batch.completions_per_step())));
  const auto prompts = static_cast<size_t>(config.batch.prompts_per_step);
  for (const Group& group : groups)
    for (size_t sample = 0; sample < group.completions.size(); ++sample)
      if (const size_t at = sample * prompts + static_cast<size_t>(group.index); at < lines.size())
        lines[at] = completion_line(stage.step() + 1, group, sample, rewards.names()).dump();
  for (const std::string& line : gather_texts(stage.comm(), lines)) stage.log_completion(line);
}

}  // namespace

StageEnd train_grpo(Stage& stage) {
  const TrainConfig& config = stage.config();
  const RewardSet rewards(config.rewards, stage.data().task, stage.correct().command);
  DialogueOptions dialogue = stage.dialogue();
  if (stage.journal() != nullptr) stage.journal()->attach(dialogue);
  const Sampler sampler(stage.engine(), *stage.data().tokenizer,
                        sampling_for(config.sampling, config.data, *stage.data().tokenizer),
                        dialogue);
  OnlineOrder order = order_of(stage);
  const Json& saved = stage.state().monitor;
  GrpoMonitor monitor = with_location(saved, "monitor of the checkpoint's state.json",
                                      [&] { return GrpoMonitor(config.grpo, saved); });
  if (stage.is_main() && !stage.finished()) warn_of_few_prompts(stage);

  GrpoConfig grpo = config.grpo;  // with the present beta
  grpo.beta = beta_of(stage);
  grpo.entropy_coef = entropy_coef_of(stage);
  std::string cache;
  while (stage.more()) {
    GrpoStepResult result = grpo_step(
        {.comm = stage.comm(),
         .config = {grpo, config.batch, config.sampling, static_cast<uint64_t>(config.seed),
                    criterion_of(stage, rewards.names())},
         .sampler = sampler,
         .rewards = rewards,
         .learner = stage.learner(),
         .reference = stage.reference(),
         .next_prompts =
             [&](int64_t count, std::span<const int64_t> positions) {
               return next_prompts(stage, order, count, positions);
             },
         .step = stage.step(),
         .learning_rate = stage.learning_rate(),
         .journal = stage.journal()});
    if (const std::string now = stage.engine().cache_summary(); now != cache) {
      if (stage.is_main()) logging::info("rollouts: ", now);
      cache = now;
    }
    check_environment(stage, result);
    check_rewarded(stage, result.rewarded_count);
    record_outcomes(stage, order, result);
    adapt_beta(stage, grpo, result.metrics);
    adapt_entropy(stage, grpo, result.metrics);
    log_completions(stage, result.rollouts.groups, rewards);
    const Json& last = stage.state().report.get_or_null("last");  // evaluation
    const auto number = [&](const char* key) { return number_or_nan(last.get_or_null(key)); };
    for (const std::string& warning : monitor.observe(
             result.metrics, {last_score(stage.state().report), number("stderr"), number("step")}))
      stage.warn(str("step ", stage.step() + 1, ": ", warning));
    stage.state().monitor = monitor.state();
    stage.end_step(result.metrics);
  }
  return stage.finish();
}

}  // namespace cohort
