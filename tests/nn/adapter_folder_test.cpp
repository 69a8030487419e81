// Folders of adapters in PEFT's format, and model folders whose models have adapters.
#include "nn/adapter_folder.h"

#include <cmath>
#include <filesystem>
#include <limits>

#include "core/rng.h"
#include "data/safetensors.h"
#include "nn/lora.h"
#include "nn/model_folder.h"
#include "tests/nn/models.h"
#include "tests/support/tensor_files.h"

namespace cohort {
namespace {

using namespace test;
namespace fs = std::filesystem;

const std::string kFamilyFolders =
    (fs::path(__FILE__).parent_path().parent_path() / "reference/families").string() + "/";

ModelConfig family(const std::string& name, const LoraConfig& lora = {}) {
  ModelConfig config = load_config(kFamilyFolders + name);
  config.lora = lora;
  return config;
}

// A loaded model of a family whose adapters are random.
std::unique_ptr<Transformer> adapted_model(const std::string& name, const LoraConfig& lora,
                                           DType dtype = DType::kF32) {
  auto model = std::make_unique<Transformer>(family(name, lora), dtype, std::nullopt);
  load_weights(*model, kFamilyFolders + name);
  uint64_t seed = 1;
  std::vector<Tensor> values = model->adapters();
  for (Tensor& value : values) value = random_tensor(value.shape(), DType::kF64, seed++).to(dtype);
  model->set_adapters(values);
  return model;
}

Tensor hidden(const Transformer& model, Adapters adapters = Adapters::kOn) {
  NoGradGuard no_grad;
  return model
      .forward(pack(random_sequences({5, 9}, model.config().vocab_size, 3)), {.adapters = adapters})
      .value();
}

TEST(ModelFolders, OfModelsWithAdaptersHoldTheBase) {
  for (const char* name : {"llama", "qwen2", "phi3", "gpt2", "qwen3_5_text"}) {
    const auto model = adapted_model(name, {.rank = 3});
    Transformer base(family(name), DType::kF32, std::nullopt);
    load_weights(base, kFamilyFolders + name);
    EXPECT_TRUE(bit_equal(hidden(*model, Adapters::kOff), hidden(base))) << name;
    EXPECT_FALSE(bit_equal(hidden(*model), hidden(base))) << name;
    const TempDir folder;
    save_weights(*model, folder.path());
    const SafetensorsFile before(kFamilyFolders + name + "/model.safetensors"),
        after(folder.path("model.safetensors"));
    EXPECT_EQ(after.names().size(), before.names().size());
    for (const std::string& tensor : before.names())
      EXPECT_TRUE(bit_equal(before.read(tensor), after.read(tensor))) << tensor;
    EXPECT_EQ(saved_config(*model).dump(), saved_config(base).dump());
    // Reading the base's weights once more changes neither them nor the adapters.
    const Tensor output = hidden(*model);
    load_weights(*model, folder.path());
    EXPECT_TRUE(bit_equal(hidden(*model), output)) << name;
  }
}

TEST(AdapterFolders, RoundTrip) {
  for (const char* name : {"llama", "qwen2", "phi3", "gpt2", "qwen3_5_text", "qwen3_5_text_delta",
                           "qwen3_5_text_tied"})
    for (const bool rslora : {false, true}) {
      const auto model = adapted_model(name, {.rank = 3, .alpha = 5.5, .rslora = rslora});
      const TempDir folder;
      save_adapter(*model, folder.path(), "somewhere/base");
      EXPECT_TRUE(is_adapter_folder(folder.path()));
      const AdapterConfig adapter = load_adapter_config(folder.path());
      EXPECT_EQ(adapter.base, "somewhere/base");
      const ModelConfig config = with_adapter(family(name), adapter, folder.path());
      EXPECT_EQ(config.lora.rank, 3);
      EXPECT_EQ(config.lora.alpha, 5.5);
      EXPECT_EQ(config.lora.rslora, rslora);
      EXPECT_TRUE(config.lora.targets.empty());
      Transformer loaded(config, DType::kF32, std::nullopt);
      load_weights(loaded, kFamilyFolders + name);
      load_adapter(loaded, folder.path());
      EXPECT_TRUE(bit_equal(hidden(loaded), hidden(*model))) << name;
    }
}

TEST(CudaAdapterFolders, AreReadAndWrittenOnTheDevice) {
  COHORT_REQUIRE_GPU(device);
  for (const char* name : {"llama", "phi3", "gpt2"}) {
    const auto host = adapted_model(name, {.rank = 3});
    const TempDir adapter, weights;
    save_adapter(*host, adapter.path(), "");
    Transformer model(host->config(), DType::kF32, std::nullopt, device);
    load_weights(model, kFamilyFolders + name);
    load_adapter(model, adapter.path());
    const std::vector<Tensor> expected = host->adapters(), found = model.adapters();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(bit_equal(found[i].to(Device{}), expected[i])) << name;
    save_weights(model, weights.path());
    const SafetensorsFile before(kFamilyFolders + name + "/model.safetensors"),
        after(weights.path("model.safetensors"));
    for (const std::string& tensor : before.names())
      EXPECT_TRUE(bit_equal(before.read(tensor), after.read(tensor))) << tensor;
    NoGradGuard no_grad;
    const PackedBatch batch = pack(random_sequences({5, 9}, model.config().vocab_size, 3));
    EXPECT_LE(relative_error(model.forward(model.to_device(batch)).value(), hidden(*host)), 1e-5);
  }
}

// The target_modules that are written for a model with adapters, which are read back.
std::string targets_of(const Transformer& model) {
  const TempDir folder;
  save_adapter(model, folder.path(), "");
  const ModelConfig config =
      with_adapter(model.config(), load_adapter_config(folder.path()), folder.path());
  const std::vector<AdapterTarget> before = AdapterTargets(model.config()).modules,
                                   after = AdapterTargets(config).modules;
  EXPECT_EQ(after.size(), before.size());
  for (size_t i = 0; i < std::min(before.size(), after.size()); ++i)
    EXPECT_EQ(after[i].name, before[i].name);
  const std::string path = folder.path("adapter_config.json");
  return parse_json(read_file(path), path).at("target_modules").dump();
}
// For a family's model with some targets, which PEFT matches by the ends of names.
std::string written_targets(const char* family, const std::vector<std::string>& targets) {
  return targets_of(*adapted_model(family, {.rank = 2, .targets = targets}));
}

TEST(AdapterFolders, NameTheirTargets) {
  EXPECT_EQ(written_targets("llama", {"k_proj"}), R"(["k_proj"])");
  EXPECT_EQ(written_targets("llama", {"mlp.up_proj", "q_proj"}), R"(["q_proj","up_proj"])");
  EXPECT_EQ(written_targets("phi3", {"qkv_proj"}), R"(["qkv_proj"])");
  // In layers of one kind: three of four, and the last.
  EXPECT_EQ(written_targets("qwen3_5_text", {"in_proj_qkv"}), R"(["in_proj_qkv"])");
  EXPECT_EQ(written_targets("qwen3_5_text", {"q_proj", "out_proj"}), R"(["out_proj","q_proj"])");
  EXPECT_EQ(written_targets("qwen3_5_text", {}),
            R"(["in_proj_qkv","in_proj_z","in_proj_b","in_proj_a","out_proj","q_proj","k_proj",)"
            R"("v_proj","o_proj","gate_proj","up_proj","down_proj"])");
  EXPECT_EQ(written_targets("qwen3_5_text_delta", {}),
            R"(["in_proj_qkv","in_proj_z","in_proj_b","in_proj_a","out_proj",)"
            R"("gate_proj","up_proj","down_proj"])");
  EXPECT_EQ(written_targets("gpt2", {"c_proj"}), R"(["c_proj"])");
  EXPECT_EQ(written_targets("gpt2", {"attn.c_proj"}), R"(["attn.c_proj"])");
  EXPECT_EQ(written_targets("gpt2", {"mlp.c_proj", "c_attn"}), R"(["c_attn","mlp.c_proj"])");
  EXPECT_EQ(written_targets("gpt2", {}), R"(["c_attn","c_proj","c_fc"])");
}

// Heads of encoders have layers of the same names, which have no adapters.
TEST(AdapterFolders, NameTheTargetsOfEncodersWhole) {
  const auto written = [](const std::string& family, const std::vector<std::string>& targets) {
    const bool images = family == "vit";
    ModelConfig config{.num_layers = 2, .d_model = 16, .num_heads = 2, .context = 5};
    config.mask = MaskType::kFull;
    config.norm = NormType::kLayer;
    config.position = PositionType::kLearned;
    config.mlp = MlpType::kGelu;
    config.bias = true;
    config.lora = {.rank = 2, .targets = targets};
    if (images) {
      config.image_size = 8;
      config.patch_size = 4;
      config.channels = 1;
    } else {
      config.norm_place = NormPlace::kAfter;
      config.embedding_norm = config.tie_embeddings = true;
      config.token_types = family == "bert" ? 2 : 1;
      config.vocab_size = 11;
    }
    config.set_head(HeadType::kClasses, {"bad", "good"});
    config.resolve();
    return targets_of(Transformer(config, DType::kF32, 1));
  };
  EXPECT_EQ(written("bert", {"attention.output.dense", "query"}),
            R"("bert\\.encoder\\.layer\\.\\d+\\.attention\\.self\\.query|)"
            R"(bert\\.encoder\\.layer\\.\\d+\\.attention\\.output\\.dense")");
  EXPECT_EQ(written("bert", {"bert.encoder.layer.*.output.dense"}),
            R"("bert\\.encoder\\.layer\\.\\d+\\.output\\.dense")");
  EXPECT_EQ(written("vit", {"intermediate.dense"}),
            R"("vit\\.encoder\\.layer\\.\\d+\\.intermediate\\.dense")");
  EXPECT_NE(written("bert", {}).find(R"(layer\\.\\d+\\.intermediate\\.dense|)"), std::string::npos);
}

// A folder with the files of an adapter of rank 2 of the family's model.
TEST(AdapterFolders, OfHybridsHaveAnAdapterInEachLayerOfAKind) {
  const std::string prefix = "base_model.model.model.layers.";
  const auto model = adapted_model("qwen3_5_text", {.rank = 2, .targets = {"q_proj", "in_proj_a"}});
  const auto read_without = [&](const std::string& removed) {
    const TempDir folder;
    save_adapter(*model, folder.path(), "");
    const std::string path = folder.path("adapter_model.safetensors");
    NamedTensors tensors;
    {
      const SafetensorsFile file(path);
      for (const std::string& name : file.names())
        if (!name.starts_with(prefix + removed)) tensors.emplace_back(name, file.read(name));
    }
    write_safetensors(path, tensors);
    with_adapter(family("qwen3_5_text"), load_adapter_config(folder.path()), folder.path());
  };
  EXPECT_NO_THROW(read_without("none"));
  EXPECT_THROW_WITH(read_without("1.linear_attn"), InputError,
                    "layers.1.linear_attn.in_proj_a.lora_A");
  EXPECT_NO_THROW(read_without("3.self_attn"));  // the only layer with attention
}

class BadAdapters : public testing::Test {
 protected:
  BadAdapters() : model_(adapted_model("llama", {.rank = 2})) { restore(); }
  void restore() {
    save_adapter(*model_, folder_.path(), "base");
    path_ = folder_.path("adapter_config.json");
    json_ = parse_json(read_file(path_), path_);
    const SafetensorsFile file(folder_.path("adapter_model.safetensors"));
    tensors_.clear();
    for (const std::string& name : file.names()) tensors_.emplace_back(name, file.read(name));
  }
  // Writes the changed configuration and tensors, expects their refusal, and restores both.
  void refused(const std::vector<std::string>& parts) {
    write_file(path_, json_.dump());
    write_safetensors(folder_.path("adapter_model.safetensors"), tensors_);
    try {
      const ModelConfig config =
          with_adapter(family("llama"), load_adapter_config(folder_.path()), folder_.path());
      Transformer model(config, DType::kF32, std::nullopt);
      load_adapter(model, folder_.path());
      ADD_FAILURE() << "accepted: " << parts[0];
    } catch (const InputError& e) {
      const std::string message = e.what();
      EXPECT_TRUE(message.starts_with(folder_.path())) << message;
      for (const std::string& part : parts)
        EXPECT_NE(message.find(part), message.npos) << message << "\nlacks " << part;
    }
    restore();
  }
  void refused_field(const char* field, const Json& value, const std::string& part = "") {
    json_.set(field, value);
    refused({"adapter_config.json: ", field, part});
  }
  Tensor& tensor(const std::string& name) {
    for (auto& [other, value] : tensors_)
      if (other == "base_model.model.model.layers." + name) return value = value.clone();
    throw Error("no tensor " + name);
  }

