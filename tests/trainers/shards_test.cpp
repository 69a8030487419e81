// Sharding over ranks changes where gradients and state are, not what an update makes.
#include "trainers/shards.h"

#include <bit>
#include <limits>

#include "core/allocator.h"
#include "data/safetensors.h"
#include "kernels/sum_parts.h"
#include "tests/support/host_layout.h"
#include "tests/support/loss_node.h"
#include "tests/support/tensor_files.h"
#include "tests/support/test_util.h"
#include "tests/trainers/odd_learners.h"

namespace cohort::test {
namespace {

constexpr Sharding kShardings[] = {Sharding::kNone, Sharding::kOptimizer, Sharding::kGradients,
                                   Sharding::kFull};

// The whole state, on rank 0.
NamedTensors state_of(Learner& learner, Communicator& comm) {
  NamedTensors out;
  Optimizer& optimizer = learner.optimizer();
  for (size_t unit = 0; unit < learner.model().parameters().units().size(); ++unit) {
    gather_state(optimizer, comm, unit, 0);
    if (comm.rank() != 0) continue;
    for (auto& [name, tensor] : tensors_of(optimizer.state_sources(unit)))
      out.emplace_back(name, tensor.clone());
  }
  return out;
}

struct End {
  std::vector<std::vector<Tensor>> weights;  // by rank
  NamedTensors state;
  double norm = 0;
};

// Three updates. micro_batches(rank): of each rank.
End train(const ShardCase& c, Sharding sharding, int ranks,
          const std::function<int64_t(int)>& micro_batches, int hosts = 1) {
  End out;
  out.weights.resize(static_cast<size_t>(ranks));
  run_local_ranks(ranks, [&](Communicator& local) {
    HostLayout comm(local, hosts);
    Learner learner(sharded_model(c), sharded_config(c, sharding), comm, 7);
    for (uint64_t step = 0; step < 3; ++step) {
      const auto loss = [&](int64_t i) {
        return odd_loss(learner.model(), 100 * step + 10 * static_cast<uint64_t>(comm.rank()) +
                                             static_cast<uint64_t>(i));
      };
      const auto update = learner.update(micro_batches(comm.rank()), loss, 1e-2);
      if (comm.rank() == 0) out.norm = update.grad_norm;
    }
    learner.check_weights();
    for (const NamedParameter& p : learner.model().parameters())
      out.weights[static_cast<size_t>(comm.rank())].push_back(value_of(p));
    NamedTensors state = state_of(learner, comm);
    if (comm.rank() == 0) out.state = std::move(state);
  });
  return out;
}

void expect_equal(const End& a, const End& b) {
  for (const auto& weights : b.weights)
    for (size_t i = 0; i < weights.size(); ++i)
      ASSERT_TRUE(bit_equal(weights[i], a.weights[0][i])) << "parameter " << i;
  ASSERT_EQ(a.state.size(), b.state.size());
  for (size_t i = 0; i < a.state.size(); ++i) {
    EXPECT_EQ(a.state[i].first, b.state[i].first);
    ASSERT_TRUE(bit_equal(a.state[i].second, b.state[i].second)) << a.state[i].first;
  }
  EXPECT_EQ(a.norm, b.norm);
}

const std::vector<ShardCase> kCases = {
    {},
    {.dtype = DType::kF64},
    {.tied = true},
    {.moments = MomentKind::kBF16},
    {.moments = MomentKind::kBF16, .lora = true},
    {.lora = true, .base = kernels::WeightFormat::kNf4, .layers = 3},
    {.layers = 1},
    {.layers = 5, .recompute = Recompute::kCheap},
    {.layers = 4, .recompute = Recompute::kBlock},
    {.layers = 3, .delta = true},
};

TEST(Sharding, NoneAndOptimizerHaveEqualBits) {
  for (const ShardCase& c : kCases)
    for (const int ranks : {1, 2, 3, 5, 8}) {
      SCOPED_TRACE(str(ranks, " ranks"));
      const auto micro_batches = [](int rank) { return 1 + rank % 3; };
      expect_equal(train(c, Sharding::kNone, ranks, micro_batches),
                   train(c, Sharding::kOptimizer, ranks, micro_batches));
    }
}

TEST(Sharding, AllAreEqualWithOneMicroBatchARank) {
  for (const ShardCase& c : kCases)
    for (const int ranks : {1, 2, 3, 5, 8}) {
      SCOPED_TRACE(str(ranks, " ranks"));
      const auto one = [](int) { return 1; };
      const End none = train(c, Sharding::kNone, ranks, one);
      expect_equal(none, train(c, Sharding::kOptimizer, ranks, one));
      expect_equal(none, train(c, Sharding::kGradients, ranks, one));
      expect_equal(none, train(c, Sharding::kFull, ranks, one));
    }
}

TEST(Sharding, GradientsAndFullHaveEqualBits) {
  for (const ShardCase& c : kCases)
    for (const int ranks : {1, 2, 3, 5, 8}) {
      SCOPED_TRACE(str(ranks, " ranks"));
      const auto micro_batches = [](int rank) { return rank % 3; };
      expect_equal(train(c, Sharding::kGradients, ranks, micro_batches),
                   train(c, Sharding::kFull, ranks, micro_batches));
    }
}

// Sums inside hosts first; with `gradients`, ranks without a micro batch add zeros.
TEST(Sharding, HostsChangeNoBit) {
  for (const ShardCase& c : kCases)
    for (const auto& [hosts, ranks] : {std::pair{2, 4}, {2, 8}, {3, 6}})
      for (const Sharding sharding : kShardings) {
        SCOPED_TRACE(str(ranks, " ranks of ", hosts, " hosts"));
        const auto micro_batches = [](int rank) { return rank % 3; };
        expect_equal(train(c, sharding, ranks, micro_batches),
                     train(c, sharding, ranks, micro_batches, hosts));
      }
}

// Ranks with fewer micro batches than others, or without any.
TEST(Sharding, RanksWithFewerMicroBatchesTakePart) {
  for (const int ranks : {2, 3, 5}) {
    const auto few = [](int rank) { return rank == 1 ? 0 : rank == 2 ? 1 : 3; };
    const ShardCase f64{.dtype = DType::kF64};
    const End none = train(f64, Sharding::kNone, ranks, few),
              gradients = train(f64, Sharding::kGradients, ranks, few);
    for (const auto& weights : gradients.weights)
      for (size_t i = 0; i < weights.size(); ++i) {
        EXPECT_TRUE(bit_equal(weights[i], gradients.weights[0][i]));
        EXPECT_LT(relative_error(weights[i], none.weights[0][i]), 1e-12);
      }
  }
}

// The sums of an update over ranks do not depend on how many there are, but for rounding.
TEST(Sharding, AnyNumberOfRanksMakesTheUpdateOfOne) {
  const ShardCase f64{.dtype = DType::kF64};
  for (const Sharding sharding : kShardings) {
    std::vector<std::vector<Tensor>> ends;
    for (const int ranks : {1, 2, 3})
      run_local_ranks(ranks, [&](Communicator& comm) {
        Learner learner(sharded_model(f64), sharded_config(f64, sharding), comm);
        // Six micro batches, shared by the ranks.
        for (int step = 0; step < 3; ++step)
          learner.update(
              6 / ranks,
              [&](int64_t i) {
                return odd_loss(learner.model(),
                                static_cast<uint64_t>(10 * step + comm.rank() + ranks * i));
              },
              1e-2);
        if (comm.rank() != 0) return;
        ends.emplace_back();
        for (const NamedParameter& p : learner.model().parameters())
          ends.back().push_back(value_of(p));
      });
    for (const auto& end : ends)
      for (size_t i = 0; i < end.size(); ++i) EXPECT_LT(relative_error(end[i], ends[0][i]), 1e-12);
  }
}

// Eight lanes, some without a micro batch, are added alike on one, two, four and eight ranks.
TEST(Lanes, AnyNumberOfRanksHasTheBitsOfOne) {
  const auto count_of = [](int64_t lane) { return lane == 3 || lane == 6 ? 0 : 1 + lane % 3; };
  for (const ShardCase& c : kCases)
    for (const int64_t lanes : {0, 8}) {
      std::vector<std::vector<Tensor>> ends;
      std::vector<double> norms;
      for (const Sharding sharding : {Sharding::kNone, Sharding::kOptimizer})
        for (const int ranks : {1, 2, 4, 8})
          run_local_ranks(ranks, [&](Communicator& comm) {
            OptimizerConfig config = sharded_config(c, sharding);
            config.reduction_lanes = lanes;
            Learner learner(sharded_model(c), config, comm, 7);
            std::vector<int64_t> lane_of, seeds;
            const int64_t own = 8 / ranks;
            for (int64_t lane = comm.rank() * own; lane < (comm.rank() + 1) * own; ++lane)
              for (int64_t i = 0; i < count_of(lane); ++i) {
                lane_of.push_back(lanes > 0 ? lane : 0);
                seeds.push_back(10 * lane + i);
              }
            double norm = 0;
            for (int64_t step = 0; step < 3; ++step)
              norm =
                  learner
                      .update(
                          std::ssize(seeds),
                          [&](int64_t i) {
                            return odd_loss(
                                learner.model(),
                                static_cast<uint64_t>(100 * step + seeds[static_cast<size_t>(i)]));
                          },
                          1e-2, nullptr, lane_of)
                      .grad_norm;
            if (comm.rank() != 0) return;
            norms.push_back(norm);
            ends.emplace_back();
            for (const NamedParameter& p : learner.model().parameters())
              ends.back().push_back(value_of(p));
          });
      int64_t other_bits = 0;
      for (const auto& end : ends)
        for (size_t i = 0; i < end.size(); ++i) other_bits += !bit_equal(end[i], ends[0][i]);
      // Without lanes the sums of f32 differ: the test sees it.
      EXPECT_EQ(other_bits == 0, lanes > 0);
      for (const double norm : norms) EXPECT_EQ(norm == norms[0] || lanes == 0, true);
    }
}

TEST(Sharding, ANumberThatIsNotFiniteInOneSliceStopsAllRanks) {
  for (const Sharding sharding : kShardings)
    run_local_ranks(3, [&](Communicator& comm) {
      Learner learner(sharded_model({}), sharded_config({}, sharding), comm);
      const NamedParameter& last = learner.model().parameters().back();
      const auto bad = [&](int64_t) {
        return on_tape(make_node("bad", Tensor::full({1}, 0.5, DType::kF32), {last.leaf},
                                 [](const Tensor&, Gradients& gradients) {
                                   const GradSlot slot = gradients.slot(0);
                                   Tensor all = slot.tensor;
                                   all.fill_(1);
                                   all.reshape({all.numel()})
                                       .narrow(0, all.numel() - 1, 1)
                                       .fill_(std::numeric_limits<double>::infinity());
                                 }));
      };
      EXPECT_THROW_WITH(learner.update(1, bad, 1e-3), NonFiniteError,
                        "the gradient of " + last.name + " has a value of");
      EXPECT_TRUE(learner
                      .update(
                          1, [&](int64_t) { return odd_loss(learner.model(), 1); }, 1e-3)
                      .made);
    });
}

// Weights that one rank alone has made not finite stop every rank.
TEST(Sharding, WeightsOfOneSliceThatAreNotFiniteStopAllRanks) {
  run_local_ranks(3, [](Communicator& comm) {
    Learner learner(sharded_model({}), sharded_config({}, Sharding::kOptimizer), comm);
    // The last weight becomes infinite, on the rank that has it.
    const NamedParameter& last = learner.model().parameters().back();
    const auto end_of = [](const Tensor& t) {
      return t.reshape({t.numel()}).narrow(0, t.numel() - 1, 1);
    };
    end_of(last.value).fill_(std::numeric_limits<float>::max());
    const auto loss = [&](int64_t) {
      return on_tape(make_node("one", Tensor::full({1}, 0.5, DType::kF32), {last.leaf},
                               [&](const Tensor&, Gradients& gradients) {
                                 Tensor all = gradients.slot(0).tensor;
                                 all.fill_(0);
                                 end_of(all).fill_(-1);
                               }));
    };
    learner.update(1, loss, 1e36);
    EXPECT_EQ(std::isfinite(end_of(last.value).item()), false);
    EXPECT_THROW_WITH(learner.check_weights(), NonFiniteError, "not finite");
    EXPECT_THROW_WITH(learner.update(1, loss, 1e-3), NonFiniteError, "not finite");
  });
}

// A rank whose memory ends in a micro batch makes the calls of the others; all start again.
TEST(Sharding, RanksOutOfMemoryStartAgainTogether) {
  for (const Sharding sharding : kShardings)
    for (const int64_t failing : {0, 1}) {
      std::vector<Tensor> ends(2);
      for (const bool fails : {false, true})
        run_local_ranks(3, [&](Communicator& comm) {
          Learner learner(sharded_model({}), sharded_config({}, sharding), comm);
          bool full = fails && comm.rank() == 1;
          learner.within_memory(
              64, [](int64_t tokens) { return tokens; },
              [&] {
                learner.update(
                    2,
                    [&](int64_t i) {
                      HeadLoss loss = odd_loss(learner.model(), static_cast<uint64_t>(i));
                      if (i == failing && std::exchange(full, false))
                        throw OutOfMemoryError("full");
                      return loss;
                    },
                    1e-2);
              });
          if (comm.rank() == 0) ends[fails] = learner.model().parameters().back().value.clone();
        });
      EXPECT_TRUE(bit_equal(ends[1], ends[0]));
    }
}

// Once all ranks have the workspace, none can run out of memory while the others wait for it.
TEST(Sharding, StepAndGatherOfWeightsRequestNoMemory) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    std::optional<AllocationFaults> none;
    run_local_ranks(3, [&](Communicator& comm) {
      const auto model = sharded_model({.dtype = dtype});
      for (const NamedParameter& p : model->parameters()) p.grad().fill_(1);
      Optimizer optimizer(model->parameters(), {}, 0, Slices::of_rank(comm.rank(), comm.size(), 0));
      optimizer.allocate_workspace();
      const Tensor norm = Tensor::full({1}, 1, DType::kF64);
      comm.barrier();
      if (comm.rank() == 0) none.emplace(Device{}, int64_t{1} << 40);
      comm.barrier();
      optimizer.step(1e-2, norm);
      optimizer.gather_weights(comm);
      comm.barrier();
      if (comm.rank() == 0) {
        EXPECT_EQ(none->requests(), 0);
      }
    });
  }
}

