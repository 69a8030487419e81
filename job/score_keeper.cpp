#include "job/score_keeper.h"

#include <algorithm>
#include <cmath>

#include "core/log.h"

namespace cohort {
namespace {

// Ties in the score are broken by the lower loss; an unmeasured score ranks below all others.
bool is_best(double score, double loss, const TrainState& state) {
  if (std::isnan(score) && std::isnan(loss)) return false;
  if (state.best_step < 0) return true;
  const auto rank = [](double value) { return std::isnan(value) ? -HUGE_VAL : value; };
  if (rank(score) != rank(state.best)) return rank(score) > rank(state.best);
  return !std::isnan(loss) && !(loss >= state.best_loss);
}

// True if completions of held-out problems are sampled: unless they are to be compared with answers
// that there are none of, as in conversations for sft.
bool judges_completions(const TrainConfig& config, const Dataset& data) {
  const EvalConfig& eval = config.eval;
  return config.batch.trainer != TrainerType::kSft || data.task != nullptr ||
         !config.rewards.empty() || !eval.correct.reward.empty() || eval.num_samples > 0 ||
         eval.stop_at > 0 ||
         std::ranges::any_of(data.held_out, [](const Example& e) { return !e.answer.empty(); });
}

}  // namespace

void ScoreKeeper::evaluate() {
  const Evaluation evaluation = measure();
  record(evaluation);
  logs_.evaluation(evaluation);
  if (warned_ || !setup_.is_main() || !std::isnan(evaluation.score) || evaluation.metrics.empty() ||
      evaluation.rule.empty() || evaluation.failed() > 0)
    return;
  warned_ = true;
  logging::warn(evaluation.measure, " is not measured: ", start_.correct.name,
                " applies to none of the ", start_.data.held_out.size(),
                " held-out problems; hint: another eval.correct.reward");
}

Evaluation ScoreKeeper::measure() {
  Evaluation out{{}, state_.step, std::nan("")};
  Stopwatch clock;
  const Dataset& data = start_.data;
  // Before the first step a signal has nothing to save, and ends the process.
  const std::atomic<bool>* stop = state_.is_new() ? nullptr : &setup_.stop;
  if (config_.batch.trainer == TrainerType::kDpo) {
    out.measure = kAccuracy;
    out.metrics = evaluate_pairs(
        config_, data,
        {.model = start_.learner->model(),
         .micro_batch_tokens = start_.learner->micro_batch_tokens(config_.batch.micro_batch()),
         .stop = stop},
        start_.pair_references, setup_.comm);
    if (out.metrics.empty()) return out;
    out.score = out.metrics.at("accuracy");
  } else if (!has_completions(config_.batch.trainer)) {
    const bool classes = config_.batch.trainer == TrainerType::kClassify;
    out.measure = classes ? kAccuracy : kValidationLoss;
    out.metrics =
        evaluate_targets({start_.learner->model(), data, config_, config_.masking,
                          start_.learner->micro_batch_tokens(config_.batch.micro_batch()), stop},
                         setup_.comm);
    if (out.metrics.empty()) return out;
    out.score = classes ? out.metrics.at("accuracy") : -out.metrics.at("val_loss");
  } else {
    const Correctness& correct = start_.correct;
    const bool judges = judges_completions(config_, data);
    out.measure = judges ? correct.measure() : kValidationLoss;
    if (judges) out.rule = correct.rule();
    ProblemEvaluation problems{engine_, data, correct, config_, state_.step, stop};
    problems.dialogue = dialogue();
    if (!data.held_out.empty() && !judges) {
      const double loss = held_out_loss(problems, setup_.comm);
      out.metrics = {{"val_loss", loss}};
      out.score = -loss;
    } else if (!data.held_out.empty()) {
      ProblemScores scores = evaluate_problems(problems, setup_.comm);
      out.metrics = std::move(scores.metrics);
      out.samples = std::move(scores.samples);
      out.score = out.metrics.front().second;
    }
    for (const EvalSet& set : start_.sets) {
      if (set.name == config_.eval.best) out.best_set = std::ssize(out.sets);
      ProblemScores scores = evaluate_set(set, problems, setup_.comm);
      out.sets.push_back({set.name, str(set.name, "/", set.correct.measure()),
                          std::move(scores.metrics), std::move(scores.samples)});
    }
    if (out.empty()) return out;
  }
  out.seconds = clock.lap("evaluation");
  return out;
}

void ScoreKeeper::record(const Evaluation& evaluation) {
  state_.evaluated_step = state_.step;
  if (evaluation.empty()) return;  // nothing is held out
  // Scores of another measure are not comparable.
  const Json& last = state_.report.get_or_null("last");
  if (const Json& measure =
          last.get_or_null(last.find("best_measure") != nullptr ? "best_measure" : "measure");
      !measure.is_null() && measure.as_string() != evaluation.best().measure)
    state_.best_step = -1;
  if (evaluation.failed() == 0) {
    warn_of_collapse(evaluation);
    const double score = evaluation.best_score();
    const double loss = evaluation.metrics.find("val_loss").value_or(std::nan(""));
    if (is_best(score, loss, state_)) {
      state_.best = score;
      state_.best_loss = loss;
      state_.best_step = state_.step;
    }
    reached_ = config_.eval.stop_at > 0 && evaluation.score >= config_.eval.stop_at &&
               !reads_text(config_.batch.trainer);
  }
  if (state_.report.find("first") == nullptr) state_.report.set("first", score_json(evaluation));
  state_.report.set("last", score_json(evaluation));
}

// Warns of a drop to less than half of the best score that is larger than sampling noise.
void ScoreKeeper::warn_of_collapse(const Evaluation& evaluation) {
  const double best = state_.best, score = evaluation.best_score();
  if (evaluation.rule.empty() || state_.best_step < 0 || std::isnan(score) || std::isnan(best))
    return;
  const double problems = evaluation.best().metrics.at("problems");
  const double error = std::sqrt((best * (1 - best) + score * (1 - score)) / problems);
  const bool collapsed = score < best / 2 && best - score > 2 * error;
  if (collapsed && !collapsed_)
    logs_.warn(str("step ", state_.step, ": ", evaluation.best().measure, " has collapsed to ",
                   score_text(score, 4), "; hint: a lower learning_rate"));
  collapsed_ = collapsed;
}

}  // namespace cohort
