#include "tests/nn/models.h"

#include "core/rng.h"
#include "tests/support/loss_node.h"

namespace cohort::test {
namespace {

ModelConfig base() {
  ModelConfig c;
  c.num_layers = 2;
  c.d_model = 24;
  c.num_heads = 4;
  c.context = 160;
  c.vocab_size = 31;
  c.init_std = 0.2;  // large enough that attention is far from uniform
  return c;
}

template <class Change>
ModelCase make(const std::string& name, const Change& change) {
  ModelCase model{name, base()};
  change(model.config);
  model.config.resolve();
  return model;
}

}  // namespace

std::vector<ModelCase> rule_cases() {
  return {make("sinusoidal", [](ModelConfig& c) { c.position = PositionType::kSinusoidal; }),
          make("alibi",
               [](ModelConfig& c) {
                 c.d_model = 18;
                 c.num_heads = 3;
                 c.position = PositionType::kAlibi;
               }),
          make("t5",
               [](ModelConfig& c) {
                 c.num_kv_heads = 2;
                 c.position = PositionType::kT5;
                 c.position_buckets = 8;
                 c.position_max_distance = 20;
               }),
          make("exposb",
               [](ModelConfig& c) {
                 c.num_kv_heads = 2;
                 c.position = PositionType::kExposb;
                 c.exposb.position_decay = 20;
                 c.exposb.distance_rate = 0.1;
               }),
          make("none", [](ModelConfig& c) { c.position = PositionType::kNone; }),
          make("window", [](ModelConfig& c) { c.window = 3; }),
          make("soft_cap", [](ModelConfig& c) { c.soft_cap = 0.75; }),
          make("sinks", [](ModelConfig& c) { c.attention_sinks = true; }),
          make("part_rotated", [](ModelConfig& c) { c.rotary_fraction = 0.67; }),  // 4 of 6
          make("gated_plain",
               [](ModelConfig& c) {
                 c.norm = NormType::kLayer;
                 c.bias = true;
                 c.attention_gate = true;
                 c.attention_sinks = true;
               }),
          make("all_rules", [](ModelConfig& c) {
            c.num_kv_heads = 1;
            c.position = PositionType::kT5;
            c.window = 40;
            c.soft_cap = 2;
            c.attention_sinks = true;
          })};
}

std::vector<ModelCase> model_cases() {
  std::vector<ModelCase> cases = rule_cases();
  const std::vector<ModelCase> plain = {make("llama", [](ModelConfig& c) { c.num_kv_heads = 2; }),
                                        make("qwen",
                                             [](ModelConfig& c) {
                                               c.num_kv_heads = 1;
                                               c.qk_norm = true;
                                               c.head_dim = 10;
                                               c.tie_embeddings = true;
                                             }),
                                        make("gated",
                                             [](ModelConfig& c) {
                                               c.num_kv_heads = 2;
                                               c.head_dim = 12;
                                               c.qk_norm = true;
                                               c.attention_gate = true;
                                               c.rotary_fraction = 0.5;
                                             }),
                                        make("gpt2",
                                             [](ModelConfig& c) {
                                               c.d_model = 21;
                                               c.num_heads = 3;  // head dim 7
                                               c.norm = NormType::kLayer;
                                               c.position = PositionType::kLearned;
                                               c.mlp = MlpType::kGeluTanh;
                                               c.bias = true;
                                               c.tie_embeddings = true;
                                             }),
                                        make("layer_norm_without_bias",
                                             [](ModelConfig& c) {
                                               c.norm = NormType::kLayer;
                                               c.mlp = MlpType::kGelu;
                                               c.head_dim = 2;
                                             }),
                                        make("learned_one_wide_head",
                                             [](ModelConfig& c) {
                                               c.d_model = 16;
                                               c.num_heads = 1;
                                               c.head_dim = 131;  // tiles of 64 keys
                                               c.position = PositionType::kLearned;
                                               c.bias = true;
                                             }),
                                        make("tiny", [](ModelConfig& c) {
                                          c.d_model = 1;
                                          c.num_heads = 1;
                                          c.head_dim = 2;
                                          c.d_ff = 1;
                                          c.qk_norm = true;
                                        })};
  cases.insert(cases.begin(), plain.begin(), plain.end());
  return cases;
}

std::vector<ModelCase> delta_cases() {
  const auto delta = [](DeltaConfig sizes) {
    return [sizes](ModelConfig& c) {
      c.num_layers = 4;
      c.num_kv_heads = 2;
      c.delta = sizes;
    };
  };
  return {
      make(
          "hybrid",
          delta({.full_every = 3, .key_heads = 1, .value_heads = 2, .key_dim = 4, .value_dim = 4})),
      make(
          "hybrid_with_many_heads",
          delta({.full_every = 2, .key_heads = 2, .value_heads = 6, .key_dim = 3, .value_dim = 3})),
      make("delta_alone",
           delta(
               {.full_every = 9, .key_heads = 2, .value_heads = 2, .key_dim = 8, .value_dim = 8}))};
}

KVCacheConfig test_cache(const ModelConfig& c, int64_t sequences, int64_t block_tokens) {
  KVCacheConfig out = cache_config(c, sequences, 0);
  out.block_tokens = block_tokens;
  return out;
}

ModelConfig model_config(const std::string& name) {
  for (const ModelCase& model : model_cases())
    if (model.name == name) return model.config;
  throw Error("no model case is called " + name);
}

ModelConfig with_lora(ModelConfig config, int64_t rank, std::vector<std::string> targets) {
  config.lora.rank = rank;
  config.lora.alpha = 2 * static_cast<double>(rank);
  config.lora.targets = std::move(targets);
  return config;
}

void set_adapters(Transformer& model) {
  uint64_t seed = 41;
  for (const NamedParameter& p : model.parameters())
    if (p.role == ParameterRole::kAdapter)
      Tensor(p.value).copy_(random_tensor(p.value.shape(), model.dtype(), seed++, 0.3));
  model.update_derived();
}

namespace {

// The model's loss as a function of all its parameters, for gradcheck: forward and backward run on
// the model after its parameters are set to `values`.
Variable loss_of_parameters(const Transformer& model, const PackedBatch& batch,
                            std::span<const Variable> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    Tensor target = model.parameters()[i].value;
    target.copy_(values[i].value());
  }
  const Variable loss = mean_loss(model, batch, {.mode = Mode::kTrain, .seed = 3});
  return make_node("model", loss.value(), values, [&model, loss](const Tensor& dy, Gradients& g) {
    for (const NamedParameter& p : model.parameters()) p.grad().zero_();
    backward(loss, dy);
    for (size_t i = 0; i < model.parameters().size(); ++i)
      g.pass(static_cast<int>(i), model.parameters()[i].grad().clone());
  });
}

}  // namespace

