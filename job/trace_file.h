// Traces in the Chrome trace event format, which Perfetto (https://ui.perfetto.dev) and
// chrome://tracing display: a row for phases, one for the host's ops, one for each stream of the
// GPU.
#pragma once

#include <span>
#include <string>

#include "core/trace.h"

namespace cohort {

// JSON text; times count from the first event.
std::string chrome_trace(std::span<const TraceEvent> events);

}  // namespace cohort
