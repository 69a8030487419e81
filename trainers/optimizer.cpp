#include "trainers/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "core/dry_run.h"
#include "distributed/dry_communicator.h"
#include "trainers/sharded_weights.h"

namespace cohort {

OptimizerBytes optimizer_bytes(const OptimizerConfig& config, const ModelConfig& model, DType dtype,
                               Device device, int64_t ranks) {
  DryRun run(device);
  const Transformer dry(model, dtype, std::nullopt, device);
  const int64_t before = run.stats().live_bytes;
  const auto live = [&] { return run.stats().live_bytes - before; };
  Optimizer optimizer(dry.parameters(), config, 0,
                      is_sharded(config.sharding)
                          ? Slices::of_rank(0, static_cast<int>(ranks), config.reduction_lanes)
                          : Slices());
  OptimizerBytes out{.memory = live(), .pinned = run.pinned_stats().live_bytes};
  std::vector<int64_t> units(dry.parameters().units().size());
  for (size_t unit = 0; unit < units.size(); ++unit)
    for (const TensorSource& source : optimizer.state_sources(unit)) units[unit] += source.bytes();
  out.saved = std::accumulate(units.begin(), units.end(), int64_t{0});
  if (optimizer.is_sharded()) {
    out.host = std::ranges::max(units);
  } else {
    for (const TensorSource& source : optimizer.state_sources()) source.make();
    out.host = run.stats().peak_bytes - before - out.memory;
  }
  DryCommunicator comm(0, static_cast<int>(ranks));
  SideStream side;
  ShardedGradients gradients(dry.parameters(), comm, side, config.sharding, config.reduction_lanes);
  {
    gradients.allocate();
    const std::vector<Tensor> most = gradients.allocate_most();
    out.gradients = live() - out.memory;
    gradients.free();
  }
  optimizer.allocate_workspace();
  out.workspace = live() - out.memory;
  if (config.sharding != Sharding::kFull || ranks == 1) return out;
  ShardedWeights weights(dry.parameters(), comm, side, gradients);
  weights.allocate();
  out.weights = live() - out.memory - out.workspace;
  if (device.is_cuda()) out.released = weights.whole_bytes();
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
