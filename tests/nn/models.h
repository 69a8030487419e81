// Small models of every kind and batches for them, shared by the tests of nn.
#pragma once

#include <string>
#include <vector>

#include "autograd/gradcheck.h"
#include "nn/transformer.h"
#include "tests/support/test_util.h"

namespace cohort::test {

struct ModelCase {
  std::string name;
  ModelConfig config;  // resolved, two layers, vocabulary of 31
};
// The schemes of positions besides rope and learned tables, and the rules of attention.
std::vector<ModelCase> rule_cases();
// All norms, positions, activations, head groupings, tied and untied, odd head dims, rules.
std::vector<ModelCase> model_cases();
// Models with delta layers: between layers with attention, and alone; of four layers.
std::vector<ModelCase> delta_cases();
// A cache with blocks for all sequences.
KVCacheConfig test_cache(const ModelConfig& config, int64_t sequences, int64_t block_tokens);
// The case called `name`.
ModelConfig model_config(const std::string& name);

// The configuration with adapters of a rank, and a scale of 2.
ModelConfig with_lora(ModelConfig config, int64_t rank, std::vector<std::string> targets = {});
// Gives all adapters random values, as after many updates.
void set_adapters(Transformer& model);

// Checks the gradients of mean_loss() with respect to all parameters of a model in f64.
void expect_gradients_of_differences(const Transformer& model, const PackedBatch& batch,
                                     const GradcheckOptions& options = {});

// Encoders of every head, with types, images, and each scheme of positions.
std::vector<ModelCase> encoder_cases();
// Random texts of these lengths, or as many random images, with targets for the model's head.
// `first` is the index of the first.
PackedBatch encoder_batch(const ModelConfig& config, const std::vector<int64_t>& lengths,
                          uint64_t seed, int64_t first = 0);

// Sequences of random tokens; sequence i has index first_index + i. `lengths` counts inputs.
std::vector<TokenSequence> random_sequences(const std::vector<int64_t>& lengths, int64_t vocab,
                                            uint64_t seed, int64_t first_index = 0);

// Rows [begin, begin + length) of a matrix, as a copy.
Tensor rows_of(const Tensor& x, int64_t begin, int64_t length);

// Mean cross-entropy of a batch.
Variable mean_loss(const Transformer& model, const PackedBatch& batch,
                   const ForwardOptions& options = {});

}  // namespace cohort::test
