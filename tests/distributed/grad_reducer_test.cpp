// The gradient reducer: sums over ranks do not depend on the order in which gradients become ready,
// the bucket size or which ranks had work.
#include "distributed/grad_reducer.h"

#include <algorithm>
#include <numeric>

#include "core/rng.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using test::bit_equal;
using test::random_tensor;

constexpr int kGroupSizes[] = {1, 2, 3, 5};

// Concatenated gradients of a rank.
struct Gradients {
  Gradients(const std::vector<int64_t>& sizes, DType dtype) {
    for (const int64_t n : sizes) ends.push_back(n + (ends.empty() ? 0 : ends.back()));
    flat = Tensor::zeros({ends.empty() ? 0 : ends.back()}, dtype);
  }
  int64_t count() const { return static_cast<int64_t>(ends.size()); }
  Tensor part(int64_t i) const {
    const int64_t begin = i == 0 ? 0 : ends[i - 1];
    return flat.narrow(0, begin, ends[i] - begin);
  }
  Tensor flat;
  std::vector<int64_t> ends;
};

// Gradients of one element, empty ones, and one larger than a small bucket. The values depend on
// `rank` and `step`.
Gradients make_gradients(int rank, int step = 0, DType dtype = DType::kF32) {
  Gradients out({21, 1, 0, 5, 300, 4, 11, 13, 24, 0}, dtype);
  out.flat.copy_(
      random_tensor(out.flat.shape(), dtype,
                    1000 * static_cast<uint64_t>(rank + 1) + 50 * static_cast<uint64_t>(step)));
  return out;
}

// Expected result of the reducer: the sum over ranks in rank order.
Tensor expected_sum(int ranks, int step = 0, DType dtype = DType::kF32) {
  Tensor sum;
  run_local_ranks(ranks, [&](Communicator& comm) {
    Tensor t = make_gradients(comm.rank(), step, dtype).flat;
    comm.all_reduce(t);
    if (comm.rank() == 0) sum = t;
  });
  return sum;
}

std::vector<int64_t> shuffled(int64_t n, uint64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  Rng rng(seed, rng_stream(kTestPurpose, 7));
  for (int64_t i = n - 1; i > 0; --i)
    std::swap(order[i], order[static_cast<int64_t>(rng.bits() % static_cast<uint64_t>(i + 1))]);
  return order;
}

TEST(GradReducer, SumsEqualRankOrderSumsForEveryReadinessOrderAndBucketSize) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16})
    for (const int ranks : kGroupSizes) {
      const Tensor expected = expected_sum(ranks, 0, dtype);
      for (const int64_t bytes : {int64_t{1}, int64_t{64}, int64_t{500}, int64_t{25} << 20})
        for (uint64_t trial = 0; trial < 4; ++trial)
          run_local_ranks(ranks, [&](Communicator& comm) {
            const Gradients g = make_gradients(comm.rank(), 0, dtype);
            GradReducer reducer(comm, nullptr, {{g.flat, g.ends}}, bytes);
            for (const int64_t i : shuffled(g.count(), trial * 10 + comm.rank()))
              reducer.mark_ready(i);
            reducer.finish();
            EXPECT_TRUE(bit_equal(g.flat, expected)) << "in buckets of " << bytes;
          });
    }
}

TEST(GradReducer, RanksWithoutWorkParticipateInFinish) {
  // Rank 0 marks all, rank 1 nothing (its gradients are zero), rank 2 about half.
  for (const int64_t bytes : {int64_t{64}, int64_t{25} << 20})
    run_local_ranks(3, [&](Communicator& comm) {
      Gradients g = make_gradients(0);
      if (comm.rank() != 0) g.flat.zero_();
      GradReducer reducer(comm, nullptr, {{g.flat, g.ends}}, bytes);
      if (comm.rank() == 0)
        for (int64_t i = g.count() - 1; i >= 0; --i) reducer.mark_ready(i);
      if (comm.rank() == 2)
        for (int64_t i = 0; i < g.count(); i += 2) reducer.mark_ready(i);
      reducer.finish();
      EXPECT_TRUE(bit_equal(g.flat, make_gradients(0).flat));
    });
}

// Buffers are reduced from the last to the first, each in its own buckets.
TEST(GradReducer, BucketsDoNotCrossBuffers) {
  run_local_ranks(2, [](Communicator& comm) {
    const Gradients first = make_gradients(comm.rank()), second = make_gradients(comm.rank(), 1);
    GradReducer reducer(comm, nullptr, {{first.flat, first.ends}, {second.flat, second.ends}});
    for (int64_t i = 0; i < first.count(); ++i) reducer.mark_ready(i);
    EXPECT_TRUE(
        bit_equal(first.flat, make_gradients(comm.rank()).flat));  // the second is not ready
    for (int64_t i = 0; i < second.count(); ++i) reducer.mark_ready(first.count() + i);
    EXPECT_TRUE(bit_equal(second.flat, expected_sum(2, 1)));
    EXPECT_TRUE(bit_equal(first.flat, expected_sum(2)));
    reducer.finish();
    EXPECT_TRUE(bit_equal(first.flat, expected_sum(2)));
  });
}

