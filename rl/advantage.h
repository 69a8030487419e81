// Group-relative advantages: A = (r - mean) times a scale of the group.
//
// A sample with a NaN reward is left out of the statistics and has advantage 0. A group whose
// rewards are all equal (to 1e-9 of the largest) has advantages of exactly 0, since scaling would
// turn rounding errors into +-1. Permuting the samples of a group permutes its advantages, to the
// bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/visitor.h"

namespace cohort {

// Statistics of the n rewards of a group. std: of the group, over n - 1 as in TRL and verl;
// batch_std: of all rewards of the step.
struct GroupStatistics {
  double n = 0, std = 0, batch_std = 0;
};

enum class AdvantageScale { kGroup, kBatch, kNone, kLeaveOneOut };

// A new scale is an enumerator and a line in kAdvantageScales: its name in a configuration, and its
// factor.
//   group          GRPO (Shao et al. 2024); the 1e-4 keeps groups of almost equal rewards from
//                  being scaled up to unit variance
//   batch          group means, and the std of the whole step ("Tricks or Traps?", Liu et al. 2025)
//   none           Dr. GRPO (Liu et al. 2025)
//   leave_one_out  r - mean of the others: RLOO (Ahmadian et al. 2024)
struct AdvantageScaleEntry {
  AdvantageScale value;
  const char* name;
  double (*factor)(const GroupStatistics& group);
};
inline constexpr AdvantageScaleEntry kAdvantageScales[] = {
    {AdvantageScale::kGroup, "group",
     [](const GroupStatistics& group) { return 1 / (group.std + 1e-4); }},
    {AdvantageScale::kBatch, "batch",
     [](const GroupStatistics& group) { return 1 / (group.batch_std + 1e-4); }},
    {AdvantageScale::kNone, "none", [](const GroupStatistics&) { return 1.0; }},
    {AdvantageScale::kLeaveOneOut, "leave_one_out",
     [](const GroupStatistics& group) { return group.n / (group.n - 1); }},
};

// rewards: `group_size` consecutive elements per group; batch_std: see GroupStatistics, for `batch`
// only. Throws Error unless the number of rewards is a multiple of group_size.
std::vector<double> group_advantages(std::span<const double> rewards, int64_t group_size,
                                     AdvantageScale scale, double batch_std = 0);
// The standard deviation (n - 1) of the rewards that are not NaN; 0 for fewer than two.
double reward_std(std::span<const double> rewards);

}  // namespace cohort
