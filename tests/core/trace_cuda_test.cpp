// Traces of GPU work.
#include "core/tensor.h"
#include "core/trace.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using Kind = TraceEvent::Kind;

TEST(CudaTrace, AttributesKernelsToOps) {
  COHORT_REQUIRE_GPU(device);
  Tensor t = Tensor::empty({1 << 20}, DType::kF32, device);
  for (int attempt = 0; attempt < 2; ++attempt) {
    Trace trace(device);
    const int64_t begin = trace_clock();
    t.fill_(3);
    const Tensor host = t.to(Device{});
    const std::vector<TraceEvent> events = trace.finish();
    const int64_t end = trace_clock();
    int kernels = 0, copies = 0;
    for (const TraceEvent& event : events) {
      if (event.kind == Kind::kOp) continue;
      kernels += event.kind == Kind::kKernel;
      copies += event.kind == Kind::kCopy;
      // Host and device clocks agree within some microseconds.
      EXPECT_GE(event.begin, begin - 1'000'000) << event.name;
      EXPECT_LE(event.end, end + 1'000'000) << event.name;
      EXPECT_GT(event.end, event.begin) << event.name;
      ASSERT_GE(event.op, 0) << event.name;
      EXPECT_EQ(events[static_cast<size_t>(event.op)].name,
                event.kind == Kind::kKernel ? "fill" : "copy");
    }
    EXPECT_EQ(kernels, 1);
    EXPECT_EQ(copies, 1);
  }
}

}  // namespace
}  // namespace cohort