// A gradient that no backward writes is zeros, though its memory is younger than its last use.
TEST(Sharding, GradientsThatNothingWritesAreZeros) {
  for (const Sharding sharding : kShardings)
    run_local_ranks(2, [&](Communicator& comm) {
      ParameterSet set(DType::kF32, {}, std::nullopt);
      const Variable unused = set.add({"unused", {64}}), used = set.add({"used", {64}});
      SideStream side;
      ShardedGradients gradients(set, comm, side, sharding);
      gradients.allocate();
      gradients.begin_micro_batch(true);
      const Tensor one = Tensor::full({1}, 1, DType::kF32);
      const Variable of_used = make_node("used", one, {used}, [](const Tensor&, Gradients& g) {
        Tensor(g.slot(0).tensor).fill_(1);
      });
      const Variable of_unused =  // younger: its backward comes first
          make_node("unused", one, {unused}, [](const Tensor&, Gradients&) {});
      const Variable sum = make_node("sum", one, {of_used, of_unused},
                                     [](const Tensor& dy, Gradients& g) { g.pass(0, dy); });
      const double nan = std::numeric_limits<double>::quiet_NaN();
      for (int i = 0; i < 3; ++i)
        Tensor::full({128}, nan, DType::kF32);  // memory that is used again
      backward(sum);
      gradients.end_micro_batch();
      gradients.finish();
      const std::vector<Tensor> sums = gradients.gradients();
      for (size_t i = 0; i < sums.size(); ++i)
        for (const double g : sums[i].to_vector<double>())
          EXPECT_EQ(g, gradients.parts()[i].parameter == 0 ? 0 : 2);
    });
}

