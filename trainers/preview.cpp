#include "trainers/preview.h"

#include "trainers/checkpoint.h"
#include "trainers/evaluate.h"

namespace cohort {
namespace {

// The model and tokenizer a stage starts from; no tokenizer: both follow from the stage itself.
struct Start {
  ModelConfig model;
  std::unique_ptr<Tokenizer> tokenizer;
};

Start start_of_run(const TrainConfig& config) {
  if (config.init_from.empty()) return {.model = config.model, .tokenizer = nullptr};
  LoadedModel loaded = load_found(
      config.init_from, [&](const std::string& from) { return load_model(from, config); });
  return {.model = loaded.model->config(), .tokenizer = std::move(loaded.tokenizer)};
}

StagePreview preview_stage(const TrainConfig& config, Start& start) {
  Dataset data = load_dataset(config, std::move(start.tokenizer));
  start.model.vocab_size = data.tokenizer->vocab_size();
  start.model.resolve();
  start.model.check_device(device_named(config.device));
  if (config.trainer != TrainerType::kPretrain) correctness_of(config, data.task);
  if (config.trainer == TrainerType::kGrpo) RewardSet(config.rewards, data.task);
  StagePreview out{.model = start.model, .lengths = check_data(config, data, start.model.context)};
  out.held_out =
      static_cast<int64_t>(config.trainer == TrainerType::kPretrain ? data.held_out_tokens.size()
                                                                    : data.held_out.size());
  start.tokenizer = make_tokenizer(data.tokenizer->to_json());
  return out;
}

}  // namespace

std::vector<StagePreview> preview_plan(const RunPlan& plan) {
  if (!plan.missing.empty()) throw InputError(plan.missing[0]);
  Start start = start_of_run(plan.stages[0]);
  std::vector<StagePreview> out;
  for (const TrainConfig& config : plan.stages) {
    if (!out.empty()) {
      check_compatible(config, start.model, *start.tokenizer, "the stage before");
      start.model.dropout = config.model.dropout;
      start.model.recompute = config.model.recompute;
    }
    out.push_back(preview_stage(config, start));
  }
  return out;
}

}  // namespace cohort
