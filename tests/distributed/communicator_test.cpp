// Collectives of in-process ranks: values against reference sums, equal bits on every rank, and
// failures that end in an error on every rank instead of a hang. A hang would exceed the time limit
// of ctest.
#include "distributed/communicator.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "core/parallel.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using test::bit_equal;
using test::random_tensor;

constexpr int kRankCounts[] = {1, 2, 3, 5, 8, 15};
constexpr int64_t kSizes[] = {0, 1, 4, 5, 7, 2048, 10001};

// Runs body on `ranks` ranks and returns the error of each ("" without one).
std::vector<std::string> errors_of_ranks(int ranks,
                                         const std::function<void(Communicator&)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  try {
    run_local_ranks(ranks, [&](Communicator& comm) {
      try {
        body(comm);
      } catch (const std::exception& e) {
        errors[static_cast<size_t>(comm.rank())] = e.what();
        throw;
      }
    });
  } catch (const std::exception&) {
  }
  return errors;
}

// One tensor per rank, for comparison after all have ended.
class PerRank {
 public:
  explicit PerRank(int ranks) : tensors_(static_cast<size_t>(ranks)) {}
  void set(const Communicator& comm, const Tensor& t) { tensors_[comm.rank()] = t; }
  const Tensor& operator[](int rank) const { return tensors_[rank]; }

 private:
  std::vector<Tensor> tensors_;
};

// a + b element by element.
Tensor plus(const Tensor& a, const Tensor& b) {
  Tensor out = a.clone();
  dispatch_all(out.dtype(), [&]<class T>() {
    if constexpr (!is_narrow<T>)
      for (int64_t i = 0; i < out.numel(); ++i)
        out.data<T>()[i] = static_cast<T>(a.data<T>()[i] + b.data<T>()[i]);
  });
  return out;
}

// ((t0 + t1) + (t2 + t3)) + ...: neighbours are added, then neighbouring sums, until one is left;
// bf16 in f32, rounded once.
Tensor sum_in_tree(std::vector<Tensor> parts) {
  const DType dtype = parts[0].dtype();
  for (Tensor& part : parts) part = part.to(dtype == DType::kBF16 ? DType::kF32 : dtype);
  while (parts.size() > 1) {
    std::vector<Tensor> sums;
    for (size_t r = 0; r + 1 < parts.size(); r += 2) sums.push_back(plus(parts[r], parts[r + 1]));
    if (parts.size() % 2 == 1) sums.push_back(parts.back());
    parts = sums;
  }
  return parts[0].to(dtype);
}

std::vector<Tensor> random_parts(int ranks, int64_t n, DType dtype) {
  std::vector<Tensor> parts;
  // Values of different magnitude per rank, so that the bits of a sum depend on its order.
  for (int r = 0; r < ranks; ++r)
    parts.push_back(random_tensor({n}, DType::kF64, 100 + r, std::pow(4.0, r)).to(dtype));
  return parts;
}

TEST(LocalRanks, AllReduceSumsInATreeOverRanksWithEqualBitsOnEveryRank) {
  for (const int ranks : kRankCounts)
    for (const int64_t n : kSizes)
      for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kI64, DType::kI32}) {
        const auto parts = random_parts(ranks, n, dtype);
        const Tensor expected = sum_in_tree(parts);
        PerRank results(ranks);
        run_local_ranks(ranks, [&](Communicator& comm) {
          Tensor t = parts[comm.rank()].clone();
          comm.all_reduce(t);
          results.set(comm, t);
        });
        for (int r = 0; r < ranks; ++r)
          EXPECT_TRUE(bit_equal(results[r], expected))
              << "rank " << r << " of " << ranks << ", " << expected.str();
      }
}

TEST(LocalRanks, TheSumDependsOnTheOrder) {
  // Guards the test above, which could not detect a wrong order if all orders gave these bits.
  const auto parts = random_parts(5, 1000, DType::kF32);
  Tensor left_fold = parts[0];
  for (size_t r = 1; r < parts.size(); ++r) left_fold = plus(left_fold, parts[r]);
  EXPECT_FALSE(bit_equal(left_fold, sum_in_tree(parts)));
}

