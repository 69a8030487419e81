#include "job/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "text/utf8.h"

namespace cohort {
namespace {

constexpr size_t kShownCompletions = 3;  // before and after, in the final report

// "PROMPT -> COMPLETION". Where one has several lines, the completion begins its own, and all lines
// are below each other in the column of the first.
std::string sample_text(std::string prompt, const std::string& completion) {
  prompt.erase(prompt.find_last_not_of('\n') + 1);
  const std::string both = prompt + completion;
  const bool one_line = both.find('\n') == both.npos;
  return replaced(prompt + (one_line ? " -> " : "\n-> ") + completion, "\n", "\n         ");
}

Json verdict(const ProblemResult& problem) {
  return problem.correct ? Json(*problem.correct) : Json();
}

std::string completions_text(const Json& list) {
  std::string text;
  for (const Json& item : list.as_array()) {
    const Json& correct = item.at("correct");
    text += str("  ",
                correct.is_null()   ? "?      "
                : correct.as_bool() ? "right  "
                                    : "wrong  ",
                sample_text(item.at("prompt").as_string(), item.at("completion").as_string()));
    const std::string* answer = item.find_text("answer");
    if (answer != nullptr && !answer->empty()) text += str("  (answer: ", *answer, ")");
    text += '\n';
  }
  return text;
}

}  // namespace

std::string score_text(double score, int digits) {
  if (std::isnan(score)) return "not measured";
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, score);
  return text;
}

std::string evaluation_text(int64_t step, const SetScores& scores) {
  const Metrics& metrics = scores.metrics;
  std::string text = str("step ", step, ":");
  const char* before = " ";
  for (const auto& [name, value] : metrics) {
    if (name == "pass@1_stderr") break;  // the rest is appended below
    const bool is_score = name == metrics.front().first;
    if (!is_score && std::isnan(value)) continue;
    text += str(before, name == "pass@1" ? scores.measure : name, " ", score_text(value, 4));
    before = ", ";
  }
  const auto problems = metrics.find("problems");
  if (!problems) return text;
  if (const double error = metrics.at("pass@1_stderr"); !std::isnan(error))
    text += ", standard error " + score_text(error, 4);
  const double failed = failed_count(metrics);
  text += str(" (", score_text(*problems, 0), " problems, ",
              failed > 0 ? score_text(failed, 0) + " completions failed, " : "", "mean length ",
              score_text(metrics.at("eval/mean_length"), 1), ", ",
              score_text(100 * metrics.at("eval/clipped_ratio"), 0), " % truncated");
  if (const double full = metrics.at("eval/context_ratio"); full > 0)
    text += str(", ", score_text(100 * full, 0), " % in a full context");
  return text + ")";
}

void set_metrics(Json& line, const Metrics& metrics, const std::string& set) {
  for (const auto& [name, value] : metrics) {
    const bool is_count = name == "problems" || name.ends_with("failed");
    line.set(set.empty() ? name : set_metric_name(set, name),
             is_count ? Json(static_cast<int64_t>(value)) : Json(value));
  }
}

Json evaluation_json(const Evaluation& evaluation) {
  Json line;
  line.set("step", evaluation.step).set("time", utc_now()).set("eval", true);
  set_metrics(line, evaluation.metrics);
  for (const SetScores& set : evaluation.sets) set_metrics(line, set.metrics, set.name);
  if (!evaluation.rule.empty()) line.set("correct", evaluation.rule);
  return line.set("time/evaluation", evaluation.seconds);
}

std::vector<Json> sample_lines(const Evaluation& evaluation) {
  std::vector<Json> out;
  const auto add = [&](const SetScores& scores) {
    for (const ProblemResult& problem : scores.samples) {
      Json& line = out.emplace_back();
      line.set("step", evaluation.step).set("eval", true);
      if (!scores.name.empty()) line.set("set", scores.name);
      line.set("prompt", problem.prompt).set("completion", problem.completion);
      line.set("answer", problem.answer).set("correct", verdict(problem));
    }
  };
  add(evaluation);
  std::ranges::for_each(evaluation.sets, add);
  return out;
}

