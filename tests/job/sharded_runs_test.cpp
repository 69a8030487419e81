// Runs whose ranks hold slices: their weights and state are those of ranks that hold everything,
// and any number of ranks resumes them.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <thread>

#include "core/allocator.h"
#include "job/sharded_state.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class ShardedRuns : public testing::Test {
 protected:
  // Trains, and returns the run directory.
  std::string train(const std::string& name, const std::string& yaml,
                    const std::vector<std::string>& overrides) {
    return train_new(plan(name, yaml, overrides));
  }
  RunPlan plan(const std::string& name, const std::string& yaml,
               std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(), "output_dir=" + dir_.path(name));
    return small_plan(dir_, name, kSmallModel + std::string(kSmallData) + yaml, overrides);
  }
  // The optimizer's state of the newest checkpoint, by the name of each tensor.
  static std::map<std::string, Tensor> state_of(const std::string& run) {
    const SafetensorsFolder files(training_folder(find_checkpoint(run)), "optimizer");
    std::map<std::string, Tensor> out;
    for (const std::string& name : files.names()) out[name] = files.get(name).read(name);
    return out;
  }
  static void expect_same(const std::string& a, const std::string& b) {
    EXPECT_TRUE(checkpoint_bytes(a) == checkpoint_bytes(b));
    const auto left = state_of(a), right = state_of(b);
    ASSERT_EQ(left.size(), right.size());
    for (const auto& [name, tensor] : left) EXPECT_TRUE(bit_equal(tensor, right.at(name))) << name;
  }
  TempDir dir_;
};

TEST_F(ShardedRuns, HaveTheWeightsAndTheStateOfOthers) {
  for (const char* yaml : {kSmallSft, kSmallGrpo})
    for (const std::vector<std::string>& more :
         {std::vector<std::string>{}, {"optimizer.moments=bf16", "model.tie_embeddings=true"}}) {
      for (const char* ranks : {"ranks=2", "ranks=3"}) {
        std::vector<std::string> overrides = more;
        overrides.emplace_back(ranks);
        const std::string name = str(ranks, yaml == kSmallSft ? "sft" : "grpo", more.size());
        const std::string none = train(name, yaml, overrides);
        overrides.emplace_back("sharding=optimizer");
        expect_same(train(name + "o", yaml, overrides), none);
        for (const char* each : {"sharding=gradients", "sharding=full"}) {
          overrides.back() = each;
          expect_same(train(name + each, yaml, overrides), none);  // one micro batch a rank
        }
      }
    }
}

TEST_F(ShardedRuns, EachRankWritesAFile) {
  const std::string run = train("run", kSmallSft, {"ranks=2", "sharding=optimizer"});
  const std::string training = training_folder(find_checkpoint(run));
  EXPECT_FALSE(fs::exists(training + "/optimizer.safetensors"));
  for (const char* file :
       {"/optimizer-00001-of-00002.safetensors", "/optimizer-00002-of-00002.safetensors",
        "/optimizer.safetensors.index.json"})
    EXPECT_TRUE(fs::exists(training + file)) << file;
  verify_checkpoint(find_checkpoint(run));
}

TEST_F(ShardedRuns, ASingleRankWritesTheFileOfOthers) {
  const std::string none = train("none", kSmallSft, {}),
                    one = train("one", kSmallSft, {"sharding=optimizer"});
  EXPECT_TRUE(checkpoint_bytes(none, "training/optimizer.safetensors") ==
              checkpoint_bytes(one, "training/optimizer.safetensors"));
}

// A run of two ranks ends at step 3, and is resumed by any number, with or without slices.
TEST_F(ShardedRuns, AreResumedByAnyNumberOfRanks) {
  const std::string whole = train("whole", kSmallSft, {"ranks=2", "dtype=f64"});
  for (const char* how :
       {"ranks=2 sharding=optimizer", "ranks=2 sharding=none", "ranks=3 sharding=gradients",
        "ranks=3 sharding=full", "ranks=1 sharding=none", "ranks=5 sharding=optimizer"}) {
    SCOPED_TRACE(how);
    const std::string text = how,
                      run = train_interrupted(plan("run" + text, kSmallSft,
                                                   {"ranks=2", "dtype=f64", "sharding=optimizer"}),
                                              3);
    const size_t space = text.find(' ');
    train_rest(run, {text.substr(0, space), text.substr(space + 1)});
    if (text.starts_with("ranks=2"))
      expect_same(run, whole);
    else
      EXPECT_LT(relative_error(final_weights(run), final_weights(whole)), 1e-9);
  }
}

