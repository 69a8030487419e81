// The optimizer's state of bf16 weights over ranks: it is read and gathered in parts, and its
// fingerprints do not depend on them.
#include <limits>
#include <map>

#include "core/allocator.h"
#include "data/safetensors.h"
#include "tests/support/tensor_files.h"
#include "tests/trainers/odd_learners.h"
#include "trainers/fingerprints.h"

namespace cohort::test {
namespace {

std::unique_ptr<ParameterSet> bf16_set() {
  auto set = std::make_unique<ParameterSet>(DType::kBF16, Device{}, std::nullopt);
  set->add({"table", {9, 12}, ParameterUse::kLookup});
  set->begin_unit();
  set->add({"a", {70}});
  set->add({.name = "f32", .shape = {5}, .dtype = ParameterDType::kStatistic});
  set->add({"w", {33, 7}, ParameterUse::kMatmul});
  return set;
}

// A whole state of bf16_set().
NamedTensors random_state() {
  NamedTensors out;
  uint64_t seed = 1;
  const auto shapes = bf16_set();
  for (const NamedParameter& p : *shapes) {
    const bool is_f32 = p.value.dtype() == DType::kF32;
    for (const char* suffix : {".m", ".v", ".master"})
      if (!is_f32 || std::string(suffix) != ".master")
        out.emplace_back(p.name + suffix, random_tensor(p.value.shape(), DType::kF32, seed++));
  }
  return out;
}

// bf16 weights with f32 masters, which are on a rank as weight and low bits.
TEST(Sharding, MastersAreReadAndGatheredInParts) {
  TempDir dir;
  const NamedTensors saved = random_state();
  write_safetensors(dir.path("optimizer.safetensors"), saved);
  for (const int ranks : {1, 2, 3, 8}) {
    NamedTensors read;
    run_local_ranks(ranks, [&](Communicator& comm) {
      const auto set = bf16_set();
      for (const NamedParameter& p : *set) Tensor(p.value).zero_();
      Optimizer optimizer(*set, {}, 0, Slices::of_rank(comm.rank(), comm.size(), 0));
      optimizer.load(SafetensorsFolder(dir.path(""), "optimizer"), 1);
      const Tensor f32 = random_tensor({5}, DType::kF32, 99);
      for (const ParameterPart& part : parts_in(*set, Slices::of_rank(comm.rank(), comm.size(), 0)))
        if (part.parameter == 2) part.of((*set)[2].value).copy_(part.of(f32));
      optimizer.gather_weights(comm);
      EXPECT_TRUE(bit_equal((*set)[2].value, f32));
      for (size_t i : {0, 1, 3}) {
        const Tensor master = saved[i == 3 ? 10 : 3 * i + 2].second;
        EXPECT_LT(relative_error((*set)[i].value, master), 1e-2);
      }
      for (size_t unit = 0; unit < 2; ++unit) {
        const int to = comm.size() - 1;
        gather_state(optimizer, comm, unit, to);
        if (comm.rank() == to)
          for (auto& [name, tensor] : tensors_of(optimizer.state_sources(unit)))
            read.emplace_back(name, tensor.clone());
      }
    });
    ASSERT_EQ(read.size(), saved.size());
    for (size_t i = 0; i < read.size(); ++i) {
      EXPECT_EQ(read[i].first, saved[i].first);
      EXPECT_TRUE(bit_equal(read[i].second, saved[i].second)) << ranks << saved[i].first;
    }
  }
}

// A save holds no more on the host than the plan of the memory counts: the bytes in the file.
TEST(Sharding, GatheredStateTakesNoMoreThanItsFile) {
  for (const MomentKind moments : {MomentKind::kF32, MomentKind::kBF16})
    run_local_ranks(2, [&](Communicator& comm) {
      constexpr int64_t kSize = 1 << 20;
      ParameterSet set(DType::kBF16, {}, std::nullopt);
      set.add({"a", {kSize}});
      set.add({"b", {2 * kSize}});
      OptimizerConfig config;
      config.storage.moments = moments;
      const Slices slices = Slices::of_rank(comm.rank(), 2, 0);
      Optimizer optimizer(set, config, 0, slices);
      Allocator& memory = allocator(Device{});
      comm.barrier();
      const int64_t before = memory.stats().live_bytes + 2 * PartGather::memory_bytes(set, slices);
      comm.barrier();
      gather_state(optimizer, comm, 0, 0);
      comm.barrier();
      if (comm.rank() == 0) {
        EXPECT_GE(memory.stats().live_bytes - before, 6 * 3 * kSize);
        memory.reset_peak();
        int64_t saved = 0;
        for (const TensorSource& source : optimizer.state_sources(0)) {
          EXPECT_EQ(source.make().numel(), source.shape.numel());
          saved += source.bytes();
        }
        EXPECT_LE(memory.stats().peak_bytes - before, saved);
        EXPECT_LT(memory.stats().live_bytes - before, kSize);
      }
      comm.barrier();
    });
}

// State that two ranks have read and gathered has the same fingerprints on any number of ranks.
TEST(Sharding, FingerprintsOfTheStateDoNotDependOnRanks) {
  for (const MomentKind moments : {MomentKind::kF32, MomentKind::kBF16}) {
    const TempDir dir;
    std::map<std::string, int64_t> expected;
    NamedTensors saved;
    write_safetensors(dir.path("optimizer.safetensors"), random_state());
    for (const int ranks : {2, 1, 3, 5, 8}) {
      run_local_ranks(ranks, [&](Communicator& comm) {
        const auto set = bf16_set();
        for (const NamedParameter& p : *set) Tensor(p.value).zero_();
        OptimizerConfig config;
        config.storage.moments = moments;
        Optimizer optimizer(*set, config, 3, Slices::of_rank(comm.rank(), ranks, 0));
        optimizer.load(SafetensorsFolder(dir.path(""), "optimizer"), 1);
        optimizer.gather_weights(comm);
        EXPECT_EQ(first_difference(comm, weight_fingerprints(*set)), "");
        std::map<std::string, int64_t> mine, sums;
        for (const Fingerprint& part : optimizer.fingerprints()) mine[part.name] = part.sum;
        for (const Fingerprint& weights : weight_fingerprints(*set)) {
          sums[weights.name] = weights.sum;
          for (const char* suffix : {".m", ".v", ".low_bits"}) {
            // Halves, whose sums do not overflow.
            const auto own = static_cast<uint64_t>(mine[weights.name + suffix]);
            Tensor sum = Tensor::from(std::vector<int64_t>{static_cast<int64_t>(own >> 32),
                                                           static_cast<int64_t>(own & ~0u)});
            comm.all_reduce(sum);
            const auto* const half = sum.data<int64_t>();
            sums[weights.name + suffix] = static_cast<int64_t>(
                (static_cast<uint64_t>(half[0]) << 32) + static_cast<uint64_t>(half[1]));
          }
        }
        NamedTensors state;
        for (size_t unit = 0; unit < 2; ++unit) {
          gather_state(optimizer, comm, unit, 0);
          if (comm.rank() == 0)
            for (auto& [name, tensor] : tensors_of(optimizer.state_sources(unit)))
              state.emplace_back(name, tensor.clone());
        }
        if (comm.rank() != 0) return;
        if (ranks == 2) expected = sums;
        EXPECT_TRUE(sums == expected) << ranks;
        saved = state;
      });
      write_safetensors(dir.path("optimizer.safetensors"), saved);
    }
    EXPECT_NE(expected.at("w.low_bits"), 0);
    EXPECT_EQ(expected.at("f32.low_bits"), 0);  // there are none
  }
}

TEST(Fingerprints, NameTheFirstDifferenceAndItsRanks) {
  for (const int ranks : {1, 2, 5}) {
    const auto difference = [&](const std::function<void(int, std::vector<Fingerprint>&)>& change) {
      std::vector<std::string> found(static_cast<size_t>(ranks));
      run_local_ranks(ranks, [&](Communicator& comm) {
        // Extremes, whose differences and negatives overflow.
        std::vector<Fingerprint> all{{"a", std::numeric_limits<int64_t>::min()},
                                     {"b", -1},
                                     {"c", std::numeric_limits<int64_t>::max()}};
        change(comm.rank(), all);
        found[static_cast<size_t>(comm.rank())] = first_difference(comm, all);
      });
      for (const std::string& each : found) EXPECT_EQ(each, found[0]);
      return found[0];
    };
    const auto nothing = [](int, auto&) {};
    EXPECT_EQ(difference(nothing), "");
    if (ranks == 1) continue;
    EXPECT_EQ(difference([](int rank, auto& all) {
                if (rank == 1) all[1].sum = all[2].sum = 0;
              }),
              "rank 1 has other b than rank 0");
    EXPECT_EQ(difference([](int rank, auto& all) { all[2].sum -= rank == 0 ? 1 : 0; }),
              ranks == 2 ? "rank 1 has other c than rank 0"
                         : "ranks 1, 2, 3, 4 have other c than rank 0");
    EXPECT_EQ(difference([](int rank, auto& all) { all[0].sum += rank == 1 ? 1 : 0; }),
              "rank 1 has other a than rank 0");
  }
}

}  // namespace
}  // namespace cohort::test
