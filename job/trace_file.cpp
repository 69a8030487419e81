#include "job/trace_file.h"

#include <algorithm>
#include <compare>
#include <set>

#include "text/json.h"

namespace cohort {
namespace {

using Kind = TraceEvent::Kind;

// Row of an event: Chrome's "process" and "thread".
struct Row {
  int64_t group, row;
  auto operator<=>(const Row&) const = default;
};
constexpr int64_t kHost = 1, kGpu = 2;

Row row_of(const TraceEvent& event) {
  if (event.kind == Kind::kPhase) return {kHost, 1};
  if (event.kind == Kind::kOp) return {kHost, 2};
  return {kGpu, event.stream};
}

Json name_event(const char* kind, Row row, const std::string& name) {
  return Json()
      .set("ph", "M")
      .set("name", kind)
      .set("pid", row.group)
      .set("tid", row.row)
      .set("args", Json().set("name", name));
}

double microseconds(int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) * 1e-3;
}

}  // namespace

std::string chrome_trace(std::span<const TraceEvent> events) {
  int64_t first = events.empty() ? 0 : events[0].begin;
  std::set<Row> rows;
  for (const TraceEvent& event : events) {
    first = std::min(first, event.begin);
    rows.insert(row_of(event));
  }
  std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  const auto add = [&](const Json& event) {
    out += out.back() == '[' ? "\n" : ",\n";
    out += event.dump();
  };
  for (const Row& row : rows) {
    add(name_event("process_name", row, row.group == kGpu ? "GPU" : "host"));
    add(name_event("thread_name", row,
                   row.group == kGpu ? str("stream ", row.row)
                   : row.row == 1    ? "phases"
                                     : "ops"));
  }
  for (const TraceEvent& event : events) {
    const Row row = row_of(event);
    Json line;
    line.set("ph", "X")
        .set("name", event.name)
        .set("pid", row.group)
        .set("tid", row.row)
        .set("ts", microseconds(event.begin - first))
        .set("dur", microseconds(event.end - event.begin));
    if (row.group == kGpu && event.op >= 0)
      line.set("args", Json().set("op", events[static_cast<size_t>(event.op)].name));
    add(line);
  }
  return out + "\n]}\n";
}

}  // namespace cohort