TEST(GradReducer, ReducesABucketOnceItAndItsPredecessorsAreComplete) {
  run_local_ranks(2, [](Communicator& comm) {
    Gradients g({2, 2, 2}, DType::kF32);
    g.flat.fill_(1 + comm.rank());
    GradReducer reducer(comm, nullptr, {{g.flat, g.ends}}, 8);  // one gradient per bucket: 2, 1, 0
    auto first = [&](int64_t i) { return g.part(i).to_vector<float>()[0]; };
    const float local = static_cast<float>(1 + comm.rank());
    reducer.mark_ready(1);
    EXPECT_EQ(first(1), local);  // waits for the bucket of gradient 2
    EXPECT_EQ(first(2), local);  // not ready
    reducer.mark_ready(2);
    EXPECT_EQ(first(2), 3);
    EXPECT_EQ(first(1), 3);
    EXPECT_EQ(first(0), local);
    reducer.finish();
    EXPECT_EQ(first(0), 3);
    EXPECT_EQ(first(1), 3);  // not a second time
  });
}

// Counts the reductions of a rank.
struct CountingCommunicator final : Communicator {
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void all_reduce(Tensor&, Reduce) override { ++calls; }
  void barrier() override {}
  int calls = 0;
};

TEST(GradReducer, BucketsFollowParametersFromTheLastToTheFirst) {
  auto buckets = [&](const std::vector<int64_t>& sizes, int64_t bytes, DType dtype = DType::kF32) {
    const Gradients g(sizes, dtype);
    CountingCommunicator comm;
    GradReducer(comm, nullptr, {{g.flat, g.ends}}, bytes).finish();
    return comm.calls;
  };
  EXPECT_EQ(buckets({}, 100), 0);
  EXPECT_EQ(buckets({1, 1, 1, 1}, 16), 1);
  EXPECT_EQ(buckets({1, 1, 1, 1}, 15), 2);               // {3, 2, 1}, {0}
  EXPECT_EQ(buckets({1, 100, 1, 1}, 16), 3);             // a large gradient has its own bucket
  EXPECT_EQ(buckets({1, 1, 1, 1}, 16, DType::kF64), 2);  // sizes are in bytes
  EXPECT_EQ(buckets({0, 0, 0}, 1), 1);
}

TEST(GradReducer, MisuseIsAnErrorWithOneRankToo) {
  const auto comm = make_single_communicator();
  const Gradients g({2, 2}, DType::kF32);
  GradReducer reducer(*comm, nullptr, {{g.flat, g.ends}});
  reducer.mark_ready(1);
  EXPECT_THROW_WITH(reducer.mark_ready(1), Error, "gradient 1 is marked ready twice");
  EXPECT_THROW_WITH(reducer.mark_ready(2), Error, "gradient 2 of 2");
  EXPECT_THROW_WITH(reducer.mark_ready(-1), Error, "gradient -1 of 2");
  reducer.finish();
  EXPECT_THROW_WITH(GradReducer(*comm, nullptr, {{g.flat, g.ends}}, 0), Error,
                    "positive bucket size");
  const std::tuple<Tensor, std::vector<int64_t>> rows[] = {
      {Tensor(), {4}}, {g.flat, {}}, {g.flat, {2, 3}}, {g.flat, {2, 1, 4}}};
  for (const auto& [flat, ends] : rows)
    EXPECT_THROW_WITH(GradReducer(*comm, nullptr, {{flat, ends}}), Error,
                      "expected contiguous buffers of gradients");
}

TEST(GradReducer, ARankWithOtherGradientsIsReported) {
  EXPECT_THROW_WITH(run_local_ranks(2,
                                    [](Communicator& comm) {
                                      const Gradients g({2 + comm.rank()}, DType::kF32);
                                      GradReducer(comm, nullptr, {{g.flat, g.ends}}).finish();
                                    }),
                    Error,
                    "ranks disagree about call 1: rank 0 calls all_reduce of f32[2], rank 1 calls "
                    "all_reduce of f32[3]");
}

TEST(GradReducer, AFailureInTheBackwardOfOneRankEndsAll) {
  EXPECT_THROW_WITH(run_local_ranks(3,
                                    [](Communicator& comm) {
                                      const Gradients g = make_gradients(comm.rank());
                                      GradReducer reducer(comm, nullptr, {{g.flat, g.ends}}, 100);
                                      for (int64_t i = 9; i >= 0; --i) {
                                        if (comm.rank() == 2 && i == 4) throw Error("loss is NaN");
                                        reducer.mark_ready(i);
                                      }
                                      reducer.finish();
                                    }),
                    Error, "loss is NaN");
}

}  // namespace
}  // namespace cohort
