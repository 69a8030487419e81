// Runs that train adapters on a base in 8 or 4 bits (precision.base).
#include <filesystem>

#include "nn/merge.h"
#include "sys/files.h"
#include "tests/job/small_runs.h"
#include "tests/support/tensor_files.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAdapterFile = "adapter_model.safetensors";

class QuantizedBase : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    base_ = train_new(small_plan(dir_, "base", yaml(kSmallSft), {"dtype=f64"}));
  }
  static std::string yaml(const std::string& trainer) {
    return std::string(kSmallModel) + kSmallData + trainer;
  }
  // A run of adapters on the base in the format.
  RunPlan plan(const std::string& name, const std::string& trainer,
               std::vector<std::string> overrides = {}) {
    overrides.insert(overrides.begin(), {"init_from=" + base_, "lora.rank=3", "lora.alpha=6",
                                         "dtype=f64", str("precision.base=", GetParam())});
    return small_plan(dir_, name, yaml(trainer), overrides);
  }
  TempDir dir_;
  std::string base_;
};

// The sampler has the trainer's log-probs, with the base as reference; a cut run ends with the
// same adapters.
TEST_P(QuantizedBase, TheRatioIsExactlyOneAndRunsResume) {
  for (const char* trainer : {kSmallSft, kSmallGrpo}) {
    const std::string name = trainer == kSmallSft ? "sft" : "grpo";
    const std::string whole = train_new(plan(name, trainer, {"beta=0.1"})),
                      cut = train_interrupted(plan(name + "-cut", trainer, {"beta=0.1"}), 3);
    train_rest(cut);
    EXPECT_TRUE(checkpoint_bytes(cut, kAdapterFile) == checkpoint_bytes(whole, kAdapterFile))
        << name;
    const std::string other =
        train_new(plan(name + "-bf16", trainer, {"beta=0.1", "precision.base=bf16"}));
    EXPECT_FALSE(checkpoint_bytes(other, kAdapterFile) == checkpoint_bytes(whole, kAdapterFile))
        << name;
    if (trainer == kSmallSft) continue;
    for (const Json& line : json_lines(whole + "/metrics.jsonl"))
      if (line.find("ratio_deviation") != nullptr) {
        EXPECT_EQ(metric(line, "ratio_deviation"), 0);
      }
  }
}

TEST_P(QuantizedBase, AnyNumberOfRanksTrainsAsOne) {
  std::vector<Tensor> weights;
  for (const char* ranks : {"ranks=1", "ranks=2"}) {
    const std::string run =
        train_new(plan(str("run-", ranks), kSmallGrpo, {ranks, "adam_eps=1e-3"}));
    weights.push_back(all_values(find_checkpoint(run) + "/" + kAdapterFile));
  }
  EXPECT_LT(relative_error(weights[1], weights[0]), 1e-12);
}

// The checkpoint's model is on the same base, and no other resumes it.
TEST_P(QuantizedBase, ItBelongsToTheModel) {
  const std::string run = train_interrupted(plan("run", kSmallSft), 3), at = find_checkpoint(run);
  EXPECT_EQ(read_file(at + "/precision.json"), str("{\"base\": \"", GetParam(), "\"}\n"));
  const LoadedModel loaded = load_model(at, DType::kF64);
  EXPECT_STREQ(entry_of(kBaseNames, loaded.model->config().precision.base).name, GetParam());
  {
    const ExpectLog other("precision.base: the run has bf16, but the model of");
    const LoadedModel plain = load_model(at, DType::kF64, {}, "", 0, kernels::WeightFormat::kModel);
    EXPECT_FALSE(plain.model->config().precision.is_quantized());
  }
  EXPECT_THROW_WITH(train_rest(run, {"precision.base=bf16"}), InputError,
                    "precision.base: the run has bf16, but the model of");
  {
    const ExpectLog lost("hint: precision.base=");
    train_new(plan("lost", kSmallSft, {"init_from=" + run, "precision.base=bf16"}));
  }
  train_rest(run);
}

// Merged, the model is that of the expanded base, to rounding.
TEST_P(QuantizedBase, MergesIntoTheExpandedBase) {
  const std::string run = train_new(plan("run", kSmallSft));
  const LoadedModel loaded = load_model(find_checkpoint(run), DType::kF64);
  const auto merged = expanded(*loaded.model);
  EXPECT_FALSE(merged->config().precision.is_quantized());
  const TokenSequence sequence{.tokens = {1, 2, 0, 3, 1, 2}, .loss_mask = {0, 1, 1, 1, 1, 1}};
  const PackedBatch batch = pack({&sequence, 1});
  const NoGradGuard no_grad;
  const Tensor before = loaded.model->forward(batch).value();
  EXPECT_TRUE(bit_equal(merged->forward(batch).value(), before));
  EXPECT_GT(merge_adapters(*merged, "F64").moved, 0);
  EXPECT_LT(relative_error(merged->forward(batch).value(), before), 1e-12);
}

TEST_P(QuantizedBase, FullTrainingIsRefused) {
  EXPECT_THROW_WITH(train_new(plan("run", kSmallSft, {"lora.rank=0"})), InputError,
                    "is a frozen base");
  EXPECT_FALSE(fs::exists(dir_.path("run")));
}

INSTANTIATE_TEST_SUITE_P(Formats, QuantizedBase, testing::Values("int8", "nf4", "nf4_single"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace cohort::test
