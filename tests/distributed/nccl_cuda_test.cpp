// NCCL backend of Communicator: ranks on threads of this process, one per GPU. Sums of integers are
// exact in any order and are compared bit for bit; other sums must be equal on every rank and in
// every run.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>

#include "core/cuda.h"
#include "core/progress.h"
#include "distributed/communicator.h"
#include "distributed/side_stream.h"
#include "tests/distributed/process_ranks.h"
#include "tests/distributed/spin_cuda.h"

namespace cohort {
namespace {

using std::chrono::milliseconds;
using test::bit_equal;
using test::expect_no_errors;
using test::random_tensor;
using test::run_process_ranks;

constexpr int64_t kMessageSizes[] = {0, 1, 7, 2049, 1 << 20};
constexpr DType kDTypes[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kI32, DType::kI64};
constexpr double kUntouched = 77;

// Before main(), while the process has one thread.
[[maybe_unused]] const bool kIsPinned = (pin_nccl_algorithms(), true);

int rank_count() {
  return std::min(cuda_device_count(), 8);
}

// Runs body(group, communicator, device) on one rank per GPU.
std::vector<std::string> run_gpu_ranks(
    const std::function<void(ProcessGroup&, Communicator&, Device)>& body,
    milliseconds watchdog = {}) {
  auto options = test::quick_options();
  options.heartbeat = milliseconds(50);
  options.heartbeat_timeout = milliseconds(20000);
  options.watchdog = [watchdog] { return watchdog; };
  return run_process_ranks(
      rank_count(),
      [&](ProcessGroup& group) {
        const Device device = Device::cuda(group.rank());
        const auto comm = make_communicator(group, device);
        try {
          body(group, *comm, device);
          synchronize(device);
        } catch (const std::exception& e) {
          group.fail(e.what());  // before the communicator is destroyed
          throw;
        }
      },
      options);
}

// n elements in the middle of a larger buffer, misaligned.
struct Guarded {
  Guarded(int64_t n, DType dtype, Device device)
      : buffer(Tensor::full({n + 6}, kUntouched, dtype, device)), part(buffer.narrow(0, 3, n)) {}
  void expect_untouched() const {
    const auto values = buffer.to_vector<double>();
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(values[i], kUntouched);
      EXPECT_EQ(values[values.size() - 1 - i], kUntouched);
    }
  }
  Tensor buffer, part;
};

// Small integers that differ between ranks; their sums over 8 ranks are exact in bf16.
Tensor numbers(int64_t n, DType dtype, int rank) {
  std::vector<double> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<double>((i * 7 + static_cast<size_t>(rank) * 5) % 23) - 11;
  return Tensor::from(values).to(dtype);
}
Tensor sum_of_numbers(int64_t n, DType dtype, int ranks) {
  std::vector<double> total(static_cast<size_t>(n));
  for (int r = 0; r < ranks; ++r) {
    const auto values = numbers(n, DType::kF64, r).to_vector<double>();
    for (size_t i = 0; i < total.size(); ++i) total[i] += values[i];
  }
  return Tensor::from(total).to(dtype);
}

TEST(CudaMultiGpuNccl, AllReduceComputesSumsAndMaxima) {
  COHORT_REQUIRE_GPUS(2);
  expect_no_errors(run_gpu_ranks([](ProcessGroup&, Communicator& comm, Device device) {
    for (const int64_t n : kMessageSizes)
      for (const DType dtype : kDTypes) {
        Guarded sum(n, dtype, device), max(n, dtype, device);
        sum.part.copy_(numbers(n, dtype, comm.rank()).to(device));
        comm.all_reduce(sum.part);
        EXPECT_TRUE(bit_equal(sum.part, sum_of_numbers(n, dtype, comm.size()))) << sum.part.str();
        sum.expect_untouched();
        max.part.fill_(-5 + comm.rank());
        comm.all_reduce(max.part, Reduce::kMax);
        EXPECT_TRUE(bit_equal(max.part, Tensor::full({n}, comm.size() - 6, dtype)));
        max.expect_untouched();
      }
  }));
}

TEST(CudaMultiGpuNccl, SumsAreTheSameOnEveryRankAndInEveryRun) {
  COHORT_REQUIRE_GPUS(2);
  constexpr int64_t kCount = 100003;
  std::vector<Tensor> results(static_cast<size_t>(rank_count()));
  expect_no_errors(run_gpu_ranks([&](ProcessGroup&, Communicator& comm, Device device) {
    const Tensor input =
        random_tensor({kCount}, DType::kF32, static_cast<uint64_t>(comm.rank())).to(device);
    Tensor exact = input.to(Device{}).to(DType::kF64);
    comm.all_reduce(exact);  // on the host, in f64
    Tensor first;
    for (int run = 0; run < 20; ++run) {
      Tensor t = input.clone();
      comm.all_reduce(t);
      if (run == 0) first = t;
      EXPECT_TRUE(bit_equal(t, first)) << "run " << run;
    }
    results[static_cast<size_t>(comm.rank())] = first.to(Device{});
    EXPECT_LT(test::relative_error(first.to(Device{}).to(DType::kF64), exact), 1e-6);
  }));
  for (const Tensor& result : results) EXPECT_TRUE(bit_equal(result, results[0]));
}

TEST(CudaMultiGpuNccl, Bf16IsRoundedOnce) {
  COHORT_REQUIRE_GPUS(2);
  expect_no_errors(run_gpu_ranks([](ProcessGroup&, Communicator& comm, Device device) {
    const Tensor input =
        random_tensor({4099}, DType::kBF16, 10 + static_cast<uint64_t>(comm.rank()));
    Tensor exact = input.to(DType::kF64), sum = input.to(device).clone();
    comm.all_reduce(exact);
    comm.all_reduce(sum);
    const double rounding = test::relative_error(exact.to(DType::kBF16).to(DType::kF64), exact);
    EXPECT_LT(test::relative_error(sum.to(Device{}).to(DType::kF64), exact), 1.01 * rounding);
  }));
}

TEST(CudaMultiGpuNccl, HostTensorsAreAddedInRankOrder) {
  COHORT_REQUIRE_GPUS(2);
  expect_no_errors(run_gpu_ranks([](ProcessGroup&, Communicator& comm, Device) {
    Tensor expected;
    for (int r = 0; r < comm.size(); ++r) {
      const Tensor part = random_tensor({17}, DType::kF64, static_cast<uint64_t>(r), r + 1.0);
      if (r == 0) {
        expected = part.clone();
        continue;
      }
      for (int64_t i = 0; i < 17; ++i) expected.data<double>()[i] += part.data<double>()[i];
    }
    Tensor t =
        random_tensor({17}, DType::kF64, static_cast<uint64_t>(comm.rank()), comm.rank() + 1.0);
    comm.all_reduce(t);
    EXPECT_TRUE(bit_equal(t, expected));
    comm.barrier();
  }));
}

TEST(CudaMultiGpuNccl, CollectivesFollowTheCurrentStream) {
  COHORT_REQUIRE_GPUS(2);
  expect_no_errors(run_gpu_ranks([](ProcessGroup&, Communicator& comm, Device device) {
    cuda::OwnedStream side(device);
    for (int round = 0; round < 10; ++round) {
      const StreamGuard guard(round % 2 == 0 ? current_stream(device) : side.get());
      Tensor t = Tensor::zeros({1 << 20}, DType::kF32, device);
      for (int i = 1; i <= 5; ++i) t.fill_(i);
      comm.all_reduce(t);
      EXPECT_TRUE(bit_equal(t, Tensor::full({1 << 20}, 5.0 * comm.size(), DType::kF32)));
    }
  }));
}

TEST(CudaMultiGpuNccl, InvalidTensorsAreErrorsBeforeTheCollective) {
  COHORT_REQUIRE_GPUS(2);
  expect_no_errors(run_gpu_ranks([](ProcessGroup&, Communicator& comm, Device device) {
    Tensor strided = Tensor::zeros({2, 3}, DType::kF32, device).transpose(0, 1);
    Tensor bytes = Tensor::zeros({2}, DType::kU8, device);
    Tensor elsewhere =
        Tensor::zeros({2}, DType::kF32, Device::cuda((device.index + 1) % comm.size()));
    EXPECT_THROW_WITH(comm.all_reduce(strided), Error, "got a strided f32[3, 2]");
    EXPECT_THROW_WITH(comm.all_reduce(bytes), Error, "expected numbers to reduce");
    EXPECT_THROW_WITH(comm.all_reduce(elsewhere), Error, "this rank's communicator is for cuda:");
    comm.barrier();
  }));
}

// Rows of tensors that are written right before, on the current stream and beside it.
TEST(CudaNcclRows, AreThoseOfTheHost) {
  COHORT_REQUIRE_GPU(first);
  expect_no_errors(run_gpu_ranks([](ProcessGroup&, Communicator& comm, Device device) {
    const auto side = cuda::make_side_stream(device);
    const auto ranks = static_cast<int64_t>(comm.size());
    for (const int64_t n : kMessageSizes)
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kU8}) {
        const Tensor source = Tensor::zeros({ranks, n + 64}, DType::kF32);
        for (int64_t q = 0; q < ranks; ++q)
          source.select(0, q).fill_(static_cast<double>(16 * comm.rank() + q));
        const Tensor host = source.to(dtype), sent = host.to(device);
        Tensor expected = Tensor::empty({ranks, n}, dtype), rows = expected.to(device),
               all_rows = expected.clone(), all = rows.clone();
        comm.all_to_all(expected, host.narrow(1, 64, n), {1, comm.size()});
        all_rows.select(0, comm.rank()).copy_(host.select(0, 0).narrow(0, 0, n));
        all.select(0, comm.rank()).copy_(all_rows.select(0, comm.rank()));
        comm.all_gather(all_rows);
        side->run([&] {
          comm.all_to_all(rows, sent.narrow(1, 64, n), {1, comm.size()});
          comm.all_gather(all);
        });
        side->wait();
        EXPECT_TRUE(bit_equal(rows.to(Device{}), expected)) << expected.str();
        EXPECT_TRUE(bit_equal(all.to(Device{}), all_rows)) << expected.str();
      }
  }));
}

