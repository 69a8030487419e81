#include "trainers/dry_update.h"

#include "core/dry_run.h"
#include "nn/memory.h"

namespace cohort {

void dry_update(const ModelConfig& model, DType dtype, Device device, const OptimizerConfig& config,
                int64_t micro_batches, Communicator& comm) {
  constexpr int64_t kTokens = 64;  // no call depends on them
  const DryRun run(device);
  Learner learner(std::make_unique<Transformer>(model, dtype, std::nullopt, device), config, comm);
  const PackedBatch batch = dry_batch(model, kTokens, 1, device);
  const Tensor weights = Tensor::empty({batch.num_targets()}, accumulate_dtype(dtype), device);
  const auto loss = [&](int64_t) {
    return cross_entropy(learner.model().hidden_at_targets(batch, {.mode = Mode::kTrain}),
                         learner.model().head(), batch.targets, weights);
  };
  learner.update(micro_batches, loss, config.learning_rate);
}

}  // namespace cohort
