// Derived sizes, their errors, parameter counts and the round trip through config.json.
#include "nn/model_folder.h"
#include "tests/nn/models.h"

namespace cohort {
namespace {

// The error of resolve(), or "no error".
std::string resolve_error(void (*change)(ModelConfig&)) {
  ModelConfig c;
  change(c);
  try {
    c.resolve();
  } catch (const InputError& e) {
    return e.what();
  }
  return "no error";
}

Json config_of(const char* model_type) {
  Json json = Json().set("model_type", model_type).set("hidden_size", 16).set("vocab_size", 32);
  json.set("num_hidden_layers", 30).set("num_attention_heads", 4).set("num_key_value_heads", 2);
  return json.set("intermediate_size", 24).set("head_dim", 4);
}

// Fields missing from config.json have the defaults of transformers.
TEST(FamilyDefaults, RopeParametersMayStandBesideRopeScaling) {
  const auto config = [](const Json& parameters, const Json& scaling) {
    return ModelConfig::from_json(
        config_of("llama").set("rope_parameters", parameters).set("rope_scaling", scaling));
  };
  const Json theta = Json().set("rope_type", "default").set("rope_theta", 5e5),
             linear = Json().set("rope_type", "linear").set("factor", 4.0),
             both = Json(linear).set("rope_theta", 5e5);
  for (const Json& none : {Json(), Json().set("rope_type", "default"),
                           Json().set("type", "default"), Json(Json::Object{})}) {
    EXPECT_EQ(config(theta, none).rope_theta, 5e5);
    EXPECT_TRUE(config(theta, none).family.rope_frequencies.empty());
    EXPECT_EQ(config(both, none).family.rope_frequencies,
              config(both, Json()).family.rope_frequencies);
  }
  // The scaling of either, with the base of rope_parameters.
  const ModelConfig expected = config(both, Json());
  EXPECT_FALSE(expected.family.rope_frequencies.empty());
  for (const Json& parameters : {theta, both}) {
    EXPECT_EQ(config(parameters, linear).rope_theta, 5e5);
    EXPECT_EQ(config(parameters, linear).family.rope_frequencies, expected.family.rope_frequencies);
  }
  // Two scalings: that of rope_scaling, as in transformers.
  const Json dynamic = Json().set("type", "dynamic").set("factor", 2.0);
  EXPECT_NE(config(both, dynamic).family.rope_frequencies, expected.family.rope_frequencies);
  EXPECT_THROW_WITH(config(theta, 3), InputError, "rope_scaling is 3: expected an object");
  EXPECT_THROW_WITH(config(3, theta), InputError, "rope_parameters is 3: expected an object");
}

TEST(FamilyDefaults, LayersOfQwen35AreThoseOfTransformers) {
  const auto every = [](const char* field, const Json& value) {
    return ModelConfig::from_json(config_of("qwen3_5_text").set(field, value)).delta.full_every;
  };
  const auto types = [](const std::string& kinds) {
    Json list = Json::Array{};
    for (int i = 0; i < 30; ++i)
      list.push_back(kinds[static_cast<size_t>(i) % kinds.size()] == 'f' ? "full_attention"
                                                                         : "linear_attention");
    return list;
  };
  const ModelConfig plain = ModelConfig::from_json(config_of("qwen3_5_text"));
  EXPECT_EQ(plain.delta.full_every, 4);
  EXPECT_EQ(plain.rotary_fraction, 0.25);
  EXPECT_EQ(plain.context, 32768);
  EXPECT_EQ(dump_config(plain), dump_config(ModelConfig::from_json(
                                    config_of("qwen3_5_text").set("layer_types", types("lllf")))));
  EXPECT_EQ(every("full_attention_interval", 3), 3);
  EXPECT_EQ(every("full_attention_interval", 1), 0);
  EXPECT_EQ(every("layer_types", types("f")), 0);
  EXPECT_EQ(every("layer_types", types("lf")), 2);
  EXPECT_EQ(every("layer_types", types("l")), 31);
  for (const auto& [field, value, message] :
       std::vector<std::tuple<const char*, Json, const char*>>{
           {"layer_types", Json::Array{"full_attention"}, "expected 30 entries"},
           {"layer_types", types("lfl"), "full_attention is supported in every n-th layer, or"},
           {"layer_types", types("fl"), "full_attention is supported in every n-th layer, or"},
           {"full_attention_interval", 0, "expected a number from 1"},
           {"hidden_act", "gelu", "only \"silu\" is supported"},
           {"attn_output_gate", false, "only true is supported"},
           {"linear_conv_kernel_dim", 3, "only 4 is supported"},
           {"partial_rotary_factor", 0.0, "expected a number over 0"},
           {"partial_rotary_factor", 1e300, "expected a number over 0"},
           {"num_experts", 4, "not supported for model_type qwen3_5_text"}})
    EXPECT_THROW_WITH(every(field, value), InputError, message);
  Json sliding = Json::Array{};
  for (int i = 0; i < 30; ++i) sliding.push_back("sliding_attention");
  EXPECT_THROW_WITH(every("layer_types", sliding), InputError,
                    "known: linear_attention, full_attention");
  // The width that is rotated.
  ModelConfig odd = ModelConfig::from_json(config_of("qwen3_5_text").set("head_dim", 12));
  EXPECT_THROW_WITH(odd.resolve(), InputError,
                    "model.rotary_fraction: of the 12 elements of a head, 3 would be rotated");
  ModelConfig sizes = ModelConfig::from_json(
      config_of("qwen3_5_text").set("head_dim", 16).set("linear_num_value_heads", 17));
  EXPECT_THROW_WITH(sizes.resolve(), InputError, "value_heads: 17 is no multiple of key_heads");
}

TEST(FamilyDefaults, RelativesOfQwen35AreRefusedByName) {
  const auto whole = [](const Json& text) {
    return Json().set("model_type", "qwen3_5").set("text_config", text);
  };
  for (const auto& [type, message] : {std::pair("qwen3_5_moe", "'qwen3_5_moe' is not supported: "),
                                      {"qwen3_5_moe_text", "a model of Qwen3.5 with experts"},
                                      {"qwen3_next", "a model with experts"},
                                      {"qwen3_5_vision", "the image encoder of Qwen3.5"}}) {
    EXPECT_THROW_WITH(ModelConfig::from_json(config_of(type)), InputError, message);
    EXPECT_THROW_WITH(ModelConfig::from_json(whole(config_of(type))), InputError, message);
  }
  const auto with = [&](const char* field, const Json& value) {
    return ModelConfig::from_json(whole(config_of("qwen3_5_text")).set(field, value));
  };
  EXPECT_TRUE(with("tie_word_embeddings", true).tie_embeddings);
  EXPECT_THROW_WITH(with("text_config", 3), InputError, "text_config of model_type qwen3_5");
  EXPECT_THROW_WITH(with("num_experts", 3), InputError, "num_experts is not supported");
  EXPECT_NO_THROW(with("language_model_only", true));
  const auto gated = [&](const char* gate) {
    return ModelConfig::from_json(whole(config_of("qwen3_5_text").set("output_gate_type", gate)));
  };
  EXPECT_NO_THROW(gated("swish"));
  EXPECT_THROW_WITH(gated("sigmoid"), InputError, "output_gate_type is \"sigmoid\": only silu");
  EXPECT_THROW_WITH(with("quantization_config", Json().set("quant_method", "fp8")), InputError,
                    "quantized weights (fp8) are not supported");
  EXPECT_THROW_WITH(with("quantization_config",
                         Json().set("quant_method", "bitsandbytes").set("load_in_8bit", true)),
                    InputError, "8 or 4 bits are not supported in models with delta layers");
}

TEST(FamilyDefaults, WindowsAreThoseOfTransformers) {
  const auto window = [](const Json& json, int layer) {
    return ModelConfig::from_json(json).window_of(layer);
  };
  EXPECT_EQ(window(config_of("mistral"), 3), 4096);
  EXPECT_EQ(window(config_of("mistral").set("sliding_window", Json()), 3), 0);
  EXPECT_EQ(window(config_of("qwen2"), 29), 0);
  const Json qwen = config_of("qwen2").set("use_sliding_window", true);
  EXPECT_EQ(window(qwen, 27), 0);
  EXPECT_EQ(window(qwen, 28), 4096);
  const Json smol = config_of("smollm3").set("use_sliding_window", true).set("sliding_window", 8);
  EXPECT_EQ(window(smol, 2), 0);  // rotary
  EXPECT_EQ(window(smol, 3), 8);
  EXPECT_EQ(window(config_of("phi3"), 0), 0);
}

// In some families transformers ignores the fields by which others leave windows out.
TEST(FamilyDefaults, WindowsThatTransformersWouldNotHaveAreRefused) {
  const auto types = [](const char* first) {
    Json::Array all(30, "sliding_attention");
    all[0] = first;
    return Json(all);
  };
  for (const char* type : {"mistral", "phi3"}) {
    const Json json = config_of(type).set("sliding_window", 8);
    const auto with = [&](const char* field, const Json& value) {
      return ModelConfig::from_json(Json(json).set(field, value));
    };
    EXPECT_EQ(with("layer_types", types("sliding_attention")).window_of(0), 8);
    EXPECT_EQ(with("use_sliding_window", true).window_of(0), 8);
    EXPECT_EQ(with("max_window_layers", 0).window_of(0), 8);
    EXPECT_THROW_WITH(with("layer_types", types("full_attention")), InputError,
                      "the field layer_types is [\"full_attention\"");
    EXPECT_THROW_WITH(with("max_window_layers", 28), InputError, "max_window_layers is 28: layers");
    EXPECT_THROW_WITH(with("use_sliding_window", false), InputError,
                      "use_sliding_window is false: only true");
    const Json none = Json(json).set("sliding_window", Json()).set("use_sliding_window", false);
    EXPECT_EQ(ModelConfig::from_json(none).window, 0);
  }
  for (const char* type : {"qwen2", "qwen3", "smollm3"})
    EXPECT_THROW_WITH(
        ModelConfig::from_json(
            config_of(type).set("sliding_window", 8).set("layer_types", types("full_attention"))),
        InputError, "without use_sliding_window only full_attention");
}

TEST(FamilyDefaults, DecodersThatAreNotCausalAreRefused) {
  for (const char* type : {"llama", "qwen2", "gemma"}) {
    EXPECT_EQ(ModelConfig::from_json(config_of(type).set("is_causal", true)).num_layers, 30);
    EXPECT_THROW_WITH(ModelConfig::from_json(config_of(type).set("is_causal", false)), InputError,
                      "is_causal is false: only true is supported");
  }
}

// Phi-3 of transformers reads it as longrope.
TEST(FamilyDefaults, YarnWithFactorsOfLongropeIsRefused) {
  const Json yarn = Json().set("type", "yarn").set("short_factor", Json::Array{1.0, 2.0});
  EXPECT_THROW_WITH(ModelConfig::from_json(config_of("phi3").set("rope_scaling", yarn)), InputError,
                    "short_factor is [1.0,2.0]: yarn has none");
}

}  // namespace

TEST(ModelConfig, ResolveFillsInZeroSizes) {
  ModelConfig c;
  c.d_model = 100;
  c.num_heads = 5;
  c.resolve();
  EXPECT_EQ(c.num_kv_heads, 5);
  EXPECT_EQ(c.head_dim, 20);
  EXPECT_EQ(c.d_ff, 272);  // 8/3 of 100 is 266, rounded up to 16
  ModelConfig g;
  g.mlp = MlpType::kGelu;
  g.resolve();
  EXPECT_EQ(g.d_ff, 4 * g.d_model);
  const std::string once = dump_config(c);
  c.resolve();
  EXPECT_EQ(dump_config(c), once);
}

TEST(ModelConfig, ResolveErrorsNameTheKey) {
  EXPECT_EQ(resolve_error([](ModelConfig& c) { c.num_heads = 3; }),
            "model.num_heads: 3 does not divide d_model 128; hint: give head_dim");
  EXPECT_EQ(resolve_error([](ModelConfig& c) { c.num_kv_heads = 3; }),
            "model.num_kv_heads: 3 does not divide num_heads 4");
  EXPECT_EQ(resolve_error([](ModelConfig& c) { c.num_kv_heads = 8; }),
            "model.num_kv_heads: 8 does not divide num_heads 4");
  EXPECT_EQ(resolve_error([](ModelConfig& c) { c.head_dim = 31; }),
            "model.head_dim: rotary positions need an even number, got 31");
  for (const double fraction : {0.1, 0.01}) {
    ModelConfig c;
    c.rotary_fraction = fraction;
    EXPECT_THROW_WITH(c.resolve(), InputError,
                      str("model.rotary_fraction: of the 32 elements of a head, ",
                          fraction == 0.1 ? 3 : 0, " would be rotated; expected an even number"));
    c.position = PositionType::kExposb;
    EXPECT_THROW_WITH(c.resolve(), InputError, "model.rotary_fraction: goes with position: rope");
  }
  for (const PositionType position : {PositionType::kLearned, PositionType::kAlibi}) {
    ModelConfig c;
    c.head_dim = 31;
    c.position = position;
    EXPECT_NO_THROW(c.resolve());
  }
  EXPECT_EQ(resolve_error([](ModelConfig& c) {
              c.head_dim = 31;
              c.position = PositionType::kExposb;
            }),
            "model.head_dim: rotary positions need an even number, got 31");
  EXPECT_EQ(resolve_error([](ModelConfig& c) {
              c.position = PositionType::kExposb;
              c.family.rope_frequencies = {1, 0.5};
            }),
            "model.position: exposb has the frequencies of rope_theta, and the model has its own");
  EXPECT_EQ(resolve_error([](ModelConfig& c) {
              c.position = PositionType::kT5;
              c.position_buckets = 7;
            }),
            "model.position_buckets: expected an even number, got 7");
  EXPECT_EQ(resolve_error([](ModelConfig& c) {
              c.position = PositionType::kT5;
              c.position_max_distance = 16;
            }),
            "model.position_max_distance: expected more than half of position_buckets, 16, got 16");
}

TEST(ModelConfig, WideHeadsAreForTheCpu) {
  ModelConfig c;
  c.head_dim = 256;
  c.check_device(Device::cuda(), DType::kF32);
  c.head_dim = 258;
  c.check_device(Device{}, DType::kF32);
  EXPECT_THROW_WITH(c.check_device(Device::cuda(), DType::kF32), InputError,
                    "model.head_dim: expected at most 256 on a GPU, got 258; hint");
}

TEST(ModelConfig, ReadsAndDumpsItsKeys) {
  ModelConfig c;
  read_config(c, parse_yaml("d_model: 64\nnorm: layer_norm\nposition: learned\nmlp: gelu_tanh\n"
                            "recompute: block\nqk_norm: true\n",
                            "model.yaml"));
  EXPECT_EQ(c.d_model, 64);
  EXPECT_EQ(c.norm, NormType::kLayer);
  EXPECT_EQ(c.position, PositionType::kLearned);
  EXPECT_EQ(c.mlp, MlpType::kGeluTanh);
  EXPECT_EQ(c.recompute, Recompute::kBlock);
  ModelConfig back;
  read_config(back, parse_yaml(dump_config(c), "dump.yaml"));
  EXPECT_EQ(dump_config(back), dump_config(c));
  EXPECT_THROW_WITH(read_config(c, parse_yaml("dropout: 1\n", "model.yaml")), InputError,
                    "dropout");
}

TEST(ModelConfig, JsonRoundTripKeepsEverythingAboutTheModel) {
  for (auto [name, config] : test::model_cases())
    for (const bool bias : {false, true})
      for (const double theta : {10000.0, 12345.678}) {
        config.bias = bias;
        config.dropout = 0.1;
        config.rope_theta = theta;
        config.norm_eps = 3e-6;
        config.init_std = 0.015;
        ModelConfig back =
            ModelConfig::from_json(parse_json(config.to_json().dump(2), "config.json"));
        back.resolve();
        back.dropout = config.dropout;  // a run's, not the model's
        EXPECT_EQ(dump_config(back), dump_config(config)) << name;
        EXPECT_EQ(back.vocab_size, config.vocab_size);
        EXPECT_EQ(back.to_json().dump(), config.to_json().dump());
        EXPECT_EQ(model_size(back).parameters, model_size(config).parameters);
      }
}

TEST(ModelConfig, ModelsOfAFamilysShapeAreSavedAsThatFamily) {
  const auto saved = [](
                         const char* name, void (*change)(ModelConfig&) = [](ModelConfig&) {}) {
    ModelConfig config = test::model_config(name);
    change(config);
    return config.to_json().at("model_type").as_string();
  };
  EXPECT_EQ(saved("llama"), "llama");
  EXPECT_EQ(saved("llama", [](ModelConfig& c) { c.bias = c.tie_embeddings = true; }), "llama");
  EXPECT_EQ(saved("llama", [](ModelConfig& c) { c.mlp = MlpType::kGeGluTanh; }), "llama");
  EXPECT_EQ(saved("qwen"), "qwen3");
  EXPECT_EQ(saved("gated"), "qwen3_5_text");
  const auto hybrid = [](ModelConfig& c) {
    c.delta = {.full_every = 2, .key_heads = 1, .value_heads = 3, .key_dim = 4, .value_dim = 4};
  };
  EXPECT_EQ(saved("gated", hybrid), "qwen3_5_text");
  EXPECT_EQ(saved("gated", [](ModelConfig& c) { c.delta.full_every = 9; }), "qwen3_5_text");
  EXPECT_EQ(saved("gpt2"), "gpt2");
  EXPECT_EQ(saved("gpt2", [](ModelConfig& c) { c.mlp = MlpType::kGelu; }), "gpt2");
  // No family has these.
  EXPECT_EQ(saved("llama", [](ModelConfig& c) { c.mlp = MlpType::kGelu; }), "cohort");
  EXPECT_EQ(saved("llama", [](ModelConfig& c) { c.norm = NormType::kLayer; }), "cohort");
  EXPECT_EQ(saved("qwen", [](ModelConfig& c) { c.bias = true; }), "cohort");
  EXPECT_EQ(saved("gated", [](ModelConfig& c) { c.qk_norm = false; }), "cohort");
  EXPECT_EQ(saved("qwen", hybrid), "cohort");
  EXPECT_EQ(saved("gpt2", [](ModelConfig& c) { c.bias = false; }), "cohort");
  EXPECT_EQ(saved("gpt2", [](ModelConfig& c) { c.num_kv_heads = 1; }), "cohort");
  EXPECT_EQ(saved("gpt2", [](ModelConfig& c) { c.head_dim = 6; }), "cohort");
  EXPECT_EQ(saved("layer_norm_without_bias"), "cohort");
  for (const auto& [name, config] : test::rule_cases()) EXPECT_EQ(saved(name.c_str()), "cohort");
}

TEST(ModelConfig, KeysOfAttentionAreSavedWhereTheyAreNotTheDefaults) {
  const Json json = test::model_config("exposb").to_json();
  EXPECT_EQ(json.at("exposb").dump(), R"({"position_decay":20,"distance_rate":0.1})");
  EXPECT_EQ(json.find("window"), nullptr);
  EXPECT_EQ(test::model_config("all_rules").to_json().at("attention_sinks").as_bool(), true);
  for (const auto& [key, value, message] :
       {std::tuple<const char*, Json, const char*>{"window", int64_t{-1},
                                                   "window: expected a number from 0"},
        {"attention_sinks", "many", "attention_sinks: expected"},
        {"exposb", Json().set("channel_width", 0.0), "exposb.channel_width: expected a number"}}) {
    Json bad = json;
    EXPECT_THROW_WITH(ModelConfig::from_json(bad.set(key, value)), InputError, message);
  }
}

TEST(ModelConfig, JsonThatCannotBeUsedNamesTheKey) {
  const Json good = test::model_config("layer_norm_without_bias").to_json();
  for (const auto& [key, value] : good.as_object()) {
    if (key == "model_type") continue;
    Json bad;
    for (const auto& [k, v] : good.as_object())
      if (k != key) bad.set(k, v);
    EXPECT_THROW_WITH(ModelConfig::from_json(bad), InputError, key);
  }
  Json bad = good;
  bad.set("hidden_act", "relu6");
  EXPECT_THROW_WITH(ModelConfig::from_json(bad), InputError, "hidden_act: unknown value 'relu6'");
  bad = good;
  bad.set("position_type", "");
  EXPECT_THROW_WITH(ModelConfig::from_json(bad), InputError,
                    "position_type: unknown value ''; expected one of rope, learned");
}

TEST(ModelConfig, AFolderWithARemovedSchemeOfPositionsIsRefusedWithItsPath) {
  const test::TempDir dir;
  const std::string folder = dir.path(), file = folder + "/config.json";
  Json json = test::model_config("alibi").to_json();
  ASSERT_EQ(json.at("position_type").as_string(), "alibi");
  test::write_file(file, json.set("position_type", "stick_breaking").dump());
  EXPECT_THROW_WITH(load_config(folder), InputError,
                    file +
                        ": position_type: unknown value 'stick_breaking', which was removed; "
                        "expected one of rope, learned, sinusoidal, alibi, t5, exposb, none");
}

TEST(ModelConfig, JsonNumbersHaveTheLimitsOfTheKeys) {
  const Json good = test::model_config("layer_norm_without_bias").to_json();
  for (const auto& [key, value, message] :
       {std::tuple<const char*, Json, const char*>{"num_attention_heads", int64_t{0},
                                                   "model: num_heads: expected a number"},
        {"num_hidden_layers", int64_t{1'000'000'000}, "model: num_layers: expected a number"},
        {"num_hidden_layers", int64_t{-5}, "model: num_layers: expected a number"},
        {"num_key_value_heads", int64_t{-1}, "num_kv_heads: expected a number"},
        {"head_dim", int64_t{-2}, "head_dim: expected a number"},
        {"hidden_size", INT64_MAX, "d_model: expected a number"},
        {"intermediate_size", int64_t{1} << 40, "d_ff: expected a number"},
        {"max_position_embeddings", int64_t{0}, "context: expected a number"},
        {"vocab_size", int64_t{0}, "vocab_size: expected a number"},
        {"vocab_size", int64_t{1} << 40, "vocab_size: expected a number"},
        {"dropout", 1.5, "dropout: expected a number"},
        {"rope_theta", -1.0, "rope_theta: expected a number"}}) {
    Json bad = good;
    bad.set(key, value);
    EXPECT_THROW_WITH(ModelConfig::from_json(bad), InputError, message);
  }
}

TEST(ModelConfig, TheLargestModelIsCountedWithoutOverflow) {
  ModelConfig c;
  c.num_layers = 1000;
  c.d_model = 1 << 20;
  c.num_heads = 1 << 16;
  c.head_dim = 1 << 16;
  EXPECT_THROW_WITH(c.resolve(), InputError, "model.head_dim: num_heads times head_dim is");
  c.head_dim = 64;
  c.d_ff = 1 << 22;
  c.context = 1 << 24;
  c.vocab_size = INT32_MAX;
  c.resolve();
  EXPECT_GT(model_size(c).parameters, int64_t{1} << 50);
  EXPECT_LT(model_size(c).parameters, int64_t{1} << 56);
}

TEST(ModelSize, EqualsTheSumOfTheParameters) {
  for (const auto& [name, config] : test::model_cases()) {
    for (const bool bias : {false, true}) {
      ModelConfig c = config;
      c.bias = bias;
      const Transformer model(c, DType::kF32, 1);
      int64_t all = 0, matmul = 0;
      for (const NamedParameter& p : model.parameters()) {
        const int64_t n = p.value.numel();
        all += n;
        const bool table = p.name.find("embed") != p.name.npos || p.name.ends_with("bias.weight");
        if (p.value.rank() == 2 && !table) matmul += n;
        EXPECT_EQ(p.use != ParameterUse::kVector, p.value.rank() == 2) << p.name;
      }
      if (c.tie_embeddings) matmul += c.vocab_size * c.d_model;
      EXPECT_EQ(model_size(c).parameters, all) << name;
      EXPECT_EQ(model_size(c).matmul_parameters, matmul) << name;
    }
  }
}

TEST(ModelSize, OperationsPerTokenCountMatmulsAndCausalAttention) {
  ModelConfig c = test::model_config("llama");
  const double matmuls = 6.0 * static_cast<double>(model_size(c).matmul_parameters);
  EXPECT_EQ(train_flops_per_token(c, 0), matmuls);
  // Two matmuls (scores and values) of 2 operations per key and dim, three times for forward and
  // backward, over half the keys: 6 d_attn per layer and token of length.
  EXPECT_EQ(train_flops_per_token(c, 100) - matmuls, 6.0 * 2 * (4 * 6) * 100);
}

TEST(ModelSize, EncodersSeeAllKeysAndTheirHeadsHaveTargetRowsOnly) {
  for (const HeadType type : {HeadType::kMaskedToken, HeadType::kClasses, HeadType::kPooler}) {
    ModelConfig c = test::model_config("llama");
    c.mask = MaskType::kFull;
    c.tie_embeddings = true;
    c.set_head(type, {"a", "b", "c"});
    // Each has a dense layer; masked tokens the tied table, classes a matrix of three rows.
    const int64_t logits = type == HeadType::kPooler ? 0 : c.num_logits();
    const int64_t head = c.d_model * (c.d_model + logits);
    const ModelSize size = model_size(c);
    EXPECT_EQ(size.head_parameters, head);
    const double rest = 6.0 * static_cast<double>(size.matmul_parameters - head);
    EXPECT_EQ(train_flops_per_token(c, 100, 0.25),
              rest + 6.0 * static_cast<double>(head) / 4 + 12.0 * 2 * (4 * 6) * 100);
  }
}

}  // namespace cohort