// The state of two ranks is read by any number, and the next updates follow.
TEST(Sharding, StateOfTwoRanksIsReadByAnyNumber) {
  for (const ShardCase& c : kCases) {
    TempDir dir;
    std::vector<Tensor> weights;
    NamedTensors saved;
    run_local_ranks(2, [&](Communicator& comm) {
      Learner learner(sharded_model(c), sharded_config(c, Sharding::kOptimizer), comm, 7);
      learner.update(
          1, [&](int64_t) { return odd_loss(learner.model(), 3); }, 1e-2);
      NamedTensors state = state_of(learner, comm);
      if (comm.rank() != 0) return;
      saved = std::move(state);
      for (const NamedParameter& p : learner.model().parameters()) weights.push_back(value_of(p));
    });
    write_safetensors(dir.path("optimizer.safetensors"), saved);
    for (const int ranks : {1, 3, 5, 8}) {
      NamedTensors read;
      run_local_ranks(ranks, [&](Communicator& comm) {
        const Sharding sharding = ranks % 3 == 2 ? Sharding::kFull : Sharding::kGradients;
        Learner learner(sharded_model(c), sharded_config(c, sharding), comm, 7);
        const ParameterSet& set = learner.model().parameters();
        for (size_t i = 0; i < weights.size(); ++i)
          if (!set[i].quantized.defined()) Tensor(set[i].value).copy_(weights[i]);
        learner.optimizer().load(SafetensorsFolder(dir.path(""), "optimizer"), 1);
        learner.optimizer().gather_weights(comm);
        for (size_t i = 0; i < weights.size(); ++i)
          EXPECT_TRUE(bit_equal(value_of(set[i]), weights[i]));
        NamedTensors state = state_of(learner, comm);
        if (comm.rank() == 0) read = std::move(state);
      });
      ASSERT_EQ(read.size(), saved.size());
      for (size_t i = 0; i < read.size(); ++i)
        EXPECT_TRUE(bit_equal(read[i].second, saved[i].second)) << saved[i].first;
    }
  }
}

