#include "job/forecast.h"

#include <cmath>

#include "distributed/dry_communicator.h"
#include "trainers/dry_update.h"

namespace cohort {
namespace {

double number(int64_t n) {
  return static_cast<double>(n);
}

// The work of a rank in a step.
struct RankWork {
  double tokens = 0, targets = 1, length = 0;  // length: of a sequence
  double balance = 1;
  int64_t updates = 1, micro_batches = 1;  // in the step, in an update
};

RankWork work_of(const TrainConfig& config, const StagePreview& stage, int64_t ranks) {
  const StepSize size = step_size(config, stage, ranks);
  const BatchConfig& batch = config.batch;
  RankWork out{.tokens = number(size.tokens),
               .targets = size.memory.targets,
               .length = stage.lengths.mean_sequence - 1,
               .updates = updates_per_step(config)};
  double pieces = number(batch.batch_size);   // sequences or groups that go to a rank whole
  if (batch.trainer == TrainerType::kGrpo) {  // a group's completions share the prompt
    const double prompt = number(stage.lengths.longest_prompt),
                 sampled = number(batch.completions_per_step()) *
                           (number(size.memory.rollout_length) - prompt),
                 rows = number(batch.prompts_per_step) * prompt + sampled;
    out.tokens = number(config.grpo.num_iterations) * rows;
    out.targets = sampled / rows;
    out.length = number(size.longest_sequence);
    pieces = number(batch.prompts_per_step) / number(config.grpo.num_minibatches);
  }
  out.balance = std::ceil(pieces / number(ranks)) * number(ranks) / pieces;
  out.tokens *= out.balance / number(ranks);
  out.micro_batches =
      static_cast<int64_t>(std::ceil(out.tokens / number(out.updates) /
                                     number(std::max<int64_t>(1, size.memory.micro_batch_tokens))));
  return out;
}

}  // namespace

UpdateTraffic update_traffic(const TrainConfig& config, const StagePreview& stage, int64_t ranks) {
  const Sharding sharding = config.optimizer.sharding;
  DryCommunicator comm(0, static_cast<int>(ranks));
  dry_update(stage.model, config.dtype, device_named(config.device, "device"), config.optimizer, 1,
             comm);
  UpdateTraffic out;
  for (const DryCommunicator::Call& call : comm.calls())
    if (call.text.starts_with("all_to_all"))
      out.gradients += call.sent;
    else if (call.text.starts_with("all_gather"))
      (is_sharded(sharding) ? out.weights : out.gradients) += call.sent;
    else
      ++out.exchanges;
  if (sharding == Sharding::kGradients)
    out.gradients *= work_of(config, stage, ranks).micro_batches;
  return out;
}

}  // namespace cohort
