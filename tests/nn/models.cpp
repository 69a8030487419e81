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

ModelCase make(const char* name, void (*change)(ModelConfig&)) {
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
  model.write_lora_columns();
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