// Every damaged file of a checkpoint costs that checkpoint alone.
TEST_F(ShardedRuns, DamagedAndMissingShardsAreFound) {
  const std::string run =
      train("run", kSmallSft,
            {"ranks=3", "sharding=optimizer", "checkpoint.every=2", "checkpoint.keep_last=3"});
  const std::string training = run + "/checkpoints/step-00000006/training/";
  for (const auto& entry : fs::directory_iterator(training)) {
    const std::string path = entry.path().string();
    if (path.find("optimizer") == path.npos) continue;
    const std::string good = read_file(path);
    std::string bad = good;
    bad[bad.size() / 2] = static_cast<char>(bad[bad.size() / 2] ^ 1);
    for (const std::string& content : {bad, good.substr(0, good.size() - 1)}) {
      write_file(path, content);
      EXPECT_THROW_WITH(verify_checkpoint(run + "/checkpoints/step-00000006"), InputError,
                        entry.path().filename().string());
    }
    fs::remove(path);
    EXPECT_THROW_WITH(verify_checkpoint(run + "/checkpoints/step-00000006"), InputError,
                      "is missing");
    {
      const ExpectLog warning("using the checkpoint before it");
      EXPECT_EQ(*newest_checkpoint(run + "/checkpoints"), run + "/checkpoints/step-00000004");
    }
    write_file(path, good);
  }
  verify_checkpoint(run + "/checkpoints/step-00000006");
}

// As after a copy over an older checkpoint of the same step: its state must not be resumed.
TEST_F(ShardedRuns, AnotherStateBesideTheIndexIsRefused) {
  const std::string run = train("run", kSmallSft, {"ranks=2", "sharding=optimizer"}),
                    other = train("other", kSmallSft, {"seed=2"}),
                    checkpoint = find_checkpoint(run);
  fs::copy(training_folder(find_checkpoint(other)) + "/optimizer.safetensors",
           training_folder(checkpoint));
  EXPECT_THROW_WITH(verify_checkpoint(checkpoint), InputError,
                    "training/optimizer.safetensors is of another one");
  fs::remove(training_folder(checkpoint) + "/optimizer.safetensors");
  verify_checkpoint(checkpoint);
}

// A micro batch then has two forwards of the trained model.
TEST_F(ShardedRuns, FullRefusesADivergenceFromTheModelItself) {
  const std::vector<std::string> own = {"ranks=2", "sharding=full", "beta=0.1",
                                        "kl_estimator=reverse", "lora.rank=2"};
  EXPECT_THROW_WITH(train("own", kSmallGrpo, own), InputError, "hint: sharding=gradients");
  const std::vector<std::string> copy(own.begin(), own.end() - 1);  // without lora: another model
  train("copy", kSmallGrpo, copy);
}

// The steps of weights are measured over all ranks.
TEST_F(ShardedRuns, MeasureTheirUpdatesAsOthersDo) {
  std::vector<double> norms;
  for (const char* sharding :
       {"sharding=none", "sharding=optimizer", "sharding=gradients", "sharding=full"}) {
    const std::string run =
        train(sharding, kSmallSft, {"ranks=3", "steps=10", "log_every=1", sharding});
    for (const Json& line : json_lines(run + "/metrics.jsonl"))
      if (line.find("step") != nullptr && line.at("step").as_int() == 10 &&
          line.find("update/norm") != nullptr)
        norms.push_back(metric(line, "update/norm"));
  }
  ASSERT_EQ(norms.size(), 4u);
  EXPECT_GT(norms[0], 0);
  for (const double norm : norms) EXPECT_NEAR(norm, norms[0], 1e-9 * norms[0]);
}

