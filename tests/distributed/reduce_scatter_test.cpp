// Sums over ranks in parts: the bits of one tree over all ranks, wherever the ranks are.
#include "distributed/reduce_scatter.h"

#include <cmath>

#include "distributed/dry_communicator.h"
#include "tests/support/host_layout.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using test::bit_equal;
using test::HostLayout;
using test::random_tensor;

struct Layout {
  int hosts, local;
  bool in_levels;
};
constexpr Layout kLayouts[] = {{1, 1, false}, {1, 5, false}, {2, 1, false}, {2, 2, true},
                               {2, 4, true},  {4, 2, true},  {3, 2, true},  {3, 8, true},
                               {2, 3, false}, {3, 5, false}};

// The rank's parts, of magnitudes that make bits depend on the order of the sum. Those in bf16 are
// added in f32.
Tensor contribution(int rank, int ranks, int64_t n, DType dtype) {
  return random_tensor({ranks, n}, DType::kF64, 300 + static_cast<uint64_t>(rank),
                       std::pow(4.0, rank % 8))
      .to(dtype);
}

// On each rank: its row of the parts' sum, to which y's values are added or not.
Tensor reduced(Communicator& comm, const Tensor& given, kernels::Grad mode) {
  const DType dtype = accumulate_dtype(given.dtype());
  const int64_t n = given.dim(1);
  Tensor wide = Tensor::full({comm.size(), n + 3}, 1e9, dtype);
  Tensor parts = wide.narrow(1, 2, n);
  parts.copy_(given.to(dtype));
  Tensor y = Tensor::full({n}, 0.1, dtype);
  reduce_scatter(comm, parts, Tensor::full({comm.size() * n + 5}, -1e9, dtype), {y, mode});
  EXPECT_TRUE(bit_equal(parts.contiguous(), given.to(dtype)));  // which other ranks may still read
  return y;
}

TEST(ReduceScatter, HasTheBitsOfOneTreeForAnyHosts) {
  for (const auto& [hosts, local, in_levels] : kLayouts)
    for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16})
      for (const int64_t n : {1, 7, 65, 1003})
        for (const kernels::Grad mode : {kernels::Grad::kOverwrite, kernels::Grad::kAccumulate}) {
          SCOPED_TRACE(str(hosts, " x ", local, ", ", n, " of ", dtype_name(dtype)));
          const int ranks = hosts * local, host_count = hosts;
          run_local_ranks(ranks, [&](Communicator& comm) {
            const Tensor parts = contribution(comm.rank(), ranks, n, dtype);
            HostLayout layout(comm, host_count);
            const Tensor y = reduced(layout, parts, mode);
            EXPECT_TRUE(bit_equal(y, reduced(comm, parts, mode)));
            if (mode == kernels::Grad::kAccumulate) return;
            Tensor sums = parts.clone();  // bf16: rounded once
            comm.all_reduce(sums);
            EXPECT_TRUE(bit_equal(y.to(dtype), sums.select(0, comm.rank()).contiguous()));
          });
        }
}

TEST(ReduceScatter, AddsInsideHostsFirst) {
  for (const auto& [hosts, local, in_levels] : kLayouts) {
    const int ranks = hosts * local, host_count = hosts, neighbours = local;
    const bool levels = in_levels;
    run_local_ranks(ranks, [&](Communicator& comm) {
      HostLayout layout(comm, host_count);
      reduced(layout, contribution(comm.rank(), ranks, 5, DType::kF32), kernels::Grad::kOverwrite);
      std::vector<std::string> expected(
          static_cast<size_t>(levels ? host_count : 1),
          str("all_to_all of f32[", levels ? neighbours : ranks, ", 5]"));
      if (levels)
        expected.push_back(
            str("all_to_all of f32[", host_count, ", 5] among ranks ", neighbours, " apart"));
      EXPECT_EQ(layout.calls, expected);
    });
  }
}

// A rank sends to other hosts the row of each, instead of those of all their ranks.
TEST(ReduceScatter, OtherHostsReceiveSums) {
  constexpr int64_t kRow = 4 * 60;  // bytes
  for (const auto& [hosts, local, in_levels] : kLayouts)
    for (const int rank : {0, hosts * local - 1}) {
      SCOPED_TRACE(str(hosts, " x ", local));
      DryCommunicator comm(rank, hosts * local, hosts);
      reduced(comm, Tensor::zeros({hosts * local, 60}, DType::kF32), kernels::Grad::kOverwrite);
      int64_t sent = 0, far = 0;
      for (const DryCommunicator::Call& call : comm.calls()) {
        sent += call.sent;
        far += call.far;
      }
      EXPECT_EQ(sent, (hosts * local - 1) * kRow);
      EXPECT_EQ(far, (hosts - 1) * (in_levels ? 1 : local) * kRow);
    }
}

}  // namespace
}  // namespace cohort
