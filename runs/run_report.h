// Report of a run for display, read from its folder, in any state: in progress, killed, resumed or
// finished.
#pragma once

#include <string>

#include "text/json.h"

namespace cohort {

// {"name", "path", "status", "stages": [...], "warnings": [...]}; a stage has
// {"name", "trainer", "facts", "curves", "completions", "config"}. The names below are those that
// apps/report/page.html reads. `path` is a run directory or that of one of its stages; a curve has
// at most `points` points. Throws InputError if it is neither, Error if it cannot be read.
Json run_report(const std::string& path, size_t points);

}  // namespace cohort
