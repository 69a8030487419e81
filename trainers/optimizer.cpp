#include "trainers/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/dry_run.h"

namespace cohort {

OptimizerBytes optimizer_bytes(const OptimizerConfig& config, const ModelConfig& model, DType dtype,
                               Device device) {
  DryRun run(device);
  const Transformer dry(model, dtype, std::nullopt, device);
  const int64_t before = run.stats().live_bytes;
  Optimizer optimizer(dry.parameters(), config);
  OptimizerBytes out{.memory = run.stats().live_bytes - before,
                     .pinned = run.pinned_stats().live_bytes};
  for (const TensorSource& source : optimizer.state_sources()) out.saved += source.make().nbytes();
  out.host = run.stats().peak_bytes - before - out.memory;
  optimizer.allocate_workspace();
  out.workspace = run.stats().live_bytes - before - out.memory;
  return out;
}

double scheduled_learning_rate(const OptimizerConfig& c, int64_t step, int64_t steps) {
  if (step < c.warmup_steps)
    return c.learning_rate * static_cast<double>(step + 1) /
           static_cast<double>(c.warmup_steps + 1);
  const int64_t span = std::max<int64_t>(1, steps - c.warmup_steps);
  const double progress =
      std::min(1.0, static_cast<double>(step - c.warmup_steps) / static_cast<double>(span));
  double decay = 1;
  if (c.lr_schedule == Schedule::kCosine) decay = 0.5 * (1 + std::cos(std::numbers::pi * progress));
  if (c.lr_schedule == Schedule::kLinear) decay = 1 - progress;
  return c.min_learning_rate + (c.learning_rate - c.min_learning_rate) * decay;
}

}  // namespace cohort
