// Adapters that PEFT made (tests/reference/lora, written by scripts/make_lora.py), against what
// PEFT computed with them: logits, and losses, gradients and values of three steps of AdamW.
#include <cmath>
#include <filesystem>

#include "data/safetensors.h"
#include "kernels/matmul.h"
#include "nn/adapter_folder.h"
#include "nn/merge.h"
#include "nn/model_folder.h"
#include "tests/support/test_util.h"
#include "trainers/learner.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

const std::string kReference =
    (fs::path(__FILE__).parent_path().parent_path() / "reference/").string();
constexpr double kTolerance = 1e-5;

std::vector<std::string> adapter_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kReference + "lora"))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

class PeftAdapters : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Transformer> load(DType dtype) const {
    const AdapterConfig adapter = load_adapter_config(dir_);
    const std::string base = kReference + "families/" + adapter.base;
    auto model = std::make_unique<Transformer>(with_adapter(load_config(base), adapter, dir_),
                                               dtype, std::nullopt);
    load_adapter(*model, dir_);
    load_weights(*model, base);
    return model;
  }
  PackedBatch batch(int64_t count) const {
    std::vector<TokenSequence> sequences;
    for (int64_t i = 0; i < count; ++i) {
      sequences.push_back({.tokens = golden_.read(str("ids.", i)).to_vector<int32_t>()});
      sequences.back().loss_mask.assign(sequences.back().tokens.size(), 1);
    }
    return pack(sequences);
  }
  // Logits of the first sequence but for its last token, which has no target.
  void expect_logits(const Transformer& model) const {
    NoGradGuard no_grad;
    const Tensor hidden = model.forward(batch(1)).value();
    Tensor logits = Tensor::empty({hidden.dim(0), model.config().vocab_size}, model.dtype());
    kernels::linear_forward(
        {.y = logits, .x = hidden, .w = model.head().weight.value(), .bias = {}});
    const Tensor expected = golden_.read("logits").narrow(0, 0, hidden.dim(0)).contiguous();
    EXPECT_LE(relative_error(logits, expected), kTolerance);
  }
  // `rounding`: the absolute error that the rounding of values of this norm explains.
  void expect_values(const std::string& prefix, const std::string& name, const Tensor& value,
                     double rounding = 0) const {
    const Tensor expected = golden_.read(prefix + "base_model.model." + name);
    EXPECT_LE(relative_error(value, expected), kTolerance + rounding / norm(expected))
        << prefix << name;
  }

  const std::string dir_ = kReference + "lora/" + GetParam();
  const SafetensorsFile golden_{dir_ + "/golden.safetensors"};
};
INSTANTIATE_TEST_SUITE_P(, PeftAdapters, testing::ValuesIn(adapter_names()),
                         [](const auto& info) { return info.param; });

TEST_P(PeftAdapters, LogitsAreThoseOfPeft) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const auto model = load(dtype);
    expect_logits(*model);
    const MergeChange change = merge_adapters(*model, stored_name(dtype));
    EXPECT_GT(change.moved, 0);
    EXPECT_LE(change.moved, change.weights);
    EXPECT_GT(change.mean, 0);
    expect_logits(*model);
    EXPECT_EQ(merge_adapters(*model, stored_name(dtype)).moved, 0);  // B is 0
  }
}

TEST_P(PeftAdapters, ThreeStepsOfTrainingAreThoseOfPeft) {
  constexpr double kRate = 1e-3;
  const std::vector<double> losses = golden_.read("losses").to_vector<double>();
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const auto comm = make_single_communicator();
    Learner learner(load(dtype), {.weight_decay = 0, .adam_beta2 = 0.999, .max_grad_norm = 0},
                    *comm);
    const Transformer& model = learner.model();
    const std::vector<Tensor> start = model.adapters();
    const PackedBatch both = batch(2);
    const auto targets = static_cast<double>(both.targets.numel());
    const auto loss = [&](int64_t) {
      return cross_entropy(model.hidden_at_targets(both), model.head(), both.targets,
                           Tensor::full({both.targets.numel()}, 1 / targets, dtype));
    };
    for (size_t step = 0; step < losses.size(); ++step) {
      std::vector<std::pair<const NamedParameter*, Tensor>> gradients;
      const auto keep_gradients = [&](const auto&) {
        for (const NamedParameter& p : model.parameters())
          if (p.trained()) gradients.emplace_back(&p, p.grad().clone());
        return true;
      };
      const Learner::Update update = learner.update(1, loss, kRate, keep_gradients);
      EXPECT_NEAR(update.loss, losses[step], kTolerance * losses[step]);
      if (step > 0) continue;
      for (const auto& [p, gradient] : gradients) expect_values("grad.", p->name, gradient);
    }
    size_t i = 0;
    for (const NamedParameter& p : model.parameters()) {
      if (p.role != ParameterRole::kAdapter) continue;
      Tensor change = p.value.to(DType::kF64).clone();
      const Tensor before = start[i++].to(DType::kF64);
      for (int64_t j = 0; j < change.numel(); ++j)
        change.data<double>()[j] -= before.data<double>()[j];
      // The change is the difference of two rounded values.
      const double unit = dtype == DType::kF32 ? 0x1p-23 : 0x1p-52;
      expect_values("change.", p.name, change, unit * norm(before));
    }
  }
}

}  // namespace
}  // namespace cohort::test
