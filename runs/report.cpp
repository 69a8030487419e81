#include "runs/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "runs/checkpoint.h"
#include "runs/reporter.h"

namespace cohort {
namespace {

constexpr size_t kShownCompletions = 3;  // before and after, in the final report

std::string shown(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '\n' ? std::string("\\n") : std::string(1, c);
  return out;
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
                shown(item.at("prompt").as_string()), " ", shown(item.at("completion").as_string()),
                "\n");
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

std::string evaluation_text(const Evaluation& evaluation) {
  std::string text = str("step ", evaluation.step, ":");
  const char* before = " ";
  for (const auto& [name, value] : evaluation.metrics) {
    if (name == "pass@1_stderr") break;  // the rest is appended below
    const bool is_score = name == evaluation.metrics.front().first;
    if (!is_score && std::isnan(value)) continue;
    text += str(before, name == "pass@1" ? evaluation.measure : name, " ", score_text(value, 4));
    before = ", ";
  }
  const auto problems = evaluation.metrics.find("problems");
  if (!problems) return text;
  const auto number = [&](const char* name) { return evaluation.metrics.at(name); };
  if (const double error = number("pass@1_stderr"); !std::isnan(error))
    text += ", standard error " + score_text(error, 4);
  text += str(" (", score_text(*problems, 0), " problems, mean length ",
              score_text(number("eval/mean_length"), 1), ", ",
              score_text(100 * number("eval/clipped_ratio"), 0), " % truncated");
  if (const double full = number("eval/context_ratio"); full > 0)
    text += str(", ", score_text(100 * full, 0), " % in a full context");
  return text + ")";
}

Json metric_json(const std::string& name, double value) {
  return name == "problems" ? Json(static_cast<int64_t>(value)) : Json(value);
}

Json evaluation_json(const Evaluation& evaluation) {
  Json line;
  line.set("step", evaluation.step).set("time", utc_now()).set("eval", true);
  for (const auto& [name, value] : evaluation.metrics) line.set(name, metric_json(name, value));
  if (!evaluation.rule.empty()) line.set("correct", evaluation.rule);
  return line.set("time/evaluation", evaluation.seconds);
}

Json sample_json(const Evaluation& evaluation, const ProblemResult& problem) {
  Json line;
  line.set("step", evaluation.step).set("eval", true).set("prompt", problem.prompt);
  line.set("completion", problem.completion).set("answer", problem.answer);
  return line.set("correct", verdict(problem));
}

Json score_json(const Evaluation& evaluation) {
  Json list = Json(Json::Array{});
  for (size_t i = 0; i < std::min(evaluation.samples.size(), kShownCompletions); ++i) {
    const ProblemResult& problem = evaluation.samples[i];
    list.push_back(Json()
                       .set("prompt", problem.prompt)
                       .set("completion", problem.completion)
                       .set("correct", verdict(problem)));
  }
  Json out;
  out.set("score", evaluation.score).set("measure", evaluation.measure);
  if (const auto loss = evaluation.metrics.find("val_loss")) out.set("val_loss", *loss);
  return out.set("completions", std::move(list));
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
                  " ", score_text(number_or_nan(part->at("score")), 3), "):\n",
                  completions_text(part->at("completions")));
    }
  return text;
}

}  // namespace cohort
