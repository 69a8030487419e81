// The sum of values in a balanced tree, ((0 + 1) + (2 + 3)) + ..., where a number that is no power
// of two is divided at the largest one below it: the order of all sums over ranks and lanes.
#pragma once

#include "core/host_device.h"

namespace cohort::kernels {

inline constexpr int kMaxPairwiseValues = 1024;

// T: a number, or several that are added independently. Of fewer than 2^kLevels values.
template <class T, int kLevels = 11>
class PairwiseSum {
 public:
  COHORT_HD void add(T value) {
    bool carries = true;
    for (int level = 0; level < kLevels; ++level) {
      if (!carries) continue;
      carries = (count_ >> level & 1) != 0;
      if (carries)
        value = partial_[level] + value;
      else
        partial_[level] = value;
    }
    ++count_;
  }
  // There is at least one value.
  COHORT_HD T total() const {
    T sum{};
    bool is_first = true;
    for (int level = 0; level < kLevels; ++level) {
      if ((count_ >> level & 1) == 0) continue;
      sum = is_first ? partial_[level] : partial_[level] + sum;
      is_first = false;
    }
    return sum;
  }

 private:
  T partial_[kLevels];  // sums of 2^level values each
  int count_ = 0;
};

}  // namespace cohort::kernels