// Neighbours exchange rows, and then the ranks with the same place among their neighbours.
TEST(CudaMultiGpuNccl, SetsOfRanksExchangeRows) {
  COHORT_REQUIRE_GPUS(2);
  expect_no_errors(run_gpu_ranks([](ProcessGroup&, Communicator& comm, Device device) {
    for (const int half : {1, comm.size() / 2})
      for (const RankSets& among : {RankSets{1, half}, {half, comm.size() / half}}) {
        if (comm.size() % half != 0) continue;
        const Tensor sent =
            random_tensor({among.count, 5001}, DType::kF32, static_cast<uint64_t>(comm.rank()));
        Tensor expected = Tensor::empty({among.count, 5001}, DType::kF32),
               rows = expected.to(device);
        comm.all_to_all(expected, sent, among);
        comm.all_to_all(rows, sent.to(device), among);
        EXPECT_TRUE(bit_equal(rows.to(Device{}), expected)) << among.step;
      }
  }));
}

// A rank fails while the devices of the others wait for it: the others return and name it.
TEST(CudaMultiGpuFailure, APendingCollectiveEndsAndTheNextOneNamesTheRank) {
  COHORT_REQUIRE_GPUS(2);
  const auto start = std::chrono::steady_clock::now();
  const auto errors = run_gpu_ranks([](ProcessGroup& group, Communicator& comm, Device device) {
    Tensor t = Tensor::full({1000}, 1, DType::kF32, device);
    comm.all_reduce(t);
    synchronize(device);
    if (group.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(300));
      throw Error("out of luck");
    }
    comm.all_reduce(t);  // enqueued; waits on the device
    synchronize(device);
    comm.all_reduce(t);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    EXPECT_NE(errors[rank].find("out of luck"), std::string::npos) << errors[rank];
    if (rank == 1) continue;
    EXPECT_NE(errors[rank].find("[all_reduce] rank 1 ("), std::string::npos) << errors[rank];
  }
}

