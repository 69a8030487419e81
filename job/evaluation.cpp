#include "job/evaluation.h"

#include <cmath>
#include <filesystem>

#include "autograd/ops.h"
#include "core/log.h"
#include "data/data_check.h"
#include "distributed/communicator.h"
#include "job/pair_reference.h"
#include "job/report.h"
#include "trainers/evaluate.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

// Throws Error if nothing was judged, neither problems nor (sft) the loss of solutions.
void expect_verdicts(const Correctness& correct, const Metrics& metrics) {
  const bool has_loss = std::isfinite(metrics.find("val_loss").value_or(std::nan("")));
  if (metrics.at("problems") > 0 ||
      (has_loss && correct.command == nullptr && failed_count(metrics) == 0))
    return;
  throw Error(
      str("reward ", correct.name, ": no value for any problem, so that there is no score"));
}

ModelScores scores_without_completions(const TrainConfig& config, const LoadedModel& loaded,
                                       Dataset& data, const std::atomic<bool>* stop) {
  const ModelConfig& model = loaded.model->config();
  const bool is_encoder = trains_encoder(config.batch.trainer),
             classes = config.batch.trainer == TrainerType::kClassify;
  if (is_encoder && model.head != (classes ? HeadType::kClasses : HeadType::kMaskedToken))
    throw InputError(str(loaded.checkpoint, ": the model has another head than trainer ",
                         trainer_name(config.batch.trainer), " needs"));
  const bool pairs = config.batch.trainer == TrainerType::kDpo;
  DataLengths lengths;
  if (classes || pairs)
    lengths = check_held_out(config, data, model.context, model.context_limit());
  log_data_usage(config, data, lengths);
  const auto alone = make_single_communicator();
  const auto score_pairs = [&] {
    const std::string stage = fs::canonical(loaded.checkpoint).parent_path().parent_path().string();
    return evaluate_pairs(
        config, data,
        {.model = *loaded.model, .micro_batch_tokens = config.batch.micro_batch(), .stop = stop},
        read_pair_references(stage, config.preference), *alone);
  };
  const Metrics metrics = pairs ? score_pairs()
                                : evaluate_targets({*loaded.model, data, config, config.masking,
                                                    config.batch.micro_batch(), stop},
                                                   *alone);
  if ((is_encoder || pairs) && metrics.empty())
    throw InputError("nothing is held out to evaluate on; hint: data.held_out_fraction=1");
  ModelScores out{.metrics = metrics.empty() ? Json().set("val_loss", {}) : Json(),
                  .measure = is_encoder || pairs ? kAccuracy : ""};
  set_metrics(out.metrics, metrics);
  return out;
}

}  // namespace

ModelScores evaluate_model(const RunPlan& plan, const LoadedModel& loaded,
                           const std::atomic<bool>* stop) {
  const TrainConfig& config = plan.stages.back();
  const Transformer& model = *loaded.model;
  Dataset data = load_dataset(config, make_tokenizer(loaded.tokenizer->files(), loaded.checkpoint),
                              DataParts::kHeldOut);
  const auto alone = make_single_communicator();
  if (!trains_encoder(config.batch.trainer)) model.config().require_decoder();
  if (!has_completions(config.batch.trainer))
    return scores_without_completions(config, loaded, data, stop);
  ModelScores out;
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
  out.metrics.set("held_out", data.held_out_set->size());
  set_metrics(out.metrics, scores.metrics);
  out.metrics.set("correct", correct.rule());
  for (const EvalSet& set : sets)
    set_metrics(out.metrics, evaluate_set(set, problems, *alone).metrics, set.name);
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
  std::vector<TokenSequence> texts;
  for (const std::vector<int32_t>& ids : sequences)
    texts.push_back({.tokens = ids, .loss_mask = std::vector<uint8_t>(ids.size(), 1)});
  for (const PackedBatch& packed : pack_micro_batches(texts, kMicroBatchTokens)) {
    const PackedBatch batch = model.to_device(packed);
    const Tensor values = token_log_probs(model.hidden_at_targets(batch), model.head(),
                                          batch.targets, {.temperature = temperature})
                              .logprob.value();
    for (int64_t at = 0; at < values.numel();) {
      const int64_t n = std::ssize(texts[out.size()].tokens) - 1;
      out.push_back(values.narrow(0, at, n).clone());
      at += n;
    }
  }
  return out;
}

}  // namespace cohort
