// Group-relative advantages.
//
//   none           A = r - mean                  (Dr. GRPO, Liu et al. 2025)
//   group          A = (r - mean) / (std + 1e-4) (GRPO, Shao et al. 2024; std with n - 1, as TRL
//                                                and verl)
//   leave_one_out  A = r - mean of the others = (r - mean) n / (n - 1)
//                                                (RLOO, Ahmadian et al. 2024)
//
// A NaN reward leaves its sample out of the statistics and gives it advantage 0. A group whose
// rewards are all equal gets exact zeros (tested by equality: float noise must not become +-1).
// Permuting the samples of a group permutes its advantages, to the bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace cohort {

enum class AdvantageScale { kNone, kGroup, kLeaveOneOut };

// rewards: group after group, `group_size` each. Throws Error if the size does not divide.
std::vector<double> group_advantages(std::span<const double> rewards, int64_t group_size,
                                     AdvantageScale scale);

}  // namespace cohort