TEST(LocalRanks, AllReduceDoesNotDependOnTheNumberOfThreads) {
  const auto parts = random_parts(3, 50000, DType::kF32);
  const Tensor expected = sum_in_tree(parts);
  const int before = num_threads();
  for (const int threads : {1, 2, 3, 9}) {
    set_num_threads(threads);
    run_local_ranks(3, [&](Communicator& comm) {
      Tensor t = parts[comm.rank()].clone();
      comm.all_reduce(t);
      EXPECT_TRUE(bit_equal(t, expected)) << threads << " threads";
    });
  }
  set_num_threads(before);
}

TEST(LocalRanks, AllToAllGivesEachRankItsRows) {
  for (const int ranks : kRankCounts)
    for (const int64_t n : {0, 1, 7, 5000})
      run_local_ranks(ranks, [&](Communicator& comm) {
        // Rows in a wider tensor, with values 1000 r + q for what rank r sends to rank q.
        const Tensor wide = Tensor::zeros({ranks, n + 3}, DType::kF32);
        for (int q = 0; q < ranks; ++q) wide.select(0, q).fill_(1000 * comm.rank() + q);
        Tensor received = Tensor::full({ranks, n}, -1, DType::kF32);
        comm.all_to_all(received, wide.narrow(1, 2, n), {1, ranks});
        for (int r = 0; r < ranks; ++r)
          EXPECT_EQ(received.select(0, r).to_vector<double>(),
                    std::vector<double>(static_cast<size_t>(n), 1000 * r + comm.rank()));
      });
}

// Row i, of what this rank sends to the i-th of its set, has 1000 rank() + i.
void expect_rows_of_sets(Communicator& comm, const RankSets& among) {
  const Tensor sent = Tensor::zeros({among.count, 9}, DType::kF32);
  for (int i = 0; i < among.count; ++i) sent.select(0, i).fill_(1000 * comm.rank() + i);
  Tensor received = Tensor::full({among.count, 9}, -1, DType::kF32);
  comm.all_to_all(received, sent, among);
  // The set begins so that it has this rank: the largest start not above it, as many steps below.
  const int place = comm.rank() / among.step % among.count,
            first = comm.rank() - place * among.step;
  for (int i = 0; i < among.count; ++i)
    EXPECT_EQ(received.select(0, i).to_vector<double>(),
              std::vector<double>(9, 1000 * (first + i * among.step) + place));
}

// Six ranks as three sets of neighbours, or as two of ranks that are two apart.
TEST(LocalRanks, AllToAllExchangesWithinSets) {
  for (const RankSets& among : {RankSets{1, 2}, {2, 3}, {3, 2}, {1, 3}, {2, 1}})
    run_local_ranks(6, [&](Communicator& comm) { expect_rows_of_sets(comm, among); });
}

TEST(LocalRanks, AllGatherCollectsTheRows) {
  for (const int ranks : kRankCounts)
    for (const DType dtype : {DType::kF64, DType::kBF16, DType::kU8})
      run_local_ranks(ranks, [&](Communicator& comm) {
        Tensor all = Tensor::zeros({ranks, 33}, dtype);
        all.select(0, comm.rank()).fill_(comm.rank() + 1);
        comm.all_gather(all);
        for (int r = 0; r < ranks; ++r)
          EXPECT_EQ(all.select(0, r).to_vector<double>(), std::vector<double>(33, r + 1));
      });
}

TEST(LocalRanks, RowsOfOtherShapesAreErrors) {
  const auto comm = make_single_communicator();
  Tensor received = Tensor::zeros({1, 4}, DType::kF32), two = Tensor::zeros({2, 4}, DType::kF32);
  EXPECT_THROW_WITH(comm->all_to_all(received, two, {1, 1}), Error, "[all_to_all] expected a row");
  EXPECT_THROW_WITH(comm->all_to_all(received, Tensor::zeros({1, 4}, DType::kF64), {1, 1}), Error,
                    "[all_to_all] expected a row");
  EXPECT_THROW_WITH(comm->all_gather(two), Error, "[all_gather] expected a row for each of 1");
  EXPECT_THROW_WITH(run_local_ranks(2,
                                    [](Communicator& c) {
                                      Tensor all = Tensor::zeros({2, 3 + c.rank()}, DType::kF32);
                                      c.all_gather(all);
                                    }),
                    Error,
                    "ranks disagree about call 1: rank 0 calls all_gather of f32[2, 3], rank 1 "
                    "calls all_gather of f32[2, 4]");
}

