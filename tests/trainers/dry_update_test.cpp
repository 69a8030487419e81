// The collectives of an update: all ranks make the same calls, or they would wait forever.
#include "trainers/dry_update.h"

#include "distributed/dry_communicator.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

constexpr Sharding kDrySharding[] = {Sharding::kNone, Sharding::kOptimizer, Sharding::kGradients,
                                     Sharding::kFull};
constexpr int64_t kMost = 3;  // micro batches of a rank

// The kinds of units: tables, blocks and end, with a head of its own or a tied one, or adapters.
std::vector<ModelConfig> dry_models() {
  std::vector<ModelConfig> out;
  for (const bool tied : {false, true})
    for (const int rank : {0, 2}) {
      ModelConfig& c = out.emplace_back();
      c.num_layers = 2;
      c.d_model = 48;
      c.num_heads = 2;
      c.context = 64;
      c.vocab_size = 1024;
      c.tie_embeddings = tied;
      c.lora.rank = rank;
      c.resolve();
    }
  ModelConfig& delta = out.emplace_back(out[0]);  // with parameters in f32 beside bf16
  delta.delta = {.full_every = 2, .key_heads = 1, .value_heads = 2, .key_dim = 64, .value_dim = 64};
  return out;
}

// A rank among others of which one has kMost micro batches.
class UnevenRanks : public DryCommunicator {
 public:
  using DryCommunicator::DryCommunicator;
  void all_reduce(Tensor& t, Reduce op) override {
    DryCommunicator::all_reduce(t, op);
    if (op != Reduce::kMax) return;
    double& rounds = t.data<double>()[0];
    rounds = std::max(rounds, static_cast<double>(kMost));
  }
};

// One call a line.
template <class Ranks>
std::string calls_of(const ModelConfig& model, const OptimizerConfig& config, DType dtype,
                     Device device, int rank, int ranks, int64_t micro_batches, int hosts = 1) {
  Ranks comm(rank, ranks, hosts);
  dry_update(model, dtype, device, config, micro_batches, comm);
  std::string out;
  for (const DryCommunicator::Call& call : comm.calls()) out += call.text + "\n";
  return out;
}

TEST(DryUpdate, AllRanksMakeTheSameCalls) {
  for (const ModelConfig& model : dry_models())
    for (const Sharding sharding : kDrySharding)
      for (const int64_t lanes : {0, 1024})
        for (const auto& [ranks, hosts] :
             {std::pair{2, 1}, {3, 1}, {8, 1}, {8, 2}, {64, 8}, {1024, 1}}) {
          if (lanes > 0 && (ranks == 3 || sums_each_micro_batch(sharding))) continue;
          SCOPED_TRACE(str(ranks, " ranks, ", entry_of(kShardingNames, sharding).name));
          const int count = ranks, host_count = hosts;
          OptimizerConfig config;
          config.sharding = sharding;
          config.reduction_lanes = lanes;
          if (lanes == 0) config.storage.place = StatePlace::kHost;
          const auto of = [&](int rank, int64_t micro_batches) {
            return calls_of<UnevenRanks>(model, config, DType::kBF16, Device::cuda(), rank, count,
                                         micro_batches, host_count);
          };
          const std::string first = of(0, kMost);
          EXPECT_NE(first.find("all_to_all of f32["), first.npos) << first;
          EXPECT_EQ(first.find(" apart") != first.npos, hosts > 1) << first;
          // Ranks with fewer micro batches, or with none, make them too.
          for (const int rank : {0, 1, ranks / 2, ranks - 1})
            for (const int64_t micro_batches : {int64_t{0}, int64_t{1}, kMost})
              ASSERT_EQ(of(rank, micro_batches), first) << rank << ", " << micro_batches;
        }
}

// Records the calls of a rank that exists.
class RecordedRank : public Communicator {
 public:
  RecordedRank(Communicator& comm, int hosts) : comm_(comm), hosts_(hosts) {}
  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  int hosts() const override { return hosts_; }
  void all_reduce(Tensor& t, Reduce op) override {
    calls += describe_all_reduce(t, op) + "\n";
    comm_.all_reduce(t, op);
  }
  void all_to_all(Tensor& received, const Tensor& parts, const RankSets& among) override {
    calls += describe_all_to_all(received, parts, among) + "\n";
    comm_.all_to_all(received, parts, among);
  }
  void all_gather(Tensor& all) override {
    calls += describe_all_gather(all, size()) + "\n";
    comm_.all_gather(all);
  }
  void barrier() override {
    calls += "barrier\n";
    comm_.barrier();
  }
  std::string calls;

 private:
  Communicator& comm_;
  const int hosts_;
};

TEST(DryUpdate, MakesTheCallsOfARealOne) {
  for (const ModelConfig& model : dry_models())
    for (const Sharding sharding : kDrySharding)
      for (const auto& [ranks, hosts] : {std::pair{2, 1}, {3, 1}, {8, 1}, {4, 2}, {6, 3}}) {
        const int count = ranks, host_count = hosts;
        OptimizerConfig config;
        config.sharding = sharding;
        run_local_ranks(ranks, [&](Communicator& real) {
          RecordedRank comm(real, host_count);
          Learner learner(std::make_unique<Transformer>(model, DType::kF32, 1), config, comm);
          const auto loss = [&](int64_t) {
            TokenSequence s;
            s.tokens = {1, 2, 3, 4, 5};
            s.loss_mask.assign(5, 1);
            const PackedBatch batch = pack({&s, 1});
            return cross_entropy(learner.model().forward(batch), learner.model().head(),
                                 batch.targets, Tensor::full({batch.size()}, 0.1, DType::kF32));
          };
          learner.update(2, loss, 1e-3);
          EXPECT_EQ(comm.calls, calls_of<DryCommunicator>(model, config, DType::kF32, {},
                                                          real.rank(), count, 2, host_count));
        });
      }
}

TEST(DryUpdate, SendsEachGradientAndWeightOnce) {
  for (const ModelConfig& model : dry_models()) {
    if (model.lora.rank > 0) continue;
    for (const Sharding sharding : kDrySharding) {
      OptimizerConfig config;
      config.sharding = sharding;
      DryCommunicator comm(0, 2);
      dry_update(model, DType::kBF16, Device::cuda(), config, 2, comm);
      int64_t summed = 0, gathered = 0;
      for (const DryCommunicator::Call& call : comm.calls()) {
        if (call.text.starts_with("all_to_all")) summed += call.sent;
        if (call.text.starts_with("all_gather")) gathered += call.sent;
      }
      // Half of the elements, rounded up to slices; of f32 gradients or bf16 weights.
      const int64_t half = model_size(model).parameters / 2, rounding = 64 * (model.num_layers + 2),
                    sums = sums_each_micro_batch(sharding) ? 2 : 1,
                    width = sharding == Sharding::kNone ? 4 : 2;
      EXPECT_GE(summed, sums * 4 * half);
      EXPECT_LE(summed, sums * 4 * (half + rounding));
      if (sharding == Sharding::kFull) continue;  // Forecasts.CountTheGathersOfBlocks
      EXPECT_GE(gathered, width * half);
      EXPECT_LE(gathered, width * (half + rounding) + (width == 2 ? 2 * 10 * 48 : 0));
    }
  }
}

}  // namespace
}  // namespace cohort::test
