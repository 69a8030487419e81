// Models of every family, as transformers saved them (tests/reference/families, written by
// scripts/make_families.py), against what transformers computed with them.
#include <cmath>
#include <filesystem>
#include <fstream>

#include "data/safetensors.h"
#include "kernels/matmul.h"
#include "nn/model_folder.h"
#include "sys/input_file.h"
#include "tests/nn/models.h"

namespace cohort {
namespace {

using namespace test;
namespace fs = std::filesystem;

const std::string kFamilies =
    (fs::path(__FILE__).parent_path().parent_path() / "reference/families").string() + "/";

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kFamilies))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// transformers computes rotary angles and norms in f32, whatever the model's dtype is.
constexpr double kTolerance = 2e-5;

PackedBatch batch_of(const SafetensorsFile& golden) {
  TokenSequence sequence{.tokens = golden.read("ids").to_vector<int32_t>()};
  sequence.loss_mask.assign(sequence.tokens.size(), 1);
  return pack({&sequence, 1});
}

class Families : public testing::TestWithParam<std::string> {
 protected:
  const std::string dir_ = kFamilies + GetParam();
  const SafetensorsFile golden_{dir_ + "/golden.safetensors"};
};
INSTANTIATE_TEST_SUITE_P(, Families, testing::ValuesIn(family_names()),
                         [](const auto& info) { return info.param; });

void expect_those_of_transformers(const std::string& dir, DType dtype, Device device) {
  const SafetensorsFile golden(dir + "/golden.safetensors");
  Transformer model(load_config(dir), dtype, std::nullopt, device);
  load_weights(model, dir);
  const PackedBatch batch = model.to_device(batch_of(golden));
  const Tensor hidden = model.forward(batch).value();
  // The last token has no target and therefore no row here.
  const int64_t tokens = hidden.dim(0);
  Tensor logits = Tensor::empty({tokens, model.config().vocab_size}, dtype, device);
  kernels::linear_forward({.y = logits, .x = hidden, .w = model.head().value(), .bias = {}});
  const Tensor expected = golden.read("logits").narrow(0, 0, tokens).contiguous();
  EXPECT_LE(relative_error(logits, expected), kTolerance);

  const Variable loss = mean_loss(model, batch);
  EXPECT_LE(relative_error(loss.value(), golden.read("loss")), kTolerance);
  backward(loss);
  // Gradients saved as weights have the layout of the files.
  Transformer gradients(model.config(), dtype, std::nullopt);
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    Tensor target = gradients.parameters()[i].value;
    target.copy_(model.parameters()[i].grad().to(Device{}));
  }
  const TempDir folder;
  save_weights(gradients, folder.path());
  const SafetensorsFile saved(folder.path("model.safetensors"));
  double all = 0;
  for (const std::string& name : saved.names())
    all = std::hypot(all, norm(golden.read("grad." + name)));
  for (const std::string& name : saved.names()) {
    // The gradient of a key bias is rounding noise: softmax is invariant to a shift of all keys.
    const Tensor gradient = golden.read("grad." + name);
    if (norm(gradient) < 1e-6 * all)
      EXPECT_LE(norm(saved.read(name)), kTolerance * all) << name;
    else
      EXPECT_LE(relative_error(saved.read(name), gradient), kTolerance) << name;
  }
}

TEST_P(Families, LogitsLossAndGradientsAreThoseOfTransformers) {
  expect_those_of_transformers(dir_, DType::kF64, {});
  expect_those_of_transformers(dir_, DType::kF32, {});
}

TEST_P(Families, FoldersRoundTrip) {
  const ModelConfig config = load_config(dir_);
  Transformer model(config, DType::kF32, std::nullopt);
  load_weights(model, dir_);
  const TempDir folder;
  save_weights(model, folder.path());
  const SafetensorsFile before(dir_ + "/model.safetensors"),
      after(folder.path("model.safetensors"));
  std::vector<std::string> names = before.names(), others = after.names();
  std::sort(names.begin(), names.end());
  std::sort(others.begin(), others.end());
  EXPECT_EQ(others, names);
  for (const std::string& name : names) EXPECT_TRUE(bit_equal(before.read(name), after.read(name)));
  EXPECT_EQ(saved_config(model).dump(),
            parse_json(read_input_file(dir_ + "/config.json"), "").dump());
  EXPECT_EQ(ModelConfig::from_json(saved_config(model)).to_json().dump(), config.to_json().dump());
}

