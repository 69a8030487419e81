// Traces of work on the CPU.
#include "core/trace.h"

#include "core/tensor.h"
#include "core/with_cuda.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using Kind = TraceEvent::Kind;

void inner() {}
void outer() {
  on_device<inner, inner>({});
}
int query() {
  return 1;
}

TEST(Trace, RecordsNestedOps) {
  on_device<outer, outer>({});  // before the trace
  Trace trace({});
  const int64_t begin = trace_clock();
  on_device<outer, outer>({});
  on_device<inner, inner>({});
  on_device<query, query>({});
  trace_phase("all", begin, trace_clock());
  const std::vector<TraceEvent> events = trace.finish();
  on_device<inner, inner>({});  // after the trace

  std::vector<std::string> names;
  for (const TraceEvent& event : events) {
    names.push_back(event.name);
    EXPECT_GE(event.begin, begin) << event.name;
    EXPECT_GE(event.end, event.begin) << event.name;
  }
  EXPECT_EQ(names, (std::vector<std::string>{"outer", "inner", "inner", "all", "synchronize"}));
  EXPECT_EQ(events[0].op, -1);
  EXPECT_EQ(events[1].op, 0);
  EXPECT_LE(events[1].end, events[0].end);
  EXPECT_EQ(events[2].op, -1);
  EXPECT_EQ(events[3].kind, Kind::kPhase);
}

TEST(Trace, NamesTheOpsOfTensors) {
  Trace trace({});
  Tensor t = Tensor::zeros({4}, DType::kF32);
  t.copy_(Tensor::full({4}, 2, DType::kF32));
  const std::vector<TraceEvent> events = trace.finish();
  std::vector<std::string> names;
  for (const TraceEvent& event : events) names.push_back(event.name);
  EXPECT_EQ(names, (std::vector<std::string>{"zero", "fill", "copy", "synchronize"}));
}

TEST(Trace, AllowsOneTracePerThread) {
  {
    Trace first({});
    EXPECT_THROW_WITH(Trace second({}), Error, "this thread is being traced");
    on_device<inner, inner>({});
  }
  Trace next({});
  EXPECT_EQ(next.finish().size(), 1u);  // the synchronization in finish()
  EXPECT_THROW_WITH(next.finish(), Error, "expected to end once");
}

}  // namespace
}  // namespace cohort