// A kernel of one rank does not end, before a collective on the same or on the side stream: all
// hosts may be further on, but its device is the one that has not begun the call.
TEST(CudaMultiGpuHang, ASpinningKernelsRankIsNamed) {
  COHORT_REQUIRE_GPUS(2);
  for (const int culprit : {0, 1})
    for (const bool beside : {false, true}) {
      SCOPED_TRACE(str("rank ", culprit, beside ? ", side stream" : ""));
      const test::ExpectLog warning("has made no progress for 2 s");
      int* flag = nullptr;
      COHORT_CUDA_CHECK(
          cudaHostAlloc(reinterpret_cast<void**>(&flag), sizeof(int), cudaHostAllocPortable));
      *flag = 0;
      const auto start = std::chrono::steady_clock::now();
      const auto errors = run_gpu_ranks(
          [&](ProcessGroup& group, Communicator& comm, Device device) {
            const auto side = cuda::make_side_stream(device);
            Tensor t = Tensor::full({1000}, 1, DType::kF32, device);
            comm.all_reduce(t);
            synchronize(device);
            group.exchange("together", "");
            if (group.rank() == culprit) test::enqueue_spin(flag, device);
            const auto reduce = [&] { comm.all_reduce(t); };
            if (beside)
              side->run(reduce);
            else
              reduce();
            if (group.rank() != culprit) {
              side->wait();
              synchronize(device);  // returns as the pending call is aborted
            }
            const std::string failure = group.wait_for_failure(milliseconds(30000));
            *static_cast<volatile int*>(flag) = 1;
            throw Error(failure);
          },
          milliseconds(10000));
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(50));
      for (const std::string& error : errors) {
        EXPECT_NE(error.find(str("rank ", culprit, " (")), std::string::npos) << error;
        EXPECT_NE(error.find("has made no progress for 10 s: its GPU has not begun call 4 "
                             "(all_reduce of f32[1000] on cuda); rank"),
                  std::string::npos)
            << error;
        EXPECT_NE(error.find(": in call 4 (all_reduce of f32[1000] on cuda)"), std::string::npos)
            << error;
      }
      cudaFreeHost(flag);
    }
}