// More elements than one message has.
TEST(Sharding, SlicesAreExchangedInPieces) {
  constexpr int64_t kSize = 17'000'003;
  for (const Sharding sharding : kShardings)
    run_local_ranks(2, [&](Communicator& comm) {
      ParameterSet set(DType::kF32, {}, std::nullopt);
      const Variable w = set.add({"w", {kSize}});
      SideStream side;
      ShardedGradients gradients(set, comm, side, sharding);
      gradients.allocate();
      gradients.begin_micro_batch(true);
      float* values = w.grad().data<float>();
      for (int64_t i = 0; i < kSize; ++i)
        values[i] = static_cast<float>((i % 1021) * (comm.rank() + 1));
      gradients.end_micro_batch();
      gradients.finish();
      Optimizer optimizer(set, {.sharding = sharding}, 0,
                          is_sharded(sharding) ? Slices::of_rank(comm.rank(), 2, 0) : Slices());
      Tensor(set[0].value).fill_(-1);
      const std::vector<Tensor> sums = gradients.gradients();
      int64_t wrong = 0;
      for (size_t p = 0; p < sums.size(); ++p) {
        const ParameterPart& part = gradients.parts()[p];
        part.of(set[0].value).copy_(sums[p]);
      }
      optimizer.gather_weights(comm);
      const float* all = set[0].value.data<float>();
      for (int64_t i = 0; i < kSize; ++i) wrong += all[i] != static_cast<float>(3 * (i % 1021));
      EXPECT_EQ(wrong, 0);
    });
}