TEST(LocalRanks, MaxPropagatesNaN) {
  run_local_ranks(3, [](Communicator& comm) {
    const double r = comm.rank();
    Tensor t = Tensor::from<double>({r, -r, comm.rank() == 1 ? NAN : 0.0, -5});
    comm.all_reduce(t, Reduce::kMax);
    const auto v = t.to_vector<double>();
    EXPECT_EQ(v[0], 2);
    EXPECT_EQ(v[1], 0);
    EXPECT_TRUE(std::isnan(v[2]));
    EXPECT_EQ(v[3], -5);
  });
}

TEST(LocalRanks, ManyCollectivesInARowStayInOrder) {
  run_local_ranks(5, [](Communicator& comm) {
    for (int64_t step = 0; step < 300; ++step) {
      Tensor t = Tensor::full({3}, static_cast<double>(step + comm.rank()), DType::kI64);
      comm.all_reduce(t);
      ASSERT_EQ(t.to_vector<int64_t>()[2], 5 * step + 10);
      if (step % 7 == 0) comm.barrier();
    }
  });
}

TEST(LocalRanks, BarrierWaitsForAllRanks) {
  std::atomic<int> before{0};
  run_local_ranks(3, [&](Communicator& comm) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10 * comm.rank()));
    ++before;
    comm.barrier();
    EXPECT_EQ(before.load(), 3);
  });
}

TEST(LocalRanks, ThreadsAreDividedAmongTheRanks) {
  const int before = num_threads();
  for (const auto& [threads, ranks, expected] : {std::tuple{8, 2, 4}, {8, 3, 2}, {2, 5, 1}}) {
    set_num_threads(threads);
    run_local_ranks(ranks, [&](Communicator&) { EXPECT_EQ(num_threads(), expected); });
    EXPECT_EQ(num_threads(), threads);
  }
  set_num_threads(before);
}

TEST(LocalRanks, AllWaitingRanksNameTheFailedRank) {
  const auto errors = errors_of_ranks(3, [](Communicator& comm) {
    Tensor t = Tensor::zeros({4}, DType::kF32);
    comm.all_reduce(t);
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      throw InputError("data/train.jsonl:7 is not JSON");
    }
    comm.all_reduce(t);
  });
  EXPECT_EQ(errors[0], "[all_reduce] rank 1 failed: data/train.jsonl:7 is not JSON");
  EXPECT_EQ(errors[1], "data/train.jsonl:7 is not JSON");
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(LocalRanks, AllLaterCallsFailToo) {
  std::atomic<bool> failed{false};
  const auto errors = errors_of_ranks(2, [&](Communicator& comm) {
    if (comm.rank() == 1) {
      failed = true;
      throw Error("broken");
    }
    while (!failed) std::this_thread::yield();
    Tensor t = Tensor::zeros({1}, DType::kF32);
    EXPECT_THROW_WITH(comm.all_reduce(t), Error, "[all_reduce] rank 1 failed: broken");
    EXPECT_THROW_WITH(comm.barrier(), Error, "[barrier] rank 1 failed: broken");
  });
  EXPECT_EQ(errors[0], "");
}

TEST(LocalRanks, TheFirstExceptionIsRethrownWithItsType) {
  struct OtherException {};
  EXPECT_THROW_WITH(run_local_ranks(3,
                                    [](Communicator& comm) {
                                      if (comm.rank() == 2) throw InputError("bad key 'lr'");
                                      comm.barrier();
                                    }),
                    InputError, "bad key 'lr'");
  EXPECT_THROW(run_local_ranks(2,
                               [](Communicator& comm) {
                                 if (comm.rank() == 0) throw OtherException{};
                                 comm.barrier();
                               }),
               OtherException);
}