Json score_json(const Evaluation& evaluation) {
  Json list = Json(Json::Array{});
  for (size_t i = 0; i < std::min(evaluation.samples.size(), kShownCompletions); ++i) {
    const ProblemResult& problem = evaluation.samples[i];
    Json shown;
    shown.set("prompt", problem.prompt).set("completion", problem.completion);
    shown.set("correct", verdict(problem));
    if (problem.correct == false) shown.set("answer", problem.answer);
    list.push_back(std::move(shown));
  }
  Json out;
  out.set("step", evaluation.step).set("score", evaluation.score);
  if (const auto error = evaluation.metrics.find("pass@1_stderr")) out.set("stderr", *error);
  out.set("measure", evaluation.measure);
  if (const double failed = evaluation.failed(); failed > 0) out.set("failed", failed);
  if (evaluation.best_set >= 0) out.set("best_measure", evaluation.best().measure);
  Json sets = Json(Json::Object{});
  for (const SetScores& set : evaluation.sets) sets.set(set.measure, set.metrics.front().second);
  if (!evaluation.sets.empty()) out.set("sets", std::move(sets));
  if (const auto loss = evaluation.metrics.find("val_loss")) out.set("val_loss", *loss);
  return out.set("completions", std::move(list));
}

double last_score(const Json& report) {
  const Json& last = report.get_or_null("last");
  return last.find("failed") != nullptr ? std::nan("") : number_or_nan(last.get_or_null("score"));
}

std::string text_curve(const std::vector<double>& values, int width, int height) {
  if (values.empty() || width < 1 || height < 2) return "";
  // Each column is the mean of an equal part of the values.
  const int columns = std::min<int>(width, static_cast<int>(values.size()));
  std::vector<double> means;
  for (int c = 0; c < columns; ++c) {
    const size_t begin = values.size() * static_cast<size_t>(c) / static_cast<size_t>(columns);
    const size_t end = values.size() * static_cast<size_t>(c + 1) / static_cast<size_t>(columns);
    double total = 0;
    for (size_t i = begin; i < end; ++i) total += values[i];
    means.push_back(total / static_cast<double>(end - begin));
  }
  const auto [lo, hi] = std::minmax_element(means.begin(), means.end());
  const double range = std::max(*hi - *lo, 1e-12);
  const bool is_flat = *hi - *lo < 5e-4;  // all labels would be equal
  std::string text;
  for (int row = height - 1; row >= 0; --row) {
    char label[32];
    std::snprintf(label, sizeof label, "%8.3f |", *lo + range * row / (height - 1));
    text += is_flat && row > 0 ? "         |" : label;
    for (const double m : means)
      text += std::lround((m - *lo) / range * (height - 1)) == row ? '*' : ' ';
    while (text.back() == ' ') text.pop_back();
    text += '\n';
  }
  text += "         +" + std::string(static_cast<size_t>(columns), '-') + "\n";
  return text;
}

std::string final_report(const Json& report) {
  std::string text;
  if (const Json* curve = report.find("curve")) {
    std::vector<double> values;
    for (const Json& value : curve->as_array())
      if (const double reward = number_or_nan(value); !std::isnan(reward)) values.push_back(reward);
    text += str("mean reward over ", values.size(), " steps\n", text_curve(values, 64, 10));
  }
  for (const auto& [key, title] : {std::pair{"first", "before"}, std::pair{"last", "after"}})
    if (const Json* part = report.find(key)) {
      const Json* measure = part->find("measure");
      text += str(title, " GRPO (held-out ", measure != nullptr ? measure->as_string() : "pass@1",
                  " ", score_text(number_or_nan(part->at("score")), 3),
                  part->find("failed") != nullptr ? ", completions failed" : "", "):\n",
                  completions_text(part->at("completions")));
      if (const Json* sets = part->find("sets"))
        for (const auto& [name, score] : sets->as_object())
          text += str("  ", name, " ", score_text(number_or_nan(score), 3), "\n");
    }
  return text;
}

}  // namespace cohort
