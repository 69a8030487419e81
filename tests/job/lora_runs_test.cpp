// Runs that train adapters (LoRA): what their checkpoints hold, exactness, the reference, resuming,
// ranks.
#include <filesystem>

#include "sys/files.h"
#include "tests/job/small_runs.h"
#include "tests/support/tensor_files.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAdapter = "adapter_model.safetensors";

class LoraRuns : public testing::Test {
 protected:
  void SetUp() override {
    base_ = train_new(small_plan(dir_, "base", yaml(kSmallSft), {"dtype=f64"}));
  }
  static std::string yaml(const std::string& trainer) {
    return std::string(kSmallModel) + kSmallData + trainer;
  }
  // A run of adapters on the base.
  RunPlan plan(const std::string& name, const std::string& trainer,
               std::vector<std::string> overrides = {}) {
    overrides.insert(overrides.end(),
                     {"init_from=" + base_, "lora.rank=3", "lora.alpha=6", "dtype=f64"});
    return small_plan(dir_, name, yaml(trainer), overrides);
  }
  // The values of a metric in the steps of a run.
  static std::vector<double> values(const std::string& run, const std::string& name) {
    std::vector<double> out;
    for (const Json& line : json_lines(run + "/metrics.jsonl"))
      if (line.find("eval") == nullptr && line.find(name) != nullptr)
        out.push_back(metric(line, name));
    return out;
  }

  TempDir dir_;
  std::string base_;
};

TEST_F(LoraRuns, CheckpointsHoldTheAdaptersAlone) {
  const std::string run = train_new(plan("run", kSmallSft));
  const std::string at = find_checkpoint(run);
  EXPECT_FALSE(fs::exists(at + "/model.safetensors"));
  const SafetensorsFile adapter(at + "/" + kAdapter),
      optimizer(at + "/training/optimizer.safetensors");
  EXPECT_EQ(adapter.names().size(), 14u);  // A and B of seven modules
  for (const std::string& name : adapter.names()) {
    EXPECT_TRUE(name.starts_with("base_model.model.model.layers.0.")) << name;
    if (name.ends_with("lora_B.weight")) {
      EXPECT_GT(norm(adapter.read(name)), 0) << name;
    }
  }
  for (const std::string& name : optimizer.names())
    EXPECT_NE(name.find(".lora_"), name.npos) << name;
  EXPECT_LT(fs::file_size(at + "/" + kAdapter),
            fs::file_size(find_checkpoint(base_) + "/model.safetensors"));
  // The base as it was.
  const LoadedModel whole = load_model(find_checkpoint(base_), DType::kF64),
                    adapted = load_model(at, DType::kF64);
  EXPECT_EQ(adapted.base.path, find_checkpoint(base_));
  for (const NamedParameter& p : whole.model->parameters()) {
    const auto& others = adapted.model->parameters();
    const auto other = std::find_if(others.begin(), others.end(),
                                    [&](const NamedParameter& q) { return q.name == p.name; });
    ASSERT_NE(other, others.end()) << p.name;
    EXPECT_TRUE(bit_equal(other->value.contiguous(), p.value)) << p.name;
  }
}

TEST_F(LoraRuns, TheRatioIsExactlyOneAndTheReferenceTheBase) {
  const std::string run = train_new(plan("run", kSmallGrpo, {"beta=0.1", "dtype=f32"}));
  const std::vector<double> deviations = values(run, "ratio_deviation"), kl = values(run, "kl");
  ASSERT_EQ(deviations.size(), 4u);
  for (const double deviation : deviations) EXPECT_EQ(deviation, 0);
  EXPECT_EQ(kl.front(), 0);  // B = 0: the policy is the base
  EXPECT_GT(kl.back(), 0);
  EXPECT_FALSE(fs::exists(find_checkpoint(run) + "/training/reference.safetensors"));
}

