// CPU collectives between processes: the same bits as between ranks of one process.
#include <cmath>

#include "distributed/communicator.h"
#include "tests/distributed/process_ranks.h"

namespace cohort {
namespace {

using test::bit_equal;
using test::expect_no_errors;
using test::random_tensor;
using test::run_process_ranks;

// Sums and maxima of every dtype, and exchanged rows.
std::vector<Tensor> results_of(Communicator& comm) {
  std::vector<Tensor> out;
  for (const int64_t n : {0, 1, 7, 2049})
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kI64, DType::kI32}) {
      Tensor sum = random_tensor({n}, DType::kF64, 100 + static_cast<uint64_t>(comm.rank()),
                                 std::pow(30.0, comm.rank()))
                       .to(dtype);
      Tensor max = sum.clone();
      comm.all_reduce(sum);
      comm.all_reduce(max, Reduce::kMax);
      comm.barrier();
      Tensor rows = Tensor::empty({comm.size(), n}, dtype), all = rows.clone();
      const Tensor parts =
          random_tensor({comm.size(), n + 1}, DType::kF64, 500 + static_cast<uint64_t>(comm.rank()))
              .to(dtype);
      comm.all_to_all(rows, parts.narrow(1, 0, n));
      all.select(0, comm.rank()).copy_(sum);
      comm.all_gather(all);
      out.insert(out.end(), {sum, max, rows, all});
    }
  return out;
}

// With the default limit, where tensors fit into one exchange, and in chunks of 168 bytes (2 ranks)
// or 112 (3 ranks).
class ProcessCommunicator : public testing::TestWithParam<size_t> {
 protected:
  static ProcessGroup::Options options() {
    ProcessGroup::Options out = test::quick_options();
    out.max_exchange = GetParam();
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(MaxExchange, ProcessCommunicator,
                         testing::Values(ProcessGroup::Options{}.max_exchange, size_t{340}));

TEST_P(ProcessCommunicator, GivesTheBitsOfRanksInOneProcess) {
  for (const int ranks : {2, 3}) {
    std::vector<std::vector<Tensor>> expected(static_cast<size_t>(ranks));
    run_local_ranks(ranks, [&](Communicator& comm) {
      expected[static_cast<size_t>(comm.rank())] = results_of(comm);
    });
    expect_no_errors(run_process_ranks(
        ranks,
        [&](ProcessGroup& group) {
          const auto comm = make_communicator(group, Device{});
          EXPECT_EQ(comm->rank(), group.rank());
          EXPECT_EQ(comm->size(), ranks);
          const auto results = results_of(*comm);
          const auto& references = expected[static_cast<size_t>(group.rank())];
          ASSERT_EQ(results.size(), references.size());
          for (size_t i = 0; i < results.size(); ++i)
            EXPECT_TRUE(bit_equal(results[i], references[i])) << i;
        },
        options()));
  }
}

TEST_P(ProcessCommunicator, DisagreementIsReportedWithBothCalls) {
  const auto errors = run_process_ranks(
      2,
      [](ProcessGroup& group) {
        const auto comm = make_communicator(group, Device{});
        Tensor t = Tensor::zeros({group.rank() == 0 ? 3 : 4}, DType::kF32);
        comm->all_reduce(t);
      },
      options());
  for (const std::string& error : errors)
    EXPECT_NE(error.find("[all_reduce] ranks disagree about call 1: rank 0 calls all_reduce of "
                         "f32[3], rank 1 calls all_reduce of f32[4]"),
              std::string::npos)
        << error;
}

}  // namespace
}  // namespace cohort
