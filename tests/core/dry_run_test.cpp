// Tensors without elements.
#include "core/dry_run.h"

#include "core/tensor.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

TEST(DryRun, CountsTensorMemory) {
  const AllocatorStats before = allocator({}).stats();
  {
    const DryRun run(Device::cuda(7));  // not in this machine
    const Tensor a = Tensor::zeros({int64_t{1} << 40}, DType::kF32, Device::cuda(7));
    {
      const Tensor b = a.narrow(0, 0, 3).clone();
      EXPECT_EQ(run.stats().live_bytes, (int64_t{4} << 40) + 512);
    }
    EXPECT_EQ(run.stats().live_bytes, int64_t{4} << 40);
    EXPECT_EQ(run.stats().peak_bytes, (int64_t{4} << 40) + 512);
    EXPECT_EQ(run.stats().allocations, 2);
  }
  EXPECT_EQ(allocator({}).stats().allocations, before.allocations);
  EXPECT_EQ(Tensor::full({2}, 3, DType::kF64).to_vector<double>(), (std::vector<double>{3, 3}));
}

TEST(DryRun, HasNoElementsToRead) {
  const DryRun run({});
  const Tensor t = Tensor::zeros({2}, DType::kF32);
  EXPECT_THROW_WITH(t.data<float>(), Error, "f32[2] on cpu has no elements: it is of a dry run");
  EXPECT_THROW_WITH(t.item(), Error, "expected one element");
  EXPECT_EQ(Tensor::empty({0}, DType::kF32).to_vector<float>().size(), 0u);
}

TEST(DryRun, EarlierTensorsKeepTheirElements) {
  Tensor real = Tensor::full({2}, 3, DType::kF64);
  {
    const DryRun run({});
    Tensor moved = std::move(real);
    EXPECT_EQ(moved.to_vector<double>(), (std::vector<double>{3, 3}));
    EXPECT_EQ(run.stats().live_bytes, 0);
  }
}

}  // namespace
}  // namespace cohort