TEST(LocalRanks, ARankThatEndsEarlyIsAnErrorForWaitingRanks) {
  const auto errors = errors_of_ranks(3, [](Communicator& comm) {
    comm.barrier();
    if (comm.rank() == 2) return;
    comm.barrier();
  });
  EXPECT_EQ(errors[0], "[barrier] rank 2 has ended and does not take part in this call (barrier)");
  EXPECT_EQ(errors[1], errors[0]);
  EXPECT_EQ(errors[2], "");
}

TEST(LocalRanks, EndingAfterTheLastCollectiveIsNoError) {
  // The first rank to exit must not break the last collective for ranks still waking from it.
  for (int i = 0; i < 200; ++i) run_local_ranks(3, [](Communicator& comm) { comm.barrier(); });
}

TEST(LocalRanks, DisagreementIsReportedWithBothCalls) {
  auto error = [](const std::function<void(Communicator&)>& body) {
    const auto errors = errors_of_ranks(2, body);
    EXPECT_NE(errors[0], "");
    EXPECT_NE(errors[1], "");
    return errors[0];
  };
  EXPECT_EQ(
      error([](Communicator& comm) {
        Tensor t = Tensor::zeros({comm.rank() == 0 ? 3 : 4}, DType::kF32);
        comm.all_reduce(t);
      }),
      "[all_reduce] ranks disagree about call 1: rank 0 calls all_reduce of f32[3], rank 1 calls "
      "all_reduce of f32[4]");
  EXPECT_EQ(error([](Communicator& comm) {
              Tensor t = Tensor::zeros({3}, comm.rank() == 0 ? DType::kF32 : DType::kF64);
              comm.all_reduce(t, Reduce::kMax);
            }),
            "[all_reduce] ranks disagree about call 1: rank 0 calls all_reduce (max) of f32[3], "
            "rank 1 calls "
            "all_reduce (max) of f64[3]");
  EXPECT_EQ(error([](Communicator& comm) {
              Tensor t = Tensor::zeros({3}, DType::kF32);
              if (comm.rank() == 0) return comm.all_reduce(t);
              comm.barrier();
            }),
            "[all_reduce] ranks disagree about call 1: rank 0 calls all_reduce of f32[3], rank 1 "
            "calls barrier");
  EXPECT_EQ(
      error([](Communicator& comm) {
        Tensor t = Tensor::zeros({}, DType::kF32);
        comm.all_reduce(t, comm.rank() == 0 ? Reduce::kSum : Reduce::kMax);
      }),
      "[all_reduce] ranks disagree about call 1: rank 0 calls all_reduce of f32[], rank 1 calls "
      "all_reduce (max) of f32[]");
}

// Invalid arguments are errors with one rank as with several.
void expect_bad_arguments_throw(Communicator& comm) {
  Tensor undefined, bytes = Tensor::zeros({2}, DType::kU8);
  Tensor strided = Tensor::zeros({2, 3}, DType::kF32).transpose(0, 1);
  EXPECT_THROW_WITH(comm.all_reduce(undefined), Error, "[all_reduce] expected t to be contiguous");
  EXPECT_THROW_WITH(comm.all_reduce(strided), Error, "got a strided f32[3, 2]");
  EXPECT_THROW_WITH(comm.all_reduce(bytes), Error, "expected numbers to reduce, got u8[2]");
}

TEST(LocalRanks, InvalidArgumentsAreErrorsBeforeTheCollective) {
  run_local_ranks(2, [](Communicator& comm) {
    expect_bad_arguments_throw(comm);
    comm.barrier();  // ranks are still in the same call order
  });
  EXPECT_THROW_WITH(run_local_ranks(0, [](Communicator&) {}), Error, "at least one rank");
}

TEST(SingleCommunicator, AllReduceIsANoOp) {
  const auto comm = make_single_communicator();
  EXPECT_EQ(comm->rank(), 0);
  EXPECT_EQ(comm->size(), 1);
  const Tensor in = random_tensor({2, 3}, DType::kF32, 1);
  Tensor t = in.clone();
  comm->all_reduce(t);
  comm->barrier();
  EXPECT_TRUE(bit_equal(t, in));
  expect_bad_arguments_throw(*comm);
}

}  // namespace
}  // namespace cohort
