#include "runs/start.h"

#include "sys/files.h"
#include "trainers/across_ranks.h"

namespace cohort {

std::string why_finished(const TrainConfig& config, const TrainState& state) {
  if (!state.finished) return "";
  if (state.step >= config.steps) return str("step ", state.step, " of ", config.steps, " is done");
  const Json* last = state.report.find("last");
  if (last == nullptr || config.eval.stop_at <= 0 || config.trainer == TrainerType::kPretrain)
    return "";
  const double score = number_or_nan(last->at("score"));
  if (!(score >= config.eval.stop_at)) return "";
  return str("its last score, ", score, ", reached eval.stop_at: ", config.eval.stop_at);
}

int64_t other_plan(const TrainConfig& config, const TrainState& state) {
  int64_t planned = state.steps;
  if (planned == 0 && state.finished) planned = state.step;  // saved by an earlier version
  return planned == config.steps ? 0 : planned;
}

uint64_t checksum_of(const NamedTensors& tensors) {
  uint64_t sum = 0;
  for (const auto& [name, tensor] : tensors) {
    const Tensor host = tensor.contiguous().to(Device{});  // one at a time
    sum = checksum(name, sum);
    sum = checksum({static_cast<const char*>(host.raw()), static_cast<size_t>(host.nbytes())}, sum);
  }
  return sum;
}

void check_equal_ranks(Communicator& comm, const std::vector<RankPart>& parts) {
  const auto ranks = static_cast<size_t>(comm.size()), this_rank = static_cast<size_t>(comm.rank());
  std::vector<std::string> all(ranks * parts.size());
  for (size_t i = 0; i < parts.size(); ++i)
    all[this_rank * parts.size() + i] = str(parts[i].checksum);
  all = gather_texts(comm, all);
  for (size_t rank = 1; rank < ranks; ++rank)
    for (size_t i = 0; i < parts.size(); ++i)
      if (all[rank * parts.size() + i] != all[i])
        throw InputError(str("the ranks do not start alike: rank ", rank, " has other ",
                             parts[i].name,
                             " than rank 0; hint: all hosts must see the same files and run the "
                             "same build on the same kind of processor"));
}

}  // namespace cohort
