// Learners of small models for tests of sharding, whose sizes nothing divides.
#pragma once

#include <memory>

#include "tests/support/test_util.h"
#include "trainers/learner.h"

namespace cohort::test {

// No size is a multiple of 64; some units are smaller than 64 elements a rank.
inline ModelConfig odd_model(bool tied = false, int64_t width = 12) {
  ModelConfig c;
  c.num_layers = 2;
  c.d_model = width;
  c.num_heads = 2;
  c.context = 12;
  c.init_std = 0.2;
  c.vocab_size = 9;
  c.tie_embeddings = tied;
  c.resolve();
  return c;
}

inline HeadLoss odd_loss(const Transformer& model, uint64_t seed, double scale = 1) {
  Rng rng(seed, rng_stream(kTestPurpose));
  TokenSequence s;
  for (int i = 0; i < 9; ++i)
    s.tokens.push_back(static_cast<int32_t>(rng.below(model.config().vocab_size)));
  s.loss_mask.assign(9, 1);
  const PackedBatch batch = model.to_device(pack({&s, 1}));
  return cross_entropy(
      model.forward(batch), model.head(), batch.targets,
      Tensor::full({batch.size()}, scale / 8, accumulate_dtype(model.dtype()), model.device()));
}

struct ShardCase {
  DType dtype = DType::kF32;
  MomentKind moments = MomentKind::kF32;
  bool tied = false, lora = false;
  kernels::WeightFormat base = kernels::WeightFormat::kModel;
  int layers = 2;
  Recompute recompute = Recompute::kNone;
  int64_t width = 12;
  bool delta = false;  // every other layer has the delta rule, with parameters in f32
};

inline std::unique_ptr<Transformer> sharded_model(const ShardCase& c, Device device = {}) {
  ModelConfig config = odd_model(c.tied, c.width);
  if (c.lora) config.lora.rank = 2;
  config.precision.base = c.base;
  config.num_layers = c.layers;
  config.recompute = c.recompute;
  const int64_t dim = c.width == 12 ? 6 : 64;
  if (c.delta)
    config.delta = {
        .full_every = 2, .key_heads = 1, .value_heads = 2, .key_dim = dim, .value_dim = dim};
  return std::make_unique<Transformer>(config, c.dtype, 1, device);
}

inline OptimizerConfig sharded_config(const ShardCase& c, Sharding sharding) {
  OptimizerConfig config;
  config.sharding = sharding;
  config.storage.moments = c.moments;
  config.max_grad_norm = 0.5;
  return config;
}

inline Tensor value_of(const NamedParameter& p) {
  return (p.quantized.defined() ? p.quantized.values : p.value).clone();
}

inline void gather_state(Optimizer& optimizer, Communicator& comm, size_t unit, int to) {
  optimizer.allocate_gathered(comm.rank() == to ? std::optional(unit) : std::nullopt);
  optimizer.gather_state(comm, unit, to);
}

}  // namespace cohort::test
