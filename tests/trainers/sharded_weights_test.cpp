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

// With one block a second forward looks like a recomputation, and the sums begin too early.
TEST(ShardedWeights, ASecondForwardOfOneBlockIsRefused) {
  run_local_ranks(2, [&](Communicator& comm) {
    Learner learner(sharded_model({.layers = 1}), sharded_config({}, Sharding::kFull), comm);
    EXPECT_THROW_WITH(learner.update(
                          1,
                          [&](int64_t) {
                            {
                              NoGradGuard no_grad;
                              odd_loss(learner.model(), 1);
                            }
                            return odd_loss(learner.model(), 1);
                          },
                          1e-2),
                      Error, "after its sum has begun");
  });
}

// A term of the last norm whose node is older than the blocks': its gradient would be lost.
TEST(ShardedWeights, AGradientBehindItsSumIsRefused) {
  run_local_ranks(2, [&](Communicator& comm) {
    Learner learner(sharded_model({.layers = 3}), sharded_config({}, Sharding::kFull), comm);
    const auto loss = [&](int64_t) {
      Variable norm;
      for (const NamedParameter& p : learner.model().parameters())
        if (p.name == "model.norm.weight") norm = p.leaf;
      const Variable term = make_node("term", Tensor::full({1}, 0.5, DType::kF32), {norm},
                                      [](const Tensor&, Gradients& gradients) {
                                        gradients.pass(0, Tensor::full({12}, 0.3, DType::kF32));
                                      });
      HeadLoss out = odd_loss(learner.model(), 1);
      out.hidden = make_node("sum", out.hidden.value(), {out.hidden, term},
                             [](const Tensor& dy, Gradients& gradients) {
                               gradients.pass(0, dy);
                               gradients.pass(1, Tensor::full({1}, 1, DType::kF32));
                             });
      return out;
    };
    EXPECT_THROW_WITH(learner.update(1, loss, 1e-2), Error, "after its sum has begun");
  });
}

// However an update ends, the next one is as if it had not been tried; if all ranks know how, all
// weights can be read again.
TEST(ShardedWeights, AFailedUpdateChangesNothing) {
  enum class End { kNone, kMemory, kNonFinite, kRefused, kOther };
  for (const bool is_first : {true, false}) {
    std::vector<std::vector<Tensor>> ends;
    for (const End end : {End::kNone, End::kMemory, End::kNonFinite, End::kRefused, End::kOther})
      run_local_ranks(2, [&](Communicator& comm) {
        Learner learner(sharded_model({.layers = 4}), sharded_config({}, Sharding::kFull), comm);
        const auto good = [&](int64_t i) {
          return odd_loss(learner.model(), static_cast<uint64_t>(i));
        };
        const auto bad = [&](int64_t) {
          HeadLoss out = odd_loss(learner.model(), 1, end == End::kNonFinite ? NAN : 1);
          if (end == End::kMemory && comm.rank() == 1) throw OutOfMemoryError("full");
          if (end == End::kOther) throw InputError("stop");
          return out;
        };
        if (!is_first) learner.update(1, good, 1e-2);
        try {
          if (end != End::kNone)
            learner.update(1, bad, 1e-2, [&](const auto&) { return end != End::kRefused; });
          EXPECT_TRUE(end == End::kNone || end == End::kRefused);
        } catch (const Error&) {
        }
        if (end != End::kOther)
          for (const NamedParameter& p : learner.model().parameters()) p.value.raw();
        learner.update(2, good, 1e-2);
        if (comm.rank() != 0) return;
        ends.emplace_back();
        for (const NamedParameter& p : learner.model().parameters())
          ends.back().push_back(value_of(p));
      });
    for (const auto& end : ends)
      for (size_t i = 0; i < end.size(); ++i) EXPECT_TRUE(bit_equal(end[i], ends[0][i])) << i;
  }
}

// If memory ends after the update, it must not be made again: that is no
// OutOfMemoryError.
TEST(ShardedWeights, AnUpdateThatIsMadeIsNotRepeated) {
  int made_and_failed = 0;
  for (int64_t request = 0; request < 6; ++request) {
    std::optional<AllocationFaults> fault;
    run_local_ranks(2, [&](Communicator& comm) {
      Learner learner(sharded_model({.layers = 3}), sharded_config({}, Sharding::kFull), comm);
      const auto accept = [&](const kernels::PolicyLossStats&) {
        comm.barrier();
        if (comm.rank() == 0) fault.emplace(Device{}, request);
        comm.barrier();
        return true;
      };
      int64_t updates = 1;
      try {
        learner.update(
            1, [&](int64_t) { return odd_loss(learner.model(), 1); }, 1e-2, accept);
      } catch (const OutOfMemoryError&) {
        updates = 0;
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("the update is made"), std::string::npos) << e.what();
        made_and_failed += comm.rank() == 0;
      }
      comm.barrier();
      if (comm.rank() == 0) fault.reset();
      EXPECT_EQ(learner.optimizer().updates(), updates) << request;
    });
  }
  EXPECT_GT(made_and_failed, 0);
}

TEST(ShardedWeights, ArePlacedBeforeTheFirstUpdate) {
  run_local_ranks(2, [&](Communicator& comm) {
    Learner learner(sharded_model({.layers = 3}), sharded_config({}, Sharding::kFull), comm);
    const auto addresses = [&] {
      std::vector<const void*> out;
      for (const NamedParameter& p : learner.model().parameters()) out.push_back(p.value.raw());
      return out;
    };
    const Tensor before = learner.model().parameters()[5].value.clone();
    learner.place_weights();
    EXPECT_TRUE(bit_equal(learner.model().parameters()[5].value, before));
    const auto placed = addresses();
    learner.update(
        1, [&](int64_t) { return odd_loss(learner.model(), 1); }, 1e-2);
    EXPECT_EQ(addresses(), placed);
  });
}

// Between updates no slice and no gathered block is held.
TEST(ShardedWeights, UpdatesLeaveNoMemoryBehind) {
  run_local_ranks(2, [&](Communicator& comm) {
    Learner learner(sharded_model({.layers = 4}), sharded_config({}, Sharding::kFull), comm);
    comm.barrier();
    const int64_t before = allocator(Device{}).stats().live_bytes;
    comm.barrier();
    for (int step = 0; step < 2; ++step)
      learner.update(
          1, [&](int64_t) { return odd_loss(learner.model(), 1); }, 1e-2);
    comm.barrier();
    // Blocks have been moved into one tensor, without the rounding of each.
    EXPECT_LE(allocator(Device{}).stats().live_bytes, before + before / 20);
    comm.barrier();
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
  const ShardCase delta{.dtype = DType::kBF16, .layers = 4, .width = 256, .delta = true};
  for (const ShardCase& c : {narrow, wide, cheap, adapters, delta}) {
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
