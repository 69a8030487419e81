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

// A new scale is a line here: its enumerator, its name in a configuration, and its factor.
//   group          GRPO (Shao et al. 2024); the 1e-4 keeps groups of almost equal rewards from
//                  being scaled up to unit variance
//   batch          group means, and the std of the whole step ("Tricks or Traps?", Liu et al. 2025)
//   none           Dr. GRPO (Liu et al. 2025)
//   leave_one_out  r - mean of the others: RLOO (Ahmadian et al. 2024)
#define COHORT_ADVANTAGE_SCALES(A)                 \
  A(kGroup, "group", 1 / (group.std + 1e-4))       \
  A(kBatch, "batch", 1 / (group.batch_std + 1e-4)) \
  A(kNone, "none", 1.0)                            \
  A(kLeaveOneOut, "leave_one_out", group.n / (group.n - 1))

#define COHORT_ENUMERATOR(type, name, factor) type,
enum class AdvantageScale { COHORT_ADVANTAGE_SCALES(COHORT_ENUMERATOR) };
#undef COHORT_ENUMERATOR

#define COHORT_SCALE_NAME(type, name, factor) {AdvantageScale::type, name},
inline constexpr EnumName<AdvantageScale> kAdvantageScaleNames[] = {
    COHORT_ADVANTAGE_SCALES(COHORT_SCALE_NAME)};
#undef COHORT_SCALE_NAME

// rewards: `group_size` consecutive elements per group; batch_std: see GroupStatistics, for `batch`
// only. Throws Error unless the number of rewards is a multiple of group_size.
std::vector<double> group_advantages(std::span<const double> rewards, int64_t group_size,
                                     AdvantageScale scale, double batch_std = 0);
// The standard deviation (n - 1) of the rewards that are not NaN; 0 for fewer than two.
double reward_std(std::span<const double> rewards);

}  // namespace cohort
