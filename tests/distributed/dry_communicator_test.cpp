// Calls that a DryCommunicator records.
#include "distributed/dry_communicator.h"

#include "core/dry_run.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

TEST(DryCommunicator, RecordsWhatARankSendsToOthers) {
  DryCommunicator comm(3, 4);
  const DryRun run(Device::cuda());
  const auto of = [](const Shape& shape) {
    return Tensor::empty(shape, DType::kF32, Device::cuda());
  };
  Tensor sums = of({10, 100}), received = of({4, 64}), all = of({4, 32});
  comm.all_reduce(sums, Reduce::kSum);
  comm.all_to_all(received, of({4, 640}).narrow(1, 64, 64), {1, 4});
  comm.all_gather(all);
  comm.barrier();
  const std::vector<DryCommunicator::Call>& calls = comm.calls();
  ASSERT_EQ(calls.size(), 4);
  EXPECT_EQ(calls[0].text, "all_reduce of f32[10, 100]");
  EXPECT_EQ(calls[0].sent, 2 * 3 * 1000);  // two rounds of three quarters of 4,000 bytes
  EXPECT_EQ(calls[1].text, "all_to_all of f32[4, 64]");
  EXPECT_EQ(calls[1].sent, 3 * 64 * 4);
  EXPECT_EQ(calls[2].text, "all_gather of f32[4, 32]");
  EXPECT_EQ(calls[2].sent, 3 * 32 * 4);
  EXPECT_EQ(calls[3].text, "barrier");
  EXPECT_EQ(calls[3].sent, 0);
}

TEST(DryCommunicator, KeepsTheElementsThatThereAre) {
  DryCommunicator comm(0, 2);
  Tensor numbers = Tensor::from(std::vector<double>{3, 4});
  comm.all_reduce(numbers, Reduce::kMax);
  EXPECT_EQ(numbers.to_vector<double>(), (std::vector<double>{3, 4}));
}

TEST(DryCommunicator, ChecksCallsAsOthersDo) {
  DryCommunicator comm(0, 2);
  Tensor three = Tensor::zeros({3, 4}, DType::kF32);
  EXPECT_THROW_WITH(comm.all_gather(three), Error, "expected a row for each of 2 ranks");
  EXPECT_THROW_WITH(comm.all_to_all(three, three, {1, 2}), Error, "for each of 2 ranks");
  EXPECT_THROW_WITH(DryCommunicator(2, 2), Error, "expected a rank of 2, got 2");
  EXPECT_TRUE(comm.calls().empty());
}

}  // namespace
}  // namespace cohort
