#include "job/stage_logs.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "core/log.h"
#include "job/memory_plan.h"
#include "job/trace_file.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

// Every so many steps the change of the weights is measured, which synchronizes with the device.
constexpr int64_t kMeasuredSteps = 10;

// Passes over the training data so far, which may be a fraction; NaN: the data are endless.
double epoch_of(const ModelStart& start, TrainerType trainer) {
  const Dataset& data = start.data;
  const auto seen = static_cast<double>(start.state.data_position);
  if (data.task != nullptr) return std::nan("");
  if (data.train != nullptr) return seen / static_cast<double>(data.train->size());
  double tokens = 0;
  for (const TokenStream& text : data.train_text) tokens += static_cast<double>(text.size());
  // The last token of a window of pretraining is only a target.
  const int64_t context = start.learner->model().config().context,
                length = std::min(context, window_length(trainer, *data.tokenizer, context));
  return seen * static_cast<double>(length) / tokens;
}

}  // namespace

StageLogs::StageLogs(const StageSetup& setup, ModelStart& start) : setup_(setup), start_(start) {
  if (!writes_) return;
  if (setup.profile_steps > 0) {
    Trace attempt(setup.device);  // throws now, not after two steps
    // The first steps are not representative: memory is allocated, algorithms are chosen.
    const int64_t left = setup.config.batch.steps - state_.step;
    trace_begin_ = state_.step + std::clamp<int64_t>(left - setup.profile_steps, 0, 2);
    trace_end_ = std::min(trace_begin_ + setup.profile_steps, setup.config.batch.steps);
  }
  // Both are read before either is truncated.
  metrics_.emplace(setup.dir + "/metrics.jsonl");
  completions_.emplace(setup.dir + "/completions.jsonl");
  const int64_t kept = state_.is_new() ? -1 : state_.step;
  for (auto* log : {&metrics_, &completions_}) (*log)->start(kept, state_.evaluated_step == kept);
  events_.emplace(setup.dir, kept + 1);
}

// Rank 0 has all weights, and each rank its part of the masters of a sharded optimizer.
bool StageLogs::measures() const {
  return writes_ || (start_.learner->optimizer().is_sharded() && setup_.replay == nullptr);
}

void StageLogs::begin_step() {
  if (writes_ && state_.step == trace_begin_) trace_.emplace(setup_.device);
  measured_ = measures() && (state_.step + 1) % kMeasuredSteps == 0;
  if (measured_) weights_ = start_.learner->optimizer().sample_weights();
}

void StageLogs::end_step(Metrics metrics, double learning_rate, double seconds) {
  if (!writes_) {
    if (measured_) add_update_size(metrics, learning_rate);
    return;
  }
  const TrainConfig& config = setup_.config;
  if (start_.pinned > 0 && ++steps_ == 3) {
    const double streaming = streaming_seconds(start_.pinned),
                 update = metrics.at("time/update") / static_cast<double>(updates_per_step(config));
    if (const std::string note = slow_streaming(streaming, update - streaming); !note.empty())
      logging::info(note);
  }
  add_update_size(metrics, learning_rate);
  metrics.add("epoch", epoch_of(start_, config.batch.trainer));
  metrics.add("total_tokens", state_.total_tokens);
  metrics.add("step_time", seconds);
  metrics.add("tokens_per_second", metrics.at("num_tokens") / seconds);
  if (state_.step % config.log_every == 0 || state_.step == config.batch.steps) {
    Json line;
    line.set("step", state_.step).set("time", utc_now());
    for (const auto& [name, value] : metrics) line.set(name, value);
    write(line);
  }
  setup_.reporter.step(state_.step, metrics);
  if (state_.step == trace_end_) end_trace();
}

void StageLogs::evaluation(const Evaluation& evaluation) {
  if (!writes_ || evaluation.empty()) return;
  write(evaluation_json(evaluation));
  for (const Json& line : sample_lines(evaluation)) completion(line.dump());
  if (!evaluation.metrics.empty())
    setup_.reporter.message(evaluation_text(evaluation.step, evaluation));
  for (const SetScores& set : evaluation.sets)
    setup_.reporter.message(evaluation_text(evaluation.step, set));
}

void StageLogs::completion(const std::string& line) {
  if (!writes_) return;
  completions_->write(line);
  setup_.reporter.completion(line);
}

void StageLogs::warn(const std::string& warning) const {
  if (!writes_) return;
  std::string best;
  // A score of 0 makes no step better than another.
  if (state_.best_step >= 0 && state_.best != 0) {
    const std::string checkpoint = checkpoint_path(setup_.dir + "/checkpoints", state_.best_step);
    std::error_code ignored;
    best = str("; best so far: step ", state_.best_step, " (",
               std::isnan(state_.best) ? "validation loss " + score_text(state_.best_loss, 4)
                                       : score_text(state_.best, 4),
               "), ",
               std::filesystem::exists(checkpoint, ignored) ? checkpoint : "which is not saved");
  }
  logging::warn(warning, best);
}

void StageLogs::end_trace() {
  if (!trace_) return;
  const std::string path = setup_.dir + "/trace.json";
  replace_file(path, chrome_trace(trace_->finish()));
  trace_.reset();
  setup_.reporter.message(str("trace of steps ", trace_begin_ + 1, " to ", state_.step, ": ", path,
                              " (for https://ui.perfetto.dev or chrome://tracing)"));
}

void StageLogs::finish() {
  if (!writes_) return;
  for (auto* log : {&metrics_, &completions_}) (*log)->finish();
}

void StageLogs::write(const Json& line) {
  metrics_->write(line.dump());
  events_->write(line);
}

// Adds |dw| and |dw| / |w| of the step that has ended; NaN: it is not measured. Warns if steps at
// more than a small learning rate hardly change the weights.
void StageLogs::add_update_size(Metrics& metrics, double learning_rate) {
  constexpr int64_t kSteps = 50;
  constexpr double kTiny = 1e-6, kPeakFraction = 0.1;
  double change = 0, weights = 0;  // squares
  const bool measured = std::exchange(measured_, false);
  if (measured) {
    const Optimizer& optimizer = start_.learner->optimizer();
    const std::vector<double> now = optimizer.sample_weights();
    for (size_t i = 0; i < now.size(); ++i) {
      change += (now[i] - weights_[i]) * (now[i] - weights_[i]);
      weights += weights_[i] * weights_[i];
    }
    weights_.clear();
    if (optimizer.is_sharded()) reduce_in_place(setup_.comm, {&change, &weights});
  }
  if (!writes_) return;
  const double norm = measured ? std::sqrt(change) : std::nan(""),
               ratio = norm / std::sqrt(weights);
  metrics.add("update/norm", norm);
  metrics.add("update/relative", ratio);
  if (!measured || tiny_updates_ < 0 || metrics.find("num_updates") == 0.0 ||
      learning_rate < kPeakFraction * setup_.config.optimizer.learning_rate)
    return;
  tiny_updates_ = ratio < kTiny ? tiny_updates_ + kMeasuredSteps : 0;
  if (tiny_updates_ < kSteps) return;
  warn(str("step ", state_.step, ": the last ", tiny_updates_,
           " steps have each changed the weights by less than 1e-6 of their norm (", ratio,
           " in this one, measured every ", kMeasuredSteps, "); hint: a higher learning_rate"));
  tiny_updates_ = -1;
}

}  // namespace cohort
