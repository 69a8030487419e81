#include "runs/preview.h"

#include <algorithm>
#include <cmath>

#include "core/sizes.h"
#include "runs/checkpoint.h"
#include "text/utf8.h"
#include "trainers/evaluate.h"

namespace cohort {
namespace {

// The model and tokenizer a stage starts from; without a tokenizer both are derived from the stage.
ModelDescription start_of_run(const TrainConfig& config) {
  if (config.init_from.empty()) return {.config = config.model, .tokenizer = nullptr};
  return load_found(config.init_from,
                    [&](const std::string& from) { return describe_model(from, config); });
}

// Scores the solutions of training problems as if the model had written them. Programs score
// only the examples of the preview.
void score_solutions(const TrainConfig& config, const Dataset& data, StagePreview& out) {
  const bool has_program =
      std::any_of(config.rewards.begin(), config.rewards.end(),
                  [](const RewardConfig& reward) { return reward.name == "command"; });
  const int64_t count = has_program ? static_cast<int64_t>(out.examples.size())
                                    : std::min<int64_t>(1000, data.train->size());
  const RewardSet rewards(config.rewards, data.task);
  std::vector<Example> problems;
  std::vector<Trajectory> gold;
  for (int64_t i = 0; i < count; ++i) {
    problems.push_back(data.train->get(i));
    gold.push_back({.index = i, .text = problems.back().solution});
  }
  const RewardSet::Scores scores = rewards.score(problems, gold);
  const auto shown = [](double value) { return std::isnan(value) ? "not applicable" : str(value); };
  int64_t below_maximum = 0;
  for (size_t i = 0; i < problems.size(); ++i) {
    std::string each;
    bool less = std::isnan(scores.total[i]);
    for (size_t k = 0; k < config.rewards.size(); ++k) {
      const double value = scores.each[k][i], weight = config.rewards[k].weight;
      each += str(k == 0 ? "" : ", ", rewards.names()[k], " ", shown(value));
      less = less || (weight > 0 && value < 1) || (weight < 0 && value > 0);
    }
    each += str("; total ", shown(scores.total[i]));
    if (i < out.examples.size()) out.gold_rewards.push_back(each);
    if (less && ++below_maximum == 1)
      out.reward_warning = str("; the first: ", excerpt(gold[i].text), " after ",
                               excerpt(problems[i].prompt), " gets ", each);
  }
  if (below_maximum > 0)
    out.reward_warning =
        str("rewards: ", below_maximum, " of ", problems.size(),
            " gold answers get less than the rewards can give", out.reward_warning,
            "; hint: the gold answer is the solution, or the answer where there is none; "
            "do the patterns of the rewards fit it?");
}

StagePreview preview_stage(const TrainConfig& config, ModelDescription& start,
                           std::span<const TrainConfig> earlier) {
  Dataset data = load_dataset(config, std::move(start.tokenizer));
  if (start.config.vocab_size == 0) {  // a new model
    start.config.vocab_size = data.tokenizer->vocab_size();
    start.config.resolve();
  }
  start.config.check_device(device_named(config.device, "device"));
  if (config.trainer != TrainerType::kPretrain) correctness_of(config, data.task);
  if (config.trainer == TrainerType::kGrpo) RewardSet(config.rewards, data.task);
  StagePreview out{.model = start.config,
                   .lengths = check_data(config, data, start.config.context)};
  const bool is_text = config.trainer == TrainerType::kPretrain;
  out.held_out_size = is_text ? 0 : data.held_out_set->size();
  out.held_out = is_text ? data.held_out_text.size() : static_cast<int64_t>(data.held_out.size());
  if (config.trainer != TrainerType::kPretrain)
    for (int64_t i = 0; i < std::min<int64_t>(3, data.train->size()); ++i)
      out.examples.push_back(data.train->get(i));
  if (config.trainer == TrainerType::kGrpo) score_solutions(config, data, out);
  out.leak = held_out_leak(data, earlier);
  start.tokenizer = make_tokenizer(data.tokenizer->files(), "the stage before");
  return out;
}

}  // namespace

int64_t StepSize::micro_batches() const {
  return ceil_div(tokens, std::max<int64_t>(1, memory.micro_batch_tokens));
}

StepSize step_size(const TrainConfig& config, const StagePreview& stage, int64_t ranks) {
  StepSize out{.longest_sequence = stage.lengths.longest_sequence - 1};
  MemoryShape& memory = out.memory;
  memory.device = device_named(config.device, "device");
  if (config.trainer == TrainerType::kGrpo) {
    const int64_t of_rank = ceil_div(config.prompts_per_step, ranks) * config.num_generations;
    memory.rollout_length =
        config.sampling.max_length(stage.lengths.longest_prompt, stage.model.context);
    out.longest_sequence = memory.rollout_length - 1;
    out.tokens = config.completions_per_step() * out.longest_sequence;
    memory.rollout_sequences = config.rollout.concurrent(of_rank);
    memory.rollout_prefill_tokens =
        std::min(kPrefillTokens, memory.rollout_sequences * stage.lengths.longest_prompt);
    if (config.grpo.beta > 0) memory.reference = MemoryShape::Reference::kHeld;
  } else {
    out.tokens = static_cast<int64_t>(static_cast<double>(config.batch_size) *
                                      (stage.lengths.mean_sequence - 1));
  }
  memory.whole_masters = config.optimizer.storage.master == MasterKind::kF32;
  memory.bf16_moments = config.optimizer.storage.moments == MomentKind::kBF16;
  memory.micro_batch_tokens =
      std::min(std::max(config.micro_batch(), out.longest_sequence), ceil_div(out.tokens, ranks));
  return out;
}

std::string choose_micro_batch(TrainConfig& config, const StagePreview& stage, int64_t ranks,
                               int64_t available) {
  if (config.micro_batch_tokens) return "";
  constexpr int64_t kUnit = 1024, kMost = 32768;
  constexpr double kUsable = 0.9;  // fraction; kernels and libraries allocate the rest
  const auto budget = static_cast<int64_t>(kUsable * static_cast<double>(available));
  ModelConfig model = stage.model;
  // Returns true if micro batches of `tokens` tokens fit. Sets config to the tokens clamped to at
  // least a sequence and at most a rank's part of the step, and `peak` to their memory.
  int64_t peak = 0;
  const auto fits = [&](int64_t tokens) {
    config.micro_batch_tokens = tokens;
    const MemoryShape shape = step_size(config, stage, ranks).memory;
    config.micro_batch_tokens = shape.micro_batch_tokens;
    peak = estimate_memory(model, config.dtype, shape).peak();
    return peak <= budget;
  };
  for (const Recompute recompute : {Recompute::kNone, Recompute::kCheap, Recompute::kBlock}) {
    if (recompute < stage.model.recompute) continue;
    model.recompute = recompute;
    if (recompute != Recompute::kBlock && !fits(kMicroBatchTokens)) continue;
    // Bisection: `good` units fit, or it is 0; `bad` do not.
    int64_t good = 0, bad = kMost / kUnit + 1;
    while (bad - good > 1) {
      const int64_t middle = (good + bad) / 2;
      (fits(middle * kUnit) ? good : bad) = middle;
    }
    const bool any = fits(std::max<int64_t>(1, good * kUnit));
    config.model.recompute = recompute;
    return str(*config.micro_batch_tokens,
               " tokens, model.recompute: ", kRecomputeNames[static_cast<size_t>(recompute)].name,
               "; estimated ", mib(peak), " of ", mib(available), " free",
               any ? "" : ", which is too little");
  }
  return "";
}

std::vector<StagePreview> preview_plan(const RunPlan& plan) {
  if (!plan.missing.empty()) throw InputError(plan.missing[0]);
  ModelDescription start = start_of_run(plan.stages[0]);
  std::vector<StagePreview> out;
  for (const TrainConfig& config : plan.stages) {
    if (!out.empty()) {
      check_compatible(config, start.config, *start.tokenizer, "the stage before");
      apply_run_options(config, start.config);
    }
    out.push_back(preview_stage(config, start, std::span(plan.stages).first(out.size())));
  }
  return out;
}

}  // namespace cohort
