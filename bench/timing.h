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

// Median seconds of one call: at least `repeats` calls and `seconds` of them, after one to warm up.
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
  std::nth_element(times.begin(), times.begin() + static_cast<long>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

}  // namespace cohort::bench