void expect_gradients_of_differences(const Transformer& model, const PackedBatch& batch,
                                     const GradcheckOptions& options) {
  std::vector<Tensor> values;
  Rng rng(5, rng_stream(kTestPurpose));
  for (const NamedParameter& p : model.parameters()) {
    values.push_back(p.value.clone());
    // Away from the initial ones and zeros, where some gradients vanish.
    for (int64_t i = 0; i < values.back().numel(); ++i)
      values.back().data<double>()[i] += 0.1 * rng.normal();
  }
  const GradcheckResult result =
      gradcheck([&](std::span<const Variable> in) { return loss_of_parameters(model, batch, in); },
                values, options);
  EXPECT_TRUE(result.ok) << result.message;
  EXPECT_GE(result.checks, 4 * static_cast<int64_t>(values.size()));
}

std::vector<ModelCase> encoder_cases() {
  const auto encoder = [](const std::string& name, HeadType head, const auto& change) {
    return make(name, [&](ModelConfig& c) {
      c.mask = MaskType::kFull;
      c.norm = NormType::kLayer;
      c.mlp = MlpType::kGelu;
      c.bias = true;
      change(c);
      c.set_head(head, head == HeadType::kClasses ? std::vector<std::string>{"a", "b", "c"}
                                                  : std::vector<std::string>());
    });
  };
  const auto bert = [](ModelConfig& c) {
    c.position = PositionType::kLearned;
    c.norm_place = NormPlace::kAfter;
    c.embedding_norm = true;
    c.token_types = 2;
    c.tie_embeddings = true;
  };
  const auto image = [](ModelConfig& c) {
    c.position = PositionType::kLearned;
    c.image_size = 6;
    c.patch_size = 2;
    c.context = c.vocab_size = 0;
  };
  std::vector<ModelCase> cases = {encoder("bert_masked", HeadType::kMaskedToken, bert),
                                  encoder("bert_classes", HeadType::kClasses, bert),
                                  encoder("bert_pooler", HeadType::kPooler, bert),
                                  encoder("vit_classes", HeadType::kClasses, image),
                                  encoder("vit_gray_pooler", HeadType::kPooler,
                                          [&](ModelConfig& c) {
                                            image(c);
                                            c.channels = 1;
                                          }),
                                  encoder("modern_masked", HeadType::kMaskedToken,
                                          [](ModelConfig& c) {
                                            c.norm = NormType::kRms;
                                            c.mlp = MlpType::kSwiGlu;
                                            c.bias = false;
                                            c.num_kv_heads = 2;
                                          }),
                                  encoder("branch_types", HeadType::kClasses, [](ModelConfig& c) {
                                    c.norm_place = NormPlace::kBranch;
                                    c.token_types = 3;
                                    c.attention_sinks = true;
                                    c.soft_cap = 2;
                                  })};
  for (const PositionType position :
       {PositionType::kSinusoidal, PositionType::kAlibi, PositionType::kT5, PositionType::kExposb,
        PositionType::kNone})
    cases.push_back(encoder(str("position ", static_cast<int>(position)), HeadType::kMaskedToken,
                            [&](ModelConfig& c) {
                              bert(c);
                              c.position = position;
                              c.position_buckets = 8;
                              c.position_max_distance = 20;
                            }));
  return cases;
}

