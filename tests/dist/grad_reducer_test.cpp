// The gradient reducer: sums over ranks that do not depend on the order in which gradients become
// ready, on the size of the buckets or on which ranks had work.
#include "dist/grad_reducer.h"

#include <algorithm>
#include <numeric>

#include "core/rng.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using test::bit_equal;
using test::random_tensor;

constexpr int kRankCounts[] = {1, 2, 3, 5};

// Gradients of one rank: mixed dtypes, a scalar, an empty one, a strided one, one larger than a
// small bucket. `rank` only changes the values.
std::vector<Tensor> make_gradients(int rank, int step = 0) {
  const uint64_t seed = 1000 * static_cast<uint64_t>(rank + 1) + 50 * static_cast<uint64_t>(step);
  std::vector<Tensor> g = {random_tensor({7, 3}, DType::kF32, seed + 0),
                           random_tensor({}, DType::kF32, seed + 1),
                           random_tensor({0, 4}, DType::kF32, seed + 2),
                           random_tensor({5}, DType::kF64, seed + 3),
                           random_tensor({300}, DType::kF32, seed + 4),
                           random_tensor({2, 2}, DType::kF32, seed + 5),
                           random_tensor({11}, DType::kBF16, seed + 6),
                           random_tensor({13}, DType::kF32, seed + 7),
                           random_tensor({4, 6}, DType::kF32, seed + 8).transpose(0, 1),
                           random_tensor({0}, DType::kF32, seed + 9)};
  return g;
}

// What the reducer must leave in gradient i: the sum over ranks in rank order.
Tensor expected_sum(int ranks, int64_t i, int step = 0) {
  Tensor sum;
  run_local_ranks(ranks, [&](Communicator& comm) {
    Tensor t = make_gradients(comm.rank(), step)[i].contiguous();
    comm.all_reduce(t);
    if (comm.rank() == 0) sum = t;
  });
  return sum;
}

std::vector<int64_t> shuffled(int64_t n, uint64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  Rng rng(seed, rng_stream(RngPurpose::kTest, 7));
  for (int64_t i = n - 1; i > 0; --i)
    std::swap(order[i], order[static_cast<int64_t>(rng.bits() % static_cast<uint64_t>(i + 1))]);
  return order;
}

TEST(GradReducer, SumsEqualRankOrderSumsForEveryReadinessOrderAndBucketSize) {
  for (const int ranks : kRankCounts) {
    const int64_t n = static_cast<int64_t>(make_gradients(0).size());
    std::vector<Tensor> expected;
    for (int64_t i = 0; i < n; ++i) expected.push_back(expected_sum(ranks, i));
    for (const int64_t bytes : {int64_t{1}, int64_t{64}, int64_t{500}, int64_t{25} << 20})
      for (uint64_t trial = 0; trial < 4; ++trial)
        run_local_ranks(ranks, [&](Communicator& comm) {
          auto gradients = make_gradients(comm.rank());
          GradReducer reducer(comm, gradients, bytes);
          for (const int64_t i : shuffled(n, trial * 10 + comm.rank())) reducer.mark_ready(i);
          reducer.finish();
          for (int64_t i = 0; i < n; ++i)
            EXPECT_TRUE(bit_equal(gradients[i], expected[i])) << i << " in buckets of " << bytes;
        });
  }
}

TEST(GradReducer, RanksWithoutWorkTakePartInFinish) {
  // Rank 0 marks all, rank 1 nothing (its gradients are zero), rank 2 about half.
  const int64_t n = static_cast<int64_t>(make_gradients(0).size());
  for (const int64_t bytes : {int64_t{64}, int64_t{25} << 20})
    run_local_ranks(3, [&](Communicator& comm) {
      auto gradients = make_gradients(0);
      if (comm.rank() != 0)
        for (Tensor& g : gradients) g.zero_();
      GradReducer reducer(comm, gradients, bytes);
      if (comm.rank() == 0)
        for (int64_t i = n - 1; i >= 0; --i) reducer.mark_ready(i);
      if (comm.rank() == 2)
        for (int64_t i = 0; i < n; i += 2) reducer.mark_ready(i);
      reducer.finish();
      const auto alone = make_gradients(0);
      for (int64_t i = 0; i < n; ++i) EXPECT_TRUE(bit_equal(gradients[i], alone[i])) << i;
    });
}