  const TempDir folder_;
  std::unique_ptr<Transformer> model_;
  std::string path_;
  Json json_;
  NamedTensors tensors_;
};

TEST_F(BadAdapters, FieldsThatChangeTheMathsAreRefused) {
  const Json on = true, map = Json::Object{{"q_proj", 4}}, list = Json::Array{1};
  for (const char* field : {"use_dora", "lora_bias", "use_qalora", "use_bdlora"})
    refused_field(field, on, "merge_and_unload()");
  for (const char* field : {"rank_pattern", "alpha_pattern", "arrow_config", "megatron_config"})
    refused_field(field, map, "is not supported; hint: ");
  for (const char* field : {"layers_to_transform", "layer_replication", "trainable_token_indices",
                            "alora_invocation_tokens", "target_parameters", "modules_to_save"})
    refused_field(field, list, "is not supported; hint: ");
  refused_field("bias", "all", "trained biases");
  refused_field("peft_type", "IA3", "only \"LORA\" is supported");
  refused_field("peft_type", Json(), "only LORA is supported");
  refused_field("task_type", "SEQ_CLS", "CAUSAL_LM");
  for (const char* start : {"pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "new"})
    refused_field("init_lora_weights", start, "base model's weights");
  refused_field("use_something_new", 1, "is not known");
  refused_field("base_model_name_or_path", 7, "expected text");
  refused_field("use_rslora", "yes", "expected true or false");
}

TEST_F(BadAdapters, NumbersOutOfRangeAreRefused) {
  for (const Json& r : {Json(0), Json(-1), Json(1000000), Json(2.5), Json("2"), Json()})
    refused_field("r", r);
  for (const Json& alpha : {Json(0), Json(-8.0), Json(1e30), Json("big"), Json()})
    refused_field("lora_alpha", alpha);
  for (const char* text : {"NaN", "Infinity", "1e999"}) {
    std::string file = json_.dump();
    const std::string field = "\"lora_alpha\":";
    const size_t at = file.find(field) + field.size();
    file.replace(at, file.find(',', at) - at, text);
    write_file(path_, file);
    EXPECT_THROW_WITH(load_adapter_config(folder_.path()), InputError, "adapter_config.json: ");
  }
  write_file(path_, R"({"peft_type": "LORA", "r": 2, "r": 4, "lora_alpha": 8})");
  EXPECT_THROW_WITH(load_adapter_config(folder_.path()), InputError, "duplicate");
  for (const char* text : {"", "[]", "7", "{}", "null", "{\"peft_type\": \"LORA\"}"}) {
    write_file(path_, text);
    EXPECT_THROW_WITH(load_adapter_config(folder_.path()), InputError, "adapter_config.json: ");
  }
}

TEST_F(BadAdapters, HarmlessFieldsAreAccepted) {
  const Json fields = parse_json(
      R"({"lora_dropout": 0.1, "inference_mode": false, "revision": "main", "peft_version": "0.21",
          "auto_mapping": {"unsloth_fixed": true}, "megatron_core": "megatron.core",
          "qalora_group_size": 16, "rank_pattern": {}, "modules_to_save": [], "eva_config": null,
          "runtime_config": {"ephemeral_gpu_offload": false}, "target_modules": "all-linear",
          "exclude_modules": ["lm_head"], "init_lora_weights": "gaussian", "task_type": null,
          "use_dora": false, "fan_in_fan_out": true, "corda_config": null, "a_new_field": null})",
      "");
  for (const auto& [field, value] : fields.as_object()) json_.set(field, value);
  write_file(path_, json_.dump());
  EXPECT_EQ(load_adapter_config(folder_.path()).lora.rank, 2);
}

TEST_F(BadAdapters, TensorsThatDoNotFitAreRefused) {
  const std::string q = "0.self_attn.q_proj.lora_A.weight";
  const auto add = [&](const std::string& name, const Shape& shape) {
    tensors_.emplace_back(name, Tensor::zeros(shape, DType::kF32));
    refused({"adapter_model.safetensors: ", name.substr(0, 200)});
  };
  const std::string base = "base_model.model.", layer = base + "model.layers.";
  add(base + "lm_head.lora_A.weight", {2, 16});
  add(base + "model.embed_tokens.lora_embedding_A", {2, 32});
  add(base + "model.embed_tokens.weight", {32, 16});
  add(layer + "0.self_attn.q_proj.lora_magnitude_vector", {16});
  add(layer + "0.self_attn.q_proj.lora_A.default.weight", {2, 16});
  add("model.layers.0.self_attn.q_proj.lora_A.weight", {2, 16});
  add(layer + "00.self_attn.q_proj.lora_A.weight", {2, 16});
  add(layer + "999999999999.self_attn.q_proj.lora_A.weight", {2, 16});
  add(layer + "0.self_attn.\n\x1b[31m\"q_proj.lora_A.weight", {2, 16});
  add(base + ".lora_A.weight", {2, 16});
  add(".lora_A.weight", {2, 16});
  add(std::string(5000, 'x'), {2, 16});
  for (const std::string end : {"lora_A.weight", "lora_B.weight"})
    for (const char* l : {"0", "1"})
      tensors_.emplace_back(layer + l + ".mlp.experts." + end, Tensor::zeros({2, 2}, DType::kF32));
  refused({"model.layers.0.mlp.experts", "no linear layer"});
  tensors_.clear();
  refused({"holds no tensors"});
  tensors_.erase(tensors_.begin());
  refused({"but no 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'"});
  std::erase_if(tensors_, [](const auto& t) { return t.first.find("0.mlp.up") != t.first.npos; });
  refused({"model.layers.0.mlp.up_proj", "all layers"});
  std::erase_if(tensors_, [](const auto& t) { return t.first.find(".1.") != t.first.npos; });
  refused({"adapters of 1 layers, and the base model has 2"});
  tensor(q) = Tensor::zeros({3, 16}, DType::kF32);
  refused({"q_proj.lora_A.weight: expected [r, in]"});
  tensor(q) = Tensor::zeros({2, 17}, DType::kF32);
  refused({"q_proj.lora_A.weight: expected shape [2, 16], found [2, 17]"});
  tensor(q) = Tensor::zeros({2, 16}, DType::kI64);
  refused({"q_proj.lora_A.weight: expected floating point numbers, found I64"});
  tensor(q) = Tensor::zeros({2}, DType::kF32);
  refused({"q_proj.lora_A.weight: expected [r, in]"});
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    tensor(q).narrow(0, 1, 1).narrow(1, 3, 1).fill_(bad);
    refused({"q_proj.lora_A.weight: element 19 is "});
  }
  tensor(q) = Tensor::full({2, 16}, 1e300, DType::kF64);  // infinity as an f32
  refused({"q_proj.lora_A.weight: element 0 is inf, as a f32"});
  write_file(folder_.path("adapter_model.safetensors"), "short");
  EXPECT_THROW_WITH(load_adapter_config(folder_.path()), InputError, "truncated");
  fs::remove(folder_.path("adapter_model.safetensors"));
  EXPECT_THROW_WITH(load_adapter_config(folder_.path()), InputError, "adapter_model.safetensors");
  write_file(folder_.path("adapter_model.bin"), "pickle");
  EXPECT_THROW_WITH(load_adapter_config(folder_.path()), InputError, "safe_serialization=True");
}

