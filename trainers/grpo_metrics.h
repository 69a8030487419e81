// The numbers of a GRPO step, under TRL's names where they mean the same.
#pragma once

#include <string>
#include <vector>

#include "rl/grpo.h"
#include "rl/reward.h"
#include "trainers/learner.h"
#include "trainers/reporter.h"

namespace cohort {

class GrpoMetrics {
 public:
  explicit GrpoMetrics(Device device) : stats_(kernels::PolicyLossStats::zeros(device)) {}
  // What grpo_loss() adds each micro batch to.
  Tensor& policy_stats() { return stats_; }
  // After each micro batch's forward; entropy: [T]. Keeps the tensors and reads nothing.
  void add_batch(const Tensor& entropy, const PolicyBatch& batch);
  // After each optimiser update: reads the sums of its micro batches.
  void add_update(const Learner::Update& update);

  // Over all ranks; every rank calls it.
  //   reward, reward_std (mean of the groups'), rewards/NAME/mean and /std, frac_reward_zero_std
  //   (groups without a signal), ratio_deviation (max |ratio - 1| on the first minibatch: 0 unless
  //   sampler and trainer disagree), clip_ratio/low and /high, kl (to the reference), kl_old (to
  //   the sampling policy), entropy (nats per token), completions/mean_length, /max_length,
  //   /clipped_ratio (truncated share), loss, grad_norm, learning_rate, num_tokens.
  Metrics summary(Communicator& comm, const Rollouts& rollouts, const RewardSet::Scores& scores,
                  const std::vector<std::string>& reward_names,
                  const std::vector<double>& advantages, double learning_rate) const;

 private:
  struct Entropies {
    Tensor entropy, weight;
  };
  Tensor stats_;                    // of the update under way
  std::vector<Entropies> batches_;  // of the update under way
  kernels::PolicyLossStats total_;
  double first_ratio_deviation_ = 0, entropy_ = 0, loss_ = 0, grad_norm_ = 0;
  int64_t updates_ = 0;
};

}  // namespace cohort
