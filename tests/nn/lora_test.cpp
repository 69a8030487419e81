// Low-rank adapters in whole models: without effect they change no bit, off they are the base, and
// the cached forward has the bits of the packed one.
#include "nn/lora.h"

#include <algorithm>

#include "core/rng.h"
#include "nn/families/family.h"
#include "nn/memory.h"
#include "tests/nn/models.h"

namespace cohort {
namespace {

using test::bit_equal;
using test::model_cases;
using test::ModelCase;
using test::set_adapters;
using test::with_lora;

// Zeros of either sign are equal: a sum of zeros may lose its sign in the adapter's columns.
bool equal_values(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.to_vector<double>() == b.to_vector<double>();
}

double max_abs(const Tensor& t) {
  double largest = 0;
  for (const double x : t.to_vector<double>()) largest = std::max(largest, std::abs(x));
  return largest;
}

Tensor hidden(const Transformer& model, int64_t tokens, Adapters adapters = Adapters::kOn) {
  const NoGradGuard no_grad;
  std::vector<int64_t> lengths;
  for (int64_t left = tokens; left > 0; left -= lengths.back())
    lengths.push_back(std::min<int64_t>(left, 60));
  const PackedBatch batch =
      model.to_device(pack(test::random_sequences(lengths, model.config().vocab_size, 3)));
  return model.forward(batch, {.adapters = adapters}).value();
}

std::vector<DType> dtypes_of(Device device) {
  return device.is_cuda() ? std::vector{DType::kF32, DType::kBF16}
                          : std::vector{DType::kF32, DType::kF64};
}

// Wide enough for the aligned kernels.
ModelConfig wide_model() {
  ModelConfig config = test::model_config("llama");
  config.d_model = 256;
  config.head_dim = 64;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.d_ff = 512;
  config.context = 64;
  return config;
}

void expect_no_bit_changed(Device device, std::initializer_list<int64_t> rows) {
  std::vector<ModelCase> cases = model_cases();
  if (device.is_cuda()) cases = {{"wide", wide_model()}, cases.front()};
  for (const auto& [name, config] : cases)
    for (const DType dtype : dtypes_of(device)) {
      const Transformer base(config, dtype, 7, device);
      Transformer model(with_lora(config, 3), dtype, 7, device);
      for (const int64_t tokens : rows) {
        const Tensor expected = hidden(base, tokens);
        EXPECT_TRUE(equal_values(hidden(model, tokens), expected))
            << name << ", " << dtype_name(dtype) << ", B = 0, " << tokens << " rows";
      }
      set_adapters(model);
      for (const int64_t tokens : rows) {
        const Tensor expected = hidden(base, tokens);
        EXPECT_TRUE(equal_values(hidden(model, tokens, Adapters::kOff), expected))
            << name << ", " << dtype_name(dtype) << ", off, " << tokens << " rows";
        EXPECT_FALSE(equal_values(hidden(model, tokens), expected)) << name;
      }
    }
}

TEST(Lora, WithoutEffectOrOffItIsTheBaseToTheBit) {
  expect_no_bit_changed({}, {1, 2, 15, 64, 65, 300});
}
TEST(CudaLora, WithoutEffectOrOffItIsTheBaseToTheBit) {
  COHORT_REQUIRE_GPU(device);
  expect_no_bit_changed(device, {1, 2, 15, 16, 17, 64, 65, 127, 300, 2100});
}

TEST(Lora, OnlyAdaptersAreTrained) {
  for (const auto& [name, config] : model_cases()) {
    const Transformer model(with_lora(config, 2), DType::kF64, 1);
    int64_t adapters = 0;
    for (const NamedParameter& p : model.parameters()) {
      EXPECT_EQ(p.trained(), p.role == ParameterRole::kAdapter) << name << ", " << p.name;
      if (p.trained()) adapters += p.value.numel();
    }
    const ModelSize size = model_size(model.config());
    EXPECT_EQ(size.adapters, adapters);
    EXPECT_EQ(size.trained(), adapters);
    EXPECT_EQ(size.parameters, model_size(config).parameters);
    const PackedBatch batch = pack(test::random_sequences({9, 4}, config.vocab_size, 1));
    Variable loss = test::mean_loss(model, batch);
    backward(loss);
    for (const NamedParameter& p : model.parameters())
      if (p.trained() && p.name.ends_with("lora_B.weight")) {
        EXPECT_GT(max_abs(p.grad()), 0) << name << ", " << p.name;
      }
  }
}

TEST(Lora, TheBasesInitialValuesDoNotDependOnAdapters) {
  const ModelConfig config = test::model_config("llama");
  const Transformer base(config, DType::kF32, 3), model(with_lora(config, 2), DType::kF32, 3);
  size_t i = 0;
  for (const NamedParameter& p : model.parameters()) {
    if (p.role == ParameterRole::kAdapter) continue;
    EXPECT_EQ(p.name, base.parameters()[i].name);
    EXPECT_TRUE(bit_equal(p.value.contiguous(), base.parameters()[i++].value)) << p.name;
  }
  EXPECT_EQ(i, base.parameters().size());
}

TEST(Lora, InitialAIsUniformAndBZero) {
  const Transformer model(with_lora(wide_model(), 16), DType::kF32, 3);
  for (const NamedParameter& p : model.parameters()) {
    if (p.name.ends_with("lora_B.weight")) {
      EXPECT_EQ(max_abs(p.value), 0) << p.name;
    }
    if (!p.name.ends_with("lora_A.weight")) continue;
    const double bound = 1 / std::sqrt(static_cast<double>(p.value.dim(1)));
    EXPECT_LE(max_abs(p.value), bound) << p.name;
    EXPECT_GT(max_abs(p.value), 0.98 * bound) << p.name;
  }
}

TEST(Lora, TargetsAreTheFamilysModules) {
  ModelConfig config = test::model_config("llama");
  const auto names = [&](std::vector<std::string> targets) {
    std::vector<std::string> out;
    for (const AdapterTarget& module :
         AdapterTargets(with_lora(config, 1, std::move(targets))).modules)
      out.push_back(module.name.substr(module.name.rfind('.') + 1));
    return out;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names({}),
            (Names{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}));
  EXPECT_EQ(names({"v_proj", "self_attn.q_proj"}), (Names{"q_proj", "v_proj"}));
  EXPECT_THROW_WITH(names({"lm_head"}), InputError,
                    "lora.targets: 'lm_head' is no linear layer of this model's blocks; known: "
                    "self_attn.q_proj, self_attn.k_proj");
  EXPECT_THROW_WITH(names({"roj"}), InputError, "'roj'");
  const Transformer model(with_lora(config, 2, {"k_proj", "down_proj"}), DType::kF32, 1);
  int64_t count = 0;
  for (const NamedParameter& p : model.parameters())
    if (p.role == ParameterRole::kAdapter) {
      ++count;
      EXPECT_TRUE(p.name.find("k_proj") != p.name.npos || p.name.find("down_proj") != p.name.npos);
    }
  EXPECT_EQ(count, 2 * 2 * config.num_layers);
}

// Differences of the loss to A and B, where s B is written anew for each value.
TEST(LoraGradients, AreDifferenceQuotients) {
  for (const char* name : {"llama", "gpt2"}) {
    ModelConfig config = test::model_config(name);
    for (const Recompute recompute : {Recompute::kNone, Recompute::kCheap, Recompute::kBlock}) {
      config.recompute = recompute;
      Transformer model(with_lora(config, 2), DType::kF64, 1);
      set_adapters(model);
      const PackedBatch batch = pack(test::random_sequences({9, 4}, config.vocab_size, 1));
      backward(test::mean_loss(model, batch));
      for (const NamedParameter& p : model.parameters()) {
        if (p.role != ParameterRole::kAdapter) continue;
        Tensor value = p.value;
        const Tensor grad = p.grad();
        for (const int64_t i : {int64_t{0}, value.numel() / 2, value.numel() - 1}) {
          constexpr double kStep = 1e-5;
          double& element = value.data<double>()[i];
          const double before = element;
          const auto loss_at = [&](double at) {
            element = at;
            model.update_derived();
            const NoGradGuard no_grad;
            return test::mean_loss(model, batch).value().item();
          };
          const double difference =
              (loss_at(before + kStep) - loss_at(before - kStep)) / (2 * kStep);
          loss_at(before);
          EXPECT_NEAR(grad.data<double>()[i], difference, 1e-8 + 1e-6 * std::abs(difference))
              << name << ", " << p.name << "[" << i << "]";
        }
      }
    }
  }
}

TEST(Lora, AdaptersMayBeSetAndSetBack) {
  Transformer model(with_lora(test::model_config("llama"), 2), DType::kF32, 1);
  const Tensor start = hidden(model, 20);
  std::vector<Tensor> first = model.adapters();
  set_adapters(model);
  const Tensor trained = hidden(model, 20);
  const std::vector<Tensor> second = model.adapters();
  model.set_adapters(first);
  EXPECT_TRUE(bit_equal(hidden(model, 20), start));
  model.set_adapters(second);
  EXPECT_TRUE(bit_equal(hidden(model, 20), trained));
  first.pop_back();
  EXPECT_THROW_WITH(model.set_adapters(first), Error, "tensors of adapters");
}

}  // namespace
}  // namespace cohort