TEST_F(LoraRuns, TheReferenceMayBeTheStartsAdapter) {
  const std::string first = train_new(plan("first", kSmallGrpo));
  const auto second = [&](const std::string& name, const std::string& reference) {
    RunPlan next =
        plan(name, kSmallGrpo, {"beta=0.1", "reference=" + reference, "lr_schedule=constant"});
    next.stages[0].init_from = first;
    return next;
  };
  const std::string from_start = train_new(second("start", "start")),
                    from_base = train_new(second("other", "base"));
  EXPECT_EQ(values(from_start, "kl").front(), 0);
  EXPECT_GT(values(from_base, "kl").front(), 0);
  const std::string saved = find_checkpoint(from_start) + "/training/reference.safetensors";
  const SafetensorsFile start(find_checkpoint(first) + "/" + kAdapter), reference(saved);
  ASSERT_EQ(reference.names(), start.names());
  for (const std::string& name : start.names())
    EXPECT_TRUE(bit_equal(reference.read(name), start.read(name))) << name;
  // A resumed run has it from there.
  const std::string resumed = train_interrupted(second("resumed", "start"), 2);
  train_rest(resumed);
  EXPECT_TRUE(checkpoint_bytes(resumed, kAdapter) == checkpoint_bytes(from_start, kAdapter));
}

TEST_F(LoraRuns, AResumedRunHasTheBitsOfAnUninterruptedOne) {
  for (const char* trainer : {kSmallSft, kSmallGrpo}) {
    const std::string name = trainer == kSmallSft ? "sft" : "grpo";
    const std::string whole = train_new(plan(name, trainer, {"beta=0.1"})),
                      run = train_interrupted(plan(name + "-cut", trainer, {"beta=0.1"}), 3);
    train_rest(run);
    for (const char* file : {kAdapter, "training/optimizer.safetensors"})
      EXPECT_TRUE(checkpoint_bytes(run, file) == checkpoint_bytes(whole, file)) << name << file;
  }
}

TEST_F(LoraRuns, AnyNumberOfRanksTrainsAsOne) {
  for (const char* trainer : {kSmallSft, kSmallGrpo}) {
    std::vector<Tensor> weights;
    for (const char* ranks : {"ranks=1", "ranks=2"}) {
      const std::string run =
          train_new(plan(str("run-", ranks), trainer, {ranks, "adam_eps=1e-3"}));
      weights.push_back(all_values(find_checkpoint(run) + "/" + kAdapter));
    }
    EXPECT_LT(relative_error(weights[1], weights[0]), 1e-12);
  }
}

TEST_F(LoraRuns, AChangedBaseIsRefused) {
  const std::string run = train_interrupted(plan("run", kSmallSft), 3);
  const std::string weights = find_checkpoint(base_) + "/model.safetensors";
  std::string bytes = read_file(weights);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(weights, bytes);
  EXPECT_THROW_WITH(train_rest(run), InputError, "is not the one that it was trained on");
  EXPECT_THROW_WITH(load_model(find_checkpoint(run), DType::kF64), InputError,
                    "is not the one that it was trained on");
}

TEST_F(LoraRuns, AdaptersNeedAModel) {
  RunPlan fresh = plan("run", kSmallSft);
  fresh.stages[0].init_from.clear();
  EXPECT_THROW_WITH(train_new(fresh), InputError,
                    "lora.rank: adapters need a trained model; hint: model.path=DIR");
  EXPECT_FALSE(fs::exists(fresh.output_dir));
  EXPECT_THROW_WITH(train_new(plan("run", kSmallSft, {"lora.targets=[lm_head]"})), InputError,
                    "lora.targets: 'lm_head'");
}

TEST_F(LoraRuns, DefaultRatesAreTenTimesThoseOfFullTraining) {
  for (const char* trainer : {"sft", "grpo"}) {
    const std::string text =
        str("trainer: ", trainer, "\nsteps: 2\n", kSmallData, "rewards: [{name: task}]\n");
    const RunPlan full = small_plan(dir_, "rates", text),
                  adapters = small_plan(dir_, "rates", text, {"lora.rank=8"}),
                  given = small_plan(dir_, "rates", text, {"lora.rank=8", "learning_rate=3e-4"});
    EXPECT_EQ(adapters.stages[0].optimizer.learning_rate,
              10 * full.stages[0].optimizer.learning_rate);
    EXPECT_EQ(given.stages[0].optimizer.learning_rate, 3e-4);
  }
}

}  // namespace
}  // namespace cohort::test
