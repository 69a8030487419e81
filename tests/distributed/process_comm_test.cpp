// CPU collectives between processes: the same bits as between ranks of one process.
#include <atomic>
#include <cmath>

#include "distributed/communicator.h"
#include "distributed/rendezvous.h"
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
                                 std::pow(4.0, comm.rank()))
                       .to(dtype);
      Tensor max = sum.clone();
      comm.all_reduce(sum);
      comm.all_reduce(max, Reduce::kMax);
      comm.barrier();
      Tensor all = Tensor::empty({comm.size(), n}, dtype);
      const Tensor parts =
          random_tensor({comm.size(), n + 1}, DType::kF64, 500 + static_cast<uint64_t>(comm.rank()))
              .to(dtype);
      const int half = comm.size() % 2 == 0 ? comm.size() / 2 : 1;
      for (const RankSets& among :
           {RankSets{1, comm.size()}, {1, half}, {half, comm.size() / half}}) {
        Tensor& rows = out.emplace_back(Tensor::empty({among.count, n}, dtype));
        comm.all_to_all(rows, parts.narrow(0, 0, among.count).narrow(1, 0, n), among);
      }
      all.select(0, comm.rank()).copy_(sum);
      comm.all_gather(all);
      out.insert(out.end(), {sum, max, all});
    }
  return out;
}

// With the default limit, where tensors fit into one exchange, and in chunks of 336 bytes.
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
  for (const int ranks : {2, 3, 6}) {
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

TEST(Exchanges, APartMayBeAsLargeForManyRanks) {
  auto options = test::quick_options();
  options.max_exchange = 340;
  const std::string text(options.max_exchange, 'x');
  expect_no_errors(run_process_ranks(
      3,
      [&](ProcessGroup& group) {
        EXPECT_EQ(group.broadcast("text", group.rank() == 0 ? text : ""), text);
        if (group.rank() == 0)
          EXPECT_THROW_WITH(group.broadcast("text", text + "x"), Error, "at most 340 bytes");
      },
      options));
}

// Plays a rank above 0 in an exchange to which it contributes `part`, and returns the bytes that
// rank 0 has sent it until the result was there.
size_t bytes_sent_to(const RankInfo& info, const std::string& call, const std::string& part) {
  std::vector<Peer> peers = rendezvous(info, std::chrono::milliseconds(10000));
  wire::Connection& connection = peers[0].connection;
  connection.post(wire::FrameType::kData,
                  wire::Packer().integer(1).integer(1).text(call).bytes() + part);
  size_t received = 0;
  for (bool done = false; !done && connection.is_open();) {
    connection.send();
    poll_until(Clock::now() + std::chrono::milliseconds(10), {{connection.fd(), POLLIN, 0}});
    connection.receive();
    while (const auto frame = connection.next()) {
      received += frame->payload.size();
      done |= frame->type == wire::FrameType::kResult;
    }
  }
  connection.post(wire::FrameType::kExit, wire::Packer().integer(1).integer(0).bytes());
  connection.send();
  return received;
}

TEST(Exchanges, RankZeroSendsAResultOnceToEachOf64Ranks) {
  constexpr int kRanks = 64;
  const int port = free_port();
  Tensor sum = Tensor::full({4096}, 1, DType::kF32);
  const auto bytes = static_cast<size_t>(sum.nbytes());
  const std::string part(static_cast<const char*>(sum.raw()), bytes);
  std::atomic<size_t> sent = 0;
  {
    std::vector<std::jthread> threads;
    for (int rank = 1; rank < kRanks; ++rank)
      threads.emplace_back([&, rank] {
        sent +=
            bytes_sent_to(test::local_info(rank, kRanks, port), "all_reduce of f32[4096]", part);
      });
    ProcessGroup group(test::local_info(0, kRanks, port), ProcessGroup::default_options());
    make_communicator(group, Device{})->all_reduce(sum);
  }
  EXPECT_TRUE(bit_equal(sum, Tensor::full({4096}, kRanks, DType::kF32)));
  EXPECT_GE(sent, (kRanks - 1) * bytes);
  EXPECT_LT(sent, 2 * kRanks * bytes);  // half of it for heartbeats on a busy machine
}

// Rows of 1 KiB: what each of 16 ranks gets, not all that they send.
TEST(Exchanges, RankZeroSendsEachRankItsRowsOnly) {
  constexpr int kRanks = 16;
  const int port = free_port();
  const Tensor rows = Tensor::full({kRanks, 256}, 1, DType::kF32);
  Tensor received = Tensor::zeros({kRanks, 256}, DType::kF32);
  const auto bytes = static_cast<size_t>(rows.nbytes());
  const std::string part(static_cast<const char*>(rows.raw()), bytes);
  std::atomic<size_t> sent = 0;
  {
    std::vector<std::jthread> threads;
    for (int rank = 1; rank < kRanks; ++rank)
      threads.emplace_back([&, rank] {
        sent +=
            bytes_sent_to(test::local_info(rank, kRanks, port), "all_to_all of f32[16, 256]", part);
      });
    ProcessGroup group(test::local_info(0, kRanks, port), ProcessGroup::default_options());
    make_communicator(group, Device{})->all_to_all(received, rows, {1, kRanks});
  }
  EXPECT_TRUE(bit_equal(received, rows));
  EXPECT_GE(sent, (kRanks - 1) * bytes);
  EXPECT_LT(sent, 2 * kRanks * bytes);
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