TEST_F(BadAdapters, RandomDamageIsAnErrorOrChangesNumbersOnly) {
  Rng rng(3, rng_stream(kTestPurpose));
  const ModelConfig base = family("llama");
  int refused = 0;
  for (int i = 0; i < 400; ++i) {
    const std::string path =
        folder_.path(i % 2 == 0 ? "adapter_config.json" : "adapter_model.safetensors");
    const std::string content = read_file(path);
    std::string damaged = content;
    // Mostly in the header of the tensors.
    damaged[static_cast<size_t>(rng.below(std::min<int64_t>(
        3000, static_cast<int64_t>(damaged.size()))))] = static_cast<char>(rng.below(256));
    write_file(path, damaged);
    try {
      Transformer model(with_adapter(base, load_adapter_config(folder_.path()), folder_.path()),
                        DType::kF32, std::nullopt);
      load_adapter(model, folder_.path());
    } catch (const InputError& e) {
      ++refused;
      EXPECT_TRUE(std::string(e.what()).starts_with(folder_.path())) << e.what();
    }
    write_file(path, content);
  }
  EXPECT_GT(refused, 200);
}

TEST_F(BadAdapters, OfAnotherBaseAreRefused) {
  const AdapterConfig adapter = load_adapter_config(folder_.path());
  EXPECT_THROW_WITH(with_adapter(family("phi3"), adapter, folder_.path()), InputError,
                    "gate_proj' is no linear layer of the base model's blocks, as "
                    "'model.layers.0.self_attn.qkv_proj' is");
  EXPECT_THROW_WITH(with_adapter(family("qwen2_window"), adapter, folder_.path()), InputError,
                    "adapters of 2 layers, and the base model has 3");
}

