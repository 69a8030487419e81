// The logs of a run, read to be looked at: curves, samples of completions, warnings. A file that is
// not there is empty, and a last line that a kill cut short counts for nothing. All functions throw
// InputError if the path leads to something else than a file, and Error if it cannot be read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/json.h"

namespace cohort {

// One number of metrics.jsonl, in the order of the file; what was not measured is left out.
struct Curve {
  std::string name;
  std::vector<int64_t> steps;
  std::vector<double> values;
};

struct MetricsLog {
  std::vector<Curve> curves;  // in the order in which they appear; the first thousand
  int64_t last_step = 0;
  std::string begin, end;  // the times of the first and the last line; empty: there is none
  std::string rule;        // what counts as right: "task >= 1"; empty: nothing is judged
  int64_t unreadable = 0;  // lines
};
MetricsLog read_metrics(const std::string& path);

// Which of a curve's points to draw, at most `limit` (at least 4): all, or the first, the last and
// the least and the greatest value of each of equal stretches, so that no spike is lost.
std::vector<size_t> kept_points(const std::vector<double>& values, size_t limit);

// A curve without its noise: the mean of each of a hundred equal stretches, at the step in its
// middle. Empty for curves of up to 200 points, which can be seen through.
Curve trend_of(const Curve& curve);

struct CompletionsLog {
  Json samples = Json(Json::Array{});  // objects as in the file, with long texts cut
  int64_t unreadable = 0;
};
// The completions of some steps from the first to the last, of training and of evaluations.
CompletionsLog read_completions(const std::string& path);

// The warnings and errors of a log.txt, those that differ by numbers only as one.
struct Warning {
  std::string level;        // "warning", "error", "failed"
  std::string text;         // the newest
  std::string hint;         // what to do about it; may be empty
  std::string first, last;  // local times
  int64_t count = 0;
};
struct MessageLog {
  std::vector<Warning> warnings;  // in the order in which they first came
  std::string last;               // message of all
};
MessageLog read_messages(const std::string& path);

}  // namespace cohort