// The middle of a tensor that is larger than its sample may be in several slices.
TEST(Sharding, RanksSampleTheWeightsThatOneSamples) {
  ParameterSet set(DType::kF32, {}, 1);
  set.add({"small", {5}});
  set.add({"large", {9001, 2}, ParameterUse::kMatmul, 0.1});
  const std::vector<double> all = Optimizer(set, {}).sample_weights();
  for (const int ranks : {2, 3, 8}) {
    std::vector<double> samples;
    for (int rank = 0; rank < ranks; ++rank)
      for (const double weight :
           Optimizer(set, {}, 0, Slices::of_rank(rank, ranks, 0)).sample_weights())
        samples.push_back(weight);
    EXPECT_EQ(samples, all);
  }
}

// A rank holds less beside the weights, the more ranks there are.
TEST(Sharding, ARankHoldsASliceOfTheState) {
  ModelConfig config = odd_model();
  config.d_model = 96;
  config.d_ff = 384;
  const OptimizerBytes one = optimizer_bytes({}, config, DType::kBF16, {}),
                       four = optimizer_bytes({.sharding = Sharding::kOptimizer}, config,
                                              DType::kBF16, {}, 4);
  EXPECT_EQ(one.saved, four.saved);
  EXPECT_GT(four.memory, one.memory / 4 - 4096);
  EXPECT_LT(four.memory, one.memory / 4 + (64 << 10));
  config.num_layers = 16;
  const auto gradients = [&](Sharding sharding) {
    return optimizer_bytes({.sharding = sharding}, config, DType::kBF16, {}, 4).gradients;
  };
  EXPECT_LT(gradients(Sharding::kGradients), gradients(Sharding::kOptimizer) / 2);
}

