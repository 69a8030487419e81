// Data of a run for its page, read from its folder, in any state: in progress, killed, resumed or
// finished.
#pragma once

#include <string>

#include "text/json.h"

namespace cohort {

// The lines of a run's logs, of bounded size, for the script of apps/report/page.html:
//
//   {"path", "config", "whole",    true for a run directory, false for that of one of its stages
//    "stages": [{"name", "metrics": {"lines", "means"}, "completions": lines, "checkpoint"}, ...],
//    "problems": [text, ...],      what could not be read
//    "messages": {"warnings": [{"level", "text", "first", "last", "count"}, ...], "last": text}}
//
// Metrics have all lines of metrics.jsonl up to `limit` (at least 5). Beyond it, each key keeps the
// first, last, least and greatest value of each of limit / 5 intervals, and "means" has
// {KEY: [mean, count], ...} of each. Throws InputError if `path` is not a directory of a run or a
// stage, or has a log that is not a file; Error if it cannot be read.
Json run_report(const std::string& path, size_t limit);

}  // namespace cohort
