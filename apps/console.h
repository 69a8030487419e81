// Console output of a run: a progress bar with the time left if standard error is a terminal, else
// plain lines. The bar is truncated to the terminal's width. Messages are also written to the log
// file.
#pragma once

#include <chrono>
#include <cstdio>

#include "runs/report.h"

namespace cohort::apps {

class Console final : public Reporter {
 public:
  Console();
  void begin_stage(const std::string& name, int64_t step, int64_t steps) override;
  void step(int64_t step, const Metrics& metrics) override;
  void message(const std::string& text) override;
  void end_stage() override;

 private:
  using Clock = std::chrono::steady_clock;
  void clear_bar();
  std::string line(int64_t step, double elapsed, const Metrics& metrics) const;
  bool is_terminal_, bar_visible_ = false;
  std::string stage_;
  int64_t first_step_ = 0, steps_ = 0;
  Clock::time_point start_, last_update_;
};

}  // namespace cohort::apps
