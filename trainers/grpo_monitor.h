// Detects common failure modes of GRPO runs in their metrics and suggests remedies. The thresholds
// are heuristics, explained in docs/grpo.md, section 9.
#pragma once

#include <array>
#include <deque>
#include <limits>
#include <set>
#include <string>
#include <utility>
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
  static constexpr size_t kWindow = 5;       // steps
  static constexpr size_t kLongWindow = 25;  // its first and its last kWindow are compared
  static constexpr size_t kMedianWindow = 50;
  static constexpr double kUnknown = EvaluationScore::kUnknown;

 public:
  // `saved`: the state() before an interruption, or null.
  GrpoMonitor(const GrpoConfig& config, const Json& saved);
  // Adds the metrics of one step, and the score of the last evaluation. Returns a warning, with
  // reason and hint, for each diagnostic that becomes active with the step; one that stays active
  // is reported once.
  std::vector<std::string> observe(const Metrics& metrics, const EvaluationScore& score = {});
  Json state() const;

 private:
  // The last few measured values of one metric.
  struct Window {
    size_t size = kWindow;
    std::deque<double> values = {};
    void add(double value);
    bool full() const { return values.size() == size; }
    double mean() const;
    double deviation() const;
    double median() const;
    // Means of the first and the last kWindow values.
    double first_mean() const;
    double last_mean() const;
  };
  // The names in state() of the numbers and windows, with pointers to them.
  template <class Self>
  static auto numbers_of(Self& self) {
    return std::array{std::pair("best_reward", &self.best_reward_),
                      std::pair("best_deviation", &self.best_deviation_),
                      std::pair("first_entropy", &self.first_entropy_),
                      std::pair("highest", &self.highest_),
                      std::pair("lowest", &self.lowest_),
                      std::pair("learning_rate", &self.learning_rate_),
                      std::pair("score_step", &self.score_step_)};
  }
  template <class Self>
  static auto windows_of(Self& self) {
    return std::array{std::pair("reward", &self.reward_),
                      std::pair("entropy", &self.entropy_),
                      std::pair("clipped", &self.clipped_),
                      std::pair("kl_old", &self.kl_old_),
                      std::pair("truncated", &self.truncated_),
                      std::pair("context", &self.context_),
                      std::pair("rewards", &self.rewards_),
                      std::pair("lengths", &self.lengths_),
                      std::pair("kl", &self.kl_),
                      std::pair("grad_norms", &self.grad_norms_),
                      std::pair("scores", &self.scores_),
                      std::pair("score_errors", &self.score_errors_),
                      std::pair("score_rewards", &self.score_rewards_),
                      std::pair("score_reward_errors", &self.score_reward_errors_)};
  }
  void check_reward();
  void check_entropy();
  void check_lengths_and_clips();
  void check_length_change();
  void check_spike(const char* metric, Window& earlier, double value);
  void check_evaluations(const EvaluationScore& score);
  void check_signal(double zero_signal_fraction);
  bool is_solved() const;
  void set_diagnostic(const char* name, bool active, const std::string& warning);

  GrpoConfig config_;
  Window reward_, entropy_, clipped_, kl_old_, truncated_, context_;
  Window rewards_{kLongWindow}, lengths_{kLongWindow}, kl_{kMedianWindow},
      grad_norms_{kMedianWindow};
  // Evaluations, and the mean rewards at their steps, with their standard errors.
  Window scores_{4}, score_errors_{4}, score_rewards_{4}, score_reward_errors_{4};
  double best_reward_ = kUnknown, best_deviation_ = 0, first_entropy_ = kUnknown;
  double highest_ = kUnknown, lowest_ = kUnknown;        // rewards of single completions so far
  double pass_at_1_ = kUnknown, score_step_ = kUnknown;  // the last evaluation's
  double learning_rate_ = kUnknown;                      // the last step's
  int64_t zero_signal_steps_ = 0;  // latest steps in a row in which most groups have zero variance
  std::set<std::string> active_diagnostics_;
  std::vector<std::string> warnings_;
};

}  // namespace cohort
