// Detects common failure modes of GRPO runs in their metrics and suggests remedies. The thresholds
// are heuristics, explained in docs/grpo.md, section 9.
#pragma once

#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "rl/grpo_config.h"
#include "text/json.h"
#include "trainers/metrics.h"

namespace cohort {

// The score of an evaluation from 0 to 1 (NaN: there is none), its standard error (NaN: not known)
// and its step.
struct EvaluationScore {
  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  double value = kUnknown, error = kUnknown, step = kUnknown;
};

class GrpoMonitor {
 public:
  // `saved`: the state() before an interruption, or null.
  GrpoMonitor(const GrpoConfig& config, const Json& saved);
  // Adds the metrics of one step, and the score of the last evaluation. Returns a warning, with
  // reason and hint, for each diagnostic that becomes active with the step; one that stays active
  // is reported once.
  std::vector<std::string> observe(const Metrics& metrics, const EvaluationScore& score = {});
  Json state() const;

 private:
  static constexpr double kUnknown = EvaluationScore::kUnknown;

  // The latest measured values of a metric.
  class History {
   public:
    void add(double value);  // but not NaN
    const std::deque<double>& values() const { return values_; }
    // Statistics of the last `steps` values, for mean() of those before the last `skipped` ones;
    // NaN if there are fewer.
    double mean(size_t steps, size_t skipped = 0) const;
    double deviation(size_t steps) const;
    bool is_measured() const { return is_measured_; }  // the value of the last add()

   private:
    std::deque<double> values_;
    bool is_measured_ = false;
  };
  // A warning that observe() gives when it becomes active: its name in state(), and its text, which
  // is empty while it is inactive.
  struct Diagnostic {
    const char* name;
    std::function<std::string(const GrpoMonitor&)> warning;
  };
  static const std::vector<Diagnostic>& diagnostics();
  std::string reward_collapse() const;
  std::string entropy_explosion() const;
  std::string entropy_collapse() const;
  std::string low_entropy() const;
  std::string large_updates() const;
  std::string truncation(const char* metric, const char* end, const char* hint) const;
  std::string length_change(double factor, const char* change, const char* hint) const;
  std::string spike(const char* metric) const;
  std::string overfitting() const;
  std::string zero_signal() const;

  const History& history(const char* metric) const { return histories_.at(metric); }
  // The mean over the last few steps, or over as many as there are; 0 without any.
  double recent_mean(const char* metric) const;
  void add_evaluation(const EvaluationScore& score);
  void update_extremes(const Metrics& metrics);
  bool is_solved() const;
  std::string larger_beta() const;  // the words of a hint

  GrpoConfig config_;
  std::map<std::string, History> histories_;
  // Extremes so far and latest values, by their names in state().
  std::map<std::string, double> numbers_;
  double pass_at_1_ = kUnknown;  // the last evaluation's
  std::set<std::string> active_;
};

}  // namespace cohort
