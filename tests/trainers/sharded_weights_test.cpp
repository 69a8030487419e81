// Weights of blocks in slices: what a rank can read, and when. Their bits: shards_test.cpp.
#include "trainers/sharded_weights.h"

#include "tests/trainers/odd_learners.h"

namespace cohort::test {
namespace {

// In an update a rank can read the weights of two blocks at most, before and after it those of all.
TEST(ShardedWeights, OnlyBlocksInUseAreWhole) {
  for (const ShardCase& c : {ShardCase{.layers = 6}, ShardCase{.lora = true, .layers = 6}})
    run_local_ranks(2, [&](Communicator& comm) {
      Learner learner(sharded_model(c), sharded_config(c, Sharding::kFull), comm);
      const auto readable = [&] {
        std::vector<size_t> units;
        for (const NamedParameter& p : learner.model().parameters()) {
          if (p.unit == 0 || p.unit == 7) continue;
          try {
            p.value.raw();
            if (units.empty() || units.back() != p.unit) units.push_back(p.unit);
          } catch (const Error& e) {
            EXPECT_NE(std::string(e.what()).find("not gathered"), std::string::npos);
          }
        }
        return units;
      };
      for (int step = 0; step < 2; ++step) {
        EXPECT_EQ(readable().size(), 6u);
        learner.update(
            1,
            [&](int64_t) {
              EXPECT_EQ(readable(), std::vector<size_t>{1});
              HeadLoss loss = odd_loss(learner.model(), 1);
              EXPECT_EQ(readable(), (std::vector<size_t>{5, 6}));
              return loss;
            },
            1e-2);
      }
      EXPECT_EQ(readable().size(), 6u);
    });
}

TEST(ShardedWeights, ASecondForwardInAMicroBatchIsRefused) {
  run_local_ranks(2, [&](Communicator& comm) {
    Learner learner(sharded_model({.layers = 3}), sharded_config({}, Sharding::kFull), comm);
    EXPECT_THROW_WITH(learner.update(
                          1,
                          [&](int64_t) {
                            odd_loss(learner.model(), 1);
                            return odd_loss(learner.model(), 1);
                          },
                          1e-2),
                      Error, "a micro batch has one forward");
  });
}

// Collectives of ranks that share a GPU, which NCCL has not: through the host's memory.
class HostRanks : public Communicator {
 public:
  explicit HostRanks(Communicator& comm) : comm_(comm) {}
  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  void all_reduce(Tensor& t, Reduce op) override {
    Tensor host = t.to(Device{});
    comm_.all_reduce(host, op);
    t.copy_(host);
  }
  void all_to_all(Tensor& received, const Tensor& parts, const RankSets& among) override {
    Tensor host = Tensor::empty(received.shape(), received.dtype());
    comm_.all_to_all(host, parts.to(Device{}), among);
    received.copy_(host);
  }
  void all_gather(Tensor& all) override {
    Tensor host = all.to(Device{});
    comm_.all_gather(host);
    all.copy_(host);
  }
  void barrier() override { comm_.barrier(); }

 private:
  Communicator& comm_;
};

// Three ranks on one GPU: side streams, released memory and moved weights change no bit.
TEST(CudaShardedWeights, EachKindOfShardingHasTheSameBits) {
  COHORT_REQUIRE_GPU(device);
  const ShardCase narrow{.layers = 3},
      wide{.dtype = DType::kBF16, .tied = true, .layers = 4, .width = 256},
      cheap{.dtype = DType::kBF16, .layers = 4, .recompute = Recompute::kCheap, .width = 256},
      adapters{.dtype = DType::kBF16,
               .lora = true,
               .base = kernels::WeightFormat::kNf4,
               .layers = 3,
               .recompute = Recompute::kBlock,
               .width = 256};
  for (const ShardCase& c : {narrow, wide, cheap, adapters}) {
    std::vector<std::vector<Tensor>> ends;
    for (const Sharding sharding :
         {Sharding::kNone, Sharding::kOptimizer, Sharding::kGradients, Sharding::kFull})
      run_local_ranks(3, [&](Communicator& threads) {
        HostRanks comm(threads);
        Learner learner(sharded_model(c, device), sharded_config(c, sharding), comm);
        for (uint64_t step = 0; step < 3; ++step)
          learner.update(
              1,
              [&](int64_t) {
                return odd_loss(learner.model(), 10 * step + static_cast<uint64_t>(comm.rank()));
              },
              1e-2);
        if (comm.rank() != 0) return;
        ends.emplace_back();
        for (const NamedParameter& p : learner.model().parameters())
          ends.back().push_back(value_of(p).to(Device{}));
      });
    for (const auto& end : ends)
      for (size_t i = 0; i < end.size(); ++i) EXPECT_TRUE(bit_equal(end[i], ends[0][i])) << i;
  }
}

}  // namespace
}  // namespace cohort::test
