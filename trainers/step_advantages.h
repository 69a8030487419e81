// The advantages of a step's completions over all ranks, and the tokens that have them.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "rl/group.h"
#include "rl/policy_batch.h"
#include "trainers/across_ranks.h"
#include "trainers/grpo_metrics.h"

namespace cohort {

struct GrpoStep;

// A number of each completion of the step, by its index, over all ranks.
std::vector<double> gather(Communicator& comm, std::span<const Group> groups,
                           const BatchConfig& batch,
                           const std::function<double(const ScoredCompletion&)>& number);

// The advantages of a step's completions by their rewards alone; with credit: turn, those of
// turns, as gather_returns() has them. `rewards`: the sums.
std::vector<double> relative_advantages(const GrpoStep& in, std::span<const Group> groups,
                                        std::span<const double> rewards);

// The advantages of a step's completions.
std::vector<double> step_advantages(const GrpoStep& in, std::span<Group> groups,
                                    std::span<const double> rewards);

// Sets an advantage of each of this rank's completions from such a list. With credit: turn it is
// the mean over the tokens, and turn_advantages are set too.
void scatter(std::span<Group> groups, std::span<const double> all, const GrpoSections& config,
             double ScoredCompletion::*number);

// The entropy below which a token of the step has no surrogate (top_entropy_quantile): a quantile
// over the tokens of all ranks that count in the loss. Beyond the 20/80 Rule, Wang et al. 2025.
double entropy_threshold(Communicator& comm, std::span<const Group> groups,
                         const GrpoSections& config);

// Clip-Cov and KL-Cov (Cui et al. 2025, arXiv 2505.22617, as in verl), for the fraction
// covariance_fraction of the tokens of the update over all ranks, one at least, by
// (A - mean A) (lp_old - mean lp_old). clip: an addressed draw from those where it is between 1 and
// 5 has no surrogate; kl: those where it is largest have old_distance_coef. `update`: its number,
// for the draws, which also decide between equal ones. Tokens without a surrogate are not chosen.
void limit_covariance(Communicator& comm, std::vector<PolicySequence>& sequences,
                      const GrpoSections& config, int64_t update);

}  // namespace cohort
