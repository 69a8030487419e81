// The advantages of completions relative to their groups.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "config/visitor.h"

namespace cohort {

// Group-relative advantages: A = (r - mean) times a scale of the group.
//
// A sample with a NaN reward is left out of the statistics and has advantage 0. A group whose
// rewards are all equal_rewards() has advantages of exactly 0, since scaling would turn rounding
// errors into +-1; so has a reward that is the mean, and a mean that is rounding counts as 0.
// Permuting the samples of a group permutes its advantages, to the bit.

// True if two rewards differ by rounding only: by at most 1e-9 of the larger, or 2^-48, some
// roundings of a sum of terms near 1. 0.3 and 0.1 + 0.2 are equal; so are 0 and 0.1 + 0.2 - 0.3.
bool equal_rewards(double a, double b);
// Returns 0 for a sum of at most 1e-12 of the size of its terms, which is rounding; else the sum.
double without_rounding(double sum, double size);
// without_rounding() the sum over k of weights[k] * values[k]. Leaves out values of NaN; NaN if
// there is no other.
double weighted_sum(std::span<const double> weights, std::span<const double> values);

// Statistics of the n rewards of a group. std: of the group, over n - 1 as in TRL and verl;
// batch_std: of all rewards of the step.
struct GroupStatistics {
  double n = 0, mean = 0, std = 0, batch_std = 0;
};

enum class AdvantageScale { kGroup, kBatch, kNone, kLeaveOneOut, kMaxRl };

// A new scale is an enumerator and a line in kAdvantageScales: its name in a configuration, and its
// factor.
//   group          GRPO (Shao et al. 2024); the 1e-4 keeps groups of almost equal rewards from
//                  being scaled up to unit variance
//   batch          group means, and the std of the whole step ("Tricks or Traps?", Liu et al. 2025)
//   none           Dr. GRPO (Liu et al. 2025)
//   leave_one_out  r - mean of the others: RLOO (Ahmadian et al. 2024)
//   maxrl          (r - mean) / |mean|, 0 if the mean is 0: with rewards of 0 and 1, problems count
//                  more the less often they are solved (MaxRL, as in prime-rl)
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
    {AdvantageScale::kMaxRl, "maxrl",
     [](const GroupStatistics& group) { return group.mean == 0 ? 0 : 1 / std::abs(group.mean); }},
};

// rewards: `group_size` consecutive elements per group; batch_std: see GroupStatistics, for `batch`
// only. Throws Error unless the number of rewards is a multiple of group_size.
std::vector<double> group_advantages(std::span<const double> rewards, int64_t group_size,
                                     AdvantageScale scale, double batch_std = 0);
// Whitens advantages over the tokens of a step: sample i counts tokens[i] times, and
// A = (A - mean) / sqrt(variance + 1e-8) with the variance over n - 1 (REINFORCE++, Hu et al. 2025,
// as verl's masked_whiten). Samples without tokens keep their advantage, and so do all of them if
// there are fewer than two tokens or if all advantages are equal. Advantages of 0 stay exactly 0 if
// the mean is rounding.
void whiten_advantages(std::span<double> advantages, std::span<const double> tokens);
// The standard deviation (n - 1) of the rewards that are not NaN; 0 for fewer than two, and where
// they are equal_rewards().
double reward_std(std::span<const double> rewards);
// Brings the advantages whose reward is not NaN to mean 0 and a standard deviation of 1:
// (A - mean) / (std + 1e-4), the last step of GDPO. Equal ones become 0, and 0 stays exactly 0 if
// the mean is rounding, as it is for sums of the advantages of groups. The others become 0.
void standardize(std::span<double> advantages, std::span<const double> rewards);
// The q-quantile of values, linearly interpolated; minus infinity without values. 0 <= q <= 1.
double quantile(std::vector<double> values, double q);

}  // namespace cohort
