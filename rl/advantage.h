// Group-relative advantages: A = (r - mean) times a factor of the group.
//
// A NaN reward leaves its sample out of the statistics and gives it advantage 0. A group whose
// rewards are all equal, to 1e-9 of the largest, gets exact zeros: rounding must not become +-1.
// Permuting the samples of a group permutes its advantages, to the bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/config.h"

namespace cohort {

// Of the n rewards of a group; std with n - 1, as TRL and verl; batch_std: that of all rewards of
// the step.
struct GroupStatistics {
  double n = 0, std = 0, batch_std = 0;
};

// A new scale is a line here: its enumerator, its name in a configuration, and its factor.
//   group          GRPO (Shao et al. 2024); the 1e-4 keeps groups that almost agree from being
//                  blown up to unit scale
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

// rewards: group after group, `group_size` each; batch_std: see GroupStatistics, for `batch` only.
// Throws Error if the size does not divide.
std::vector<double> group_advantages(std::span<const double> rewards, int64_t group_size,
                                     AdvantageScale scale, double batch_std = 0);
// The standard deviation (n - 1) of the rewards that are not NaN; 0 for fewer than two.
double reward_std(std::span<const double> rewards);

}  // namespace cohort
