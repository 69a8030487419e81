// The numbers of a step by name: added up on each rank where they are computed, then put together
// over the ranks.
#pragma once

#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/trace.h"

namespace cohort {

class Communicator;

// Named numbers in the order in which they are shown and written; what was not measured is NaN.
class Metrics {
 public:
  using Entry = std::pair<std::string, double>;
  Metrics() = default;
  Metrics(std::initializer_list<Entry> entries) : entries_(entries) {}
  void add(std::string name, double value) { entries_.emplace_back(std::move(name), value); }
  std::optional<double> find(const std::string& name) const;
  double at(const std::string& name) const;  // throws Error naming it if there is none
  bool empty() const { return entries_.empty(); }
  const Entry& front() const { return entries_.front(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  std::vector<Entry> entries_;
};

// Sums that become mean and standard deviation (n - 1), also after a reduction over ranks. NaN
// values are left out; what was not measured is NaN.
struct Moments {
  double sum = 0, count = 0, squares = 0;
  void add(double v) {
    if (std::isnan(v)) return;
    count += 1;
    sum += v;
    squares += v * v;
  }
  double mean() const;
  double deviation() const;
};

// A metric is one line where it is computed, and every rank comes by that line, also with nothing
// to add.
class MetricSums {
 public:
  void add_sum(const std::string& name, double sum) { add(name, Kind::kSum, {.sum = sum}); }
  void add_mean(const std::string& name, const Moments& of) { add(name, Kind::kMean, of); }
  void add_mean(const std::string& name, double sum, double count) {
    add(name, Kind::kMean, {.sum = sum, .count = count});
  }
  void add_deviation(const std::string& name, const Moments& of) {
    add(name, Kind::kDeviation, of);
  }
  // Infinite where a rank has nothing to add; NaN if no rank has.
  void add_max(const std::string& name, double max) { add(name, Kind::kMax, {.sum = max}); }
  void add_min(const std::string& name, double min) { add(name, Kind::kMin, {.sum = -min}); }
  // What every rank knows by itself.
  void add_local(const std::string& name, double value) { add(name, Kind::kLocal, {.sum = value}); }

  // Over all ranks, in the order in which they were added; every rank calls it.
  Metrics reduce(Communicator& comm) const;

 private:
  enum class Kind { kSum, kMean, kDeviation, kMax, kMin, kLocal };
  struct Metric {
    std::string name;
    Kind kind;
    Moments moments;  // a sum, maximum, negative minimum or local value is its sum
    double value() const;
  };
  void add(const std::string& name, Kind kind, const Moments& of) {
    metrics_.push_back({name, kind, of});
  }
  std::vector<Metric> metrics_;
};

// Seconds between calls.
class Stopwatch {
 public:
  // Since the last call, or since the watch was made. A Trace shows it under the name of `phase`,
  // where there is one.
  double lap(const char* phase = nullptr) {
    const int64_t begin = std::exchange(last_, trace_clock());
    if (phase != nullptr) trace_phase(phase, begin, last_);
    return 1e-9 * static_cast<double>(last_ - begin);
  }

 private:
  int64_t last_ = trace_clock();
};

}  // namespace cohort