TEST(GradReducer, IsReadyForTheNextStep) {
  const int64_t n = static_cast<int64_t>(make_gradients(0).size());
  for (int step = 0; step < 3; ++step) {
    std::vector<Tensor> expected;
    for (int64_t i = 0; i < n; ++i) expected.push_back(expected_sum(2, i, step));
    run_local_ranks(2, [&](Communicator& comm) {
      auto gradients = make_gradients(comm.rank());
      GradReducer reducer(comm, gradients, 100);
      for (int s = 0; s <= step; ++s) {
        const auto fresh = make_gradients(comm.rank(), s);
        for (int64_t i = 0; i < n; ++i) gradients[i].copy_(fresh[i]);
        // Every second step nothing is marked at all.
        if (s % 2 == 0)
          for (int64_t i = n - 1; i >= 0; --i) reducer.mark_ready(i);
        reducer.finish();
      }
      for (int64_t i = 0; i < n; ++i) EXPECT_TRUE(bit_equal(gradients[i], expected[i])) << step;
    });
  }
}

TEST(GradReducer, ReducesABucketAsSoonAsItIsFullAndItsPredecessorsAre) {
  run_local_ranks(2, [](Communicator& comm) {
    std::vector<Tensor> g;
    for (int i = 0; i < 3; ++i) g.push_back(Tensor::full({2}, 1 + comm.rank(), DType::kF32));
    GradReducer reducer(comm, g, 8);  // one gradient per bucket: 2, 1, 0
    auto first = [&](int i) { return g[i].to_vector<float>()[0]; };
    const float own = static_cast<float>(1 + comm.rank());
    reducer.mark_ready(1);
    EXPECT_EQ(first(1), own);  // waits for bucket 2
    EXPECT_EQ(first(2), own);  // which is not ready
    reducer.mark_ready(2);
    EXPECT_EQ(first(2), 3);
    EXPECT_EQ(first(1), 3);
    EXPECT_EQ(first(0), own);
    reducer.finish();
    EXPECT_EQ(first(0), 3);
    EXPECT_EQ(first(1), 3);  // not a second time
  });
}

TEST(GradReducer, BucketsFollowParametersFromTheLastToTheFirst) {
  const auto comm = make_single_communicator();
  auto buckets = [&](std::vector<int64_t> sizes, int64_t bytes, DType odd = DType::kF32) {
    std::vector<Tensor> g;
    for (size_t i = 0; i < sizes.size(); ++i)
      g.push_back(Tensor::zeros({sizes[i]}, i == 1 ? odd : DType::kF32));
    return GradReducer(*comm, g, bytes).num_buckets();
  };
  EXPECT_EQ(buckets({}, 100), 0);
  EXPECT_EQ(buckets({1, 1, 1, 1}, 16), 1);
  EXPECT_EQ(buckets({1, 1, 1, 1}, 15), 2);                // {3, 2, 1}, {0}
  EXPECT_EQ(buckets({1, 100, 1, 1}, 16), 3);              // a large one is alone
  EXPECT_EQ(buckets({1, 1, 1, 1}, 100, DType::kF64), 3);  // {3, 2}, {1}, {0}
  EXPECT_EQ(buckets({0, 0, 0}, 1), 1);
}

TEST(GradReducer, MisuseIsAnErrorWithOneRankToo) {
  const auto comm = make_single_communicator();
  GradReducer reducer(*comm, {Tensor::zeros({2}, DType::kF32), Tensor::zeros({2}, DType::kF32)});
  reducer.mark_ready(1);
  EXPECT_THROW_WITH(reducer.mark_ready(1), Error, "gradient 1 is marked ready twice in a step");
  EXPECT_THROW_WITH(reducer.mark_ready(2), Error, "gradient 2 of 2");
  EXPECT_THROW_WITH(reducer.mark_ready(-1), Error, "gradient -1 of 2");
  reducer.finish();
  reducer.mark_ready(1);  // a new step
  EXPECT_THROW_WITH(GradReducer(*comm, {Tensor()}), Error, "gradient 0 is undefined");
  EXPECT_THROW_WITH(GradReducer(*comm, {}, 0), Error, "positive bucket size");
}

TEST(GradReducer, ARankWithOtherGradientsIsReported) {
  EXPECT_THROW_WITH(
      run_local_ranks(2,
                      [](Communicator& comm) {
                        GradReducer reducer(comm, {Tensor::zeros({2 + comm.rank()}, DType::kF32)});
                        reducer.finish();
                      }),
      Error,
      "ranks disagree: rank 0 calls all_reduce of f32[2], rank 1 calls all_reduce of f32[3]");
}

TEST(GradReducer, AFailureInTheBackwardOfOneRankEndsAll) {
  EXPECT_THROW_WITH(run_local_ranks(3,
                                    [](Communicator& comm) {
                                      auto g = make_gradients(comm.rank());
                                      GradReducer reducer(comm, g, 100);
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
