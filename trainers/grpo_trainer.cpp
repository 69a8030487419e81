// GRPO: sample completions, score them, compare each with its group, update. Sampler and trainer
// share weights and kernels, so the recorded log-probs are the old policy's exactly and the first
// minibatch's ratio is 1.
#include "core/log.h"
#include "data/loader.h"
#include "trainers/grpo_monitor.h"
#include "trainers/grpo_step.h"
#include "trainers/loops.h"

namespace cohort {
namespace {

// Steps in a row without any reward that end a run.
constexpr int64_t kMaxUnrewardedSteps = 10;

void warn_of_settings(Stage& stage) {
  const TrainConfig& config = stage.config();
  if (config.sampling.restricts())
    logging::warn(
        "top_k and top_p restrict sampling only: the update treats samples as if drawn from the "
        "full distribution; cut_probability in metrics.jsonl is what they leave out");
  const int64_t smallest = config.prompts_per_step / config.grpo.num_minibatches;
  if (smallest < stage.comm().size())
    logging::warn("prompts_per_step: a minibatch of ", smallest, " prompts leaves ",
                  stage.comm().size() - smallest, " of ", stage.comm().size(),
                  " ranks without work; hint: more prompts_per_step or fewer num_minibatches");
}

std::vector<Example> next_prompts(Stage& stage, ShuffledOrder& order, const PromptShare& share) {
  std::vector<int64_t> examples;
  for (int64_t i = 0; i < stage.config().prompts_per_step; ++i) examples.push_back(order.next());
  std::vector<Example> prompts;
  for (const int64_t number : share.numbers)
    prompts.push_back(stage.data().train->get(examples[static_cast<size_t>(number)]));
  return prompts;
}

// Does `work` on every rank. Where it meets what is not finite on one of them, all throw.
void on_all_ranks(Communicator& comm, const std::function<void()>& work) {
  std::optional<NonFiniteError> fault;
  try {
    work();
  } catch (const NonFiniteError& e) {
    fault = e;
  }
  double faults = fault ? 1 : 0;
  reduce_in_place(comm, {&faults});
  if (faults == 0) return;
  throw fault ? *fault : NonFiniteError("another rank's logits hold NaN or infinity");
}

// Whether there is something to learn from. Throws InputError if there never was, or not for long.
bool is_rewarded(Stage& stage, const RewardSet::Scores& scores) {
  int64_t& unrewarded = stage.state().unrewarded_steps;
  if (count_rewarded(stage.comm(), scores) > 0) {
    unrewarded = 0;
    return true;
  }
  unrewarded += 1;
  const TrainConfig& config = stage.config();
  const std::string what =
      str("rewards: none applies to any of the ", config.prompts_per_step * config.num_generations,
          " completions of step ", stage.step() + 1);
  if (stage.step() == 0 || unrewarded >= kMaxUnrewardedSteps)
    throw InputError(str(what, unrewarded > 1 ? str(", the last of ", unrewarded, " in a row") : "",
                         "; hint: numeric needs a number as the answer, countdown the fields "
                         "numbers and target"));
  if (stage.is_main()) logging::warn(what, "; the step is skipped");
  return false;
}

// The step's first completions, in the order of the prompts, whichever rank has sampled them.
void log_completions(Stage& stage, const ScoredRollouts& scored, const RewardSet& rewards) {
  const TrainConfig& config = stage.config();
  const int64_t group = config.num_generations;
  std::vector<std::string> lines(
      static_cast<size_t>(std::min(config.log_completions, config.prompts_per_step * group)));
  for (size_t i = 0; i < scored.rollouts.samples.size(); ++i) {
    const Trajectory& trajectory = scored.rollouts.samples[i];
    const auto number =
        static_cast<size_t>(trajectory.group * group) + i % static_cast<size_t>(group);
    if (number >= lines.size()) continue;
    const Example& example = scored.rollouts.prompts[i / static_cast<size_t>(group)];
    Json each = Json(Json::Object{}), line;
    for (size_t k = 0; k < rewards.names().size(); ++k)
      each.set(rewards.names()[k], scored.scores.each[k][i]);
    line.set("step", stage.step() + 1)
        .set("prompt", example.prompt)
        .set("completion", trajectory.text)
        .set("answer", example.answer)
        .set("reward", scored.scores.total[i])
        .set("rewards", std::move(each))
        .set("advantage", scored.advantages[i])
        .set("truncated", trajectory.truncated());
    lines[number] = line.dump();
  }
  for (const std::string& line : gather_texts(stage.comm(), lines))
    stage.log_completion(parse_json(line, "completion"));
}

}  // namespace

StageEnd train_grpo(Stage& stage) {
  const TrainConfig& config = stage.config();
  const RewardSet rewards(config.rewards, stage.data().task);
  const Sampler sampler(stage.model(), *stage.data().tokenizer, config.sampling);
  ShuffledOrder order(stage.data().train->size(), static_cast<uint64_t>(config.seed));
  order.seek(stage.state().data_position);
  GrpoMonitor monitor(config, stage.state().monitor);
  if (stage.is_main() && !stage.finished()) warn_of_settings(stage);

  while (stage.more()) {
    Stopwatch clock;
    const PromptShare share = share_prompts(stage.comm(), config, stage.step());
    ScoredRollouts scored;
    stage.learner().check_weights();
    on_all_ranks(stage.comm(), [&] {
      scored.rollouts = sampler.sample(next_prompts(stage, order, share), config.num_generations,
                                       {.seed = static_cast<uint64_t>(config.seed),
                                        .step = stage.step(),
                                        .prompt_numbers = share.numbers});
    });
    scored.rollouts.policy_version = stage.learner().optimizer().updates();
    const double sampling_time = clock.lap();
    scored.scores = rewards.score(scored.rollouts);
    scored.advantages =
        group_advantages(scored.scores.total, config.num_generations, config.grpo.scale_rewards);
    const bool rewarded = is_rewarded(stage, scored.scores);
    const double rewards_time = clock.lap();

    UpdateSums updates;
    const double rate = stage.learning_rate();
    if (rewarded) {
      const std::vector<double> advantages =
          config.grpo.shuffle_advantages
              ? shuffled_advantages(stage.comm(), scored.advantages, share, config, stage.step())
              : scored.advantages;
      auto minibatches =
          pack_minibatches(stage.comm(), stage.model(), scored, advantages, share, config);
      if (stage.reference() != nullptr)
        add_reference_log_probs(*stage.reference(), minibatches, config.sampling.temperature);
      updates = update_policy(stage.comm(), stage.learner(), minibatches, config, rate);
    }
    const double update_time = clock.lap();

    stage.state().data_position = order.position();
    log_completions(stage, scored, rewards);
    MetricSums metrics = grpo_metrics(scored, rewards.names(), updates, config, rate);
    metrics.add_local("time/sampling", sampling_time);
    metrics.add_local("time/rewards", rewards_time);
    metrics.add_local("time/update", update_time);
    const Metrics summary = metrics.reduce(stage.comm());
    for (const std::string& warning : monitor.observe(summary))
      stage.warn(str("step ", stage.step() + 1, ": ", warning));
    stage.state().monitor = monitor.state();
    stage.end_step(summary);
  }
  return stage.finish();
}

}  // namespace cohort
