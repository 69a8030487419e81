// Medians of repeated timings.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace cohort {
// The purpose of rng_stream() for random inputs.
inline constexpr uint64_t kBenchPurpose = 6;
}  // namespace cohort

namespace cohort::bench {

inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<long>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Median seconds of one call: at least `repeats` calls and `seconds` in total, after a warm-up
// call.
template <class F>
double median_seconds(F&& fn, int repeats = 5, double seconds = 0.5) {
  using Clock = std::chrono::steady_clock;
  fn();
  std::vector<double> times;
  const auto start = Clock::now();
  while (static_cast<int>(times.size()) < repeats ||
         std::chrono::duration<double>(Clock::now() - start).count() < seconds) {
    const auto begin = Clock::now();
    fn();
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return median(times);
}

}  // namespace cohort::bench
