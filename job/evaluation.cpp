#include "job/evaluation.h"

#include <cmath>

#include "autograd/ops.h"
#include "core/log.h"
#include "data/data_check.h"
#include "distributed/communicator.h"
#include "job/checkpoint.h"
#include "job/report.h"
#include "trainers/evaluate.h"

namespace cohort {
namespace {

// Throws Error if nothing was judged, neither problems nor (sft) the loss of solutions.
void expect_verdicts(const Correctness& correct, const Metrics& metrics) {
  const bool has_loss = std::isfinite(metrics.find("val_loss").value_or(std::nan("")));
  if (metrics.at("problems") > 0 ||
      (has_loss && correct.command == nullptr && failed_count(metrics) == 0))
    return;
  throw Error(
      str("reward ", correct.name, ": no value for any problem, so that there is no score"));
}

void evaluate_encoder(const TrainConfig& config, const LoadedModel& loaded, Dataset& data,
                      const std::atomic<bool>* stop, ModelScores& out) {
  const ModelConfig& model = loaded.model->config();
  const bool classes = config.batch.trainer == TrainerType::kClassify;
  if (model.head != (classes ? HeadType::kClasses : HeadType::kMaskedToken))
    throw InputError(str(loaded.checkpoint, ": the model has another head than trainer ",
                         trainer_name(config.batch.trainer), " needs"));
  DataLengths lengths;
  if (classes) lengths = check_held_out(config, data, model.context, model.context_limit());
  log_data_usage(config, data, lengths);
  const Metrics metrics = evaluate_labels(
      {*loaded.model, data, config, config.masking, config.batch.micro_batch(), stop},
      *make_single_communicator());
  if (metrics.empty())
    throw InputError("nothing is held out to evaluate on; hint: data.held_out_fraction=1");
  for (const auto& [name, value] : metrics) out.metrics.set(name, metric_json(name, value));
  out.measure = kAccuracy;
}

}  // namespace

ModelScores evaluate_model(const RunPlan& plan, const LoadedModel& loaded,
                           const std::atomic<bool>* stop) {
  const TrainConfig& config = plan.stages.back();
  const Transformer& model = *loaded.model;
  Dataset data = load_dataset(config, make_tokenizer(loaded.tokenizer->files(), loaded.checkpoint),
                              DataParts::kHeldOut);
  const auto alone = make_single_communicator();
  ModelScores out;
  if (trains_encoder(config.batch.trainer)) {
    evaluate_encoder(config, loaded, data, stop, out);
    return out;
  }
  model.config().require_decoder();
  if (config.batch.trainer == TrainerType::kPretrain) {
    log_data_usage(config, data, {});
    out.metrics.set("val_loss", evaluate_text(model, data.held_out_text, config.eval.tokens,
                                              config.batch.micro_batch(), *alone, stop));
    return out;
  }
  const Correctness correct = correctness_of(config.eval.correct, config.rewards, data.task);
  const int64_t context = model.config().context;
  const ContextLimit limit = model.config().context_limit();
  const std::vector<EvalSet> sets =
      load_eval_sets({config.eval, config, config.rewards, correct}, data, context, limit);
  if (data.held_out_set->size() == 0)
    throw InputError(
        "nothing is held out to evaluate on; hint: data.jsonl.eval_path=FILE, or "
        "data.held_out_fraction=1 for all of data.jsonl.path");
  log_data_usage(config, data, check_held_out(config, data, context, limit));
  if (config.data.jsonl.eval_path.empty()) {  // other files are compared by check and train
    const std::string leak = held_out_leak(data, {plan.stages.begin(), plan.stages.end() - 1});
    if (!leak.empty()) logging::warn(leak);
  }
  Engine engine(model, config.rollout);
  const std::unique_ptr<Environment> environment =
      environment_of(config.environment, config.data, *data.tokenizer);
  ProblemEvaluation problems{engine, data, correct, config};
  problems.stop = stop;
  problems.dialogue = dialogue_options(config.environment, environment.get());
  ProblemScores scores = evaluate_problems(problems, *alone);
  expect_verdicts(correct, scores.metrics);
  const auto set = [&](const std::string& name, double value) {
    out.metrics.set(name, metric_json(name, value));
  };
  out.metrics.set("held_out", data.held_out_set->size());
  for (const auto& [name, value] : scores.metrics) set(name, value);
  out.metrics.set("correct", correct.rule());
  for (const EvalSet& each : sets)
    for (const auto& [name, value] : evaluate_set(each, problems, *alone).metrics)
      set(set_metric_name(each.name, name), value);
  out.measure = correct.name;
  out.problems = std::move(data.held_out);
  out.pass_rates = std::move(scores.pass_rates);
  return out;
}

std::vector<Tensor> token_logprobs(const Transformer& model,
                                   std::span<const std::vector<int32_t>> sequences,
                                   double temperature) {
  model.config().require_decoder();
  std::vector<Tensor> out;
  const NoGradGuard no_grad;
  for (size_t next = 0; next < sequences.size();) {
    std::vector<TokenSequence> batch;
    for (int64_t tokens = 0; next < sequences.size() && tokens < kMicroBatchTokens; ++next) {
      const std::vector<int32_t>& ids = sequences[next];
      batch.push_back({.tokens = ids, .loss_mask = std::vector<uint8_t>(ids.size(), 1)});
      tokens += static_cast<int64_t>(ids.size());
    }
    const PackedBatch packed = model.to_device(pack(batch));
    const Tensor values = token_log_probs(model.hidden_at_targets(packed), model.head(),
                                          packed.targets, {.temperature = temperature})
                              .logprob.value();
    int64_t at = 0;
    for (const TokenSequence& sequence : batch) {
      const auto n = static_cast<int64_t>(sequence.tokens.size()) - 1;
      out.push_back(values.narrow(0, at, n).clone());
      at += n;
    }
  }
  return out;
}

}  // namespace cohort
