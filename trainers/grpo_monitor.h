// Watches the numbers of a GRPO run for the ways in which such runs go wrong, and says what may
// help. The thresholds are ours; what they stand for is in docs/grpo.md, section 9.
#pragma once

#include <deque>
#include <set>
#include <string>
#include <vector>

#include "data/json.h"
#include "trainers/config.h"
#include "trainers/reporter.h"

namespace cohort {

class GrpoMonitor {
 public:
  // `saved`: what state() gave before an interruption, or null.
  GrpoMonitor(const TrainConfig& config, const Json& saved);
  // Takes in the metrics of one step. Returns a warning, with reason and next step, for each fault
  // that begins with it; one that lasts is told once.
  std::vector<std::string> observe(const Metrics& metrics);
  Json state() const;

 private:
  // The last few measured values of one metric.
  struct Window {
    std::deque<double> values;
    void add(double value);
    bool full() const;
    double mean() const;
    double deviation() const;
  };
  void look_at_reward();
  void look_at_entropy();
  void look_at_lengths_and_clips();
  void look_at_groups(double silent_share);
  void set_fault(const char* name, bool holds, const std::string& warning);

  double best_possible_;  // reward, if every single one is at most 1
  Window reward_, entropy_, clipped_, truncated_;
  double best_reward_, best_deviation_ = 0, first_entropy_;
  int64_t silent_steps_ = 0;
  std::set<std::string> faults_;  // that hold now
  std::vector<std::string> warnings_;
};

}  // namespace cohort
