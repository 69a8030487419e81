// What a run tells its user. Trainers report, the command line tool prints (apps/console.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace cohort {

// Named numbers in the order they are shown and written.
using Metrics = std::vector<std::pair<std::string, double>>;

class Reporter {
 public:
  virtual ~Reporter() = default;
  virtual void begin_stage(const std::string& /*name*/, int64_t /*step*/, int64_t /*steps*/) {}
  // After each step: how far, and the numbers worth a glance.
  virtual void step(int64_t /*step*/, const Metrics& /*metrics*/) {}
  // Something worth a line of its own: an evaluation, a checkpoint, a report.
  virtual void message(const std::string& /*text*/) {}
  virtual void end_stage() {}
};

// y over x as text, `height` lines high: "reward" curves for the terminal.
std::string text_curve(const std::vector<double>& values, int width, int height);

}  // namespace cohort
