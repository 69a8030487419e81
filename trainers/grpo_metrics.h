// The numbers of a GRPO step, under TRL's names where they mean the same.
#pragma once

#include <string>
#include <vector>

#include "rl/grpo.h"
#include "rl/reward.h"
#include "trainers/learner.h"
#include "trainers/reporter.h"

namespace cohort {

// What one rank sampled in a step, and what it is worth.
struct ScoredRollouts {
  Rollouts rollouts;
  RewardSet::Scores scores;
  std::vector<double> advantages;  // of each completion
};

class GrpoMetrics {
 public:
  explicit GrpoMetrics(Device device) : stats_(kernels::PolicyLossStats::zeros(device)) {}
  // What grpo_loss() adds each micro batch of the update under way to.
  Tensor& policy_stats() { return stats_; }
  // max |ratio - 1| over its tokens on this rank; waits for the device.
  double ratio_deviation() const;
  // Forgets its sums, but not that deviation: it is made once more.
  void restart_update();
  // After each optimiser update: reads its sums.
  void add_update(const Learner::Update& update);

  // Over all ranks; every rank calls it. What was not measured is NaN. docs/grpo.md, section 9, has
  // the names and their meaning.
  Metrics summary(Communicator& comm, const ScoredRollouts& scored,
                  const std::vector<std::string>& reward_names, const TrainConfig& config,
                  double learning_rate) const;

 private:
  Tensor stats_;
  kernels::PolicyLossStats total_;
  double first_ratio_deviation_ = 0, loss_ = 0, grad_norm_ = 0;
  int64_t updates_ = 0;
};

}  // namespace cohort
