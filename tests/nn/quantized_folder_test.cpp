// Models in 8 and 4 bits: read from folders of bitsandbytes, and quantised as they are read.
#include "nn/quantized_folder.h"

#include <filesystem>

#include "nn/merge.h"
#include "nn/model_folder.h"
#include "sys/files.h"
#include "tests/nn/models.h"
#include "tests/support/tensor_files.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;
using kernels::WeightFormat;

const std::string kFolders = std::string(COHORT_TESTS) + "/reference/quantized/";

std::unique_ptr<Transformer> load(const std::string& dir, WeightFormat format,
                                  DType dtype = DType::kF32) {
  ModelConfig config = load_config(dir);
  config.precision.base = format;
  auto model = std::make_unique<Transformer>(config, dtype, std::nullopt);
  load_weights(*model, dir);
  return model;
}

Tensor value_of(const NamedParameter& p) {
  if (!p.quantized.defined()) return p.value;
  Tensor y = Tensor::empty(p.value.shape(), DType::kF32);
  kernels::dequantize_weight({y, p.quantized});
  return y;
}

Tensor states_of(const Transformer& model) {
  const NoGradGuard no_grad;
  return model.forward(pack(test::random_sequences({20, 7}, model.config().vocab_size, 3))).value();
}

struct Folder {
  const char* name;
  WeightFormat format;
};
constexpr Folder kOfBitsandbytes[] = {{"nf4", WeightFormat::kNf4},
                                      {"nf4_single", WeightFormat::kNf4Single},
                                      {"int8", WeightFormat::kInt8}};

// Kept in 8 and 4 bits and expanded, the weights have the bits that bitsandbytes gives.
TEST(QuantizedFolder, OfBitsandbytesHasItsValues) {
  for (const auto& [name, format] : kOfBitsandbytes) {
    SCOPED_TRACE(name);
    const std::string dir = kFolders + name;
    const Json golden = parse_json(read_file(dir + "/golden.json"), dir);
    const auto kept = load(dir, format), expanded = load(dir, WeightFormat::kModel);
    size_t found = 0;
    for (const auto* model : {kept.get(), expanded.get()})
      for (const NamedParameter& p : model->parameters())
        if (const std::string* hash = golden.find_text(p.name); hash != nullptr) {
          EXPECT_EQ(p.quantized.defined(), model == kept.get());
          EXPECT_EQ(test::fnv(value_of(p).to(DType::kBF16)), *hash) << p.name;
          ++found;
        }
    EXPECT_EQ(found, 14u);
    EXPECT_TRUE(test::bit_equal(states_of(*kept), states_of(*expanded)));
    EXPECT_TRUE(kept->config().file.find("quantization_config") == nullptr);
  }
}

TEST(QuantizedFolder, OtherFormatsAndRoundingTwiceAreErrors) {
  EXPECT_THROW_WITH(load(kFolders + "nf4", WeightFormat::kInt8), InputError,
                    "precision.base: int8 would round weights again");
  EXPECT_THROW_WITH(load(kFolders + "int8", WeightFormat::kNf4), InputError, "hint: int8, or bf16");
  load(kFolders + "nf4", WeightFormat::kNf4Single);  // as they are
}

// A copy of the folder in which a tensor is another one, or missing if it is undefined.
std::string changed(const TempDir& dir, const std::string& of, const std::string& name,
                    const Tensor& value) {
  fs::copy(kFolders + of, dir.path(""), fs::copy_options::recursive);
  const SafetensorsFile file(kFolders + of + "/model.safetensors");
  NamedTensors tensors;
  for (const std::string& n : file.names()) {
    if (n == name && value.defined()) tensors.emplace_back(n, value);
    if (n != name) tensors.emplace_back(n, file.read(n));
  }
  write_safetensors(dir.path("model.safetensors"), tensors);
  return dir.path("");
}

TEST(QuantizedFolder, DamageIsNamed) {
  const std::string weight = "model.layers.0.self_attn.q_proj.weight",
                    state = weight + ".quant_state.bitsandbytes__nf4";
  const SafetensorsFile file(kFolders + "nf4/model.safetensors");
  const auto text = file.read(state).to_vector<char>();
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string json(text.begin(), text.end());
    const size_t at = json.find(from);
    EXPECT_NE(at, json.npos) << json;
    json.replace(at, from.size(), to);
    return Tensor::from(std::vector<uint8_t>(json.begin(), json.end()));
  };
  const Tensor half = file.read(weight).narrow(0, 0, 8).contiguous();
  struct Case {
    std::string name;
    Tensor value;
    const char* message;
  };
  for (const Case& c :
       {Case{weight + ".absmax", {}, "there is no tensor"},
        {weight + ".nested_quant_map", {}, "there is no tensor"},
        {weight, half, "expected 2048 numbers of type u8"},
        {weight + ".absmax", Tensor::zeros({64}, DType::kF32), "of type u8"},
        {weight + ".nested_absmax", Tensor::full({1}, NAN, DType::kF32), "not finite"},
        {weight + ".quant_map", Tensor::zeros({16}, DType::kF32), "not that of nf4"},
        {state, with("\"blocksize\": 64", "\"blocksize\": 32"), "only 64 is supported"},
        {state, with("[64, 64]", "[32, 128]"), "expected [64, 64]"},
        {state, with("\"nested_offset\"", "\"nested_other\""), "no finite number"},
        {state, with("\"nf4\"", "\"fp4\""), "is not nf4"},
        {state, with("\"blocksize\"", "blocksize"), "bitsandbytes__nf4"}}) {
    const TempDir dir;
    EXPECT_THROW_WITH(load(changed(dir, "nf4", c.name, c.value), WeightFormat::kNf4), InputError,
                      c.message);
  }
  const std::string layer = "model.layers.0.self_attn.q_proj.";
  for (const Case& c :
       {Case{layer + "SCB", Tensor::zeros({3}, DType::kF32), "expected 64 numbers of type f32"},
        {layer + "SCB", Tensor::full({64}, 3.4e38, DType::kF32), "some numbers are not finite"},
        {layer + "weight_format", Tensor::full({1}, 1, DType::kU8), "its rows are in tiles"}}) {
    const TempDir dir;
    EXPECT_THROW_WITH(load(changed(dir, "int8", c.name, c.value), WeightFormat::kInt8), InputError,
                      c.message);
  }
}

