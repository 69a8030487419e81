// The logs of a run for display: curves, samples of completions, warnings. A missing file counts as
// empty, and a last line that is incomplete after a kill is ignored. All functions throw InputError
// if the path is not a regular file, and Error if it cannot be read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "text/json.h"

namespace cohort {

// One metric of metrics.jsonl, in the order of the file, without missing values.
struct Curve {
  std::string name;
  std::vector<int64_t> steps;
  std::vector<double> values;
};

struct MetricsLog {
  std::vector<Curve> curves;  // in the order in which they appear; the first thousand
  int64_t last_step = 0;
  std::string begin, end;  // times of the first and the last line; empty: none
  std::string rule;        // criterion of a correct completion: "task >= 1"; empty: none
  int64_t unreadable = 0;  // lines
};
MetricsLog read_metrics(const std::string& path);

// Downsamples a curve for drawing. Returns the indices of at most `limit` points (at least 4): all,
// or the first, the last, and the minimum and maximum of each of equal intervals, so that no spike
// is lost.
std::vector<size_t> downsampled_points(const std::vector<double>& values, size_t limit);

// A smoothed curve: the mean of each of a hundred equal intervals, at the step in its middle. Empty
// for curves of up to 200 points, which are readable as they are.
Curve trend_of(const Curve& curve);

struct CompletionsLog {
  Json samples = Json(Json::Array{});  // objects as in the file, with long texts truncated
  int64_t unreadable = 0;
};
// The completions of some steps from the first to the last, of training and of evaluations.
CompletionsLog read_completions(const std::string& path);

// The warnings and errors of a log.txt; those that differ only in numbers are merged.
struct Warning {
  std::string level;        // "warning", "error", "failed"
  std::string text;         // text of the newest
  std::string hint;         // may be empty
  std::string first, last;  // local times
  int64_t count = 0;
};
struct MessageLog {
  std::vector<Warning> warnings;  // in order of first occurrence
  std::string last;               // last message of any level
};
MessageLog read_messages(const std::string& path);

}  // namespace cohort