TEST(Sharding, EveryElementIsInOneSlice) {
  for (const bool tied : {false, true})
    for (const int ranks : {1, 2, 3, 7, 64}) {
      const Transformer model(odd_model(tied), DType::kF32, 1);
      for (size_t unit = 0; unit < model.parameters().units().size(); ++unit)
        EXPECT_EQ(model.parameters().slice_size(unit, ranks) % ParameterSet::kLeafAlignment, 0);
      std::vector<int64_t> next(model.parameters().size());
      for (int rank = 0; rank < ranks; ++rank)
        for (const ParameterPart& part :
             parts_in(model.parameters(), Slices::of_rank(rank, ranks, 0))) {
          EXPECT_EQ(part.begin, next[part.parameter]);
          next[part.parameter] += part.count;
        }
      for (size_t i = 0; i < next.size(); ++i)
        EXPECT_EQ(next[i], model.parameters()[i].value.numel());
    }
}

double tree_sum(const std::vector<double>& values) {
  if (values.size() == 1) return values[0];
  const auto half = static_cast<ptrdiff_t>(std::bit_floor(values.size() - 1));
  return tree_sum({values.begin(), values.begin() + half}) +
         tree_sum({values.begin() + half, values.end()});
}

TEST(SumParts, AddsInATreeOverTheParts) {
  for (const DType dtype : {DType::kF64, DType::kF32})
    for (const int64_t ranks : {1, 2, 3, 5, 6, 7, 8, 13, 1024})
      for (const int64_t n : {0, 1, 63, 64, 65, 1000}) {
        Tensor parts = random_tensor({ranks, n}, dtype, 5), y = Tensor::full({n}, 3, dtype);
        for (const kernels::Grad mode : {kernels::Grad::kOverwrite, kernels::Grad::kAccumulate}) {
          const auto before = y.to_vector<double>(), all = parts.to_vector<double>();
          kernels::sum_parts({.y = {y, mode}, .parts = parts});
          const auto sums = y.to_vector<double>();
          for (int64_t i = 0; i < n; ++i) {
            std::vector<double> column;
            for (int64_t r = 0; r < ranks; ++r)
              column.push_back(all[static_cast<size_t>(r * n + i)]);
            const double expected =
                tree_sum(column) + (mode == kernels::Grad::kAccumulate ? before[i] : 0);
            if (dtype == DType::kF64)
              ASSERT_EQ(sums[i], expected);
            else
              ASSERT_NEAR(sums[i], expected, 1e-4);
          }
        }
      }
}