PackedBatch encoder_batch(const ModelConfig& config, const std::vector<int64_t>& lengths,
                          uint64_t seed, int64_t first) {
  std::vector<TokenSequence> sequences;
  const int64_t vocab = std::max<int64_t>(config.vocab_size, 2);
  for (size_t i = 0; i < lengths.size(); ++i) {
    // Each sequence has its own numbers, wherever it is packed.
    Rng rng(seed + static_cast<uint64_t>(first) + i, rng_stream(kTestPurpose, 21));
    TokenSequence s{.index = first + static_cast<int64_t>(i)};
    for (int64_t t = 0; t < (config.has_images() ? config.context : lengths[i]); ++t) {
      s.tokens.push_back(static_cast<int32_t>(rng.below(vocab)));
      const bool target =
          config.head == HeadType::kMaskedToken ? t % 3 == 1 || lengths[i] == 1 : t == 0;
      s.labels.push_back(
          target ? static_cast<int32_t>(rng.below(std::max<int64_t>(config.num_logits(), 1))) : -1);
      if (config.token_types > 0)
        s.types.push_back(static_cast<int32_t>(rng.below(config.token_types)));
    }
    sequences.push_back(std::move(s));
  }
  PackedBatch batch = pack(sequences);
  if (!config.has_images()) return batch;
  batch.tokens = {};
  const int64_t side = config.image_size, size = side * side * config.channels;
  std::vector<uint8_t> pixels;
  for (size_t i = 0; i < lengths.size(); ++i) {
    Rng rng(seed + static_cast<uint64_t>(first) + i, rng_stream(kTestPurpose, 22));
    for (int64_t p = 0; p < size; ++p) pixels.push_back(static_cast<uint8_t>(rng.below(256)));
  }
  batch.pixels = Tensor::from(pixels, {std::ssize(lengths), size});
  std::vector<float> table;
  for (int64_t i = 0; i < 256 * config.channels; ++i)
    table.push_back(static_cast<float>(i % 256) / 127.5f - 1);
  batch.pixel_values = Tensor::from(table, {config.channels, 256});
  return batch;
}

std::vector<TokenSequence> random_sequences(const std::vector<int64_t>& lengths, int64_t vocab,
                                            uint64_t seed, int64_t first_index) {
  Rng rng(seed, rng_stream(kTestPurpose, 20));
  std::vector<TokenSequence> sequences;
  for (const int64_t length : lengths) {
    TokenSequence s;
    s.index = first_index + static_cast<int64_t>(sequences.size());
    for (int64_t i = 0; i <= length; ++i) {
      s.tokens.push_back(static_cast<int32_t>(rng.below(vocab)));
      s.loss_mask.push_back(i == length || rng.below(4) > 0);  // the last token and most others
    }
    sequences.push_back(std::move(s));
  }
  return sequences;
}

Tensor rows_of(const Tensor& x, int64_t begin, int64_t length) {
  return x.narrow(0, begin, length).clone();
}

Variable mean_loss(const Transformer& model, const PackedBatch& batch,
                   const ForwardOptions& options) {
  const PackedBatch on_device = model.to_device(batch);
  const Tensor weights =
      Tensor::full({batch.num_targets()}, 1.0 / static_cast<double>(batch.num_targets()),
                   accumulate_dtype(model.dtype()), model.device());
  return cross_entropy_node(model.hidden_at_targets(on_device, options), model.head(),
                            on_device.targets, weights);
}

}  // namespace cohort::test