TEST(QuantizedModels, AreRefusedByTheirMethod) {
  const TempDir folder;
  Json json = parse_json(read_file(kFamilyFolders + "llama/config.json"), "");
  const auto refused = [&](const char* field, const char* value, const char* part) {
    Json changed = json;
    write_file(folder.path("config.json"), changed.set(field, parse_json(value, "")).dump());
    EXPECT_THROW_WITH(load_config(folder.path()), InputError, part);
    EXPECT_THROW_WITH(load_config(folder.path()), InputError, "hint: use the folder of the 16-bit");
  };
  refused("quantization_config", R"({"quant_method": "bitsandbytes", "load_in_4bit": true})",
          "(bitsandbytes)");
  refused("quantization_config",
          R"({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "fp4"})",
          "(bitsandbytes, fp4)");
  refused("quantization_config", R"({"quant_method": "gptq", "bits": 4})", "(gptq, 4 bits)");
  refused("quantization_config", R"({"quant_method": "awq", "bits": 4})", "(awq, 4 bits)");
  refused("quantization_config", R"({"bits": "x", "load_in_4bit": 1})", "does not name");
  refused("quantization_config", R"("fp8")", "does not name");
  refused("quantization", R"({"group_size": 64, "bits": 4})", "(4 bits)");
  EXPECT_NE(quantized_base_hint("unsloth/Llama-3.2-1B-Instruct-unsloth-bnb-4bit")
                .find("(unsloth/Llama-3.2-1B-Instruct)"),
            std::string::npos);
  EXPECT_EQ(quantized_base_hint("unsloth/Llama-3.2-1B-Instruct"), "");
}

}  // namespace
}  // namespace cohort
