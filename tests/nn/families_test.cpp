// Models of every family, as transformers saved them (tests/reference/families, written by
// scripts/make_families.py), against what transformers computed with them.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "core/log.h"
#include "data/safetensors.h"
#include "kernels/matmul.h"
#include "nn/families/family.h"
#include "nn/model_folder.h"
#include "sys/input_file.h"
#include "tests/nn/models.h"
#include "tests/support/tensor_files.h"

namespace cohort {
namespace {

using namespace test;
namespace fs = std::filesystem;
constexpr size_t npos = std::string::npos;

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
// Sums in f32 depend on the vector width of the CPU. Gradients through delta layers have come to
// 1.8e-5 by that.
constexpr double kToleranceOfF32 = 6e-5;

PackedBatch batch_of(const SafetensorsFile& golden) {
  TokenSequence sequence{.tokens = golden.read("ids").to_vector<int32_t>()};
  sequence.loss_mask.assign(sequence.tokens.size(), 1);
  return pack({&sequence, 1});
}

TEST(FamilyTable, EveryFamilyHasAReferenceModel) {
  // Encoders are compared by encoder_test.cpp.
  const std::set<std::string> encoders = {"bert", "roberta", "vit"};
  for (const std::string& type : family_types())
    EXPECT_TRUE(encoders.contains(type) || fs::exists(kFamilies + type + "/golden.safetensors"))
        << "add a model of " << type << " to scripts/make_families.py and run it";
}

class Families : public testing::TestWithParam<std::string> {
 protected:
  const std::string dir_ = kFamilies + GetParam();
  const SafetensorsFile golden_{dir_ + "/golden.safetensors"};
};
INSTANTIATE_TEST_SUITE_P(, Families, testing::ValuesIn(family_names()),
                         [](const auto& info) { return info.param; });

void expect_those_of_transformers(const std::string& dir, DType dtype, Device device) {
  SCOPED_TRACE(dtype_name(dtype));
  const double tolerance = dtype == DType::kF32 ? kToleranceOfF32 : kTolerance;
  const SafetensorsFile golden(dir + "/golden.safetensors");
  Transformer model(load_config(dir), dtype, std::nullopt, device);
  load_weights(model, dir);
  const PackedBatch batch = model.to_device(batch_of(golden));
  const Tensor hidden = model.forward(batch).value();
  // The last token has no target and therefore no row here.
  const int64_t tokens = hidden.dim(0);
  Tensor logits = Tensor::empty({tokens, model.config().vocab_size}, dtype, device);
  kernels::linear_forward({.y = logits, .x = hidden, .w = model.head().weight.value(), .bias = {}});
  const Tensor expected = golden.read("logits").narrow(0, 0, tokens).contiguous();
  EXPECT_LE(relative_error(logits, expected), tolerance);

  const Variable loss = mean_loss(model, batch);
  EXPECT_LE(relative_error(loss.value(), golden.read("loss")), tolerance);
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
  const auto gradient_of = [&](const std::string& name) {
    const bool is_whole = !golden.contains("grad." + name);  // a model with an image encoder
    return golden.read(is_whole ? "grad.model.language_" + name : "grad." + name);
  };
  for (const std::string& name : saved.names()) all = std::hypot(all, norm(gradient_of(name)));
  for (const std::string& name : saved.names()) {
    // The gradient of a key bias is rounding noise: softmax is invariant to a shift of all keys.
    const Tensor gradient = gradient_of(name);
    if (norm(gradient) < 1e-6 * all)
      EXPECT_LE(norm(saved.read(name)), tolerance * all) << name;
    else
      EXPECT_LE(relative_error(saved.read(name), gradient), tolerance) << name;
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

const std::string kWithImages =
    (fs::path(__FILE__).parent_path().parent_path() / "reference/qwen3_5").string();

TEST(ModelsWithImages, AreReadAsTheirTextModel) {
  std::vector<std::string> messages;
  logging::set_observer([&](logging::Level, const std::string& m) { messages.push_back(m); });
  expect_those_of_transformers(kWithImages, DType::kF64, {});
  expect_those_of_transformers(kWithImages, DType::kF32, {});
  logging::set_observer({});
  ASSERT_EQ(messages.size(), 1u);  // two folders were read
  EXPECT_TRUE(messages[0].find("the tensors model.visual.*, mtp.* in ") == 0) << messages[0];
  EXPECT_TRUE(messages[0].find("0.0 MiB, are left out: what is read and saved is the text") !=
              npos);
}

TEST(ModelsWithImages, AreSavedAsTheirTextModel) {
  Transformer model(load_config(kWithImages), DType::kF32, std::nullopt);
  load_weights(model, kWithImages);
  const TempDir folder;
  save_weights(model, folder.path());
  write_file(folder.path("config.json"), saved_config(model).dump(2));
  const Json json = saved_config(model);
  EXPECT_EQ(json.at("model_type").as_string(), "qwen3_5_text");
  EXPECT_EQ(json.at("architectures").dump(), R"(["Qwen3_5ForCausalLM"])");
  EXPECT_EQ(json.find("vision_config"), nullptr);
  const SafetensorsFile before(kWithImages + "/model.safetensors"),
      after(folder.path("model.safetensors"));
  size_t text = 0;
  for (const std::string& name : before.names()) {
    if (name.starts_with("model.visual.") || name.starts_with("mtp.")) continue;
    ++text;
    const std::string own = name.starts_with("model.")
                                ? "model." + name.substr(std::strlen("model.language_model."))
                                : name;
    EXPECT_TRUE(bit_equal(before.read(name), after.read(own))) << name;
  }
  EXPECT_EQ(after.names().size(), text);
  Transformer again(load_config(folder.path()), DType::kF32, std::nullopt);
  load_weights(again, folder.path());
}

TEST(ModelsWithImages, OtherTensorsAreErrors) {
  for (const auto& [name, message] :
       {std::pair("model.audio.x", "the model has no tensor 'model.audio.x'"),
        {"model.layers.0.mlp.up_proj.weight", "the model has no tensor 'model.language_model."}}) {
    const TempDir folder;
    fs::copy(kWithImages, folder.path(), fs::copy_options::recursive);
    NamedTensors tensors;
    {
      const SafetensorsFile file(kWithImages + "/model.safetensors");
      for (const std::string& n : file.names()) tensors.emplace_back(n, file.read(n));
    }
    tensors.emplace_back(name, Tensor::zeros({24, 16}, DType::kF32));
    write_safetensors(folder.path("model.safetensors"), tensors);
    Transformer model(load_config(folder.path()), DType::kF32, std::nullopt);
    EXPECT_THROW_WITH(load_weights(model, folder.path()), InputError, message);
  }
}

// Folders whose config.json ties the head to the embedding table, with a head of their own.
class TiedHeads : public testing::Test {
 protected:
  using Change = std::function<void(NamedTensors&)>;
  // A copy of a family's folder, with other tensors, and tie_word_embeddings as given (null: none).
  std::string copy(const std::string& family, const Json& tied, const Change& change = {}) {
    const std::string dir = dir_.path(str("model", ++copies_));
    fs::copy(kFamilies + family, dir, fs::copy_options::recursive);
    const Json before = parse_json(read_file(dir + "/config.json"), "");
    Json config;
    for (const auto& [field, value] : before.as_object())
      if (field != "tie_word_embeddings") config.set(field, value);
    if (!tied.is_null()) config.set("tie_word_embeddings", tied);
    write_file(dir + "/config.json", config.dump());
    NamedTensors tensors;
    {
      const SafetensorsFile file(dir + "/model.safetensors");
      for (const std::string& name : file.names()) tensors.emplace_back(name, file.read(name));
    }
    if (change) change(tensors);
    write_safetensors(dir + "/model.safetensors", tensors);
    return dir;
  }
  // qwen3_bias, which is tied, with a head made of the table.
  std::string with_head(const std::function<Tensor(const Tensor&)>& head, const Change& more = {}) {
    return copy("qwen3_bias", true, [&](NamedTensors& tensors) {
      for (const auto& [name, value] : tensors)
        if (name == "model.embed_tokens.weight") {
          tensors.emplace_back("lm_head.weight", head(value));
          break;
        }
      if (more) more(tensors);
    });
  }
  static bool is_tied(const std::string& dir) {
    const ModelConfig config = load_config(dir);
    Transformer model(config, DType::kF32, std::nullopt);
    load_weights(model, dir);
    EXPECT_EQ(saved_config(model).at("tie_word_embeddings").as_bool(), config.tie_embeddings);
    return config.tie_embeddings;
  }
  static Tensor copy_of(const Tensor& table) { return table.clone(); }

  TempDir dir_;
  int copies_ = 0;
};

TEST_F(TiedHeads, ThatDifferAreNotTied) {
  for (const auto& [family, tied] : {std::pair("llama", Json(true)),
                                     {"gpt2_gelu", Json(true)},
                                     {"gpt2_gelu", Json()},
                                     {"phi3", Json(true)}}) {
    SCOPED_TRACE(str(family, " ", tied.dump()));
    const std::string dir = copy(family, tied);
    expect_those_of_transformers(dir, DType::kF64, {});
    // Saved, the folder says so itself.
    Transformer model(load_config(dir), DType::kF32, std::nullopt);
    load_weights(model, dir);
    const std::string saved = dir_.path(str("saved", copies_));
    fs::create_directory(saved);
    save_weights(model, saved);
    write_file(saved + "/config.json", saved_config(model).dump());
    EXPECT_FALSE(saved_config(model).at("tie_word_embeddings").as_bool());
    EXPECT_FALSE(load_config(saved).tie_embeddings);
    EXPECT_TRUE(SafetensorsFile(saved + "/model.safetensors").contains("lm_head.weight"));
  }
}

TEST_F(TiedHeads, AreComparedByTheirValues) {
  EXPECT_TRUE(is_tied(with_head(copy_of)));
  EXPECT_TRUE(is_tied(with_head([](const Tensor& t) { return t.to(DType::kF64); })));
  // The last element alone; a head that is rounded.
  const auto changed = [](double value) {
    return [value](const Tensor& table) {
      Tensor head = table.clone();
      head.data<float>()[head.numel() - 1] = static_cast<float>(value);
      return head;
    };
  };
  EXPECT_FALSE(is_tied(with_head(changed(1.5))));
  EXPECT_FALSE(is_tied(with_head(changed(NAN))));
  EXPECT_FALSE(is_tied(with_head([](const Tensor& t) { return t.to(DType::kBF16); })));
  const auto in_both = [&](NamedTensors& tensors) {
    for (auto& [name, value] : tensors)
      if (name == "model.embed_tokens.weight") value = changed(NAN)(value);
  };
  EXPECT_TRUE(is_tied(with_head(changed(NAN), in_both)));
  // Names without the prefix, as of folders saved without their head.
  EXPECT_FALSE(is_tied(with_head(changed(1.5), [](NamedTensors& tensors) {
    for (auto& [name, value] : tensors)
      if (name.starts_with("model.")) name = name.substr(6);
  })));
  EXPECT_THROW_WITH(is_tied(with_head([](const Tensor& t) { return t.narrow(0, 0, 5).clone(); })),
                    InputError, "lm_head.weight: expected shape");
}

TEST_F(TiedHeads, MayLieInAnotherShard) {
  const std::string dir = copy("llama", true);
  std::vector<TensorSource> sources;
  const SafetensorsFile file(dir + "/model.safetensors");
  for (const std::string& name : file.names())
    sources.push_back({name, file.shape(name), "F32", [&file, name] { return file.read(name); }});
  const auto names = write_sharded(dir_.path(), "model", sources, 4000);
  ASSERT_GT(names.size(), 3u);
  for (const std::string& name : names) fs::rename(dir_.path(name), dir + "/" + name);
  fs::remove(dir + "/model.safetensors");
  EXPECT_FALSE(is_tied(dir));
}

TEST_F(TiedHeads, AHeadThatIsUntiedAndMissingIsAnError) {
  EXPECT_THROW_WITH(is_tied(copy("qwen3_bias", false)), InputError,
                    "there is no tensor 'lm_head.weight'; hint: do config.json and the file");
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
  KVCacheConfig config = cache_config(c, 1, 0);
  config.max_length = tokens;
  KVCache cache(config, dtype, device);
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
  // The kernels of delta layers have heads of 64 and 128.
  if (load_config(dir_).has_delta()) GTEST_SKIP() << "delta layers of other widths";
  expect_those_of_transformers(dir_, DType::kF32, device);
}

TEST_P(CudaFamilies, TheCachedForwardHasThePackedOnesBits) {
  COHORT_REQUIRE_GPU(device);
  if (load_config(dir_).has_delta()) GTEST_SKIP() << "delta layers of other widths";
  for (const DType dtype : {DType::kF32, DType::kBF16}) expect_cached_bits(dir_, dtype, device);
}

}  // namespace
}  // namespace cohort
