// Progress of a run for its user. Trainers report, the command line tool prints (apps/console.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trainers/metrics.h"

namespace cohort {

// The time of day as in RFC 3339, to the millisecond: "2026-11-22T09:30:00.123Z".
std::string utc_now();

class Reporter {
 public:
  virtual ~Reporter() = default;
  virtual void begin_stage(const std::string& /*name*/, int64_t /*step*/, int64_t /*steps*/) {}
  // Called after each step with its metrics.
  virtual void step(int64_t /*step*/, const Metrics& /*metrics*/) {}
  // A line of its own: an evaluation, a checkpoint, a report.
  virtual void message(const std::string& /*text*/) {}
  virtual void end_stage() {}
};

// A curve as text, `height` lines high, for the terminal.
std::string text_curve(const std::vector<double>& values, int width, int height);

}  // namespace cohort