// A layer that the folder has in 16 bits is not rounded: the others are expanded.
TEST(QuantizedFolder, ALayerOfNumbersAmongOthersIsExpanded) {
  const TempDir plain;
  const std::string weight = "model.layers.0.mlp.up_proj.weight";
  changed(plain, "nf4", weight + ".quant_state.bitsandbytes__nf4", {});
  const SafetensorsFile file(plain.path("model.safetensors"));
  NamedTensors tensors;
  for (const std::string& n : file.names())
    if (!n.starts_with(weight)) tensors.emplace_back(n, file.read(n));
  tensors.emplace_back(weight, test::random_tensor({128, 64}, DType::kF32, 4).to(DType::kBF16));
  write_safetensors(plain.path("model.safetensors"), tensors);
  EXPECT_THROW_WITH(load(plain.path(""), WeightFormat::kNf4), InputError,
                    "hint: precision.base=bf16, or --weights bf16, which expands the others");
  load(plain.path(""), WeightFormat::kModel);
  EXPECT_EQ(whole_format(plain.path(""), load_config(plain.path(""))), WeightFormat::kModel);
  EXPECT_EQ(stored_dtype(plain.path("")), "bfloat16");
  for (const auto& [name, format] : kOfBitsandbytes)
    EXPECT_EQ(whole_format(kFolders + name, load_config(kFolders + name)),
              format == WeightFormat::kInt8 ? format : WeightFormat::kNf4);
}

// A config.json that does not say what the tensors are.
TEST(QuantizedFolder, AConfigurationThatLiesIsRefused) {
  const TempDir dir;
  fs::copy(kFolders + "nf4", dir.path(""), fs::copy_options::recursive);
  const std::string path = dir.path("config.json");
  Json json = parse_json(read_file(path), path);
  json.set("quantization_config", Json());
  write_file(path, json.dump());
  EXPECT_THROW_WITH(load(dir.path(""), WeightFormat::kInt8), InputError,
                    "is in nf4, which precision.base: int8 would round again");
  load(dir.path(""), WeightFormat::kNf4);
}

// Every family, merged and transposed tensors too: the values are those of quantize_weight().
TEST(QuantizedFolder, AFolderOf16BitsIsQuantizedAsItIsRead) {
  for (const char* family : {"llama", "gpt2", "phi3", "gemma", "qwen3", "olmo2"})
    for (const WeightFormat format :
         {WeightFormat::kInt8, WeightFormat::kNf4Single, WeightFormat::kNf4}) {
      SCOPED_TRACE(family);
      const std::string dir = std::string(COHORT_TESTS) + "/reference/families/" + family;
      const auto whole = load(dir, WeightFormat::kModel), model = load(dir, format);
      int64_t quantized = 0;
      for (size_t i = 0; i < model->parameters().size(); ++i) {
        const NamedParameter &p = model->parameters()[i], &w = whole->parameters()[i];
        if (!p.quantized.defined()) {
          EXPECT_TRUE(test::bit_equal(p.value, w.value)) << p.name;
          continue;
        }
        ++quantized;
        const auto expected = kernels::quantize_weight(
            w.value, format == WeightFormat::kNf4 ? WeightFormat::kNf4Single : format);
        EXPECT_TRUE(test::bit_equal(p.quantized.values, expected.values)) << p.name;
        if (format != WeightFormat::kNf4)
          EXPECT_TRUE(test::bit_equal(p.quantized.scales, expected.scales)) << p.name;
        else
          EXPECT_LT(test::relative_error(p.quantized.scales, expected.scales), 0.02) << p.name;
      }
      EXPECT_GE(quantized, 6 * model->config().num_layers);
      EXPECT_TRUE(test::bit_equal(states_of(*model), states_of(*expanded(*model))));
    }
  const TempDir dir;
  fs::copy(std::string(COHORT_TESTS) + "/reference/families/llama", dir.path(""));
  const SafetensorsFile file(dir.path("model.safetensors"));
  NamedTensors tensors;
  for (const std::string& n : file.names()) tensors.emplace_back(n, file.read(n).clone());
  for (auto& [name, value] : tensors)
    if (name == "model.layers.0.mlp.up_proj.weight") value.fill_(INFINITY);
  write_safetensors(dir.path("model.safetensors"), tensors);
  EXPECT_THROW_WITH(load(dir.path(""), WeightFormat::kNf4), InputError,
                    "up_proj.weight has a number that is not finite");
}

}  // namespace
}  // namespace cohort