// With lanes, one, two, four and eight ranks write the same files.
TEST_F(ShardedRuns, LanesGiveAnyNumberOfRanksTheSameFiles) {
  for (const char* yaml : {kSmallSft, kSmallGrpo})
    for (const char* lanes : {"reduction_lanes=8", "reduction_lanes=0"}) {
      std::optional<ExpectLog> idle;  // 4 prompts for 8 ranks
      if (yaml == kSmallGrpo) idle.emplace("without work");
      const std::string name = str(yaml == kSmallSft ? "sft" : "grpo", lanes);
      const std::string one =
          train(name, yaml, {"ranks=1", lanes, "batch_size=13", "micro_batch_tokens=16"});
      int64_t same = 0;
      for (const char* ranks : {"ranks=2", "ranks=4", "ranks=8"}) {
        const std::string other =
            train(name + ranks, yaml,
                  {ranks, lanes, "batch_size=13", "sharding=optimizer", "micro_batch_tokens=16"});
        const auto left = state_of(one), right = state_of(other);
        bool equal = checkpoint_bytes(one) == checkpoint_bytes(other);
        for (const auto& [tensor, values] : left)
          equal = equal && bit_equal(values, right.at(tensor));
        same += equal;
      }
      EXPECT_EQ(same == 3, std::string(lanes) == "reduction_lanes=8") << name;
    }
}

TEST_F(ShardedRuns, LanesThatRanksDoNotDivideAreRefused) {
  EXPECT_THROW_WITH(train("a", kSmallSft, {"ranks=3", "reduction_lanes=8"}), InputError,
                    "8 lanes cannot be divided by 3 ranks");
  EXPECT_THROW_WITH(train("b", kSmallSft, {"reduction_lanes=6"}), InputError,
                    "reduction_lanes: expected a power of two");
  EXPECT_THROW_WITH(train("c", kSmallSft, {"reduction_lanes=4", "sharding=gradients"}), InputError,
                    "hint: sharding: optimizer");
}

// Lets the second request for memory that rank 1 makes after its second sum over ranks fail, while
// rank 0 makes none.
class FailingMemory final : public Communicator {
 public:
  FailingMemory(Communicator& inner, std::optional<AllocationFaults>& faults,
                std::atomic<bool>& begun)
      : inner_(inner), faults_(faults), begun_(begun) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void all_reduce(Tensor& t, Reduce op) override {
    inner_.all_reduce(t, op);
    if (++sums_ != 2) return;
    if (rank() == 1) {
      faults_.emplace(Device{}, kFailing);
      begun_ = true;
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (rank() == 0 && (!begun_ || faults_->requests() <= kFailing) &&
           std::chrono::steady_clock::now() < end)
      std::this_thread::yield();
  }
  void all_to_all(Tensor& received, const Tensor& parts, const RankSets& among) override {
    inner_.all_to_all(received, parts, among);
  }
  void all_gather(Tensor& all) override { inner_.all_gather(all); }
  void barrier() override { inner_.barrier(); }

 private:
  static constexpr int64_t kFailing = 1;
  Communicator& inner_;
  std::optional<AllocationFaults>& faults_;
  std::atomic<bool>& begun_;
  int sums_ = 0;
};

// The sums come before the first unit: they say that both ranks have made their files.
TEST(ShardedState, EveryRankSaysWhyOneCannotGather) {
  const TempDir dir;
  std::optional<AllocationFaults> faults;
  std::atomic<bool> begun = false;
  std::vector<std::string> errors(2);
  run_local_ranks(2, [&](Communicator& comm) {
    ParameterSet set(DType::kF32, {}, 1);
    set.add({"a", {70}});
    set.begin_unit();
    set.add({"b", {90}});
    Optimizer optimizer(set, {}, 0, Slices::of_rank(comm.rank(), 2, 0));
    FailingMemory failing(comm, faults, begun);
    try {
      write_sharded_state(optimizer, set, failing, dir.path(""));
    } catch (const PeerError& e) {
      ADD_FAILURE() << "rank " << comm.rank() << ": " << e.what();
    } catch (const Error& e) {
      errors[static_cast<size_t>(comm.rank())] = e.what();
    }
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("out of memory: request 1 on cpu"), error.npos) << error;
}

TEST(WritersOfUnits, ShareTheBytes) {
  EXPECT_EQ(writers_of({5, 5, 5, 5}, 2, 0), (std::vector<int>{0, 1, 0, 1}));
  // Rank 0 writes the weights, too.
  EXPECT_EQ(writers_of({5, 5, 5}, 2, 10), (std::vector<int>{1, 1, 0}));
  EXPECT_EQ(writers_of({7, 0, 7}, 1, 100), (std::vector<int>{0, 0, 0}));
}

}  // namespace
}  // namespace cohort::test