TEST(ModelsMadeHere, AreStoredAsTheirFamily) {
  for (const auto& [name, config] : model_cases()) {
    const Transformer model(config, DType::kF32, 7);
    const TempDir folder;
    save_weights(model, folder.path());
    write_file(folder.path("config.json"), saved_config(model).dump(2));
    Transformer loaded(load_config(folder.path()), DType::kF32, std::nullopt);
    load_weights(loaded, folder.path());
    for (size_t i = 0; i < model.parameters().size(); ++i)
      EXPECT_TRUE(bit_equal(loaded.parameters()[i].value, model.parameters()[i].value)) << name;
    // Frozen references are loaded by the configuration of the model that trains.
    Transformer again(config, DType::kF32, std::nullopt);
    load_weights(again, folder.path());
    EXPECT_TRUE(bit_equal(again.parameters().back().value, model.parameters().back().value));
  }
  const Transformer gpt2(model_config("gpt2"), DType::kF32, 7);
  const TempDir folder;
  save_weights(gpt2, folder.path());
  const SafetensorsFile saved(folder.path("model.safetensors"));
  const auto shape = [&](const char* tensor) { return saved.shape(tensor).str(); };
  EXPECT_EQ(shape("transformer.wte.weight"), Shape({31, 21}).str());
  EXPECT_EQ(shape("transformer.h.1.attn.c_attn.weight"), Shape({21, 63}).str());
  EXPECT_EQ(shape("transformer.h.0.mlp.c_proj.weight"), Shape({84, 21}).str());
  for (const std::string& tensor : saved.names()) EXPECT_TRUE(tensor.starts_with("transformer."));
}

void expect_cached_bits(const std::string& dir, DType dtype, Device device) {
  Transformer model(load_config(dir), dtype, std::nullopt, device);
  load_weights(model, dir);
  NoGradGuard no_grad;
  const PackedBatch batch = model.to_device(batch_of(SafetensorsFile(dir + "/golden.safetensors")));
  const Tensor packed = model.forward(batch).value();
  const ModelConfig& c = model.config();
  const int64_t tokens = packed.dim(0);
  KVCache cache({.num_layers = c.num_layers,
                 .num_kv_heads = c.num_kv_heads,
                 .head_dim = c.head_dim,
                 .num_sequences = 1,
                 .max_length = tokens},
                dtype, device);
  const int32_t row = cache.acquire();
  ASSERT_TRUE(cache.reserve(row, tokens));
  cache.upload();
  const Tensor sequence = Tensor::from(std::vector<int32_t>{row}).to(device);
  for (int64_t t = 0; t < tokens; ++t) {
    const Tensor position = Tensor::from(std::vector<int32_t>{static_cast<int32_t>(t)}).to(device);
    const Tensor h =
        model.forward_cached(batch.tokens.narrow(0, t, 1).contiguous(), sequence, position, cache);
    EXPECT_TRUE(bit_equal(h, packed.narrow(0, t, 1).contiguous())) << t;
  }
}

TEST_P(Families, TheCachedForwardHasThePackedOnesBits) {
  expect_cached_bits(dir_, DType::kF32, {});
}

class CudaFamilies : public Families {};
INSTANTIATE_TEST_SUITE_P(, CudaFamilies, testing::ValuesIn(family_names()),
                         [](const auto& info) { return info.param; });

TEST_P(CudaFamilies, LogitsLossAndGradientsAreThoseOfTransformers) {
  COHORT_REQUIRE_GPU(device);
  expect_those_of_transformers(dir_, DType::kF32, device);
}

TEST_P(CudaFamilies, TheCachedForwardHasThePackedOnesBits) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16}) expect_cached_bits(dir_, dtype, device);
}

}  // namespace
}  // namespace cohort