TEST(CudaSumParts, HasTheBitsOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t ranks : {1, 2, 3, 7, 8, 13, 1024})
    for (const int64_t n : {1, 3, 4, 64, 1021, 70000}) {
      if (ranks * n > 10'000'000) continue;
      const Tensor parts =
          random_tensor({ranks, n + 1}, DType::kF32, 5).narrow(1, 0, n).contiguous();
      for (const kernels::Grad mode : {kernels::Grad::kOverwrite, kernels::Grad::kAccumulate}) {
        Tensor expected = random_tensor({n}, DType::kF32, 6), y = expected.to(device);
        kernels::sum_parts({.y = {expected, mode}, .parts = parts});
        kernels::sum_parts({.y = {y, mode}, .parts = parts.to(device)});
        EXPECT_TRUE(bit_equal(y.to(Device{}), expected)) << ranks << " parts of " << n;
      }
    }
}

// Lanes of one rank differ from an update without them by rounding.
TEST(CudaLanes, MakeTheUpdateOfOthers) {
  COHORT_REQUIRE_GPU(device);
  std::vector<Tensor> ends;
  const auto comm = make_single_communicator();
  for (const int64_t lanes : {0, 8}) {
    OptimizerConfig config;
    config.reduction_lanes = lanes;
    config.adam_eps = 1e-3;
    Learner learner(std::make_unique<Transformer>(odd_model(), DType::kF32, 1, device), config,
                    *comm);
    const std::vector<int64_t> lane_of{0, 0, 2, 5, 7, 7};
    learner.update(
        6,
        [&](int64_t i) {
          Rng rng(static_cast<uint64_t>(i), rng_stream(kTestPurpose));
          TokenSequence s;
          for (int t = 0; t < 9; ++t) s.tokens.push_back(static_cast<int32_t>(rng.below(9)));
          s.loss_mask.assign(9, 1);
          const PackedBatch batch = learner.model().to_device(pack({&s, 1}));
          return cross_entropy(learner.model().forward(batch), learner.model().head(),
                               batch.targets, Tensor::full({8}, 1.0 / 8, DType::kF32, device));
        },
        1e-2, nullptr, lanes > 0 ? std::span(lane_of) : std::span<const int64_t>());
    ends.push_back(learner.model().parameters().back().value.to(Device{}));
  }
  EXPECT_LT(relative_error(ends[1], ends[0]), 1e-5);
}

TEST(SumParts, RefusesOtherShapes) {
  Tensor y = Tensor::zeros({3}, DType::kF32);
  const auto sum = [&](const Tensor& parts) { kernels::sum_parts({.y = {y}, .parts = parts}); };
  EXPECT_THROW_WITH(sum(Tensor::zeros({2, 4}, DType::kF32)), Error, "[sum_parts]");
  EXPECT_THROW_WITH(sum(Tensor::zeros({0, 3}, DType::kF32)), Error, "1 to 1024 parts");
  EXPECT_THROW_WITH(sum(Tensor::zeros({1025, 3}, DType::kF32)), Error, "1 to 1024 parts");
}

}  // namespace
}  // namespace cohort::test