// The device waits for a rank whose host is busy, for longer than the limit in all.
TEST(CudaMultiGpuHang, SlowRanksAreNoHang) {
  COHORT_REQUIRE_GPUS(2);
  expect_no_errors(run_gpu_ranks(
      [](ProcessGroup& group, Communicator& comm, Device device) {
        Tensor t = Tensor::full({1000}, 1, DType::kF32, device);
        for (int round = 0; round < 2; ++round) {
          for (int i = 0; group.rank() == round && i < 120; ++i) {
            note_progress();
            std::this_thread::sleep_for(milliseconds(100));
          }
          comm.all_reduce(t);
          synchronize(device);
        }
      },
      milliseconds(10000)));
}

TEST(CudaMultiGpuFailure, DifferentCallsAreReported) {
  COHORT_REQUIRE_GPUS(2);
  const auto errors = run_gpu_ranks([](ProcessGroup& group, Communicator& comm, Device device) {
    Tensor t = Tensor::full({group.rank() == 0 ? 3 : 1 << 20}, 1, DType::kF32, device);
    comm.all_reduce(t);
    synchronize(device);
    comm.barrier();
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("ranks disagree about call 2: rank 0 calls all_reduce of f32[3] on cuda"),
              std::string::npos)
        << error;
}

TEST(CudaMultiGpuFailure, ARankThatEndsEarlyIsNamed) {
  COHORT_REQUIRE_GPUS(2);
  const auto errors = run_gpu_ranks([](ProcessGroup& group, Communicator& comm, Device device) {
    Tensor t = Tensor::full({100}, 1, DType::kF32, device);
    comm.all_reduce(t);
    synchronize(device);
    if (group.rank() == 1) return;
    comm.all_reduce(t);
    synchronize(device);
    comm.barrier();
  });
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (rank == 1) continue;
    EXPECT_NE(errors[rank].find("rank 1 has ended and does not take part in this call"),
              std::string::npos)
        << errors[rank];
  }
}

}  // namespace
}  // namespace cohort
